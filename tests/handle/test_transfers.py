"""Any size at any offset arrives whole, and nothing around it changes."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nvme_ops import aio_handle
from tests.conftest import GIB, MIB, HandleFactory, contents, pattern, store

BLOCK = 65536
SIZES = [0, 1, 511, 512, 513, 4095, 4096, 4097, BLOCK - 1, BLOCK, BLOCK + 1, 7 * BLOCK + 4097]
OFFSETS = [0, 1, 512, 4097, BLOCK - 1]


@pytest.mark.parametrize("lanes", [1, 3])
@pytest.mark.parametrize("size", SIZES)
def test_whole_files(make_handle: HandleFactory, folder: Path, size: int, lanes: int) -> None:
    handle, data, path = make_handle(block_size=BLOCK, intra_op_parallelism=lanes), pattern(size), folder / "file"
    assert handle.sync_pwrite(data, path) == 1
    assert path.stat().st_size == size
    assert torch.equal(contents(path), data)
    back = torch.zeros_like(data)
    assert handle.sync_pread(back, path) == 1
    assert torch.equal(back, data)


@pytest.mark.parametrize("cache", ["auto", "direct", "buffered"])
@pytest.mark.parametrize("skew", [0, 1])
def test_sizes_at_offsets(make_handle: HandleFactory, folder: Path, cache: str, skew: int) -> None:
    handle, path = make_handle(block_size=BLOCK, queue_depth=4, cache=cache), folder / "file"
    old, new = pattern(10 * BLOCK, 1), pattern(10 * BLOCK, 2)
    buffer = handle.new_cpu_locked_tensor(8 * BLOCK + 512, old)
    expected = old.clone()
    store(path, old)
    for i, size in enumerate(SIZES[1:]):
        for offset in OFFSETS:
            piece = buffer[skew : skew + size]
            piece.copy_(new[i : i + size])
            handle.async_pwrite(piece, path, offset)
            handle.wait()
            expected[offset : offset + size] = piece
            piece.zero_()
            handle.sync_pread(piece, path, offset)
            assert torch.equal(piece, expected[offset : offset + size])
    assert torch.equal(contents(path), expected)


@pytest.mark.parametrize("offset", [4 * GIB - 1, 4 * GIB, 5 * GIB + 4097])
def test_offsets_beyond_32_bits(make_handle: HandleFactory, folder: Path, offset: int) -> None:
    handle, data, path = make_handle(intra_op_parallelism=2), pattern(2 * MIB + 5), folder / "sparse"
    handle.sync_pwrite(data, path, offset)
    assert path.stat().st_size == offset + len(data)
    assert path.stat().st_blocks * 512 < 8 * MIB  # the hole before it is still one
    back = torch.zeros(len(data) + 10, dtype=torch.uint8)
    handle.sync_pread(back, path, offset - 10)
    assert torch.equal(back, torch.cat([torch.zeros(10, dtype=torch.uint8), data]))


def test_more_than_2_gib_at_once(make_handle: HandleFactory, folder: Path) -> None:
    """A sparse file with marks on both sides of 2 GiB, in one request as large as the system allows."""
    if os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") < 8 * GIB:
        pytest.skip("less than 8 GiB of free memory")
    path, size, mark = folder / "sparse", 2 * GIB + 64 * MIB + 13, pattern(100_000)
    handle = make_handle(block_size=1 << 40)
    places = [0, 2 * GIB - 50_000, size - len(mark)]
    with path.open("wb") as file:
        file.truncate(size)
    for place in places:
        handle.sync_pwrite(mark, path, place)
    buffer = handle.new_cpu_locked_tensor(size, mark)
    assert handle.submit_pread(buffer, path).result() == size
    for place in places:
        assert torch.equal(buffer[place : place + len(mark)], mark)
    assert not buffer[len(mark) : places[1] : 512].any()


def test_a_write_makes_the_tensor_the_whole_file(make_handle: HandleFactory, folder: Path) -> None:
    handle, path = make_handle(), folder / "file"
    for size in (3 * MIB, 2 * MIB, 5000, 4096, 1, 0, 2 * MIB + 1):
        data = pattern(size, size)
        handle.sync_pwrite(data, path)
        assert path.stat().st_size == size
        assert torch.equal(contents(path), data)
    handle.async_pwrite(data[:10], path)
    handle.wait()
    assert path.stat().st_size == 10
    assert handle.submit_pwrite(data[:3], path).result() == 3
    assert path.stat().st_size == 3
    handle.submit_pwritev([data[:2]], [path]).result()
    assert path.stat().st_size == 2


@pytest.mark.parametrize("offset", [0, 1, 4096])
def test_a_write_at_an_offset_keeps_the_rest(make_handle: HandleFactory, folder: Path, offset: int) -> None:
    handle, path, old, data = make_handle(), folder / "file", pattern(20_000, 1), pattern(5000)
    store(path, old)
    handle.sync_pwrite(data, path, offset)
    expected = old.clone()
    expected[offset : offset + len(data)] = data
    assert torch.equal(contents(path), expected)


def test_handles_write_their_parts_of_one_file(make_handle: HandleFactory, folder: Path) -> None:
    """DeepNVMe's partitioned tensors: the parts meet inside a sector, and all are under way at once."""
    data, path, size = pattern(4_000_007), folder / "file", 500_003
    handles = [make_handle(block_size=BLOCK, intra_op_parallelism=2) for _ in range(0, len(data), size)]
    starts = list(range(0, len(data), size))
    for handle, start in zip(handles, starts, strict=True):
        handle.async_pwrite(data[start : start + size], path, start)
    assert [handle.wait() for handle in handles] == [1] * len(handles)
    assert torch.equal(contents(path), data)
    back = torch.zeros_like(data)
    for handle, start in zip(handles, starts, strict=True):
        handle.async_pread(back[start : start + size], path, start)
    assert [handle.wait() for handle in handles] == [1] * len(handles)
    assert torch.equal(back, data)


