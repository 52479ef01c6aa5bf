"""The settings of a handle that ``nvme-bench --sweep`` and ``nvme-tune`` vary, by ds_nvme_tune's names."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from nvme_ops.base.command_line import positive, size
from nvme_ops.base.settings import Settings


def _switch(text: str) -> bool:
    if text.lower() not in ("0", "1", "false", "true"):
        raise argparse.ArgumentTypeError(f"{text!r} is neither true nor false")
    return text.lower() in ("1", "true")


#: What can be swept: the setting, and the parser of a value.
SWEPT: dict[str, tuple[str, Callable[[str], Any]]] = {
    "block_size": ("block_size", size),
    "queue_depth": ("queue_depth", positive),
    "io_parallel": ("intra_op_parallelism", positive),
    "single_submit": ("single_submit", _switch),
    "sequential_requests": ("overlap_events", lambda text: not _switch(text)),
}


def combinations(values: Iterable[tuple[str, Iterable[object]]], base: Settings) -> list[Settings]:
    """Returns all combinations of the values, by their names in ``SWEPT``, each once; the rest is as in ``base``.

    Names can have hyphens. Raises ValueError for one that is unknown or there twice, and for an invalid value.
    """
    axes: dict[str, list[Any]] = {}
    for name, given in values:
        if (known := name.replace("-", "_")) not in SWEPT:
            raise ValueError(f"{name!r} is none of {', '.join(SWEPT)}")
        setting, parse = SWEPT[known]
        if setting in axes:
            raise ValueError(f"{name}: twice; name all its values once")
        try:
            axes[setting] = list(dict.fromkeys(parse(str(value)) for value in given))
        except argparse.ArgumentTypeError as error:
            raise ValueError(f"{name}: {error}") from None
    return [replace(base, **dict(zip(axes, chosen, strict=True))) for chosen in itertools.product(*axes.values())]
