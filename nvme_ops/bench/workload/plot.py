"""Plots utilization by number of accelerators, a line for each reader. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from nvme_ops.bench.workload.feed import FED


def plot(found: Mapping[str, Mapping[str, Sequence[Mapping[str, Any]]]], path: str) -> None:
    """Writes the picture: one plot for each job."""
    from matplotlib.figure import Figure  # type: ignore[import-not-found,unused-ignore]

    if not found:
        return
    figure = Figure(figsize=(5 * len(found), 4), layout="tight")
    for axis, (job, curves) in zip(figure.subplots(1, len(found), squeeze=False)[0], found.items(), strict=True):
        for name, points in curves.items():
            counts = [point["accelerators"] for point in points]
            axis.plot(counts, [100 * point["utilization"] for point in points], marker="o", label=name)
        axis.axhline(100 * FED, linestyle=":", color="gray")
        axis.set_xscale("log", base=2)
        axis.set_ylim(0, 105)
        axis.set_title(job, fontsize=10)
        axis.set_xlabel("emulated accelerators")
        axis.set_ylabel("% of their time busy")
        axis.grid(visible=True, alpha=0.3)
        axis.legend(fontsize=8)
    figure.savefig(path, dpi=150)
