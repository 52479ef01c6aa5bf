"""The cuFile lines: what is found where, in the order in which the op loads it, and that nothing is opened."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from nvme_ops.report import cufile
from nvme_ops.report.host import Host
from nvme_ops.report.result import Result, Status

ROOT = Path(__file__).parent.parent
VERSION = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build"


@pytest.fixture(autouse=True)
def no_toolkit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Keep this machine's own libraries out of sight."""
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "no-toolkit"))
    monkeypatch.setattr(sys, "path", [str(tmp_path / "site-packages")])
    for name in ("LD_LIBRARY_PATH", cufile.OVERRIDE):
        monkeypatch.delenv(name, raising=False)


def put(folder: Path, *files: str, text: str = "") -> None:
    for name in files:
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)


def with_gpu(folder: Path) -> Host:
    for place in ("0000:01:00.0", "0000:02:00.0"):
        put(folder, f"proc/driver/nvidia/gpus/{place}/information", text="Model: \t\t NVIDIA H200\nIRQ: 1\n")
    put(folder, "proc/driver/nvidia/version", text=VERSION)
    return Host(folder)


def section(host: Host) -> dict[str, Result]:
    return {result.name: result for result in cufile.section(host)}


def test_without_a_gpu_only_the_gpu_is_complained_about(tmp_path: Path) -> None:
    found = section(Host(tmp_path))
    assert found.pop("GPU").status is Status.NO
    assert {result.status for result in found.values()} == {Status.INFO}


def test_with_a_gpu_every_missing_part_names_its_fix(tmp_path: Path) -> None:
    found = section(with_gpu(tmp_path))
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
    host = with_gpu(tmp_path)
    put(tmp_path, "proc/modules", "run/udev/data/b8:0")
    put(tmp_path, "proc/driver/nvidia-fs/version", text="version: 2.22.3\n")
    put(tmp_path, "site-packages/nvidia/cu13/lib/libcufile.so.0", "site-packages/nvidia/cu13/include/cufile.h")
    found = section(host)
    assert {result.status for result in found.values()} == {Status.OKAY}
    assert found["nvidia-fs"].detail == "2.22.3"


def test_a_driver_without_a_visible_gpu_points_at_the_container(tmp_path: Path) -> None:
    put(tmp_path, "proc/driver/nvidia/version", text=VERSION)
    result = section(Host(tmp_path))["GPU"]
    assert result.status is Status.NO
    assert "--gpus all" in result.fix


def test_the_library_is_looked_for_in_the_order_in_which_it_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(cufile.OVERRIDE, "/named/libcufile.so")
    monkeypatch.setenv("LD_LIBRARY_PATH", "/extra/lib")
    put(
        tmp_path,
        "proc/self/maps",
        text="7f00-7f01 r-xp 0 08:01 12    /loaded here/libcufile.so.0\n7f02-7f03 rw-p 0 00:00 0\n",
    )
    (tmp_path / "site-packages/nvidia/cu13/lib").mkdir(parents=True)
    sources = [source for source, _ in cufile.library_candidates(Host(tmp_path))]
    order = list(dict.fromkeys(sources))
    assert order == [cufile.OVERRIDE, "already loaded", "site-packages", "CUDA_HOME", "system"]
    assert list(cufile.library_candidates(Host(tmp_path)))[1][1] == Path("/loaded here/libcufile.so.0")


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("site-packages/nvidia/cu13/lib/libcufile.so.0", "site-packages"),
        ("site-packages/nvidia/cufile/lib/libcufile.so.0", "site-packages"),
        ("no-toolkit/lib64/libcufile.so.0", "CUDA_HOME"),
        ("usr/lib/x86_64-linux-gnu/libcufile.so.0", "system"),
    ],
)
def test_the_library_is_found_wherever_it_lies(file: str, source: str, tmp_path: Path) -> None:
    host = with_gpu(tmp_path)
    put(tmp_path, file)
    result = section(host)["cuFile library"]
    assert (result.status, result.data["source"]) == (Status.OKAY, source)


def test_the_version_is_read_from_the_file_that_a_link_points_to(tmp_path: Path) -> None:
    put(tmp_path, "no-toolkit/lib64/libcufile.so.1.15.1")
    (tmp_path / "no-toolkit/lib64/libcufile.so.0").symlink_to("libcufile.so.1.15.1")
    assert section(Host(tmp_path))["cuFile library"].data["version"] == "1.15.1"


@pytest.mark.parametrize("name", ["relative.so", "/no/such/libcufile.so"])
def test_an_override_that_names_no_file_is_refused(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    host = with_gpu(tmp_path)
    monkeypatch.setenv(cufile.OVERRIDE, name)
    result = section(host)["cuFile library"]
    assert result.status is Status.NO
    assert result.fix == f"unset {cufile.OVERRIDE}"


def test_looking_loads_no_library() -> None:
    script = (
        "from nvme_ops.report import cufile; from nvme_ops.report.host import Host; cufile.section(Host());"
        "maps = open('/proc/self/maps').read(); assert 'libcufile' not in maps and 'libcuda' not in maps"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, env=dict(os.environ), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
