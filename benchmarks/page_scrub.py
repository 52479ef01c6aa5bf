"""Takes out of results what belongs to the machine they were made on and not to them: folders, hosts, users."""

from __future__ import annotations

import contextlib
import getpass
import os
import re
import socket
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from nvme_ops.report.host import Host
from nvme_ops.report.mounts import mount_of

ROOT = Path(__file__).parent.parent
_DIGITS = 6  # of a figure
_HOMES = re.compile(r"/(?:home|Users)/[^/\s'\"]+|/root(?![\w.-])")
_IMAGES = re.compile(r"/[^\s,;'\"]+\.img\b")  # behind loop devices
_COMMON = {"root", "localhost", ""}  # they name nobody, and mean other things too

Scrub = Callable[[Any], Any]


def scrub_for(places: Mapping[str, str], gone: str = "") -> Scrub:
    """A function that gives any JSON value with names instead of paths, and figures of six digits.

    Args:
        places: measured folders by the name that stands for them.
        gone: a folder that results were written to; what lies in it is left with its bare name.
    """
    paths = {os.path.join(folder, ""): "" for folder in _spellings(gone)} if gone else {}
    for name, folder in places.items():
        paths |= dict.fromkeys(_spellings(folder), name)
    for name, folder in places.items():  # a place may be a folder below the mount
        mount = mount_of(Host(), folder)
        if mount is not None:
            paths.setdefault(mount.point, name)
    folders = {str(ROOT): "CHECKOUT", tempfile.gettempdir(): "TMP", os.path.expanduser("~"): "~"}
    if sys.prefix != sys.base_prefix:  # an environment, and not /usr
        folders[sys.prefix] = "PYTHON"
    for folder, name in folders.items():
        for spelling in _spellings(folder):
            paths.setdefault(spelling, name)
    paths.pop("/", None)
    words = dict.fromkeys(_hosts(), "HOST") | dict.fromkeys(_users(), "USER")
    release = os.uname().release
    number = re.match(r"[\d.]*\d", release)
    words[release] = number[0] if number else release

    patterns = {word: re.compile(rf"(?<![\w.-]){re.escape(word)}") for word in paths}
    patterns |= {word: re.compile(rf"(?<![\w.-]){re.escape(word)}(?![\w-]|\.\w)") for word in words}
    known = {**paths, **words}
    longest = sorted(known, key=len, reverse=True)

    def scrub_text(text: str) -> str:
        for word in longest:
            text = patterns[word].sub(known[word], text)
        return _HOMES.sub("~", _IMAGES.sub("an image file", text))

    def scrub(value: Any) -> Any:
        if isinstance(value, str):
            return scrub_text(value)
        if isinstance(value, dict):
            return {scrub_text(str(key)): scrub(item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [scrub(item) for item in value]
        return float(f"{value:.{_DIGITS}g}") if isinstance(value, float) else value

    return scrub


def _spellings(folder: str) -> list[str]:
    return list(dict.fromkeys([os.path.abspath(folder), os.path.realpath(folder)]))


def _hosts() -> set[str]:
    names = {socket.gethostname(), os.uname().nodename}
    return {part for name in names for part in (name, name.partition(".")[0])} - _COMMON


def _users() -> set[str]:
    names = {os.environ.get(name, "") for name in ("USER", "LOGNAME", "SUDO_USER")}
    with contextlib.suppress(KeyError, OSError):  # no such user
        names.add(getpass.getuser())
    return names - _COMMON
