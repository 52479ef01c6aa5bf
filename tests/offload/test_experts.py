"""Mixtures of experts: bits as in memory, each expert read once, those used often stay, and guesses are accounted."""

from __future__ import annotations

import contextlib
import copy
import os
import pickle
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from nvme_ops import aio_handle
from nvme_ops.errors import FormatError
from nvme_ops.offload import NvmeCache, from_pretrained, stream_weights
from nvme_ops.offload.weights.experts import Experts, experts_of
from nvme_ops.offload.weights.grouped import _as_they_arrive
from nvme_ops.offload.weights.source import FileExtent, Source, WeightFile
from nvme_ops.storage.publication import open_to_read
from tests.conftest import KIB, in_threads, pattern
from tests.contract.faulty import Faulty, Held

COMMON: dict[str, Any] = {
    "vocab_size": 256, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "num_experts_per_tok": 2, "pad_token_id": None,
}  # fmt: skip
SHARED = {"moe_intermediate_size": 64, "n_routed_experts": 8, "n_shared_experts": 1, "first_k_dense_replace": 0}
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16}
MODELS: dict[str, dict[str, Any]] = {
    "Mixtral": {"num_local_experts": 8},
    "Qwen3Moe": {"moe_intermediate_size": 64, "num_experts": 8, "head_dim": 16},
    "DeepseekV3": {**SHARED, **LATENT, "num_key_value_heads": 4, "n_group": 2, "topk_group": 1},
    "GptOss": {"num_local_experts": 8, "head_dim": 16},
    "Glm4Moe": {**SHARED, "head_dim": 16},
    "Olmoe": {"num_experts": 8},
}
#: How many reads an expert takes, where its matrices are no neighbours in the file.
READS = {"GptOss": 2, "Mixtral": 3}


@pytest.fixture(autouse=True)
def _alone(one_thread: None) -> None:
    """The bits of a product depend on the number of threads."""


def saved(folder: Path, name: str) -> tuple[Path, Any]:
    """Saves a model, aligned as in memory, where the last bits of a product depend on that; returns its class, too."""
    transformers: Any = pytest.importorskip("transformers")
    transformers.logging.set_verbosity_error()
    kind = getattr(transformers, f"{name}ForCausalLM")
    torch.manual_seed(1)
    model = kind(getattr(transformers, f"{name}Config")(**{**COMMON, **MODELS[name]}))
    with torch.no_grad():
        for each in model.parameters():
            each.normal_(0, 0.2)  # which routes tokens to different experts
    model.save_pretrained(folder / name)
    content = (folder / name / "model.safetensors").read_bytes()
    length = int.from_bytes(content[:8], "little")
    text = content[8 : 8 + length] + b" " * (-(8 + length) % 64)
    (folder / name / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :])
    return folder / name, kind


@pytest.mark.parametrize("implementation", ["eager", "batched_mm", "grouped_mm"])
@pytest.mark.parametrize("name", MODELS)
def test_logits_of_transformers_models_are_those_in_memory(name: str, implementation: str, folder: Path) -> None:
    path, kind = saved(folder, name)
    plain = kind.from_pretrained(path, experts_implementation=implementation).eval()
    budget = sum(each.nbytes for each in plain.parameters()) // 2
    options: Any = {} if implementation == "eager" else {"experts_implementation": implementation}
    usual: Any = {"max_new_tokens": 3, "min_new_tokens": 3, "do_sample": False}
    usual |= {"return_dict_in_generate": True, "output_logits": True}
    for batch, mode in ((1, torch.no_grad), (32, torch.inference_mode)):
        tokens = torch.randint(0, 256, (batch, 7), generator=torch.Generator().manual_seed(batch))
        wanted = plain.generate(tokens, **usual)
        with from_pretrained(path, memory_budget=budget, **options) as model, mode(), NvmeCache(folder, "4M") as cache:
            experts = model._nvme_window.experts
            assert {len(each.reads) for each in experts.groups[0]} == {READS.get(name, 1)}
            for given in ({}, {"cache": cache}):
                found = model.generate(tokens, **usual, **given)
                assert all(map(torch.equal, found.logits, wanted.logits))
            assert model.stats().peak_bytes <= budget
            computed = [each._nvme_computed for each in model.modules() if hasattr(each, "_nvme_computed")]
            same = list(computed[0]._same.values())
            assert all(same)
            assert bool(same) == (implementation == "eager"), "computed as they arrive"
            assert (model._nvme_window.experts is experts) is (implementation != "grouped_mm")


