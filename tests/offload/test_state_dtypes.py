"""NvmeOptimizer with states in fewer bits, and of whole parameters: against bitsandbytes, torch and definitions."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from nvme_ops.base.native import native
from nvme_ops.offload import NvmeOptimizer, swap_gradients, swap_params
from nvme_ops.offload.optimizer import state_dtypes
from nvme_ops.offload.optimizer.state_dtypes import BLOCK, Int8, Randomness, expanded, in_blocks, randomness, rounded
from tests.conftest import in_child
from tests.device.kinds import SIMULATED, on_a_gpu
from tests.doubles import private_device
from tests.offload.elsewhere import alone, same, values
from tests.offload.test_optimizer_kept import Acting, kill
from tests.offload.training import adamw, equal, states
from tests.offload.training import values as values_of

CPU = torch.device("cpu")
STATE_DTYPES = ("bfloat16", "int8")


def model(dtype: torch.dtype = torch.float32, device: Any = "cpu") -> Any:
    """Parameters of several chunks, of less than a block at the end, of too few elements, turned, and of none."""
    torch.manual_seed(3)
    made = torch.nn.ParameterList(
        torch.randn(shape) for shape in ((300, 201), (64, 64), (63, 65), (5, 1000), (0, 3), (90, 200))
    )
    made[3].data = made[3].data.t().contiguous().t()
    return made.to(device, dtype)


def train(params: Any, optimizer: torch.optim.Optimizer, begin: int, end: int) -> None:
    """Takes steps with gradients that depend on the parameters, some of which have none in the second step."""
    for step in range(begin, end):
        for number, param in enumerate(params):
            noise = torch.randn(param.shape, generator=torch.Generator().manual_seed(100 * step + number))
            gradient = torch.empty_like(param).copy_(noise * values(param).cpu().float().sin())
            param.grad = None if step == number == 1 else gradient
        optimizer.step()


# The numbers

ANY = Randomness(1, 0)


def samples(signed: bool) -> torch.Tensor:
    """Blocks: usual ones, of the map's own values, zeros, tiny ones, with NaN, with an infinity, and a shorter one."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(40 * BLOCK + 7, generator=generator) * torch.randn(40 * BLOCK + 7, generator=generator).exp()
    blocks = x[: 40 * BLOCK].view(40, BLOCK)
    blocks[1] = -state_dtypes._map(True, CPU).values * 3
    blocks[2], blocks[3] = 0.0, blocks[3] * 1e-39
    blocks[4, 9], blocks[5, 9], blocks[6] = torch.nan, torch.inf, blocks[6].abs().neg()
    return x if signed else x.square()


