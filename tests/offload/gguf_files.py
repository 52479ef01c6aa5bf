"""GGUF files of models with random weights, by gguf's own writer and the names that transformers knows."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

numpy: Any = pytest.importorskip("numpy")
gguf: Any = pytest.importorskip("gguf")
conversion: Any = pytest.importorskip("transformers.modeling_gguf_pytorch_utils")
transformers: Any = pytest.importorskip("transformers")

_COMMON: dict[str, Any] = {
    "block_count": 2, "context_length": 512, "embedding_length": 256, "feed_forward_length": 512,
    "attention.head_count": 4, "attention.head_count_kv": 2, "attention.layer_norm_rms_epsilon": 1e-5,
    "attention.layer_norm_epsilon": 1e-5, "rope.freq_base": 10000.0, "rope.dimension_count": 64, "vocab_size": 300,
}  # fmt: skip
_EXPERTS = {"expert_count": 8, "expert_used_count": 2, "expert_feed_forward_length": 256, "attention.key_length": 64}
_HEADS = {"attention.key_length": 64, "attention.value_length": 64, "attention.sliding_window": 128}
#: Each has something of its own: rows in another order, packed experts, norms less one, transposed matrices.
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {}, "qwen3moe": _EXPERTS, "qwen2moe": {**_EXPERTS, "expert_shared_feed_forward_length": 512},
    "gemma2": _HEADS, "gpt2": {},
}  # fmt: skip
#: Where blocks have a scale, of two bytes, and about how large it may be for values of a model.
_SCALES: dict[str, dict[int, float]] = {
    "Q8_0": {0: 8e-4}, "Q4_0": {0: 0.01}, "Q5_0": {0: 0.01}, "Q4_K": {0: 4e-4, 2: 8e-4}, "Q5_K": {0: 2e-4, 2: 8e-4},
    "Q6_K": {208: 3e-5}, "Q3_K": {108: 4e-4}, "MXFP4": {},
}  # fmt: skip
KINDS = tuple(_SCALES)


def blocks(kind: str, rows: int, columns: int, random: Any, any_bytes: bool = False) -> Any:
    """Returns rows of bytes, or of values."""
    if kind in ("F32", "F16"):
        return (random.standard_normal((rows, columns)) * 0.05).astype({"F32": "f4", "F16": "f2"}[kind])
    values, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    made = random.integers(0, 256, (rows * columns // values, size), dtype=numpy.uint8)
    if not any_bytes:
        for at, scale in _SCALES[kind].items():
            halves = (random.uniform(0.5, 1, (len(made), 1)) * scale).astype(numpy.float16)
            made[:, at : at + 2] = halves.view(numpy.uint8)
        if kind == "MXFP4":
            made[:, 0] = random.integers(118, 122, len(made))
    return made.reshape(rows, -1)


def _writer(path: Path, architecture: str, settings: dict[str, Any]) -> Any:
    writer = gguf.GGUFWriter(path, architecture)
    for name, value in {**_COMMON, **ARCHITECTURES[architecture], **settings}.items():
        add = writer.add_float32 if isinstance(value, float) else writer.add_uint32
        add(f"{architecture}.{name}", value)
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokens = [*special, *(f"word{number}" for number in range(_COMMON["vocab_size"] - len(special)))]
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores([0.0] * len(tokens))
    writer.add_token_types([2, 3, 3, *[6] * 256, *[1] * (len(tokens) - len(special))])
    return writer


def _close(writer: Any) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write(
    folder: Path, architecture: str, kinds: tuple[str, ...], tied: bool = False, files: int = 1, **more: Any
) -> Path:
    """Writes the files of a model whose matrices have these kinds in turn; returns the first.

    ``more`` are other tensors, by their names.
    """
    path = folder / "config.gguf"
    _close(_writer(path, architecture, {}))
    config = transformers.AutoConfig.from_pretrained(folder, gguf_file=path.name)
    path.unlink()
    config.tie_word_embeddings = tied
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    processor = conversion.TENSOR_PROCESSORS.get(architecture, conversion.TensorProcessor)(config=config.to_dict())
    shapes = {key: list(value.shape) for key, value in model.state_dict().items()}
    names = conversion.get_gguf_hf_weights_map(model, processor)
    ends = [f"-{number:05}-of-{files:05}" for number in range(1, files + 1)] if files > 1 else [""]
    writers = [_writer(folder / f"model{end}.gguf", architecture, {}) for end in ends]
    random, written = numpy.random.default_rng(1), set()
    for name, of_model in names.items():
        name = name if name.endswith((".weight", ".bias")) else f"{name}.weight"
        shape = shapes.get(of_model)
        if shape is None or name in written or (tied and name == "output.weight"):
            continue
        if "_exps" in name and "down" not in name:
            shape = [shape[0], shape[1] // 2, shape[2]]
        if "ffn_gate_inp_shexp" in name:
            shape = shape[1:]
        if architecture == "gpt2" and len(shape) == 2 and any(f"{part}.weight" in name for part in _TRANSPOSED):
            shape = shape[::-1]
        written.add(name)
        writer = writers[len(written) % files]
        if len(shape) == 1 or "gate_inp" in name:
            writer.add_tensor(name, (random.standard_normal(shape) * 0.1 + 1).astype(numpy.float32))
            continue
        kind = kinds[len(written) % len(kinds)]
        if shape[-1] % 256 and kind.endswith("K"):
            kind = "Q8_0"
        rows = blocks(kind, math.prod(shape[:-1]), shape[-1], random).reshape(*shape[:-1], -1)
        writer.add_tensor(name, rows, raw_dtype=gguf.GGMLQuantizationType[kind])
    for name, value in more.items():
        writers[0].add_tensor(name, value)
    for writer in writers:
        _close(writer)
    return folder / f"model{ends[0]}.gguf"


_TRANSPOSED = ("attn_qkv", "ffn_down", "ffn_up", "attn_output")
