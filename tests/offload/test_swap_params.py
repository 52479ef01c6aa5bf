"""swap_params: parameters on storage train to the same bits, whatever the module does with them."""

from __future__ import annotations

import copy
import io
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from nvme_ops import aio_handle
from nvme_ops.offload import NvmeOptimizer, swap_params
from nvme_ops.offload.weights import residents
from nvme_ops.offload.weights.swapped import SwappedTensor
from tests.conftest import MIB, in_child
from tests.offload.test_optimizer import Failing
from tests.offload.training import equal, values

KIB = 1024


def network(dtype: torch.dtype = torch.float32) -> torch.nn.Sequential:
    """Some 300 KiB, the largest parameter of 64."""
    torch.manual_seed(1)
    return torch.nn.Sequential(
        torch.nn.Embedding(50, 64, padding_idx=0),
        *(torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64)) for _ in range(2)),
        torch.nn.LayerNorm(64), torch.nn.Linear(64, 8),
    ).to(dtype)  # fmt: skip


def words(number: int) -> torch.Tensor:
    return torch.randint(0, 50, (4, 6), generator=torch.Generator().manual_seed(number))


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: int = 3) -> list[float]:
    losses = []
    for number in range(steps):
        optimizer.zero_grad()
        loss = model(words(number)).float().square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def swapped_of(model: torch.nn.Module) -> list[SwappedTensor]:
    return [each for each in model.parameters() if isinstance(each, SwappedTensor)]


@pytest.mark.parametrize("budget", [80 * KIB, 200 * KIB, 4 * MIB])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_training_has_the_same_bits(folder: Path, budget: int, dtype: torch.dtype) -> None:
    mine, other = network(dtype), network(dtype)
    plain = torch.optim.AdamW(other.parameters(), lr=0.01)
    with swap_params(mine, folder, memory_budget=budget, min_bytes=4 * KIB) as swapped:
        assert len(swapped_of(mine)) >= 5
        optimizer = torch.optim.AdamW(mine.parameters(), lr=0.01, foreach=False)
        assert train(mine, optimizer) == train(other, plain)
        assert equal(values(mine), values(other))
        stats = swapped.stats()
        assert 0 < stats.peak_bytes <= budget
        assert stats.bytes_stored >= sum(each.nbytes for each in swapped_of(mine))


