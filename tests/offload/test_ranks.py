"""Several ranks: the same bits under DDP and FSDP2, each with files of its own, and no rank reads what others have."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.launch import run_ranks
from tests.offload.llama import saved_llama


def said(folder: Path, ranks: int, *words: str) -> list[list[str]]:
    """What the ranks say to each of the words, of whom none has left files."""
    lines = re.findall(r"rank (\d): (.*)", run_ranks(ranks, "tests.offload.ranks", *words))
    assert [path.name for path in folder.iterdir() if path.name not in ("checkpoint", "llama")] == []
    by_rank = [[line for rank, line in lines if rank == str(number)] for number in range(ranks)]
    return [list(row) for row in zip(*by_rank, strict=True)]


@pytest.mark.parametrize("ranks", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_copies_and_shards_are_those_of_torch(folder: Path, ranks: int) -> None:
    """No parameter is saved for backward, and shards of states are resumed on another number of ranks."""
    one = 32 * 96 * 4  # bytes of what goes from one layer to the next
    inputs = f"True, {9 * one} bytes"  # of linear layers and of GELU, and of the loss
    assert said(
        folder, 2, f"activations ddp {folder}", f"activations fsdp {folder}", f"collectives {folder}",
        f"optimizer ddp {folder} 0 4", f"optimizer fsdp {folder} 0 3",
    ) == [[inputs] * 2] * 2 + [["True"] * 2] * 3  # fmt: skip
    assert said(folder, ranks, f"optimizer fsdp {folder} 3 6") == [["True"] * ranks]


@pytest.mark.parametrize("ranks", [3, *(pytest.param(count, marks=pytest.mark.slow) for count in (1, 2))])
def test_states_of_every_option_of_torch_are_torchs_and_are_gone_on_with(folder: Path, ranks: int) -> None:
    """Also of a parameter of which some ranks have no elements."""
    assert said(folder, ranks, f"optimizer_states {folder}") == [[""] * ranks]


def test_tensor_parallel_ranks_stream_their_parts(folder: Path) -> None:
    pytest.importorskip("accelerate")  # which transformers asks for where it divides a model
    sizes = {"hidden_size": 512, "intermediate_size": 1024, "num_key_value_heads": 4, "vocab_size": 1024}
    path = saved_llama(folder, num_hidden_layers=2, **sizes)
    for line in said(folder, 2, f"pretrained {path}")[0]:
        close, share = re.fullmatch(r"(\w+), ([\d.]+) of the bytes", line).groups()  # type: ignore[union-attr]
        assert close == "True"
        assert float(share) <= 0.6
