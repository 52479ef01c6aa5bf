"""The table of ops: whether each is built ahead of time and usable here, and what it was compiled with."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from nvme_ops.op_builder import ALL_OPS, GDSBuilder, OpBuilder, cache, compiler, cufile, prebuilt, sources

from . import toolchain, torch_info
from .packages import install_command
from .result import Json, Result, Status

_HAVE_LIBAIO = "-DNVME_OPS_HAVE_LIBAIO=1"


@dataclass(frozen=True)
class Built:
    """A compiled op that ``load`` would use, and what it was made from."""

    how: str  # "prebuilt" or "cached"
    library: Path
    record: Mapping[str, object]


def row(builder: OpBuilder) -> Result:
    """Reports whether an op is installed ahead of time, and whether it can be loaded and used."""
    name = builder.name
    present = prebuilt.find(name)
    expected = _expected(builder)
    data: dict[str, Json] = {"installed": present is not None, "compatible": False, "expected": expected}
    data["warnings"] = []
    broken = torch_info.problem()
    if broken is not None:
        return Result(name, Status.NO, f"torch: {broken.detail}", broken.fix, data)
    misfit = _misfit(builder, present) if present is not None else ""
    if not builder.is_buildable() or (misfit and not builder.is_cached() and builder.toolchain_problem()):
        reason = builder.error_log or builder.toolchain_problem() or "not compatible"
        words = f"the prebuilt op does not fit ({misfit}), and {reason}" if misfit else reason
        fix = "unset TORCH_EXTENSIONS_DIR  # or name a folder that only you can write to" if cache.refusal() else ""
        return Result(name, Status.NO, words.partition("; fix: set TORCH")[0], fix or _build_fix(), data)
    if not builder.is_compatible():
        lines = (builder.error_log or "not compatible").splitlines()
        parts = [line.partition("; fix: ") for line in (lines if expected else lines[:1])]
        data["warnings"] = [words for words, _, _ in parts]
        return Result(name, Status.NO, "; ".join(words for words, _, _ in parts), parts[0][2] or _build_fix(), data)
    data["compatible"] = True
    found = built(builder)
    data["compiled"] = None if found is None else found.how
    warnings, fix = _missing(builder)
    if misfit:
        warnings.insert(0, f"the prebuilt {name} op is not used, it is built just in time instead: {misfit}")
        pip = f"{sys.executable} -m pip install --force-reinstall --no-build-isolation"
        fix = f"{builder.BUILD_VAR}=1 {pip} {sources.requirement()}"
    data["warnings"] = warnings
    if warnings:
        works = not misfit and all("libaio" in each for each in warnings)  # as well, on another backend
        return Result(name, Status.OKAY if works else Status.WARNING, warnings[0], fix, data)
    return Result(name, Status.OKAY, data=data)


def _expected(builder: OpBuilder) -> bool:
    """Returns whether the op should work on this machine: ``gds`` needs a GPU, which most machines lack."""
    return not isinstance(builder, GDSBuilder) or bool(cufile.gpu(builder.root).found)


def _missing(builder: OpBuilder) -> tuple[list[str], str]:
    """Reports what the builder says the op could also use, and the command that installs it."""
    parts = [warning.partition("; fix: ") for warning in builder.warnings]
    warnings = [words for words, _, _ in parts]
    if any("libaio" in words for words in warnings):
        return warnings, install_command("libaio")
    return warnings, next((fix for _, _, fix in parts if fix), "".join(warnings[-1:]))


def _misfit(builder: OpBuilder, present: prebuilt.Prebuilt) -> str:
    return prebuilt.mismatch(present, builder.recipe().requirements()) or _why_not_loadable(present.library)


def _why_not_loadable(library: Path) -> str:
    """Returns the dynamic linker's error, with torch loaded so that its libraries are found; initializes no module."""
    try:
        ctypes.CDLL(str(library), mode=os.RTLD_LOCAL | os.RTLD_NOW)
    except OSError as error:
        return str(error)
    return ""


def if_needed(check: Callable[[], Result]) -> Result:
    """Runs a check of what compiles an op; no complaint if all ops are compiled already."""
    found = check()
    if found.status is not Status.NO or any(built(builder) is None for builder in ALL_OPS.values()):
        return found
    words = f"{found.detail.partition(':')[0]}, nor needed: the ops are built"
    return replace(found, status=Status.INFO, detail=words, fix="")


def _build_fix() -> str:
    """Returns the command for the first thing that a build lacks."""
    for result in (toolchain.compiler(), toolchain.python_headers(), toolchain.ninja()):
        if result.status in (Status.NO, Status.FAIL):
            return result.fix
    if compiler.compile_flags() or compiler.link_flags():
        return "unset CPPFLAGS CFLAGS CXXFLAGS LDFLAGS  # or correct what the compiler complains about"
    return install_command("compiler")


def built(builder: OpBuilder) -> Built | None:
    """Returns the compiled op that ``load`` would use; None if it would compile first, or torch cannot be imported."""
    if torch_info.problem() is not None:
        return None
    recipe = builder.recipe()
    present = prebuilt.find(builder.name)
    if present is not None and not prebuilt.mismatch(present, recipe.requirements()):
        return Built("prebuilt", present.library, present.record)
    entry = cache.find(recipe)
    record = entry.record() if entry is not None else None
    return Built("cached", entry.library, record) if entry is not None and record is not None else None


def has_libaio(builder: OpBuilder) -> bool:
    """Returns whether the op was compiled with libaio's header, or would be."""
    found = built(builder)
    flags = found.record.get("cxx_args") if found is not None else builder.cxx_args()
    return isinstance(flags, list) and _HAVE_LIBAIO in flags


def compiled_with() -> list[Result]:
    """Reports what each compiled op was compiled with; nothing for one that is not compiled yet."""
    results = []
    for builder in ALL_OPS.values():
        found = built(builder)
        if found is None:
            continue
        record = found.record
        cuda = record.get("cuda")
        words = f"torch {record.get('torch')}, CUDA {cuda if cuda not in (None, 'None') else 'none'}, {found.how}"
        data: dict[str, Json] = {"how": found.how, "library": str(found.library)}
        data |= {key: str(record.get(key)) for key in ("torch", "cuda", "hip", "cxx11_abi", "compiler", "machine")}
        results.append(Result(f"{builder.name} compiled with", Status.INFO, words, data=data))
    return results


def unusable(results: Sequence[Result], named: Sequence[str] = ()) -> list[Result]:
    """Returns which of the ``named`` ops cannot be used; without names, of all that should work here."""
    bad = [result for result in results if result.status in (Status.NO, Status.FAIL)]
    return [result for result in bad if (result.name in named if named else result.data.get("expected", True))]
