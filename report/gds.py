"""Checks what the gds op requires (a GPU and its driver, libcufile, nvidia-fs) and which path GPU tensors will take.

Only reads files. The cuFile driver is not opened here, nor CUDA initialised: opening loops for ever on kernels without
modules, needs a CUDA context, and forbids fork afterwards. ``--open-driver`` opens it in a process of its own.
"""

from __future__ import annotations

import contextlib
import functools
import gzip
import importlib.metadata
import json
import os
import platform
import re
from dataclasses import dataclass, replace
from pathlib import Path

from nvme_ops.op_builder import GDSBuilder, machine
from nvme_ops.op_builder.machine import Host, Requirement

from . import ops, trial
from .result import Json, Result, Status, judged, run_checks

_MODE = machine.GDS_MODE
_MODES = ("auto", "require", "off")
_NONE = "none: gds_handle() raises RuntimeError"


def section(host: Host) -> tuple[Result, ...]:
    """Checks every part of GPUDirect Storage; without a GPU all other results are facts, since nothing uses them."""
    facts = _Facts(host)
    results = run_checks(
        {
            "cuFile": lambda: [_line(facts, piece) for piece in facts.pieces],
            "cuFile settings": lambda: _settings(facts.settings),
            "PCI peer-to-peer": lambda: peer_to_peer(facts),
            "path of GPU tensors": lambda: _path_of_tensors(facts),
        }
    )
    if Status.OKAY in [result.status for result in results if result.name == "GPU"]:
        return results
    return tuple(map(_without_a_gpu, results))


def _without_a_gpu(result: Result) -> Result:
    """Returns a fact in place of a complaint about what nothing here uses."""
    if result.name == "GPU":
        return replace(result, data={**result.data, "expected": False})
    return replace(result, status=Status.INFO, fix="") if result.status in (Status.WARNING, Status.NO) else result


class _Facts:
    """Facts that several checks need, each looked up once."""

    def __init__(self, host: Host) -> None:
        self.host = host

    @functools.cached_property
    def pieces(self) -> list[Requirement]:
        return machine.gds_requirements(*ops.torch_build(), self.host)

    @functools.cached_property
    def settings(self) -> CuFileSettings:
        return read_settings(self.host)

    @functools.cached_property
    def obstacles(self) -> list[str]:
        return obstacles(self.host, self.settings)


def _line(facts: _Facts, piece: Requirement) -> Result:
    data: dict[str, Json] = dict(piece.data)
    if piece.found:
        words = piece.found
        if isinstance(path := data.get("path"), str):
            data["version"] = version = _version(Path(path))
            words = f"{version}, {words}" if version else words
        return Result(piece.name, Status.OKAY, words, data=data)
    if os.environ.get(_MODE) == "off" and not piece.needed:
        return Result(piece.name, Status.INFO, piece.missing, data=data)
    unloaded = piece.name == "nvidia-fs" and not data["loaded"]
    if unloaded and not facts.obstacles:
        return Result(piece.name, Status.INFO, "not loaded, PCI peer-to-peer does without", data=data)
    fix = f"{ops.install_command('nvidia-gds')} && modprobe nvidia-fs" if unloaded else piece.fix
    return Result(piece.name, Status.NO if piece.needed else Status.WARNING, piece.missing, fix, data)


def _version(path: Path) -> str | None:
    if "site-packages" in path.parts:
        wheels = ("nvidia-cufile-cu12", "nvidia-cufile-cu11") if "cufile" in path.parts else ("nvidia-cufile",)
        for wheel in wheels:
            with contextlib.suppress(importlib.metadata.PackageNotFoundError):
                return importlib.metadata.version(wheel)
    match = re.search(r"\.so\.(\d+\.\d+.*)$", path.resolve().name)
    return match[1] if match else None


def _settings(settings: CuFileSettings) -> Result:
    data: dict[str, Json] = {
        "path": settings.path,
        "allow_compat_mode": settings.allow_compatibility,
        "force_compat_mode": settings.force_compatibility,
        "use_pci_p2pdma": settings.peer_to_peer,
    }
    values = ", ".join(f"{key} {str(value).lower()}" for key, value in data.items() if key != "path")
    words = settings.problem or f"{settings.path or 'defaults, no /etc/cufile.json'}: {values}"
    return judged("cuFile settings", words, settings.fix, data, good=Status.INFO)


