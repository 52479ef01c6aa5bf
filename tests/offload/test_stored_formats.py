"""Formats of weights in files: each is read to the values that it stands for, or refused by a tensor's name."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import nvme_ops
from nvme_ops.formats.quantized import Scaled
from nvme_ops.offload import from_pretrained
from tests.offload.models import rewritten

transformers: Any = pytest.importorskip("transformers")

pytestmark = pytest.mark.usefixtures("one_thread", "quiet_transformers")

IDS = torch.tensor([[5, 6, 7, 8], [9, 10, 11, 12]])
SIZES: dict[str, Any] = {
    "vocab_size": 256, "hidden_size": 96, "intermediate_size": 192, "num_attention_heads": 4, "num_hidden_layers": 2,
    "num_key_value_heads": 2, "pad_token_id": 0,
}  # fmt: skip
FIRST = "model.layers.0.mlp.down_proj"
FP8 = torch.float8_e4m3fn


def written(folder: Path, change: Callable[[torch.Tensor], dict[str, torch.Tensor]], settings: Any = None) -> Path:
    """Returns a folder with a model whose matrices are replaced by what ``change`` returns, after their module's name.

    What it returns as ``plain`` goes to the folder ``plain`` in it.
    """

    def changed(name: str, value: torch.Tensor) -> Any:
        if not name.endswith("_proj.weight"):
            return None
        made = change(value + 0.02)
        plain = made.pop("plain", value)
        return {name.removesuffix("weight") + end: tensor for end, tensor in made.items()}, plain

    torch.manual_seed(1)
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)).save_pretrained(folder)
    rewritten(folder, changed, settings)
    return folder


def in_8_bits(value: torch.Tensor) -> dict[str, torch.Tensor]:
    """A change to FP8, a scale for each row."""
    low, scale, plain = scaled(value)
    return {"weight": low, "weight_scale": scale, "plain": plain}


def scaled(value: torch.Tensor, dtype: torch.dtype = FP8) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns values of 8 bits, the scale of each row, and what they stand for."""
    scale = value.abs().amax(1, keepdim=True) / 100
    low = (value / scale).to(dtype)
    return low, scale, low.float() * scale


@torch.no_grad()
def require_same(path: Path, **options: Any) -> None:
    plain = transformers.LlamaForCausalLM.from_pretrained(path / "plain", **options)
    with from_pretrained(path, memory_budget="4M", **options) as model:
        assert model.dtype == plain.dtype
        for name, value in model.state_dict().items():
            assert torch.equal(value, plain.state_dict()[name]), name
        assert torch.equal(model(IDS).logits, plain(IDS).logits)


# compressed-tensors, by its own writer and reader


@pytest.mark.parametrize(
    ("strategy", "options"),
    [("tensor", {}), ("channel", {}), ("group", {"group_size": 24}), ("group", {"group_size": 48})],
)
@pytest.mark.parametrize(("kind", "symmetric"), [("int", True), ("int", False), ("float", True)])
def test_files_of_compressed_tensors_have_the_values_that_it_reads(
    strategy: str, options: dict[str, Any], kind: str, symmetric: bool, tmp_path: Path
) -> None:
    quantization = pytest.importorskip("compressed_tensors.quantization")
    compressors = pytest.importorskip("compressed_tensors.compressors")
    parameters = pytest.importorskip("compressed_tensors.quantization.utils").calculate_qparams
    arguments = quantization.QuantizationArgs(num_bits=8, type=kind, symmetric=symmetric, strategy=strategy, **options)
    scheme = quantization.QuantizationScheme(targets=["Linear"], weights=arguments)

    def change(value: torch.Tensor) -> dict[str, torch.Tensor]:
        groups = value.view(value.shape[0], -1, options.get("group_size", value.shape[1]))
        least, most = groups.amin(-1), groups.amax(-1)
        if strategy == "tensor":
            least, most = value.min()[None], value.max()[None]
        scale, zero = parameters(least, most, arguments)
        parts = {"weight": value, "weight_scale": scale, "weight_zero_point": zero}
        made = compressors.NaiveQuantizationCompressor.compress(parts, scheme)
        assert ("weight_zero_point" in made) is not symmetric
        return {**made, "plain": compressors.NaiveQuantizationCompressor.decompress(made, scheme)["weight"]}

    groups = {"group_0": {"targets": ["Linear"], "weights": arguments.model_dump(mode="json")}}
    settings = {"quant_method": "compressed-tensors", "format": f"{kind}-quantized", "config_groups": groups}
    require_same(written(tmp_path, change, settings))


