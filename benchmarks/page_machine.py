"""What the page says of the machine that results come from, and what it must not say: folders, hosts, users."""

from __future__ import annotations

import contextlib
import getpass
import importlib.metadata
import os
import re
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from typing import Any

from benchmarks.command import ROOT
from nvme_ops.bench import machine
from nvme_ops.op_builder.machine import Host
from nvme_ops.report.cli import collect
from nvme_ops.report.result import Status
from nvme_ops.storage.device import mount_of

# Of the report: what bears on the figures and is the same at the next run.
_SETTINGS = {
    "environment": ("io_uring sysctl", "seccomp", "memlock limit", "transparent huge pages"),
    "cufile": ("GPU", "NVIDIA driver", "nvidia-fs", "path of GPU tensors"),
}
_PACKAGES = ("deepspeed", "numpy", "safetensors")

_DIGITS = 6  # of a figure
_HOMES = re.compile(r"/(?:home|Users)/[^/\s'\"]+|/root(?![\w.-])")
_IMAGES = re.compile(r"/[^\s,;'\"]+\.img\b")  # behind loop devices
_COMMON = {"root", "localhost", ""}  # they name nobody, and mean other things too

Scrub = Callable[[Any], Any]


def describe(places: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """Processor, versions and settings; and by name what is known of each place. In nvme-report's words."""
    report = {name: {each.name: each for each in results} for name, results in collect(Host(), False).items()}
    gpu = report["cufile"].get("GPU")
    settings = {
        name: result.detail
        for section, names in _SETTINGS.items()
        if section != "cufile" or (gpu is not None and gpu.status is not Status.NO)
        for name, result in report[section].items()
        if name in names
    }
    known = {name: machine.place(folder) for name, folder in places.items()}
    return {"machine": {**machine.machine(), **_versions()}, "settings": settings, "places": known}


def _versions() -> dict[str, str]:
    found = {}
    with contextlib.suppress(OSError):
        said = subprocess.run(["fio", "--version"], stdin=subprocess.DEVNULL, capture_output=True, text=True)
        found["fio"] = said.stdout.strip().removeprefix("fio-")
    for package in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found


def scrub_for(places: Mapping[str, str], gone: str = "") -> Scrub:
    """A function that gives any JSON value with names instead of paths, and figures of six digits.

    Args:
        places: measured folders by the name that stands for them.
        gone: a folder that results were written to; what lies in it is left with its bare name.
    """
    folders = [(str(ROOT), "CHECKOUT"), (tempfile.gettempdir(), "TMP"), (os.path.expanduser("~"), "~")]
    if sys.prefix != sys.base_prefix:  # an environment, and not /usr
        folders.append((sys.prefix, "PYTHON"))
    mounts = [(mount_of(Host(), folder), name) for name, folder in places.items()]  # a place may lie below one
    folders += [(mount.point, name) for mount, name in reversed(mounts) if mount is not None]
    folders += [(folder, name) for name, folder in places.items()]
    names = {each: name for folder, name in folders for each in (os.path.abspath(folder), os.path.realpath(folder))}
    names |= {os.path.join(each, ""): "" for each in (gone, os.path.realpath(gone)) if gone}
    names.pop("/", None)
    words = dict.fromkeys(_hosts(), "HOST") | dict.fromkeys(_users(), "USER")
    release = os.uname().release
    number = re.match(r"[\d.]*\d", release)
    words[release] = number[0] if number else release

    ends = dict.fromkeys(names, "") | dict.fromkeys(words, r"(?![\w-]|\.\w)")
    longest = sorted(ends, key=len, reverse=True)
    pattern = re.compile(rf"(?<![\w.-])(?:{'|'.join(re.escape(word) + ends[word] for word in longest)})")
    names |= words

    def scrub(value: Any) -> Any:
        if isinstance(value, str):
            return _HOMES.sub("~", _IMAGES.sub("an image file", pattern.sub(lambda found: names[found[0]], value)))
        if isinstance(value, dict):
            return {scrub(str(key)): scrub(item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [scrub(item) for item in value]
        return float(f"{value:.{_DIGITS}g}") if isinstance(value, float) else value

    return scrub


def _hosts() -> set[str]:
    names = {socket.gethostname(), os.uname().nodename}
    return {part for name in names for part in (name, name.partition(".")[0])} - _COMMON


def _users() -> set[str]:
    names = {os.environ.get(name, "") for name in ("USER", "LOGNAME", "SUDO_USER")}
    with contextlib.suppress(KeyError, OSError):  # no such user
        names.add(getpass.getuser())
    return names - _COMMON
