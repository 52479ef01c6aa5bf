"""The command ``nvme-ops``, also ``python -m nvme_ops``: runs any command of the package, importing only that one."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

from nvme_ops import __version__
from nvme_ops.base.command_line import Main, command, command_line, listed

#: Command -> the module with its ``main``, and what it does. Each is installed as ``nvme-<command>`` too.
COMMANDS = {
    "report": ("nvme_ops.report.cli", "what works on this machine, and what to do about the rest"),
    "bench": ("nvme_ops.measure.bench", "what the storage can do, and what limits a program"),
    "tune": ("nvme_ops.measure.tune", "the best settings of a handle for a device"),
    "checkpoint": ("nvme_ops.checkpoint.cli", "look into checkpoints, verify, compare and convert them"),
    "offload": ("nvme_ops.offload.cli", "plan what of a model is in memory, and what on NVMe"),
    "data": ("nvme_ops.data.cli", "make stores of samples, describe and verify them"),
}


def parser() -> argparse.ArgumentParser:
    """Returns the parser of the first argument, the command's name."""
    rows = listed([(name, words) for name, (_, words) in COMMANDS.items()], 12)
    made = command_line("nvme-ops", f"commands:\n{rows}", "nvme-ops COMMAND --help says more")
    made.usage = "nvme-ops [-h] [--version] COMMAND ..."
    made.add_argument("--version", action="version", version=f"nvme-ops {__version__}")
    made.add_argument("command", metavar="COMMAND", choices=COMMANDS, help=argparse.SUPPRESS)
    return made


@command("nvme-ops")
def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command; returns its exit status."""
    args = sys.argv[1:] if argv is None else list(argv)
    name = parser().parse_args(args[:1]).command
    run: Main = importlib.import_module(COMMANDS[name][0]).main
    return run(args[1:])


if __name__ == "__main__":
    sys.exit(main())
