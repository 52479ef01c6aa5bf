"""``stream_weights``: any module computes the same with its weights in files, in bounded memory, whatever happens."""

from __future__ import annotations

import copy
import errno
import functools
import itertools
import os
import resource
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from nvme_ops.base.text import parse_size
from nvme_ops.formats.packed import E2M1, MatrixLayout, Packed
from nvme_ops.formats.quantized import Scaled, read_scale
from nvme_ops.formats.quantizing import quantize
from nvme_ops.io.engine import Priority
from nvme_ops.offload import stream_weights
from nvme_ops.offload.weights import window
from nvme_ops.offload.weights.stored import StoredTensor, Weights
from nvme_ops.storage.source import Source
from tests.conftest import KIB, MIB, in_threads
from tests.offload.elsewhere import elsewhere, values
from tests.offload.models import Experts, Tied, layers, mixture, nbytes, saved

X = torch.randn(4, 256, generator=torch.Generator().manual_seed(3))
TOKENS = torch.tensor([[1, 2, 2], [5, 1, 3]])


def expand(values: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    made = torch.empty(values.shape, dtype=dtype)
    Scaled(scale).expand(values, made)
    return made


@pytest.fixture(autouse=True)
def _no_fused_layer() -> Iterator[None]:
    """torch fuses a transformer's layer into one operation unless its weights are of another class, as these are."""
    torch.backends.mha.set_fastpath_enabled(False)
    yield
    torch.backends.mha.set_fastpath_enabled(True)


def made() -> tuple[nn.Module, torch.Tensor]:
    """A model and its output in memory."""
    torch.manual_seed(1)
    model = layers().eval()
    with torch.no_grad():
        return model, model(X)


def streamed(model: nn.Module, folder: Path, budget: int | str = 640 * KIB) -> Any:
    result = stream_weights(model, folder, memory_budget=budget)
    assert result is model
    return result


# Right


@pytest.mark.parametrize(
    "backend", ["aot_eager", pytest.param("inductor", marks=[pytest.mark.slow, pytest.mark.timeout(600)])]
)
def test_compiled_with_weights_of_several_shapes(backend: str, folder: Path) -> None:
    torch.compiler.reset()
    torch.manual_seed(1)
    model, x = several(512, 300, 700, 300, 256, 512).eval(), torch.randn(3, 512)
    with torch.no_grad():
        wanted = model(x)
        with streamed(model, folder, "1M"):
            compiled: Any = torch.compile(model, backend=backend)
            for _ in range(3):
                assert torch.equal(compiled(x), wanted)
            assert torch.equal(compiled(x[:2]), model(x[:2]))


def several(*widths: int) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(*pair) for pair in itertools.pairwise(widths)))


