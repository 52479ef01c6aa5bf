"""A model whose weights are on storage decodes: this package, and all who do the same, against the bound.

Every row decodes greedily with the same random model of Llama's shape, in a process of its own in each round, and must
find the tokens that the model in memory finds. Its files are dropped from the page cache before each forward; the model
that is only mapped runs in a memory cgroup, or where none can be made has its pages taken away instead. Memory is that
beyond what the process had once its libraries were imported. The bound of a step is the step in memory, or its reads at
fio's best rate for the same file in the same run, whichever is longer.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))  # so that it runs from anywhere, uninstalled too

from benchmarks import command
from benchmarks.inference_rows import COLUMNS, MEMORY, Work, add_bounds, contenders, fio_rows, rows
from nvme_ops.arguments import positive, size
from nvme_ops.bench.measure import interleave
from nvme_ops.bench.tables import Table
from nvme_ops.measuring.files import NotUsable, require_space
from nvme_ops.text import MIB, size_words

GROUPS = {
    "memory": "the model in memory; always measured",
    "nvme_ops": "from_pretrained and stream_weights",
    "accelerate": "its device_map, transformers' disk map, accelerate.disk_offload",
    "deepspeed": "ZeRO-Inference, parameters on NVMe; one that keeps weights within the budget, one that keeps none",
    "mapped": "from_pretrained alone, which maps the file, with memory for the budget and 128 MiB",
}
_LARGE = 256 * MIB  # from here on the shape is that of a real model


def config(nbytes: int) -> dict[str, Any]:
    """Returns what LlamaConfig takes for about so many bytes of bfloat16: as many layers as come closest."""
    hidden, inner, vocabulary = (2048, 5120, 16384) if nbytes >= _LARGE else (256, 640, 2048)
    layer = 2 * (4 * hidden * hidden + 3 * hidden * inner + 2 * hidden)
    return {
        "hidden_size": hidden,
        "intermediate_size": inner,
        "vocab_size": vocabulary,
        "num_hidden_layers": max(1, round((nbytes - 4 * vocabulary * hidden) / layer)),
        "num_attention_heads": hidden // 128,
        "num_key_value_heads": hidden // 128,
        "max_position_embeddings": 2048,
    }


def model_folder(folder: str, nbytes: int) -> str:
    """Returns the folder of the model, which is made once and kept. Raises NotUsable without space or transformers."""
    shape = config(nbytes)
    name = f"nvme_ops-inference-{shape['num_hidden_layers']}x{shape['hidden_size']}"
    place = os.path.join(os.path.abspath(folder), name)
    if _fits(place, shape):
        return place
    try:
        import torch
        from transformers import LlamaConfig, LlamaForCausalLM
    except ImportError as error:
        raise NotUsable("the model is made by transformers: pip install transformers") from error
    require_space(folder, nbytes + 64 * MIB, "--size or --path")
    command.show_progress(f"making a model of {size_words(nbytes)} in {place}")
    with tempfile.TemporaryDirectory(dir=folder) as made:
        torch.manual_seed(1)
        model: Any = LlamaForCausalLM(LlamaConfig(**shape, dtype="bfloat16", tie_word_embeddings=False))
        model.to(torch.bfloat16)
        model.save_pretrained(made, max_shard_size="1TB")
        del model
        shutil.rmtree(place, ignore_errors=True)
        os.mkdir(place)
        for file in ("model.safetensors", "config.json"):  # the configuration last: it says that the other is whole
            os.rename(os.path.join(made, file), os.path.join(place, file))
    return place


def _fits(place: str, shape: dict[str, Any]) -> bool:
    try:
        found = json.loads(Path(place, "config.json").read_text(encoding="utf-8"))
        there = os.path.getsize(os.path.join(place, "model.safetensors"))
    except (OSError, ValueError):
        return False
    return there > 0 and all(found.get(name) == value for name, value in shape.items())


def tables(run: command.Run, scratch: str, found: dict[str, Any]) -> Generator[Table, None, None]:
    """Of one folder: one for each batch size. The rows are measured here, since the bound takes all of them."""
    given = run.given
    model = model_folder(os.path.dirname(scratch), given.size)
    wanted = [
        each for each in contenders(given.budget, not given.no_deepspeed) if each.group in {"memory", *given.groups}
    ]
    found["processes"] = {}
    for batch in given.batch:
        work = Work(model, scratch, batch, given.steps, given.prompt, given.warm)
        compared = [*rows(work, wanted), *fio_rows(work)]
        interleave(compared, given.rounds, command.show_progress, warmups=0)
        add_bounds(compared)
        found["processes"][batch] = work.said
        title = f"{size_words(os.path.getsize(work.file))} of weights, batch {batch}"
        yield Table(f"batch {batch}", title, "tokens/s", compared, MEMORY, COLUMNS)


def measure(given: argparse.Namespace) -> command.Run:
    """All folders and batch sizes."""
    run = command.Run(given, budget=given.budget, steps=given.steps, prompt=given.prompt, warm=given.warm)
    return run.folders(3, tables, measured=True)


def main(words: Sequence[str] | None = None) -> int:
    """Status 0; 1 when a folder cannot be used or tokens differ; 2 for wrong arguments; 130 after Ctrl-C."""
    parser = command.parser(__file__, __doc__, GROUPS)
    parser.set_defaults(size=1200 * MIB, rounds=3)
    parser.add_argument("--budget", nargs="+", type=size, default=[400 * MIB], metavar="SIZE",
                        help="memory for weights, for each row that takes one (default 400M)")  # fmt: skip
    parser.add_argument("--batch", nargs="+", type=positive, default=[1, 4, 16, 64], metavar="N",
                        help="sequences at once (default 1 4 16 64)")  # fmt: skip
    parser.add_argument("--steps", type=positive, default=4, help="timed steps of each process (default 4)")
    parser.add_argument("--prompt", type=positive, default=8, help="tokens of a prompt (default 8)")
    parser.add_argument("--warm", action="store_true", help="leave the files in the page cache")
    return command.run(command.parse(parser, words), measure)


if __name__ == "__main__":
    sys.exit(main())
