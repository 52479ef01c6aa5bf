"""The cuFile lines: what is found where, in the order in which the op loads it, which way tensors would go, no opening.

The machines are made up of files: nothing here says anything about a real GPU.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from nvme_ops.op_builder import cufile as op_cufile
from nvme_ops.op_builder.machine import Host
from nvme_ops.report import gds, ops
from nvme_ops.report.result import Result, Status
from tests.made_up_gpu import EVERYTHING, WITH_GPU, clear_environment, put

ROOT = Path(__file__).parents[2]
WAY = "path of GPU tensors"


@pytest.fixture(autouse=True)
def no_cufile_of_this_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Keep this machine's own libraries and settings out of sight, and have a torch with CUDA."""
    clear_environment(monkeypatch, tmp_path)
    monkeypatch.setattr(ops, "torch_build", lambda: ("2.13.0+cu130", "13.0"))


def machine(folder: Path, *layers: Mapping[str, str]) -> Host:
    for layer in layers:
        put(folder, layer)
    return Host(folder)


def section(host: Host) -> dict[str, Result]:
    results = {result.name: result for result in gds.section(host)}
    for result in results.values():
        assert result.fix or not result.status.needs_fix, result
        assert result.status is not Status.FAIL, result
    return results


def settings(folder: Path, **properties: bool) -> None:
    put(folder, {"etc/cufile.json": json.dumps({"properties": properties})})


def test_without_a_gpu_only_the_gpu_is_complained_about(tmp_path: Path) -> None:
    found = section(Host(tmp_path))
    assert found.pop("GPU").status is Status.NO
    assert {result.status for result in found.values()} == {Status.INFO, Status.OKAY}
    assert [name for name, result in found.items() if result.status is Status.OKAY] == ["torch with CUDA"]


def test_with_a_gpu_every_missing_part_names_its_fix(tmp_path: Path) -> None:
    found = section(machine(tmp_path, WITH_GPU))
    assert found["GPU"].detail == "2 x NVIDIA H200"
    assert found["NVIDIA driver"].detail == "580.65.06"
    assert found["cuFile library"].status is Status.NO
    assert "pip install nvidia-cufile" in found["cuFile library"].fix
    assert found["nvidia-fs"].status is Status.WARNING
    assert "modprobe nvidia-fs" in found["nvidia-fs"].fix
    assert found["kernel modules"].status is Status.NO
    assert found["udev data"].status is Status.WARNING
    assert "CUFILE_EXPERIMENTAL_FS=1" in found["udev data"].fix


def test_with_everything_there_nothing_is_complained_about(tmp_path: Path) -> None:
    found = section(machine(tmp_path, EVERYTHING))
    assert {result.status for result in found.values()} == {Status.OKAY, Status.INFO}
    assert found["nvidia-fs"].detail == "2.22.3"
    assert found[WAY].status is Status.OKAY


def test_a_torch_without_cuda_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "torch_build", lambda: ("2.13.0+cpu", None))
    result = section(machine(tmp_path, EVERYTHING))["torch with CUDA"]
    assert result.status is Status.NO
    assert "2.13.0+cpu" in result.detail
    assert "pip install" in result.fix


def test_the_library_that_the_op_would_load_is_the_one_shown(tmp_path: Path) -> None:
    result = section(machine(tmp_path, EVERYTHING))["cuFile library"]
    place = op_cufile.find(Host(tmp_path))
    assert place is not None
    assert (result.data["source"], result.data["path"]) == ("site-packages", str(place[1]))


def test_the_version_is_read_from_the_file_that_a_link_points_to(tmp_path: Path) -> None:
    put(tmp_path, {"no-toolkit/lib64/libcufile.so.1.15.1": ""})
    (tmp_path / "no-toolkit/lib64/libcufile.so.0").symlink_to("libcufile.so.1.15.1")
    result = section(Host(tmp_path))["cuFile library"]
    assert result.data["version"] == "1.15.1"
    assert result.detail.startswith("1.15.1, ")


def test_without_nvidia_fs_peer_to_peer_serves_where_it_is_set_up(tmp_path: Path) -> None:
    host = machine(tmp_path, EVERYTHING, PEERS)
    (tmp_path / "proc/driver/nvidia-fs/version").unlink()
    (tmp_path / "proc/driver/nvidia-fs").rmdir()
    found = section(host)
    assert found["nvidia-fs"].status is Status.INFO
    assert found["PCI peer-to-peer"].status is Status.OKAY
    assert found[WAY].data["paths"] == ["gds", "bounce"]


PEERS = {
    "proc/sys/kernel/osrelease": "6.8.0-made-up",
    "boot/config-6.8.0-made-up": "CONFIG_PCI=y\nCONFIG_PCI_P2PDMA=y\n",
    "proc/driver/nvidia/params": 'RegistryDwords: "RMForceStaticBar1=1;RmForceDisableIomapWC=1"\n',
    "sys/module/nvme_core/parameters/multipath": "N\n",
    "etc/cufile.json": '{"properties": {"use_pci_p2pdma": true}}',
}
MISSING_PEERS = {
    "kernel": ({"boot/config-6.8.0-made-up": "# CONFIG_PCI_P2PDMA is not set\n"}, "CONFIG_PCI_P2PDMA"),
    "proprietary driver": (
        {"proc/driver/nvidia/version": "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.65.06"},
        "the driver is not NVIDIA's open one",
    ),
    "old driver": (
        {"proc/driver/nvidia/version": "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  550.1.1"},
        "565 or later",
    ),
    "multipath": ({"sys/module/nvme_core/parameters/multipath": "Y\n"}, "multipath is on"),
    "settings": ({"etc/cufile.json": "{}"}, "use_pci_p2pdma is not set in /etc/cufile.json"),
}