class TwoInputs(nn.Module):
    """A bilinear form of its input and a part of it, whose weight has three dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.both = nn.Bilinear(64, 96, 50)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(self.both(x[:, :64], x))


def encoder() -> nn.Module:
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(128, 4, 512, batch_first=True), 2)


USED_AT_ONCE: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], Any]] = {
    "layers": (lambda: several(300, 500, 700, 200, 900, 300), (2, 300), None),
    "layers in 8 bits": (lambda: several(300, 500, 700, 200, 900, 300), (2, 300), "int8"),
    "layers of few inputs": (lambda: several(64, 2048, 64, 1500, 320, 64, 3000, 64), (2, 64), None),
    "LSTM": (lambda: nn.LSTM(200, 300, 2), (5, 2, 200), None),
    "LSTM in 8 bits": (lambda: nn.LSTM(512, 512), (5, 2, 512), "int8"),
    "GRU": (lambda: nn.GRU(200, 300, bidirectional=True), (5, 2, 200), None),
    "RNN cell": (lambda: nn.LSTMCell(200, 300), (2, 200), None),
    "bilinear": (TwoInputs, (2, 96), None),
    "encoder": (encoder, (2, 7, 128), None),
}


@pytest.mark.parametrize("name", USED_AT_ONCE)
@torch.no_grad()
def test_the_least_budget_is_named_and_suffices(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(window.Window, "patience", 2.0)
    make, shape, quantize = USED_AT_ONCE[name]
    torch.manual_seed(1)
    model, x = make().eval(), torch.randn(shape)
    wanted = model(x)
    with pytest.raises(ValueError, match="too small") as refused:
        stream_weights(model, folder, memory_budget=1, quantize=quantize)
    named = str(refused.value).split("at least ")[1].split(" are needed")[0]
    for more in (0, 1, 2, 7, 40):
        budget = parse_size(named) + more * 4 * KIB if more else named
        with stream_weights(copy.deepcopy(model), folder, memory_budget=budget, quantize=quantize) as opened:
            first = opened(x)
            for _ in range(3):
                assert all(map(torch.equal, tree_leaves(opened(x)), tree_leaves(first)))
            near = zip(tree_leaves(first), tree_leaves(wanted), strict=True)
            assert all(torch.allclose(one, other, atol=1e-6 if quantize is None else 0.1) for one, other in near)
            assert opened.stats().peak_bytes <= (parse_size(budget) if isinstance(budget, str) else budget)


@torch.no_grad()
def test_an_operation_of_more_than_the_budget_is_refused_at_once(folder: Path) -> None:
    model = several(300, 300, 300, 300).eval()
    with streamed(model, folder, "500K"), pytest.raises(MemoryError, match="2 weights, 704 KiB together, but"):
        torch.linalg.multi_dot([*model.parameters()][::2])


class Products(nn.Module):
    """Products of inputs whose batches lie apart, on either side of a weight, with and without a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.with_bias, self.without = nn.Linear(256, 300), nn.Linear(256, 300, bias=False)
        self.attention = nn.MultiheadAttention(256, 4, batch_first=True)

    def forward(self, x: torch.Tensor) -> Any:
        apart = x.transpose(1, 2)
        first = self.with_bias(apart), self.without(apart), self.without.weight @ x, self.attention(x.mT, x.mT, x.mT)[0]
        row = x[:, :, :1].contiguous().transpose(1, 2)  # contiguous, but for strides that do not matter
        more = self.with_bias(row), self.without(row), self.with_bias(apart[:, 3:])
        return first, more, apart[..., None, :] @ self.without.weight.T


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_batches_that_lie_apart_are_multiplied_as_in_memory(dtype: torch.dtype, folder: Path) -> None:
    torch.manual_seed(1)
    model, x = Products().to(dtype).eval(), torch.randn(3, 256, 20).to(dtype)
    wanted = tree_leaves(model(x))
    with streamed(model, folder, "800K"):
        for _ in range(2):
            assert all(map(torch.equal, tree_leaves(model(x)), wanted))
        close = functools.partial(torch.allclose, atol=0.02 if dtype is torch.bfloat16 else 1e-5)
        with torch.inference_mode():
            assert all(map(close, tree_leaves(model(x)), wanted))


def test_memory_is_bounded_and_used(folder: Path) -> None:
    model, wanted = made()
    size = nbytes(model)
    with streamed(model, folder, 1 * MIB) as opened, torch.no_grad():
        for _ in range(5):
            assert torch.equal(model(X), wanted)
        stats = opened.stats()
        assert stats.peak_bytes <= MIB < size
        assert 0 < stats.bytes_kept < MIB
        model(X)
        assert opened.stats().bytes_read - stats.bytes_read <= size - stats.bytes_kept
        assert opened.stats().bytes_on_demand == stats.bytes_on_demand, "all was read ahead"
    model, wanted = made()
    with streamed(model, folder, "64M") as opened, torch.no_grad():
        for _ in range(3):
            assert torch.equal(model(X), wanted)
        assert opened.stats().bytes_read <= size, "what fits is read once"


