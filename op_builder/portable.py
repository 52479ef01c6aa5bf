"""Ops in wheels: one for each minor version of torch, for every Python from 3.11 on, whatever torch's build.

torch's C++ interface differs from one minor version to the next, so there is one library for each, compiled against
that version's own headers and not linked with anything of torch: its symbols are those in the process. Python's side is
its limited API.
"""

from __future__ import annotations

import importlib.machinery
import json
import platform
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from . import cache, sources
from .recipe import content_hash

if TYPE_CHECKING:
    from .builder import OpBuilder
    from .compiler import Compiler

#: The oldest Python that has all of the limited API that csrc uses, as Py_LIMITED_API spells it.
_LIMITED_API = "0x030b0000"
_PYTHON = "abi3 of 3.11"
_SUFFIX = ".abi3.so"
#: In a record: such an op has no other Python or build of torch to match.
MARK = "portable"

# What the op is loaded beside. Stand-ins of these names make the linker note that they are needed.
_TORCH_LIBRARIES = ("c10", "torch_cpu")


def file_name(op: str, torch_minor: str) -> str:
    """Returns the name of such a library: ``async_io.torch2.13.abi3.so``."""
    return f"{op}.torch{torch_minor}{_SUFFIX}"


def stem(name: str) -> str:
    """Returns ``async_io.torch2.13`` for such a library's name; an empty string for any other name."""
    return name.removesuffix(_SUFFIX) if name.endswith(_SUFFIX) and ".torch" in name else ""


def minor(version: str) -> str:
    """Returns ``2.13`` for ``2.13.0+cpu``."""
    from packaging.version import Version  # not at the top: setup.py loads this where only setuptools may be

    return "{}.{}".format(*Version(version).release)


def requirements(exact: Mapping[str, str]) -> dict[str, str]:
    """Returns what such an op must match, in place of the ``exact`` match of an op prebuilt for one machine."""
    here = _PYTHON if _SUFFIX in importlib.machinery.EXTENSION_SUFFIXES else "one without abi3"
    return {
        "sources": exact["sources"],
        "torch": minor(exact["torch"]),
        "cxx11_abi": exact["cxx11_abi"],
        "machine": exact["machine"],
        "python": here,
    }


def record(op: OpBuilder, torch_version: str) -> dict[str, object]:
    """Returns what is kept beside an op that ``compile_op`` made."""
    return {
        MARK: True,
        "name": op.name,
        "sources": content_hash([*map(Path, op.sources()), *sources.headers(op.source_root())]),
        "torch": minor(torch_version),
        "cxx11_abi": "True",
        "machine": platform.machine(),
        "python": _PYTHON,
    }


def compile_op(
    op: OpBuilder, compiler: Compiler, torch_version: str, torch_include: Path, python_include: Path, folder: Path
) -> Path:
    """Compiles ``op`` against the headers of a torch that need not be installed; returns the library in ``folder``.

    Raises:
        RuntimeError: the compiler failed; the message is what it said.
    """
    work = folder / f"{op.name}.{torch_version}.work"
    work.mkdir(parents=True)
    for library in _TORCH_LIBRARIES:
        _run(
            compiler, "-shared", "-x", "c", "/dev/null", f"-Wl,-soname,lib{library}.so", "-o", f"{work}/lib{library}.so"
        )
    units = []
    for number, group in enumerate(op.united_sources()):
        units.append(str(work / f"unit{number}.cpp"))
        Path(units[-1]).write_text("".join(f'#include "{path}"\n' for path in group))
    together = {path for group in op.united_sources() for path in group}
    units += [path for path in op.sources() if path not in together]
    target = folder / file_name(op.name, minor(torch_version))
    includes = [
        *op.include_paths(),
        str(torch_include),
        str(torch_include / "torch/csrc/api/include"),
        str(python_include),
    ]
    _run(
        compiler,
        *op.cxx_args(),
        *("-std=c++20", "-fPIC", "-shared", "-pthread"),
        *("-D_GLIBCXX_USE_CXX11_ABI=1", f"-DPy_LIMITED_API={_LIMITED_API}"),
        *(word for path in includes for word in ("-isystem" if path != str(op.source_root()) else "-I", path)),
        *units,
        *("-Wl,--no-as-needed", f"-L{work}", *(f"-l{library}" for library in _TORCH_LIBRARIES), "-Wl,-s"),
        *("-o", str(target)),
    )  # fmt: skip
    kept = target.with_name(f"{stem(target.name)}.{cache.RECORD}")
    kept.write_text(json.dumps(record(op, torch_version), indent=2, sort_keys=True) + "\n")
    return target


def _run(compiler: Compiler, *arguments: str) -> None:
    command = [*compiler.command, *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}\n{done.stdout}")