@pytest.mark.parametrize("overlap", [None, "backward"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_with_nvme_optimizer(folder: Path, overlap: Any, dtype: torch.dtype) -> None:
    mine, other = network(dtype), network(dtype)
    reference = NvmeOptimizer(other.parameters(), torch.optim.AdamW, folder, lr=0.01)
    swapped = swap_params(mine, folder, memory_budget=80 * KIB, min_bytes=4 * KIB)
    optimizer = NvmeOptimizer(mine.parameters(), torch.optim.AdamW, folder, memory_budget="1M", lr=0.01,
                              overlap=overlap, free_gradients=overlap is not None)  # fmt: skip
    with reference, swapped, optimizer:
        assert train(mine, optimizer) == train(other, reference)
        assert equal(values(mine), values(other))
        assert (overlap is None) == any(each.grad is not None for each in mine.parameters())
        saved, theirs = optimizer.state_dict()["state"], reference.state_dict()["state"]
        assert all(torch.equal(saved[key][name], theirs[key][name]) for key in theirs for name in theirs[key])
        optimizer.load_state_dict(optimizer.state_dict())
        assert train(mine, optimizer, 1) == train(other, reference, 1)


def test_reads_are_ahead_of_their_use_once_the_order_is_known(folder: Path) -> None:
    """Uses come much later than the reads that are begun for them, except after what nobody could foresee."""
    torch.manual_seed(1)
    model = torch.nn.Sequential(*(torch.nn.Linear(256, 256, bias=False) for _ in range(12)))
    with swap_params(model, folder, memory_budget=4 * 256 * KIB, min_bytes=1) as swapped:
        x = torch.ones(1, 256)
        for _ in range(3):
            model(x).sum().backward()
        before = swapped.stats()
        model(x).sum().backward()
        after = swapped.stats()
        assert after.bytes_on_demand == before.bytes_on_demand
        assert after.bytes_read - before.bytes_read <= (24 - 6) * 256 * KIB, "what is used at both turns stays"
        assert after.bytes_written == before.bytes_written


class Odd(torch.nn.Module):
    """Uses parameters in unusual ways: of a child that is never called, tied, as views, twice, and not at all."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.words = torch.nn.Embedding(50, 64)
        self.attention = torch.nn.MultiheadAttention(64, 4, batch_first=True)
        self.memory = torch.nn.LSTM(64, 64, batch_first=True)
        self.image = torch.nn.Conv1d(64, 64, 3, padding=1)
        self.block = torch.nn.Parameter(torch.randn(64, 8, 8) / 8)
        self.frozen = torch.nn.Parameter(torch.randn(64, 64) / 8, requires_grad=False)
        self.unused = torch.nn.Parameter(torch.ones(64, 64))
        self.out = torch.nn.Linear(64, 50, bias=False)
        self.out.weight = self.words.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.words(x)
        x = x + self.attention(x, x, x, need_weights=False)[0]
        x = x + self.memory(x)[0]
        x = x + self.image(x.transpose(1, 2)).transpose(1, 2)
        x = x + x @ self.block.reshape(64, 64) + x @ self.block.flatten(1)
        x = x.tanh() @ self.frozen.T + torch.einsum("bij,jk->bik", x, self.frozen[:, :64])
        return self.out(x.tanh())


@pytest.mark.parametrize("budget", [256 * KIB, 4 * MIB])
def test_unusual_uses(folder: Path, budget: int) -> None:
    mine, other = Odd(), Odd()
    plain = torch.optim.SGD(other.parameters(), lr=0.001, momentum=0.9)
    with swap_params(mine, folder, memory_budget=budget, min_bytes=4 * KIB):
        assert mine.out.weight is mine.words.weight
        optimizer = NvmeOptimizer(
            mine.parameters(), torch.optim.SGD, folder, memory_budget="1M", lr=0.001, momentum=0.9
        )
        with optimizer:
            assert train(mine, optimizer) == train(other, plain)
        assert equal(values(mine), values(other))


@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpointing(folder: Path, reentrant: bool) -> None:
    class Checkpointed(torch.nn.Module):
        layers: torch.nn.Sequential

        def __init__(self) -> None:
            super().__init__()
            self.layers = network()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.layers[0](x)
            for layer in list(self.layers)[1:]:
                x = checkpoint(layer, x, use_reentrant=reentrant)
            return x

    mine, other = Checkpointed(), Checkpointed()
    plain = torch.optim.SGD(other.parameters(), lr=0.1)
    with swap_params(mine, folder, memory_budget=80 * KIB, min_bytes=4 * KIB) as swapped:
        assert train(mine, torch.optim.SGD(mine.parameters(), lr=0.1, foreach=False)) == train(other, plain)
        assert swapped.stats().peak_bytes <= 80 * KIB


def test_autocast_keeps_no_converted_copies(folder: Path) -> None:
    """Autocast's cache and autograd would have each weight in bfloat16 until the end of the backward pass."""
    mine, other = network(), network()
    plain = torch.optim.SGD(other.parameters(), lr=0.1)
    with swap_params(mine, folder, memory_budget=80 * KIB, min_bytes=4 * KIB):
        optimizer = torch.optim.SGD(mine.parameters(), lr=0.1, foreach=False)
        for number in range(3):
            for model, each in ((mine, optimizer), (other, plain)):
                each.zero_grad()
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    loss = model(words(number)).float().square().mean()
                loss.backward()
                each.step()
        assert equal(values(mine), values(other))


def test_a_copy_has_the_values_of_its_time(folder: Path) -> None:
    model = torch.nn.Linear(64, 64)
    with swap_params(model, folder, memory_budget="1M", min_bytes=1):
        before = model.weight.detach().clone()
        copied = model.weight.detach().to(torch.float64)
        with torch.no_grad():
            model.weight.add_(1)
        assert torch.equal(copied, before.to(torch.float64))
        assert torch.equal(model.weight.detach(), before + 1)


def test_what_is_noted_of_copies_and_views_does_not_grow(folder: Path) -> None:
    model = torch.nn.Linear(64, 64)
    with swap_params(model, folder, memory_budget="1M", min_bytes=1), torch.no_grad():
        (weight, _) = swapped_of(model)
        kept = weight.detach()[3]
        for _ in range(1000):
            weight.detach().to(torch.bfloat16)
            weight.detach()[2].fill_(2)
        assert len(weight.resident.copies) <= 100
        kept.fill_(3)
        assert weight[2:4].sum(1).tolist() == [128, 192]


def test_backward_after_a_change_is_told_as_usual(folder: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))
    with swap_params(model, folder, memory_budget="1M", min_bytes=1):
        optimizer = NvmeOptimizer(model.parameters(), torch.optim.SGD, folder, lr=0.1)
        with optimizer:
            loss = model(torch.ones(1, 64)).sum()
            loss.backward(retain_graph=True)
            loss.backward(retain_graph=True)
            optimizer.step()
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                loss.backward()


def test_writes_of_all_kinds_are_kept(folder: Path) -> None:
    """In place, to a row, to ``data`` and its rows, by ``init`` and ``load_state_dict``, with evictions between."""
    torch.manual_seed(1)
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64, bias=False) for _ in range(6)))
    other = copy.deepcopy(model)
    with swap_params(model, folder, memory_budget=40 * KIB, min_bytes=1):
        for each in (model, other):
            layers: list[Any] = list(each)
            torch.manual_seed(2)
            with torch.no_grad():
                layers[0].weight.mul_(2)
                layers[1].weight[3].fill_(7)
                torch.nn.init.orthogonal_(layers[2].weight)
                layers[5].weight[1:3, 4:].copy_(torch.ones(2, 60))
            layers[3].weight.data.add_(1)
            layers[4].weight.data[5] = 3
            each(torch.ones(1, 64))
        assert equal(values(model), values(other))
        state = {name: value + 1 for name, value in other.state_dict().items()}
        model.load_state_dict(state)
        other.load_state_dict(state)
        row = model[0].get_parameter("weight").detach()[0]
        model(torch.ones(1, 64))
        row.fill_(9)  # of a view that is older than what has been fetched since
        other[0].get_parameter("weight").data[0].fill_(9)
        model(torch.ones(1, 64))
        assert equal(values(model), values(other))


