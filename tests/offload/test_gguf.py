"""GGUF files: their headers, their blocks, and models of them, beside gguf's and transformers' own reading."""

from __future__ import annotations

import os
import struct
from pathlib import Path
from typing import Any

import pytest
import torch

from nvme_ops.base.errors import FormatError
from nvme_ops.formats import gguf as header
from nvme_ops.formats.blocks import BlockLayout
from nvme_ops.formats.packed import Packed
from nvme_ops.offload import cli, from_pretrained
from tests.offload.gguf_files import ARCHITECTURES, KINDS, blocks, gguf, numpy, transformers, write

pytestmark = pytest.mark.usefixtures("one_thread", "quiet_transformers")

IDS = torch.tensor([[5, 6, 7, 8, 1], [9, 10, 11, 12, 2]])
MIXED = ("Q4_K", "Q6_K", "F16", "Q4_0", "Q5_0", "MXFP4", "Q5_K")


def layout_of(kind: str, rows: int, columns: int, order: tuple[int, ...] | None = None) -> BlockLayout:
    values, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    return BlockLayout(kind, rows, columns, values, size, order)


def same(actual: torch.Tensor, wanted: torch.Tensor) -> bool:
    """NaN of any bits is NaN."""
    actual, wanted = actual.cpu(), wanted.cpu()
    return torch.equal(actual.isnan(), wanted.isnan()) and torch.equal(actual.nan_to_num(7), wanted.nan_to_num(7))


@pytest.mark.filterwarnings("ignore:invalid value")
@pytest.mark.parametrize("kind", KINDS)
def test_values_of_blocks_are_those_of_gguf(kind: str) -> None:
    given = blocks(kind, 48, 768, numpy.random.default_rng(3), any_bytes=True)  # infinite and NaN, too
    with numpy.errstate(all="ignore"):
        wanted = torch.from_numpy(gguf.dequantize(given, gguf.GGMLQuantizationType[kind])).cpu()
    stored, order = torch.from_numpy(given).flatten().cpu(), torch.randperm(48)
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):  # the last one by torch's operations
        out = torch.empty(48, 768, dtype=dtype, device="cpu")
        Packed([layout_of(kind, 48, 768)], [(1.0,)]).expand(stored, out)
        assert same(out, wanted.to(dtype))
        form = Packed([layout_of(kind, 48, 768, tuple(order.tolist()))], [(1.0,)])
        form.expand(stored, out)
        assert same(out[order.cpu()], wanted.to(dtype))
    out = torch.empty(768, 48, dtype=torch.bfloat16, device="cpu")
    Packed([layout_of(kind, 48, 768)], [(1.0,)], None, True).expand(stored, out)
    assert same(out.T, wanted.bfloat16())


@pytest.mark.parametrize("kind", KINDS)
def test_products_are_those_with_the_values(kind: str) -> None:
    columns, order = 2304, tuple(torch.randperm(40).tolist())
    stored = torch.from_numpy(blocks(kind, 40, columns, numpy.random.default_rng(4))).flatten().cpu()
    form = Packed([layout_of(kind, 40, columns, order)], [(1.0,)])
    values = torch.empty(40, columns, dtype=torch.float32, device="cpu")
    form.expand(stored, values)
    inputs = torch.randn(3, columns).bfloat16().cpu()
    made = form.product(stored, inputs, False)
    if made is None:
        assert kind in ("Q5_0", "Q3_K", "MXFP4")
        return
    wanted = inputs.double() @ values.double().T
    assert torch.allclose(made.double(), wanted, atol=1e-2 * float(wanted.std()), rtol=1e-2)


