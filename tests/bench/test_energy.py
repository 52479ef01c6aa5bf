"""Joules of a made-up machine: RAPL's counters in a folder, NVML as a module of our own."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nvme_ops.base.energy import Meter, total, used

RANGE = 262_143_328_850  # microjoules, of a real processor


def counter(sysfs: Path, folder: str, name: str, microjoules: int = 1) -> Path:
    """Adds one to the tree; returns the file that counts."""
    place = sysfs / "class/powercap" / folder
    place.mkdir(parents=True)
    (place / "name").write_text(f"{name}\n")
    (place / "max_energy_range_uj").write_text(f"{RANGE}\n")
    file = place / "energy_uj"
    file.write_text(f"{microjoules}\n")
    return file


def made_up_nvml(millijoules: dict[int, int], refusal: str = "") -> Any:
    """As much of pynvml as is called."""

    class NVMLError(Exception):
        pass

    def start() -> None:
        if refusal:
            raise NVMLError(refusal)

    def by_index(number: int) -> int:
        if number not in millijoules:
            raise NVMLError("Invalid Argument")
        return number

    energy = millijoules.__getitem__
    return SimpleNamespace(NVMLError=NVMLError, nvmlInit=start, nvmlDeviceGetHandleByIndex=by_index,
                           nvmlDeviceGetTotalEnergyConsumption=energy)  # fmt: skip


@pytest.fixture(autouse=True)
def _no_real_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)


def test_packages_memory_and_the_platform_are_told_and_a_counter_that_wraps_around_counts_on(tmp_path: Path) -> None:
    first = counter(tmp_path, "intel-rapl:0", "package-0", RANGE - 1_000_000)
    for folder, name in {
        "intel-rapl:0:0": "core", "intel-rapl:0:1": "dram", "intel-rapl:1": "package-1", "intel-rapl:1:0": "uncore",
        "intel-rapl:1:1": "dram", "intel-rapl:2": "psys", "intel-rapl-mmio:0": "package-0",
    }.items():  # fmt: skip
        counter(tmp_path, folder, name)
    meter = Meter(sysfs=str(tmp_path))
    before = meter.read()
    assert sorted(before) == ["dram-0", "dram-1", "package-0", "package-1", "psys"]
    assert meter.unavailable() == ""
    first.write_text("500000\n")
    between = meter.read()
    first.write_text("100000\n")
    (tmp_path / "class/powercap/intel-rapl:1/energy_uj").unlink()
    after = meter.read()
    assert used(before, between)["package-0"] == pytest.approx(1.5)
    assert used(between, after)["package-0"] == pytest.approx(RANGE / 1e6 - 0.4)
    assert "package-1" not in used(between, after), "a counter that goes away is left out"


def test_a_machine_without_counters_says_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "no RAPL in" in Meter(sysfs=str(tmp_path)).unavailable()
    assert "must not" not in Meter(sysfs=str(tmp_path), nvml=made_up_nvml({}, "must not be used")).unavailable()
    counter(tmp_path, "intel-rapl:0:0", "core")
    assert "no package among the counters" in Meter(sysfs=str(tmp_path)).unavailable()
    counter(tmp_path, "intel-rapl:0", "package-0").write_text("broken")
    assert "invalid literal" in Meter(sysfs=str(tmp_path)).unavailable()
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert "pip install nvidia-ml-py" in Meter([0], str(tmp_path)).unavailable()


def test_a_gpu_tells_its_energy_or_why_not(tmp_path: Path) -> None:
    counters = {0: 5_000, 1: 7_000}
    meter = Meter([1, 1], str(tmp_path), made_up_nvml(counters))
    before = meter.read()
    counters[1] += 2_500
    assert used(before, meter.read()) == {"gpu-1": 2.5}
    assert meter.unavailable() == ""
    for gpu, refusal, words in ((0, "Driver Not Loaded", "Driver Not"), (9, "", "Invalid Arg")):
        meter = Meter([gpu], str(tmp_path), made_up_nvml({0: 1}, refusal))
        assert f"NVML: {words}" in meter.unavailable()
        assert meter.read() == {}


def test_a_sum_counts_nothing_twice() -> None:
    assert total({"package-0": 3.0, "dram-0": 1.0, "gpu-0": 5.0}) == 9.0
    assert total({"package-0": 3.0, "dram-0": 1.0, "psys": 6.0, "gpu-0": 5.0}) == 11.0
