"""NvmeOptimizer in the hands of trainers: transformers' Trainer and accelerate."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from nvme_ops.integrations.transformers import nvme_optimizer
from nvme_ops.offload import NvmeOptimizer
from tests.offload.training import equal, values

transformers: Any = pytest.importorskip("transformers")
accelerate: Any = pytest.importorskip("accelerate")


class Data(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = torch.arange(8) + index
        return {"input_ids": ids, "labels": ids}


def llama() -> Any:
    torch.manual_seed(1)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, vocab_size=64))


def arguments(folder: Path, steps: int) -> Any:
    return transformers.TrainingArguments(
        output_dir=str(folder / "output"), per_device_train_batch_size=4, max_steps=steps, save_steps=2, use_cpu=True,
        report_to=[], disable_tqdm=True, logging_steps=100,
    )  # fmt: skip


def trained(folder: Path, model: Any, optimizer: Any, steps: int, resume: bool = False) -> list[torch.Tensor]:
    given: dict[str, Any] = (
        {"optimizers": (optimizer, None)}
        if isinstance(optimizer, torch.optim.Optimizer)
        else {"optimizer_cls_and_kwargs": optimizer}
    )
    trainer = transformers.Trainer(model=model, args=arguments(folder, steps), train_dataset=Data(), **given)
    trainer.train(resume_from_checkpoint=resume)
    return values(model)


def test_a_trainer_saves_and_resumes_it(folder: Path) -> None:
    found = {}
    for name in ("plain", "ours"):
        place = folder / name
        place.mkdir()
        chosen: Any = (torch.optim.AdamW, {"lr": 1e-3})
        if name == "ours":
            chosen = nvme_optimizer(torch.optim.AdamW, place, memory_budget="1M", lr=1e-3)
        trained(place, llama(), chosen, 2)
        found[name] = trained(place, llama(), chosen, 4, resume=True)
    assert equal(found["ours"], found["plain"])


def test_accelerate_prepares_it(folder: Path) -> None:
    def train(make: Any) -> list[torch.Tensor]:
        model = llama()
        accelerator = accelerate.Accelerator(cpu=True)
        loader = torch.utils.data.DataLoader(Data(), batch_size=4)
        prepared, optimizer, batches = accelerator.prepare(model, make(model.parameters()), loader)
        for batch in batches:
            optimizer.zero_grad()
            accelerator.backward(prepared(**batch).loss)
            accelerator.clip_grad_norm_(prepared.parameters(), 1.0)
            optimizer.step()
        return values(model)

    with NvmeOptimizer([torch.nn.Parameter(torch.ones(1))], torch.optim.AdamW, folder) as unused:
        assert unused.steps == 0  # two in one folder
        mine = train(lambda those: NvmeOptimizer(those, torch.optim.AdamW, folder, memory_budget="1M", lr=1e-3))
    assert equal(mine, train(lambda those: torch.optim.AdamW(those, lr=1e-3)))
