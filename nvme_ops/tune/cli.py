"""The command ``nvme-tune``: arguments in, the best settings out, exit status."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from nvme_ops.arguments import command, say, show
from nvme_ops.measuring import stop
from nvme_ops.measuring.files import NotUsable
from nvme_ops.tune import options, report
from nvme_ops.tune.devices import TuneResult, tune
from nvme_ops.tuning import store


@command("nvme-tune")
def main(words: Sequence[str] | None = None) -> int:
    """Runs the command; returns 0; 2 for wrong arguments and unusable folders; 130 after Ctrl-C."""
    stop.leave_on_signals()
    given = options.parse(words)
    shown_by_the_bar = sys.stderr.isatty() and not given.verbose
    try:
        result = tune(given, (lambda _: None) if shown_by_the_bar else say)
        if result.interrupted:
            say("\nnvme-tune: interrupted; the files are removed")
        if result.devices:
            _show(result)
        return 130 if result.interrupted else 0
    except (NotUsable, OSError) as reason:
        say(f"nvme-tune: {reason}")
        return 2
    except KeyboardInterrupt:
        say("\nnvme-tune: interrupted; the files are removed")
        return 130


def _show(result: TuneResult) -> None:
    given = result.options
    document = json.dumps(report.as_document(result), indent=2) + "\n"
    if given.json == "-":
        print(document, end="")
    else:
        show(report.text(result))
    if given.json and given.json != "-":
        Path(given.json).write_text(document, encoding="utf-8")
    if not given.no_store and not result.interrupted:
        _keep(result)


def _keep(result: TuneResult) -> None:
    for tuned in result.devices:
        details = report.details(tuned)
        known = None if result.options.replace else store.load(tuned.identity, "tuned", store.settings_of)
        if known and (problem := report.why_keep(known, details)):
            say(f"not kept for aio_handle.tuned, which has the result of {known.get('date')}: {problem}; "
                 "--replace keeps this one")  # fmt: skip
            continue
        try:
            path = store.keep(tuned.identity, tuned.outcome.best, details)
        except (OSError, RuntimeError) as error:
            say(f"nvme-tune: warning: not kept for aio_handle.tuned: {error}")
        else:
            say(f"kept for aio_handle.tuned in {path}")


if __name__ == "__main__":
    sys.exit(main())
