"""save_on_nvme: whose memory a saved tensor is, and tensors of every kind, which come back as they were."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.autograd import forward_ad
from torch.multiprocessing.reductions import StorageWeakRef
from torch.testing._internal.two_tensor import TwoTensor

from nvme_ops.offload import save_on_nvme
from tests.offload.elsewhere import alone, apart, same
from tests.offload.training import settled

SIZE = 64
MODIFIED = "modified by an inplace operation"


class Holding(torch.autograd.Function):
    """Saves a tensor; its backward returns that as a gradient, writes to it, or notes what it is."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, tensor: torch.Tensor, what: Any) -> torch.Tensor:
        ctx.save_for_backward(x if what == "write" else tensor)
        ctx.what = what
        return x.sin() if what == "write" else x.sum() if what == "return" else x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        (saved,) = ctx.saved_tensors
        if ctx.what == "return":
            return saved, None, None
        if ctx.what == "write":
            return saved.cos_().mul_(gradient), None, None
        ctx.what.append(saved)
        return gradient * 2, None, None


# Gradients take what they get


@pytest.mark.parametrize(
    ("policy", "budget", "size"),
    [("nvme", "64M", 100), ("nvme", "64M", 1 << 18), ("nvme", 0, 1 << 18), ("auto", 0, 1 << 18)],
)
def test_a_gradient_does_not_take_what_others_have(folder: Path, policy: Any, budget: Any, size: int) -> None:
    """As of fused losses, whose gradient is known in forward, and saved."""
    saving = save_on_nvme(folder, min_bytes="64K", memory_budget=budget, policy=policy)
    for retain in (True, False):
        gradient, weight = torch.ones(size), torch.nn.Parameter(torch.zeros(size))
        other = gradient.view(-1)
        with saving:
            loss = Holding.apply(weight, gradient.view(-1) if retain else gradient, "return")
        for times in range(1, 4 if retain else 2):
            loss.backward(retain_graph=retain)
            assert weight.grad is not None
            assert torch.equal(weight.grad, torch.full((size,), float(times)))
        weight.grad.zero_()  # type: ignore[union-attr]
        assert torch.equal(other, torch.ones(size))


def test_what_nobody_else_has_is_a_gradient_without_a_copy(folder: Path) -> None:
    weight, gradient = torch.nn.Parameter(torch.zeros(1 << 18)), torch.ones(1 << 18)
    place = gradient.data_ptr()
    with save_on_nvme(folder, min_bytes=1, memory_budget="64M"):
        loss = Holding.apply(weight, gradient, "return")
    del gradient
    loss.backward()
    assert weight.grad is not None
    assert weight.grad.data_ptr() == place


@pytest.mark.parametrize("budget", ["64M", 0])
def test_what_is_returned_as_a_gradient_and_needs_one_stays_the_users(folder: Path, budget: Any) -> None:
    weight, base = torch.zeros(1 << 18, requires_grad=True), torch.full((1 << 18,), 3.0, requires_grad=True)
    given = base * 1
    with save_on_nvme(folder, min_bytes=1, memory_budget=budget):
        losses = [Holding.apply(weight, given, "return") for _ in range(2)]
    for loss in losses:
        loss.backward(inputs=[weight])
    assert weight.grad is not None
    assert bool((weight.grad == 6).all())
    assert bool((given == 3).all())


@pytest.mark.parametrize("budget", ["64M", 0])
def test_what_a_backward_writes_to_is_its_own_and_no_value_any_more(folder: Path, budget: Any) -> None:
    weight = torch.randn(1 << 16, requires_grad=True)
    with save_on_nvme(folder, min_bytes=1, memory_budget=budget) as saving:
        x = weight * 2
        loss = (x * x if budget else x).sum() + Holding.apply(x, x, "write").sum()
        del x
        others = weight.exp().sin().sin()
    settled(saving)
    usual = weight * 2
    (expected,) = torch.autograd.grad(((usual**2 if budget else usual) + usual.sin()).sum(), weight)
    for time_ in range(2):
        with contextlib.nullcontext() if budget or not time_ else pytest.raises(RuntimeError, match=MODIFIED):
            (gradient,) = torch.autograd.grad(loss, weight, retain_graph=True)
            torch.testing.assert_close(gradient, expected)
    del others


# What an operation is computed again from, and whose address it is


