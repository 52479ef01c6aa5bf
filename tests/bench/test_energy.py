"""Joules of a made-up machine: RAPL's counters in a folder, NVML as a module of our own."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from nvme_ops.measure.energy import Meter, total, used
from tests.conftest import give_up_root, in_child, open_to_all

RANGE = 262_143_328_850  # microjoules, of a real processor


def counter(sysfs: Path, folder: str, name: str, microjoules: int) -> Path:
    """Adds one to the tree; returns the file that counts."""
    place = sysfs / "class/powercap" / folder
    place.mkdir(parents=True)
    (place / "name").write_text(f"{name}\n")
    (place / "max_energy_range_uj").write_text(f"{RANGE}\n")
    file = place / "energy_uj"
    file.write_text(f"{microjoules}\n")
    return file


def made_up_nvml(millijoules: dict[int, int], refusal: str = "") -> ModuleType:
    """As much of pynvml as is called."""
    module: Any = ModuleType("pynvml")

    class NVMLError(Exception):
        pass

    def start() -> None:
        if refusal:
            raise NVMLError(refusal)

    def by_index(number: int) -> int:
        if number not in millijoules:
            raise NVMLError("Invalid Argument")
        return number

    module.NVMLError, module.nvmlInit = NVMLError, start
    module.nvmlDeviceGetHandleByIndex = by_index
    module.nvmlDeviceGetTotalEnergyConsumption = millijoules.__getitem__
    return module


@pytest.fixture(autouse=True)
def _no_real_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)


def test_packages_their_memory_and_the_platform_are_told(tmp_path: Path) -> None:
    for folder, name in {
        "intel-rapl:0": "package-0", "intel-rapl:0:0": "core", "intel-rapl:0:1": "dram", "intel-rapl:1": "package-1",
        "intel-rapl:1:0": "uncore", "intel-rapl:1:1": "dram", "intel-rapl:2": "psys", "intel-rapl-mmio:0": "package-0",
    }.items():  # fmt: skip
        counter(tmp_path, folder, name, 5)
    meter = Meter(sysfs=str(tmp_path))
    assert sorted(meter.read()) == ["dram-0", "dram-1", "package-0", "package-1", "psys"]
    assert meter.unavailable() == ""


def test_differences_are_joules(tmp_path: Path) -> None:
    file = counter(tmp_path, "intel-rapl:0", "package-0", 1_000_000)
    meter = Meter(sysfs=str(tmp_path))
    before = meter.read()
    file.write_text("3500000\n")
    assert used(before, meter.read()) == {"package-0": 2.5}


def test_a_counter_that_wraps_around_counts_on(tmp_path: Path) -> None:
    file = counter(tmp_path, "intel-rapl:0", "package-0", RANGE - 1_000_000)
    meter = Meter(sysfs=str(tmp_path))
    before = meter.read()
    file.write_text("500000\n")
    between = meter.read()
    file.write_text("100000\n")
    assert used(before, between)["package-0"] == pytest.approx(1.5)
    assert used(between, meter.read())["package-0"] == pytest.approx(RANGE / 1e6 - 0.4)


def test_a_machine_without_rapl_says_so(tmp_path: Path) -> None:
    meter = Meter(sysfs=str(tmp_path))
    assert meter.unavailable().startswith(f"not available: no RAPL in {tmp_path}/class/powercap")
    assert used(meter.read(), meter.read()) == {}


def test_where_there_is_nothing_no_file_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    meter = Meter(sysfs=str(tmp_path))

    def forbidden(*_: object, **__: object) -> None:
        raise AssertionError("a file was read")

    monkeypatch.setattr(Path, "read_text", forbidden)
    monkeypatch.setattr(Path, "open", forbidden)
    assert meter.read() == {}


def test_counters_for_root_only_say_how_to_open_them(tmp_path: Path) -> None:
    open_to_all(tmp_path)
    counter(tmp_path, "intel-rapl:0", "package-0", 1).chmod(0o400 if os.geteuid() == 0 else 0)

    def body() -> None:
        give_up_root()
        meter = Meter(sysfs=str(tmp_path))
        assert meter.read() == {}
        assert meter.unavailable() == (
            "not available: RAPL is readable by root only: sudo chmod a+r /sys/class/powercap/*/energy_uj"
        )

    in_child(body)


def test_a_counter_without_a_number_is_told(tmp_path: Path) -> None:
    counter(tmp_path, "intel-rapl:0", "package-0", 1).write_text("broken")
    assert "invalid literal" in Meter(sysfs=str(tmp_path)).unavailable()


def test_counters_of_cores_alone_do_not_stand_for_the_machine(tmp_path: Path) -> None:
    counter(tmp_path, "intel-rapl:0:0", "core", 1)
    assert "no package among the counters" in Meter(sysfs=str(tmp_path)).unavailable()


def test_a_gpu_tells_its_energy(tmp_path: Path) -> None:
    counters = {0: 5_000, 1: 7_000}
    meter = Meter([1, 1], str(tmp_path), made_up_nvml(counters))
    before = meter.read()
    counters[1] += 2_500
    assert used(before, meter.read()) == {"gpu-1": 2.5}
    assert meter.unavailable() == ""


def test_nvml_is_asked_only_when_the_run_uses_a_gpu(tmp_path: Path) -> None:
    meter = Meter(sysfs=str(tmp_path), nvml=made_up_nvml({}, "must not be used"))
    assert "must not" not in meter.unavailable()


def test_a_missing_nvml_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert Meter([0], str(tmp_path)).unavailable().endswith("pip install nvidia-ml-py")


@pytest.mark.parametrize(("gpu", "refusal", "words"), [(0, "Driver Not Loaded", "Driver Not"), (9, "", "Invalid Arg")])
def test_a_refusal_of_nvml_is_told(tmp_path: Path, gpu: int, refusal: str, words: str) -> None:
    meter = Meter([gpu], str(tmp_path), made_up_nvml({0: 1}, refusal))
    assert f"NVML: {words}" in meter.unavailable()
    assert meter.read() == {}


def test_a_counter_that_goes_away_is_left_out(tmp_path: Path) -> None:
    file = counter(tmp_path, "intel-rapl:0", "package-0", 1)
    counter(tmp_path, "intel-rapl:1", "package-1", 1)
    meter = Meter(sysfs=str(tmp_path))
    before = meter.read()
    file.unlink()
    assert used(before, meter.read()) == {"package-1": 0.0}


def test_a_sum_counts_nothing_twice() -> None:
    assert total({"package-0": 3.0, "dram-0": 1.0, "gpu-0": 5.0}) == 9.0
    assert total({"package-0": 3.0, "dram-0": 1.0, "psys": 6.0, "gpu-0": 5.0}) == 11.0
