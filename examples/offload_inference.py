"""A language model larger than its memory budget. python examples/offload_inference.py [FOLDER]; needs transformers."""

import sys
import tempfile
from typing import Any

import torch

from nvme_ops import offload

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # where from_pretrained computes


def main(folder: str) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    torch.manual_seed(7)
    sizes: Any = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 8, "vocab_size": 512}
    made: Any = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, dtype="bfloat16"))
    made.to(torch.bfloat16).save_pretrained(folder)
    model: Any = LlamaForCausalLM.from_pretrained(folder)
    model.to(DEVICE)
    nbytes = sum(weight.nbytes for weight in model.parameters())
    prompt = torch.randint(0, 512, (2, 6), device=DEVICE)
    options: Any = {"max_new_tokens": 8, "do_sample": False, "attention_mask": torch.ones_like(prompt)}
    expected = model.generate(prompt, **options)

    opened: Any = offload.from_pretrained(folder, memory_budget="4M")  # reads the file that is there
    with opened as streamed:
        equal = torch.equal(streamed.generate(prompt, **options), expected)
        stats = streamed.stats()
    print(f"{nbytes >> 20} MiB of weights in {stats.peak_bytes >> 20} MiB: {'equal' if equal else 'DIFFERENT'}")
    print(f"read {stats.bytes_read >> 20} MiB, {stats.bytes_on_demand >> 20} of them unforeseen")

    with offload.stream_weights(model, folder, memory_budget="8M") as streamed:  # any module; writes a file of its own
        equal = torch.equal(streamed.generate(prompt, **options), expected)
        stats = streamed.stats()
    print(f"twice the budget: read {stats.bytes_read >> 20} MiB, {'equal' if equal else 'DIFFERENT'}")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(dir=sys.argv[1] if len(sys.argv) > 1 else None) as own:
        try:
            main(own)
        except ImportError as error:
            sys.exit(f"offload_inference.py: {error}: pip install transformers")
