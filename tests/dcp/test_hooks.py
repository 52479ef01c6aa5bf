"""The lines of docs/dcp.md by which accelerate and transformers save through nvme_ops."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import nvme_ops
from nvme_ops.dcp import NvmeStorageReader, NvmeStorageWriter, use_by_default


def installed(name: str) -> Any:
    return pytest.importorskip(name, reason=f"{name.partition('.')[0]} is not installed")


def recorded(monkeypatch: pytest.MonkeyPatch, module: Any) -> list[str]:
    """Installs the hook in ``module``; the names of what it saves."""
    names: list[str] = []

    def save(tensors: Any, path: Any, **settings: Any) -> None:
        names.append(Path(path).name)
        nvme_ops.save(tensors, path, **settings)

    monkeypatch.setattr(module, "safe_save_file", save)
    return names


def test_accelerate_saves_a_state_through_nvme_ops(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    names = recorded(monkeypatch, installed("accelerate.utils.other"))
    logging.disable()
    accelerator = installed("accelerate").Accelerator(cpu=True)
    model = accelerator.prepare(torch.nn.Linear(5, 6))
    before = model.weight.detach().clone()
    accelerator.save_state(str(tmp_path / "state"))
    assert names == ["model.safetensors"]
    torch.nn.init.zeros_(model.weight)
    accelerator.load_state(str(tmp_path / "state"))
    assert torch.equal(model.weight, before)
    logging.disable(logging.NOTSET)


def test_accelerates_writer_of_a_sharded_state_is_ours(tmp_path: Path) -> None:
    utilities = installed("accelerate.utils.fsdp_utils")
    use_by_default()
    try:  # what save_fsdp_model and load_fsdp_model do
        assert "dist_cp.FileSystemWriter(ckpt_dir)" in Path(utilities.__file__).read_text()
        assert isinstance(dcp.FileSystemWriter(tmp_path), NvmeStorageWriter)
        assert isinstance(dcp.FileSystemReader(tmp_path), NvmeStorageReader)
    finally:
        use_by_default(False)