def test_small_tensors_that_are_computed_from_may_not_change_later(folder: Path) -> None:
    gamma, x = torch.nn.Parameter(torch.randn(64)), torch.randn(4096, 64, requires_grad=True)

    def compute(after: float) -> torch.Tensor:
        scale = gamma.view(1, -1) * 2
        scale = scale.mul_(1.5).view(1, 1, -1)  # a version that is not 0
        made = (x + scale).exp()  # sums save none of both, which torch would look at itself
        for _ in range(6):
            made = (made + scale).cos()
        if after != 1:
            scale.mul_(after)
        return made.sum()

    expected = torch.autograd.grad(compute(1), (gamma, x))
    saving = save_on_nvme(folder, min_bytes="64K", memory_budget=0, policy="auto")
    choice: Any = saving._choice
    choice._balanced = lambda *_: choice._seconds  # where storage was waited for, too
    for after in (1, 1, 0):
        with saving:
            loss = compute(after)
        if after == 0:
            assert choice._made, "something is to be computed again"
            with pytest.raises(RuntimeError, match=MODIFIED):
                torch.autograd.grad(loss, (gamma, x))
        else:
            assert all(map(torch.equal, torch.autograd.grad(loss, (gamma, x)), expected))
        del loss
        choice._again = frozenset(choice._seconds)  # everything that can be


