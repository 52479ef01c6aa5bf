"""Checkpoints saved and loaded by all who can, one state dict in one run. docs/benchmarks.md explains the method."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))  # so that it runs from anywhere, uninstalled too

import torch

from benchmarks import checkpoint_rows, command
from nvme_ops.bench import machine
from nvme_ops.bench.scratch import scratch_folder
from nvme_ops.bench.tables import Table
from nvme_ops.text import MIB, size_words

GROUPS = {
    "save": "save, durably",
    "load": "load of a file that is not in the page cache",
    "cached": "load of a file in the page cache, every byte then looked at",
    "async": "until save_async returns, against a copy of the tensors in memory",
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

    def weight(*shape: int) -> torch.Tensor:
        return torch.randn(shape).to(torch.bfloat16)

    found = {"model.embed_tokens.weight": weight(vocabulary, hidden), "model.norm.weight": weight(hidden)}
    layer = 0
    while sum(tensor.nbytes for tensor in found.values()) < size:
        name = f"model.layers.{layer}"
        for each in ("q", "k", "v", "o"):
            found[f"{name}.self_attn.{each}_proj.weight"] = weight(hidden, hidden)
        found[f"{name}.mlp.gate_proj.weight"] = weight(inner, hidden)
        found[f"{name}.mlp.up_proj.weight"] = weight(inner, hidden)
        found[f"{name}.mlp.down_proj.weight"] = weight(hidden, inner)
        found[f"{name}.input_layernorm.weight"] = weight(hidden)
        found[f"{name}.post_attention_layernorm.weight"] = weight(hidden)
        found[f"{name}.self_attn.rotary_emb.inv_freq"] = torch.randn(hidden // heads // 2)
        layer += 1
    return found


def arguments(words: Sequence[str] | None) -> argparse.Namespace:
    """Exits with status 2 on wrong ones."""
    parser = command.parser((__doc__ or "").partition("\n")[0], GROUPS)
    parser.add_argument(
        "--state_dict", nargs="+", choices=STATE_DICTS, default=list(STATE_DICTS), metavar="KIND",
        help=f"{', '.join(STATE_DICTS)} (default: all)",
    )  # fmt: skip
    return command.parse(parser, words)


def tables_of(work: checkpoint_rows.Work, given: argparse.Namespace, kind: str) -> list[tuple[str, Table]]:
    """Not measured yet."""
    made = []
    for group in [name for name in GROUPS if not given.only or name in given.only]:
        rows: Callable[..., Any] = {
            "save": checkpoint_rows.save_rows,
            "load": checkpoint_rows.load_rows,
            "cached": checkpoint_rows.cached_rows,
            "async": checkpoint_rows.async_rows,
        }[group]
        title = f"{GROUPS[group]}; {kind}: {len(work.tensors)} tensors, {size_words(work.size)}"
        reference = checkpoint_rows.REFERENCES[group]
        made.append((group, Table(group, title, "GB/s", rows(work), reference, _COLUMNS)))
    return made


def measure(given: argparse.Namespace, progress: command.Progress) -> command.Result:
    """Everything: what the JSON file shall hold, and the tables by folder."""
    result: dict[str, Any] = {"machine": machine.machine(), "size": given.size, "rounds": given.rounds, "folders": {}}
    tables: dict[str, list[Table]] = {}
    print("; ".join(f"{name} {words}" for name, words in result["machine"].items()))
    for folder in given.path:
        place = machine.place(folder)
        print(f"\n== {folder}: " + "; ".join(f"{name} {words}" for name, words in place.items()))
        result["folders"][folder] = {"place": place, "tables": []}
        tables[folder] = []
        for kind in given.state_dict:
            progress(f"making the state dict {kind}")
            tensors = state_dict(kind, given.size)
            with scratch_folder(folder, 10 * given.size + 64 * MIB) as scratch:
                work = checkpoint_rows.Work(os.path.join(scratch, kind), tensors, not given.no_deepspeed)
                for _, table in tables_of(work, given, kind):
                    found = command.measure_table(table, given.rounds, progress)
                    tables[folder].append(table)
                    result["folders"][folder]["tables"].append(found)
    return result, tables


def main(words: Sequence[str] | None = None) -> int:
    """Status 0; 1 when a folder cannot be used or a row lost data; 2 for wrong arguments; 130 after Ctrl-C."""
    return command.run("checkpoint.py", arguments(words), measure)


if __name__ == "__main__":
    sys.exit(main())
