"""Checkpoints saved and loaded by all who can, one state dict in one run. docs/benchmarks.md explains the method."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))  # so that it runs from anywhere, uninstalled too

import torch

from benchmarks import checkpoint_rows, command
from benchmarks.checkpoint_rows import Work
from nvme_ops.bench.measure import Row
from nvme_ops.bench.tables import Table
from nvme_ops.text import MIB, size_words

GROUPS = {
    "save": "save, durably",
    "load": "load of a file that is not in the page cache",
    "cached": "load of a file in the page cache, every byte then looked at",
    "async": "until save_async returns, against a copy of the tensors in memory",
}
_ROWS: dict[str, tuple[Callable[[Work], list[Row]], str]] = {  # with the row that the others are divided by
    "save": (checkpoint_rows.save_rows, checkpoint_rows.FIO_BEST),
    "load": (checkpoint_rows.load_rows, checkpoint_rows.FIO_BEST),
    "cached": (checkpoint_rows.cached_rows, checkpoint_rows.SAFETENSORS),
    "async": (checkpoint_rows.async_rows, checkpoint_rows.COPY),
}
STATE_DICTS = ("large", "llama", "small")
_COLUMNS = ("CPU s/GiB", "peak memory")


def state_dict(kind: str, size: int) -> dict[str, torch.Tensor]:
    """Random values, which no device can compress.

    ``large``: tensors of 32 MiB. ``llama``: the shapes of a Llama with as many layers as fit, bfloat16, with its small
    norms. ``small``: tensors of 4 KiB, 20,000 for the default size of 1 GiB, as many fewer for less.
    """
    if kind == "large":
        return {f"tensor.{index}": torch.randn(8 * MIB) for index in range(max(1, size // (32 * MIB)))}
    if kind == "small":
        count = max(1, 20_000 * size // (1 << 30))
        return {f"layers.{index}.weight": torch.randn(32, 32) for index in range(count)}
    return _llama(size)


def _llama(size: int) -> dict[str, torch.Tensor]:
    hidden, inner, heads, vocabulary = 1024, 2816, 16, 32_000
    shapes = {f"self_attn.{each}_proj": (hidden, hidden) for each in "qkvo"}
    shapes |= {"mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden), "mlp.down_proj": (hidden, inner)}
    norms = dict.fromkeys(("input_layernorm", "post_attention_layernorm"), (hidden,))

    def weight(*shape: int) -> torch.Tensor:
        return torch.randn(shape).to(torch.bfloat16)

    found = {"model.embed_tokens.weight": weight(vocabulary, hidden), "model.norm.weight": weight(hidden)}
    layer = 0
    while sum(tensor.nbytes for tensor in found.values()) < size:
        name = f"model.layers.{layer}"
        found |= {f"{name}.{part}.weight": weight(*shape) for part, shape in {**shapes, **norms}.items()}
        found[f"{name}.self_attn.rotary_emb.inv_freq"] = torch.randn(hidden // heads // 2)
        layer += 1
    return found


def tables(run: command.Run, scratch: str, _: dict[str, Any]) -> Generator[Table, None, None]:
    """Of one folder: each group for each state dict. The files of one are gone before the next."""
    for kind in run.given.state_dict:
        command.show_progress(f"making the state dict {kind}")
        tensors = state_dict(kind, run.given.size)
        with tempfile.TemporaryDirectory(dir=scratch) as folder:
            work = Work(os.path.join(folder, kind), tensors, not run.given.no_deepspeed)
            words = f"{kind}: {len(tensors)} tensors, {size_words(work.size)}"
            for group in run.given.groups:
                rows, reference = _ROWS[group]
                yield Table(group, f"{GROUPS[group]}; {words}", "GB/s", rows(work), reference, _COLUMNS)


def main(words: Sequence[str] | None = None) -> int:
    """Status 0; 1 when a folder cannot be used or a row lost data; 2 for wrong arguments; 130 after Ctrl-C."""
    parser = command.parser(__file__, __doc__, GROUPS)
    parser.add_argument(
        "--state_dict", nargs="+", choices=STATE_DICTS, default=list(STATE_DICTS), metavar="KIND",
        help=f"{', '.join(STATE_DICTS)} (default: all)",
    )  # fmt: skip
    return command.run(command.parse(parser, words), lambda given: command.Run(given).folders(10, tables))


if __name__ == "__main__":
    sys.exit(main())
