"""What each rank runs: a Trainer, and one with optimizer states and activations on storage."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import transformers

from nvme_ops.integrations.trainer import use_nvme
from tests.offload.trainer_models import SMALL, take_small_activations, trainer

folder = Path(sys.argv[1])
take_small_activations()


def trained(name: str, checkpoint: str | None = None) -> Any:
    made = trainer(
        folder / name, gradient_accumulation_steps=2, save_strategy="steps", save_steps=2, ddp_backend="gloo"
    )
    if name != "plain":
        use_nvme(made, folder / "nvme", **SMALL)
    transformers.set_seed(torch.distributed.get_rank())  # of dropout
    made.train(resume_from_checkpoint=checkpoint)
    torch.distributed.barrier()
    return made


transformers.logging.set_verbosity_error()
output = sys.stdout
sys.stdout = sys.stderr  # where trainers print their logs
plain, ours = trained("plain"), trained("ours")
resumed = trained("resumed", str(folder / "ours" / "checkpoint-2"))
equal = all(
    torch.equal(one, two)
    for run in (ours, resumed)
    for one, two in zip(run.model.parameters(), plain.model.parameters(), strict=True)
)
moved = min(value for name, value in ours.state.log_history[-1].items() if name.startswith("nvme_")) > 0
output.write(f"rank {plain.args.process_index}: {'equal' if equal else 'DIFFERENT'}, {'moved' if moved else 'NOT'}\n")
output.flush()
torch.distributed.destroy_process_group()
