"""This package's ``aio_handle``."""

from __future__ import annotations

import nvme_ops
from nvme_ops.bench.engines.handles import handle_row
from nvme_ops.bench.engines.task import Task
from nvme_ops.bench.measure import Row
from nvme_ops.bench.page_cache import handles_read_it
from nvme_ops.bench.settings import Settings


def row(task: Task, name: str, settings: Settings) -> Row:
    """To GPU memory it takes its own bounce path."""
    made = handle_row(task, name, handle := nvme_ops.aio_handle(**settings.as_json()), not handles_read_it())
    made.note = handle.backend
    return made