@pytest.mark.parametrize("single_submit", [False, True])
@pytest.mark.parametrize("overlap_events", [False, True])
@pytest.mark.parametrize("depth", [1, 2, 100])
def test_every_way_to_keep_the_queue_full(
    make_handle: HandleFactory, folder: Path, single_submit: bool, overlap_events: bool, depth: int
) -> None:
    handle = make_handle(4096, depth, single_submit, overlap_events, cache="direct")
    data, path = pattern(MIB + 777), folder / "file"
    back = torch.zeros_like(data)
    handle.sync_pwrite(data, path)
    handle.sync_pread(back, path)
    assert torch.equal(back, data)


def test_buffers_beside_tensors(handle: aio_handle, folder: Path) -> None:
    path, data = folder / "file", pattern(10_000).numpy().tobytes()
    assert handle.sync_pwrite(data, path) == 1
    assert path.read_bytes() == data
    array = np.zeros(2500, dtype=np.float32)
    block = bytearray(10_000)
    handle.async_pread(array, path)  # type: ignore[arg-type]
    handle.async_pread(memoryview(block)[10:], path, 10)
    assert handle.wait() == 2
    assert array.tobytes() == data
    assert block == b"\0" * 10 + data[10:]
    block.clear()  # nothing holds on to it


BLOCKS = [1, 512, 4096, 5000, 65536, 100_001, MIB, 1 << 40]


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_round_trips(make_handle: HandleFactory, folder: Path, data: st.DataObject) -> None:
    """Whatever is written is read back, whatever else was there stays, in any combination of everything."""
    draw = data.draw
    size = draw(st.one_of(st.integers(0, 9000), st.integers(0, 3 * MIB)), "size")
    offset = draw(st.one_of(st.integers(0, 9000), st.integers(0, 3 * MIB)), "offset")
    skew = draw(st.sampled_from([0, 1, 7, 64, 512, 4096]), "skew")
    before = draw(st.integers(0, 4 * MIB), "old size")
    pooled = draw(st.booleans(), "pooled")
    writer, reader = (
        make_handle(
            block_size=draw(st.sampled_from(BLOCKS if size < 100_000 else BLOCKS[4:]), "block_size"),
            queue_depth=draw(st.integers(1, 40), "queue_depth"),
            single_submit=draw(st.booleans(), "single_submit"),
            overlap_events=draw(st.booleans(), "overlap_events"),
            intra_op_parallelism=draw(st.integers(1, 5), "lanes"),
            cache=draw(st.sampled_from(["auto", "direct", "buffered"]), "cache"),
        )
        for _ in range(2)
    )
    path = folder / "file"
    expected = pattern(max(before, offset + size), 1)
    expected[before:].zero_()
    path.write_bytes(expected[:before].numpy().tobytes())
    room = writer.new_cpu_locked_tensor(size + skew, expected) if pooled else expected.new_empty(size + skew)
    source = room[skew:]
    source.copy_(pattern(size))
    expected[offset : offset + size] = source
    if size == 0:
        expected = expected[:before]  # writing nothing makes no file longer
    writer.sync_pwrite(source, path, offset)
    assert torch.equal(contents(path), expected)
    room.zero_()
    if offset + size <= len(expected):
        lead = draw(st.integers(0, min(offset, 5000)), "lead")
        target = expected.new_zeros(lead + size + skew)[skew:]
        reader.sync_pread(target, path, offset - lead)
        assert torch.equal(target, expected[offset - lead : offset + size])


def test_a_relative_path_is_one_of_the_folder_at_the_call(
    make_handle: HandleFactory, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    handle, data, other = make_handle(), pattern(100_000), folder / "other"
    other.mkdir()
    futures = []
    for i in range(20):
        monkeypatch.chdir(folder)
        futures.append(handle.submit_pwrite(data, f"relative{i}"))
        monkeypatch.chdir(other)
    assert [future.result() for future in futures] == [100_000] * 20
    assert os.listdir(other) == []
    with pytest.raises(FileNotFoundError) as caught:
        handle.submit_pread(data, "relative0").result()
    assert caught.value.filename == "relative0"


def test_a_descriptor_may_be_closed_after_the_call(make_handle: HandleFactory, folder: Path) -> None:
    handle, data = make_handle(), pattern(100_000)
    futures = []
    for i in range(20):
        fd = os.open(folder / f"file{i}", os.O_RDWR | os.O_CREAT)
        futures.append(handle.submit_pwrite(data, fd))
        os.close(fd)
    assert [future.result() for future in futures] == [100_000] * 20
    assert all((folder / f"file{i}").read_bytes() == data.numpy().tobytes() for i in range(20))
