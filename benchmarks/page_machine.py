"""What the page says of the machine that results come from: nvme-report's words."""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from benchmarks.page_scrub import ROOT
from nvme_ops.bench import machine

# Of the report: what bears on the figures and is the same at the next run.
_SETTINGS = {
    "environment": ("io_uring sysctl", "seccomp", "memlock limit", "transparent huge pages"),
    "cufile": ("GPU", "NVIDIA driver", "nvidia-fs", "path of GPU tensors"),
}
_PLACE = ("file system", "O_DIRECT", "alignment", "device")
_PACKAGES = ("deepspeed", "numpy", "safetensors")

Description = dict[str, Any]


def describe(places: Mapping[str, str]) -> Description:
    """Processor, versions and settings; and by name what is known of each place. Raises OSError without a report."""
    report = _report(list(places.values()))
    sections = {name: report["sections"].get(name, {}) for name in _SETTINGS}
    if sections["cufile"].get("GPU", {}).get("status", "NO") == "NO":
        del sections["cufile"]
    settings = {
        name: result["detail"]
        for section, results in sections.items()
        for name, result in results.items()
        if name in _SETTINGS[section]
    }
    return {
        "machine": {**machine.machine(), **_versions()},
        "settings": settings,
        "places": {
            name: {each: found[each]["detail"] for each in _PLACE if each in found}
            for name, found in ((name, report["storage"][folder]) for name, folder in places.items())
        },
    }


def environment() -> dict[str, str]:
    """In which this package is found, and the programs beside this interpreter."""
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")])),
        "PATH": os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", os.defpath)]),
    }


def _report(folders: list[str]) -> dict[str, Any]:
    command = [sys.executable, "-m", "nvme_ops.report", "--json", *(["--path", *folders] if folders else [])]
    done = subprocess.run(command, env=environment(), stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"nvme-report: {(done.stderr.strip() or 'no output').splitlines()[-1]}")
    report: dict[str, Any] = json.loads(done.stdout)
    return report


def _versions() -> dict[str, str]:
    found = {}
    try:
        said = subprocess.run(["fio", "--version"], stdin=subprocess.DEVNULL, capture_output=True, text=True)
        found["fio"] = said.stdout.strip().removeprefix("fio-")
    except OSError:
        pass
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