def stored(x: torch.Tensor, signed: bool, random: Randomness | None = ANY) -> torch.Tensor:
    made = torch.zeros(Int8(signed).nbytes(-(-x.numel() // BLOCK) * BLOCK), dtype=torch.uint8)
    Int8(signed).pack(x, made, slice(0, x.numel()), random)
    return made


def unpacked(made: torch.Tensor, count: int, signed: bool) -> torch.Tensor:
    out = torch.empty(count)
    Int8(signed).expand(made, slice(0, count), out)
    return out


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("signed", [True, False])
def test_int8_takes_the_nearest_value_of_the_map(signed: bool, threads: int, one_thread: None) -> None:
    torch.set_num_threads(threads)
    x, table = samples(signed).repeat(1 + 20 * (threads > 1)), state_dtypes._map(signed, CPU).values
    made = stored(x, signed)
    numbers, scales = Int8(signed)._parts(made, slice(0, x.numel()))
    out = unpacked(made, x.numel(), signed)
    blocks, every = in_blocks(x), in_blocks(out)
    assert same(scales, blocks.abs().amax(1)) == ""
    usable = (scales > 0) & (scales < torch.inf)
    assert every[~usable].nan_to_num(nan=0.0).count_nonzero() == 0
    assert every[~(scales < torch.inf)].isnan().all(), "what is not finite shows"
    shares = (blocks / scales.unsqueeze(1))[usable].double()
    apart = (table.double() - shares.unsqueeze(-1)).abs()
    if not signed:
        apart[..., 0].masked_fill_(shares > 0, 2.0)  # what is not zero does not become zero
    chosen = in_blocks(numbers)[usable].long()
    differs = apart.gather(-1, chosen.unsqueeze(-1)).squeeze(-1) - apart.amin(-1)
    assert differs[:-1].max() < 1e-7
    by_torch = Int8(signed).numbers_of(blocks, scales).view(-1)[: x.numel()]
    assert torch.equal(by_torch, numbers)
    assert same(expanded(table, in_blocks(numbers), scales).view(-1)[: x.numel()], out) == ""


@pytest.mark.parametrize("signed", [True, False])
def test_what_was_expanded_is_packed_to_the_same_bytes(signed: bool) -> None:
    """Else a look at a state, or a state dict that is loaded again, would change it."""
    x = samples(signed)
    x[x.isnan() | x.isinf()] = 0.5
    made = stored(x, signed)
    again = stored(unpacked(made, x.numel(), signed), signed, None)
    assert torch.equal(made, again)
    once = stored(x, signed, None)
    blocks = [in_blocks(unpacked(one, x.numel(), signed)) - in_blocks(x) for one in (made, once)]
    assert not blocks[1].abs().amax() > blocks[0].abs().amax(), "values that never were in int8 lose no more"


def test_bfloat16_is_rounded_to_a_neighbour_and_the_mean_is_kept() -> None:
    x = torch.randn(1 << 18, generator=torch.Generator().manual_seed(1))
    x[: 1 << 16] = 1.003
    x[-3:] = torch.tensor([torch.nan, -torch.inf, 3.0])
    x[-4:-3].view(torch.int32).fill_(-1)  # NaN whose bits a carry would make a zero

    def of(random: Randomness) -> torch.Tensor:
        out = torch.empty(x.numel(), dtype=torch.bfloat16)
        native().round_states(x, *random, out, 2)
        assert same(out[:-4], rounded(x, random)[:-4]) == ""
        return out.float()

    one = of(randomness(5, 1, 0, 0, "exp_avg"))
    assert ((one - x).abs() <= x.abs() * 2**-7)[:-4].all()
    assert one[-4:].isnan().tolist() == [True, True, False, False]
    assert one[-2:].tolist() == [-torch.inf, 3.0]
    assert abs(one[: 1 << 16].mean() - 1.003) < 1e-4, "its nearest neighbour is 1.0"
    others = [(6, 1, 0, 0, "exp_avg"), (5, 2, 0, 0, "exp_avg"), (5, 1, 1, 0, "exp_avg"), (5, 1, 0, 0, "sum"),
              (5, 1, 0, 1, "exp_avg")]  # fmt: skip
    for other in others:
        agreeing = (one == of(randomness(*other))[:])[: 1 << 16].float().mean()
        assert agreeing < 0.6, other  # 0.384**2 + 0.616**2 by chance
    part = torch.empty(100, dtype=torch.bfloat16)
    native().round_states(x[300:400], *randomness(5, 1, 0, 300, "exp_avg"), part, 1)
    assert torch.equal(part.float(), one[300:400]), "numbers belong to elements, not to chunks"


# Against bitsandbytes


@pytest.mark.parametrize("name", ["AdamW", "SGD"])
def test_states_of_bitsandbytes_are_taken_over_and_a_step_is_its_step(folder: Path, name: str) -> None:
    bnb: Any = pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    for signed in (True, False):
        assert torch.equal(state_dtypes._map(signed, CPU).values, bnb.functional.create_dynamic_map(signed))
    options: dict[str, Any] = {"lr": 0.01, **({"momentum": 0.9} if name == "SGD" else {"weight_decay": 0.1})}
    mine, other = model(), model()
    for params in (mine, other):  # bitsandbytes has no states of none
        params[3].data, params[4].requires_grad = params[3].data.contiguous(), False
    plain = getattr(bnb.optim, f"{name}8bit")([param for param in other if param.numel()], **options)
    with NvmeOptimizer(
        [param for param in mine if param.numel()], getattr(torch.optim, name), folder, memory_budget="1M",
        state_dtype="int8", **options,
    ) as ours:  # fmt: skip
        packed = {part.parameter.numel() for chunk in ours._states.division.chunks if chunk.bytes_of_values
                  for part in chunk.slices}  # fmt: skip
        assert packed == {param.numel() for param in mine if param.numel() >= 4096}
        train(other, plain, 0, 6)
        mine.load_state_dict(other.state_dict())
        for again in (plain.state_dict(), {**plain.state_dict(), "state": unwrapped(plain)}):
            ours.load_state_dict(copy.deepcopy(again))
            assert same(of_ours(ours), of_bitsandbytes(bnb, plain)) == ""
        train(mine, ours, 6, 7)
        train(other, plain, 6, 7)
        torch.testing.assert_close(list(mine), list(other), rtol=1e-5, atol=1e-7)
        for one, two in zip(of_ours(ours), of_bitsandbytes(bnb, plain), strict=True):
            assert (one - two).abs().max() <= 0.0142 * two.abs().max(), "a step of the map at most"
        del again["state"][0]["absmax1"]
        with pytest.raises(ValueError, match=f"states of bitsandbytes' {name}8bit are not in blocks of 256"):
            ours.load_state_dict(again)
    with adamw(mine, folder, state_dtype="int8") as ours, pytest.raises(ValueError, match="not those of its AdamW8bit"):
        ours.load_state_dict(
            bnb.optim.SGD8bit(other, lr=0.1, momentum=0.9).state_dict() | {"state": {0: {"state1": 1}}}
        )


def unwrapped(plain: Any) -> dict[int, Any]:
    """The states of a state dict of bitsandbytes before version 0.46."""
    return {number: dict(plain.state[param]) for number, param in enumerate(plain.param_groups[0]["params"])}


def of_bitsandbytes(bnb: Any, plain: Any) -> list[torch.Tensor]:
    made = []
    for entry in unwrapped(plain).values():
        for key in ("1", "2"):
            if (state := entry.get(f"state{key}")) is not None and state.dtype == torch.uint8:
                how = bnb.functional.QuantState(
                    entry[f"absmax{key}"], code=entry[f"qmap{key}"], blocksize=BLOCK, dtype=torch.float32
                )
                state = bnb.functional.dequantize_blockwise(state, how)
            made += [] if state is None else [state]
    return made


def of_ours(ours: NvmeOptimizer) -> list[torch.Tensor]:
    found = (value for _, entry in sorted(ours.state_dict()["state"].items()) for value in entry.values())
    return [value for value in found if isinstance(value, torch.Tensor) and value.dim()]


# Whatever else is asked of an optimizer


def trained(folder: Path, steps: int, device: Any = "cpu", **options: Any) -> list[Any]:
    """Returns parameters and states after so many steps."""
    params = model(device=device)
    with adamw(params, folder, lr=0.01, **options) as optimizer:
        train(params, optimizer, 0, steps)
        return [[values(param).cpu() for param in params], states(optimizer)]


@SIMULATED
@alone
def test_an_accelerator_has_the_same_bytes(folder: Path) -> None:
    """Where torch's operations pack and expand."""
    simulated = private_device()
    torch.set_num_threads(1)
    for state_dtype in STATE_DTYPES:
        expected = trained(folder, 4, state_dtype=state_dtype, foreach=False)
        with simulated.left_as_found(), simulated.computing(), simulated.in_random_order(1):
            found = trained(folder, 4, simulated.device(), state_dtype=state_dtype, foreach=False)
            state_dtypes._map.cache_clear()
        assert same(found, expected) == "", state_dtype


@pytest.mark.parametrize("state_dtype", STATE_DTYPES)
@pytest.mark.parametrize("device", [pytest.param("cuda", marks=on_a_gpu)])
def test_a_gpu_packs_to_the_same_bytes(state_dtype: Any, device: str) -> None:
    x = samples(True)
    packing = Int8(True) if state_dtype == "int8" else state_dtypes.Bfloat16()
    size, made = packing.nbytes(41 * BLOCK), []
    for place in ("cpu", device):
        bytes_of = torch.zeros(size, dtype=torch.uint8, device=place)
        packing.pack(x.to(place), bytes_of, slice(0, x.numel()), Randomness(3, 5))
        out = torch.empty_like(x, device=place)
        packing.expand(bytes_of, slice(0, x.numel()), out)
        made.append(out.cpu())
    assert same(*made) == ""


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("state_dtype", STATE_DTYPES)
@pytest.mark.parametrize("how", ["held", "some held", "kept", "backward", "swapped", "state dict", "file", "looked at"])
def test_the_bits_are_the_same_wherever_states_are(folder: Path, state_dtype: Any, how: str) -> None:
    expected, params = trained(folder, 4, state_dtype=state_dtype), model()
    options: dict[str, Any] = {"state_dtype": state_dtype, "lr": 0.01, "memory_budget": "1M"}
    every: dict[str, dict[str, Any]] = {
        "held": {"memory_budget": "8M"}, "some held": {"memory_budget": "1300K"}, "kept": {"reuse": True},
        "backward": {"overlap": "backward", "free_gradients": True},
    }  # fmt: skip
    more = every.get(how, {})
    swap: Any = None
    if how == "swapped":
        swap = swap_params(params, folder, memory_budget="1M", min_bytes="4K")
        swap_gradients(params.parameters(), folder, memory_budget="1M", min_bytes="4K")
    with adamw(params, folder, **{**options, **more}) as optimizer:
        if how == "backward":
            backward(params, optimizer, 4)
        else:
            train(params, optimizer, 0, 2)
            if how == "looked at":
                for param in params:
                    assert len(optimizer.state[param].get("exp_avg", torch.zeros(0))) == len(param)
            if how in ("kept", "state dict", "file"):
                saved = copy.deepcopy(optimizer.state_dict())
                assert not optimizer.save_states(folder / "file")
                optimizer.close()
                optimizer = adamw(
                    params, folder, **{**options, **more, "memory_budget": "2M" if how == "state dict" else "1M"}
                )
                if how == "state dict":
                    optimizer.load_state_dict(saved)
                if how == "file":
                    optimizer.load_states(folder / "file")
            train(params, optimizer, 2, 4)
        assert same([[values(param) for param in params], states(optimizer)], expected) == ""
        optimizer.close()
    if swap is not None:
        swap.close()


def backward(params: Any, optimizer: NvmeOptimizer, steps: int) -> None:
    """Takes the steps of ``train`` by backward passes."""
    for step in range(steps):
        losses = []
        for number, param in enumerate(params):
            noise = torch.randn(param.shape, generator=torch.Generator().manual_seed(100 * step + number))
            if not step == number == 1:
                losses.append((param * (noise * param.detach().sin())).sum())
        torch.stack(losses).sum().backward()
        optimizer.step()


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("state_dtype", STATE_DTYPES)
def test_a_kill_and_a_failed_step_cost_no_bit(folder: Path, state_dtype: Any) -> None:
    expected = trained(folder / "..", 4, state_dtype=state_dtype, memory_budget="2M", name="other")
    options: dict[str, Any] = {"state_dtype": state_dtype, "reuse": True, "lr": 0.01}

    def child() -> None:
        torch.set_num_threads(1)
        params, handle = model(), Acting(backend="threads")
        optimizer = adamw(params, folder, handle=handle, **options)
        train(params, optimizer, 0, 2)
        torch.save(params.state_dict(), folder / "params")
        handle.after(3, kill)
        train(params, optimizer, 2, 3)

    with pytest.raises(AssertionError, match="-9"):
        in_child(child)
    params, handle = model(), Acting()
    params.load_state_dict(torch.load(folder / "params"))
    with adamw(params, folder, handle=handle, **options) as optimizer:
        assert optimizer.steps == 2
        handle.after(2, mock.Mock(side_effect=OSError("full")))
        with pytest.raises(OSError, match="full"):
            train(params, optimizer, 2, 3)
        handle.act = lambda: None
        optimizer.step()
        train(params, optimizer, 3, 4)
        assert same([[values(param) for param in params], states(optimizer)], expected) == ""


@pytest.mark.parametrize("state_dtype", STATE_DTYPES)
def test_a_step_moves_no_more_than_the_bits(folder: Path, state_dtype: Any) -> None:
    params = torch.nn.Linear(1000, 1000)
    elements = sum(param.numel() for param in params.parameters())
    with adamw(params, folder, state_dtype=state_dtype, memory_budget="16M") as optimizer:
        train(params.parameters(), optimizer, 0, 3)
        before = copy.copy(optimizer.stats())
        train(params.parameters(), optimizer, 3, 4)
        stats, share = optimizer.stats(), {"bfloat16": 4, "int8": 2 + 8 / BLOCK}[state_dtype]
        for moved in (stats.bytes_read - before.bytes_read, stats.bytes_written - before.bytes_written):
            assert share * elements <= moved <= 1.02 * share * elements
        assert stats.peak_bytes <= 16 << 20


def test_the_seed_decides_and_equal_parameters_are_rounded_apart(folder: Path) -> None:
    def made(**options: Any) -> list[torch.Tensor]:
        params = [torch.nn.Parameter(torch.ones(50, 50)) for _ in range(2)]
        with NvmeOptimizer(
            params, torch.optim.SGD, folder, state_dtype="bfloat16", momentum=0.9, **options
        ) as optimizer:
            for _ in range(2):
                for param in params:
                    param.grad = torch.full((50, 50), 0.1)
                optimizer.step()
            return of_ours(optimizer)

    (one, two), again, other = made(seed=1), made(seed=1), made(seed=2)
    assert equal([one, two], again)
    for different in (two, other[0]):
        assert (one != different).float().mean() > 0.1


def test_states_that_were_kept_otherwise_are_refused_or_converted(folder: Path) -> None:
    params = model()
    with adamw(params, folder, reuse=True) as optimizer:
        train(params, optimizer, 0, 2)
        optimizer.save_states(folder / "states")
        saved = copy.deepcopy(optimizer.state_dict())
    said = r"kept with state_dtype=None, and this NvmeOptimizer is made with state_dtype='int8'.*state_dict\(\)"
    with pytest.raises(ValueError, match=said):
        adamw(params, folder, reuse=True, state_dtype="int8")
    with adamw(params, folder, state_dtype="int8", name="other") as optimizer:
        train(params, optimizer, 0, 1)
        before = states(optimizer)
        with pytest.raises(ValueError, match=said):
            optimizer.load_states(folder / "states")
        assert same(states(optimizer), before) == ""
        optimizer.load_state_dict(saved)
        for number, entry in optimizer.state_dict()["state"].items():
            for name in ("exp_avg", "exp_avg_sq"):
                wanted = saved["state"][number][name]
                most = wanted.abs().max() if wanted.numel() else 0
                assert not ((entry[name] - wanted).abs() > 0.0072 * most).any()
        plain = torch.optim.AdamW(params)
        plain.load_state_dict(optimizer.state_dict())
        assert plain.state[params[0]]["exp_avg"].dtype == torch.float32
    with adamw(params, folder, reuse=True) as optimizer:
        assert optimizer.steps == 2


@pytest.mark.parametrize(
    ("kind", "options", "said"),
    [
        ("RMSprop", {"centered": True, "state_dtype": "bfloat16"}, "is for moments .* RMSprop keeps 'grad_avg'"),
        ("ASGD", {"state_dtype": torch.int8}, "ASGD keeps 'ax'"),
        ("AdamW", {"state_dtype": "int4"}, "state_dtype must be None, 'bfloat16' or 'int8', not 'int4'"),
        ("AdamW", {"state_dtype": "int8", "master_weights": False}, "those of a parameter are torch.bfloat16"),
        ("AdamW", {"chunks": "layers"}, "chunks must be None, 'elements' or 'parameter', not 'layers'"),
        ("Muon", {"chunks": "elements"}, "Muon needs whole parameters"),
    ],
)
def test_what_cannot_be_stored_so_is_refused(folder: Path, kind: str, options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        NvmeOptimizer(model(torch.bfloat16).parameters(), getattr(torch.optim, kind), folder, **options)
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("state_dtype", STATE_DTYPES)
def test_a_model_learns_as_with_states_in_float32(folder: Path, state_dtype: Any) -> None:
    """300 steps, with an embedding most rows of which have a gradient of zero."""

    def losses(state_dtype: Any) -> list[float]:
        torch.manual_seed(1)
        learner = torch.nn.Sequential(
            torch.nn.Embedding(256, 32), torch.nn.Flatten(), torch.nn.Linear(128, 128), torch.nn.GELU(),
            torch.nn.Linear(128, 64),
        )  # fmt: skip
        seen, generator = [], torch.Generator().manual_seed(2)
        with adamw(learner, folder, state_dtype=state_dtype, lr=2e-3, fused=True) as optimizer:
            for _ in range(300):
                words = torch.randint(0, 256, (64, 4), generator=generator)
                loss = torch.nn.functional.cross_entropy(learner(words), words.sum(1) % 7 + words[:, 0] % 50)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                seen.append(loss.item())
        return seen

    wanted, found = losses(None), losses(state_dtype)
    assert wanted[-1] < 0.9 * wanted[0]
    for begin in range(0, 300, 50):
        one, other = (sum(curve[begin : begin + 50]) for curve in (wanted, found))
        assert abs(one - other) < 0.01 * one, begin


# Whole parameters


class Normalised(torch.optim.Optimizer):
    """Divides each gradient by its norm; ``extra`` is the shape of one more state, which it makes at some step."""

    def __init__(self, params: Any, lr: float = 0.1, extra: tuple[int, ...] | None = None, at: int = 1) -> None:
        super().__init__(params, {"lr": lr, "extra": extra, "at": at})

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for param in (param for param in group["params"] if param.grad is not None):
                state = self.state[param]
                state["step"] = state.get("step", 0) + 1
                state.setdefault("exp_avg", torch.zeros_like(param)).lerp_(param.grad / param.grad.norm(), 0.1)
                if group["extra"] is not None and state["step"] >= group["at"]:
                    state["row"] = torch.ones(group["extra"])
                param.data.add_(state["exp_avg"], alpha=-group["lr"])
        return closure


def matrices(dtype: torch.dtype = torch.float32) -> Any:
    made = model(dtype)
    return torch.nn.ParameterList(made[number] for number in (1, 2, 3, 5))


@pytest.mark.parametrize("how", [{}, {"overlap": "backward"}, {"memory_budget": "8M"}, {"reuse": True}], ids=str)
@pytest.mark.parametrize("kind", [torch.optim.Muon, Normalised])
def test_whole_parameters_are_updated_as_by_the_optimizer_itself(folder: Path, kind: Any, how: dict[str, Any]) -> None:
    mine, other = matrices(), matrices()
    given = {"memory_budget": "2M", **how, **({} if kind is torch.optim.Muon else {"chunks": "parameter"})}
    plain = kind(other.parameters(), lr=0.02)
    with NvmeOptimizer(mine.parameters(), kind, folder, lr=0.02, **given) as ours:
        for begin in (0, 2):
            for params, optimizer in ((mine, ours), (other, plain)):
                backward(params, optimizer, 2) if "overlap" in how else train(params, optimizer, begin, begin + 2)
                optimizer.zero_grad()
            assert equal(list(mine), list(other))
            assert same(states(ours)[:-1], states(plain)[:-1]) == ""
            ours.load_state_dict(copy.deepcopy(plain.state_dict()))
        assert len(ours._states.division.chunks) == len(mine)


def test_whole_parameters_may_have_states_in_fewer_bits_and_masters(folder: Path) -> None:
    mine, other = matrices(torch.bfloat16), matrices()
    for one, two in zip(mine, other, strict=True):
        two.data.copy_(one.data)
    plain = torch.optim.Muon(other.parameters(), lr=0.02)
    with NvmeOptimizer(
        mine.parameters(), torch.optim.Muon, folder, memory_budget="2M", state_dtype="int8", lr=0.02
    ) as ours:
        for step in range(3):
            train(mine, ours, step, step + 1)
            for one, two in zip(mine, other, strict=True):
                two.grad = None if one.grad is None else one.grad.float()
            plain.step()
        for one, two in zip(of_ours(ours)[::2], other, strict=True):
            assert one.dtype == torch.float32
            assert (one - two).norm() < 0.01 * two.norm()


def refuse_a_shard(folder: Path) -> None:
    from torch.distributed.tensor import distribute_tensor, init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    shard = torch.nn.Parameter(distribute_tensor(torch.zeros(8, 8), init_device_mesh("cpu", (2,))))
    with pytest.raises(ValueError, match=r"needs whole parameters, and this one is a DTensor"):
        NvmeOptimizer([shard], torch.optim.Muon, folder)


def test_what_cannot_be_whole_is_refused(folder: Path) -> None:
    with pytest.raises(ValueError, match="Muon only supports 2D parameters"):
        NvmeOptimizer([torch.nn.Parameter(torch.zeros(7))], torch.optim.Muon, folder)
    sgd: Callable[..., NvmeOptimizer] = functools.partial(
        NvmeOptimizer, optimizer_class=torch.optim.SGD, folder=folder, momentum=0.9, chunks="parameter"
    )
    large, small = torch.nn.Parameter(torch.ones(512, 1025)), torch.nn.Parameter(torch.ones(8, 8))
    with pytest.raises(ValueError, match=r"memory_budget, 11 MiB, must be at least 12 MiB: two buffers of 6 MiB for"):
        sgd([small, large], memory_budget="11M")
    with sgd([small, large], memory_budget="12M") as ours:
        train([small, large], ours, 0, 2)
        assert 0 < ours.stats().peak_bytes <= 12 << 20
        ours.add_param_group({"params": [torch.nn.Parameter(torch.zeros(512, 4000))]})
        with pytest.raises(
            ValueError, match=r"of shape \(512, 4000\) needs a buffer of 15\.\d+ MiB.* give it the parameter"
        ):
            ours.step()
    with pytest.raises(
        TypeError, match=r"Normalised is not one of .* give chunks='elements' if .* else chunks='parameter'"
    ):
        NvmeOptimizer(matrices().parameters(), Normalised, folder)
    said = r"Normalised keeps 'row' of shape .* there is room for states of its shape"
    given: Any = {"optimizer_class": Normalised, "folder": folder, "chunks": "parameter"}
    with pytest.raises(ValueError, match=said):
        NvmeOptimizer(matrices().parameters(), extra=(2, 1), **given)
    in_child(functools.partial(refuse_a_shard, folder))
    params = matrices()
    with NvmeOptimizer(params.parameters(), extra=(64, 1), at=2, **given) as ours:
        train(params, ours, 0, 1)
        before = values_of(params)
        with pytest.raises(ValueError, match=said):
            train(params, ours, 1, 2)
        assert equal(list(params), before), "what the failed step has changed is put back"
    assert list(folder.iterdir()) == []


class Particular(torch.optim.Optimizer):
    """Needs a rate, changes gradients, leaves what needs none, and has an option that no group has."""

    def __init__(self, params: Any, lr: float, averages: bool = False) -> None:
        super().__init__(params, {"lr": lr})
        self.averages = averages

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for param in (param for param in group["params"] if param.requires_grad and param.grad is not None):
                change = param.grad.add_(param, alpha=0.1)
                if self.averages:
                    change = self.state[param].setdefault("exp_avg", torch.zeros_like(param)).lerp_(change, 0.1)
                param.sub_(change, alpha=group["lr"])
        return closure


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("chunks", ["elements", "parameter"])
def test_a_class_of_ones_own_may_do_what_classes_do(folder: Path, chunks: Any) -> None:
    mine, other, handle = matrices(), matrices(), Acting()
    plain = Particular(other.parameters(), 0.02, averages=True)
    with NvmeOptimizer(
        mine.parameters(), Particular, folder, chunks=chunks, memory_budget="1M", handle=handle, lr=0.02, averages=True
    ) as ours:
        assert all(chunk.names == ["exp_avg"] for chunk in ours._states.division.chunks)
        for step in range(3):
            handle.after(1, mock.Mock(side_effect=OSError("full")))
            with pytest.raises(OSError, match="full"):
                train(mine, ours, step, step + 1)
            handle.act = lambda: None
            ours.step()
            train(other, plain, step, step + 1)
        assert equal(list(mine), list(other))


class Secretive(torch.optim.Optimizer):
    """Keeps something, where ``kept`` says."""

    def __init__(self, params: Any, kept: str) -> None:
        super().__init__(params, {"kept": kept})

    def step(self, closure: Any = None) -> Any:
        group = self.param_groups[0]
        state = self.state[group["params"][0]]
        state["step"] = state.get("step", 0) + 1
        if group["kept"] == "group":
            group["k"] = group.get("k", 0) + 1
        elif group["kept"] == "self":
            self.k = 1
        elif group["kept"] == "state":
            self.state["all"] = {}  # type: ignore[index]
        elif group["kept"] == "list":
            state["list"] = [1.0]
        elif group["kept"] == "complex":
            state["complex"] = torch.tensor(1j)
        elif state["step"] == 2:
            state["late"] = group["params"][0].clone()
        return closure


@pytest.mark.parametrize(
    ("kept", "said"),
    [
        ("group", r"Secretive.step changes group\['k'\], and each chunk .* has to be in state\[parameter\]"),
        ("self", "Secretive.step changes self.k"),
        ("state", "Secretive.step changes a state of no parameter"),
        ("list", "keeps 'list' 'list' of a parameter of shape"),
        ("complex", r"keeps 'complex' of shape \(\)"),
        ("late", r"keeps 'late' of shape \(64, 64\) .* that the first step makes"),
    ],
)
def test_what_a_class_keeps_where_none_keeps_it_is_refused(folder: Path, kept: str, said: str) -> None:
    params, given = matrices(), functools.partial(NvmeOptimizer, folder=folder, chunks="parameter", reuse=True)

    def two_steps() -> None:
        with given(params.parameters(), optimizer_class=Secretive, kept=kept) as optimizer:
            train(params, optimizer, 0, 2)

    with pytest.raises(ValueError, match=said):
        two_steps()
    with given(params.parameters(), optimizer_class=torch.optim.AdamW, name="other") as optimizer:
        train(params, optimizer, 0, 1)
        optimizer.state[params[0]]["list"] = [1.0]
        with pytest.raises(ValueError, match="there is 'list' of a parameter"):
            optimizer.step()
        del optimizer.state[params[0]]["list"]