def test_no_operation_repeats_a_weight_in_memory(folder: Path) -> None:
    torch.manual_seed(1)
    model, x = nn.Linear(256, 4096, bias=False).eval(), torch.randn(64, 3, 256)
    with torch.no_grad():
        wanted = model(x)[:, -1:]
        with streamed(model, folder, "8M"):
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            assert torch.allclose(model(x[:, -1:]), wanted, atol=1e-5)
            assert torch.allclose(x[:, -1:] @ next(model.parameters()).t(), wanted, atol=1e-5)
            assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 * KIB, "64 times 4 MiB"


@torch.no_grad()
def test_of_experts_and_embeddings_what_is_asked_for_is_read(folder: Path) -> None:
    torch.manual_seed(1)
    experts, model = Experts().eval(), nn.Embedding(4096, 1024).eval()
    wanted = experts(X, [2, 5])
    with streamed(experts, folder) as opened:
        for _ in range(3):
            assert torch.equal(experts(X, [2, 5]), wanted)
        assert opened.stats().bytes_read <= 3 * 2 * 256 * KIB
    wanted = model(TOKENS)
    with streamed(model, folder, "17M") as opened:
        assert torch.equal(model(TOKENS), wanted)
        assert opened.stats().bytes_read == 4 * 4 * KIB  # tokens 1, 2, 3 and 5
        model(torch.tensor([0]))
        assert opened.stats().bytes_read == 5 * 4 * KIB
        everything = torch.arange(4096)
        assert torch.equal(model(everything), model(everything))
        before = opened.stats()
        assert torch.equal(model(TOKENS), wanted)
        assert opened.stats() == before, "rows in memory are no use of the whole, which would be read ahead for ever"
        with pytest.raises(IndexError):
            model(torch.tensor([4096]))


# What cannot be


def test_what_cannot_be_is_refused(folder: Path) -> None:
    model, wanted = made()
    for module, words in (
        (nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4, device="meta")), "2 devices"),
        (nn.Linear(4, 4, device="meta"), "meta device"),
    ):
        with pytest.raises(ValueError, match=words):
            streamed(module, folder)
    with streamed(model, folder), torch.no_grad():
        with pytest.raises(ValueError, match="streamed already"):
            streamed(nn.Sequential(model, nn.Linear(3, 3)), folder)
        with pytest.raises(RuntimeError, match="cannot be trained"):
            model.requires_grad_()
        weight = next(model.parameters())
        for change in (weight.zero_, lambda: weight.copy_(X), lambda: torch.add(X, 1, out=weight)):
            with pytest.raises(RuntimeError, match="cannot be changed"):
                change()
        assert torch.equal(model(X), wanted)
    with pytest.raises(RuntimeError, match="before it is complete"):
        StoredTensor(Weights(), Source([], torch.float32, (0, 3)))[:, 1:].sum()


# Faults


