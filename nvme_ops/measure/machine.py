"""Describes the machine that the figures were measured on."""

from __future__ import annotations

import functools
import os
import platform
from collections.abc import Mapping

from nvme_ops.op_builder import AsyncIOBuilder
from nvme_ops.op_builder.machine import Host
from nvme_ops.report import storage


@functools.cache  # it takes a second
def processor() -> str:
    """Returns the processor's name, or its architecture if the name is not known."""
    import cpuinfo

    return str(cpuinfo.get_cpu_info().get("brand_raw") or platform.machine())


def machine() -> dict[str, str]:
    """Returns processor, kernel, memory and versions."""
    import torch

    host = Host()
    memory = next(line.split()[1] for line in host.read("/proc/meminfo").splitlines() if line.startswith("MemTotal"))
    usable = [name for name, refusal in AsyncIOBuilder().load().backends().items() if refusal is None]
    return {
        "cpu": f"{len(os.sched_getaffinity(0))} x {processor()}",
        "memory": f"{int(memory) / (1 << 20):.0f} GiB",
        "kernel": os.uname().release,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "backends": ", ".join(usable),
    }


def facts(*mappings: Mapping[str, object]) -> str:
    """Returns names and values on one line."""
    return "; ".join(f"{name} {words}" for mapping in mappings for name, words in mapping.items())


def place(folder: str) -> dict[str, str]:
    """Returns file system, direct I/O and device of a folder, in the report's words."""
    wanted = ("file system", "O_DIRECT", "alignment", "device")
    return {result.name: result.detail for result in storage.inspect(Host(), folder) if result.name in wanted}
