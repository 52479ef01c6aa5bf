"""The command ``nvme-bench``: arguments in, tables out, exit status."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from nvme_ops.arguments import command, say, show
from nvme_ops.bench import explain, options, plot, report
from nvme_ops.bench.output import show_progress, write_json
from nvme_ops.bench.run import run
from nvme_ops.measuring import files, stop


@command("nvme-bench")
def main(words: Sequence[str] | None = None) -> int:
    """Runs the command; returns 0; 1: wrong data; 2: wrong arguments, folders without space; 130: after Ctrl-C."""
    words = sys.argv[1:] if words is None else words
    stop.leave_on_signals()
    command = {"explain": _explain, "workload": _workload}.get(words[0] if words else "")
    try:
        return command(words[1:]) if command else _bench(words)
    except (files.NotUsable, OSError) as reason:
        say(f"nvme-bench: {reason}")
        return 2
    except KeyboardInterrupt:
        print("\nnvme-bench: interrupted; the files are removed", file=sys.stderr)
        return 130


def _bench(words: Sequence[str]) -> int:
    given = options.parse(words)
    result = run(given, show_progress)
    if given.json != "-":
        show(report.text(result))
    if given.json:
        write_json(given.json, report.as_document(result))
    if given.csv:
        Path(given.csv).write_text(report.as_csv(result), encoding="utf-8")
    if given.plot and not plot.plot(result, given.plot):
        print("nvme-bench: nothing to plot: nothing was measured", file=sys.stderr)
    if result.wrong:
        print(f"nvme-bench: wrong data: {', '.join(result.wrong)}", file=sys.stderr)
    return 130 if result.interrupted else 1 if result.wrong else 0


def _explain(words: Sequence[str]) -> int:
    status, text = explain.main(words)
    (say if status else show)(text)
    return status


def _workload(words: Sequence[str]) -> int:
    from nvme_ops.bench.workload import cli as workload

    return workload.main(words)