def _path_of_tensors(facts: _Facts) -> Result:
    """Predicts which path a ``gds_handle`` will take for a GPU tensor, from files and the environment."""
    name, mode = "path of GPU tensors", os.environ.get(_MODE) or "auto"
    settings = facts.settings
    missing = [piece for piece in facts.pieces if piece.needed and not piece.found]
    status, fix, paths = Status.NO, f"export {_MODE}=off  # moves them without cuFile", list[str]()
    if mode not in _MODES:
        words, fix = f"{_MODE}={mode} is not one of {', '.join(_MODES)}", f"unset {_MODE}"
    elif mode == "off":
        status, words, fix, paths = Status.INFO, f"bounce ({_MODE}=off)", "", ["bounce"]
    elif missing:
        words = f"{_NONE}, for lack of: {', '.join(piece.name for piece in missing)}"
        fix = f"{missing[0].fix}  # or: {fix}"
    elif not (why_not := _why_not_direct(facts)):
        status, words = Status.OKAY, "gds where the file system takes part (see --folder), else bounce"
        fix, paths = "", ["gds", "bounce"]
    elif mode == "require":
        words, fix = f"{_NONE}, because {_MODE}=require and {why_not}", f"unset {_MODE}  # or see the lines above"
    elif not settings.allow_compatibility:
        words = f"{_NONE}, because {why_not} and allow_compat_mode is false"
        fix = f'set "allow_compat_mode": true in {settings.path}  # or: {fix}'
    else:
        status, words = Status.INFO, f"compat or bounce, whichever turns out faster, because {why_not}"
        fix, paths = "", ["compat", "bounce"]
    return Result(name, status, words, fix, {_MODE: mode, "paths": paths})


def _why_not_direct(facts: _Facts) -> str:
    if facts.settings.force_compatibility:
        return f"force_compat_mode is set ({facts.settings.forced_by})"
    if any(piece.name == "nvidia-fs" and piece.found for piece in facts.pieces) or not facts.obstacles:
        return ""
    return "neither nvidia-fs nor PCI peer-to-peer is there"


# cuFile's own settings, as far as they decide which path data take: a JSON file with comments, and the environment,
# which takes precedence

SETTINGS = "/etc/cufile.json"
NAMED_BY = "CUFILE_ENV_PATH_JSON"
FORCED_BY = "CUFILE_FORCE_COMPAT_MODE"
PEER_TO_PEER_BY = "CUFILE_USE_PCIP2PDMA"
_STRING_OR_COMMENT = re.compile(r'("(?:\\.|[^"\\])*")|//[^\n]*|/\*.*?\*/', re.DOTALL)
_STRING_OR_COMMA = re.compile(r'("(?:\\.|[^"\\])*")|,(?=\s*[}\]])')


@dataclass(frozen=True)
class CuFileSettings:
    """The settings of file and environment, cuFile's defaults elsewhere."""

    path: str | None = None  # None where there is no file
    allow_compatibility: bool = True
    force_compatibility: bool = False
    forced_by: str = ""
    peer_to_peer: bool = False
    problem: str = ""
    fix: str = ""


def read_settings(host: Host) -> CuFileSettings:
    """Returns the settings in force; ``problem`` says why a file could not be read."""
    named = os.environ.get(NAMED_BY)
    path = os.path.abspath(named) if named else SETTINGS
    problem = fix = ""
    document: object = {}
    if named or host.exists(path):
        try:
            document = parse(host.read(path))
        except OSError as error:
            problem = f"{path}: {error.strerror}"
            fix = f"unset {NAMED_BY}" if named else f"ls -ld {path}  # must be a file that everyone may read"
        except ValueError as error:
            problem, fix = f"{path} cannot be read as JSON: {error}", f"correct {path}"
    properties = document.get("properties") if isinstance(document, dict) else None
    values = properties if isinstance(properties, dict) else {}
    return CuFileSettings(
        path=path if named or host.exists(path) else None,
        allow_compatibility=_is_true(values.get("allow_compat_mode", True)),
        force_compatibility=_is_true(os.environ.get(FORCED_BY) or values.get("force_compat_mode", False)),
        forced_by=FORCED_BY if _is_true(os.environ.get(FORCED_BY, "")) else path,
        peer_to_peer=_is_true(os.environ.get(PEER_TO_PEER_BY) or values.get("use_pci_p2pdma", False)),
        problem=problem,
        fix=fix,
    )


def parse(text: str) -> object:
    """Parses JSON with ``//`` and ``/* */`` comments and trailing commas. Raises ValueError."""
    for skipped in (_STRING_OR_COMMENT, _STRING_OR_COMMA):
        text = skipped.sub(lambda match: match[1] or "", text)
    return json.loads(text) if text.strip() else {}


def _is_true(value: object) -> bool:
    return value.lower() in ("true", "1") if isinstance(value, str) else bool(value)


# Whether storage and GPU can reach each other over PCI without nvidia-fs. Requirements: NVIDIA's pages "GDS Support for
# NVMe" and "NVMe P2PDMA Troubleshooting". Only cuFile can tell whether the machine's topology permits it

_PEER_TO_PEER = "PCI peer-to-peer"
_OPTION = "CONFIG_PCI_P2PDMA"
_SYMBOL = "p2pdma_pgmap_ops"  # NVIDIA's page looks for it if there is no configuration to read
_LEAST_DRIVER = 565
_STATIC_BAR = "RMForceStaticBar1=1"