@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
def test_out_of_another_shape_is_refused_and_keeps_its_values(folder: Path) -> None:
    model, x = torch.nn.Linear(48, 48), torch.ones(48)
    before = model.bias.detach().clone()
    with swap_params(model, folder, memory_budget="64K", min_bytes=1), torch.no_grad():
        bias: Any = model.bias
        bias.add_(1)  # newer in memory than on storage
        for work in (
            lambda: torch.add(torch.ones(1, 48), 1, out=bias),
            lambda: torch.masked_select(x, x > 0, out=model.weight),  # of whatever shape the values say
            lambda: bias.addbmm_(torch.ones(3, 5, 4), torch.ones(3, 4, 48)),  # which torch resizes, as if it were out=
        ):
            with pytest.raises(RuntimeError, match=r"cannot be resized.*: assign the result to its \.data"):
                work()
        assert torch.equal(bias, before + 1)
        assert torch.masked_select(x, x > 0, out=bias) is bias
        assert torch.equal(bias, x)
        assert torch.mul(bias, 3, out=bias) is bias
        assert torch.equal(bias, 3 * x)


def test_a_tensor_in_memory_beside_one_on_storage_in_a_list_is_changed_too(folder: Path) -> None:
    model = torch.nn.Linear(48, 48)
    x = torch.ones(3, requires_grad=True)
    inner = x * 2
    loss = (inner * inner).sum()
    with swap_params(model, folder, memory_budget="64K", min_bytes=1), torch.no_grad():
        torch._foreach_add_([inner, model.weight], 1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_state_dicts_pickles_and_copies(folder: Path) -> None:
    mine, other = network(), network()
    with swap_params(mine, folder, memory_budget=80 * KIB, min_bytes=4 * KIB):
        file = io.BytesIO()
        torch.save(mine.state_dict(), file)
        file.seek(0)
        saved = torch.load(file)
        assert all(type(each) is torch.Tensor for each in saved.values())
        other.load_state_dict(saved)
        assert equal(values(mine), values(other))
        copied = copy.deepcopy(mine)
    assert equal(values(copied), values(other))
    assert all(type(each) is torch.nn.Parameter and each.requires_grad for each in copied.parameters())


def test_gathered_and_restored(folder: Path) -> None:
    mine, other = network(), network()
    swapped = swap_params(mine, folder, memory_budget=200 * KIB, min_bytes=4 * KIB)
    parameter, usual = list(mine.parameters())[1], list(other.parameters())[1]
    with swapped.gathered([parameter]) as (found,):
        assert type(found) is torch.Tensor
        assert torch.equal(found, usual.detach())
    with swapped.gathered([parameter], change=True) as (found,):
        found.add_(1)
    usual.data.add_(1)
    mine(words(1)).sum().backward()
    other(words(1)).sum().backward()
    swapped.restore()
    swapped.close()
    assert equal(values(mine), values(other))
    assert all(type(each) is torch.nn.Parameter for each in mine.parameters())
    assert all(torch.equal(each.grad, one.grad) for each, one in zip(mine.parameters(), other.parameters(), strict=True)
               if each.grad is not None and one.grad is not None)  # fmt: skip
    assert not list(folder.iterdir())


def test_a_model_larger_than_memory_begins_on_the_meta_device(folder: Path) -> None:
    def make() -> torch.nn.Sequential:
        return torch.nn.Sequential(torch.nn.Embedding(50, 64, padding_idx=1), torch.nn.Linear(64, 256),
                                   torch.nn.BatchNorm1d(256), torch.nn.Linear(256, 64))  # fmt: skip

    with torch.device("meta"):
        mine = make()
    torch.manual_seed(5)
    with swap_params(mine, folder, memory_budget=70 * KIB, min_bytes=4 * KIB):
        torch.manual_seed(5)
        other = make()
        assert equal(values(mine), values(other))
        buffers = zip(mine.buffers(), other.buffers(), strict=True)
        assert all(torch.equal(one, two) for one, two in buffers)
    with torch.device("meta"):
        mine = make()

    def twos(module: torch.nn.Module) -> None:
        for each in module.parameters(recurse=False):
            each.fill_(2)

    with swap_params(mine, folder, memory_budget=70 * KIB, min_bytes=4 * KIB, param_init_fn=twos):
        assert all(torch.equal(each, torch.full_like(each, 2)) for each in values(mine))


def test_what_cannot_be_is_refused_and_nothing_changes(folder: Path) -> None:
    model = network()
    before = list(model.parameters())
    with pytest.raises(MemoryError, match=r"64 KiB, of shape \(.*\), does not fit a memory_budget of 32 KiB"):
        swap_params(model, folder, memory_budget="32K", min_bytes=1)
    with pytest.raises(ValueError, match="none of min_bytes or more"):
        swap_params(model, folder, memory_budget="1M")
    with pytest.raises(ValueError, match="the parameters are on cpu, not on cuda"):
        swap_params(model, folder, memory_budget="1M", min_bytes=1, device="cuda")
    mixed = torch.nn.ModuleList([torch.nn.Linear(9, 9), torch.nn.Linear(9, 9, device="meta")])
    with pytest.raises(ValueError, match="the parameters are on 2 devices, not on one: cpu, meta"):
        swap_params(mixed, folder, memory_budget="1M", min_bytes=1)
    bare = torch.nn.Module()
    bare.weight = torch.nn.Parameter(torch.empty(99, device="meta"))
    with pytest.raises(ValueError, match="Module is on the meta device and has no reset_parameters"):
        swap_params(bare, folder, memory_budget="1M", min_bytes=1)
    with pytest.raises(FileNotFoundError):
        swap_params(model, folder / "missing" / "below", memory_budget="1M", min_bytes=1)
    assert all(one is other for one, other in zip(before, model.parameters(), strict=True))
    with (
        swap_params(model, folder, memory_budget="1M", min_bytes=1),
        pytest.raises(ValueError, match="swapped already"),
    ):
        swap_params(model, folder, memory_budget="1M", min_bytes=1)
    with pytest.raises(ValueError, match="was closed"):
        model(words(1))
    assert not list(folder.iterdir())


# Not alone


def test_memory_that_somebody_holds_is_waited_for_and_told(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(residents, "_PATIENCE", 0.2)
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64, bias=False) for _ in range(3)))
    with swap_params(model, folder, memory_budget=40 * KIB, min_bytes=1):
        held = [each.lent().__enter__() for each in swapped_of(model)[:2]]
        with pytest.raises(
            MemoryError, match=r"no memory in one piece for a tensor of 16 KiB, .* others in use have 32 KiB of 40"
        ):
            model(torch.ones(1, 64))
        threading.Timer(0.1, held.clear).start()
        monkeypatch.setattr(residents, "_PATIENCE", 30.0)
        model(torch.ones(1, 64))