def test_zero_points_of_parts_and_of_weights_that_are_joined() -> None:
    torch.manual_seed(1)
    values = torch.randint(-128, 128, (2, 6, 4), dtype=torch.int8)
    scales, zeros = torch.rand(2, 6, 1), torch.randint(-9, 9, (2, 6, 1)).float()
    wanted = (values.float() - zeros) * scales

    def expanded(stored: torch.Tensor, stored_as: Scaled) -> torch.Tensor:
        made = torch.empty(stored.shape)
        stored_as.expand(stored, made)
        return made

    parts = [Scaled(scales, zeros).select(number) for number in range(2)]
    stacked = Scaled.concatenated([part.unsqueeze(0) for part in parts], [(1, 6, 4)] * 2, 0)
    assert torch.equal(expanded(values, stacked), wanted)
    others = [parts[0], Scaled(torch.full((1, 1), 2.0)), parts[1]]  # one without zero points
    joined = Scaled.concatenated(others, [(6, 4)] * 3, 0)
    result = expanded(torch.cat([values[0], values[0], values[1]]), joined)
    assert torch.equal(result, torch.cat([wanted[0], values[0].float() * 2, wanted[1]]))


# What is beside the weights


@pytest.mark.parametrize(
    "name", ["scale_weight", "weight_scales", "weight.scale", "scale", "qscale_weight", "g_idx", "weight_scale_2"]
)
@pytest.mark.parametrize("dtype", [torch.int8, FP8])
def test_an_unknown_tensor_beside_a_weight_is_named(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    def change(value: torch.Tensor) -> dict[str, torch.Tensor]:
        low, scale, _ = scaled(value, dtype)
        return {"weight": low, name: scale} | ({"weight_scale": scale} if name in ("g_idx", "weight_scale_2") else {})

    with pytest.raises(ValueError, match=rf"^{re.escape(FIRST)}\.{name} is not understood, and {FIRST}\.weight"):
        from_pretrained(written(tmp_path, change), memory_budget="4M")


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int16, torch.int32, FP8, torch.float8_e5m2])
@pytest.mark.parametrize("config_dtype", ["float32", None])
def test_a_weight_that_has_no_scale_is_named(dtype: torch.dtype, config_dtype: str | None, tmp_path: Path) -> None:
    path = written(tmp_path, lambda value: {"weight": (value * 100).to(dtype)})
    document = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**document, "dtype": config_dtype}))
    name = str(dtype).removeprefix("torch.")
    with pytest.raises(ValueError, match=rf"weight is stored as {name}, and no scale for it is in the files"):
        from_pretrained(path, memory_budget="4M")


def test_what_is_about_activations_is_passed_over_and_a_layout_looked_at(tmp_path: Path) -> None:
    def change(value: torch.Tensor, layout: int = 0) -> dict[str, torch.Tensor]:
        low, scale, plain = scaled(value, torch.int8)
        more = {key: torch.ones(1) for key in ("input_scale", "output_scale", "input_zero_point", "k_scale")}
        form = torch.tensor(layout, dtype=torch.uint8)
        return {"weight": low, "SCB": scale.flatten() * 127, "weight_format": form, "plain": plain, **more}

    path = written(tmp_path / "rows", change)
    with from_pretrained(path, memory_budget="4M") as model:
        wanted = transformers.LlamaForCausalLM.from_pretrained(path / "plain").state_dict()
        for name, value in model.state_dict().items():
            assert torch.allclose(value, wanted[name], rtol=1e-5)
    path = written(tmp_path / "others", lambda value: change(value, 1))
    with pytest.raises(ValueError, match=rf"{FIRST}\.weight_format: only weights in the order of their rows"):
        from_pretrained(path, memory_budget="4M")

    def twice(value: torch.Tensor) -> dict[str, torch.Tensor]:
        low, scale, _ = scaled(value)
        return {"weight": low, "weight_scale": scale, "weight_scale_inv": 1 / scale}

    with pytest.raises(ValueError, match=rf"{FIRST}\.weight has two scales, .*_scale and .*_scale_inv"):
        from_pretrained(written(tmp_path / "twice", twice), memory_budget="4M")


