"""``validate=True`` reads back and compares.

A mismatch is provoked by a tensor that maps the very file it is moved to or from, a little further on: the move shifts
the file under the tensor, so that afterwards they do differ.
"""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
import torch

from tests.conftest import MIB, HandleFactory, contents, pattern, store

PAGE = 4096


def mapped(path: Path, pages: int) -> torch.Tensor:
    return torch.from_file(str(path), shared=True, size=pages * PAGE, dtype=torch.uint8)


@pytest.mark.parametrize("cache", ["auto", "direct", "buffered"])
@pytest.mark.parametrize("lanes", [1, 3])
@pytest.mark.parametrize("size", [0, 1, 513, 100_003, 9 * MIB + 1])
def test_equal(make_handle: HandleFactory, folder: Path, cache: str, lanes: int, size: int) -> None:
    handle, data, path = make_handle(cache=cache, intra_op_parallelism=lanes), pattern(size), folder / "file"
    assert handle.write(data, path, True) == 0
    assert handle.pwrite(data, path, True, False) == 1
    assert handle.pwrite(data, path, True, True, 77) == 0
    assert handle.wait() == 1
    back, offset = torch.zeros_like(data), 77 if size else 0  # writing nothing makes no file longer
    assert handle.pread(back, path, True, True, offset) == 0
    assert handle.wait() == 1
    assert torch.equal(back, data)
    assert torch.equal(contents(path)[offset:], data)


@pytest.mark.parametrize("way", ["blocking", "all lanes", "asynchronous"])
@pytest.mark.parametrize("place", [0, 5 * PAGE])
def test_mismatch_after_a_write(make_handle: HandleFactory, folder: Path, way: str, place: int) -> None:
    handle = make_handle(cache="buffered", intra_op_parallelism=1 + 2 * (way == "all lanes"))
    path = store(folder / "file", pattern(9 * PAGE))
    alias = mapped(path, 9)[place + PAGE // 2 :][:PAGE]
    match = f"validation failed: file and tensor differ at offset {place}: '{path}'"
    with pytest.raises(OSError, match=match) as caught:  # noqa: PT012  (asynchronous: from wait)
        if way == "blocking":
            handle.write(alias, path, True, place)
        elif way == "all lanes":
            handle.pwrite(alias, path, True, False, place)
        else:
            handle.pwrite(alias, path, True, True, place)
            handle.wait()
    assert (caught.value.errno, caught.value.filename) == (errno.EIO, str(path))
    assert handle.wait() == 0
    assert handle.pwrite(pattern(100), path, True, False, 0) == 1


@pytest.mark.parametrize("asynchronous", [False, True])
def test_mismatch_after_a_read(make_handle: HandleFactory, folder: Path, asynchronous: bool) -> None:
    handle = make_handle(cache="buffered")
    path = store(folder / "file", pattern(4 * PAGE))
    target = mapped(path, 4)[: 3 * PAGE]
    with pytest.raises(OSError, match=f"file and tensor differ at offset {PAGE}") as caught:  # noqa: PT012
        handle.pread(target, path, True, asynchronous, PAGE)
        handle.wait()
    assert caught.value.errno == errno.EIO
    back = torch.zeros(4 * PAGE, dtype=torch.uint8)
    assert handle.pread(back, path, True, False) == 1


def test_a_descriptor_that_only_writes(make_handle: HandleFactory, folder: Path) -> None:
    path = folder / "file"
    with path.open("wb") as file:
        assert make_handle().pwrite(pattern(100_001), file.fileno(), True, False) == 1
    assert torch.equal(contents(path), pattern(100_001))
