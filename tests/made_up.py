"""Machines, programs and libraries that are made up, for tests of what looks at a machine's files and runs programs."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from nvme_ops.op_builder import GDSBuilder, machine

_LIBRARIES = "usr/lib/x86_64-linux-gnu"

#: Two GPUs and their driver; nothing of cuFile.
WITH_GPU = {
    "proc/driver/nvidia/gpus/0000:01:00.0/information": "Model: \t\t NVIDIA H200\nIRQ: 1\n",
    "proc/driver/nvidia/gpus/0000:02:00.0/information": "Model: \t\t NVIDIA H200\nIRQ: 2\n",
    "proc/driver/nvidia/version": "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build",
    "dev/nvidia0": "",
    "dev/nvidia1": "",
    "dev/nvidiactl": "",
    f"{_LIBRARIES}/libcuda.so.1": "",
}

#: All that GPUDirect Storage needs.
EVERYTHING = {
    **WITH_GPU,
    "proc/modules": "",
    "run/udev/data/b8:0": "",
    "proc/driver/nvidia-fs/version": "version: 2.22.3\n",
    "dev/nvidia-fs0": "",
    "site-packages/nvidia/cu13/lib/libcufile.so.0": "",
}


def without(*names: str) -> dict[str, str]:
    """Everything but the files whose paths contain one of ``names``."""
    return {file: text for file, text in EVERYTHING.items() if not any(name in file for name in names)}


class ForAGpu(GDSBuilder):
    """The gds op of a machine that lies at ``root``; nothing ever compiles it."""

    def __init__(self, root: Path) -> None:
        super().__init__()
        self.host = machine.Host(root)

    def toolchain_problem(self) -> str | None:
        return None

    def _libaio_flags(self) -> list[str]:
        return []


def executable(path: Path, script: str = "exit 0") -> Path:
    """Makes a program of a shell script."""
    put(path.parent, {path.name: f"#!/bin/sh\n{script}\n"})
    path.chmod(0o755)
    return path


def library(path: Path, source: str, *flags: str) -> Path:
    """Compiles a shared object."""
    compiler = machine.find_compiler()
    assert compiler is not None
    put(path.parent, {f"{path.name}.cpp": source})
    done = compiler.run("-std=c++17", "-shared", "-fPIC", *flags, f"{path}.cpp", "-o", str(path))
    assert done.returncode == 0, done.stdout
    return path


def put(folder: Path, files: Mapping[str, str]) -> None:
    """Write the files, by their paths below ``folder``."""
    for name, text in files.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)


def clear_environment(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Keep this machine's own libraries and settings out of sight: packages come from ``folder/site-packages``."""
    monkeypatch.setattr(sys, "path", [str(folder / "site-packages")])
    monkeypatch.setattr(sys, "prefix", str(folder))
    monkeypatch.setenv("CUDA_HOME", str(folder / "no-toolkit"))
    for name in ("LD_LIBRARY_PATH", "CONDA_PREFIX", "CUDA_VISIBLE_DEVICES", "NVME_OPS_GDS", "NVME_OPS_CUFILE_LIBRARY"):
        monkeypatch.delenv(name, raising=False)
    for name in ("CUFILE_ENV_PATH_JSON", "CUFILE_FORCE_COMPAT_MODE", "CUFILE_USE_PCIP2PDMA"):
        monkeypatch.delenv(name, raising=False)
