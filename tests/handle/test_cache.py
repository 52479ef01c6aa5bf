"""Direct transfers and the page cache agree on what a file holds."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import pytest
import torch

from tests.conftest import MIB, HandleFactory, contents, pattern, store

MODES = ["auto", "direct", "buffered"]


@pytest.mark.parametrize("cache", MODES)
@pytest.mark.parametrize("skew", [0, 1])
def test_a_read_sees_what_was_just_written_to_the_cache(
    make_handle: HandleFactory, folder: Path, cache: str, skew: int
) -> None:
    handle, path = make_handle(cache=cache, block_size=65536), folder / "file"
    back = handle.new_cpu_locked_tensor(MIB + 10, torch.empty(0, dtype=torch.uint8))[skew : skew + MIB]
    for i in range(5):
        path.write_bytes(pattern(MIB, i).numpy().tobytes())  # dirty, not synced
        handle.sync_pread(back, path)
        assert torch.equal(back, pattern(MIB, i))
        with path.open("r+b") as file:
            file.seek(123_456)
            file.write(b"changed")
        handle.sync_pread(back, path)
        assert bytes(back[123_456:123_463].tolist()) == b"changed"


@pytest.mark.parametrize("cache", MODES)
def test_a_file_partly_in_the_cache(make_handle: HandleFactory, folder: Path, cache: str) -> None:
    data = pattern(4 * MIB + 99)
    path = store(folder / "file", data)
    fd = os.open(path, os.O_RDWR)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
    for offset in (0, 70_000, MIB, MIB + 4096, 3 * MIB + 1, 4 * MIB):
        os.pread(fd, 4096, offset)
    os.pwrite(fd, data[2 * MIB : 2 * MIB + 5].numpy().tobytes(), 2 * MIB)  # one dirty page
    for lanes in (1, 3):
        back = torch.zeros_like(data)
        make_handle(cache=cache, block_size=65536, intra_op_parallelism=lanes).sync_pread(back, path)
        assert torch.equal(back, data)
    os.close(fd)


@pytest.mark.parametrize("cache", MODES)
def test_the_cache_sees_what_was_written_past_it(make_handle: HandleFactory, folder: Path, cache: str) -> None:
    handle, path = make_handle(cache=cache), store(folder / "file", pattern(MIB, 1))
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as view:
        assert view[:] == pattern(MIB, 1).numpy().tobytes()  # all cached
        for i, (size, offset) in enumerate([(MIB, 0), (4096, 4096), (100_000, 333), (1, 5000), (512, 512)]):
            data = pattern(size, i + 10)
            handle.sync_pwrite(data, path, offset)
            assert view[offset : offset + size] == data.numpy().tobytes()
            assert torch.equal(contents(path)[offset : offset + size], data)


@pytest.mark.parametrize("writing", MODES)
@pytest.mark.parametrize("reading", MODES)
def test_modes_may_be_mixed(make_handle: HandleFactory, folder: Path, writing: str, reading: str) -> None:
    writer, reader, path = make_handle(cache=writing), make_handle(cache=reading), folder / "file"
    for i in range(4):
        data = pattern(300_000 + i, i)
        back = torch.zeros_like(data)
        writer.sync_pwrite(data, path)
        reader.sync_pread(back, path)
        assert torch.equal(back, data)


def resident(path: Path) -> int:
    """Pages of the file in the page cache, by mincore(2)."""
    import ctypes

    size = path.stat().st_size
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) as view:
        pages = (ctypes.c_ubyte * ((size + 4095) // 4096))()
        anchor = ctypes.c_char.from_buffer(view)
        library = ctypes.CDLL(None, use_errno=True)
        address = ctypes.c_void_p(ctypes.addressof(anchor))
        failed = library.mincore(address, ctypes.c_size_t(size), pages)
        del anchor
        assert not failed
        return sum(page & 1 for page in pages)


def test_only_buffered_reads_fill_the_cache(make_handle: HandleFactory, folder: Path) -> None:
    path, back = store(folder / "file", pattern(MIB)), torch.zeros(MIB, dtype=torch.uint8)
    if resident(path):
        pytest.skip("the file system keeps the file in its cache")
    for cache in ("auto", "direct"):
        make_handle(cache=cache).sync_pread(back, path)
        assert resident(path) == 0
    make_handle(cache="buffered").sync_pread(back, path)
    assert resident(path) == 256
