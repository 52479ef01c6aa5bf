"""Checks which ops are usable here, and what compiles them: torch, ninja, the C++ compiler, Python's headers."""

from __future__ import annotations

import functools
import importlib
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType

from nvme_ops.op_builder import ALL_OPS, AsyncIOBuilder, GDSBuilder, OpBuilder, finished, jit, machine, recipe
from nvme_ops.op_builder.finished import BuiltOp

from . import trial
from .result import FIXES, Json, Result, Status, judged
from .trial import Attempt, Failure

_HAVE_LIBAIO = "-DNVME_OPS_HAVE_LIBAIO=1"


def row(builder: OpBuilder, tried: Attempt | None = None) -> Result:
    """Reports whether an op is installed ahead of time, and whether it can be loaded and used.

    ``tried`` is what came of trying it; without it the op is loaded in another process here.
    """
    name = builder.name
    present = finished.find_prebuilt(name)
    expected = not isinstance(builder, GDSBuilder) or bool(machine.gpu(builder.host).found)  # most machines lack a GPU
    data: dict[str, Json] = {"installed": present is not None, "compatible": False, "expected": expected}
    data["warnings"] = []
    broken = torch_problem()
    if broken is not None:
        return Result(name, Status.NO, f"torch: {broken.detail}", broken.fix, data)
    tried = tried or (trial.attempt(builder) if expected or present else Attempt())
    if tried.problem is not None:
        words, _, fix = tried.problem.words.partition("; fix: ")
        return Result(name, Status.NO, words, fix or fix_for(tried.problem) or rebuild_command(builder), data)
    if not tried.loaded and name == AsyncIOBuilder.NAME and (wrong := trial.wrong_setting()):
        return Result(name, Status.NO, wrong, fix_for(Failure(wrong)), data)
    compatible, lines = builder.is_compatible(), (builder.error_log or "not compatible").splitlines()
    built = builder.built  # an op that is compiled needs no compiler
    obstacle = None if tried.loaded else builder.build_problem if built is None else jit.why_not_built(builder)
    if obstacle:
        words, _, fix = obstacle.partition("; fix: ")
        unused = "".join(f"; {warning.partition(';')[0]}" for warning in tried.warnings)
        return Result(name, Status.NO, f"{words}{unused}", _build_fix(words, fix), data)
    if not compatible:
        parts = [line.partition("; fix: ") for line in (lines if expected else lines[:1])]
        data["warnings"] = [words for words, _, _ in parts]
        return Result(name, Status.NO, "; ".join(words for words, _, _ in parts), parts[0][2] or _build_fix(), data)
    data["compatible"] = True
    data["compiled"] = None if built is None or not tried.loaded else built.how
    warnings, fix = _missing(builder, tried.loaded)
    works = all("libaio" in warning for warning in warnings)  # equally well, on another backend
    if tried.warnings:
        warnings, fix, works = [*tried.warnings, *warnings], rebuild_command(builder), False
    data["warnings"] = warnings
    if warnings:
        return Result(name, Status.OKAY if works else Status.WARNING, warnings[0], fix, data)
    return Result(name, Status.OKAY, data=data)


def _missing(builder: OpBuilder, loaded: bool) -> tuple[list[str], str]:
    """Returns the builder's warnings about what the op could also use, and the command that installs it."""
    parts = [warning.partition("; fix: ") for warning in builder.warnings]
    if loaded:  # libaio's header is of no use to it
        parts = [part for part in parts if "libaio" not in part[0]]
    warnings = [words for words, _, _ in parts]
    if any("libaio" in words for words in warnings):
        return warnings, install_command("libaio")
    return warnings, next((fix for _, _, fix in parts if fix), "".join(warnings[-1:]))


def rebuild_command(builder: OpBuilder) -> str:
    """Returns the command that installs the package again, with this op compiled for this machine."""
    pip = f"{sys.executable} -m pip install --force-reinstall --no-build-isolation"
    return f"{builder.BUILD_VAR}=1 {pip} {recipe.requirement()}"


