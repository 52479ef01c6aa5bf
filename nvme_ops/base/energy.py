"""Measures the joules that parts of the machine use, by RAPL through powercap, and by NVML's counter of a GPU.

The counters cover the whole machine, not a process: other programs are included.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

_CLASS = "class/powercap"
_FIX = "sudo chmod a+r /sys/class/powercap/*/energy_uj"
_PACKAGE = "package-"


class Meter:
    """Reads all available counters; without any, it opens no file and costs nothing.

    A counter of RAPL wraps around after hours at a few watts, or a quarter of an hour at hundreds of watts: read the
    meter more often than that.

    Args:
        gpus: torch's numbers of the devices to measure.
        sysfs: where sysfs is mounted.
    """

    def __init__(self, gpus: Sequence[int] = (), sysfs: str = "/sys") -> None:
        counters, why_not = _rapl(Path(sysfs))
        self._parts = {part: _rapl_reader(*counter) for part, counter in counters.items()}
        self._ignored: tuple[type[Exception], ...] = (OSError, ValueError)  # a measurement must not fail by these
        self._why_not = [why_not, self._find_gpus(gpus) if gpus else ""]

    def read(self) -> dict[str, float]:
        """Returns joules by part: ``package-0``, ``dram-0``, ``psys``, ``gpu-0``. Only differences are meaningful.

        Omits a part that cannot be read any more. ``psys``, the whole platform, includes packages and memory: see
        ``total``.
        """
        joules = {}
        for part, read in self._parts.items():
            with contextlib.suppress(*self._ignored):
                joules[part] = read()
        return joules

    def unavailable(self) -> str:
        """Returns why there are no figures, beginning with ``not available``; empty if any part has one."""
        return "" if self._parts else "not available: " + "; ".join(filter(None, self._why_not))

    def _find_gpus(self, numbers: Sequence[int]) -> str:
        """Keeps the GPUs that report their energy; returns why others do not."""
        try:
            nvml: Any = importlib.import_module("pynvml")
        except ImportError:
            return "the GPU's energy needs NVML: pip install nvidia-ml-py"
        self._ignored += (nvml.NVMLError,)
        try:
            nvml.nvmlInit()
            for number in numbers:
                read = _gpu_reader(nvml, number)
                read()  # raises before Volta, which has no counter
                self._parts[f"gpu-{number}"] = read
        except nvml.NVMLError as error:
            return f"NVML: {error}"
        return ""


def used(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    """Returns what each part used between two readings of one meter."""
    return {part: joules - before[part] for part, joules in after.items() if part in before}


def total(joules: Mapping[str, float]) -> float:
    """Returns the sum of all parts, without packages and their memory if ``psys`` includes them."""
    platform = any(part.startswith("psys") for part in joules)
    return sum(value for part, value in joules.items() if not (platform and part.startswith((_PACKAGE, "dram"))))


def _rapl(sysfs: Path) -> tuple[dict[str, tuple[Path, int]], str]:
    """Returns the counters of packages, memory and the whole platform, and why there are none.

    A counter is a file of microjoules and the value after which it wraps around.
    """
    folders = sorted((sysfs / _CLASS).glob("intel-rapl:*"))  # also AMD's; intel-rapl-mmio repeats them
    if not folders:
        return {}, f"no RAPL in {sysfs / _CLASS} (a virtual machine, or the module intel_rapl_msr is not loaded)"
    counters: dict[str, tuple[Path, int]] = {}
    why = f"no package among the counters in {sysfs / _CLASS}"
    for folder in folders:
        try:
            part = _part(folder)
            if part is not None and part not in counters:
                int(_text(folder / "energy_uj"))
                counters[part] = folder / "energy_uj", int(_text(folder / "max_energy_range_uj"))
        except PermissionError:
            why = f"RAPL is readable by root only: {_FIX}"
        except (OSError, ValueError) as error:
            why = f"RAPL: {error}"
    return counters, "" if counters else why


def _part(folder: Path) -> str | None:
    """Returns the part's name, numbered if the kernel does not; None for a part of another part."""
    name = _text(folder / "name")
    if name.startswith((_PACKAGE, "psys")):
        return name
    if name != "dram":
        return None
    above = folder.parent / folder.name.rpartition(":")[0] / "name"  # intel-rapl:0:1 lies in intel-rapl:0
    return f"dram-{_text(above).removeprefix(_PACKAGE)}"


def _text(file: Path) -> str:
    return file.read_text(encoding="ascii").strip()


def _rapl_reader(file: Path, most: int) -> Callable[[], float]:
    """Returns a function for joules since this call, from a file of microjoules that wraps around after ``most``."""
    last, counted = int(_text(file)), 0

    def read() -> float:
        nonlocal last, counted
        now = int(_text(file))
        counted += now - last if now >= last else most - last + now
        last = now
        return counted / 1e6

    return read


def _gpu_reader(nvml: Any, number: int) -> Callable[[], float]:
    """Returns a function for a GPU's joules, by its UUID if known: NVML ignores CUDA_VISIBLE_DEVICES."""
    import torch

    identity = getattr(torch.cuda.get_device_properties(number), "uuid", None) if torch.cuda.is_available() else None
    if identity is None:
        handle = nvml.nvmlDeviceGetHandleByIndex(number)
    else:
        handle = nvml.nvmlDeviceGetHandleByUUID(f"GPU-{identity}")
    return lambda: float(nvml.nvmlDeviceGetTotalEnergyConsumption(handle)) / 1e3
