"""This package's ``gds_handle``."""

from __future__ import annotations

import nvme_ops
from nvme_ops.bench.engines.handles import handle_row
from nvme_ops.bench.engines.task import Task
from nvme_ops.bench.measure import Row, Sample, Unavailable
from nvme_ops.bench.page_cache import handles_read_it
from nvme_ops.bench.settings import Settings


def row(task: Task, name: str, settings: Settings) -> Row:
    """Its note says which way the last transfer took, and why. Raises Unavailable where cuFile cannot work."""
    if task.gpu is None:
        raise Unavailable("moves GPU memory only: --gpu")
    try:
        handle = nvme_ops.gds_handle(**settings.as_json())
    except RuntimeError as reason:
        raise Unavailable(str(reason).splitlines()[0]) from None
    made = handle_row(task, name, handle, not handles_read_it())
    run = made.run

    def run_and_note() -> Sample:
        sample = run()
        statistics = handle.path_statistics()
        made.note = f"{statistics['last']} ({statistics['why']})"
        if statistics["last"] != "bounce":  # cuFile reads from the device
            made.found = None
        return sample

    made.run = run_and_note
    return made
