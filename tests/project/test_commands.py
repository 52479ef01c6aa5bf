"""Every command fits a terminal of 80 columns."""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import nvme_ops
from tests import prepared

#: Modules with the parser of a command, by its words.
COMMANDS = {
    "nvme-bench": "nvme_ops.bench.options",
    "nvme-bench explain": "nvme_ops.bench.explain",
    "nvme-bench workload": "nvme_ops.bench.workload.cli",
    "nvme-checkpoint": "nvme_ops.inspection.cli",
    "nvme-data": "nvme_ops.data.cli",
    "nvme-offload": "nvme_ops.offload.cli",
    "nvme-report": "nvme_ops.report.cli",
    "nvme-tune": "nvme_ops.tune.options",
}


def parsers(made: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """The parser, and those of its commands."""
    yield made
    for action in made._actions:
        if isinstance(action, argparse._SubParsersAction):
            for each in action.choices.values():
                yield from parsers(each)


@pytest.mark.parametrize("name", COMMANDS)
def test_help_fits_80_columns(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    lines = [
        line
        for each in parsers(importlib.import_module(COMMANDS[name]).parser())
        for line in each.format_help().splitlines()
    ]
    assert lines[0].startswith(f"usage: {name} ")
    assert [line for line in lines if len(line) > 80] == []


def test_no_command_is_missing_here() -> None:
    installed = importlib.metadata.entry_points(group="console_scripts")
    assert {each.name for each in installed if each.value.startswith("nvme_ops.")} == {
        name.partition(" ")[0] for name in COMMANDS
    }


def lines_of(module: str, *words: str) -> list[str]:
    done = prepared.run("-m", module, *words, environment={"COLUMNS": "80"})
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_what_commands_print_fits_80_columns(folder: Path) -> None:
    model = str(folder / "model.pt")
    name = "model.layers.0.block_sparse_moe.experts.0.gate_proj.weight_scale_inv"
    nvme_ops.save({name: torch.ones(2000, 3), "bias": torch.ones(3)}, model, metadata={"words": "many " * 30})
    bench = ("--folder", str(folder), "--io_size", "2M", "--loops", "2")
    said = [
        *lines_of("nvme_ops.inspection.cli", "info", model),
        *lines_of("nvme_ops.inspection.cli", "verify", model),
        *lines_of("nvme_ops.bench", *bench, "--sweep", "block_size=64K,1M", "queue_depth=1,32", "--no_reference"),
        *lines_of("nvme_ops.bench", "explain", str(folder), "--io_size", "2M", "--rounds", "2"),
        *lines_of("nvme_ops.bench", "workload", "llm-checkpoint", *bench[:2], "--size", "8M", "--seconds", "0.1"),
        *lines_of("nvme_ops.tune.cli", "--nvme_dir", str(folder), "--io_size", "32M", "--no_write", "--no_store"),
    ]
    too_long = [line for line in said if len(line) > 80 and " " in line.strip() and str(folder) not in line]
    assert too_long == []
    assert name in said
    assert any(line.startswith("fastest: aio_handle, block_size") for line in said)
