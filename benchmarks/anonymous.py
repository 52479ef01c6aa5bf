"""What a page says about the machine, and what it must not say: its folders."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from typing import Any

from benchmarks.command import ROOT
from nvme_ops.filesystem.device import mount_of
from nvme_ops.measure import machine
from nvme_ops.op_builder.machine import Host
from nvme_ops.report.cli import collect
from nvme_ops.report.result import Status

# Lines of the report that affect the figures and are the same in the next run
_SETTINGS = ("io_uring sysctl", "seccomp", "memlock limit", "transparent huge pages", "GPU", "NVIDIA driver",
             "nvidia-fs", "path of GPU tensors")  # fmt: skip


def describe(places: Mapping[str, str]) -> dict[str, Mapping[str, Any]]:
    """Returns processor, versions, settings, and the facts of each place by name, as nvme-report words them."""
    report = {result.name: result for group in collect(Host(), False).values() for result in group}
    known = {name: report[name] for name in _SETTINGS if name in report}
    settings = {name: result.detail for name, result in known.items() if result.status is not Status.NO}
    versions = {}
    if fio := shutil.which("fio"):
        versions["fio"] = subprocess.run([fio, "--version"], capture_output=True, text=True).stdout.strip()[4:]
    for package in ("deepspeed", "numpy", "safetensors"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    facts = {name: machine.place(folder) for name, folder in places.items()}
    return {"machine": {**machine.machine(), **versions}, "settings": settings, "places": facts}


def scrub_for(places: Mapping[str, str], scratch: str) -> Callable[[Any], Any]:
    """Returns a function that replaces paths by names in any JSON value, and rounds figures to six digits.

    Args:
        places: measured folders by the name that stands for them.
        scratch: the folder that results are written to.
    """
    folders = {str(ROOT): "CHECKOUT", tempfile.gettempdir(): "TMP", scratch: "SCRATCH", sys.prefix: "PYTHON"}
    mounts = {mount.point: name for name, folder in places.items() if (mount := mount_of(Host(), folder))}
    folders |= {os.path.expanduser("~"): "~"} | mounts | {folder: name for name, folder in places.items()}
    words = {os.path.realpath(folder): word for folder, word in folders.items()} | folders
    words[os.uname().release] = re.split(r"[^\d.]", os.uname().release)[0]  # without who made the kernel
    names = sorted(set(words) - {"/", "/usr", sys.base_prefix}, key=len, reverse=True)
    pattern = re.compile(rf"(?<![\w.-])(?:{'|'.join(map(re.escape, names))})(?![\w-]|\.\w)")

    def scrub(value: Any) -> Any:
        if isinstance(value, str):
            return re.sub(r"/[^\s,;'\"]+\.img\b", "an image file", pattern.sub(lambda match: words[match[0]], value))
        if isinstance(value, dict):
            return {scrub(str(key)): scrub(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [scrub(item) for item in value]
        return float(f"{value:.6g}") if isinstance(value, float) else value

    return scrub
