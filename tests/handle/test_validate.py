"""``validate=True`` reads back and compares.

A mismatch is provoked by a tensor that maps the very file it is moved to or from, a little further on: the move shifts
the file under the tensor, so that afterwards they do differ.
"""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
import torch

from nvme_ops import aio_handle
from tests.conftest import HandleFactory, contents, pattern, store

PAGE = 4096


def mapped(path: Path, pages: int) -> torch.Tensor:
    return torch.from_file(str(path), shared=True, size=pages * PAGE, dtype=torch.uint8)


@pytest.mark.parametrize("way", ["blocking", "all lanes", "asynchronous"])
@pytest.mark.parametrize("write", [True, False])
@pytest.mark.parametrize("place", [0, 5 * PAGE])
def test_a_mismatch_is_told(make_handle: HandleFactory, folder: Path, way: str, write: bool, place: int) -> None:
    handle = make_handle(cache="buffered", intra_op_parallelism=1 + 2 * (way == "all lanes"))
    path = store(folder / "file", pattern(9 * PAGE))
    if write:
        tensor = mapped(path, 9)[place + PAGE // 2 :][:PAGE]
        blocking, every = handle.write, handle.pwrite
    else:
        tensor = mapped(path, 9)[: 3 * PAGE]
        place, blocking, every = PAGE, handle.read, handle.pread
    match = f"validation failed: file and tensor differ at offset {place}: '{path}'"
    with pytest.raises(OSError, match=match) as caught:  # noqa: PT012  (asynchronous: from wait)
        if way == "blocking":
            blocking(tensor, path, True, place)
        else:
            every(tensor, path, True, way == "asynchronous", place)
            handle.wait()
    assert (caught.value.errno, caught.value.filename) == (errno.EIO, str(path))
    assert handle.wait() == 0
    assert handle.pwrite(pattern(100), path, True, False, 0) == 1


def test_a_descriptor_that_only_writes(handle: aio_handle, folder: Path) -> None:
    path = folder / "file"
    with path.open("wb") as file:
        assert handle.pwrite(pattern(100_001), file.fileno(), True, False) == 1
    assert torch.equal(contents(path), pattern(100_001))
