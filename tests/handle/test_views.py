"""Tensors as torch's users have them: every dtype, any view, with and without autograd."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from nvme_ops import aio_handle
from tests.conftest import contents, pattern, store


def file_of(path: Path, like: torch.Tensor) -> torch.Tensor:
    return contents(path).clone().view(like.dtype).view(like.shape)


SOURCES: tuple[Callable[[torch.Tensor], torch.Tensor], ...] = (
    lambda t: t[::2, ::3],
    lambda t: t[:1].expand(40, -1),
    lambda t: t.view(10, 30, 100).permute(2, 0, 1),
    lambda t: t.diagonal(),
    lambda t: t[:, 3:4],
)


def test_a_source_may_have_gaps_and_a_destination_not(folder: Path) -> None:
    handle, whole, path = aio_handle(), torch.rand(300, 100), folder / "file"
    before = whole.clone()
    for view in SOURCES:
        source = view(whole)
        expected = source.clone(memory_format=torch.contiguous_format)
        future = handle.submit_pwrite(source, path)
        for read in (handle.sync_pread, handle.async_pread, handle.submit_pread, handle.read):
            with pytest.raises(ValueError, match="buffer must be contiguous"):
                read(source, path)
        del source
        assert future.result() == expected.nbytes
        assert torch.equal(file_of(path, expected), expected)
    assert handle.wait() == 0
    assert torch.equal(whole, before)
    data = torch.randn(100, 7, dtype=torch.complex64)
    for source in (data.conj(), data.conj().imag, torch._neg_view(data), data.conj().t(), data.real):
        handle.sync_pwrite(source, path)
        expected = source.resolve_conj().resolve_neg().contiguous()
        assert torch.equal(file_of(path, source), expected)
    with pytest.raises(ValueError, match="contiguous"):
        handle.sync_pread(data.conj(), path)


def test_autograd_sees_that_a_read_changes_the_tensor(folder: Path) -> None:
    handle, path, values = aio_handle(), folder / "file", torch.rand(1000)
    handle.sync_pwrite(values, path)
    leaf = torch.zeros(1000, requires_grad=True)
    handle.sync_pread(leaf, path)
    assert torch.equal(leaf, values)
    assert leaf.is_leaf
    loss = (leaf * leaf).sum()
    handle.async_pread(leaf, path)
    handle.wait()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    loss = (leaf * leaf).sum()
    handle.sync_pwrite(leaf, path)
    handle.sync_pwrite(leaf * 2, path)  # with a grad_fn
    loss.backward()
    assert leaf.grad is not None
    with torch.inference_mode():
        inside = torch.zeros(1000)  # has no version to be counted up
    handle.sync_pread(inside, path)
    assert torch.equal(inside, values * 2)


def test_tensors_without_memory_are_refused(folder: Path) -> None:
    handle, path = aio_handle(), store(folder / "file", pattern(4000))
    cut = torch.zeros(4096, dtype=torch.uint8)
    cut.untyped_storage().resize_(100)
    without = [torch.eye(10).to_sparse(), torch.empty(10, device="meta"), torch.eye(10).to_sparse_csr()]
    for call in (handle.sync_pread, handle.sync_pwrite, handle.submit_pread, handle.submit_pwrite):
        for tensor in without:
            with pytest.raises(ValueError, match="buffer must be a dense, strided tensor"):
                call(tensor, path)
        with pytest.raises(ValueError, match="beyond the 100 bytes of its storage"):
            call(cut, path)
    assert torch.equal(contents(path), pattern(4000))
    handle.sync_pread(cut[50:100], path)


def test_memory_that_is_copied_on_write_or_shared_with_a_file(folder: Path) -> None:
    handle, path, values, original = aio_handle(), folder / "file", torch.rand(1000), torch.zeros(1000)
    handle.sync_pwrite(values, path)
    mapped = torch.from_file(str(folder / "mapped"), shared=True, size=1000, dtype=torch.float32)
    for target in (torch._lazy_clone(original), mapped):
        handle.sync_pread(target, path)
        assert torch.equal(target, values)
    assert not original.any()
    handle.sync_pwrite(mapped, folder / "copy")
    assert (folder / "copy").read_bytes() == path.read_bytes()