def test_a_storage_at_the_address_of_one_that_is_gone(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All is computed again that can be; what it is computed from has not been saved, and its address is used again."""
    saving = save_on_nvme(folder, min_bytes=1, memory_budget=0, policy="auto")
    choice: Any = saving._choice
    a, b = ([torch.randn(1 << 16) for _ in range(4)] for _ in range(2))
    reused = list[bool]()

    def step(context: contextlib.AbstractContextManager[object]) -> Any:
        p, q = (torch.nn.Parameter(torch.ones(1 << 16)) for _ in range(2))
        with context:
            total = torch.zeros(())
            for i in range(8):
                x = a[i % 4].roll(i)
                address = x.untyped_storage()._cdata
                y = x.neg()
                del x
                z = b[i % 4].roll(i)
                reused.append(z.untyped_storage()._cdata == address)
                total = total + (p * z).sum() + (q * y).sum()
        total.backward()
        return [p.grad, q.grad]

    expected = step(contextlib.nullcontext())
    for _ in range(4):
        assert all(map(torch.equal, step(saving), expected))
        choice._again = frozenset(choice._seconds)
        monkeypatch.setattr(choice, "end_pass", lambda _: None)
    if not any(reused):
        pytest.skip("the allocator used no address again: what earlier tests have left decides that")


# Parts: small ones of large tensors are copied, so that they do not keep the whole

PARTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "a row": lambda h: h[3],
    "rows": lambda h: h[3:5],
    "a column": lambda h: h[:, 5],
    "some columns": lambda h: h[:, 8:40],
    "every 9th column, transposed": lambda h: h[:, ::9].t(),
    "an expanded row": lambda h: h[2].expand(8, -1),
}


@pytest.mark.parametrize(("part", "least"), [*((part, 1) for part in PARTS), ("some columns", "1M")])
def test_a_small_part_of_a_large_tensor_does_not_keep_it(folder: Path, part: str, least: Any) -> None:
    """What comes back has the strides of the part, too: operations may sum in another order where they differ."""
    weight = torch.randn(1, requires_grad=True)

    def forward() -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
        h = torch.linspace(0, 1, 1 << 19).view(512, 1024)
        held = Holding.apply(weight, PARTS[part](h), back := list[torch.Tensor]())
        return (PARTS[part](h) * weight).sin().sum() + held.sum(), h, back

    (expected,) = torch.autograd.grad(forward()[0], weight)
    saving = save_on_nvme(folder, min_bytes=least, memory_budget=0)
    for _ in range(2):
        with saving:
            loss, h, back = forward()
        large, stride = StorageWeakRef(h.untyped_storage()), PARTS[part](h).stride()
        del h
        assert large.expired()
        assert torch.equal(torch.autograd.grad(loss, weight)[0], expected)
        assert back[0].stride() == stride
    assert saving.stats().bytes_saved <= 2 * 4 * 512 * 1024


def test_parts_of_what_is_saved_as_a_whole_are_not_copied(folder: Path) -> None:
    weight, h = torch.randn(1, requires_grad=True), torch.ones(1024, 256)
    with save_on_nvme(folder, min_bytes=1, memory_budget="64M") as saving:
        loss = torch.stack([(part * weight).sum() for part in (h, h[3], *h.chunk(4))]).sum()
    assert saving.stats().bytes_saved == h.nbytes
    assert float(torch.autograd.grad(loss, weight)[0]) == 2 * 1024 * 256 + 256


# Kinds


def full(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.linspace(1, 2, SIZE * SIZE).view(SIZE, SIZE).to(dtype)


def resized(tensor: torch.Tensor, nbytes: int) -> torch.Tensor:
    tensor.untyped_storage().resize_(nbytes)
    return tensor


def back(tensor: torch.Tensor) -> None:
    resized(tensor, full().nbytes).data.copy_(full())


def step(
    make: Callable[[], Any], then: Callable[[Any], object] = id, later: Callable[[Any], object] = id
) -> tuple[torch.Tensor, torch.Tensor]:
    """Saves a tensor, and others after it so that there is no room for it; calls functions with it in between."""
    x, seen, tensor = full().requires_grad_(), list[torch.Tensor](), make()
    y: Any = Holding.apply(x, tensor, seen)
    then(tensor)
    for _ in range(4):
        y = y.sin()
    later(tensor)
    (gradient,) = torch.autograd.grad(y.sum(), x)
    return gradient, seen[0]


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
    rows = torch.vmap(lambda row: torch.func.jvp(lambda value: value.sin() * value, (row,), (torch.ones_like(row),))[1])
    return torch.autograd.grad((rows(x) * x).sum(), x)


def inference() -> Any:
    with torch.inference_mode():
        return full().relu().add(1).clone()


def nested() -> Any:
    x = full().requires_grad_()
    made = torch.nested.as_nested_tensor([x, x[:3]]).mul(2)
    return torch.autograd.grad((made * made).to_padded_tensor(0.0).sum(), x)


def filled_later() -> Any:
    """``rrelu`` saves its noise before it draws it, and counts no version."""
    torch.manual_seed(1)
    x = torch.randn(1 << 15, requires_grad=True)
    h = x
    for _ in range(12):
        h = torch.nn.functional.rrelu(h, training=True) * 1.01
    return torch.autograd.grad(h.sum(), x)


WAYS: dict[str, Callable[[], Any]] = {
    run.__name__: run for run in (forward_mode, hessian, times_zero, batched, inference, nested, filled_later)
}
WAYS["freed for a time"] = lambda: step(full, lambda tensor: resized(tensor, 0), back)
WAYS["freed when it is saved"] = lambda: step(lambda: resized(full(), 0), later=back)
WAYS["freed in part when it is saved"] = lambda: step(lambda: resized(full(), SIZE), later=back)
KINDS: dict[str, Callable[[], torch.Tensor]] = {
    "zero": lambda: torch._efficientzerotensor((SIZE, SIZE)),
    "meta": lambda: torch.ones(SIZE, SIZE, device="meta"),
    "wrapper": lambda: TwoTensor(full(), full()),
    "functional": lambda: torch._to_functional_tensor(full()),
    "sparse": lambda: full().to_sparse(),
    "mkldnn": lambda: full().to_mkldnn(),
    "quantized": lambda: torch.quantize_per_tensor(full(), 0.1, 0, torch.qint8),
    "conjugated": lambda: full(torch.complex64).mul(1j).conj(),
    "negated": lambda: full(torch.complex64).mul(1j).conj().imag,
    "complex half": lambda: full(torch.complex32),
    "expanded scalar": lambda: torch.ones(()).expand(SIZE, SIZE),
    "overlapping": lambda: torch.arange(2.0 * SIZE).as_strided((SIZE, SIZE), (1, 1)),
    "copy on write": lambda: full()._lazy_clone(),
    "empty": lambda: torch.empty(3, 0, dtype=torch.complex64),
    "read only": lambda: torch.frombuffer(bytes(range(256)), dtype=torch.uint8),
    "shared": lambda: full().share_memory_(),
}
WAYS |= {f"of kind {kind}": partial(step, make) for kind, make in KINDS.items()}


def differences(folder: Path, run: Callable[[], Any]) -> list[str]:
    theirs, lines = run(), list[str]()
    policies: tuple[Any, ...] = ("nvme", "auto")
    for policy in policies:
        for budget in (0, "256M"):
            with save_on_nvme(folder, min_bytes=1, memory_budget=budget, policy=policy) as saving:
                lines += [f"{policy} {budget}: {word}" for _ in range(2) if (word := same(run(), theirs))]
            saving.close()
    return lines


@alone
def test_tensors_of_any_kind_come_back_whatever_the_way(folder: Path) -> None:
    assert apart(list(WAYS), lambda way: differences(folder, WAYS[way])) == {way: [] for way in WAYS}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("budget", [0, "256M"])
def test_what_was_freed_for_good_or_nested_and_changed_is_told(folder: Path, budget: Any) -> None:
    with save_on_nvme(folder, min_bytes=1, memory_budget=budget):
        with pytest.raises(RuntimeError, match=r"of shape \(64, 64\), saved .* resized to 0 bytes"):
            step(full, lambda tensor: resized(tensor, 0))
        x = torch.randn(5, 8, requires_grad=True)
        made = torch.nested.as_nested_tensor([x[:2] * 2, x[2:] * 2])
        loss = (made * made).to_padded_tensor(0.0).sum()
        made.mul_(2)
        with pytest.raises(RuntimeError, match=MODIFIED):
            loss.backward()
