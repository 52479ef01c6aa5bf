"""``nvme_ops.open``: the stream, the tensors beside it, and torch.save and torch.load through it."""

from __future__ import annotations

import io
import os
import pickle
from typing import Any

import pytest
import torch

import nvme_ops

MIB = 1 << 20


@pytest.fixture
def path(tmp_path):
    return tmp_path / "file"


def pattern(size: int) -> bytes:
    return (
        torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(size))
        .numpy()
        .tobytes()
    )


@pytest.mark.parametrize("size", [0, 1, 4097, 256 * 1024, 3 * MIB + 17])
def test_what_is_written_is_read(path, size):
    content = pattern(size)
    with nvme_ops.open(path, "w") as file:
        assert file.write(content) == size
        assert file.tell() == size
    assert path.read_bytes() == content
    with nvme_ops.open(path, "r") as file:
        assert file.read() == content
        assert file.read(1) == b""


def test_a_stream_of_small_and_large_writes_stays_in_order(path):
    pieces = [pattern(size) for size in (10, MIB + 3, 1, 700_001, 64, 2 * MIB, 5)]
    with nvme_ops.open(path, "wb") as file:
        for piece in pieces:
            file.write(piece)
    assert path.read_bytes() == b"".join(pieces)


def test_reads_move_the_position_and_stop_at_the_end(path):
    content = pattern(2 * MIB + 5)
    path.write_bytes(content)
    with nvme_ops.open(path) as file:
        assert file.read(7) == content[:7]
        large = bytearray(3 * MIB)
        assert file.readinto(large) == len(content) - 7
        assert bytes(large[: len(content) - 7]) == content[7:]
        assert file.tell() == len(content)
        assert file.readinto(large) == 0


def test_seek_from_every_base(path):
    path.write_bytes(b"0123456789")
    with nvme_ops.open(path) as file:
        assert file.seek(3) == 3
        assert file.seek(2, io.SEEK_CUR) == 5
        assert file.seek(-1, io.SEEK_END) == 9
        assert file.read() == b"9"
        assert file.seek(100) == 100
        assert file.read() == b""
        with pytest.raises(ValueError, match="negative"):
            file.seek(-1)
        with pytest.raises(ValueError, match="whence"):
            file.seek(0, 7)


def test_mode_w_empties_the_file_and_r_plus_does_not(path):
    path.write_bytes(b"0123456789")
    with nvme_ops.open(path, "r+") as file:
        file.seek(2)
        file.write(b"xx")
        file.seek(0)
        assert file.read() == b"01xx456789"
    with nvme_ops.open(path, "w") as file:
        assert os.path.getsize(path) == 0
        file.write(b"new")
    assert path.read_bytes() == b"new"


def test_mode_a_always_writes_at_the_end(path):
    path.write_bytes(b"start")
    with nvme_ops.open(path, "a") as file:
        assert file.tell() == 5
        file.seek(0)
        file.write(b"more")
        file.write(pattern(MIB))
    assert path.read_bytes() == b"startmore" + pattern(MIB)


def test_truncate_uses_the_position_or_the_size_given(path):
    with nvme_ops.open(path, "w") as file:
        file.write(b"0123456789")
        file.seek(4)
        assert file.truncate() == 4
        assert file.truncate(6) == 6
    assert path.read_bytes() == b"0123\0\0"


def test_tensors_at_offsets_leave_the_position_alone(path):
    tensor = torch.randn(1000, 333)
    with nvme_ops.open(path, "w") as file:
        file.write(b"head")
        assert file.pwrite(tensor, 4) == tensor.nbytes
        assert file.tell() == 4
        file.sync()
    with nvme_ops.open(path, "r") as file:
        back = torch.empty_like(tensor)
        assert file.pread(back, 4) == tensor.nbytes
        assert torch.equal(back, tensor)
        assert file.tell() == 0


def test_asynchronous_tensors_arrive_and_close_waits_for_them(path):
    tensors = [torch.randn(100_000) for _ in range(8)]
    size = tensors[0].nbytes
    with nvme_ops.open(path, "w") as file:
        futures = [file.pwrite_async(tensor, i * size) for i, tensor in enumerate(tensors)]
    assert all(future.done() for future in futures)
    assert [future.result() for future in futures] == [size] * 8
    with nvme_ops.open(path) as file:
        back = [torch.empty_like(tensor) for tensor in tensors]
        futures = [file.pread_async(tensor, i * size) for i, tensor in enumerate(back)]
        assert [future.result() for future in futures] == [size] * 8
    assert all(torch.equal(a, b) for a, b in zip(tensors, back, strict=True))


def test_torch_save_and_load_work_through_it(path):
    state: dict[str, Any] = {"weight": torch.randn(1024, 513), "half": torch.randn(77).half(), "step": 3}
    with nvme_ops.open(path, "w") as file:
        torch.save(state, file)
    sources: list[Any] = [path, nvme_ops.open(path)]
    for source in sources:
        loaded = torch.load(source, weights_only=True)
        assert loaded["step"] == 3
        assert torch.equal(loaded["weight"], state["weight"])
        assert torch.equal(loaded["half"], state["half"])


def test_pickle_works_through_it(path):
    with nvme_ops.open(path, "w") as file:
        pickle.dump({"a": [1, 2, 3], "b": pattern(MIB)}, file)
    with nvme_ops.open(path) as file:
        assert pickle.load(file) == {"a": [1, 2, 3], "b": pattern(MIB)}


def test_the_wrong_direction_is_refused(path):
    tensor = torch.zeros(4)
    with nvme_ops.open(path, "w") as file:
        for call in (lambda: file.read(1), lambda: file.pread(tensor, 0), lambda: file.pread_async(tensor, 0)):
            with pytest.raises(io.UnsupportedOperation):
                call()
    with nvme_ops.open(path, "r") as file:
        for call in (lambda: file.write(b"x"), lambda: file.pwrite(tensor, 0), lambda: file.truncate(0)):
            with pytest.raises(io.UnsupportedOperation):
                call()


def test_a_closed_file_refuses_everything(path):
    file = nvme_ops.open(path, "w")
    file.close()
    file.close()
    assert file.closed
    for call in (
        lambda: file.write(b"x"),
        file.tell,
        file.fileno,
        lambda: file.seek(0),
        lambda: file.pwrite(torch.zeros(1), 0),
    ):
        with pytest.raises(ValueError, match="closed"):
            call()
    assert "closed" in repr(file)


def test_bad_modes_and_missing_files(path):
    for mode in ("x-", "rw", "", "wt"):
        with pytest.raises(ValueError, match="mode"):
            nvme_ops.open(path, mode)  # type: ignore[arg-type]
    with pytest.raises(FileNotFoundError):
        nvme_ops.open(path, "r")


def test_a_read_past_the_end_is_an_end_of_file_error(path):
    path.write_bytes(b"123")
    with nvme_ops.open(path) as file, pytest.raises(EOFError, match="3 bytes"):
        file.pread(torch.zeros(4, dtype=torch.uint8), 0)


def test_the_descriptor_does_not_leak(path):
    path.write_bytes(b"1")
    nvme_ops.open(path).close()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        with nvme_ops.open(path) as file:
            file.pread(torch.zeros(1, dtype=torch.uint8), 0)
    assert len(os.listdir("/proc/self/fd")) == before


def test_it_uses_the_handle_it_is_given(path):
    handle = nvme_ops.aio_handle(block_size=65536, queue_depth=4, cache="buffered")
    content = pattern(MIB)
    with nvme_ops.open(path, "w", handle=handle) as file:
        file.write(content)
    assert path.read_bytes() == content
