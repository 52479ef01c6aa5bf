"""What the gds op requires: a GPU and its driver, libcufile, nvidia-fs; and which path GPU tensors will take.

Only reads files. The cuFile driver is not opened here (see driver.py), nor CUDA initialised: opening loops for ever on
kernels without modules, needs a CUDA context, and forbids fork afterwards.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import re
from pathlib import Path

from nvme_ops.host import Host
from nvme_ops.op_builder import cufile
from nvme_ops.op_builder.cufile import Requirement

from . import cufile_settings, peer_to_peer, torch_info
from .packages import install_command
from .result import Json, Result, Status, run_checks
from .toolchain import cuda_home

_MODE = cufile.MODE
_MODES = ("auto", "require", "off")


def section(host: Host) -> tuple[Result, ...]:
    """Checks every part of GPUDirect Storage; without a GPU the rest are facts, since nothing could use them."""
    has_gpu = bool(cufile.gpu(host.root).found)
    results = run_checks(
        {
            "cuFile": lambda: [_line(host, piece) for piece in _needed(host)],
            "cuFile header": lambda: _header(host),
            "cuFile settings": lambda: _settings(host),
            "PCI peer-to-peer": lambda: peer_to_peer.check(host),
            "path of GPU tensors": lambda: _way(host),
        }
    )
    return results if has_gpu else tuple(map(_noted, results))


def _noted(result: Result) -> Result:
    if result.name == "GPU" or result.status not in (Status.WARNING, Status.NO):
        return result
    return Result(result.name, Status.INFO, result.detail, data=result.data)


def _needed(host: Host) -> list[Requirement]:
    return cufile.pieces(*torch_info.build(), host.root)


def _line(host: Host, piece: Requirement) -> Result:
    data: dict[str, Json] = dict(piece.data)
    if piece.found:
        words = piece.found
        if isinstance(path := data.get("path"), str):
            data["version"] = version = _version(Path(path))
            words = f"{version}, {words}" if version else words
        return Result(piece.name, Status.OKAY, words, data=data)
    if os.environ.get(_MODE) == "off" and not piece.needed:
        return Result(piece.name, Status.INFO, piece.missing, data=data)
    fix = piece.fix
    if piece.name == "nvidia-fs" and not data["loaded"] and not piece.needed:
        if not peer_to_peer.obstacles(host):
            return Result(piece.name, Status.INFO, "not loaded, PCI peer-to-peer does without", data=data)
        fix = f"{install_command('nvidia-gds')} && modprobe nvidia-fs"
    return Result(piece.name, Status.NO if piece.needed else Status.WARNING, piece.missing, fix, data)


def _version(path: Path) -> str | None:
    if "site-packages" in path.parts:
        wheels = ("nvidia-cufile-cu12", "nvidia-cufile-cu11") if "cufile" in path.parts else ("nvidia-cufile",)
        for wheel in wheels:
            with contextlib.suppress(importlib.metadata.PackageNotFoundError):
                return importlib.metadata.version(wheel)
    found = re.search(r"\.so\.(\d+\.\d+.*)$", path.resolve().name)
    return found[1] if found else None


def _header(host: Host) -> Result:
    toolkit = [Path(home, "include")] if (home := cuda_home(host)) else []
    for folder in [*cufile.wheel_folders("include"), *toolkit, host.path("/usr/include")]:
        path = str(folder / "cufile.h")
        if os.path.isfile(path):
            return Result("cuFile header", Status.OKAY, path, data={"path": path})
    return Result("cuFile header", Status.INFO, "cufile.h not found (no op needs it)", data={"path": None})


def _settings(host: Host) -> Result:
    name, found = "cuFile settings", cufile_settings.read(host)
    data: dict[str, Json] = {
        "path": found.path,
        "allow_compat_mode": found.allow_compatibility,
        "force_compat_mode": found.force_compatibility,
        "use_pci_p2pdma": found.peer_to_peer,
    }
    if found.problem:
        return Result(name, Status.WARNING, found.problem, found.fix, data)
    values = ", ".join(f"{key} {str(value).lower()}" for key, value in data.items() if key != "path")
    return Result(name, Status.INFO, f"{found.path or 'defaults, no /etc/cufile.json'}: {values}", data=data)


def _way(host: Host) -> Result:
    """Predicts which path a ``gds_handle`` will take for a GPU tensor, from files and the environment."""
    name, mode = "path of GPU tensors", os.environ.get(_MODE) or "auto"
    settings = cufile_settings.read(host)
    missing = [piece for piece in _needed(host) if piece.needed and not piece.found]
    data: dict[str, Json] = {_MODE: mode, "paths": []}
    off = f"export {_MODE}=off  # moves them without cuFile"
    if mode not in _MODES:
        return Result(name, Status.NO, f"{_MODE}={mode} is not one of {', '.join(_MODES)}", f"unset {_MODE}", data)
    if mode == "off":
        return Result(name, Status.INFO, f"bounce ({_MODE}=off)", data={**data, "paths": ["bounce"]})
    if missing:
        what = ", ".join(piece.name for piece in missing)
        words = f"none: gds_handle() raises RuntimeError, for lack of: {what}"
        return Result(name, Status.NO, words, f"{missing[0].fix}  # or: {off}", data)
    why_not = _why_not_direct(host, settings)
    if not why_not:
        words = "gds where the file system takes part (see --path), else bounce"
        return Result(name, Status.OKAY, words, data={**data, "paths": ["gds", "bounce"]})
    if mode == "require":
        words = f"none: gds_handle() raises RuntimeError, because {_MODE}=require and {why_not}"
        return Result(name, Status.NO, words, f"unset {_MODE}  # or see the lines above", data)
    if not settings.allow_compatibility:
        words = f"none: gds_handle() raises RuntimeError, because {why_not} and allow_compat_mode is false"
        return Result(name, Status.NO, words, f'set "allow_compat_mode": true in {settings.path}  # or: {off}', data)
    words = f"compat or bounce, whichever turns out faster, because {why_not}"
    return Result(name, Status.INFO, words, data={**data, "paths": ["compat", "bounce"]})


def _why_not_direct(host: Host, settings: cufile_settings.CuFileSettings) -> str:
    if settings.force_compatibility:
        return f"force_compat_mode is set ({settings.forced_by})"
    if cufile.nvidia_fs(host.root).found or not peer_to_peer.obstacles(host):
        return ""
    return "neither nvidia-fs nor PCI peer-to-peer is there"
