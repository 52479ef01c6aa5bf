"""A mixture of experts in a quarter of its memory. python examples/offload_experts.py [FOLDER]; needs transformers."""

import sys
import tempfile
from typing import Any

import torch

from nvme_ops import offload

PROMPT, NEW = 6, 32  # tokens
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # where from_pretrained computes


def main(folder: str) -> None:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    torch.manual_seed(7)
    sizes: Any = {"hidden_size": 256, "num_hidden_layers": 4, "vocab_size": 512, "max_position_embeddings": 256}
    heads: Any = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
    experts: Any = {"num_experts": 16, "num_experts_per_tok": 2, "moe_intermediate_size": 256}
    made: Any = Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, **heads, **experts, dtype="bfloat16"))
    with torch.no_grad():
        made.model.embed_tokens.weight *= 50  # or its tokens would all be alike, and use the same experts
    made.to(torch.bfloat16).save_pretrained(folder)
    model: Any = Qwen3MoeForCausalLM.from_pretrained(folder, experts_implementation="eager")
    model.to(DEVICE)
    nbytes = sum(weight.nbytes for weight in model.parameters())
    prompt = torch.randint(0, 512, (1, PROMPT), device=DEVICE)
    options: Any = {"max_new_tokens": NEW, "do_sample": False, "attention_mask": torch.ones_like(prompt)}
    expected = model.generate(prompt, **options)

    opened: Any = offload.from_pretrained(folder, memory_budget=nbytes // 4)
    with opened as streamed:
        equal = torch.equal(streamed.generate(prompt, **options), expected)
        stats = streamed.stats()
    print(f"{nbytes >> 20} MiB of weights in {stats.peak_bytes >> 20} MiB: {'equal' if equal else 'DIFFERENT'}")
    print(f"read {stats.bytes_read / NEW / (1 << 20):.1f} MiB for each new token")
    needed = stats.experts_used - stats.expert_hits - stats.guesses_right
    print(
        f"{stats.experts_used} experts were used: {stats.expert_hits} that were in memory, {stats.guesses_right} that a"
    )
    print(f"guess had read ({stats.guesses_wrong} more guesses were wrong), {needed} that had to be read then")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(dir=sys.argv[1] if len(sys.argv) > 1 else None) as own:
        try:
            main(own)
        except ImportError as error:
            sys.exit(f"offload_experts.py: {error}: pip install transformers")
