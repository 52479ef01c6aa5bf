"""``nvme_ops.open``: modes, positions, the tensors beside the stream, and who else uses the descriptor."""

from __future__ import annotations

import io
import os
from pathlib import Path

import pytest
import torch

import nvme_ops
from tests.conftest import MIB, pattern


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "file"


def test_seek_from_every_base(path: Path) -> None:
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


def test_modes(path: Path) -> None:
    path.write_bytes(b"0123456789")
    with nvme_ops.open(path, "r+") as file:
        file.seek(2)
        file.write(b"xx")
        file.seek(0)
        assert file.read() == b"01xx456789"
    with nvme_ops.open(path, "a") as file:
        assert file.tell() == 10
        file.seek(0)
        file.write(b"more")
    assert path.read_bytes() == b"01xx456789more"
    for mode in ("w+", "wb+", "x+", "xb+"):
        if mode.startswith("x"):
            with pytest.raises(FileExistsError):
                nvme_ops.open(path, mode)
            path.unlink()
        with nvme_ops.open(path, mode) as file:
            assert path.stat().st_size == 0
            assert file.readable()
            assert file.writable()
            file.write(b"content")
            file.seek(3)
            assert file.read() == b"tent"
    for wrong in ("x-", "rw", "", "wt"):
        with pytest.raises(ValueError, match="mode"):
            nvme_ops.open(path, wrong)  # type: ignore[arg-type]
    with pytest.raises(FileNotFoundError):
        nvme_ops.open(path.with_name("none"), "r")


def test_tensors_at_offsets_leave_the_position_alone_and_close_waits_for_them(path: Path) -> None:
    tensors = [torch.randn(1000, 333) for _ in range(8)]
    size = tensors[0].nbytes
    handle = nvme_ops.aio_handle(block_size=65536, queue_depth=4, cache="buffered")
    with nvme_ops.open(path, "w", handle=handle) as file:
        file.write(b"head")
        assert file.pwrite(tensors[0], 4) == size
        futures = [file.pwrite_async(tensor, 4 + i * size) for i, tensor in enumerate(tensors)]
        assert file.tell() == 4
        file.sync()
    assert all(future.done() for future in futures)
    assert [future.result() for future in futures] == [size] * 8
    assert handle.statistics().written_bytes >= 9 * size
    with nvme_ops.open(path) as file:
        back = [torch.empty_like(tensor) for tensor in tensors]
        futures = [file.pread_async(tensor, 4 + i * size) for i, tensor in enumerate(back)]
        assert [future.result() for future in futures] == [size] * 8
        assert all(torch.equal(a, b) for a, b in zip(tensors, back, strict=True))
        assert file.pread(back[1], 4) == size
        assert torch.equal(back[1], tensors[0])
        assert file.tell() == 0
        with pytest.raises(EOFError, match=f"{4 + 8 * size} bytes"):
            file.pread(back[0], 4 + 7 * size + 1)


def test_the_wrong_direction_and_a_closed_file_are_refused(path: Path) -> None:
    tensor = torch.zeros(4)
    with nvme_ops.open(path, "w") as file:
        for call in (lambda: file.read(1), lambda: file.pread(tensor, 0), lambda: file.pread_async(tensor, 0)):
            with pytest.raises(io.UnsupportedOperation):
                call()
    with nvme_ops.open(path, "r") as file:
        for call in (lambda: file.write(b"x"), lambda: file.pwrite(tensor, 0), lambda: file.truncate(0)):
            with pytest.raises(io.UnsupportedOperation):
                call()
    file.close()
    assert file.closed
    assert "closed" in repr(file)
    for call in (lambda: file.read(1), file.tell, file.fileno, lambda: file.seek(0), lambda: file.pread(tensor, 0)):
        with pytest.raises(ValueError, match="closed"):
            call()


def test_what_goes_through_the_descriptor_moves_the_position(path: Path) -> None:
    with nvme_ops.open(path, "w") as file:
        file.write(b"one")
        file.flush()
        os.write(file.fileno(), b"two")
        assert file.tell() == 6
        file.write(b"three")
    assert path.read_bytes() == b"onetwothree"
    with nvme_ops.open(path) as file:
        assert file.read(3) == b"one"
        file.flush()
        assert os.read(file.fileno(), 3) == b"two"
        assert file.read() == b"three"


def test_two_of_torchs_old_files_in_one(path: Path) -> None:
    tensors = [pattern(2 * MIB, seed) for seed in range(2)]
    with nvme_ops.open(path, "w") as file:
        for tensor in tensors:
            torch.save(tensor, file, _use_new_zipfile_serialization=False)
    with path.open("rb") as plain, nvme_ops.open(path) as file:
        for tensor in tensors:
            assert torch.equal(torch.load(plain), tensor)
            assert torch.equal(torch.load(file), tensor)
