"""One call moves one file, whatever becomes of its name meanwhile."""

from __future__ import annotations

import os
import resource
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.conftest import KIB, HandleFactory, in_child, pattern, store

SIZE = 512 * KIB


@pytest.fixture
def replaced(folder: Path) -> tuple[Path, Callable[[], None]]:
    """A file that another thread replaces all the time, by one full of 1, of 2, ...; and how to end that."""
    path, stop = folder / "file", threading.Event()
    for number in (1, 2):
        store(folder / f"old{number}", torch.full((SIZE,), number, dtype=torch.uint8))
    os.link(folder / "old1", path)

    def replace() -> None:
        turn = 0
        while not stop.is_set():
            turn += 1
            os.link(folder / f"old{turn % 2 + 1}", folder / "next")
            os.rename(folder / "next", path)
            if os.path.exists(folder / "next"):  # the same file already
                os.unlink(folder / "next")

    thread = threading.Thread(target=replace)
    thread.start()

    def end() -> None:
        stop.set()
        thread.join()

    return path, end


def test_a_read_never_mixes_two_files(make_handle: HandleFactory, replaced: tuple[Path, Callable[[], None]]) -> None:
    path, end = replaced
    handle, back = make_handle(block_size=65536, intra_op_parallelism=4), torch.zeros(SIZE, dtype=torch.uint8)
    mixed = 0
    try:
        for _ in range(150):
            handle.sync_pread(back, path)
            mixed += int(back.min() != back.max())
    finally:
        end()
    assert mixed == 0


def test_many_parts_named_in_any_order_are_one_file_each(
    make_handle: HandleFactory, replaced: tuple[Path, Callable[[], None]], folder: Path
) -> None:
    path, end = replaced
    handle, back = make_handle(intra_op_parallelism=2), torch.zeros(16, 4096, dtype=torch.uint8)
    other = store(folder / "other", torch.zeros(SIZE, dtype=torch.uint8))
    mixed = 0
    try:
        for _ in range(150):
            handle.submit_preadv(back, [path, other] * 8, [i * 4096 for i in range(16)]).result()
            mixed += int(back[::2].min() != back[::2].max())
            assert not back[1::2].any()
    finally:
        end()
    assert mixed == 0


def test_a_write_goes_to_the_file_that_it_found(make_handle: HandleFactory, folder: Path) -> None:
    """Nothing is made under a name that was removed while the call was under way."""
    handle, data = make_handle(block_size=4096, queue_depth=1, intra_op_parallelism=4), pattern(SIZE)
    lost = 0
    for round_ in range(60):
        path = folder / f"file{round_}"
        path.write_bytes(b"")
        with path.open("rb") as file:
            future = handle.submit_pwrite(data, path, 0)
            while os.fstat(file.fileno()).st_size == 0 and not future.done():
                pass
            path.unlink()
            assert future.result() == SIZE
            lost += file.read() != data.numpy().tobytes()
        assert not path.exists()
    assert lost == 0


def test_calls_by_descriptor_share_one_of_ours(make_handle: HandleFactory, folder: Path) -> None:
    data = pattern(1500 * 100).view(1500, 100)
    path = folder / "file"

    def cramped() -> None:
        handle = make_handle(cache="direct")
        resource.setrlimit(resource.RLIMIT_NOFILE, (200, 200))
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT)
        for number, row in enumerate(data):
            handle.async_pwrite(row, descriptor, number * 100)
        os.close(descriptor)
        assert handle.wait() == 1500

    in_child(cramped)
    assert path.read_bytes() == data.numpy().tobytes()


def test_a_descriptor_that_names_another_file_by_now(make_handle: HandleFactory, folder: Path) -> None:
    handle, backs = make_handle(), [torch.zeros(5000, dtype=torch.uint8) for _ in range(20)]
    for number in range(20):
        descriptor = os.open(store(folder / str(number), pattern(5000, number)), os.O_RDONLY)
        handle.async_pread(backs[number], descriptor)
        os.close(descriptor)  # the next one gets its number
    assert handle.wait() == 20
    for number, back in enumerate(backs):
        assert torch.equal(back, pattern(5000, number))
