"""Files that make a folder look like the root of a machine with NVIDIA GPUs, for tests of what looks at such files."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

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
    "site-packages/nvidia/cu13/include/cufile.h": "",
}


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
