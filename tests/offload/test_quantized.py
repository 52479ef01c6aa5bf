"""Weights of 8 bits: read as they are stored, expanded when they are used."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import nvme_ops
from nvme_ops.formats.quantized import expand, quantize
from nvme_ops.offload import from_pretrained, stream_weights
from tests.offload.llama import saved_llama
from tests.offload.models import Experts, Tied, layers, nbytes


@pytest.mark.parametrize("shape", [(3, 5), (1000, 300), (4, 70, 600)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_value_is_off_by_half_a_step_at_most(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    tensor = torch.randn(shape).to(dtype)
    tensor[0, 0] = 0
    values, scale = quantize(tensor)
    assert values.dtype == torch.int8
    back = expand(values, scale, torch.float32)
    assert bool(((back - tensor.float()).abs() <= scale / 2 * 1.001).all())
    assert torch.equal(expand(values, scale, dtype), back.to(dtype))


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
    with stream_weights(model, folder, memory_budget="200K", quantize="int8") as found:
        for _ in range(2):
            assert (found(x) - wanted).norm() < 0.03 * wanted.norm()
        stats = found.stats()
        assert stats.bytes_read <= 1.2 * size
        assert 0 < stats.quantization_error < 0.01
        assert next(found.parameters()).dtype == torch.bfloat16
    experts = Experts().eval()
    wanted = experts(x.float(), [2, 5])
    with stream_weights(experts, folder, memory_budget="1M", quantize="int8") as found:
        assert (found(x.float(), [2, 5]) - wanted).norm() < 0.03 * wanted.norm()
        assert found.stats().bytes_read <= 2 * 65536, "of experts those that are asked for"
    tied, tokens = Tied().eval(), torch.tensor([[1, 2]])
    wanted = tied.embedding(tokens)
    with stream_weights(tied, folder, memory_budget="1M", quantize="int8") as found:
        assert torch.equal(found.embedding(tokens), wanted), "embeddings are as they were"


def test_what_is_not_finite_is_refused() -> None:
    with pytest.raises(ValueError, match="not finite"):
        quantize(torch.tensor([[1.0, float("nan")]]))


@torch.no_grad()
def test_what_a_weight_is_expanded_to_counts_as_memory_of_the_budget(folder: Path) -> None:
    torch.manual_seed(1)
    model, x = layers(8, 512).eval(), torch.randn(4, 512)  # of 1 MiB each, in 8 bits a quarter of that
    with pytest.raises(ValueError, match=r"at least (1\.2\d+|1\.3\d*) MiB are needed"):
        stream_weights(model, folder, memory_budget="1M", quantize="int8")
    with stream_weights(model, folder, memory_budget="1500K", quantize="int8") as found:
        results: list[torch.Tensor] = []
        wanted = found(x)
        threads = [threading.Thread(target=lambda: results.append(found(x))) for _ in range(2)]  # two at once
        for each in threads:
            each.start()
        for each in threads:
            each.join()
        assert [torch.equal(each, wanted) for each in results] == [True, True]
        assert 1 << 20 < found.stats().peak_bytes <= 1500 << 10


@pytest.mark.parametrize("kind", ["int8", "fp8", "blocks", "bitsandbytes"])
@torch.no_grad()
def test_files_that_hold_8_bits_and_scales(kind: str, folder: Path) -> None:
    transformers: Any = pytest.importorskip("transformers")
    folder = saved_llama(folder, intermediate_size=512, num_key_value_heads=4, num_hidden_layers=2, vocab_size=512)
    plain = transformers.LlamaForCausalLM.from_pretrained(folder).eval()
    state = nvme_ops.load(folder / "model.safetensors")
    written = dict(state)
    for name, value in state.items():
        if not name.endswith("proj.weight"):
            continue
        if kind in ("int8", "bitsandbytes"):
            written[name], wide = quantize(value)
            scale = {f"{name}_scale": wide} if kind == "int8" else {name[:-6] + "SCB": wide.flatten() * 127}
        else:
            wide = of_blocks = value.abs().max() / 448
            if kind == "blocks":
                of_blocks = value.view(value.shape[0] // 128, 128, -1, 128).abs().amax((1, 3)) / 448
                wide = of_blocks.repeat_interleave(128, 0).repeat_interleave(128, 1)
            scale = {f"{name}_scale{'_inv' if kind == 'blocks' else ''}": of_blocks}
            written[name] = (value / wide).to(torch.float8_e4m3fn)
        written |= scale
        state[name] = written[name].float() * wide
    nvme_ops.save(written, folder / "model.safetensors", metadata={"format": "pt"})
    document = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**document, "quantization_config": {"quant_method": "fp8"}}))
    plain.load_state_dict(state)
    ids = torch.tensor([[1, 2, 3]])
    with from_pretrained(folder, memory_budget="1100K") as model:
        assert torch.allclose(model(ids).logits, plain(ids).logits, rtol=1e-4, atol=1e-5)