def test_memory_that_the_program_holds_is_waited_for_and_told(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(window.Window, "patience", 0.2)
    model, wanted = made()
    with streamed(model, folder) as opened, torch.no_grad():
        weights: list[Any] = list(opened.parameters())
        held = [weights[0].in_window(), weights[2].in_window()]
        with pytest.raises(MemoryError, match="other weights that are in use"):
            model(X)
        del held
        assert torch.equal(model(X), wanted)


def test_weights_that_are_smaller_than_a_page_are_used_together(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each takes a page, and there was memory for as many bytes as they have: after a minute that was a MemoryError."""
    monkeypatch.setattr(window.Window, "patience", 1.0)
    model: Any = nn.ParameterList(torch.randn(3, 8, 8) for _ in range(2))
    wanted = (model[0] + model[1]).detach()
    with streamed(model, folder, "64K"):
        assert torch.equal(torch.add(model[0][0], model[1][0]), wanted[0])
        assert torch.equal(model[0] + model[1], wanted)


def test_rows_of_a_weight_whose_read_ahead_failed_are_read_again(folder: Path) -> None:
    """As when another thread needs its memory, which ends the read that this one waits for."""
    embedding: Any = nn.Embedding(4096, 64)
    model, wanted = nn.ModuleList([embedding, nn.Linear(512, 512)]), embedding.weight[3].clone()
    with streamed(model, folder, "1200K"), torch.no_grad():
        weights, source = embedding.weight._weights.open(), embedding.weight.source
        (file,) = [path for path in next(folder.iterdir()).iterdir() if path.name != "owner"]
        content = file.read_bytes()
        os.truncate(file, 0)
        weight = weights._weight(source)
        assert weights._residency.begin(weights, weight, Priority.PREFETCH)
        assert isinstance(weight.arrival.exception(), EOFError)
        file.write_bytes(content)
        assert torch.equal(embedding(torch.tensor([3]))[0], wanted)


# Parts and joins of a weight have the right bytes, and are not read to be made

VALUES = torch.randn((6, 40, 32), generator=torch.Generator().manual_seed(1))
PARTS: tuple[Callable[[torch.Tensor], torch.Tensor], ...] = (
    lambda t: t[2],
    lambda t: t[3:3],
    lambda t: t[:, 5:17],
    lambda t: t.split(4)[1],
    lambda t: t.view(240, -1)[7:99],
    lambda t: t.unsqueeze(1),
    lambda t: torch.stack([t[3], t[1], t[3]]),
    lambda t: torch.cat([t[4:], t[:2]]),
    lambda t: t.to("cpu", torch.float64),
    lambda t: t[0].t()[3:5],
    lambda t: t.permute(1, 0, 2).as_strided((4, 5), (7, 2), 11),
    lambda t: t.view(torch.int32)[::3].view(torch.float32),
)


def test_a_part_is_made_without_reading(folder: Path) -> None:
    with elsewhere("streamed", [VALUES], folder) as moved:
        parts = [make(moved[0]) for make in PARTS]
        assert moved.stats().bytes_read == 0
        for make, part in zip(PARTS, parts, strict=True):
            assert torch.equal(part + 0, make(VALUES))
            assert torch.equal(values(part), make(VALUES))
        whole: Any = moved[0]
        assert whole.narrow(0, 0, 6).source is whole.source, "it is read and kept once"
        for part in (whole[1:3], whole[1:3].permute(1, 0, 2)):
            with pytest.raises(RuntimeError, match="for a part of a weight"):  # in torch it may reach beyond
                part.as_strided((2,), (1,), 0)


# Weights of 8 bits: read as they are stored, expanded when they are used


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn, torch.float8_e5m2])
def test_all_values_of_8_bits_are_those_of_torch(dtype: torch.dtype) -> None:
    values = torch.arange(256, dtype=torch.uint8).view(dtype).view(16, 16)
    scale = torch.rand(16, 1)
    actual, wanted = expand(values, scale, torch.float32), values.float() * scale
    assert torch.equal(actual.nan_to_num(7.5), wanted.nan_to_num(7.5))
    assert torch.equal(actual.isnan(), wanted.isnan())
    some = values[[0, 3, 6, 8, 13]].t()  # without the code of NaN
    assert torch.equal(expand(some, torch.ones(1, 1), torch.float32), some.float())
    with pytest.raises(ValueError, match="not finite"):
        quantize(torch.tensor([[1.0, float("nan")]]))


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize(
    ("shape", "blocks"), [((5, 6), (3, 2)), ((576, 64), (128, 64)), ((192, 768), (128, 192)), ((2, 7, 5), (4, 4))]
)
def test_scales_of_blocks(shape: tuple[int, ...], blocks: tuple[int, ...], named: bool) -> None:
    torch.manual_seed(1)
    values, sizes = torch.randn(shape).to(torch.float8_e4m3fn), (1, *blocks)[-len(shape) :]
    places = [torch.arange(size) // block for size, block in zip(shape, sizes, strict=True)]
    stored = torch.randint(100, 150, [int(place[-1]) + 1 for place in places], dtype=torch.uint8)
    wide = torch.exp2(stored.float() - 127)
    for dim, place in enumerate(places):
        wide = wide.index_select(dim, place)
    if not named and blocks == (3, 2):
        blocks = (4, 2)  # it might as well be of these
        wide = torch.exp2(stored.float() - 127)[torch.arange(5) // 4][:, torch.arange(6) // 2]
    scale = read_scale("name_scale", stored, shape, blocks if named else ())
    assert torch.equal(expand(values, scale, torch.float32), values.float() * wide)
    assert named or shape != (576, 64) or scale.shape == (9, 1), "no larger than it needs to be"
    others = torch.stack([values, values]), torch.stack([scale, scale / 2])
    assert torch.equal(expand(*others, torch.float32)[1], values.float() * wide / 2)
    for of, stored_of in (((4, 8), (3, 5)), ((4, 8), (5,)), ((), ()), ((0, 4), (0, 4))):
        with pytest.raises(ValueError, match="fits no weight"):
            read_scale("name_scale", torch.ones(stored_of), of)


def test_scales_of_rows_and_all_and_of_weights_that_are_joined() -> None:
    torch.manual_seed(1)
    values = torch.randn(6, 4).to(torch.float8_e4m3fn)
    of_all, rows, two, three = torch.tensor([2.0]), torch.arange(1.0, 7), torch.ones(2, 2) * 3, torch.ones(3, 1) * 5
    read = [read_scale("scale", raw, (6, 4)) for raw in (of_all, rows, rows[:, None], two, three)]
    wanted = [values.float() * wide for wide in (2, rows[:, None], rows[:, None], 3, 5)]
    for scale, weight in zip(read, wanted, strict=True):
        assert torch.equal(expand(values, scale, torch.float32), weight)
    for dim in (0, 1):
        for some in (range(5), (3, 4), (0, 3)):
            joined = Scaled.concatenated([Scaled(read[number]) for number in some], [(6, 4)] * len(some), dim)
            actual = expand(torch.cat([values] * len(some), dim), joined.scale, torch.float32)
            assert torch.equal(actual, torch.cat([wanted[number] for number in some], dim))
    joined = Scaled.concatenated([Scaled(two), Scaled(of_all.view(1, 1))], [(8, 4), (6, 4)], 0)
    assert joined.scale[:, 0].tolist() == [3, 3, 3, 3, 2, 2, 2]
    assert Scaled(of_all.view(1, 1, 1)).select(3).scale.tolist() == [[2]]
    exponents = read_scale("scale", torch.tensor([0, 127, 254, 255], dtype=torch.uint8), (4, 2))
    assert exponents.nan_to_num(7).flatten().tolist() == [2.0**-127, 1, 2.0**127, 7]


def test_exponents_of_4_bits_are_those_of_transformers_in_every_dtype() -> None:
    mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")
    blocks = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16).expand(1, 256, 16, 16).contiguous()
    scales = torch.arange(256, dtype=torch.uint8).view(1, 256, 1).expand(1, 256, 16).contiguous()
    stored = torch.cat([blocks.flatten(1), scales.flatten(1)], 1)
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        stored_as = Packed([MatrixLayout("low_first", 256, 512, 32, "e8m0", E2M1)], [(1.0,)], 1, transposed=True)
        out = torch.empty(stored_as.shape(stored.shape), dtype=dtype)
        stored_as.expand(stored, out)
        wanted = mxfp4.convert_moe_packed_tensors(blocks, scales, dtype=dtype)
        assert torch.equal(out[..., :255], wanted[..., :255])
        assert out[..., 255].isnan().all(), "as the format says; transformers reads 2**128"


@torch.no_grad()
@pytest.mark.parametrize(("kind", "share"), [("int8", 1), ("int4", 18 / 32), ("mxfp4", 17 / 32)])
def test_views_and_joins_of_packed_weights_have_their_values(kind: Any, share: float, folder: Path) -> None:
    torch.manual_seed(1)
    model = nn.ModuleList(
        [nn.Linear(1024, 2048), nn.Linear(1024, 2000), nn.Linear(1030, 1024), nn.Embedding(2000, 1024)]
    )
    with stream_weights(model, folder, memory_budget="64M", quantize=kind) as opened:
        first, second, odd, table = (layer.weight for layer in opened)
        values, others, rows = (weight.to_memory() for weight in (first, second, table))
        assert first.source.nbytes == values.numel() * share
        assert (odd.source.dtype == torch.float32) is (kind != "int8"), "its rows have no groups of 32"
        assert torch.equal(first[3], values[3])
        assert torch.equal(first[2:5], values[2:5])
        assert torch.equal(first.t().unsqueeze(0), values.t().unsqueeze(0))
        assert torch.equal(first.unsqueeze(0), values.unsqueeze(0))
        for dim in (0, 1):
            assert torch.equal(torch.stack([first, first], dim), torch.stack([values, values], dim))
            assert torch.equal(torch.cat([first, first], dim), torch.cat([values, values], dim))
        joined, both = torch.cat([first, second]), torch.cat([values, others])
        assert torch.equal(joined, both)
        assert torch.equal(torch.stack([joined, joined])[1], both)
        assert torch.equal(torch.cat([joined.unsqueeze(0), joined.unsqueeze(0)], 1)[0], torch.cat([both, both]))
        assert torch.equal(torch.cat([first, table]), torch.cat([values, rows]))
        assert torch.equal(torch.cat([second, odd[:, :1024]]), torch.cat([others, odd.to_memory()[:, :1024]]))
        assert torch.equal(torch.cat([second, second.double()]), torch.cat([others, others.double()]))
        assert torch.equal(torch.cat([table, table.double()]), torch.cat([rows, rows.double()]))
        bare = first.like(first.source)
        if kind == "int8":
            assert torch.equal(torch.cat([first, bare]), torch.cat([values, bare.to_memory()]))


@torch.no_grad()
@pytest.mark.parametrize(("kind", "error"), [("int4", 0.15), ("mxfp4", 0.2)])
def test_on_request_a_quarter_is_read_and_the_head_stays(kind: Any, error: float, folder: Path) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(1)
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "vocab_size": 512}
    config = transformers.LlamaConfig(num_attention_heads=4, num_key_value_heads=4, **sizes)
    model = transformers.LlamaForCausalLM(config).bfloat16().eval()
    x, head, size = torch.arange(6).view(1, 6), model.lm_head.weight.clone(), nbytes(model)
    wanted = model(x).logits
    with stream_weights(model, folder, memory_budget=size // 2, quantize=kind) as opened:
        assert 0.01 < opened.stats().quantization_error < error
        assert torch.equal(opened.lm_head.weight.to_memory(), head)
        with torch.autocast("cpu", torch.float16):
            assert opened.model.layers[0].mlp.up_proj(torch.ones(1, 256).bfloat16()).dtype == torch.float16
        for tokens in (x, x[:, :1]):
            assert (opened(tokens).logits - wanted[:, : tokens.shape[1]]).norm() < 2 * error * wanted.norm()
        assert opened.model.layers[0].mlp.up_proj.weight.source.nbytes * 3 < 256 * 512 * 2


@torch.no_grad()
def test_a_disk_that_fills_up_while_weights_are_packed(make_file_system: Callable[..., Path]) -> None:
    disk = make_file_system(4 * MIB)
    model, x = layers(24, 768).eval(), torch.randn(2, 768)  # 8 MB in 4 bits
    wanted, before = model(x), sorted(disk.iterdir())
    with pytest.raises(OSError, match="No space left on device") as caught:
        stream_weights(model, disk, memory_budget="8M", quantize="int4")
    assert caught.value.errno == errno.ENOSPC
    assert sorted(disk.iterdir()) == before
    assert torch.equal(model(x), wanted), "it is as it was"
    with stream_weights(model[:8], disk, memory_budget="8M", quantize="int4") as opened:
        assert 0 < opened.stats().quantization_error < 0.15


@torch.no_grad()
def test_on_request_half_is_read_and_the_output_is_nearly_the_same(folder: Path) -> None:
    torch.manual_seed(1)
    model, x = layers(8).bfloat16().eval(), torch.randn(4, 256).bfloat16()
    wanted, size = model(x), nbytes(model)
    with stream_weights(model, folder, memory_budget="200K", quantize="int8") as opened:
        for _ in range(2):
            assert (opened(x) - wanted).norm() < 0.03 * wanted.norm()
        stats = opened.stats()
        assert stats.bytes_read <= 1.2 * size
        assert 0 < stats.quantization_error < 0.01
        assert next(opened.parameters()).dtype == torch.bfloat16
    experts = Experts().eval()
    wanted = experts(x.float(), [2, 5])
    with stream_weights(experts, folder, memory_budget="1M", quantize="int8") as opened:
        assert (opened(x.float(), [2, 5]) - wanted).norm() < 0.03 * wanted.norm()
        assert opened.stats().bytes_read <= 2 * 65536, "of experts those that are asked for"
    tied, tokens = Tied().eval(), torch.tensor([[1, 2]])
    wanted = tied.embedding(tokens)
    with stream_weights(tied, folder, memory_budget="1M", quantize="int8") as opened:
        assert torch.equal(opened.embedding(tokens), wanted), "embeddings are as they were"


@torch.no_grad()
def test_what_a_weight_is_expanded_to_counts_as_memory_of_the_budget(folder: Path) -> None:
    torch.manual_seed(1)
    model, x = layers(8, 512).eval(), torch.randn(4, 512)  # of 1 MiB each, in 8 bits a quarter of that
    with pytest.raises(ValueError, match=r"at least (1\.2\d+|1\.3\d*) MiB are needed"):
        stream_weights(model, folder, memory_budget="1M", quantize="int8")
    with stream_weights(model, folder, memory_budget="1500K", quantize="int8") as opened:
        results: list[torch.Tensor] = []
        wanted = opened(x)
        in_threads(lambda _: results.append(opened(x)), 2)
        assert [torch.equal(result, wanted) for result in results] == [True, True]
        assert MIB < opened.stats().peak_bytes <= 1500 * KIB


@torch.no_grad()
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("failing", ["derive", "read_now", "Window"])
def test_a_model_that_is_refused_is_as_before(failing: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise OSError("no")

    def seen(model: nn.Module) -> list[Any]:
        own = [{key: value for key, value in vars(part).items() if key[0] != "_"} for part in model.modules()]
        params = [(id(param), param.requires_grad) for param in model.parameters()]
        classes = [(type(part), [key for key in vars(part) if "_nvme" in key]) for part in model.modules()]
        return [own, params, classes, getattr(getattr(model, "config", None), "_experts_implementation", None)]

    path, kind = saved(folder, "Qwen3Moe")
    made = kind.from_pretrained(path, experts_implementation="grouped_mm")
    for model, given in ((made, torch.arange(8)[None]), (mixture("scores").requires_grad_(), X[:, :64])):
        next(model.train().children()).eval()
        wanted, before = tree_leaves(model(given))[0], seen(model)
        with monkeypatch.context() as patch:
            patch.setattr(f"nvme_ops.offload.weights.streamed.{failing}", fail)
            with pytest.raises(OSError, match="no"):
                stream_weights(model, folder, memory_budget="300K")
        assert seen(model) == before
        assert torch.equal(tree_leaves(model(given))[0], wanted)
        assert sorted(path.parent.iterdir()) == [path]
        with stream_weights(model, folder, memory_budget="300K"):
            pass
