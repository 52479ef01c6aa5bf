"""Mixtures of experts: bits as in memory, each expert read once, and those used often stay."""

from __future__ import annotations

import copy
import itertools
import math
import os
import re
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import nvme_ops
from nvme_ops import aio_handle
from nvme_ops.base.errors import FormatError
from nvme_ops.formats import quantized
from nvme_ops.offload import NvmeCache, from_pretrained, stream_weights
from nvme_ops.offload.experts.experts import Experts, handle_in_order
from nvme_ops.offload.weights import grouped, streamed
from nvme_ops.offload.weights.grouped import _as_they_arrive
from nvme_ops.offload.weights.routing import _most_likely_first
from tests.conftest import KIB, in_threads
from tests.contract.faulty import Faulty
from tests.offload.architectures import tiny_model
from tests.offload.layers import SIZE, Layers
from tests.offload.models import MODELS, WIDTH, mixture, rewritten, saved
from tests.offload.packing import PACKINGS, PARTS, packing

#: How many reads an expert takes, where its matrices are no neighbours in the file.
READS = {"GptOss": 2, "Mixtral": 3}
pytestmark = pytest.mark.usefixtures("one_thread")  # on whose number the bits of a product depend


FP8 = torch.float8_e4m3fn
implementations = pytest.mark.parametrize("implementation", ["eager", "batched_mm", "grouped_mm"])


