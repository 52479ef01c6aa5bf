"""Joules that parts of the machine have used: RAPL through powercap, NVML's counter of a GPU.

The counters belong to the whole machine, not to a process: what else runs is in them.
"""

from __future__ import annotations

import contextlib
import importlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from nvme_ops.bench.measure import Row, Sample

_CLASS = "class/powercap"
_FIX = "sudo chmod a+r /sys/class/powercap/*/energy_uj"
_PACKAGE = "package-"


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
        self._parts, why_not = _rapl(Path(sysfs))
        self._gone: tuple[type[Exception], ...] = (OSError, ValueError)  # a measurement does not fail for these
        self._why_not = [why_not, self._find_gpus(gpus, nvml) if gpus else ""]

    def read(self) -> dict[str, float]:
        """Joules by part: ``package-0``, ``dram-0``, ``psys``, ``gpu-0``. Only differences of two readings matter.

        A part that cannot be read any more is left out.
        ``psys``, the whole platform, holds the packages and their memory: see ``total``.
        """
        joules = {}
        for part, tell in self._parts.items():
            with contextlib.suppress(*self._gone):
                joules[part] = tell()
        return joules

    def unavailable(self) -> str:
        """Why nothing can be told, beginning with ``not available``; empty where any part tells."""
        return "" if self._parts else "not available: " + "; ".join(filter(None, self._why_not))

    def _find_gpus(self, numbers: Sequence[int], module: ModuleType | None) -> str:
        """Keeps those that tell their energy; returns why others do not."""
        try:
            nvml: Any = module or importlib.import_module("pynvml")
        except ImportError:
            return "the GPU's energy needs NVML: pip install nvidia-ml-py"
        self._gone += (nvml.NVMLError,)
        try:
            nvml.nvmlInit()
            for number in numbers:
                tell = _of_gpu(nvml, number)
                tell()  # before Volta there is no counter
                self._parts[f"gpu-{number}"] = tell
        except nvml.NVMLError as error:
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


def _rapl(sysfs: Path) -> tuple[dict[str, Callable[[], float]], str]:
    """The packages, their memory and the whole platform, which hold all else; or why there are none."""
    folders = sorted((sysfs / _CLASS).glob("intel-rapl:*"))  # AMD's too; intel-rapl-mmio shows the same once more
    if not folders:
        return {}, f"no RAPL in {sysfs / _CLASS} (a virtual machine, or the module intel_rapl_msr is not loaded)"
    found: dict[str, Callable[[], float]] = {}
    why = f"no package among the counters in {sysfs / _CLASS}"
    for folder in folders:
        try:
            part = _part(folder)
            if part is not None and part not in found:
                found[part] = _of_rapl(folder / "energy_uj", int(_text(folder / "max_energy_range_uj")))
        except PermissionError:
            why = f"RAPL is readable by root only: {_FIX}"
        except (OSError, ValueError) as error:
            why = f"RAPL: {error}"
    return found, "" if found else why


def _part(folder: Path) -> str | None:
    """Its name, with the number of the package where the kernel leaves that out; None for what another part holds."""
    name = _text(folder / "name")
    if name.startswith((_PACKAGE, "psys")):
        return name
    if name != "dram":
        return None
    above = folder.parent / folder.name.rpartition(":")[0] / "name"  # intel-rapl:0:1 lies in intel-rapl:0
    return f"dram-{_text(above).removeprefix(_PACKAGE)}"


def _text(file: Path) -> str:
    return file.read_text(encoding="ascii").strip()


def _of_rapl(file: Path, most: int) -> Callable[[], float]:
    """Joules since this call, of a file of microjoules that starts again at 0 after ``most``."""
    last, counted = int(_text(file)), 0

    def tell() -> float:
        nonlocal last, counted
        now = int(_text(file))
        counted += now - last if now >= last else most - last + now
        last = now
        return counted / 1e6

    return tell


def _of_gpu(nvml: Any, number: int) -> Callable[[], float]:
    """Joules of a GPU, by its identity where torch tells it: NVML counts those that CUDA_VISIBLE_DEVICES hides too."""
    identity = getattr(torch.cuda.get_device_properties(number), "uuid", None) if torch.cuda.is_available() else None
    if identity is None:
        handle = nvml.nvmlDeviceGetHandleByIndex(number)
    else:
        handle = nvml.nvmlDeviceGetHandleByUUID(f"GPU-{identity}")
    return lambda: float(nvml.nvmlDeviceGetTotalEnergyConsumption(handle)) / 1e3
