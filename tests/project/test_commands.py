"""Every command fits a terminal of 80 columns."""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
from collections.abc import Iterator

import pytest

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
