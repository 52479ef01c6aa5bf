"""Any size at any offset arrives whole, in every cache mode, and nothing around it changes."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nvme_ops import aio_handle
from tests.conftest import GIB, MIB, HandleFactory, contents, pattern, store

BLOCK = 65536
BLOCKS = [1, 512, 4096, 5000, 65536, 100_001, MIB, 1 << 40, (1 << 63) - 1]
MODES = ["auto", "direct", "buffered"]


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_round_trips(make_handle: HandleFactory, folder: Path, data: st.DataObject) -> None:
    """Whatever is written is read back, whatever else was there stays, in any combination of everything."""
    draw = data.draw
    size = draw(st.one_of(st.integers(0, 9000), st.integers(0, 3 * MIB)), "size")
    offset = draw(st.one_of(st.none(), st.integers(0, 9000), st.integers(0, 3 * MIB)), "offset")
    skew = draw(st.sampled_from([0, 1, 7, 64, 512, 4096]), "skew")
    before = draw(st.integers(0, 4 * MIB), "old size")
    pooled, validate = draw(st.booleans(), "pooled"), draw(st.booleans(), "validate")
    writer, reader = (
        make_handle(
            block_size=draw(st.sampled_from(BLOCKS if size < 100_000 else BLOCKS[4:]), "block_size"),
            queue_depth=draw(st.one_of(st.integers(1, 40), st.sampled_from([1 << 33, (1 << 63) - 1])), "queue_depth"),
            single_submit=draw(st.booleans(), "single_submit"),
            overlap_events=draw(st.booleans(), "overlap_events"),
            intra_op_parallelism=draw(st.integers(1, 5), "lanes"),
            cache=draw(st.sampled_from(MODES), "cache"),
        )
        for _ in range(2)
    )
    path, start = folder / "file", offset or 0
    expected = pattern(max(before, start + size), 1)
    expected[before:].zero_()
    path.write_bytes(expected[:before].numpy().tobytes())
    room = writer.new_cpu_locked_tensor(size + skew, expected) if pooled else expected.new_empty(size + skew)
    source = room[skew:]
    source.copy_(pattern(size))
    expected[start : start + size] = source
    if offset is None:  # the tensor is the whole file
        expected = expected[:size]
    elif size == 0:  # writing nothing makes no file longer
        expected = expected[:before]
    writer.pwrite(source, path, validate, False, offset)
    assert torch.equal(contents(path), expected)
    room.zero_()
    if start + size <= len(expected):
        lead = draw(st.integers(0, min(start, 5000)), "lead")
        target = expected.new_zeros(lead + size + skew)[skew:]
        reader.pread(target, path, validate, False, start - lead)
        assert torch.equal(target, expected[start - lead : start + size])


def test_offsets_beyond_32_bits(make_handle: HandleFactory, folder: Path) -> None:
    handle, data, path = make_handle(intra_op_parallelism=2), pattern(2 * MIB + 5), folder / "sparse"
    offset = 4 * GIB - 4097
    handle.sync_pwrite(data, path, offset)
    assert path.stat().st_size == offset + len(data)
    assert path.stat().st_blocks * 512 < 8 * MIB  # the hole before it is still one
    back = torch.zeros(len(data) + 10, dtype=torch.uint8)
    handle.sync_pread(back, path, offset - 10)
    assert torch.equal(back, torch.cat([torch.zeros(10, dtype=torch.uint8), data]))


def test_without_an_offset_every_write_makes_the_whole_file(handle: aio_handle, folder: Path) -> None:
    path = store(folder / "file", pattern(100))
    writes: list[Callable[[torch.Tensor], object]] = [
        lambda data: handle.write(data, path),
        lambda data: handle.sync_pwrite(data, path),
        lambda data: (handle.async_pwrite(data, path), handle.wait()),
        lambda data: handle.submit_pwrite(data, path).result(),
        lambda data: handle.submit_pwritev([data], [path]).result(),
    ]
    for size, write in enumerate(writes):
        write(pattern(50 - size))
        assert torch.equal(contents(path), pattern(50 - size))


def test_buffers_beside_tensors(handle: aio_handle, folder: Path) -> None:
    path, data = folder / "file", pattern(10_000).numpy().tobytes()
    assert handle.sync_pwrite(data, path) == 1
    assert path.read_bytes() == data
    array, block = np.zeros(2500, dtype=np.float32), bytearray(10_000)
    handle.async_pread(array, path)  # type: ignore[arg-type]
    handle.async_pread(memoryview(block)[10:], path, 10)
    assert handle.wait() == 2
    assert array.tobytes() == data
    assert block == b"\0" * 10 + data[10:]
    block.clear()  # nothing holds on to it


def test_a_relative_path_is_one_of_the_folder_at_the_call(
    make_handle: HandleFactory, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    handle, data, other = make_handle(), pattern(100_000), folder / "other"
    other.mkdir()
    futures = []
    for i in range(10):
        monkeypatch.chdir(folder)
        futures.append(handle.submit_pwrite(data, f"relative{i}"))
        monkeypatch.chdir(other)
    assert [future.result() for future in futures] == [100_000] * 10
    assert os.listdir(other) == []
    with pytest.raises(FileNotFoundError) as caught:
        handle.submit_pread(data, "relative0").result()
    assert caught.value.filename == "relative0"


def test_a_descriptor_that_is_closed_after_the_call_and_names_another_file(handle: aio_handle, folder: Path) -> None:
    backs = [torch.zeros(5000, dtype=torch.uint8) for _ in range(20)]
    for number, back in enumerate(backs):
        path = store(folder / str(number), pattern(5000, number))
        for mode, use in ((os.O_RDONLY, handle.async_pread), (os.O_WRONLY | os.O_CREAT, handle.async_pwrite)):
            fd = os.open(path if mode == os.O_RDONLY else folder / f"copy{number}", mode)
            use(back if mode == os.O_RDONLY else pattern(5000, number), fd)
            os.close(fd)  # the next one gets its number
    assert handle.wait() == 40
    for number, back in enumerate(backs):
        assert torch.equal(back, pattern(5000, number))
        assert torch.equal(contents(folder / f"copy{number}"), back)
