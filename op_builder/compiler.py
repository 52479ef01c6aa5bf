"""Finds the C++ compiler, and caches what is known about it."""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from . import trust

#: What is tried when ``CXX`` is not set; ``c++`` first, as torch does.
DEFAULT_COMMANDS = ("c++", "g++", "clang++")

#: A compiler that hangs (a wrapper waiting for a server) must not hang the program that asked.
TIMEOUT_SECONDS = 60

#: What the compiler reads its own include directories from.
_SEARCH_VARIABLES = ("CPATH", "CPLUS_INCLUDE_PATH", "GCC_EXEC_PREFIX", "SDKROOT")


def environment_flags(*names: str) -> list[str]:
    """Returns the flags in a variable of the environment, for example ``environment_flags("CFLAGS")``."""
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


def find() -> Compiler | None:
    """Returns the compiler that a build would use: ``CXX``, else the first of ``DEFAULT_COMMANDS`` on the PATH."""
    chosen = shlex.split(os.environ.get("CXX", ""))
    for command in [chosen] if chosen else [[name] for name in DEFAULT_COMMANDS]:
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


def why_not_working(compiler: Compiler, flags: list[str]) -> str:
    """Compiles and links an empty program; returns the compiler's output if that fails, else an empty string."""
    return try_program(compiler, "int main() { return 0; }\n", flags, link_flags())


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
    question = json.dumps([compiler.identity, flags, [os.environ.get(name) for name in _SEARCH_VARIABLES]])
    note = f"compiler-{hashlib.sha256(question.encode()).hexdigest()[:20]}.json"
    for folder in memory:
        try:
            if trust.why_not(folder / note):
                continue
            return [str(entry) for entry in json.loads((folder / note).read_text())["include_directories"]]
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