def fix_for(failure: Failure) -> str:
    """Returns the command against a failure of a handle; an empty string if none is known."""
    named = [name for name in re.findall(r"\b([A-Z_]+)=", failure.words) if os.environ.get(name)]
    if re.search("^the [a-z_]+ backend is not usable", failure.words):
        named.append("NVME_OPS_BACKEND")
    return f"unset {named[0]}" if named else FIXES.get(failure.errno or 0, "")


def if_needed(check: Callable[[], Result], built: Mapping[str, BuiltOp]) -> Result:
    """Runs a check of what compiles an op; its complaint becomes a fact if all ops are compiled already."""
    result = check()
    if result.status is not Status.NO or built.keys() < ALL_OPS.keys():
        return result
    words = f"{result.detail.partition(':')[0]}, nor needed: the ops are built"
    return replace(result, status=Status.INFO, detail=words, fix="")


def _build_fix(problem: str = "", fix: str = "") -> str:
    """Returns the command for what a build lacks: by its ``problem``, else for the first thing that is missing."""
    if "TORCH_EXTENSIONS_DIR" in f"{problem}{fix}":
        how = fix.removeprefix("set it to ").removeprefix("set TORCH_EXTENSIONS_DIR to ")
        named = os.environ.get("TORCH_EXTENSIONS_DIR")
        return f"unset TORCH_EXTENSIONS_DIR  # or name {how}" if named else f"export TORCH_EXTENSIONS_DIR=...  # {how}"
    if problem.startswith("torch "):
        return fix
    if "No usable temporary directory" in problem:
        return "export TMPDIR=...  # a folder that you can write to"
    for code, command in FIXES.items():
        if f"[Errno {code}]" in problem:
            return command
    for result in (compiler(), python_headers(), ninja()):
        if result.status in (Status.NO, Status.FAIL):
            return result.fix
    if machine.compile_flags() or machine.link_flags():
        return "unset CPPFLAGS CFLAGS CXXFLAGS LDFLAGS  # or correct what the compiler complains about"
    return install_command("compiler")


def all_built() -> dict[str, BuiltOp]:
    """Returns the finished ops that ``load`` would use, by name, as ``row`` has found them."""
    if torch_problem() is not None:
        return {}
    return {name: builder.built for name, builder in ALL_OPS.items() if builder.built is not None}


def would_have_libaio() -> bool:
    """Returns whether ``async_io`` would be compiled with libaio's header."""
    return _HAVE_LIBAIO in ALL_OPS[AsyncIOBuilder.NAME].cxx_args()


def compiled_with(built: Mapping[str, BuiltOp]) -> list[Result]:
    """Reports what each finished op was compiled with."""
    results = []
    for name, op in built.items():
        record = op.record
        cuda = record.get("cuda")
        words = f"torch {record.get('torch')}, CUDA {cuda if cuda not in (None, 'None') else 'none'}, {op.how}"
        data: dict[str, Json] = {"how": op.how, "library": str(op.library)}
        data |= {key: str(record.get(key)) for key in ("torch", "cuda", "hip", "cxx11_abi", "compiler", "machine")}
        results.append(Result(f"{name} compiled with", Status.INFO, words, data=data))
    return results


def judged_with(op: Result, others: Sequence[Result]) -> Result:
    """Returns the result of an op, or that it cannot be used where what decides it in ``others`` says so."""
    decides = {AsyncIOBuilder.NAME: "chosen", GDSBuilder.NAME: "path of GPU tensors"}[op.name]
    bad = [other for other in others if other.name == decides and other.status is Status.NO]
    if op.status in (Status.NO, Status.FAIL) or not bad:
        return op
    return replace(op, status=Status.NO, detail=bad[0].detail, fix=bad[0].fix, data={**op.data, "compatible": False})


def unusable(results: Sequence[Result], named: Sequence[str] = ()) -> list[Result]:
    """Returns the ops that cannot be used, of those ``named``, or without names of those that should work here."""
    bad = [result for result in results if result.status in (Status.NO, Status.FAIL)]
    return [result for result in bad if (result.name in named if named else result.data.get("expected", True))]


# What compiles an op just in time

