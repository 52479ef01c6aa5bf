"""Joules that parts of the machine have used: RAPL through powercap, NVML's counter of a GPU.

The counters belong to the whole machine, not to a process: what else runs is in them.
"""

from __future__ import annotations

import contextlib
import importlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from nvme_ops.bench.measure import Row, Sample
from nvme_ops.text import GIB

_CLASS = "class/powercap"
_FIX = "sudo chmod a+r /sys/class/powercap/*/energy_uj"
_PACKAGE = "package-"


@dataclass
class _Counter:
    """One file of microjoules that starts again at 0 after ``most``."""

    file: Path
    most: int
    last: int
    total: int = field(default=0)  # since the counter was found

    def joules(self) -> float:
        now = int(self.file.read_text(encoding="ascii"))
        self.total += now - self.last if now >= self.last else self.most - self.last + now
        self.last = now
        return self.total / 1e6


class Meter:
    """Reads all counters that there are; where there are none, it opens no file and costs nothing.

    A counter of RAPL wraps around, after hours at some watts, after a quarter of an hour at hundreds: a meter that is
    read at least that often counts on.

    Args:
        gpus: torch's numbers of the devices whose energy counts.
        sysfs: where sysfs is mounted.
        nvml: the module to ask instead of ``pynvml``.
    """

    def __init__(self, gpus: Sequence[int] = (), sysfs: str = "/sys", nvml: ModuleType | None = None) -> None:
        self._counters, self._why_no_rapl = _rapl(Path(sysfs))
        self._nvml: Any = nvml
        self._gpus: dict[str, Any] = {}  # NVML's handles
        self._why_no_gpu = self._find_gpus(dict.fromkeys(gpus)) if gpus else ""

    def read(self) -> dict[str, float]:
        """Joules by part: ``package-0``, ``dram-0``, ``psys``, ``gpu-0``. Only differences of two readings matter.

        A part that cannot be read any more is left out.
        ``psys``, the whole platform, holds the packages and their memory: see ``total``.
        """
        joules = {}
        for part, counter in self._counters.items():
            with contextlib.suppress(OSError, ValueError):  # gone meanwhile: a measurement does not fail for that
                joules[part] = counter.joules()
        for part, handle in self._gpus.items():
            with contextlib.suppress(self._nvml.NVMLError):
                joules[part] = self._nvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1e3
        return joules

    def unavailable(self) -> str:
        """Why nothing can be told, beginning with ``not available``; empty where any part tells."""
        if self._counters or self._gpus:
            return ""
        return "not available: " + "; ".join(reason for reason in (self._why_no_rapl, self._why_no_gpu) if reason)

    def _find_gpus(self, numbers: Mapping[int, None]) -> str:
        """Keeps those that tell their energy; returns why others do not."""
        try:
            self._nvml = self._nvml or importlib.import_module("pynvml")
        except ImportError:
            return "the GPU's energy needs NVML: pip install nvidia-ml-py"
        try:
            self._nvml.nvmlInit()
            for number in numbers:
                handle = _handle(self._nvml, number)
                self._nvml.nvmlDeviceGetTotalEnergyConsumption(handle)  # before Volta there is no counter
                self._gpus[f"gpu-{number}"] = handle
        except self._nvml.NVMLError as error:
            return f"NVML: {error}"
        return ""


def used(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    """What each part used between two readings of one meter."""
    return {part: joules - before[part] for part, joules in after.items() if part in before}


def metered(row: Row, meter: Meter) -> None:
    """Adds to each pass of a row the energy, and the time that its caller waits."""
    inner = row.run

    def run() -> Sample:
        before = meter.read()
        begin = time.perf_counter()
        sample = inner()
        end_to_end = time.perf_counter() - begin
        return replace(sample, end_to_end=sample.end_to_end or end_to_end, joules=used(before, meter.read()))

    row.run = run


def total(joules: Mapping[str, float]) -> float:
    """The sum in which nothing counts twice: packages and their memory are left out where ``psys`` holds them."""
    platform = any(part.startswith("psys") for part in joules)
    return sum(value for part, value in joules.items() if not (platform and part.startswith((_PACKAGE, "dram"))))


def per_gib(sample: Sample) -> dict[str, float]:
    """Joules per GiB that was moved, by part; empty where nothing was told."""
    return {part: joules * GIB / sample.amount for part, joules in sample.joules.items()}


def _rapl(sysfs: Path) -> tuple[dict[str, _Counter], str]:
    """The packages, their memory and the whole platform; cores and graphics are within the packages."""
    folders = sorted((sysfs / _CLASS).glob("intel-rapl:*"))  # AMD's too; intel-rapl-mmio shows the same once more
    if not folders:
        return {}, f"no RAPL in {sysfs / _CLASS} (a virtual machine, or the module intel_rapl_msr is not loaded)"
    found: dict[str, _Counter] = {}
    why = f"no package among the counters in {sysfs / _CLASS}"
    for folder in folders:
        try:
            part = _part(folder)
            if part is None or part in found:
                continue
            most = int((folder / "max_energy_range_uj").read_text(encoding="ascii"))
            found[part] = _Counter(folder / "energy_uj", most, int((folder / "energy_uj").read_text(encoding="ascii")))
        except PermissionError:
            why = f"RAPL is readable by root only: {_FIX}"
        except (OSError, ValueError) as error:
            why = f"RAPL: {error}"
    return found, "" if found else why


def _part(folder: Path) -> str | None:
    """Its name, with the number of the package where the kernel leaves that out; None for what another part holds."""
    name = (folder / "name").read_text(encoding="ascii").strip()
    if name.startswith((_PACKAGE, "psys")):
        return name
    if name != "dram":
        return None
    above = folder.parent / folder.name.rpartition(":")[0] / "name"  # intel-rapl:0:1 lies in intel-rapl:0
    return f"dram-{above.read_text(encoding='ascii').strip().removeprefix(_PACKAGE)}"


def _handle(nvml: Any, number: int) -> Any:
    """By its identity where torch tells it: NVML counts also what CUDA_VISIBLE_DEVICES hides, in its own order."""
    identity = getattr(torch.cuda.get_device_properties(number), "uuid", None) if torch.cuda.is_available() else None
    if identity is None:
        return nvml.nvmlDeviceGetHandleByIndex(number)
    return nvml.nvmlDeviceGetHandleByUUID(f"GPU-{identity}")
