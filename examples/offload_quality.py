"""What 8 and 4 bits cost a model. python examples/offload_quality.py [FOLDER [STEPS]]; needs transformers.

A small model learns to predict the bytes of Python's library: 2,500 steps are about ten minutes on two cores, and make
the table of docs/offload.md. Put a model and a text of your own in their place.
"""

import copy
import glob
import random
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

import torch

from nvme_ops import offload

LENGTH = 128
LEFT_OUT = ("test", "site-packages", "encodings", "pydoc_data")


def texts() -> tuple[torch.Tensor, torch.Tensor]:
    """Returns bytes to learn from, and others."""
    library = sysconfig.get_paths()["stdlib"]
    paths = sorted(glob.glob(f"{library}/*.py") + glob.glob(f"{library}/*/*.py"))
    paths = [path for path in paths if not any(word in path for word in LEFT_OUT)]
    random.Random(0).shuffle(paths)
    files = [Path(path).read_bytes() for path in paths]
    count = len(files) // 50
    held, learned = (bytearray(b"\n".join(part)) for part in (files[:count], files[count:]))
    return torch.frombuffer(learned, dtype=torch.uint8).long(), torch.frombuffer(held, dtype=torch.uint8).long()


def trained(text: torch.Tensor, steps: int) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes: Any = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 3, "num_attention_heads": 4}
    model: Any = LlamaForCausalLM(LlamaConfig(vocab_size=256, pad_token_id=None, **sizes))
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, steps, pct_start=0.1)
    for _ in range(steps):
        begins = torch.randint(len(text) - LENGTH - 1, (12,)).tolist()
        batch = torch.stack([text[begin : begin + LENGTH] for begin in begins])
        model(batch, labels=batch).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    return model.to(torch.bfloat16).eval()


def loss(logits: torch.Tensor, lines: torch.Tensor) -> float:
    """Returns the nats for each byte."""
    return float(torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), lines[:, 1:].flatten()))


@torch.no_grad()
def compare(model: Any, held: torch.Tensor, folder: str) -> None:
    begins = torch.linspace(0, len(held) - LENGTH - 1, 64).long().tolist()
    lines, half = torch.stack([held[begin : begin + LENGTH] for begin in begins]), LENGTH // 2
    prompts = lines[:8, :half]
    options: Any = {"max_new_tokens": half, "min_new_tokens": half, "do_sample": False, "pad_token_id": 0}
    greedy = model.generate(prompts, attention_mask=torch.ones_like(prompts), **options)
    wanted = model(lines).logits.float()
    print(f"{loss(wanted, lines):.3f} nats for each byte")
    kinds: Any = (None, "int8", "int4", "mxfp4")
    for kind in kinds:
        plain: Any = copy.deepcopy(model)
        with offload.stream_weights(plain, folder, memory_budget="64M", quantize=kind) as packed:
            made = packed(lines).logits.float()
            chosen = packed(greedy).logits[:, half - 1 : -1].argmax(-1)
            weights = packed.stats().quantization_error
        if kind is None:
            print("as it is:", "equal" if torch.equal(made, wanted) else "DIFFERENT")
            continue
        off, same = float((made - wanted).norm() / wanted.norm()), float((chosen == greedy[:, half:]).float().mean())
        words = f"weights {weights:.1%} off, logits {off:.1%} off, {same:.1%} of greedy tokens the same"
        print(f"{kind}: {words}, {loss(made, lines):.3f}")


def main(folder: str, steps: int) -> None:
    learned, held = texts()
    compare(trained(learned, steps), held, folder)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as private:
        main(sys.argv[1] if len(sys.argv) > 1 else private, int(sys.argv[2]) if len(sys.argv) > 2 else 12)