# Mixtures written by hand

WIDTH, COUNT = 64, 8
X = torch.randn(32, WIDTH, generator=torch.Generator().manual_seed(3))


class Packed(nn.Module):
    """Experts in two parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(COUNT, 2 * WIDTH, WIDTH) / 8)
        self.down = nn.Parameter(torch.randn(COUNT, WIDTH, 2 * WIDTH) / 8)

    def forward(self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(x)
        for number in chosen.unique().tolist():
            tokens, places = torch.where(chosen == number)
            made = (x[tokens] @ self.up[number].T).relu() @ self.down[number].T
            out.index_add_(0, tokens, made * weights[tokens, places, None])
        return out


class Gathered(Packed):
    """The same, gathered by a tensor."""

    def forward(self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        up, down = self.up[chosen.flatten()], self.down[chosen.flatten()]
        made = torch.einsum("sd,sud->su", x.repeat_interleave(2, 0), up).relu()
        made = torch.einsum("su,sdu->sd", made, down) * weights.reshape(-1, 1)
        return made.view(len(x), 2, WIDTH).sum(1)


class Listed(nn.ModuleList):
    """Experts in modules, of several sizes if asked for."""

    def __init__(self, more: int = 0) -> None:
        widths = [2 * WIDTH + more * number for number in range(COUNT)]
        super().__init__(nn.Sequential(nn.Linear(WIDTH, wide), nn.ReLU(), nn.Linear(wide, WIDTH)) for wide in widths)


class Router(nn.Module):
    """Returns experts and their weights, or with ``scores`` these alone; ``strict`` has it want a second argument."""

    def __init__(self, scores: bool = False, strict: bool = False) -> None:
        super().__init__()
        self.weight, self.scores, self.strict, self.calls = nn.Parameter(torch.randn(COUNT, WIDTH)), scores, strict, 0

    def forward(self, x: torch.Tensor, given: bool = False) -> Any:
        self.calls += 1
        if self.strict and not given:
            raise TypeError("one argument more")
        scores = x @ self.weight.T
        return scores if self.scores else best(scores)


def best(scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    weights, chosen = scores.topk(2, -1)
    return weights.softmax(-1), chosen


class Block(nn.Module):
    """A layer of a mixture. ``change`` says how much it changes what the next one sees."""

    def __init__(self, kind: str, change: float = 1.0) -> None:
        super().__init__()
        self.kind, self.change = kind, change
        kinds: dict[str, Callable[[], nn.Module]] = {"sizes": lambda: Listed(32), "packed": Packed, "strict": Packed}
        self.experts: Any = {**kinds, "gathered": Gathered}.get(kind, Listed)()
        if kind == "parameter":
            self.router: Any = nn.Parameter(torch.randn(COUNT, WIDTH))
        elif kind != "none":
            self.router = Router(kind in ("scores", "sizes"), kind == "strict")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.kind == "none":
            found: Any = x[:, :COUNT]
        elif self.kind == "parameter":
            found = x @ self.router.T
        else:
            found = self.router(x, True)
        weights, chosen = best(found) if isinstance(found, torch.Tensor) else found
        if not isinstance(self.experts, nn.ModuleList):
            return x + self.change * torch.as_tensor(self.experts(x, chosen, weights))
        out = torch.zeros_like(x)
        for number in chosen.unique().tolist():
            tokens, places = torch.where(chosen == number)
            out.index_add_(0, tokens, self.experts[number](x[tokens]) * weights[tokens, places, None])
        return x + self.change * out


def mixture(kind: str, change: float = 1.0) -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(*(Block(kind, change) for _ in range(3))).eval().requires_grad_(False)


@pytest.mark.parametrize("kind", ["packed", "gathered", "scores", "sizes", "indices", "parameter", "none"])
@torch.no_grad()
def test_mixtures_of_any_kind_have_the_bits_in_memory_and_read_what_is_used(kind: str, folder: Path) -> None:
    plain = mixture(kind)
    size = sum(each.nbytes for each in plain.parameters())
    with stream_weights(mixture(kind), folder, memory_budget=size // 2) as model:
        for batch in (32, 1, 2, 1, 32):
            assert torch.equal(model(X[:batch]), plain(X[:batch]))
        before = model.stats()
        for number in range(12):
            assert torch.equal(model(X[number : number + 1]), plain(X[number : number + 1]))
        stats = model.stats()
        assert stats.peak_bytes <= size // 2
        if kind == "none":
            assert stats.experts_used == 0, "read in the order foreseen"
            return
        used = stats.experts_used - before.experts_used
        assert used == 12 * 3 * 2
        read = used - (stats.expert_hits - before.expert_hits)
        if kind != "sizes":  # neither is anything else read
            wrong = stats.bytes_guessed_wrong - before.bytes_guessed_wrong
            assert stats.bytes_read - before.bytes_read <= read * 18 * 4 * KIB + wrong


# The policy, on experts of two parts that are neighbours in a file

HALF = 8 * KIB
SIZE = 2 * HALF


class Layers:
    """Experts of a file, how they are used, and what a plain LRU would read."""

    def __init__(self, folder: Path, layers: int, count: int, room: int, handle: Any = None) -> None:
        self.path, self.count = folder / "experts", count
        self.data = pattern(layers * count * SIZE)
        self.path.write_bytes(self.data.numpy().tobytes())
        self.file = WeightFile(open_to_read(str(self.path)), str(self.path), handle or aio_handle())
        self.sources = [[self.parts((layer * count + each) * SIZE) for each in range(count)] for layer in range(layers)]
        self.experts = Experts(room * SIZE, torch.device("cpu"), experts_of(self.sources, torch.device("cpu")))
        self.recent: OrderedDict[tuple[int, int], None] = OrderedDict()
        self.room, self.bytes_of_lru = room, 0

    def parts(self, start: int) -> list[Source]:
        return [Source([FileExtent(self.file, at, HALF)], torch.uint8, (HALF,)) for at in (start, start + HALF)]

    def use(self, layer: int, chosen: Sequence[int], tokens: int = 1) -> int:
        """Computes with experts as they arrive; returns how many bytes that has read."""
        before = self.experts.stats().bytes_read
        self.experts.expect(layer, dict.fromkeys(chosen, 1), tokens)
        for number in _as_they_arrive(self.experts, layer, chosen):
            for source in self.sources[layer][number]:
                start = source.extents[0].start
                assert torch.equal(self.experts.fetch(source), self.data[start : start + HALF])
            self.bytes_of_lru += SIZE * ((layer, number) not in self.recent)
            self.recent[layer, number] = None
            self.recent.move_to_end((layer, number))
            if len(self.recent) > self.room:
                self.recent.popitem(last=False)
        return self.experts.stats().bytes_read - before

    def held(self, layer: int = 0) -> set[int]:
        return {number for number in range(self.count) if self.experts.in_memory(layer, number)}


@pytest.fixture
def made(folder: Path) -> Iterator[Callable[..., Layers]]:
    """Makes experts; these are closed in the end."""
    with contextlib.ExitStack() as end:

        def make(layers: int = 2, count: int = 8, room: int = 4, handle: Any = None) -> Layers:
            one = Layers(folder, layers, count, room, handle)
            end.callback(one.file.close)
            end.callback(one.experts.close)
            return one

        yield make


def test_experts_are_read_once_for_a_batch_by_one_read_each_and_hits_not_at_all(made: Any) -> None:
    one = made(room=3)
    assert {len(each.reads) for each in one.experts.groups[0]} == {1}
    assert one.use(0, range(8), 32) == 8 * SIZE
    held = one.held()
    assert len(held) == 3
    assert one.use(0, range(8), 32) == 5 * SIZE
    assert one.use(0, sorted(one.held())) == 0
    stats = one.experts.stats()
    assert (stats.experts_used, stats.expert_hits, stats.bytes_hit) == (19, 6, 6 * SIZE)
    assert stats.peak_bytes == 3 * SIZE


def test_those_used_often_stay_and_then_those_used_lately(made: Any) -> None:
    one = made(layers=1, room=3)
    for chosen in ([0], [0], [1], [0], [1], [2], [3], [4]):
        one.use(0, chosen)
    assert one.held() == {0, 1, 4}
    for chosen in ([5], [6], [5]) * 60:  # topics change
        one.use(0, chosen)
    assert one.held() == {0, 5, 6}
    for chosen in ([5], [6], [7]) * 200:
        one.use(0, chosen)
    assert one.held() == {5, 6, 7}
    many = made(layers=1, room=2)
    many.use(0, [0], 32)  # one of 32 tokens
    many.experts.expect(0, {1: 32}, 32)
    many.use(0, [2])
    many.use(0, [3])
    assert 1 in many.held()


def test_skewed_routing_reads_less_than_an_lru_does(made: Any) -> None:
    one = made(layers=2, count=32, room=16)
    generator = torch.Generator().manual_seed(1)
    skewed = 1 / torch.arange(1, 33)
    for _ in range(300):
        for layer in range(2):
            one.use(layer, torch.multinomial(skewed, 2, generator=generator).tolist())
    assert one.experts.stats().bytes_read < 0.9 * one.bytes_of_lru


# Guesses


def test_guesses_are_counted_and_reads_of_wrong_ones_are_cancelled(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    cancelled: list[Held] = []
    monkeypatch.setattr(Held, "request_cancel", lambda held: cancelled.append(held))
    handle = Faulty("read", "hold", {3})
    one = made(room=5, handle=handle)
    one.experts.guess(1, [5, 6, 7])
    assert handle.under_way.wait(20)
    assert len(cancelled) == 0
    assert one.use(1, [5, 1]) == SIZE, "the other one is there"
    assert len(cancelled) == 1
    assert one.held(1) >= {1, 5}
    assert one.experts.groups[1][7].values is None
    handle.go.set()
    stats = one.experts.stats()
    assert (stats.guesses_right, stats.bytes_guessed_right) == (1, SIZE)
    assert (stats.guesses_wrong, stats.bytes_guessed_wrong) == (2, 2 * SIZE)
    assert (stats.experts_used, stats.expert_hits) == (2, 0)
    assert one.use(1, [7, 6]) <= 2 * SIZE


def test_guesses_take_memory_of_nothing_expected_and_leave_for_what_is_waited_for(made: Any) -> None:
    one = made(room=3)
    one.experts.expect(0, {0: 1, 1: 1}, 1)
    one.experts.guess(1, range(8))
    assert one.experts.stats().bytes_read == 3 * SIZE
    assert one.use(0, range(4)) == 2 * SIZE
    assert one.use(1, [0]) == 0, "nor does what is expected take theirs"
    one.experts.guess(0, [5, 6, 7])
    assert one.experts.stats().bytes_read == 7 * SIZE, "what computes now stays"
    assert one.use(1, range(4)) == 3 * SIZE
    assert one.experts.stats().guesses_wrong > 0


def test_a_layer_whose_guesses_are_wrong_makes_none_until_they_would_be_right(made: Any) -> None:
    one = made(room=4)

    def step(guess: int, right: int) -> int:
        before = one.experts.stats()
        if one.experts.may_guess(1):
            one.experts.guess(1, [guess])
        one.use(1, [right])
        after = one.experts.stats()
        return after.guesses_wrong + after.guesses_right - before.guesses_wrong - before.guesses_right

    assert sum(step(4 + n % 4, n % 4) for n in range(200)) < 60
    assert sum(step(4 + n % 4, n % 4) for n in range(50)) == 0
    assert sum(step(n % 8, n % 8) for n in range(600)) > 50
    assert sum(step(n % 8, n % 8) for n in range(8)) > 2


@torch.no_grad()
def test_the_next_router_is_asked_and_where_it_is_wrong_not_any_more(folder: Path) -> None:
    def made_in(place: str, kind: str, change: float) -> Any:
        (folder / place).mkdir()
        return stream_weights(mixture(kind, change), folder / place, memory_budget="500K")

    with made_in("foreseen", "packed", 1e-3) as model:
        for number in range(30):
            model(X[number : number + 1])
        stats = model.stats()
        assert stats.guesses_right > 10 * stats.guesses_wrong + 20
        assert stats.bytes_guessed_right == stats.guesses_right * 64 * KIB
    with made_in("not foreseen", "packed", 100.0) as model:
        for count in (32, 32, 16):
            for number in range(count):
                model(X[number : number + 1])
            stats, before = model.stats(), stats
        assert stats.guesses_wrong + stats.guesses_right == before.guesses_wrong + before.guesses_right > 0
        assert stats.guesses_wrong > stats.guesses_right
    with made_in("strict", "strict", 1e-3) as model:
        for _ in range(3):
            model(X[:1])
        assert [block.router.calls for block in model] == [3, 4, 4], "asked once"


# Bad input, and not alone


@torch.no_grad()
def test_the_least_budget_is_named_and_any_above_it_works(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Experts, "patience", 1.0)
    wanted = mixture("packed")(X)
    with pytest.raises(ValueError, match="at least 32 KiB are needed"):
        stream_weights(mixture("packed"), folder, memory_budget=32 * KIB - 1)
    for budget in (32, 72, 96, 136, 140):  # 72: memory for one expert
        with stream_weights(mixture("packed"), folder, memory_budget=budget * KIB) as model:
            assert torch.equal(model(X), wanted)
            assert torch.equal(model(X), wanted)
            assert model.stats().peak_bytes <= budget * KIB
            assert (model.stats().experts_used > 0) is (budget > 64)


def test_a_read_that_fails_is_an_error_and_the_next_one_is_right(made: Any, folder: Path) -> None:
    handle = Faulty()
    one = made(handle=handle)
    for do, chosen in (("fail", range(3)), ("refuse", range(3, 6))):
        handle.will("read", do, {2})
        with pytest.raises(OSError, match="device 2"):
            one.use(0, chosen)
        handle.will()
        assert one.use(0, chosen) > 0
    handle.will("read", "fail")
    one.experts.guess(1, [1, 2])
    handle.will()
    assert one.use(1, [1, 2]) == 2 * SIZE, "a failed guess is read again"
    with one.path.open("r+b") as file:
        file.write(b"other")
    os.utime(one.path, (1, 1))
    with pytest.raises(FormatError, match="changed while its weights were in use"):
        one.use(1, [3])


@torch.no_grad()
def test_threads_of_one_model_beside_another_one(folder: Path) -> None:
    wanted = mixture("packed")(X)
    for place, budget in (("one", "300K"), ("all", "2M")):
        (folder / place).mkdir()
        with stream_weights(mixture("packed"), folder / place, memory_budget=budget) as model:

            def work(number: int, model: Any = model) -> None:
                with torch.no_grad():
                    for at in range(number, 9, 3):
                        assert torch.allclose(model(X[at : at + 1]), wanted[at : at + 1], atol=1e-4)
                        assert torch.equal(model(X), wanted)

            in_threads(work, 3)


@torch.no_grad()
def test_copies_are_plain_and_in_memory_and_closed_it_is_closed(folder: Path) -> None:
    plain = mixture("packed")
    with stream_weights(mixture("packed"), folder, memory_budget="500K") as model:
        wanted = model(X)
        for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), copy.deepcopy(model[1])):
            assert {type(each) for each in copied.modules()} <= {type(each) for each in plain.modules()}
            assert torch.equal(copied(X), (wanted if len(list(copied.children())) == 3 else plain[1](X)))
        model._nvme_window.experts.guess(2, range(8))
    with pytest.raises(ValueError, match="closed"):
        model(X)


@pytest.mark.slow  # torch compiles for seconds
@torch.no_grad()
def test_it_may_be_compiled(folder: Path) -> None:
    plain = mixture("gathered")
    with stream_weights(mixture("gathered"), folder, memory_budget="500K") as model:
        compiled: Any = torch.compile(model, backend="eager")
        for batch in (1, 1, 32):
            assert torch.equal(compiled(X[:batch]), plain(X[:batch]))


def test_adapters_are_trained_to_the_bits_in_memory(folder: Path) -> None:
    peft: Any = pytest.importorskip("peft")
    path, kind = saved(folder, "Qwen3Moe")
    tokens = torch.randint(0, 256, (3, 2, 7), generator=torch.Generator().manual_seed(1))

    def trained(model: Any) -> list[torch.Tensor]:
        torch.manual_seed(1)
        model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"])).train()
        adapters = [each for each in model.parameters() if each.requires_grad]
        optimizer = torch.optim.AdamW(adapters, lr=1e-2)
        for ids in tokens:
            model(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return [*adapters, model.eval()(ids).logits]

    wanted = trained(kind.from_pretrained(path, experts_implementation="eager"))
    with from_pretrained(path, memory_budget="500K") as model:
        assert all(map(torch.equal, trained(model), wanted))
