"""Finished ops, built ahead of time in the package or just in time in a cache: which one fits.

A wheel has one library for each minor version of torch, because torch's C++ interface differs between them. It fits
every build of that version and every Python from 3.11 on: it is compiled against that version's headers and Python's
limited API, and not linked with torch's libraries, whose symbols it finds in the process.

In the cache an entry is a folder, complete or not there (jit.py makes them). Loading an op executes it, so none is
loaded that others could have changed (trust.py).
"""

from __future__ import annotations

import contextlib
import importlib.machinery
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from . import trust

if TYPE_CHECKING:
    from .recipe import Recipe

#: Written beside an op: what it was made from. An entry of the cache without it is not one.
RECORD = "build.json"

#: The package that prebuilt ops are installed in.
OPS = Path(__file__).parent.parent / "ops"

#: The ``python`` of a wheel's op in its record: the oldest whose limited API has all that csrc uses.
PORTABLE_PYTHON = "abi3 of 3.11"
_SUFFIX = ".abi3.so"
#: The key that marks a wheel's op in its record: it fits more than one Python and build of torch.
MARK = "portable"


@dataclass(frozen=True)
class BuiltOp:
    """A finished op, and what it was made from."""

    how: str  #: "prebuilt" or "cached"
    library: Path
    record: Mapping[str, object]


# Built ahead of time


def find_prebuilt(name: str) -> BuiltOp | None:
    """Returns the prebuilt op ``name`` in the package, whatever it was built for; None if there is none."""
    fitting = [OPS / f"{name}{suffix}" for suffix in importlib.machinery.EXTENSION_SUFFIXES]
    others = sorted(OPS.glob(f"{name}.*.so"), reverse=True)
    if len(others) > 1:  # a wheel's, for several versions of torch
        with contextlib.suppress(ImportError):  # a missing torch is reported elsewhere
            import torch

            fitting.append(OPS / file_name(name, minor(str(torch.__version__))))
    for library in [*fitting, *others]:
        if library.is_file():
            try:
                record = json.loads(record_path(library).read_text())
            except (OSError, ValueError):
                record = {}
            return BuiltOp("prebuilt", library, record if isinstance(record, dict) else {})
    return None


def record_path(library: Path) -> Path:
    """Returns the file beside a prebuilt op that says what it was made from."""
    return library.with_name(f"{stem(library.name) or library.name.partition('.')[0]}.{RECORD}")


def mismatch(built: BuiltOp, requirements: Mapping[str, str]) -> str:
    """Returns why ``built`` must not be loaded by a process with ``requirements``; an empty string if it fits."""
    if problem := _why_not_as_safe_as_this_module(built.library):
        return problem
    if not built.record:
        return f"{record_path(built.library).name} is missing"
    if built.record.get(MARK):
        requirements = portable_requirements(requirements)
    differences = [
        f"{name}: built for {built.record.get(name)}, here {wanted}"
        for name, wanted in requirements.items()
        if built.record.get(name) != wanted
    ]
    return "; ".join("its sources changed" if text.startswith("sources:") else text for text in differences)


def _why_not_as_safe_as_this_module(library: Path) -> str:
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


# Built just in time


@dataclass(frozen=True)
class CacheEntry:
    """One op in the cache, built or yet to be."""

    folder: Path
    name: str

    @property
    def library(self) -> Path:
        """Path of the shared object."""
        return self.folder / f"{self.name}.so"

    @property
    def log(self) -> Path:
        """Path of the last failed build's output; beside the entry, because a failed one is removed."""
        return self.folder.with_suffix(".log")

    def why_not_trusted(self) -> str:
        """Returns why others may have written the entry; an empty string if they cannot have, or none exists."""
        if not os.path.lexists(self.folder):
            return ""
        return trust.why_not_trusted(self.folder, self.library, self.folder / RECORD)

    def record(self) -> dict[str, object] | None:
        """Returns what the op was made from; None without a finished build that only this user can have written."""
        if self.why_not_trusted():
            return None
        try:
            record = json.loads((self.folder / RECORD).read_text())
            complete = self.library.stat().st_size == record["bytes"]  # a copied or full disk may have cut it short
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return record if complete else None

    def discard(self) -> None:
        """Makes the next build replace this entry."""
        with contextlib.suppress(OSError):
            (self.folder / RECORD).unlink()


def find_cached(recipe: Recipe) -> CacheEntry | None:
    """Returns the finished build of ``recipe``, or None.

    Without a compiler at hand (an image that was given a filled cache), any build of the same sources for this torch,
    Python and machine serves.
    """
    folder_name = f"{recipe.name}-{recipe.key()}"
    for root in trust.roots():
        entry = CacheEntry(root / folder_name, recipe.name)
        if entry.record() is not None:
            return entry
        if recipe.compiler is None:
            needed = recipe.requirements().items()
            for folder in sorted(root.glob(f"{recipe.name}-*/")):
                record = CacheEntry(folder, recipe.name).record()
                if record is not None and needed <= record.items():
                    return CacheEntry(folder, recipe.name)
    return None


def left_out(name: str) -> str:
    """Returns why an op in the cache is not loaded, for a message; empty if there is none."""
    root = trust.default_root()
    problem = trust.why_not_a_root(root)
    if not problem:
        entries = (CacheEntry(folder, name) for folder in sorted(root.glob(f"{name}-*/")))
        problem = next(filter(None, (entry.why_not_trusted() for entry in entries)), "")
    return problem and f". {name} is not loaded from {root}, because others could have changed it: {problem}"
