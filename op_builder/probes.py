"""What this machine offers for a build: headers, functions, ninja, packages.

A probe returns a value. It prints nothing, raises nothing, writes only to the temporary folder, and touches neither
stdout nor stderr of the process, so it works in notebooks, in services without a terminal and in read-only folders.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

from . import compiler as cxx


def has_function(function: str, libraries: Sequence[str], library_dirs: Sequence[str] = ()) -> str:
    """Links a program that calls ``function`` from ``libraries``; returns an empty string, or why it does not link.

    CFLAGS and LDFLAGS are honoured, as they are where the library lies outside the default directories.
    """
    compiler = cxx.find()
    if compiler is None:
        return "no C++ compiler was found"
    program = f'extern "C" void {function}(); int main() {{ {function}(); return 0; }}\n'
    places = [f"-L{directory}" for directory in library_dirs]
    names = [f"-l{library}" for library in libraries]
    return cxx.try_program(compiler, program, cxx.compile_flags(), [*places, *cxx.link_flags(), *names])


def header_flags(header: str, directories: Sequence[str]) -> list[str] | None:
    """Returns the flags with which ``header`` is found by a compiler that searches these; None if it is nowhere.

    A header that only the active conda environment has is used too, after all others: the environment's other
    headers must not shadow the system's.
    """
    if any(Path(directory, header).is_file() for directory in directories):
        return []
    environment = conda_prefix()
    if environment is not None and Path(environment, "include", header).is_file():
        return ["-idirafter", str(Path(environment, "include"))]
    return None


def conda_prefix() -> Path | None:
    """Returns the conda environment in use: the one this Python is in, else the activated one."""
    for prefix in (sys.prefix, os.environ.get("CONDA_PREFIX", "")):
        if prefix and Path(prefix, "conda-meta").is_dir():
            return Path(prefix)
    return None


def ninja_directory() -> str | None:
    """Returns the folder with the ``ninja`` program, on the PATH or not; None if there is none.

    ``pip install ninja`` puts it beside Python, which is not on the PATH unless the environment was activated.
    """
    places = [
        *os.get_exec_path(),
        sysconfig.get_path("scripts"),
        sysconfig.get_path("scripts", sysconfig.get_preferred_scheme("user")),
        os.path.dirname(sys.executable or ""),
    ]
    package = importlib.util.find_spec("ninja")
    for folder in (package.submodule_search_locations or ()) if package is not None else ():
        places += [str(Path(folder).parent / "bin"), str(Path(folder, "data", "bin"))]  # pip --target; old releases
    places = [place for place in places if os.path.isabs(place)]  # not the current folder's: it may be anybody's
    found = shutil.which("ninja", path=os.pathsep.join(places))
    return None if found is None else str(Path(found).parent)


def python_header() -> str | None:
    """Returns why an extension module cannot be compiled for this Python, with the fix; None if it can."""
    include = sysconfig.get_path("include")
    if Path(include, "Python.h").is_file():
        return None
    package = f"python{sys.version_info.major}.{sys.version_info.minor}-dev"
    return f"Python.h is not in {include}; install the headers of this Python (apt-get install {package})"


def libaio_package() -> tuple[bool, str]:
    """Returns whether libaio's headers are installed, and if not, ``"libaio-dev package with apt"``.

    The text is empty where no package manager is known.
    """
    environment = conda_prefix()
    if environment is not None:
        return any(environment.glob("conda-meta/libaio-[0-9]*.json")), "libaio package with conda"
    for query, package, tools in (
        (("dpkg", "-s"), "libaio-dev", ("apt",)),
        (("pacman", "-Q"), "libaio", ("pacman",)),
        (("rpm", "-q"), "libaio-devel", ("dnf", "yum", "zypper")),
    ):
        if shutil.which(query[0]) is not None:
            tool = next(filter(shutil.which, tools), tools[0])
            return _succeeds([*query, package]), f"{package} package with {tool}"
    return False, ""


def _succeeds(command: list[str]) -> bool:
    try:
        silent = subprocess.DEVNULL
        return subprocess.run(command, stdin=silent, stdout=silent, stderr=silent, timeout=60).returncode == 0
    except (OSError, subprocess.SubprocessError):
        return False