@implementations
@pytest.mark.parametrize("name", MODELS)
def test_logits_are_as_in_memory(name: str, implementation: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Experts are computed as they arrive, where that is known to give the same bits."""
    computed, compute = list[bool](), grouped.compute

    def noted(*args: Any) -> Any:
        result = compute(*args)
        computed.append(result is not None)
        return result

    monkeypatch.setattr("nvme_ops.offload.weights.routing.compute", noted)
    path, kind = saved(folder, name)
    plain = kind.from_pretrained(path, experts_implementation=implementation).eval()
    budget = sum(param.nbytes for param in plain.parameters()) // 2
    options: Any = {} if implementation == "eager" else {"experts_implementation": implementation}
    usual: Any = {"max_new_tokens": 3, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    for batch, mode in ((1, torch.no_grad), (32, torch.inference_mode)):
        tokens = torch.randint(0, 256, (batch, 7), generator=torch.Generator().manual_seed(batch))
        wanted = plain.generate(tokens, **usual)
        with from_pretrained(path, memory_budget=budget, **options) as model, mode(), NvmeCache(folder, "4M") as cache:
            experts = model._nvme_window.experts
            reads = READS.get(name, 1 if X.is_cpu else 2)  # more aligned
            assert {len(expert.reads) for expert in experts.groups[0]} == {reads}
            for given in ({}, {"cache": cache}):
                assert all(map(torch.equal, model.generate(tokens, **usual, **given).logits, wanted.logits))
            assert model.stats().peak_bytes <= budget
            assert model._nvme_window.experts is experts, "none is used as a whole"
    if X.is_cpu or implementation != "grouped_mm":  # where transformers takes another one for some tokens
        assert set(computed) == {implementation != "batched_mm"}


@torch.no_grad()
@pytest.mark.parametrize("batch", [1, 4])
def test_weights_that_are_assigned_take_the_place_of_the_stored_ones(batch: int, folder: Path) -> None:
    path, kind = saved(folder, "Qwen3Moe")
    plain = kind.from_pretrained(path, experts_implementation="eager").eval()
    tokens = torch.arange(batch).view(batch, 1)
    with from_pretrained(path, memory_budget=sum(param.nbytes for param in plain.parameters()) // 2) as model:
        for _ in range(2):
            assert torch.equal(model(tokens).logits, plain(tokens).logits)
        for network in (model, plain):
            experts = network.model.layers[0].mlp.experts
            experts.down_proj = nn.Parameter(torch.ones_like(plain.model.layers[0].mlp.experts.down_proj) / 8, False)
        assert torch.equal(model(tokens).logits, plain(tokens).logits)


def require_bits(model: Any, plain: Any, nbytes: int, budget: int, are_packed: bool = True) -> None:
    """Fails unless logits are the same, and experts of so many bytes are read, and kept within the budget.

    Those of a few tokens that are multiplied with what is stored in fewer bits are about the same.
    """
    for few in (0, quantized.FEW) if are_packed else (quantized.FEW,):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(quantized, "FEW", few)
            for shape in ((1, 7), (32, 7), (1, 1), (1, 1)):
                tokens = torch.arange(7 * 32).roll(5)[: math.prod(shape)].view(shape)
                actual, wanted = model(tokens).logits, plain(tokens).logits
                if few and are_packed:
                    assert torch.cosine_similarity(actual.float(), wanted.float(), -1).median() > 0.998
                    best = wanted.float().topk(2).values
                    sure = best[..., 0] - best[..., 1] > 0.1 * best[..., 0]
                    assert torch.equal(actual.argmax(-1)[sure], wanted.argmax(-1)[sure])
                else:
                    assert torch.equal(actual, wanted)
    experts = model._nvme_window.experts
    assert {sum(source.nbytes for source in expert.places) for expert in experts.groups[0]} == {nbytes}
    assert model.stats().expert_hits > 0
    assert model.stats().peak_bytes <= budget


@torch.no_grad()
@implementations
@pytest.mark.parametrize("name", ["DeepseekV3", "Glm4Moe", "Qwen3Moe"])
def test_experts_in_8_bits_are_read_so(name: str, implementation: str, folder: Path) -> None:
    blocks = 48, 40

    def change(name: str, value: torch.Tensor) -> Any:
        if not name.endswith(("proj.weight", "_proj_with_mqa.weight")):
            return None
        rows, columns = (torch.arange(size) // block for size, block in zip(value.shape, blocks, strict=True))
        scale = torch.rand(int(rows[-1]) + 1, int(columns[-1]) + 1) + 0.5
        wide = scale[rows][:, columns]
        low = (value / wide).to(torch.float8_e4m3fn)
        return {name: low, f"{name}_scale_inv": scale}, (low.float() * wide).bfloat16()

    path, kind = saved(folder, name)
    named: Any = {"quant_method": "fp8", "weight_block_size": blocks}
    if name == "Glm4Moe":
        groups = {"group_0": {"weights": {"block_structure": blocks}}}
        named = {"quant_method": "compressed-tensors", "config_groups": groups}
    plain = kind.from_pretrained(rewritten(path, change, named), experts_implementation=implementation).eval()
    budget = (path / "model.safetensors").stat().st_size * 3 // 4
    with from_pretrained(path, memory_budget=budget, experts_implementation=implementation) as model:
        require_bits(model, plain, 3 * 64 * 64, budget)


#: The others name their weights as Qwen3Moe does, and how these are put together is the same for all.
PACKED = [
    *itertools.product(("Mixtral", "Qwen3Moe"), PACKINGS),
    *itertools.product(("DeepseekV3", "Glm4Moe", "Olmoe"), ("nvfp4", "nf4 nested", "gptq in the order of activations")),
]


@torch.no_grad()
@pytest.mark.parametrize(("name", "packed_as"), PACKED)
def test_packed_experts_are_read_so(packed_as: str, name: str, folder: Path) -> None:
    pack, settings = packing(packed_as)
    sizes = set[int]()

    def change(name: str, value: torch.Tensor) -> Any:
        module = name.removesuffix("weight")
        if not re.search(r"experts\.\d+\.\w+\.weight$|[qo]_proj\.weight$", name):
            return None
        made, plain = pack(value)
        sizes.update([sum(made[end].nbytes for end in made if end in PARTS)] if "experts" in name else [])
        return {f"{module}{end}": tensor for end, tensor in made.items()}, plain.bfloat16()

    path, kind = saved(folder, name)
    plain = kind.from_pretrained(rewritten(path, change, settings), experts_implementation="eager").eval()
    budget = (path / "model.safetensors").stat().st_size * 3 // 4
    with from_pretrained(path, memory_budget=budget, experts_implementation="eager") as model:
        require_bits(model, plain, 3 * sizes.pop(), budget)


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e8m0fnu])
def test_experts_in_4_bits_beside_8_bits_are_read_so(dtype: torch.dtype, folder: Path) -> None:
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])

    def change(name: str, value: torch.Tensor) -> Any:  # as DeepSeek-V4 is published
        module = name.removesuffix(".weight")
        if not re.search(r"\.(w\d|w[qk]\w+)\.weight$", name):
            return None
        rows, columns = value.shape
        height, width = (1, 32) if (is_packed := "experts." in name and "shared" not in name) else (128, 128)
        exponents = torch.randint(118, 122, (-(-rows // height), -(-columns // width)), dtype=torch.uint8)
        wide = exponents.repeat_interleave(height, 0)[:rows].repeat_interleave(width, 1)[:, :columns]
        if is_packed:
            numbers = torch.randint(256, (rows, columns // 2), dtype=torch.uint8)
            meant = torch.stack([values[(numbers & 15).int()], values[(numbers >> 4).int()]], -1).view(rows, columns)
            made = numbers.view(torch.int8)
        else:
            made = (value * 99).to(FP8)
            meant = made.float()
        plain = (meant * torch.exp2(wide.float() - 127)).bfloat16()
        return {name: made, f"{module}.scale": exponents.view(dtype)}, plain

    kind = pytest.importorskip("transformers").DeepseekV4ForCausalLM
    tiny_model(kind).bfloat16().save_pretrained(path := folder / "V4")
    fp8 = {"quant_method": "fp8", "weight_block_size": [128, 128], "scale_fmt": "ue8m0", "expert_dtype": "fp4"}
    plain = kind.from_pretrained(rewritten(path, change, fp8), experts_implementation="eager").eval()
    tokens = torch.arange(24).view(2, 12)
    with from_pretrained(path, memory_budget="400K", experts_implementation="eager") as model:
        for _ in range(2):
            assert torch.equal(model(tokens).logits, plain(tokens).logits)
        (expert, *_), *_ = model._nvme_window.experts.groups
        assert sum(source.nbytes for source in expert.places) == 3 * 64 * 96 * 17 // 32
        assert model.stats().bytes_read > 0


@torch.no_grad()
@implementations
def test_experts_in_4_bits_are_read_so(implementation: str, folder: Path) -> None:
    mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")

    def change(name: str, value: torch.Tensor) -> Any:
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            return None
        count, columns, rows = value.shape
        blocks = torch.randint(256, (count, rows, columns // 32, 16), dtype=torch.uint8)
        scales = torch.randint(120, 128, (count, rows, columns // 32), dtype=torch.uint8)
        return {f"{name}_blocks": blocks, f"{name}_scales": scales}, mxfp4.convert_moe_packed_tensors(blocks, scales)

    path, kind = saved(folder, "GptOss")
    plain = rewritten(path, change, {"quant_method": "mxfp4"})
    wanted = kind.from_pretrained(plain, experts_implementation=implementation).eval()
    with from_pretrained(path, memory_budget="250K", experts_implementation=implementation) as model:
        require_bits(model, wanted, 3 * 64 * 64 * 17 // 32, 250 * KIB)  # 4 bits of each number, and 8 for every 32
        weights = [network.model.layers[0].mlp.experts.down_proj for network in (model, wanted)]
        assert torch.equal(weights[0].unsqueeze(0)[0, 3], weights[1][3])
        assert torch.equal(weights[0][3][5], weights[1][3][5])
    name, numbers = "model.layers.0.mlp.experts.down_proj_scales", "model.layers.0.mlp.experts.down_proj_blocks"
    written = dict(nvme_ops.load(path / "model.safetensors"))
    scales = written.pop(name)
    low = {name: scales.float(), numbers: written[numbers].float()}
    for wrong, words in (
        ({}, rf"{numbers}: there is no _scales of shape \(8, 64, 2\)"),
        ({name: scales[:, 1:].clone()}, "there is no"),
        ({name: scales.float()}, "there is no"),
        ({name: scales[0].clone(), numbers: written[numbers][0].clone()}, "experts, rows, groups and 16 bytes"),
        ({name: scales[:0].clone(), numbers: written[numbers][:0].clone()}, "experts, rows, groups and 16 bytes"),
        ({name: scales, numbers: written[numbers][..., 1:].clone()}, "experts, rows, groups and 16 bytes"),
        (low, "weights are missing"),
    ):
        nvme_ops.save({**written, **wrong}, path / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(ValueError, match=words):
            from_pretrained(path, memory_budget="250K")


# Mixtures written by hand

X = torch.randn(32, WIDTH, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("kind", ["packed", "gathered", "scores", "sizes", "indices", "parameter", "none"])
@torch.no_grad()
def test_mixtures_of_any_kind_have_the_bits_and_read_what_is_used(kind: str, folder: Path) -> None:
    plain = mixture(kind)
    size = sum(param.nbytes for param in plain.parameters())
    with stream_weights(mixture(kind), folder, memory_budget=size // 2) as model:
        for batch in (32, 1, 2):
            assert torch.equal(model(X[:batch]), plain(X[:batch]))
        before = model.stats()
        for number in range(12):
            assert torch.equal(model(X[number : number + 1]), plain(X[number : number + 1]))
        stats = model.stats()
        assert stats.peak_bytes <= size // 2
        used = stats.experts_used - before.experts_used
        assert used == (0 if kind == "none" else 12 * 3 * 2), "without a router all is read in the order foreseen"
        if kind in ("scores", "indices"):
            assert stats.guesses_right > stats.guesses_wrong == 0, "a list's experts are known with the scores"
        if kind not in ("none", "sizes"):  # neither is anything else read
            read = used - (stats.expert_hits - before.expert_hits)
            wrong = stats.bytes_guessed_wrong - before.bytes_guessed_wrong
            assert stats.bytes_read - before.bytes_read <= read * 18 * 4 * KIB + wrong


class Classifier(nn.Module):
    """As many layers as classes, so that the head looks like a router of the layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(8))
        self.head = nn.Linear(WIDTH, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return torch.as_tensor(self.head(x))


@torch.no_grad()
def test_modules_that_are_all_used_in_each_pass_are_read_ahead_after_some(folder: Path) -> None:
    plain = Classifier()
    size = sum(param.nbytes for param in plain.parameters())
    with stream_weights(copy.deepcopy(plain), folder, memory_budget=size // 2) as model:
        for _ in range(12):
            assert torch.equal(model(X), plain(X))
        assert model._nvme_window.experts is None
        before = model.stats()
        assert before.experts_used == 8 * 8
        assert torch.equal(model(X), plain(X))
        assert model.stats().bytes_on_demand - before.bytes_on_demand <= size // 4
        assert model.stats().peak_bytes <= size // 2


# The policy


def test_experts_are_read_once_for_a_batch_and_hits_not_at_all(folder: Path) -> None:
    one = Layers(folder, 1, 8, 3)
    assert {len(expert.reads) for expert in one.experts.groups[0]} == {1}
    assert one.use(0, range(8), 32) == 8
    assert one.use(0, range(8), 32) == 5
    assert one.use(0, one.held(0)) == 0
    stats = one.experts.stats()
    assert (stats.experts_used, stats.expert_hits, stats.bytes_hit) == (19, 6, 6 * SIZE)
    assert stats.peak_bytes == 3 * SIZE


@pytest.mark.parametrize("given", [True, False])
def test_few_requests_are_in_flight_by_default(given: bool, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    few, many = (aio_handle(4 * KIB, depth, cache="direct") for depth in (handle_in_order().get_queue_depth(), 128))
    monkeypatch.setattr(streamed, "handle_in_order", lambda: few)
    path, _ = saved(folder, "Qwen3Moe")
    with torch.no_grad(), from_pretrained(path, memory_budget="250K", handle=many if given else None) as model:
        model(torch.arange(8)[None])
    assert many.statistics().max_in_flight > 4 if given else few.statistics().max_in_flight in (2, 3, 4)
    assert (few.statistics().read_bytes == 0) is given


@pytest.mark.parametrize(
    ("room", "steps", "held"),
    [
        (3, [([0], 4), ([1], 2), ([2], 1), ([3], 1), ([4], 1)], {0, 1, 4}),
        (3, [([0], 300), ([5, 6, 7], 150), ([4], 1)], {4, 5, 6, 7}),  # topics change
        (4, [([0], 300), ([5, 6], 500), ([7], 4), ([0], 1), ([4], 1)], {4, 5, 6, 7}),
    ],
)
def test_those_used_often_stay_and_lately_counts_more(room: int, steps: Any, held: set[int], folder: Path) -> None:
    one = Layers(folder, 1, 8, room)
    for chosen, times in steps:
        for _ in range(times):
            for expert in chosen:
                one.use(0, [expert])
    assert one.held(0) < held if len(held) > room else one.held(0) == held


def test_in_a_batch_those_of_many_tokens_stay(folder: Path) -> None:
    one = Layers(folder, 1, 8, 2)
    one.experts.expect(0, {1: 31}, 32)
    for chosen, tokens in ((1, 32), (0, 32), (2, 1), (3, 1)):
        one.use(0, [chosen], tokens)
    assert one.held(0) == {1, 3}
    for chosen, tokens in [(0, 1)] * 99 + [(1, 2048), (2, 1)]:
        one.use(0, [chosen], tokens)
    assert one.held(0) == {1, 2}, "a batch takes as long as its tokens do"


def test_what_nobody_is_about_to_use_any_more_leaves_for_others(folder: Path) -> None:
    def held() -> set[int]:
        present = {number for number, expert in enumerate(one.experts.groups[0]) if expert.values is not None}
        while present - one.held(0):  # what arrives has its memory until it is there
            time.sleep(0.001)
        return present

    one = Layers(folder, 2, 16, 3)
    in_threads(lambda _: one.experts.expect(0, dict.fromkeys(range(3), 1), 1), 1)
    assert held() == {0, 1, 2}
    one.experts.expect(0, dict.fromkeys((5, 6, 7), 1), 1)
    assert held() == {5, 6, 7}, "the thread has ended"
    one.use(0, [5, 6, 7])
    one.experts.guess(0, [5, 6, 8])
    assert held() == {5, 6, 7}
    one.experts.guess(0, [9, 10])
    assert held() == {7, 9, 10}, "others are likely now, and 7 was used last"
    one.experts.guess(0, [9, 10, 11, 12])
    one.experts.fetch(one.sources[0][9][0])
    one.experts.fetch(one.sources[0][10][0])
    assert held() == {10, 11, 12}, "each leaves after its use"
    one.use(1, [7])
    one.experts.expect(0, {0: 1, 1: 1}, 1)
    assert held() == {0, 1}
    one.experts.guess(1, [7])
    one.experts.fetch(one.sources[0][2][0])
    assert held() == {0, 1, 2}, "what is likely leaves before what is expected"
    for number in range(999):
        one.use(0, [number % 3])
    assert len(one.experts._offered) < 100


def test_experts_are_computed_as_they_arrive(folder: Path) -> None:
    handle = Faulty("read", "hold", {2})
    one = Layers(folder, 1, 16, 12, handle)
    one.use(0, [11])
    order = _as_they_arrive(one.experts, 0, range(12))
    assert next(order) == 11
    one.experts.expect(0, {0: 1, 1: 1}, 1)
    while not one.experts.in_memory(0, 1):
        time.sleep(0.001)
    assert next(order) == 1
    assert next(order) == 0, "the first of those that are not there"
    handle.go.set()
    assert _most_likely_first(torch.tensor([[3, 1], [2, 4], [3, 2]])) == [2, 3, 1, 4]
    assert _most_likely_first(torch.tensor([2, 0])) == [2, 0]


@torch.no_grad()
def test_the_least_budget_is_named_and_any_above_it_works(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Experts, "patience", 1.0)
    wanted = mixture("packed")(X)
    with pytest.raises(ValueError, match="at least 32 KiB are needed"):
        stream_weights(mixture("packed"), folder, memory_budget=32 * KIB - 1)
    for budget in (32, 72, 96, 140):  # 72: memory for one expert
        with stream_weights(mixture("packed"), folder, memory_budget=budget * KIB) as model:
            assert torch.equal(model(X), wanted)
            assert model.stats().peak_bytes <= budget * KIB
            assert (model.stats().experts_used > 0) is (budget > 64)


def test_threads_share_a_model_and_its_file_until_that_is_changed(folder: Path) -> None:
    path, kind = saved(folder, "Qwen3Moe")
    tokens = torch.arange(8)[None]
    wanted = kind.from_pretrained(path, experts_implementation="eager").eval()(tokens).logits
    with from_pretrained(path, memory_budget="300K") as one, from_pretrained(path, memory_budget="500K") as other:

        def work(number: int) -> None:
            for _ in range(2):
                assert torch.equal((one, one, other)[number](tokens).logits, wanted)

        in_threads(work, 3)
        os.truncate(path / "model.safetensors", 100 * KIB)
        with pytest.raises(FormatError, match="changed while its weights were in use"):
            one(tokens)
