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


def small_model() -> Any:
    transformers = installed("transformers")
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, vocab_size=1000))


def recorded(monkeypatch: pytest.MonkeyPatch, module: Any) -> list[str]:
    """Installs the hook in ``module``; the names of what it saves."""
    names: list[str] = []

    def save(tensors: Any, path: Any, **settings: Any) -> None:
        names.append(Path(path).name)
        nvme_ops.save(tensors, path, **settings)

    monkeypatch.setattr(module, "safe_save_file", save)
    return names


def test_the_trainer_saves_through_nvme_ops(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    installed("accelerate")
    model, transformers = small_model(), installed("transformers")
    names = recorded(monkeypatch, installed("transformers.modeling_utils"))
    settings: dict[str, Any] = {"max_steps": 1, "save_steps": 1, "report_to": [], "use_cpu": True}
    arguments = transformers.TrainingArguments(str(tmp_path), disable_tqdm=True, **settings)
    rows = [{"input_ids": torch.arange(8), "labels": torch.arange(8)} for _ in range(4)]
    transformers.Trainer(model, arguments, train_dataset=rows).train()
    assert names == ["model.safetensors"]
    back = type(model).from_pretrained(tmp_path / "checkpoint-1")
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), back.parameters(), strict=True))


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
