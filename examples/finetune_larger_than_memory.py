"""Trains adapters over streamed weights to the same bits. python examples/finetune_larger_than_memory.py [FOLDER]."""

import sys
import tempfile
import warnings
from typing import Any

import torch

from nvme_ops import offload

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # where from_pretrained computes


def losses(model: Any) -> list[torch.Tensor]:
    optimizer, history = torch.optim.AdamW([param for param in model.parameters() if param.requires_grad], lr=1e-2), []
    for step in range(3):
        torch.manual_seed(step)  # for the text and for dropout
        ids = torch.randint(0, 512, (2, 16), device=DEVICE)
        history.append(model(input_ids=ids, labels=ids).loss)
        history[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
    return history


def main(folder: str) -> None:
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.utils.logging import disable_progress_bar

    def adapted(model: Any) -> Any:
        torch.manual_seed(7)
        return get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", target_modules="all-linear")).train()

    disable_progress_bar()
    sizes: Any = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 8, "vocab_size": 512}
    LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, attention_dropout=0.1)).save_pretrained(folder)
    plain: Any = LlamaForCausalLM.from_pretrained(folder)
    expected = losses(adapted(plain.to(DEVICE)))
    with offload.from_pretrained(folder, memory_budget="6M") as streamed:  # of 28 MiB
        for step, (loss, other) in enumerate(zip(losses(adapted(streamed)), expected, strict=True)):
            print(f"step {step}: loss {loss:.6f}: {'equal' if loss == other else 'DIFFERENT'}")
        print(f"weights had {streamed.stats().peak_bytes >> 20} MiB of memory, and the adapters theirs beside these")


if __name__ == "__main__":
    warnings.simplefilter("ignore", FutureWarning)  # from transformers, about peft
    with tempfile.TemporaryDirectory(dir=sys.argv[1] if len(sys.argv) > 1 else None) as own:
        try:
            main(own)
        except ImportError as error:
            sys.exit(f"finetune_larger_than_memory.py: {error}: pip install 'transformers>=5' peft")
