"""Claims: who is waited for."""

from __future__ import annotations

import contextlib
import threading

import pytest

from nvme_ops.storage.store import Claims
from tests.conftest import in_threads


def test_what_ctrl_c_left_claimed_is_not_waited_for_by_the_same_thread() -> None:
    claims = Claims(threading.RLock())
    left = claims.take("key")  # and the interrupt came before the block
    with claims.take("key"):
        pass
    assert claims.close()
    del left


def test_what_ctrl_c_left_claimed_ends_with_the_frames_that_it_ends() -> None:
    claims = Claims(threading.RLock())

    def interrupted() -> None:
        claim = claims.take("key")
        raise KeyboardInterrupt
        with claim:
            pass

    with contextlib.suppress(KeyboardInterrupt):
        interrupted()
    in_threads(lambda _: claims.take("key"), 1)


def test_a_signal_handler_leaves_claimed_what_it_has_interrupted() -> None:
    claims = Claims(threading.RLock())
    order: list[str] = []

    def work(_: int) -> None:
        with claims.take("key"):
            order.append("another thread")

    with claims.take("key"):
        with claims.take("key"):
            pass
        thread = threading.Thread(target=work, args=[0])
        thread.start()
        thread.join(0.3)
        order.append("end of the block")
    thread.join()
    assert order == ["end of the block", "another thread"]


def test_what_another_thread_is_at_is_waited_for() -> None:
    claims = Claims(threading.RLock())
    taken, go = threading.Event(), threading.Event()
    order: list[str] = []

    def work() -> None:
        with claims.take("key"):
            taken.set()
            go.wait(30)
            order.append("given back")

    thread = threading.Thread(target=work)
    thread.start()
    assert taken.wait(30)
    threading.Timer(0.1, go.set).start()
    assert claims.close()
    order.append("closed")
    thread.join()
    assert order == ["given back", "closed"]
    with pytest.raises(ValueError, match="closed"):
        claims.take("key")
