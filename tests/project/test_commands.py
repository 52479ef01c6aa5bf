"""``nvme-ops`` leads to every command, and each fits a terminal of 80 columns."""

from __future__ import annotations

import argparse
import importlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import nvme_ops
from nvme_ops.__main__ import COMMANDS as OURS
from nvme_ops.__main__ import main
from tests.conftest import REPOSITORY, refusal, run_python

#: Modules with the parser of a command, by its words.
COMMANDS = {
    "nvme-ops": "nvme_ops.__main__",
    **{f"nvme-{name}": module for name, (module, _) in OURS.items()},
    "nvme-bench explain": "nvme_ops.measure.explain",
    "nvme-bench workload": "nvme_ops.measure.workload.cli",
}


#: The commands below those of nvme-ops.
BELOW = {
    "bench": ["explain", "workload"],
    "checkpoint": ["info", "verify", "diff", "convert", "clean"],
    "offload": ["plan", "generate"],
    "data": ["convert", "info", "verify"],
}


def parsers(made: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """The parser, and those of its commands."""
    yield made
    for action in made._actions:
        if isinstance(action, argparse._SubParsersAction):
            for parser in action.choices.values():
                yield from parsers(parser)


@pytest.mark.parametrize("name", COMMANDS)
def test_help_fits_80_columns_and_its_flags_have_hyphens(name: str) -> None:
    made = list(parsers(importlib.import_module(COMMANDS[name]).parser()))
    lines = [line for parser in made for line in parser.format_help().splitlines()]
    assert lines[0].startswith(f"usage: {name} ")
    assert [line for line in lines if len(line) > 80 or re.search(r"--[a-z-]+_|\w-$", line)] == []


def test_no_command_is_missing() -> None:
    listed = re.findall(r'^(nvme-\w+) = "(.*):main"$', (REPOSITORY / "pyproject.toml").read_text(), re.MULTILINE)
    assert dict(listed) == {name: module for name, module in COMMANDS.items() if " " not in name}


def test_nvme_ops_lists_the_commands_and_runs_the_one_that_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--help", "--version")
    for words in (*([option] for option in options), *([name, option] for name in OURS for option in options)):
        with pytest.raises(SystemExit) as end:
            main(words)
        said = capsys.readouterr().out
        assert end.value.code == 0
        if words == ["--help"]:
            assert [name for name, (_, words) in OURS.items() if f"  {name:12}{words}" not in said] == []
        else:
            name = words[0] if len(words) > 1 else "ops"
            assert said.startswith((f"usage: nvme-{name} ", f"nvme-{name} {nvme_ops.__version__}\n"))
    for words in ([], ["fly"], ["rep"]):
        status, said = refusal(main, words)
        assert status == 2
        assert "usage: nvme-ops [-h] [--version] COMMAND" in said


def test_nvme_ops_imports_no_other_command() -> None:
    program = """
        import runpy, sys
        from nvme_ops.__main__ import COMMANDS
        try:
            runpy.run_module("nvme_ops", run_name="__main__", alter_sys=True)
        except SystemExit as end:
            assert end.code == 2
        print([name for name, (module, _) in COMMANDS.items() if module in sys.modules])
    """
    assert run_python(program, "data", "info", "/no/such").stdout == "['data']\n"


def test_what_needs_no_torch_does_not_import_it(folder: Path) -> None:
    program = """
        import sys
        sys.modules["torch"] = None  # importing it fails
        from nvme_ops.__main__ import main

        def status(*words):
            try:
                return main(words)
            except SystemExit as end:
                return end.code

        *commands, folder = sys.argv[1:]
        for command in commands:
            found = [status(*command.split(), flag) for flag in ("--help", "--no-such-flag")]
            assert found == [0, 2], (command, found)
            if " " not in command:
                assert status(command, "--version") == 0, command
        for words in (["bench", "--folder", "/no/such"], ["bench", "--folder", folder, "--sweep", "depth=1"],
                      ["bench", "explain", folder, "--rounds", "1"], ["bench", "workload", "unet3d", "--folder", "/no"],
                      ["tune", "--folder", folder, "--loops", "0"]):
            assert status(*words) == 2, words
        print("needing torch", file=sys.stderr)
        assert status("bench", "--folder", folder, "--io_size", "1M") == 2
    """
    commands = [f"{name} {below}" for name, words in BELOW.items() for below in words]
    said = run_python(program, *OURS, *commands, str(folder)).stderr
    assert said.endswith("needing torch\nnvme-bench: torch is not installed: pip install torch\n"), said


def test_no_command_says_that_numpy_is_missing(folder: Path) -> None:
    """Torch does, when it is imported; the processes that a command starts import it, too."""
    torch.save({"bias": torch.ones(3)}, folder / "model.pt")
    program = """
        import sys
        sys.modules["numpy"] = None
        from nvme_ops.__main__ import main
        if __name__ == "__main__":
            main(sys.argv[1:]) if sys.argv[1:] else __import__("torch")
    """
    missing = "Failed to initialize NumPy"
    assert missing in run_python(program, fresh=True).stderr, "else this test shows nothing"
    bench = ("bench", "--folder", folder, "--io_size", "1M", "--loops", "1", "--multi_process", "2")
    for words in (("checkpoint", "info", folder / "model.pt"), bench):
        assert missing not in run_python(program, *words, fresh=True).stderr
