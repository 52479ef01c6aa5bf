"""Compiles an op through ``torch.utils.cpp_extension`` and imports the result; independent of any particular op."""

from __future__ import annotations

import contextlib
import importlib
import importlib.machinery
import importlib.util
import io
import itertools
import os
import re
import shlex
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType

from . import cache, machine, trust
from .console import usable_streams
from .recipe import Recipe

#: What a build leaves behind beside the op.
_INTERMEDIATE = ("*.o", "*.o.d", ".ninja_*", "lock", "cxx")

#: Lines of ninja's output that repeat a command instead of saying what went wrong.
_NOISE = re.compile(r"^((Error building extension .*?: )?\[\d+/\d+\] |FAILED: |ninja: )")


def build(recipe: Recipe) -> cache.CacheEntry:
    """Compiles ``recipe`` into the cache, unless another process does so first.

    Raises:
        RuntimeError: the compiler failed, in its own words, or nothing can be written.
    """
    entry = cache.CacheEntry(cache.writable_root() / f"{recipe.name}-{recipe.key()}", recipe.name)
    with cache.building(entry) as folder:
        if folder is not None:
            compile_into(folder, recipe, entry.log)
    return entry


def compile_into(folder: Path, recipe: Recipe, log: Path | None = None) -> Path:
    """Compiles ``recipe`` in ``folder`` and records there what it was made from; returns the shared object.

    Raises:
        RuntimeError: the compiler failed. The message holds its errors and names a file with all that it said: ``log``,
            else a new temporary one.
    """
    twice = [stem for stem, times in Counter(path.stem for path in recipe.sources).items() if times > 1]
    if twice:  # torch puts all object files into one folder
        raise RuntimeError(f"two source files of the {recipe.name} op have the same name: {', '.join(twice)}")
    try:
        with usable_streams(), _environment(folder, recipe):
            try:
                _compile(folder, recipe, unite(folder, recipe))
            except RuntimeError:
                if not recipe.united:
                    raise
                _compile(folder, recipe, recipe.sources)  # uniting is an optimization and must not cause failures
    except (RuntimeError, OSError, ImportError) as error:
        # the cause of an OSError is the message of the loader
        output = f"{error}: {error.__cause__}" if isinstance(error, OSError) else str(error)
        kept = _keep(output, log, f"nvme_ops_{recipe.name}_build_")
        raise RuntimeError(f"Unable to build the {recipe.name} op.\n{_essence(output)}{kept}") from None
    library = cache.CacheEntry(folder, recipe.name).library
    for pattern in _INTERMEDIATE:
        for path in folder.glob(pattern):
            path.unlink()
    cache.seal(folder, recipe)
    return library


def _keep(output: str, log: Path | None, prefix: str) -> str:
    """Writes ``output`` to a file that only this user can have made; returns a line that names it, empty on failure."""
    try:
        if log is None:
            descriptor, name = tempfile.mkstemp(prefix=prefix, suffix=".log")
        else:
            descriptor, name = trust.replace_file(log), str(log)
        with os.fdopen(descriptor, "w", errors="replace") as file:
            file.write(f"{output}\n")
    except OSError:
        return ""
    return f"\nAll output: {name}"


def unite(folder: Path, recipe: Recipe) -> list[Path]:
    """Returns the files to compile: the sources of ``recipe``, each united group replaced by a file in ``folder``."""
    units = []
    for number, group in enumerate(recipe.united, 1):
        if group:
            units.append(folder / f"united{number}.cpp")
            units[-1].write_text("".join(f'#include "{path.absolute()}"\n' for path in group))
    together = {path for group in recipe.united for path in group}
    return units + [path for path in recipe.sources if path not in together]  # those that take longest come first


def _compile(folder: Path, recipe: Recipe, units: Sequence[Path]) -> None:
    with contextlib.redirect_stderr(io.StringIO()):  # torch prints there that CUDA's toolkit has no use without a GPU
        from torch.utils import cpp_extension

    # torch remembers builds by name, and would skip or rename a second one of that name in this process: our own after
    # a failure, or DeepSpeed's op, which is called the same
    remembered = cpp_extension.JIT_EXTENSION_VERSIONER.entries
    before = remembered.pop(recipe.name, None)
    try:
        cpp_extension.load(
            name=recipe.name,
            sources=[str(path) for path in units],
            extra_cflags=_for_ninja(recipe.cxx_args),
            extra_cuda_cflags=_for_ninja(recipe.nvcc_args),
            extra_ldflags=_for_ninja(recipe.ldflags),
            extra_include_paths=list(recipe.include_paths),
            build_directory=str(folder),
            with_cuda=False,
            is_python_module=False,  # imported from its final place, under its full name
            verbose=False,  # otherwise torch prints the compiler's output instead of raising it
        )
    finally:
        remembered.pop(recipe.name, None)
        if before is not None:
            remembered[recipe.name] = before


def _for_ninja(flags: Sequence[str]) -> list[str]:
    """Returns ``flags`` quoted for torch's ninja file, so that the compiler gets them unchanged."""
    return [shlex.quote(flag).replace("$", "$$") for flag in flags]


def import_library(name: str, library: Path) -> ModuleType:
    """Imports the extension module ``name`` from the file ``library``, as if it had been found on the path.

    Raises:
        ImportError: it cannot be loaded.
    """
    loader = importlib.machinery.ExtensionFileLoader(name, str(library))
    spec = importlib.util.spec_from_file_location(name, library, loader=loader)
    if spec is None:
        raise ImportError(f"{library} is not a module that Python can load", name=name, path=str(library))
    module = importlib.util.module_from_spec(spec)
    package, _, last = name.rpartition(".")
    parent = importlib.import_module(package) if package else None
    sys.modules[name] = module
    try:
        loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    if parent is not None:
        setattr(parent, last, module)
    return module


@contextlib.contextmanager
def _environment(folder: Path, recipe: Recipe) -> Iterator[None]:
    """Makes torch find ninja wherever pip put it, and the compiler that the recipe names."""
    changes = {"PATH": os.environ.get("PATH", os.defpath)}
    ninja = machine.ninja_directory()
    if ninja is not None and shutil.which("ninja") is None:
        changes["PATH"] += os.pathsep + ninja
    if recipe.compiler is not None:
        command = recipe.compiler.command
        if len(command) > 1:  # torch treats CXX as one word
            script = folder / "cxx"
            script.write_text(f'#!/bin/sh\nexec {shlex.join(command)} "$@"\n')
            script.chmod(0o755)
            command = (str(script),)
        changes["CXX"] = command[0]
    saved = {name: os.environ[name] for name in changes if name in os.environ}
    os.environ.update(changes)
    try:
        yield
    finally:
        for name in changes.keys() - saved:
            os.environ.pop(name, None)
        os.environ.update(saved)


def _essence(output: str, limit: int = 60) -> str:
    """Returns the compiler's output without the commands that ninja repeats; the first lines hold the cause."""
    lines = output.splitlines()
    commands = {line for previous, line in itertools.pairwise(lines) if previous.startswith("FAILED: ")}
    said = [line for line in lines if line not in commands and not _NOISE.match(line)]
    return "\n".join(said[:limit] + (["..."] if len(said) > limit else []))
