"""benchmarks/checkpoint.py: its state dicts, its arguments, and a small run of every group."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import nvme_ops
from benchmarks import checkpoint, checkpoint_rows
from nvme_ops.bench.measure import interleave
from nvme_ops.text import GIB, MIB


def test_a_state_dict_has_the_size_asked_for() -> None:
    large = checkpoint.state_dict("large", 64 * MIB)
    assert [tensor.nbytes for tensor in large.values()] == [32 * MIB] * 2
    small = checkpoint.state_dict("small", GIB // 16)
    assert [tensor.nbytes for tensor in small.values()] == [4096] * 1250
    llama = checkpoint.state_dict("llama", 128 * MIB)
    assert sum(tensor.nbytes for tensor in llama.values()) >= 128 * MIB
    assert {tensor.dtype for tensor in llama.values()} == {torch.bfloat16, torch.float32}


def test_every_group_runs(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--path", str(folder), "--size", "64M", "--rounds", "1", "--state_dict", "large", "--no-deepspeed"]
    assert checkpoint.main([*words, "--json", str(folder / "found.json")]) == 0
    tables = json.loads((folder / "found.json").read_text())["folders"][str(folder)]["tables"]
    assert [table["group"] for table in tables] == list(checkpoint.GROUPS)
    for table in tables:
        ours = [row for row in table["rows"] if row["name"].startswith("nvme_ops")]
        assert ours
        for row in ours:
            assert (row["wrong"], row["note"], len(row["values"])) == (False, "", 1)
    assert "save, durably; large: 2 tensors, 64 MiB" in capsys.readouterr().out
    assert [path.name for path in folder.iterdir()] == ["found.json"]


def test_a_load_of_other_bytes_is_told(folder: Path) -> None:
    work = checkpoint_rows.Work(str(folder / "x"), {"a": torch.ones(1000)}, deepspeed=False)
    nvme_ops.save({"a": torch.zeros(1000)}, work.path + ".safetensors")
    rows = {row.name: row for row in checkpoint_rows.cached_rows(work) if row.name.startswith("nvme_ops .")}
    work.saved.add(work.path + ".safetensors")
    interleave(list(rows.values()), 1)
    assert {name: row.wrong for name, row in rows.items()} == {"nvme_ops .safetensors": True, "nvme_ops .pt": False}