_LEAST_COMPILER = "9"  # of gcc and clang: the first whose C++17 library is complete enough for torch's headers
COMMAND_TIMEOUT = 10.0  # seconds; a compiler that does not answer `--version` in this time is of no use


def ninja() -> Result:
    """Reports ninja, which torch needs to compile an op; builders also find it beside Python."""
    folder = machine.ninja_directory()
    path = None if folder is None else str(Path(folder, "ninja"))
    version, problem = _answer([path]) if path else ("", "not found")
    fix = f"{sys.executable} -m pip install --force-reinstall ninja" if problem else ""
    return judged("ninja", problem or f"{version}, {path}", fix, {"path": path, "version": version}, bad=Status.FAIL)


def compiler() -> Result:
    """Reports the C++ compiler that a build would use, and its version."""
    from packaging.version import Version  # in the check, which fails alone where this is missing

    name = "C++ compiler"
    chosen = os.environ.get("CXX", "")
    install = install_command("compiler")
    fix = f"unset CXX  # or: {install}" if chosen else install
    tool = machine.find_compiler()
    command = " ".join(tool.command) if tool else ""
    wanted = chosen or ", ".join(machine.DEFAULT_COMMANDS)
    answer, problem = _answer(tool.command) if tool else ("", f"not found ({wanted}): ops cannot be compiled here")
    banner = "" if problem else answer.partition("\n")[0]
    data = {"CXX": chosen, "command": command, "version": banner}
    if problem:
        return Result(name, Status.NO, problem, fix, data)
    version = re.search(r"\d+\.\d+\.\d+", banner)
    old = version and Version(version[0]) < Version(_LEAST_COMPILER)
    words = f"{banner}: torch's headers need version {_LEAST_COMPILER} or later" if old else f"{command}: {banner}"
    return judged(name, words, f"{install}  # then: export CXX=..." if old else "", data)


def python_headers() -> Result:
    """Reports Python.h, without which no extension module compiles."""
    include = sysconfig.get_path("include")
    missing = machine.python_header() is not None
    words = f"no Python.h in {include}: ops cannot be compiled here" if missing else include
    fix = install_command("python headers") if missing else ""
    return judged("Python headers", words, fix, {"include": include}, bad=Status.NO)


def cuda() -> Result:
    """Reports CUDA_HOME: no op is compiled with CUDA's toolkit, which may contain cuFile."""
    chosen = os.environ.get("CUDA_HOME")
    gone = bool(chosen) and not os.path.isdir(str(chosen))
    words = f"{chosen} is not a folder" if gone else chosen or "none (no op needs it)"
    fix = "unset CUDA_HOME  # or set it to the CUDA toolkit" if gone else ""
    return judged("CUDA_HOME", words, fix, {"CUDA_HOME": chosen}, good=Status.INFO)