@pytest.mark.parametrize("kinds", [("Q8_0",), MIXED], ids=["one kind", "mixed"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@torch.no_grad()
def test_a_model_is_that_of_transformers(tmp_path: Path, architecture: str, kinds: tuple[str, ...]) -> None:
    path = write(tmp_path, architecture, kinds, tied=architecture == "gemma2")
    options: dict[str, Any] = {"dtype": torch.float32, "experts_implementation": "eager"}
    plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=path.name, **options).eval()
    with from_pretrained(path, memory_budget="16M", **options) as model:
        assert torch.equal(model(IDS).logits, plain(IDS).logits)
        state = plain.state_dict()
        assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    with from_pretrained(tmp_path, gguf_file=path.name, memory_budget="6M" if len(kinds) < 2 else "16M") as model:
        assert model.dtype in ((torch.bfloat16,) if len(kinds) < 2 else (torch.bfloat16, torch.float16, torch.float32))
        assert model.config.architectures is None or model.generate(IDS[:1], max_new_tokens=2).shape == (1, 7)


@torch.no_grad()
def test_few_rows_of_an_embedding_are_read_alone(tmp_path: Path) -> None:
    path = write(tmp_path, "llama", ("Q8_0",), tied=True)
    plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=path.name, dtype=torch.bfloat16)
    with from_pretrained(path, memory_budget="1M") as model:
        before = model.stats().bytes_read
        values = model.get_input_embeddings()(IDS[:1])
        assert model.stats().bytes_read - before == 5 * 256 // 32 * 34
        assert torch.equal(values, plain.get_input_embeddings()(IDS[:1]))
        model(IDS[:1])  # the head is the same weight, which may be in memory then
        assert torch.equal(model.get_input_embeddings()(IDS[:1]), values)


def test_the_least_budget_has_room_for_one_matrix_as_stored_and_expanded(tmp_path: Path) -> None:
    path = write(tmp_path, "llama", ("Q8_0",))
    with pytest.raises(ValueError, match="at least 400 KiB are needed"):
        from_pretrained(path, memory_budget="396K")
    with from_pretrained(path, memory_budget="400K") as model:
        assert model(IDS).logits.isfinite().all()
        assert model.stats().peak_bytes <= 400 << 10


@torch.no_grad()
def test_several_files_are_one_model_and_frequencies_are_scaled(tmp_path: Path) -> None:
    factors = numpy.linspace(1, 8, 32, dtype=numpy.float32)
    more = {"rope_freqs.weight": factors, "blk.9.what.weight": numpy.ones(3, dtype=numpy.float32)}
    path = write(tmp_path, "llama", ("Q8_0",), files=3, **more)
    with pytest.warns(UserWarning, match=r"1-of-00003.gguf: .* has no place for blk\.9\.what") as said:
        model = from_pretrained(path, memory_budget="16M")
    assert __file__ in [warning.filename for warning in said if "no place" in str(warning.message)]
    with model:
        assert not model.config.tie_word_embeddings
        frequencies = model.model.rotary_emb.inv_freq.cpu()
        assert torch.allclose(frequencies, 10000.0 ** -(torch.arange(32).cpu() / 32) / torch.from_numpy(factors).cpu())
        assert model(IDS).logits.isfinite().all()
    (tmp_path / "model-00002-of-00003.gguf").unlink()
    with pytest.raises(FileNotFoundError, match="model-00002-of-00003"):
        from_pretrained(path, memory_budget="16M")


def test_the_command_line_takes_a_file_with_its_tokenizer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path, "llama", ("Q4_K", "Q6_K"))
    assert cli.main(["generate", str(path), "--memory", "8M", "--prompt", "word3", "--new-tokens", "2"]) == 0
    assert "no tokenizer" not in capsys.readouterr().out
    sizes = ["--batch", "1", "--prompt-length", "4", "--new-tokens", "2"]
    assert cli.main(["plan", str(path), "--memory", "4M", *sizes]) == 0
    assert "LlamaForCausalLM" in capsys.readouterr().out


def test_a_header_is_that_of_gguf_and_every_damage_is_said(tmp_path: Path) -> None:
    path = write(tmp_path, "gemma2", ("Q4_K", "Q8_0"))
    whole = path.read_bytes()

    def read(data: bytes) -> header.GgufHeader:
        path.write_bytes(data)
        descriptor = os.open(path, os.O_RDONLY)
        try:
            return header.read(descriptor, str(path))
        finally:
            os.close(descriptor)

    reader = gguf.GGUFReader(path)
    found = read(whole)
    assert {name: (one.kind, list(one.shape), one.start) for name, one in found.tensors.items()} == {
        one.name: (one.tensor_type.name, one.shape.tolist()[::-1], one.data_offset) for one in reader.tensors
    }
    assert found.fields["general.architecture"] == "gemma2"
    begin = min(tensor.start for tensor in found.tensors.values())
    for size in [*range(0, begin, 7), len(whole) - 1]:
        with pytest.raises(FormatError):
            read(whole[:size])
    random = numpy.random.default_rng(5)
    for _ in range(300):
        damaged = bytearray(whole[: begin + 64])
        damaged[random.integers(begin)] = random.integers(256)
        with pytest.raises(FormatError):
            read(bytes(damaged))  # at the least, the tensors are not there


