"""Joules of a made-up machine: RAPL's counters in a folder, NVML as a module of our own."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from nvme_ops.base.energy import Meter, total, used

RANGE = 262_143_328_850  # microjoules, of a real processor


def counter(sysfs: Path, folder: str, name: str, microjoules: int = 1) -> Path:
    """Adds one to the tree; returns the file that counts."""
    place = sysfs / "class/powercap" / folder
    place.mkdir(parents=True)
    for file, text in (("name", name), ("max_energy_range_uj", RANGE), ("energy_uj", microjoules)):
        (place / file).write_text(f"{text}\n")
    return place / "energy_uj"


def test_parts_are_read_and_a_counter_that_wraps_around_counts_on(tmp_path: Path) -> None:
    first = counter(tmp_path, "intel-rapl:0", "package-0", RANGE - 1_000_000)
    for folder, name in {
        "intel-rapl:0:0": "core", "intel-rapl:0:1": "dram", "intel-rapl:1": "package-1", "intel-rapl:1:0": "uncore",
        "intel-rapl:1:1": "dram", "intel-rapl:2": "psys", "intel-rapl-mmio:0": "package-0",
    }.items():  # fmt: skip
        counter(tmp_path, folder, name)
    meter = Meter(sysfs=str(tmp_path))
    before = meter.read()
    assert sorted(before) == ["dram-0", "dram-1", "package-0", "package-1", "psys"]
    first.write_text("500000\n")
    (tmp_path / "class/powercap/intel-rapl:1/energy_uj").unlink()  # which is left out then
    assert used(before, meter.read()) == {"package-0": pytest.approx(1.5), "dram-0": 0, "dram-1": 0, "psys": 0}
    assert total({"package-0": 3.0, "dram-0": 1.0, "gpu-0": 5.0}) == 9.0
    assert total({"package-0": 3.0, "dram-0": 1.0, "psys": 6.0, "gpu-0": 5.0}) == 11.0, "nothing counts twice"


def test_a_gpu_tells_its_energy_and_what_is_missing_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    counters = [5_000, 7_000]
    nvml = SimpleNamespace(NVMLError=ValueError, nvmlInit=lambda: None, nvmlDeviceGetHandleByIndex=int,
                           nvmlDeviceGetTotalEnergyConsumption=counters.__getitem__)  # fmt: skip
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    meter = Meter([1], str(tmp_path))
    before = meter.read()
    counters[1] += 2_500
    assert (used(before, meter.read()), meter.unavailable()) == ({"gpu-1": 2.5}, "")
    counter(tmp_path, "intel-rapl:0", "package-0").write_text("broken")
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert re.search("invalid literal.*pip install nvidia-ml-py", Meter([0], str(tmp_path)).unavailable())
