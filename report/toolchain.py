"""What compiles an op just in time: ninja, the C++ compiler, Python's headers; nvcc only as a fact."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from nvme_ops.host import Host
from nvme_ops.op_builder import compiler as op_compiler
from nvme_ops.op_builder import probes

from .packages import install_command
from .result import Result, Status

_LEAST = "9"  # of gcc and clang: the first whose C++17 library is complete enough for torch's headers
COMMAND_TIMEOUT = 10.0  # seconds; a compiler that does not answer `--version` in this time is of no use
_CUDA = "/usr/local/cuda"  # where torch looks when CUDA_HOME is not set


def ninja() -> Result:
    """Reports ninja, which torch needs to compile an op; builders also find it beside Python."""
    fix = f"{sys.executable} -m pip install --force-reinstall ninja"
    folder = probes.ninja_directory()
    if folder is None:
        return Result("ninja", Status.FAIL, "not found", fix, {"path": None})
    path = str(Path(folder, "ninja"))
    try:
        version = _output(path, "--version")
    except OSError as error:
        return Result("ninja", Status.FAIL, str(error), fix, {"path": path})
    return Result("ninja", Status.OKAY, f"{version}, {path}", data={"path": path, "version": version})


def compiler() -> Result:
    """Reports the C++ compiler that a build would use, and its version."""
    from packaging.version import Version  # in the check, which fails alone where this is missing

    name = "C++ compiler"
    chosen = os.environ.get("CXX", "")
    fix = f"unset CXX  # or: {install_command('compiler')}" if chosen else install_command("compiler")
    data = {"CXX": chosen, "command": "", "version": ""}
    found = op_compiler.find()
    if found is None:
        wanted = chosen or ", ".join(op_compiler.DEFAULT_COMMANDS)
        return Result(name, Status.NO, f"not found ({wanted}): ops cannot be compiled here", fix, data)
    data["command"] = " ".join(found.command)
    try:
        answer = found.run("--version")
    except (OSError, subprocess.SubprocessError) as error:
        return Result(name, Status.NO, str(error), fix, data)
    banner = answer.stdout.strip().partition("\n")[0]
    if answer.returncode:
        words = f"{data['command']} --version: exit status {answer.returncode}: {banner}"
        return Result(name, Status.NO, words, fix, data)
    data["version"] = banner
    version = re.search(r"\d+\.\d+\.\d+", banner)
    if version and Version(version[0]) < Version(_LEAST):
        words = f"{banner}: torch's headers need version {_LEAST} or later"
        return Result(name, Status.WARNING, words, f"{install_command('compiler')}  # then: export CXX=...", data)
    return Result(name, Status.OKAY, f"{data['command']}: {banner}", data=data)


def python_headers() -> Result:
    """Reports Python.h, without which no extension module compiles."""
    include = sysconfig.get_path("include")
    if probes.python_header() is None:
        return Result("Python headers", Status.OKAY, include, data={"include": include})
    words = f"no Python.h in {include}: ops cannot be compiled here"
    return Result("Python headers", Status.NO, words, install_command("python headers"), {"include": include})


def cuda_home(host: Host) -> str | None:
    """Returns the CUDA toolkit that torch would use: CUDA_HOME or CUDA_PATH, else nvcc's, else /usr/local/cuda."""
    named = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    if named:
        return named
    nvcc = shutil.which("nvcc")
    around = Path(nvcc).resolve().parent.parent if nvcc else None
    if around and around != Path("/usr") and (around / "include" / "cuda.h").is_file():
        return str(around)
    return _CUDA if host.exists(_CUDA) else None


def cuda(host: Host) -> list[Result]:
    """Reports CUDA_HOME and nvcc as facts: no op of this package needs either."""
    home = cuda_home(host)
    chosen = os.environ.get("CUDA_HOME")
    data = {"CUDA_HOME": chosen, "used": home}
    if chosen and not os.path.isdir(chosen):
        words, fix = f"{chosen} is not a folder", "unset CUDA_HOME  # or set it to the CUDA toolkit"
        return [Result("CUDA_HOME", Status.WARNING, words, fix, data), _nvcc(home)]
    return [Result("CUDA_HOME", Status.INFO, home or "none (no op needs it)", data=data), _nvcc(home)]


def _nvcc(home: str | None) -> Result:
    name = "nvcc version"
    inside = Path(home, "bin", "nvcc") if home else None
    path = str(inside) if inside and inside.is_file() else shutil.which("nvcc")
    if path is None:
        return Result(name, Status.INFO, "none (no op needs it)", data={"path": None, "version": None})
    try:
        text = _output(path, "--version")
    except OSError as error:
        return Result(name, Status.INFO, f"{error} (no op needs it)", data={"path": path, "version": None})
    found = re.search(r"release (\d+\.\d+)", text)
    version = found[1] if found else text.rpartition("\n")[2]
    return Result(name, Status.INFO, f"{version}, {path}", data={"path": path, "version": version})


def _output(*command: str) -> str:
    """What a short command prints; OSError when it cannot run, fails or does not answer."""
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            timeout=COMMAND_TIMEOUT, text=True, errors="replace",
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        raise OSError(f"{' '.join(command)}: no answer in {COMMAND_TIMEOUT:.0f} s") from error
    if done.returncode:
        raise OSError(f"{' '.join(command)}: exit status {done.returncode}: {done.stdout.strip()}")
    return done.stdout.strip()
