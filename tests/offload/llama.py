"""A small Llama of random weights in a folder, with a tokenizer if asked for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

WORDS = ["storage", "memory", "model", "weight", "token", "device", "reads", "writes"]
SIZES = {
    "hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 6, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 2000, "max_position_embeddings": 512, "eos_token_id": None,
}  # fmt: skip


def saved_llama(folder: Path, **changes: Any) -> Path:
    """Returns the folder of the model: 21 MiB of float32."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(1)
    config = transformers.LlamaConfig(**{**SIZES, **changes})
    transformers.LlamaForCausalLM(config).save_pretrained(folder / "llama")
    return folder / "llama"


def saved_tokenizer(folder: Path) -> None:
    """Adds a tokenizer of 2,000 words to the folder of a model."""
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    names = {f"{WORDS[number % 8]}{number}": number for number in range(1999)}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({**names, "[UNK]": 1999}, unk_token="[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=made, unk_token="[UNK]").save_pretrained(folder)