def _answer(command: Sequence[str]) -> tuple[str, str]:
    """Returns what a program prints with ``--version``, and why that failed, or an empty string."""
    words = [*command, "--version"]
    try:
        done = subprocess.run(
            words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            timeout=COMMAND_TIMEOUT, text=True, errors="replace",
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return "", f"{' '.join(words)}: no answer in {COMMAND_TIMEOUT:.0f} s"
    except OSError as error:
        return "", str(error)
    said = done.stdout.strip()
    return said, f"{' '.join(words)}: exit status {done.returncode}: {said}" if done.returncode else ""


# PyTorch as installed, and this package

# Imported with this module; the package's capabilities must not be.
_PACKAGE = sys.modules[__name__.partition(".")[0]]
PACKAGE_VERSION = str(getattr(_PACKAGE, "__version__", "unknown"))
_INSTALL_TORCH = f"{sys.executable} -m pip install torch"


def torch_problem() -> Result | None:
    """Returns why torch cannot be imported; None if it can."""
    outcome = _import_torch()
    return outcome if isinstance(outcome, Result) else None


@functools.cache  # a broken torch may take seconds to fail
def _import_torch() -> ModuleType | Result:
    try:
        return importlib.import_module("torch")
    except Exception as error:  # a half-installed torch can raise anything
        words, fix = f"cannot be imported: {type(error).__name__}: {error}", f"{_INSTALL_TORCH} --force-reinstall"
        if isinstance(error, ModuleNotFoundError) and error.name == "torch":
            words, fix = "not installed: no op can be compiled or loaded", _INSTALL_TORCH
        return Result("torch", Status.NO, words, fix, {"error": str(error)})


def torch_build() -> tuple[str, str | None]:
    """Returns torch's version and CUDA version; an unknown version and None if it cannot be imported."""
    module = _import_torch()
    if isinstance(module, Result):
        return "(which cannot be imported)", None
    return str(module.__version__), module.version.cuda


def versions() -> list[str]:
    """Returns the versions of this package, torch, Python and the kernel, each with its name."""
    python, torch = platform.python_version(), torch_build()[0]
    return [f"nvme_ops {PACKAGE_VERSION}", f"torch {torch}", f"Python {python}", f"Linux {platform.release()}"]


def torch() -> list[Result]:
    """Reports torch's path, version, CUDA or ROCm and C++ ABI; one line if it cannot be imported."""
    module = _import_torch()
    if isinstance(module, Result):
        return [module]
    cuda, hip = module.version.cuda, module.version.hip
    abi = bool(module.compiled_with_cxx11_abi())
    path = str(Path(module.__file__ or "").parent)
    build = f"CUDA {cuda}" if cuda else f"ROCm {hip}" if hip else "none (CPU build)"
    return [
        Result("torch install path", Status.INFO, path, data={"path": path}),
        torch_version(str(module.__version__)),
        Result("torch cuda version", Status.INFO, build, data={"cuda": cuda, "hip": hip}),
        Result("torch C++ ABI", Status.INFO, f"_GLIBCXX_USE_CXX11_ABI={int(abi)}", data={"cxx11": abi}),
    ]


def torch_version(version: str) -> Result:
    """Reports torch's version, and whether it is new enough."""
    old, _, fix = recipe.old_torch(version).partition("; fix: ")
    return judged("torch version", old or version, fix, {"version": version}, good=Status.INFO)


def package() -> list[Result]:
    """Reports nvme_ops's path and version, and the Python that runs it."""
    path, python = str(next(iter(_PACKAGE.__path__))), f"{platform.python_version()}, {sys.executable}"
    return [
        Result("nvme_ops install path", Status.INFO, path, data={"path": path}),
        Result("nvme_ops version", Status.INFO, PACKAGE_VERSION, data={"version": PACKAGE_VERSION}),
        Result("python", Status.INFO, python, data={"executable": sys.executable}),
    ]


# The command that installs something missing, for the package manager in use

_CONDA = "conda install -y -c conda-forge {}"
_INSTALL = {manager: f"{manager} install -y {{}}" for manager in ("apt-get", "dnf", "yum", "zypper")}
_INSTALL |= {"pacman": "pacman -S --noconfirm {}", "apk": "apk add {}"}
# The package by manager; "" is the name that the RPM distributions share.
_NAMES = {
    "compiler": {"apt-get": "g++", "pacman": "gcc", "apk": "g++", "conda": "gxx", "": "gcc-c++"},
    "python headers": {"apt-get": "python3-dev", "pacman": "python", "conda": "python", "": "python3-devel"},
    # the package with the headers brings the library
    "libaio": {"apt-get": "libaio-dev", "pacman": "libaio", "apk": "libaio-dev", "conda": "libaio", "": "libaio-devel"},
    "nvidia-gds": {"": "nvidia-gds"},  # brings the module nvidia-fs
}


def install_command(piece: str) -> str:
    """Returns the command that installs ``piece``, a key of the table: conda's in conda, else the system's."""
    names = _NAMES[piece]
    if "conda" in names and machine.conda_prefix() is not None:
        return _CONDA.format(names["conda"])
    for manager, command in _INSTALL.items():
        if shutil.which(manager):
            return command.format(names.get(manager, names[""]))
    return f"install {names['']} ({names.get('apt-get', names[''])} on Debian) with the system's package manager"