@pytest.mark.parametrize(("change", "words"), MISSING_PEERS.values(), ids=MISSING_PEERS.keys())
def test_what_keeps_peers_apart_is_named(change: dict[str, str], words: str, tmp_path: Path) -> None:
    result = section(machine(tmp_path, EVERYTHING, PEERS, change))["PCI peer-to-peer"]
    assert result.status is Status.INFO
    assert words in result.detail
    assert len(result.data["obstacles"]) == 1  # type: ignore[arg-type]


def test_the_iommu_is_told(tmp_path: Path) -> None:
    host = machine(tmp_path, EVERYTHING, PEERS)
    assert "(IOMMU off)" in section(host)["PCI peer-to-peer"].detail
    (tmp_path / "sys/kernel/iommu_groups/0").mkdir(parents=True)
    assert section(host)["PCI peer-to-peer"].data["iommu"] == "on"
    put(tmp_path, {"proc/cmdline": "quiet iommu=pt"})
    assert section(host)["PCI peer-to-peer"].data["iommu"] == "in pass-through"


@pytest.mark.parametrize(("text", "expected"), [("x p2pdma_pgmap_ops\n", True), ("x something_else\n", False)])
def test_a_kernel_without_its_configuration_is_judged_by_its_symbols(text: str, expected: bool, tmp_path: Path) -> None:
    host = machine(tmp_path, EVERYTHING, PEERS, {"proc/kallsyms": text})
    (tmp_path / "boot/config-6.8.0-made-up").unlink()
    assert section(host)["PCI peer-to-peer"].data["possible"] is expected


def without_nvidia_fs(folder: Path) -> Host:
    return machine(folder, {name: text for name, text in EVERYTHING.items() if "nvidia-fs" not in name})


def test_without_a_direct_way_it_is_cufile_or_our_own(tmp_path: Path) -> None:
    result = section(without_nvidia_fs(tmp_path))[WAY]
    assert result.status is Status.INFO
    assert result.data["paths"] == ["compat", "bounce"]
    assert "neither nvidia-fs nor PCI peer-to-peer" in result.detail


def test_require_without_a_direct_way_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NVME_OPS_GDS", "require")
    result = section(without_nvidia_fs(tmp_path))[WAY]
    assert result.status is Status.NO
    assert "RuntimeError" in result.detail
    assert result.fix.startswith("unset NVME_OPS_GDS")


def test_off_is_bounce_and_needs_no_library_nor_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NVME_OPS_GDS", "off")
    found = section(machine(tmp_path, WITH_GPU))
    assert found[WAY].data["paths"] == ["bounce"]
    assert found["cuFile library"].status is Status.INFO
    assert found["kernel modules"].status is Status.INFO


def test_an_unknown_mode_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NVME_OPS_GDS", "maybe")
    result = section(machine(tmp_path, EVERYTHING))[WAY]
    assert (result.status, result.fix) == (Status.NO, "unset NVME_OPS_GDS")


def test_a_missing_part_leaves_no_way_and_names_the_part(tmp_path: Path) -> None:
    result = section(machine(tmp_path, WITH_GPU))[WAY]
    assert result.status is Status.NO
    assert "cuFile library, kernel modules" in result.detail
    assert "NVME_OPS_GDS=off" in result.fix


def test_forced_compatibility_is_never_direct(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    host = machine(tmp_path, EVERYTHING)
    settings(tmp_path, force_compat_mode=True)
    assert section(host)[WAY].data["paths"] == ["compat", "bounce"]
    assert "/etc/cufile.json" in section(host)[WAY].detail
    settings(tmp_path, force_compat_mode=False)
    assert section(host)[WAY].data["paths"] == ["gds", "bounce"]
    monkeypatch.setenv("CUFILE_FORCE_COMPAT_MODE", "true")
    assert "CUFILE_FORCE_COMPAT_MODE" in section(host)[WAY].detail


def test_without_a_direct_way_and_without_compatibility_there_is_none(tmp_path: Path) -> None:
    host = without_nvidia_fs(tmp_path)
    settings(tmp_path, allow_compat_mode=False)
    result = section(host)[WAY]
    assert result.status is Status.NO
    assert "allow_compat_mode is false" in result.detail
    assert "/etc/cufile.json" in result.fix


def test_looking_loads_no_library_and_leaves_cuda_alone() -> None:
    script = """
import torch
def loaded():
    return {line.split()[-1] for line in open("/proc/self/maps") if ".so" in line and "libcu" in line}
before = loaded()
from nvme_ops.op_builder import GDSBuilder
from nvme_ops.report import gds
from nvme_ops.op_builder.machine import Host
gds.section(Host())
GDSBuilder().pieces()
assert loaded() == before
assert not torch.cuda.is_initialized()
"""
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, env=dict(os.environ), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
