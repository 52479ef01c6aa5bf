"""Checks whether storage and GPU can reach each other over PCI without nvidia-fs, as far as files tell.

Requirements: NVIDIA's pages "GDS Support for NVMe" and "NVMe P2PDMA Troubleshooting". Only cuFile can tell whether the
machine's topology permits it (``nvme-report --open-driver``).
"""

from __future__ import annotations

import gzip
import platform
import re

from nvme_ops.host import Host
from nvme_ops.op_builder import cufile

from . import cufile_settings
from .result import Json, Result, Status

_NAME = "PCI peer-to-peer"
_OPTION = "CONFIG_PCI_P2PDMA"
_SYMBOL = "p2pdma_pgmap_ops"  # what NVIDIA's page looks for where there is no configuration to read
_LEAST_DRIVER = 565
_STATIC_BAR = "RMForceStaticBar1=1"


def check(host: Host) -> Result:
    """Reports a fact, never a complaint: nvidia-fs does the same."""
    why_not, iommu = obstacles(host), _iommu(host)
    data: dict[str, Json] = {"possible": not why_not, "obstacles": why_not, "iommu": iommu}
    words = f"no: {'; '.join(why_not)}" if why_not else "set up, as far as files tell"
    words += f" (IOMMU {iommu}; NVIDIA advises off on x86_64)" if iommu != "off" else " (IOMMU off)"
    return Result(_NAME, Status.INFO if why_not else Status.OKAY, words, data=data)


def obstacles(host: Host) -> list[str]:
    """Returns what is missing; empty if nothing is known to be."""
    settings, x86 = cufile_settings.read(host), platform.machine() == "x86_64"
    driver = re.search(r"Open Kernel Module.*?(\d+)\.", host.read_or(cufile.DRIVER_VERSION))
    problems = {
        f"the kernel lacks {_OPTION}": not kernel_has_it(host),
        f"the driver is not NVIDIA's open one, {_LEAST_DRIVER} or later": not driver or int(driver[1]) < _LEAST_DRIVER,
        f"its option {_STATIC_BAR} is not set": x86 and _STATIC_BAR not in host.read_or("/proc/driver/nvidia/params"),
        "nvme_core.multipath is on": host.read_or("/sys/module/nvme_core/parameters/multipath") == "Y",
        f"use_pci_p2pdma is not set in {settings.path or cufile_settings.DEFAULT}": not settings.peer_to_peer,
    }
    return [words for words, there in problems.items() if there]


def kernel_has_it(host: Host) -> bool:
    """Returns whether the kernel was configured with it, from its configuration, else from its list of symbols."""
    release = host.read_or("/proc/sys/kernel/osrelease") or platform.release()
    configuration = _unpacked(host, "/proc/config.gz")
    for name in (f"/boot/config-{release}", f"/lib/modules/{release}/config"):
        configuration = configuration or host.read_or(name)
    if configuration:
        return f"{_OPTION}=y" in configuration.splitlines()
    return _SYMBOL in host.read_or("/proc/kallsyms")


def _unpacked(host: Host, name: str) -> str:
    try:
        with gzip.open(host.path(name)) as file:
            return file.read().decode(errors="replace")
    except (OSError, EOFError):
        return ""


def _iommu(host: Host) -> str:
    groups = host.path("/sys/kernel/iommu_groups")
    if not groups.is_dir() or not any(groups.iterdir()):
        return "off"
    command_line = host.read_or("/proc/cmdline").split()
    return "in pass-through" if {"iommu=pt", "iommu.passthrough=1"} & set(command_line) else "on"
