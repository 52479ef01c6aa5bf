"""``JoinedOperation``: the end of several transfers, which happens once, whoever learns of it first."""

from __future__ import annotations

import gc
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from nvme_ops import IoFuture, aio_handle
from nvme_ops.io.file import shared_handle
from nvme_ops.storage.joined import Finish, JoinedOperation, as_operation
from tests.conftest import in_threads, pattern
from tests.contract.faulty import Faulty


def writes(folder: Path, count: int = 3, handle: aio_handle | None = None) -> list[IoFuture]:
    return [(handle or shared_handle()).submit_pwrite(pattern(10_000), folder / str(number)) for number in range(count)]


def joined(transfers: list[IoFuture], finish: Finish = lambda _: None) -> IoFuture:
    return IoFuture(as_operation(JoinedOperation(transfers, finish)))


def test_the_end_happens_once_among_threads_and_calls_back_each_once(folder: Path, eager_switches: None) -> None:
    for _ in range(8):
        ended: list[Any] = []
        operation = JoinedOperation(writes(folder), ended.append)
        called = threading.Semaphore(0)

        def ask(number: int, operation: JoinedOperation = operation, called: threading.Semaphore = called) -> None:
            if number % 2:
                assert operation.wait(None)
            operation.add_callback(called.release)
            operation.done()

        in_threads(ask, 4)
        assert all(called.acquire(timeout=60) for _ in range(4))
        assert ended == [None]
        assert not called.acquire(blocking=False)


def test_what_finish_raises_is_the_failure_but_ctrl_c_is_made_up_for(folder: Path) -> None:
    raised: list[BaseException] = [ValueError("second"), KeyboardInterrupt("first")]

    def finish(_: object) -> None:
        raise raised.pop()

    future = joined(writes(folder), finish)
    with pytest.raises(KeyboardInterrupt, match="first"):
        future.result()
    for _ in range(2):
        with pytest.raises(ValueError, match="second"):
            future.result()


def test_a_failure_keeps_nothing_alive_that_its_callers_have(folder: Path) -> None:
    def finish(_: object) -> None:
        raise ValueError("damaged")

    def learn(future: IoFuture) -> weakref.ref[torch.Tensor]:
        tensor = torch.zeros(1)
        while not future.done():
            pass
        return weakref.ref(tensor)

    future = joined(writes(folder), finish)
    assert learn(future)() is None
    with pytest.raises(ValueError, match="damaged"):
        future.result()


def test_what_is_done_at_the_end_may_ask_for_it(folder: Path) -> None:
    """As a signal handler or the garbage collector may in the middle of it."""
    calls: list[bool] = []

    def finish(_: object) -> None:
        calls.extend([operation.done(), operation.wait(0.1)])

    operation = JoinedOperation(writes(folder), finish)
    assert operation.wait(None)
    assert calls == [False, False]


def test_thousands_that_have_ended_call_back_once(folder: Path) -> None:
    ended, called = [joined(writes(folder, 1)) for _ in range(1500)], list[IoFuture]()
    nbytes = sum(transfer.result() for transfer in ended)
    future = joined(ended)
    future.add_done_callback(called.append)
    assert future.result() == nbytes
    assert called == [future]


def test_a_timeout_leaves_it_to_go_on(folder: Path) -> None:
    handle = Faulty("write", "hold")
    future = joined([*writes(folder, 1), *writes(folder, 1, handle)])
    for timeout in (0, 0.01, -1):
        with pytest.raises(TimeoutError):
            future.result(timeout)
    with pytest.raises(ValueError, match="nan"):
        future.result(float("nan"))
    handle.go.set()
    assert future.result(60) == 20_000


def test_a_failure_that_nobody_asks_for_is_reported(folder: Path, unraisable: list[Any]) -> None:
    for asked in (True, False):
        future = joined([shared_handle().submit_pread(torch.zeros(10), folder / "none")])
        while not future.done():
            pass
        if asked:
            future.exception()
        del future
        gc.collect()
        assert [type(error) for error in unraisable] == ([] if asked else [FileNotFoundError])
