"""``adaptive_handle`` when a transfer ends badly: the error is told, nothing is learned, nothing stays in flight."""

from __future__ import annotations

import errno
import gc
import json
import os
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import nvme_ops
from nvme_ops import adaptive_handle
from nvme_ops.adaptive import dictionary
from nvme_ops.adaptive.handle import MODE
from nvme_ops.tune import store as kept
from tests.adaptive.conftest import OPS
from tests.conftest import MIB, REPOSITORY, forked, give_up_root, in_child, open_to_all, round_trip


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


@pytest.mark.usefixtures("no_collection")
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


def test_of_processes_that_end_together_none_loses_what_the_others_learned(folder: Path, tmp_path: Path) -> None:
    sizes = [MIB, 4 * MIB, 16 * MIB]
    ready = tmp_path / "ready"
    ready.mkdir()

    def learn(number: int) -> None:
        with adaptive_handle(folder) as handle:
            data = nvme_ops.empty(sizes[number], dtype=torch.uint8)
            while any(one.exploring or not one.explorations for one in handle.learned()) or not handle.learned():
                handle.sync_pwrite(data, folder / f"of {number}", 0)
            (ready / str(number)).touch()
            deadline = time.monotonic() + 60
            while len(list(ready.iterdir())) < len(sizes) and time.monotonic() < deadline:
                time.sleep(0.001)

    with forked(len(sizes), learn):
        pass
    with adaptive_handle(folder) as handle:
        known = {one.most_bytes for one in handle.learned()}
    assert known == set(sizes)


def test_without_a_home_folder_it_says_so(folder: Path) -> None:
    program = f"import nvme_ops; print(nvme_ops.adaptive_handle({str(folder)!r}).explain())"
    environment = {**os.environ, "HOME": "relative", "XDG_CACHE_HOME": "", "TORCH_EXTENSIONS_DIR": OPS}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, cwd=REPOSITORY
    )
    assert "not kept for the next program: HOME='relative'" in done.stdout, done.stderr


def test_what_could_not_be_saved_is_saved_later(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("no folder")
    with adaptive_handle(folder) as handle:
        for _ in range(30):
            handle.sync_pwrite(torch.zeros(2 * MIB, dtype=torch.uint8), folder / "used", 0)
    assert "not kept for the next program: " in handle.explain()
    (tmp_path / "cache").unlink()
    handle.close()
    assert "kept in " in handle.explain()
    dictionary.forget()
    assert adaptive_handle(folder).learned()


def test_a_damaged_file_is_replaced_by_a_program_to_which_warnings_are_errors(folder: Path) -> None:
    with adaptive_handle(folder) as handle:
        for _ in range(30):
            handle.sync_pwrite(torch.zeros(2 * MIB, dtype=torch.uint8), folder / "used", 0)
        path = kept.path_of(handle._identity, dictionary.SECTION)
        path.parent.mkdir(parents=True)
        path.write_text("{")
        path.chmod(0o600)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            handle.close()
    assert json.loads(path.read_text())["classes"]


def test_frozen_it_says_that_nothing_is_kept_where_it_may_not_read(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cache" / "nvme_ops").mkdir(mode=0o700, parents=True)
    monkeypatch.setenv(MODE, "frozen")

    def child() -> None:
        give_up_root()
        assert "frozen: nothing is kept for this device in " in adaptive_handle(folder).explain()

    in_child(child)


def test_a_handle_that_is_freed_while_another_is_saved(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The collector may free handles at any moment."""
    made = []
    for number, size in enumerate((MIB, 4 * MIB)):
        monkeypatch.setattr(dictionary, "_dictionaries", {})
        made.append(adaptive_handle(folder))
        data = nvme_ops.empty(size, dtype=torch.uint8)
        for _ in range(30):
            made[-1].sync_pwrite(data, folder / f"of {number}", 0)
    save = kept.save_section

    def freeing(*given: Any) -> Path:
        made.clear()
        gc.collect()
        return save(*given)

    monkeypatch.setattr(kept, "save_section", freeing)
    made.pop().close()
    monkeypatch.setattr(dictionary, "_dictionaries", {})
    with adaptive_handle(folder) as handle:
        assert {one.most_bytes for one in handle.learned()} == {MIB, 4 * MIB}
