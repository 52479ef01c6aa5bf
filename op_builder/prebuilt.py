"""Ahead-of-time built ops: which ones to build at install time, how, and whether one fits at load time.

A wheel has one library for each minor version of torch, because torch's C++ interface differs between them. It fits
every build of that version and every Python from 3.11 on: it is compiled against that version's headers and Python's
limited API, and not linked with torch's libraries, whose symbols it finds in the process.
"""

from __future__ import annotations

import contextlib
import importlib.machinery
import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from . import cache, jit, trust
from .cache import Built
from .recipe import PACKAGE, Recipe

if TYPE_CHECKING:
    from .builder import OpBuilder

#: The package that prebuilt ops are installed in.
OPS = PACKAGE / "ops"

#: The environment variable that requests every op that this machine can build.
BUILD_ALL = "NVME_BUILD_OPS"

#: The ``python`` of a wheel's op in its record: the oldest whose limited API has all that csrc uses.
PORTABLE_PYTHON = "abi3 of 3.11"
_SUFFIX = ".abi3.so"
#: The key that marks a wheel's op in its record: it fits more than one Python and build of torch.
MARK = "portable"


def find(name: str, folder: Path | None = None) -> Built | None:
    """Returns the prebuilt op ``name`` in the package, whatever it was built for; None if there is none."""
    folder = folder or OPS
    fitting = [folder / f"{name}{suffix}" for suffix in importlib.machinery.EXTENSION_SUFFIXES]
    others = sorted(folder.glob(f"{name}.*.so"), reverse=True)
    if len(others) > 1:  # a wheel's, for several versions of torch
        with contextlib.suppress(ImportError):  # a missing torch is reported elsewhere
            import torch

            fitting.append(folder / file_name(name, minor(str(torch.__version__))))
    for library in [*fitting, *others]:
        if library.is_file():
            try:
                record = json.loads(record_path(library).read_text())
            except (OSError, ValueError):
                record = {}
            return Built("prebuilt", library, record if isinstance(record, dict) else {})
    return None


def record_path(library: Path) -> Path:
    """Returns the file beside a prebuilt op that says what it was made from."""
    return library.with_name(f"{stem(library.name) or library.name.partition('.')[0]}.{cache.RECORD}")


def mismatch(found: Built, requirements: Mapping[str, str]) -> str:
    """Returns why ``found`` must not be loaded by a process with ``requirements``; an empty string if it fits."""
    if problem := _why_not_trusted(found.library):
        return problem
    if not found.record:
        return f"{record_path(found.library).name} is missing"
    if found.record.get(MARK):
        requirements = portable_requirements(requirements)
    differences = [
        f"{name}: built for {found.record.get(name)}, here {wanted}"
        for name, wanted in requirements.items()
        if found.record.get(name) != wanted
    ]
    return "; ".join("its sources changed" if text.startswith("sources:") else text for text in differences)


def _why_not_trusted(library: Path) -> str:
    """Returns why ``library`` is easier for others to change than this module, which Python has executed."""
    package = os.stat(__file__)
    for path in (library.parent, library, record_path(library)):
        try:
            facts = os.stat(path)
        except OSError:  # mismatch says that the record is missing
            continue
        if facts.st_uid not in (0, os.geteuid(), package.st_uid):
            return f"{path} belongs to another user"
        if facts.st_mode & ~package.st_mode & 0o022 and (writers := trust.writable_by_others(facts)):
            return f"{path} can be written by {writers} (fix: chmod go-w '{path}')"
    return ""


def build(recipe: Recipe, target: Path) -> None:
    """Compiles ``recipe`` with the flags of a just-in-time build, and puts it at ``target`` with its record.

    Raises:
        RuntimeError: the compiler failed, or nothing can be written.
    """
    try:
        place = tempfile.TemporaryDirectory(prefix="nvme_ops_build_")
    except OSError as error:
        raise RuntimeError(f"the {recipe.name} op needs a temporary folder to be built in: {error}") from error
    with place as folder:
        library = jit.compile_into(Path(folder), recipe)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(library, target)
        shutil.copy(Path(folder, cache.RECORD), record_path(target))


def variable(name: str) -> bool | None:
    """Returns the value of ``NVME_BUILD_...`` or its alias ``DS_BUILD_...``; None if neither is set.

    Raises:
        ValueError: it is neither 1 nor 0.
    """
    for spelling in (name, name.replace("NVME_", "DS_", 1)):
        value = os.environ.get(spelling, "")
        if value not in ("", "0", "1"):
            raise ValueError(f"{spelling} must be 1 or 0, not {value!r}")
        if value:
            return value == "1"
    return None


def obstacle(op: OpBuilder) -> str | None:
    """Returns why ``op`` cannot be compiled here and now, with the fix; None if it can."""
    try:
        import torch  # noqa: F401
    except ImportError as error:
        return (
            f"it is compiled against torch, which this build cannot import ({error}). Install torch, setuptools, wheel "
            "and ninja first, then run: pip install --no-build-isolation ..."
        )
    return op.toolchain_problem() if op.is_buildable() else op.error_log


# In wheels


def file_name(op: str, torch_minor: str) -> str:
    """Returns the name of a wheel's library: ``async_io.torch2.13.abi3.so``."""
    return f"{op}.torch{torch_minor}{_SUFFIX}"


def stem(name: str) -> str:
    """Returns ``async_io.torch2.13`` for the name of a wheel's library; an empty string for any other name."""
    return name.removesuffix(_SUFFIX) if name.endswith(_SUFFIX) and ".torch" in name else ""


def minor(version: str) -> str:
    """Returns ``2.13`` for ``2.13.0+cpu``."""
    from packaging.version import Version  # not at the top: setup.py loads this where only setuptools may be

    return "{}.{}".format(*Version(version).release)


def portable_requirements(exact: Mapping[str, str]) -> dict[str, str]:
    """Returns what a wheel's op must match, in place of ``exact``, for an op prebuilt for one machine."""
    here = PORTABLE_PYTHON if _SUFFIX in importlib.machinery.EXTENSION_SUFFIXES else "one without abi3"
    return {
        "sources": exact["sources"],
        "torch": minor(exact["torch"]),
        "cxx11_abi": exact["cxx11_abi"],
        "machine": exact["machine"],
        "python": here,
    }
