"""Several ranks: the same bits under DDP and FSDP2, each with files of its own, and no rank reads what others have."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.launch import run_ranks


def said(folder: Path, ranks: int, *words: object) -> list[str]:
    """What the ranks say, of whom none has left files."""
    found = dict(re.findall(r"rank (\d): (.*)", run_ranks(ranks, "tests.offload.ranks", *words)))
    assert [each.name for each in folder.iterdir() if each.name not in ("checkpoint", "model")] == []
    return [found[str(rank)] for rank in range(ranks)]


@pytest.mark.parametrize("way", ["ddp", "fsdp"])
def test_gradients_are_the_same_and_no_parameter_is_saved(folder: Path, way: str) -> None:
    one = 32 * 96 * 4  # bytes of what goes from one layer to the next
    inputs = f"True, {9 * one} bytes"  # of linear layers and of GELU, and of the loss
    assert said(folder, 2, "activations", way, folder) == [inputs] * 2


def test_states_of_ddp(folder: Path) -> None:
    assert said(folder, 2, "optimizer", "ddp", folder, 0, 4) == ["True"] * 2


@pytest.mark.parametrize("ranks", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_states_of_fsdp_are_resumed_on_another_number(folder: Path, ranks: int) -> None:
    assert said(folder, 2, "optimizer", "fsdp", folder, 0, 3) == ["True"] * 2
    assert said(folder, ranks, "optimizer", "fsdp", folder, 3, 6) == ["True"] * ranks


def test_collectives_over_parameters_on_storage(folder: Path) -> None:
    assert said(folder, 2, "collectives", folder) == ["True"] * 2


def test_tensor_parallel_ranks_stream_their_parts(folder: Path) -> None:
    transformers: Any = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")  # which transformers asks for where it divides a model
    torch.manual_seed(1)
    config = transformers.LlamaConfig(
        hidden_size=512, intermediate_size=1024, num_hidden_layers=2, num_attention_heads=4, vocab_size=1024
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder / "model")
    for line in said(folder, 2, "pretrained", folder / "model"):
        close, share = re.fullmatch(r"(\w+), ([\d.]+) of the bytes", line).groups()  # type: ignore[union-attr]
        assert close == "True"
        assert float(share) <= 0.6