def test_threads_that_compute_at_once(folder: Path, eager_switches: None) -> None:
    model, found = network(), dict[int, torch.Tensor]()
    expected = {number: model(words(number)).detach() for number in range(4)}
    with swap_params(model, folder, memory_budget=150 * KIB, min_bytes=4 * KIB):

        def compute(number: int) -> None:
            for _ in range(5):
                with torch.no_grad():
                    found[number] = model(words(number))

        threads = [threading.Thread(target=compute, args=(number,)) for number in range(4)]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
    assert all(torch.equal(found[number], expected[number]) for number in range(4))


def test_a_forked_child_cannot_use_them(folder: Path) -> None:
    model = torch.nn.Linear(64, 64)
    with swap_params(model, folder, memory_budget="1M", min_bytes=1):

        def body() -> None:
            with pytest.raises(RuntimeError, match="swapped by the parent process"), torch.no_grad():
                model(torch.ones(1, 64))

        in_child(body)
        model(torch.ones(1, 64))


# Failures


def layers(count: int = 6) -> torch.nn.Sequential:
    torch.manual_seed(1)
    return torch.nn.Sequential(*(torch.nn.Linear(64, 64, bias=False) for _ in range(count)))


def test_a_step_that_fails_leaves_parameters_on_storage_old_or_new(folder: Path) -> None:
    mine, other, handle = network(), network(), Failing()
    plain = torch.optim.AdamW(other.parameters(), lr=0.01)
    swapped = swap_params(mine, folder, memory_budget=80 * KIB, min_bytes=4 * KIB)
    optimizer = NvmeOptimizer(mine.parameters(), torch.optim.AdamW, folder, memory_budget="1M", lr=0.01, handle=handle)
    with swapped, optimizer:
        train(mine, optimizer, 1)
        train(other, plain, 1)
        for which in ("read", "write"):
            for model, each in ((mine, optimizer), (other, plain)):
                each.zero_grad()
                model(words(7)).square().mean().backward()
            handle.after[which] = 0
            with pytest.raises(OSError, match="Input/output error"):
                optimizer.step()
            optimizer.step()
            plain.step()
            assert equal(values(mine), values(other))


def test_handles_of_users_work(folder: Path) -> None:
    model = layers()
    with swap_params(model, folder, memory_budget=20 * KIB, min_bytes=1, handle=aio_handle(queue_depth=4)):
        model(torch.ones(1, 64))
