"""``save_on_nvme`` with tensors of every kind: what has no memory, or none of its own, comes back as it was."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.autograd import forward_ad
from torch.testing._internal.two_tensor import TwoTensor

from nvme_ops.offload import save_on_nvme
from tests.offload.elsewhere import alone, apart, same

SIZE = 64


def full(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.linspace(1, 2, SIZE * SIZE).view(SIZE, SIZE).to(dtype)


def resized(tensor: torch.Tensor, nbytes: int) -> torch.Tensor:
    tensor.untyped_storage().resize_(nbytes)
    return tensor


KINDS: dict[str, Callable[[], torch.Tensor]] = {
    "zero": lambda: torch._efficientzerotensor((SIZE, SIZE)),
    "part of zero": lambda: torch._efficientzerotensor((SIZE, SIZE))[:5],
    "meta": lambda: torch.ones(SIZE, SIZE, device="meta"),
    "wrapper": lambda: TwoTensor(full(), full()),
    "functional": lambda: torch._to_functional_tensor(full()),
    "sparse": lambda: full().to_sparse(),
    "sparse rows": lambda: full().to_sparse_csr(),
    "sparse columns": lambda: full().to_sparse_csc(),
    "sparse blocks": lambda: full().to_sparse_bsr((2, 2)),
    "mkldnn": lambda: full().to_mkldnn(),
    "quantized": lambda: torch.quantize_per_tensor(full(), 0.1, 0, torch.qint8),
    "conjugated": lambda: full(torch.complex64).mul(1j).conj(),
    "negated": lambda: full(torch.complex64).mul(1j).conj().imag,
    "imaginary": lambda: full(torch.complex64).imag,
    "complex half": lambda: full(torch.complex32),
    "float8": lambda: full(torch.float8_e4m3fn).view(torch.uint8),
    "uint64": lambda: full(torch.uint64).view(torch.int64),
    "expanded": lambda: full()[:1].expand(SIZE, SIZE),
    "expanded scalar": lambda: torch.ones(()).expand(SIZE, SIZE),
    "overlapping": lambda: torch.arange(2.0 * SIZE).as_strided((SIZE, SIZE), (1, 1)),
    "copy on write": lambda: full()._lazy_clone(),
    "empty": lambda: torch.empty(3, 0, dtype=torch.complex64),
    "read only": lambda: torch.frombuffer(bytes(range(256)), dtype=torch.uint8),
    "shared": lambda: full().share_memory_(),
}


class Holding(torch.autograd.Function):
    """Saves a tensor, and notes what comes back."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, tensor: torch.Tensor, back: list[torch.Tensor]) -> torch.Tensor:
        ctx.save_for_backward(tensor)
        ctx.back = back
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        ctx.back += ctx.saved_tensors
        return gradient * 2, None, None


def step(
    make: Callable[[], Any], then: Callable[[Any], object] = id, later: Callable[[Any], object] = id
) -> tuple[torch.Tensor, torch.Tensor]:
    """Saves a tensor, and others after it so that there is no room for it; calls functions with it in between."""
    x, back, tensor = full().requires_grad_(), list[torch.Tensor](), make()
    y: Any = Holding.apply(x, tensor, back)
    then(tensor)
    for _ in range(4):
        y = y.sin()
    later(tensor)
    (gradient,) = torch.autograd.grad(y.sum(), x)
    return gradient, back[0]


def differences(folder: Path, run: Callable[[], Any]) -> list[str]:
    theirs, found = run(), list[str]()
    policies: tuple[Any, ...] = ("nvme", "auto")
    for policy in policies:
        for budget in (0, 3 * SIZE * SIZE * 4, "256M"):
            with save_on_nvme(folder, min_bytes=1, memory_budget=budget, policy=policy) as saving:
                found += [f"{policy} {budget}: {word}" for _ in range(2) if (word := same(run(), theirs))]
            saving.close()
    return found


@alone
def test_tensors_of_any_kind_come_back(folder: Path) -> None:
    found = apart(list(KINDS), lambda kind: differences(folder, lambda: step(KINDS[kind])))
    assert {kind: words for kind, words in found.items() if words} == {}


def forward_mode() -> Any:
    x = full().requires_grad_()
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(full().requires_grad_(), full())
        made = torch.stack([dual * x, x])
        tangent = forward_ad.unpack_dual(made * made.sin()).tangent
        return torch.autograd.grad(tangent.square().sum(), x)


def hessian() -> Any:
    return torch.autograd.functional.hessian(lambda x: (x.sin() * x).pow(3).sum(), full()[:4, :4], vectorize=True)


def times_zero() -> Any:
    x = full().requires_grad_()
    return torch.autograd.grad((x * torch._efficientzerotensor((SIZE, SIZE))).sum() + x.sin().sum(), x)


def batched() -> Any:
    x = full().requires_grad_()
    rows = torch.vmap(lambda row: torch.func.jvp(lambda each: each.sin() * each, (row,), (torch.ones_like(row),))[1])
    return torch.autograd.grad((rows(x) * x).sum(), x)


WAYS: dict[str, Callable[[], Any]] = {
    "forward mode": forward_mode,
    "hessian": hessian,
    "times zero": times_zero,
    "batched": batched,
}


@alone
def test_derivatives_in_other_ways(folder: Path) -> None:
    assert apart(list(WAYS), lambda name: differences(folder, WAYS[name])) == {name: [] for name in WAYS}


def back(tensor: torch.Tensor) -> None:
    resized(tensor, full().nbytes).data.copy_(full())


def test_memory_that_is_freed_for_a_time_is_not_written(folder: Path) -> None:
    assert differences(folder, lambda: step(full, lambda tensor: resized(tensor, 0), back)) == []


@pytest.mark.parametrize("nbytes", [0, SIZE])
def test_memory_that_is_freed_when_it_is_saved(folder: Path, nbytes: int) -> None:
    assert differences(folder, lambda: step(lambda: resized(full(), nbytes), later=back)) == []


@pytest.mark.parametrize("budget", [0, "256M"])
def test_memory_that_is_freed_for_good_is_told(folder: Path, budget: Any) -> None:
    told = pytest.raises(RuntimeError, match=r"of shape \(64, 64\), saved .* resized to 0 bytes")
    with save_on_nvme(folder, min_bytes=1, memory_budget=budget), told:
        step(full, lambda tensor: resized(tensor, 0))
