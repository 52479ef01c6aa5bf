"""What tests of checkpoints in several files share: tensors, their comparison, and the writers of such files."""

from __future__ import annotations

import json
from pathlib import Path

import torch

import nvme_ops
from tests.conftest import pattern

Tensors = dict[str, torch.Tensor]
INDEX = "model.safetensors.index.json"
SHARD = 4000  # bytes: three shards of STATE
STATE = {
    "embedding": pattern(3000).view(30, 100),
    "norm": torch.arange(100.0),
    "large": pattern(9000, 1).view(torch.int16),
    "none": torch.zeros(0, 3),
    "head": pattern(3000, 2).view(100, 30).t(),
}


def assert_same(found: Tensors, expected: Tensors) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name


def by_torch(folder: Path) -> Path:
    """As save_pretrained wrote pickles."""
    places = {}
    for number, names in enumerate((["embedding", "norm"], ["large", "none", "head"])):
        shard = f"pytorch_model-{number + 1:05d}-of-00002.bin"
        torch.save({name: STATE[name] for name in names}, folder / shard)
        places.update(dict.fromkeys(names, shard))
    index = folder / "pytorch_model.bin.index.json"
    index.write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": places}))
    return index


def by_safetensors(folder: Path) -> Path:
    """As save_pretrained writes them, without checksums."""
    import safetensors.torch as their

    places = {}
    for number, names in enumerate((["embedding", "norm"], ["large", "none", "head"])):
        shard = f"model-{number + 1:05d}-of-00002.safetensors"
        their.save_file({name: STATE[name].contiguous() for name in names}, folder / shard, {"format": "pt"})
        places.update(dict.fromkeys(names, shard))
    index = folder / INDEX
    index.write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": places}))
    return index


def by_us(folder: Path) -> Path:
    nvme_ops.save(STATE, folder / INDEX)
    return folder / INDEX
