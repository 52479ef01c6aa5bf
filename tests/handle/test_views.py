"""Tensors as torch's users have them: every dtype, any view, with and without autograd."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from nvme_ops import aio_handle
from tests.conftest import contents, pattern, store

DTYPES = sorted({value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=str)
PLAIN = [dtype for dtype in DTYPES if not str(dtype).startswith(("torch.q", "torch.bits", "torch.int", "torch.uint"))]
INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.uint16, torch.int32, torch.uint32, torch.int64, torch.uint64]
SHAPE = (33, 17)


def file_of(path: Path, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return contents(path).clone().view(dtype).view(shape)


@pytest.mark.parametrize("dtype", [*PLAIN, *INTEGERS], ids=str)
def test_dtypes(handle: aio_handle, folder: Path, dtype: torch.dtype) -> None:
    count = SHAPE[0] * SHAPE[1]
    raw = pattern(count * dtype.itemsize)
    if dtype == torch.bool:
        raw %= 2
    data, path = raw.view(dtype).view(SHAPE), folder / "file"
    assert handle.sync_pwrite(data, path) == 1
    assert torch.equal(contents(path), raw)
    back = torch.empty(SHAPE, dtype=dtype)
    assert handle.sync_pread(back, path) == 1
    assert torch.equal(back.view(-1).view(torch.uint8), raw)
    assert back.shape == SHAPE


def test_views_that_start_anywhere(handle: aio_handle, folder: Path) -> None:
    base, path = pattern(300_000), folder / "file"
    for start in (0, 1, 3, 64, 511, 512, 4095, 4096):
        view = base[start : start + 200_000]
        handle.sync_pwrite(view, path)
        assert torch.equal(contents(path), view)
        room = torch.full((300_000,), 9, dtype=torch.uint8)
        handle.sync_pread(room[start : start + 200_000], path)
        assert torch.equal(room[start : start + 200_000], view)
        assert (room[:start] == 9).all()
        assert (room[start + 200_000 :] == 9).all()


View = Callable[[torch.Tensor], torch.Tensor]
SOURCES: dict[str, View] = {
    "transposed": lambda t: t.t(),
    "every second": lambda t: t[::2, ::3],
    "expanded": lambda t: t[:1].expand(40, -1),
    "permuted": lambda t: t.view(10, 30, 100).permute(2, 0, 1),
    "diagonal": lambda t: t.diagonal(),
    "channels_last": lambda t: t.view(2, 15, 10, 100).contiguous(memory_format=torch.channels_last),
    "one column": lambda t: t[:, 3:4],
}


@pytest.mark.parametrize("view", SOURCES.values(), ids=SOURCES)
def test_sources_need_not_be_contiguous(handle: aio_handle, folder: Path, view: View) -> None:
    source, path = view(torch.rand(300, 100)), folder / "file"
    expected = source.clone(memory_format=torch.contiguous_format)
    assert not source.is_contiguous()
    assert handle.sync_pwrite(source, path) == 1
    assert torch.equal(file_of(path, torch.float32, *expected.shape), expected)
    path.unlink()
    future = handle.submit_pwrite(source, path)
    del source
    assert future.result() == expected.nbytes
    assert torch.equal(file_of(path, torch.float32, *expected.shape), expected)


def test_lazy_conjugates_and_negatives_are_written_as_they_look(handle: aio_handle, folder: Path) -> None:
    data, path = torch.randn(100, 7, dtype=torch.complex64), folder / "file"
    for source in (data.conj(), data.conj().imag, torch._neg_view(data), data.conj().t(), data.real):
        handle.sync_pwrite(source, path)
        expected = source.resolve_conj().resolve_neg().contiguous()
        assert torch.equal(file_of(path, source.dtype, *source.shape), expected)
    with pytest.raises(ValueError, match="contiguous"):
        handle.sync_pread(data.conj(), path)


@pytest.mark.parametrize("view", SOURCES.values(), ids=SOURCES)
def test_destinations_must_be_contiguous(handle: aio_handle, folder: Path, view: View) -> None:
    target = torch.rand(300, 100)
    before = target.clone()
    handle.sync_pwrite(torch.zeros(300, 100), folder / "file")
    for read in (handle.sync_pread, handle.async_pread, handle.submit_pread, handle.read):
        with pytest.raises(ValueError, match="buffer must be contiguous"):
            read(view(target), folder / "file")
    assert handle.wait() == 0
    assert torch.equal(target, before)


def test_contiguous_whatever_the_strides_of_single_elements(handle: aio_handle, folder: Path) -> None:
    path, target = folder / "file", torch.zeros(5, 1000)
    handle.sync_pwrite(torch.arange(1000.0), path)
    handle.sync_pread(target[2:3].t().t(), path)
    assert torch.equal(target[2], torch.arange(1000.0))
    handle.sync_pread(target[3].as_strided((1, 1000, 1), (7, 1, 5)), path)
    assert torch.equal(target[3], torch.arange(1000.0))
    scalar = torch.tensor(0.0)
    handle.sync_pread(scalar, path, 4)
    assert scalar.item() == 1.0


def test_autograd_sees_that_a_read_changes_the_tensor(handle: aio_handle, folder: Path) -> None:
    path, values = folder / "file", torch.rand(1000)
    handle.sync_pwrite(values, path)
    leaf = torch.zeros(1000, requires_grad=True)
    handle.sync_pread(leaf, path)
    assert torch.equal(leaf, values)
    assert leaf.requires_grad
    assert leaf.is_leaf
    loss = (leaf * leaf).sum()
    version = leaf._version
    handle.async_pread(leaf, path)
    handle.wait()
    assert leaf._version > version
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    (leaf * 2).sum().backward()
    assert leaf.grad is not None
    version = leaf._version
    handle.sync_pwrite(leaf, path)
    handle.sync_pwrite(leaf * 2, path)  # with a grad_fn
    assert leaf._version == version


def test_parameters_and_subclasses(handle: aio_handle, folder: Path) -> None:
    class Marked(torch.Tensor):
        pass

    path, values = folder / "file", torch.rand(100)
    handle.sync_pwrite(torch.nn.Parameter(values), path)
    for target in (torch.nn.Parameter(torch.zeros(100)), torch.zeros(100).as_subclass(Marked)):
        handle.sync_pread(target, path)
        assert torch.equal(target, values)


def test_inference_tensors(handle: aio_handle, folder: Path) -> None:
    path = folder / "file"
    with torch.inference_mode():
        values, inside = torch.rand(100), torch.zeros(100)
        handle.sync_pwrite(values, path)
        handle.sync_pread(inside, path)
        assert torch.equal(inside, values)
    handle.sync_pread(inside, path)  # outside of the mode
    handle.sync_pwrite(inside, path)
    back = torch.zeros(100)
    handle.sync_pread(back, path)
    assert torch.equal(back, values)


def test_tensors_without_memory_are_refused(handle: aio_handle, folder: Path) -> None:
    path = store(folder / "file", pattern(4000))
    sparse = torch.eye(10).to_sparse()
    meta = torch.empty(10, device="meta")
    compressed = torch.eye(10).to_sparse_csr()
    for call in (handle.sync_pread, handle.sync_pwrite, handle.submit_pread, handle.submit_pwrite):
        for tensor in (sparse, meta, compressed):
            with pytest.raises(ValueError, match="buffer must be a dense, strided tensor"):
                call(tensor, path)
    assert torch.equal(contents(path), pattern(4000))


def test_copy_on_write_memory_is_split_before_it_is_filled(handle: aio_handle, folder: Path) -> None:
    path, values = folder / "file", torch.rand(1000)
    handle.sync_pwrite(values, path)
    original = torch.zeros(1000)
    clone = torch._lazy_clone(original)
    handle.sync_pread(clone, path)
    assert torch.equal(clone, values)
    assert (original == 0).all()


def test_tensors_that_share_memory_with_a_file(handle: aio_handle, folder: Path) -> None:
    path, values = folder / "file", torch.rand(100_000)
    handle.sync_pwrite(values, path)
    mapped = torch.from_file(str(folder / "mapped"), shared=True, size=100_000, dtype=torch.float32)
    handle.sync_pread(mapped, path)
    assert torch.equal(mapped, values)
    handle.sync_pwrite(mapped, folder / "copy")
    assert (folder / "copy").read_bytes() == path.read_bytes()


def test_a_tensor_whose_storage_was_cut_is_refused(handle: aio_handle, folder: Path) -> None:
    path, tensor = store(folder / "file", pattern(4096)), torch.zeros(4096, dtype=torch.uint8)
    tensor.untyped_storage().resize_(100)
    for call in (handle.sync_pread, handle.sync_pwrite):
        with pytest.raises(ValueError, match="beyond the 100 bytes of its storage"):
            call(tensor, path)
    assert path.stat().st_size == 4096
    handle.sync_pread(tensor[50:100], path)
