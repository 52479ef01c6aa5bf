"""What Trainers train in the tests: a tiny model, of which storage takes even small activations."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers

from nvme_ops.offload import save_on_nvme
from nvme_ops.offload.residency import placement

SMALL: Any = {"optimizer_budget": "1M", "activations_budget": 0}


def take_small_activations(set_attribute: Callable[[Any, str, Any], None] = setattr) -> None:
    """Has save_on_nvme move tensors of a KiB, and forward wait for them, so that backward never comes first."""
    defaults: Any = save_on_nvme.__init__.__kwdefaults__
    set_attribute(save_on_nvme.__init__, "__kwdefaults__", {**defaults, "min_bytes": "1K"})
    set_attribute(placement, "IN_FLIGHT", 1024)


class Texts(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = (torch.arange(16) * (index + 1)) % 64
        return {"input_ids": ids, "labels": ids}


def llama() -> Any:
    torch.manual_seed(1)
    sizes: Any = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, vocab_size=64, attention_dropout=0.1))


def trainer(folder: Path, **arguments: Any) -> transformers.Trainer:
    """A Trainer of three steps with four texts each."""
    own = ("model", "optimizers", "model_init", "callbacks", "optimizer_cls_and_kwargs")
    given = {name: arguments.pop(name) for name in own if name in arguments}
    chosen: dict[str, Any] = {
        "output_dir": str(folder), "per_device_train_batch_size": 4, "max_steps": 3, "save_strategy": "no",
        "use_cpu": True, "report_to": [], "disable_tqdm": True, "logging_steps": 1, "learning_rate": 1e-3,
        "weight_decay": 0.1, **arguments,
    }  # fmt: skip
    if not {"model", "model_init"} & given.keys():
        given["model"] = llama()
    return transformers.Trainer(
        args=transformers.TrainingArguments(**chosen),
        train_dataset=Texts(),
        eval_dataset=torch.utils.data.Subset(Texts(), range(4)),
        **given,
    )
