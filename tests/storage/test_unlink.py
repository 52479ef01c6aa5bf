"""Large files that lose their names: nobody waits until their blocks are free, and nothing keeps them longer."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import nvme_ops
from nvme_ops.storage.files import unlink, wait_until_free
from tests.conftest import MIB, in_child

LARGE = {"a": torch.ones(5 * MIB)}


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Closing the files that lost their names takes until the event."""
    close, free = os.close, threading.Event()

    def wait_and_close(fd: int) -> None:
        if threading.current_thread().name == "nvme_ops.storage.files":
            assert free.wait(60)
        close(fd)

    monkeypatch.setattr(os, "close", wait_and_close)
    yield free
    free.set()
    wait_until_free()


def held(folder: Path) -> int:
    """Files of the folder without a name that this process has open."""
    names = (os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd"))
    return sum(name.startswith(f"{folder}/") and name.endswith(" (deleted)") for name in names)


def test_a_save_does_not_wait_until_what_it_replaced_is_free(folder: Path, slow: threading.Event) -> None:
    path = folder / "a.safetensors"
    nvme_ops.save(LARGE, path)
    assert held(folder) == 0
    nvme_ops.save({"a": LARGE["a"] + 1}, path)
    assert held(folder) == 1
    assert bool((nvme_ops.load(path, mmap=False)["a"] == 2).all())
    for _ in range(2):
        nvme_ops.save({**LARGE, "b": LARGE["a"] + 1}, folder, format="sharded")
    assert held(folder) == 2
    slow.set()
    wait_until_free()
    assert held(folder) == 0


@pytest.mark.usefixtures("slow")
def test_small_files_and_those_with_another_name_are_no_matter(folder: Path) -> None:
    for _ in range(2):
        nvme_ops.save({"a": torch.ones(3)}, folder / "small.pt")
    nvme_ops.save(LARGE, folder / "linked.pt")
    os.link(folder / "linked.pt", folder / "other.pt")
    nvme_ops.save(LARGE, folder / "linked.pt")
    assert held(folder) == 0


def test_a_save_waits_where_space_is_scarce(
    folder: Path, slow: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = folder / "a.safetensors"
    for _ in range(2):
        nvme_ops.save(LARGE, path)
    space = os.statvfs(folder)
    scarce = type(space)([*space[:4], 30 * MIB // space.f_frsize, *space[5:]])
    monkeypatch.setattr(os, "statvfs", lambda _: scarce)
    saving = threading.Thread(target=nvme_ops.save, args=(LARGE, path))
    saving.start()
    saving.join(0.2)
    assert saving.is_alive()
    slow.set()
    saving.join(60)
    assert not saving.is_alive()


def test_a_forked_child_keeps_no_blocks(folder: Path) -> None:
    for _ in range(2):
        nvme_ops.save(LARGE, folder / "a.safetensors")

    def child() -> None:
        assert held(folder) == 0
        nvme_ops.save(LARGE, folder / "a.safetensors")
        wait_until_free()
        assert held(folder) == 0

    in_child(child)


def test_without_a_thread_it_is_freed_at_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    path = folder / "a.safetensors"
    nvme_ops.save(LARGE, path)
    monkeypatch.setattr(threading.Thread, "start", refuse)
    unlink(str(path))
    assert held(folder) == 0
    wait_until_free()
