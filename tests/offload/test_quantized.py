"""Weights of 8 bits: read as they are stored, expanded when they are used."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import nvme_ops
from nvme_ops.offload import from_pretrained, stream_weights
from nvme_ops.offload.weights.quantized import expand, quantize
from nvme_ops.offload.weights.streamed import StreamedModel
from tests.conftest import MIB
from tests.offload.models import Experts, Tied, layers, nbytes


@pytest.mark.parametrize("shape", [(3, 5), (1000, 300), (4, 70, 600)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_each_value_is_off_by_half_a_step_at_most(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    tensor = torch.randn(shape).to(dtype)
    tensor[0, 0] = 0
    values, scale = quantize(tensor)
    assert values.dtype == torch.int8
    back = expand(values, scale, torch.float32)
    assert bool(((back - tensor.float()).abs() <= scale / 2 * 1.001).all())
    assert torch.equal(expand(values, scale, dtype), back.to(dtype))


def test_what_is_not_finite_is_refused() -> None:
    with pytest.raises(ValueError, match="not finite"):
        quantize(torch.tensor([[1.0, float("nan")]]))


def test_scales_of_blocks_rows_and_all() -> None:
    torch.manual_seed(1)
    values = torch.randn(5, 6).to(torch.float8_e4m3fn)
    plain = values.float()
    assert torch.equal(expand(values, torch.tensor(2.0), torch.float32), plain * 2)
    rows = torch.arange(1.0, 6)
    assert torch.equal(expand(values, rows, torch.float32), plain * rows[:, None])
    blocks = torch.tensor([[1.0, 2, 3], [4, 5, 6]])  # of 3 rows, the last one short, and 2 columns
    wanted = plain * blocks.repeat_interleave(3, 0)[:5].repeat_interleave(2, 1)
    assert torch.equal(expand(values, blocks, torch.float32), wanted)


@torch.no_grad()
def test_on_request_half_is_read_and_the_output_is_nearly_the_same(folder: Path) -> None:
    torch.manual_seed(1)
    model, x = layers(8).bfloat16().eval(), torch.randn(4, 256).bfloat16()
    wanted, size = model(x), nbytes(model)
    found: Any = stream_weights(model, folder, memory_budget="200K", quantize="int8")
    assert isinstance(found, StreamedModel)
    with found:
        for _ in range(2):
            assert (found(x) - wanted).norm() < 0.03 * wanted.norm()
        stats = found.stats()
        assert stats.bytes_read <= 1.2 * size
        assert 0 < stats.quantization_error < 0.01
        assert next(found.parameters()).dtype == torch.bfloat16


@torch.no_grad()
def test_experts_and_embeddings(folder: Path) -> None:
    torch.manual_seed(1)
    experts, x = Experts().eval(), torch.randn(4, 256)
    wanted = experts(x, [2, 5])
    with stream_any(experts, folder) as found:
        assert (found(x, [2, 5]) - wanted).norm() < 0.03 * wanted.norm()
        assert found.stats().bytes_read <= 2 * 65536
    tied, tokens = Tied().eval(), torch.tensor([[1, 2]])
    wanted = tied.embedding(tokens)
    with stream_any(tied, folder) as found:
        assert torch.equal(found.embedding(tokens), wanted)


def stream_any(model: torch.nn.Module, folder: Path) -> Any:
    return stream_weights(model, folder, memory_budget=MIB, quantize="int8")


def test_other_kinds_are_refused(folder: Path) -> None:
    with pytest.raises(ValueError, match="int8"):
        stream_weights(layers(), folder, memory_budget="1M", quantize="int4")  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["int8", "fp8", "blocks", "bitsandbytes"])
@torch.no_grad()
def test_files_that_hold_8_bits_and_scales(kind: str, folder: Path) -> None:
    transformers: Any = pytest.importorskip("transformers")
    torch.manual_seed(1)
    config = transformers.LlamaConfig(
        hidden_size=256, intermediate_size=512, num_attention_heads=4, num_hidden_layers=2, vocab_size=512
    )
    plain = transformers.LlamaForCausalLM(config).eval()
    plain.save_pretrained(folder / "plain")
    state = nvme_ops.load(folder / "plain/model.safetensors")
    written: dict[str, torch.Tensor] = {}
    for name, value in state.items():
        if not name.endswith("proj.weight"):
            written[name] = value
        elif kind == "fp8":
            scale = value.abs().max() / 448
            written |= {name: (value / scale).to(torch.float8_e4m3fn), f"{name}_scale": scale}
            value.copy_(written[name].float() * scale)
        elif kind == "blocks":
            scale = value.view(value.shape[0] // 128, 128, -1, 128).abs().amax((1, 3)) / 448
            wide = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
            written |= {name: (value / wide).to(torch.float8_e4m3fn), f"{name}_scale_inv": scale}
            value.copy_(written[name].float() * wide)
        else:
            values, scale = quantize(value)
            other = f"{name}_scale" if kind == "int8" else name.removesuffix("weight") + "SCB"
            written |= {name: values, other: scale if kind == "int8" else scale.flatten() * 127}
            value.copy_(values.float() * scale)
    (folder / "stored").mkdir()
    nvme_ops.save(written, folder / "stored/model.safetensors", metadata={"format": "pt"})
    document = json.loads((folder / "plain/config.json").read_text())
    document["quantization_config"] = {"quant_method": "fp8"}
    (folder / "stored/config.json").write_text(json.dumps(document))
    plain.load_state_dict(state)
    ids = torch.tensor([[1, 2, 3]])
    with from_pretrained(folder / "stored", memory_budget="1M") as model:
        assert torch.allclose(model(ids).logits, plain(ids).logits, rtol=1e-4, atol=1e-5)
