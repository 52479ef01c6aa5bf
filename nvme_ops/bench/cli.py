"""The command ``nvme-bench``: arguments in, tables out, exit status."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from nvme_ops.bench import explain, options, plot, report
from nvme_ops.bench.run import run
from nvme_ops.measuring import files, stop


def main(words: Sequence[str] | None = None) -> int:
    """Runs the command; returns 0; 1: wrong data; 2: wrong arguments, folders without space; 130: after Ctrl-C."""
    words = sys.argv[1:] if words is None else words
    stop.leave_on_signals()
    if words and words[0] == "explain":
        return _explain(words[1:])
    if words and words[0] == "workload":
        from nvme_ops.bench.workload import cli as workload

        return workload.main(words[1:])
    given = options.parse(words)
    try:
        result = run(given, show_progress)
    except files.NotUsable as reason:
        print(f"nvme-bench: {reason}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\nnvme-bench: interrupted before anything was measured; the files are removed", file=sys.stderr)
        return 130
    document = json.dumps(report.as_document(result), indent=2) + "\n" if given.json else ""
    print(document if given.json == "-" else report.text(result) + "\n", end="")
    if given.json and given.json != "-":
        Path(given.json).write_text(document, encoding="utf-8")
    if given.csv:
        Path(given.csv).write_text(report.as_csv(result), encoding="utf-8")
    if given.plot and not plot.plot(result, given.plot):
        print("nvme-bench: nothing to plot: nothing was measured", file=sys.stderr)
    if result.wrong:
        print(f"nvme-bench: wrong data: {', '.join(result.wrong)}", file=sys.stderr)
    return 130 if result.interrupted else 1 if result.wrong else 0


def _explain(words: Sequence[str]) -> int:
    try:
        status, text = explain.main(words)
    except KeyboardInterrupt:
        print("\nnvme-bench: interrupted; the files are removed", file=sys.stderr)
        return 130
    print(text, file=sys.stderr if status else sys.stdout)
    return status


def show_progress(words: str) -> None:
    """One line that is written over, on a terminal only."""
    if sys.stderr.isatty():
        print(f"\r\033[K{words}", end="", file=sys.stderr, flush=True)
