"""Every way in which a user moves one tensor: at a byte offset of a file, done when the call returns."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import nvme_ops
from nvme_ops import aio_handle

Call = Callable[[aio_handle, torch.Tensor, Path, int], object]


def _of_file(method: str, mode: str) -> Call:
    def call(handle: aio_handle, tensor: torch.Tensor, path: Path, offset: int) -> None:
        if mode == "r+":
            path.touch()
        with nvme_ops.open(path, mode, handle=handle) as file:  # type: ignore[arg-type]
            assert getattr(file, method)(tensor, offset).result() == tensor.nbytes

    return call


WRITES: dict[str, Call] = {
    "write-validate": lambda h, t, path, at: h.write(t, path, True, file_offset=at),
    "pwrite-validate-async": lambda h, t, path, at: (h.pwrite(t, path, True, True, at), h.wait()),
    "sync_pwrite": lambda h, t, path, at: h.sync_pwrite(t, path, at),
    "async_pwrite": lambda h, t, path, at: (h.async_pwrite(t, path, at), h.wait()),
    "submit_pwrite": lambda h, t, path, at: h.submit_pwrite(t, path, at).result(),
    "submit_pwritev": lambda h, t, path, at: h.submit_pwritev([t], path, [at]).result(),
    "File.pwrite_async": _of_file("pwrite_async", "r+"),
}
READS: dict[str, Call] = {
    "read-validate": lambda h, t, path, at: h.read(t, path, True, file_offset=at),
    "pread-validate-async": lambda h, t, path, at: (h.pread(t, path, True, True, at), h.wait()),
    "sync_pread": lambda h, t, path, at: h.sync_pread(t, path, at),
    "async_pread": lambda h, t, path, at: (h.async_pread(t, path, at), h.wait()),
    "submit_pread": lambda h, t, path, at: h.submit_pread(t, path, at).result(),
    "submit_preadv": lambda h, t, path, at: h.submit_preadv([t], path, [at]).result(),
    "File.pread_async": _of_file("pread_async", "r"),
}
both_ways = pytest.mark.parametrize("ways", [WRITES, READS], ids=["write", "read"])

# What a tensor of 600 x 500 elements can be written as.
VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "one element": lambda t: t[3, 4],
    "transposed": lambda t: t.t(),
    "columns": lambda t: t[:, 1:-1],
    "repeated": lambda t: t[5].expand(30, 500),
    "channels last": lambda t: t.view(2, 3, 100, 500).contiguous(memory_format=torch.channels_last),
}
