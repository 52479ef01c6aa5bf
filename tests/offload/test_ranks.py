"""Ranks that share a model read their parts of the weights alone."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.launch import run_ranks

transformers: Any = pytest.importorskip("transformers")
pytest.importorskip("accelerate")  # which transformers asks for where it divides a model


def test_tensor_parallel_ranks_stream_their_parts(folder: Path) -> None:
    torch.manual_seed(1)
    config = transformers.LlamaConfig(
        hidden_size=512, intermediate_size=1024, num_hidden_layers=2, num_attention_heads=4, vocab_size=1024
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder / "model")
    said = run_ranks(2, "tests.offload.ranks", folder / "model")
    found = re.findall(r"rank (\d): close (\w+), less than ([\d.]+) of the bytes", said)
    assert sorted((rank, close) for rank, close, _ in found) == [("0", "True"), ("1", "True")]
    assert all(float(share) <= 0.6 for *_, share in found)


def test_collectives_over_parameters_on_storage(folder: Path) -> None:
    said = run_ranks(2, "tests.offload.swapped_ranks", folder)
    assert sorted(re.findall(r"rank (\d): (.*)", said)) == [("0", "[True, True, True]"), ("1", "[True, True, True]")]