@pytest.mark.parametrize("dtype", ["float16", torch.float16, torch.float32, "bfloat16", None])
def test_weights_of_8_bits_are_computed_with_in_the_dtype_asked_for(dtype: Any, tmp_path: Path) -> None:
    require_same(written(tmp_path, in_8_bits), **({} if dtype is None else {"dtype": dtype}))


# Formats that cannot be read

WORDS, HALVES = torch.ones(8, 8, dtype=torch.int32), torch.ones(8, 8).half()
BYTES = torch.ones(512, 1, dtype=torch.uint8)
UNKNOWN: dict[str, tuple[dict[str, torch.Tensor], dict[str, Any]]] = {
    "gptq": ({"qweight": WORDS, "qzeros": WORDS, "scales": HALVES, "g_idx": WORDS}, {"quant_method": "gptq"}),
    "compressed-tensors pack-quantized": (
        {"weight_packed": WORDS, "weight_scale": HALVES, "weight_shape": WORDS[0, :2]},
        {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {}},
    ),
    "bitsandbytes": (
        {"weight": BYTES, "weight.absmax": HALVES, "weight.quant_state.bitsandbytes__nf4": BYTES},
        {"quant_method": "bitsandbytes", "load_in_4bit": True},
    ),
    "modelopt NVFP4": (
        {"weight": BYTES, "weight_scale": HALVES.to(FP8), "weight_scale_2": HALVES[0, 0]},
        {"quant_method": "modelopt", "quant_algo": "NVFP4"},
    ),
    "torchao": ({"weight:qdata": WORDS.to(torch.int8), "weight:scale": HALVES}, {"quant_method": "torchao"}),
}  # fmt: skip


@pytest.mark.parametrize("name", UNKNOWN)
def test_a_format_that_is_not_known_is_named(name: str, tmp_path: Path) -> None:
    tensors, settings = UNKNOWN[name]
    path = written(tmp_path, lambda _: dict(tensors), settings)
    with pytest.raises(ValueError, match=rf"{FIRST}\.\w.*; the files are in the format {name}, known are"):
        from_pretrained(path, memory_budget="4M")


@pytest.mark.parametrize(
    "settings",
    [
        *({"weight_block_size": size} for size in ([128], "abc", [0, 0], [-1, 2], [1.5, 2], 7, [[1, 2], 3], {"a": 1})),
        *({"config_groups": {"a": {"weights": spec}}} for spec in ({"group_size": "x"}, {"block_structure": [0, 1]})),
        "abc", 7, [1],
    ],
)  # fmt: skip
def test_settings_that_make_no_sense_are_value_errors(settings: Any, tmp_path: Path) -> None:
    path = written(tmp_path, in_8_bits, settings)
    with pytest.raises(ValueError, match=r"quantization_config: the size of blocks|cannot read the configuration"):
        from_pretrained(path, memory_budget="4M")


@pytest.mark.parametrize(
    "settings", [{}, {"quant_method": "fp8"}, {"config_groups": 5}, {"config_groups": {"a": {"weights": []}}}]
)
def test_settings_that_say_nothing_are_passed_over(settings: Any, tmp_path: Path) -> None:
    path = written(tmp_path, in_8_bits, settings)
    for place in (path, path / "plain"):  # a table beside a weight
        state = dict(nvme_ops.load(place / "model.safetensors"))
        state["lm_head.table"] = torch.ones(2, 2, dtype=torch.int32)
        nvme_ops.save(state, place / "model.safetensors", metadata={"format": "pt"})
    require_same(path)
