"""``Account``: what a program that offloads waits for, and how near it comes to what its machine allows."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from nvme_ops.base.text import columns_text, rate_words, seconds_words, share_words, size_words
from nvme_ops.offload.residency.policy import Stats
from nvme_ops.storage.rates import copy_rate, mixed_rate, read_rate

_REMEDIES = {
    "storage": "it gets faster with more memory, or with faster storage",
    "the bus": "it gets faster with a larger device_budget",
    "computing": "more memory or faster storage would not make it faster",
}


def rate_of_files(files: Sequence[str]) -> Callable[[], float]:
    """Returns what measures the bytes per second that are read from a model's files, as while it runs."""
    return lambda: read_rate(files, cached=True)


def rate_of_folders(folders: Sequence[str]) -> Callable[[], float]:
    """Returns what measures the bytes per second that are read and written, together, in all of these folders."""
    return lambda: sum(mixed_rate(folder)[0] for folder in folders)


class Account:
    """Explains what was counted since it was made, or since the last explanation.

    Args:
        storage_rate: measures the bytes per second that storage moves.
    """

    def __init__(self, storage_rate: Callable[[], float]) -> None:
        self._storage_rate = storage_rate
        self._rates: dict[str, float] = {}
        self._begun, self._before = time.perf_counter(), Stats()

    def explain(self, now: Stats, device: torch.device) -> str:
        """Returns what is where, what was moved and waited for meanwhile, and what limits, where a device computes.

        The rates are measured at the first call, which takes about a second and writes 256 MiB to folders. Raises
        OSError if they cannot be written.
        """
        seconds, before, now = time.perf_counter() - self._begun, self._before, replace(now)
        if not self._rates:
            self._rates["storage"] = self._storage_rate()
            if device.type != "cpu":
                self._rates["the bus"] = copy_rate(device)
        read, written, risen, sunk = (
            getattr(now, name) - getattr(before, name)
            for name in ("bytes_read", "bytes_written", "bytes_from_host", "bytes_to_host")
        )
        waited = now.seconds_waited - before.seconds_waited
        waited_for_host = now.seconds_waited_for_host - before.seconds_waited_for_host
        moved = {"storage": read + written, "the bus": max(read + risen, written + sunk)}
        takes = {name: moved[name] / rate for name, rate in self._rates.items()}
        takes["computing"] = max(0.0, seconds - waited - waited_for_host)
        self._begun, self._before = time.perf_counter(), now
        rows = [
            ["", "now", "moved", ""],
            [str(device), size_words(now.bytes_in_memory), "", ""],
            ["host memory", size_words(now.bytes_in_host), f"{size_words(risen)} up", f"{size_words(sunk)} down"],
            ["storage", size_words(now.bytes_stored), f"{size_words(read)} read", f"{size_words(written)} written"],
        ]
        if device.type == "cpu":
            del rows[2]
        limits = max(takes, key=takes.__getitem__)
        lines = [
            f"{seconds_words(seconds)}, of which it waited {seconds_words(waited)} for storage or memory"
            + (f", and {device} {seconds_words(waited_for_host)} for copies" if len(self._rates) > 1 else ""),
            columns_text(rows),
            *(
                f"{name}: {size_words(moved[name])} take {seconds_words(takes[name])} at {rate_words(rate)}"
                for name, rate in self._rates.items()
            ),
            f"computing: {seconds_words(takes['computing'])} without waits",
            f"{limits} limits, and reaches {share_words(min(1.0, takes[limits] / seconds))} of what is possible: "
            + _REMEDIES[limits],
        ]
        return "\n".join(lines)
