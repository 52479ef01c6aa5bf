"""``adaptive_handle`` when a transfer ends badly: the error is told, nothing is learned, nothing stays in flight."""

from __future__ import annotations

import errno
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from nvme_ops import adaptive_handle
from nvme_ops.adaptive import dictionary
from tests.conftest import MIB, give_up_root, in_child, open_to_all, round_trip


@pytest.fixture(autouse=True)
def nothing_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    dictionary.forget()


def check(handle: adaptive_handle, folder: Path) -> None:
    """It goes on as if nothing had happened."""
    assert all(tried.cost is None for one in handle.learned() for tried in one.tools)
    round_trip(handle, folder / "small", 100)
    assert "crowd" not in {one.concurrency for one in handle.learned()}


def test_a_full_disk(make_file_system: Callable[..., Path]) -> None:
    folder = make_file_system(64 * MIB)
    handle, data = adaptive_handle(folder), torch.zeros(128 * MIB, dtype=torch.uint8)
    for _ in range(3):
        with pytest.raises(OSError, match="No space left") as told:
            handle.sync_pwrite(data, folder / "large")
        assert told.value.errno == errno.ENOSPC
        with pytest.raises(OSError, match="No space left"):
            handle.submit_pwrite(data, folder / "large").result()
        (folder / "large").unlink()
    check(handle, folder)


def test_a_signal_whose_handler_raises(folder: Path) -> None:
    def interrupt(*_: object) -> None:
        raise InterruptedError("made up")

    def work() -> None:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        for _ in range(100):  # however fast the device is
            handle.sync_pwrite(data, folder / "large", 0)

    handle, data = adaptive_handle(folder), torch.zeros(1 << 30, dtype=torch.uint8)
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        with pytest.raises(InterruptedError, match="made up"):
            work()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    round_trip(handle, folder / "small", 100)
    assert "crowd" not in {one.concurrency for one in handle.learned()}


def test_another_user_leaves_what_the_first_has_learned(folder: Path) -> None:
    with adaptive_handle(folder) as handle:
        for _ in range(30):
            handle.sync_pwrite(torch.zeros(2 * MIB, dtype=torch.uint8), folder / "used", 0)
    (folder / "others").mkdir()
    open_to_all(folder / "others")

    def child() -> None:
        give_up_root()
        dictionary.forget()
        other = adaptive_handle(folder)
        for size in (100, 2 * MIB):
            for _ in range(30):
                round_trip(other, folder / "others" / "file", size)
        other.close()

    in_child(child)
    dictionary.forget()
    assert adaptive_handle(folder).learned()
