"""Formats of weights in files: each is read to the values that it stands for, or refused by a tensor's name."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import nvme_ops
from nvme_ops.formats.quantized import Scaled
from nvme_ops.offload import from_pretrained
from nvme_ops.offload.weights import stored_formats
from tests.offload.models import rewritten
from tests.offload.packing import PACKINGS, compressed, packing

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


@pytest.mark.parametrize("name", PACKINGS)
def test_packed_files_have_the_values_of_their_package(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pack, settings = packing(name)
    monkeypatch.setattr(stored_formats, "_AT_ONCE", 3)

    def change(value: torch.Tensor) -> dict[str, torch.Tensor]:
        made, plain = pack(value)
        assert any(end in made for end in ("weight_packed", "weight.absmax", "qweight", "_weight_qdata"))
        assert ("weight_zero_point" in made) is ("zeros" in name)
        return {**made, "plain": plain}

    path = written(tmp_path, change, settings)
    require_same(path, **({"dtype": torch.bfloat16} if name == "nvfp4" else {}))  # to which the package rounds that


@pytest.mark.parametrize("dtype", [torch.int8, FP8])
@pytest.mark.parametrize("group", [24, 48, None])
def test_files_of_torchao_have_the_values_of_its_definition(
    group: int | None, dtype: torch.dtype, tmp_path: Path
) -> None:
    def change(value: torch.Tensor) -> dict[str, torch.Tensor]:
        groups = value.view(len(value), -1, group or value.shape[1])
        scale = groups.abs().amax(-1, keepdim=True) / 100
        zero = torch.randint(-9, 9, scale.shape, dtype=torch.int8) * (dtype == torch.int8)
        low = (groups / scale + zero).to(dtype)
        more = {"_weight_zero_point": zero.squeeze(-1)} if dtype == torch.int8 else {}
        plain = ((low.float() - zero) * scale).view_as(value)
        return {"_weight_qdata": low.view_as(value), "_weight_scale": scale.squeeze(-1), "plain": plain, **more}

    require_same(written(tmp_path / "same", change, {"quant_method": "torchao"}))
    path = written(tmp_path / "more", lambda value: {**change(value), "_weight_act_pre_scale": torch.ones(1)})
    with pytest.raises(ValueError, match=rf"{FIRST}.weight_act_pre_scale is not understood"):
        from_pretrained(path, memory_budget="4M")


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
    "name", ["scale_weight", "weight_scales", "weight.scale", "qscale_weight", "g_idx", "weight_scale_2"]
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


WRONG: dict[str, tuple[Callable[[dict[str, torch.Tensor]], object], str]] = {
    "no scale": (lambda parts: parts.pop("weight_scale"), "there is no _scale"),
    "rows": (lambda parts: parts.update(weight_scale=parts["weight_scale"][1:].clone()), "fits no .* rows"),
    "groups": (lambda parts: parts.update(weight_scale=parts["weight_scale"][:, :1].repeat(1, 7)), "fits no .* rows"),
    "dtype": (lambda parts: parts.update(weight_scale=parts["weight_scale"].long()), "int64 of shape"),
    "one dimension": (lambda parts: parts.update(weight_packed=parts["weight_packed"].flatten()), "not that of a"),
    "nothing": (lambda parts: parts.update(weight_packed=parts["weight_packed"][:0].clone()), "not that of a"),
    "zero": (lambda parts: parts.update(weight_global_scale=torch.zeros(1)), "_global_scale is 0.0"),
    "NaN": (lambda parts: parts.update(weight_global_scale=torch.tensor(torch.nan)), "_global_scale is nan"),
    "many": (lambda parts: parts.update(weight_global_scale=torch.ones(2)), "_global_scale has 2 numbers"),
    "matrices": (
        lambda parts: parts.update(
            weight_packed=parts["weight_packed"].repeat(2, 1, 1), weight_scale=parts["weight_scale"][None]
        ),
        "fits no .* rows",
    ),
}  # fmt: skip
WRONG_INTEGERS: dict[str, tuple[Callable[[dict[str, torch.Tensor]], object], str]] = {
    "shape": (lambda parts: parts.update(weight_shape=torch.tensor([3, 7])), "no 7 integers of 4 or 8 bits"),
    "no shape": (lambda parts: parts.update(weight_shape=torch.ones(0, dtype=torch.long)), "_shape has 0 numbers"),
    "zeros": (
        lambda parts: parts.update(weight_zero_point=torch.zeros_like(parts["weight_scale"]).to(torch.int8)),
        "_zero_point, .*int8 of .* is no int32 of shape",
    ),
    "zeros turned": (
        lambda parts: parts.update(weight_zero_point=parts["weight_scale"][::8].T.int().contiguous()),
        "_zero_point, .* is no int32 of shape",
    ),
    "zeros of another dtype": (
        lambda parts: parts.update(weight_zero_point=parts["weight_scale"][::8].float()),
        "_zero_point, .*float32 of .* is no int32",
    ),
    "order": (
        lambda parts: parts.update(weight_g_idx=torch.arange(8 * parts["weight_packed"].shape[1]).flip(0) // 32),
        "order of activations",
    ),
}


@pytest.mark.parametrize("name", [*WRONG, *WRONG_INTEGERS])
def test_parts_that_do_not_fit_each_other_are_named(name: str, tmp_path: Path) -> None:
    spoil, words = {**WRONG, **WRONG_INTEGERS}[name]

    def change(value: torch.Tensor) -> dict[str, torch.Tensor]:
        rows, columns = value.shape
        made = {"weight_scale": torch.full((rows, columns // 32), 120, dtype=torch.uint8)}
        if name in WRONG:
            made["weight_packed"] = torch.zeros(rows, columns // 2, dtype=torch.uint8)
        else:
            made["weight_packed"] = torch.zeros(rows, columns // 8, dtype=torch.int32)
            made["weight_shape"] = torch.tensor([rows, columns])
        spoil(made)
        return made

    path = written(tmp_path, change, {"quant_method": "compressed-tensors", "format": "any"})
    with pytest.raises(ValueError, match=rf"\.weight_packed: .*{words}"):
        from_pretrained(path, memory_budget="4M")


def state_with(**changes: Any) -> Callable[[dict[str, torch.Tensor], dict[str, Any]], None]:
    """Changes the bytes of JSON that bitsandbytes has beside each weight."""

    def spoil(parts: dict[str, torch.Tensor], settings: dict[str, Any]) -> None:
        name = "weight.quant_state.bitsandbytes__nf4"
        document = json.dumps({**json.loads(bytes(parts[name].tolist())), **changes})
        parts[name] = torch.tensor(list(document.encode()), dtype=torch.uint8)

    return spoil


def without(name: str) -> Callable[[dict[str, torch.Tensor], dict[str, Any]], object]:
    return lambda parts, settings: parts.pop(name)


def other(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Any, Any], None]:
    def spoil(parts: dict[str, torch.Tensor], settings: dict[str, Any]) -> None:
        parts[name] = change(parts[name]).contiguous()

    return spoil


def said(**changes: Any) -> Callable[[Any, dict[str, Any]], None]:
    return lambda parts, settings: settings.update(changes)


#: Of a packing: what is spoiled, and words of the error.
SPOILED: list[tuple[str, Callable[[dict[str, torch.Tensor], dict[str, Any]], object], str]] = [
    ("nf4", without("weight.absmax"), "there is no .weight.absmax"),
    ("nf4", other("weight.absmax", lambda part: part[1:]), "weight.absmax, torch.float32 .* has not the"),
    ("nf4", other("weight.absmax", torch.Tensor.long), "weight.absmax is stored as torch.int64"),
    ("nf4", other("weight", lambda part: part[1:]), ".weight, torch.uint8 of shape .* has not the"),
    ("nf4", without("weight.quant_map"), "no .weight.quant_map of 16 finite numbers"),
    ("nf4", other("weight.quant_map", lambda part: part[1:]), "no .weight.quant_map of 16 finite numbers"),
    ("nf4", other("weight.quant_map", lambda part: part / 0), "no .weight.quant_map of 16 finite numbers"),
    ("nf4", other("weight.quant_state.bitsandbytes__nf4", lambda part: part[1:]), "quant_state cannot be read"),
    ("nf4", state_with(shape=[96]), "quant_state cannot be read"),
    ("nf4", state_with(shape=[96, "x"]), "quant_state has shape 96 x x"),
    ("nf4", state_with(blocksize=0), "quant_state has shape .* and blocks of 0"),
    ("nf4", said(quant_method="gptq"), "is packed as in bitsandbytes, and quantization_config says 'gptq'"),
    ("nf4 nested", without("weight.nested_absmax"), "there is no .weight.nested_absmax"),
    ("nf4 nested", other("weight.nested_absmax", lambda part: part[1:]), "nested_absmax, .* has not the"),
    ("nf4 nested", other("weight.nested_absmax", torch.Tensor.half), "nested_absmax, torch.float16 .* has not the"),
    ("nf4 nested", without("weight.nested_quant_map"), "no .weight.nested_quant_map of 256"),
    ("nf4 nested", state_with(nested_blocksize=128), "blocks of 64 and 128"),
    ("nf4 nested", state_with(nested_offset=math.nan), "weight.absmax is stored as"),
    ("gptq", without("scales"), "there must be matrices"),
    ("gptq", without("qzeros"), "there must be matrices"),
    ("gptq", other("scales", torch.Tensor.long), "do not fit each other"),
    ("gptq", other("qweight", torch.Tensor.float), "do not fit each other"),
    ("gptq", other("qzeros", lambda part: part[1:]), "do not fit each other"),
    ("gptq", other("qzeros", lambda part: torch.cat([part, part[:, :1]], 1)), "do not fit each other"),
    ("gptq", other("qweight", lambda part: part[:, 1:]), "do not fit each other"),
    ("gptq", other("qzeros", lambda part: part[:, ::2]), "has integers of 2 bits, 4 in quantization_config"),
    ("gptq", said(bits=8), "has integers of 4 bits, 8 in quantization_config"),
    ("gptq", said(group_size=16), "groups do not divide .* rows into groups of 16"),
    ("gptq", other("g_idx", lambda part: part[1:]), "g_idx, torch.int32 .* has not the .* elements"),
    ("gptq", said(checkpoint_format="marlin"), "is gptq of format marlin; known are gptq, gptq_v2"),
    ("gptq", said(quant_method="awq"), "is packed as in gptq, and quantization_config says 'awq'"),
    ("gptq", lambda parts, settings: settings.pop("quant_method", None), "is None of format gptq"),
    ("torchao int4", without("_weight_scale"), "there is no .weight_scale"),
    ("torchao int4", other("_weight_scale", torch.Tensor.float), "the parts do not fit"),
    ("torchao int4", other("_weight_qdata", torch.Tensor.int), "the parts do not fit"),
    ("torchao int4", other("_weight_zero_point", lambda part: part.T), "the parts do not fit"),
    ("torchao int4", other("_weight_zero_point", lambda part: part[1:]), "the parts do not fit"),
    ("awq", said(version="gemv"), "is awq of format gemv; known are gemm"),
    ("awq", said(bits=8), "has integers of 4 bits, 8 in"),
    ("awq", lambda parts, settings: parts.update(weight=torch.ones(2, 2)), "there is a .weight beside"),
]


@pytest.mark.parametrize(("name", "spoil", "words"), SPOILED)
def test_parts_or_settings_that_do_not_fit_each_other_are_named(
    name: str, spoil: Callable[[Any, Any], object], words: str, tmp_path: Path
) -> None:
    pack, settings = packing(name)
    settings = dict(settings)

    def change(value: torch.Tensor) -> dict[str, torch.Tensor]:
        made, _ = pack(value)
        spoil(made, settings)
        return made

    path = written(tmp_path, change)
    document = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**document, "quantization_config": settings}))
    with pytest.raises(ValueError, match=rf"\.q?weight: .*{words}"):
        from_pretrained(path, memory_budget="4M")


@pytest.mark.parametrize("budget", ["400K", "4M"])
@pytest.mark.parametrize("wrong", [6, -1])
def test_a_row_of_a_group_that_is_not_there_is_an_error(wrong: int, budget: str, tmp_path: Path) -> None:
    pack, settings = packing("gptq")

    def change(value: torch.Tensor) -> dict[str, torch.Tensor]:
        made, _ = pack(value)
        made["g_idx"][-1] = wrong
        return made

    path = written(tmp_path, change, settings)
    expected = pytest.raises(ValueError, match="a row belongs to a group that is not there")
    with expected, from_pretrained(path, memory_budget=budget) as model:
        model(IDS)


def test_groups_of_gptq_that_are_all_zero_are_none(tmp_path: Path) -> None:
    pack, settings = packing("gptq")

    def change(value: torch.Tensor) -> dict[str, torch.Tensor]:
        made, plain = pack(value)
        return {**made, "g_idx": torch.zeros_like(made["g_idx"]), "plain": plain}

    require_same(written(tmp_path, change, settings))


def test_what_awq_adds_to_an_activation_is_named(tmp_path: Path) -> None:
    pack, settings = packing("awq")
    path = written(tmp_path, lambda value: pack(value)[0], settings)
    state = dict(nvme_ops.load(path / "model.safetensors"))
    state["model.layers.0.mlp.act_fn.scales"] = torch.ones(192)
    nvme_ops.save(state, path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"act_fn\.scales, stored as float32, is not understood; .* format awq gemm"):
        from_pretrained(path, memory_budget="4M")


@pytest.mark.parametrize("is_none", [False, True])
def test_groups_in_the_order_of_columns_are_no_order_of_activations(is_none: bool, tmp_path: Path) -> None:
    pack, settings = compressed("int4")

    def change(value: torch.Tensor) -> dict[str, torch.Tensor]:
        made, plain = pack(value)
        groups = torch.arange(value.shape[1], dtype=torch.int32) // 32
        return {**made, "weight_g_idx": torch.full_like(groups, -1) if is_none else groups, "plain": plain}

    require_same(written(tmp_path, change, settings))


def mixed_gptq(settings: dict[str, Any], folder: Path) -> Path:
    """Returns a folder with a model in 4 bits, but 8 in groups of 16 where settings say so for some modules."""
    few, more = packing("gptq")[0], packing("gptq int8")[0]

    def change(value: torch.Tensor) -> dict[str, torch.Tensor]:
        made, plain = (more if len(value) == 192 else few)(value)
        return {**made, "plain": plain}

    return written(folder, change, {**packing("gptq")[1], **settings})


def test_modules_of_gptq_may_differ_where_the_settings_say_so(tmp_path: Path) -> None:
    dynamic = {"+:.*(gate|up)_proj": {"bits": 8, "group_size": 16}, "-:lm_head": {}, "-:x": None}
    require_same(mixed_gptq({"dynamic": dynamic}, tmp_path / "said"))
    others: tuple[Any, ...] = ([], {"x": 3}, {"x": {"bits": 3}})
    for wrong in others:
        with pytest.raises(ValueError, match="has integers of 8 bits, 4 in quantization_config"):
            from_pretrained(mixed_gptq({"dynamic": wrong}, tmp_path / str(wrong)), memory_budget="4M")
    dynamic = {"x": {"bits": 8, "group_size": 17}}  # of which 96 columns have as many groups
    with pytest.raises(ValueError, match="6 groups do not divide 96 rows into groups of 32 or 17 or 16"):
        from_pretrained(
            mixed_gptq({"dynamic": {**dynamic, "y": {"group_size": 16}}}, tmp_path / "both"), memory_budget="4M"
        )


@pytest.mark.parametrize("place", ["weight_input", "input", "output", "k_cache", "q_attn"])
def test_transforms_of_activations_are_refused(place: str, tmp_path: Path) -> None:
    groups = {"R": {"type": "hadamard", "apply": [{"targets": ["re:.*"], "location": "weight_output"}]}}
    groups["R"]["apply"].append({"targets": ["re:.*"], "location": place})  # type: ignore[attr-defined]
    path = written(tmp_path, in_8_bits, {"transform_config": {"config_groups": groups}})
    if place == "weight_input":  # which the weights have
        require_same(path)
    else:
        with pytest.raises(ValueError, match=rf"transforms of activations \({place}\) are not computed"):
            from_pretrained(path, memory_budget="4M")


# Formats that cannot be read

WORDS, HALVES = torch.ones(8, 8, dtype=torch.int32), torch.ones(8, 8).half()
BYTES = torch.ones(512, 1, dtype=torch.uint8)
UNKNOWN: dict[str, tuple[dict[str, torch.Tensor], dict[str, Any]]] = {
    "aqlm": ({"codes": WORDS, "codebooks": HALVES, "scales": HALVES}, {"quant_method": "aqlm"}),
    "bitsandbytes": (
        {"weight": BYTES, "weight.absmax": HALVES, "weight.quant_state.bitsandbytes__af4": BYTES},
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