def peer_to_peer(facts: _Facts) -> Result:
    """Reports a fact, never a complaint: nvidia-fs does the same."""
    why_not, iommu = facts.obstacles, _iommu(facts.host)
    data: dict[str, Json] = {"possible": not why_not, "obstacles": why_not, "iommu": iommu}
    words = f"no: {'; '.join(why_not)}" if why_not else "set up, as far as files tell"
    words += f" (IOMMU {iommu}; NVIDIA advises off on x86_64)" if iommu != "off" else " (IOMMU off)"
    return Result(_PEER_TO_PEER, Status.INFO if why_not else Status.OKAY, words, data=data)


def obstacles(host: Host, settings: CuFileSettings) -> list[str]:
    """Returns what PCI peer-to-peer lacks; empty if nothing is known to be missing."""
    x86 = platform.machine() == "x86_64"
    driver = int(host.search(r"Open Kernel Module.*?(\d+)\.", machine.DRIVER_VERSION) or 0)
    problems = {
        f"the kernel lacks {_OPTION}": not _kernel_has_option(host),
        f"the driver is not NVIDIA's open one, {_LEAST_DRIVER} or later": driver < _LEAST_DRIVER,
        f"its option {_STATIC_BAR} is not set": x86 and _STATIC_BAR not in host.read_or("/proc/driver/nvidia/params"),
        "nvme_core.multipath is on": host.read_or("/sys/module/nvme_core/parameters/multipath") == "Y",
        f"use_pci_p2pdma is not set in {settings.path or SETTINGS}": not settings.peer_to_peer,
    }
    return [words for words, there in problems.items() if there]


def _kernel_has_option(host: Host) -> bool:
    """Returns whether ``_OPTION`` is set, according to the kernel's configuration, else to its list of symbols."""
    release = host.read_or("/proc/sys/kernel/osrelease") or platform.release()
    configuration = _unpacked(host, "/proc/config.gz")
    for name in (f"/boot/config-{release}", f"/lib/modules/{release}/config"):
        configuration = configuration or host.read_or(name)
    if configuration:
        return f"{_OPTION}=y" in configuration.splitlines()
    return _SYMBOL in host.read_or("/proc/kallsyms")


def _unpacked(host: Host, name: str) -> str:
    try:
        with gzip.open(host.path(name)) as file:
            return file.read().decode(errors="replace")
    except (OSError, EOFError):
        return ""


def _iommu(host: Host) -> str:
    groups = host.path("/sys/kernel/iommu_groups")
    if not groups.is_dir() or not any(groups.iterdir()):
        return "off"
    command_line = host.read_or("/proc/cmdline").split()
    return "in pass-through" if {"iommu=pt", "iommu.passthrough=1"} & set(command_line) else "on"


# --open-driver. Opening may take long, fail in many ways, even hang: none of that may happen to the report

LIMIT = 40.0  # seconds for torch, CUDA and cuFile to start; cuFile alone may take 20
_DRIVER = "cuFile driver"
_BUILD = 'python -c "from nvme_ops.op_builder import GDSBuilder; GDSBuilder().load(verbose=True)"'
_OFF = "export NVME_OPS_GDS=off  # or see the lines above"


def open_driver() -> Result:
    """Opens cuFile's driver in another process; reports what that found, or how it ended."""
    broken = ops.torch_problem()
    if broken is not None:
        return Result(_DRIVER, Status.WARNING, f"not opened, torch: {broken.detail}", broken.fix)
    builder = GDSBuilder()
    builder.is_buildable()
    if builder.built is None:
        return Result(_DRIVER, Status.WARNING, "not opened, because the gds op is not compiled yet", _BUILD)
    answer, end = trial.in_another_process(_open, LIMIT)
    if end:
        return Result(_DRIVER, Status.NO, f"the process that opened it {end}", _OFF, {"opened": False})
    return _judge(answer)


def _open() -> dict[str, Json]:
    import torch

    try:
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # cuFile needs a CUDA context
        answer: dict[str, Json] = GDSBuilder().load().open_driver(machine.cufile_libraries())
        return answer
    except Exception as error:
        return {"error": str(error)}


def _judge(answer: dict[str, Json]) -> Result:
    error = answer.get("error")
    if error is not None:
        words, _, fix = str(error).partition("; fix: ")
        return Result(_DRIVER, Status.NO, words, fix or _OFF, {"opened": False})
    version = answer.get("version")
    number = f"{version // 1000}.{version % 1000 // 10}" if isinstance(version, int) and version else "unknown version"
    words = f"opens: {number}, {answer.get('path')}"
    if answer.get("fake"):
        words += ", a test double that says nothing about this machine"
    why_not = str(answer.get("why_not_direct") or "")
    words += f"; no GPUDirect Storage: {why_not}" if why_not else "; GPUDirect Storage is available"
    fix = "nvme-report  # see cuFile" if why_not else ""
    return judged(_DRIVER, words, fix, {"opened": True, **answer, "version": number})