def place(whole: bytes, text: bytes) -> int:
    return whole.index(text) + len(text)


def number(at: int, code: str, value: float) -> Any:
    return lambda data: struct.pack_into(code, data, at, value)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda data: number(0, "<I", 7), "is no GGUF file"),
        (lambda data: number(4, "<I", 3 << 24), "version 50331648 of GGUF, not 2 or 3, or is big-endian"),
        (lambda data: number(8, "<Q", 10**15), "claims 1000000000000000 tensors"),
        (lambda data: number(16, "<Q", 10**15), "1000000000000000 settings"),
        (lambda data: number(place(data, b"ggml.tokens") + 8, "<Q", 1 << 60), "an array of 1152921504606846976 values"),
        (lambda data: number(place(data, b"ggml.tokens") + 16, "<Q", 1 << 40), "a string of 1099511627776 bytes"),
        (lambda data: number(place(data, b"ggml.tokens") + 4, "<I", 77), "a setting of type 77"),
        (lambda data: number(place(data, b"token_embd.weight"), "<I", 9), "with 9 dimensions"),
        (lambda data: number(place(data, b"token_embd.weight") + 4, "<Q", 255), "in no whole blocks"),
        (lambda data: number(place(data, b"token_embd.weight") + 12, "<Q", 1 << 50), "beyond the file's end"),
        (lambda data: number(place(data, b"token_embd.weight") + 20, "<I", 999), "of type 999, which"),
        (lambda data: number(place(data, b"token_embd.weight") + 24, "<Q", 1), "in no whole blocks or beyond"),
        (lambda data: number(place(data, b"output_norm.weight") + 16, "<Q", 0), "tensors that overlap"),
        (lambda data: number(place(data, b"output_norm.weigh") - 1, "<B", 0xFF), "not UTF-8"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_a_header_claims_is_checked(tmp_path: Path, change: Any, words: str) -> None:
    path = write(tmp_path, "llama", ("Q8_0",))
    data = bytearray(path.read_bytes())
    change(bytes(data))(data)
    path.write_bytes(data)
    with pytest.raises(FormatError, match=words):
        from_pretrained(path, memory_budget="16M")


def test_what_no_model_of_transformers_is_names_the_architecture(tmp_path: Path) -> None:
    path = write(tmp_path, "llama", ("Q8_0",))
    data = path.read_bytes()
    path.write_bytes(data.replace(b"llama", b"lamas"))
    with pytest.raises(ValueError, match="architecture lamas is not supported"):
        from_pretrained(path, memory_budget="16M")
    path.write_bytes(data.replace(b"blk.1.ffn_up", b"blk.1.ffn_xy"))
    words = r"weights are missing: model\.layers\.1\.mlp\.up_proj"
    with pytest.warns(UserWarning, match="blk.1.ffn_xy"), pytest.raises(ValueError, match=words):
        from_pretrained(path, memory_budget="16M")
    path = write(tmp_path, "qwen3moe", ("Q8_0",))
    path.write_bytes(path.read_bytes().replace(b"blk.1.ffn_up_exps", b"blk.7.ffn_up_exps"))
    words = r"another shape than the configuration says .*: model\.layers\.1\.mlp\.experts\.gate_up_proj"
    with pytest.warns(UserWarning, match="blk.7.ffn_up_exps"), pytest.raises(ValueError, match=words):
        from_pretrained(path, memory_budget="16M")
    with pytest.raises(FileNotFoundError, match=r"none\.gguf"):
        from_pretrained(tmp_path, gguf_file="none.gguf", memory_budget="16M")
