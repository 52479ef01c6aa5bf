"""Probes what this machine offers for a build: its files, the C++ compiler, headers, functions, ninja, packages.

A probe returns a value. It prints nothing, raises nothing, writes only to the temporary folder and to the cache of ops,
and touches neither stdout nor stderr of the process, so it works in notebooks, in services without a terminal and in
read-only folders.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from . import trust

#: What is tried when ``CXX`` is not set; ``c++`` first, as torch does.
DEFAULT_COMMANDS = ("c++", "g++", "clang++")

#: A compiler that hangs (a wrapper waiting for a server) must not hang the program that asked.
TIMEOUT_SECONDS = 60

#: The variables from which the compiler takes include directories.
_SEARCH_VARIABLES = ("CPATH", "CPLUS_INCLUDE_PATH", "GCC_EXEC_PREFIX", "SDKROOT")


@dataclass(frozen=True)
class Host:
    """The machine as the kernel shows it: files of /proc and /sys under a root, which tests replace."""

    root: Path = Path("/")  # stands before every absolute path

    def path(self, name: str) -> Path:
        """Returns where ``name`` (an absolute path) is under the root."""
        return self.root / name.lstrip("/")

    def read(self, name: str) -> str:
        """Returns the stripped text of a file; OSError when it cannot be read."""
        return self.path(name).read_text(errors="replace").strip()

    def read_or(self, name: str, default: str = "") -> str:
        """Returns the stripped text of a file, or ``default`` where it cannot be read."""
        try:
            return self.read(name)
        except OSError:
            return default

    def exists(self, name: str) -> bool:
        """Returns whether the file exists; also False if there is no permission to look."""
        return os.path.exists(self.path(name))


def environment_flags(*names: str) -> list[str]:
    """Returns the flags in environment variables, for example ``environment_flags("CFLAGS")``."""
    return [flag for name in names for flag in shlex.split(os.environ.get(name, ""))]


def compile_flags() -> list[str]:
    """Returns the flags that the environment adds to every compilation."""
    return environment_flags("CPPFLAGS", "CFLAGS", "CXXFLAGS")


def link_flags() -> list[str]:
    """Returns the flags that the environment adds to every link."""
    return environment_flags("LDFLAGS")


@dataclass(frozen=True)
class Compiler:
    """A compiler command and its executable."""

    command: tuple[str, ...]  #: as ``CXX`` spells it, split into words
    identity: str  #: path, size and modification time of every word that is a program: changes when one is replaced

    def run(self, *arguments: str, cwd: str | None = None) -> subprocess.CompletedProcess[str]:
        """Runs the compiler with its output captured, in English, whatever this process's streams are."""
        return subprocess.run(
            [*self.command, *arguments],
            cwd=cwd,
            env={**os.environ, "LC_ALL": "C"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=TIMEOUT_SECONDS,
        )


def find_compiler() -> Compiler | None:
    """Returns the compiler that a build would use: ``CXX``, else the first of ``DEFAULT_COMMANDS`` on the PATH."""
    chosen = shlex.split(os.environ.get("CXX", ""))
    for command in [chosen] if chosen else map(shlex.split, DEFAULT_COMMANDS):
        if shutil.which(command[0]) is not None:
            return Compiler(tuple(command), "; ".join(filter(None, map(_describe, command))))
    return None


def _describe(word: str) -> str:
    found = shutil.which(word)
    if found is None:
        return word if word.startswith("-") else ""
    path = os.path.realpath(found)
    facts = os.stat(path)
    return f"{path} {facts.st_size} {facts.st_mtime_ns}"


def try_program(compiler: Compiler, program: str, flags: list[str], libraries: list[str]) -> str:
    """Compiles and links ``program``; returns an empty string if both succeed, else the compiler's output."""
    try:
        with tempfile.TemporaryDirectory(prefix="nvme_ops_probe_") as folder:
            source = Path(folder, "probe.cpp")
            source.write_text(program)
            result = compiler.run(*flags, str(source), "-o", str(source.with_suffix("")), *libraries, cwd=folder)
    except (OSError, subprocess.SubprocessError) as error:
        return str(error)
    return "" if result.returncode == 0 else result.stdout.strip() or f"exit status {result.returncode}"


def include_directories(compiler: Compiler, memory: Sequence[Path]) -> list[str]:
    """Returns the directories that the compiler searches for headers, including CFLAGS and CPATH.

    ``memory``: folders in which the answer may be cached, as asking costs a process, which loading an op must not.
    """
    flags = compile_flags()
    question = json.dumps([compiler.identity, flags, [*map(os.environ.get, _SEARCH_VARIABLES)]])
    note = f"compiler-{hashlib.sha256(question.encode()).hexdigest()[:20]}.json"
    for folder in memory:
        try:
            if trust.why_not(folder / note):
                continue
            return list(map(str, json.loads((folder / note).read_text())["include_directories"]))
        except (OSError, ValueError, KeyError, TypeError):
            pass
    answer = _ask_include_directories(compiler, flags)
    facts = {"compiler": compiler.identity, "include_directories": answer}
    if answer:
        any(_remember(folder / note, facts) for folder in memory)
    return answer


def _ask_include_directories(compiler: Compiler, flags: list[str]) -> list[str]:
    try:
        output = compiler.run(*flags, "-E", "-v", "-x", "c++", "/dev/null").stdout
    except (OSError, subprocess.SubprocessError):
        return []
    lines = output.partition("search starts here:")[2].partition("End of search list.")[0].splitlines()
    return [line.strip() for line in lines if line.startswith(" ")]


def _remember(note: Path, facts: Mapping[str, object]) -> bool:
    """Writes ``facts`` as JSON atomically; returns False if nothing can be written."""
    part = note.with_suffix(f".{os.getpid()}")
    try:
        trust.make_folder(note.parent)
        with os.fdopen(trust.replace_file(part), "w") as file:
            json.dump(facts, file, indent=1)
        part.replace(note)
    except OSError:
        return False
    return True


def has_function(function: str, libraries: Sequence[str], library_dirs: Sequence[str] = ()) -> str:
    """Links a program that calls ``function`` from ``libraries``; returns an empty string, or why it does not link.

    Uses CFLAGS and LDFLAGS, which may name the directories of a library that is not in a default one.
    """
    compiler = find_compiler()
    if compiler is None:
        return "no C++ compiler was found"
    program = f'extern "C" void {function}(); int main() {{ {function}(); return 0; }}\n'
    places = [f"-L{directory}" for directory in library_dirs]
    names = [f"-l{library}" for library in libraries]
    return try_program(compiler, program, compile_flags(), [*places, *link_flags(), *names])


def header_flags(header: str, directories: Sequence[str]) -> list[str] | None:
    """Returns the flags with which a compiler that searches ``directories`` finds ``header``; None if it cannot.

    A header that only the active conda environment has is found too, with that folder searched last: the environment's
    other headers must not shadow the system's.
    """
    for directory in directories:
        if os.path.isfile(f"{directory}/{header}"):
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
    places = [place for place in places if os.path.isabs(place)]  # never the current folder, which may be anybody's
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
