"""Compiles ops through ``torch.utils.cpp_extension``, into the cache or for setup.py, and imports them.

An entry of the cache appears by one ``rename``, complete or not at all. Builders take turns by ``flock``, which the
kernel releases when a process dies, so no lock outlives its holder. Nothing is built in a folder that others can write
to.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import importlib
import importlib.machinery
import importlib.util
import io
import itertools
import json
import os
import re
import secrets
import shlex
import shutil
import stat
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Protocol

from . import finished, machine, trust
from .console import usable_streams, warn
from .finished import CacheEntry
from .recipe import Recipe, old_torch

#: The environment variable that requests every op that this machine can build.
BUILD_ALL = "NVME_BUILD_OPS"

_NO_LOCKS_HERE = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
_NOT_OURS = (errno.ELOOP, errno.EACCES, errno.EPERM, errno.EISDIR)  # opening a lock that is not this user's

#: Bytes that a build writes, at least: object files and the op.
_ROOM = 4 << 20

#: What a build leaves behind beside the op.
_INTERMEDIATE = ("*.o", "*.o.d", ".ninja_*", "lock", "cxx")

#: Lines of ninja's output that repeat a command instead of saying what went wrong.
_NOISE = re.compile(r"^((Error building extension .*?: )?\[\d+/\d+\] |FAILED: |ninja: )")


class Buildable(Protocol):
    """A builder, as far as this module needs one."""

    name: str

    def toolchain_problem(self) -> str | None:
        """Returns why nothing can be compiled here, with the fix; None if it can."""


def build(recipe: Recipe) -> CacheEntry:
    """Compiles ``recipe`` into the cache, unless another process does so first.

    Raises:
        RuntimeError: the compiler failed, in its own words, or nothing can be written.
    """
    entry = CacheEntry(writable_root() / f"{recipe.name}-{recipe.key()}", recipe.name)
    with building(entry) as folder:
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
    library = CacheEntry(folder, recipe.name).library
    for pattern in _INTERMEDIATE:
        for path in folder.glob(pattern):
            path.unlink()
    seal(folder, recipe)
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
    try:
        module = importlib.util.module_from_spec(spec)
    except ImportError as error:  # the linker's words do not say why the kernel refused
        if problem := trust.noexec(library):
            raise ImportError(f"{error}: {problem}", name=name, path=str(library)) from None
        raise
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


def why_not_built(op: Buildable) -> str | None:
    """Returns why ``op`` could not be built just in time, with the fix; None if it could.

    It needs a torch that is not too old, a working compiler, ninja, and a folder in which ops can be built, and from
    which they can be loaded.
    """
    if refused := trust.refusal() or old_torch():
        return refused
    if lacking := op.toolchain_problem():
        return lacking + finished.left_out(op.name)
    root, problem = usable_root()
    return problem if root is None else None


# Ahead of time


def prebuild(recipe: Recipe, target: Path) -> None:
    """Compiles ``recipe`` with the flags of a just-in-time build, and puts it at ``target`` with its record.

    Raises:
        RuntimeError: the compiler failed, or nothing can be written.
    """
    try:
        place = tempfile.TemporaryDirectory(prefix="nvme_ops_build_")
    except OSError as error:
        raise RuntimeError(f"the {recipe.name} op needs a temporary folder to be built in: {error}") from error
    with place as folder:
        library = compile_into(Path(folder), recipe)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(library, target)
        shutil.copy(Path(folder, finished.RECORD), finished.record_path(target))


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


def obstacle(op: Buildable) -> str | None:
    """Returns why ``op`` cannot be compiled here and now, with the fix; None if it can."""
    try:
        import torch  # noqa: F401
    except ImportError as error:
        return (
            f"it is compiled against torch, which this build cannot import ({error}). Install torch, setuptools, wheel "
            "and ninja first, then run: pip install --no-build-isolation ..."
        )
    return old_torch() or op.toolchain_problem()


# The cache: who builds an entry, and where


@contextlib.contextmanager
def building(entry: CacheEntry) -> Iterator[Path | None]:
    """Holds the exclusive right to build ``entry`` and yields the folder to build in.

    Yields None if another process has finished it meanwhile. The folder becomes the entry when the block ends, and is
    removed when it raises.
    """
    prefix = f".{entry.folder.name}."
    with _exclusive(entry.folder.with_suffix(".lock")) as alone:
        if alone:
            for leftover in entry.folder.parent.glob(f"{prefix}*"):  # of builds that were killed
                shutil.rmtree(leftover, ignore_errors=True)
        if entry.record() is not None:
            yield None
            return
        if problem := entry.why_not_trusted():
            warn(f"the cached {entry.name} op is built anew, because others could have changed it: {problem}")
        workshop = entry.folder.with_name(f"{prefix}{os.getpid()}-{secrets.token_hex(4)}")
        workshop.mkdir(0o755)  # a cache may be read by others, and written by nobody else, whatever the umask
        try:
            yield workshop
            if entry.record() is None:  # otherwise another process was first, without locks
                _clear(entry.folder)  # a damaged entry
                _publish(workshop, entry)
        finally:
            shutil.rmtree(workshop, ignore_errors=True)


def _clear(path: Path) -> None:
    """Frees the name, even if it is a folder that another user has filled, and only that user can empty."""
    aside = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    with contextlib.suppress(FileNotFoundError):
        path.rename(aside)
        if aside.is_dir() and not aside.is_symlink():
            shutil.rmtree(aside, ignore_errors=True)
        else:
            aside.unlink()


def _publish(workshop: Path, entry: CacheEntry) -> None:
    try:
        workshop.rename(entry.folder)
    except OSError:
        if entry.record() is None:  # else another process published in this very moment
            raise


def seal(folder: Path, recipe: Recipe) -> None:
    """Records in ``folder`` what its op was made from: the last step of a build."""
    library = CacheEntry(folder, recipe.name).library
    record = {**recipe.facts(), "bytes": library.stat().st_size}
    (folder / finished.RECORD).write_text(json.dumps(record, indent=1, sort_keys=True) + "\n")
    for path in folder.iterdir():  # files made with a lax umask would not be trusted
        if (mode := stat.S_IMODE(path.stat().st_mode)) & 0o022:
            path.chmod(mode & ~0o022)
        with open(path, "rb") as file:  # a power failure may leave the right size without the bytes
            os.fsync(file.fileno())


@contextlib.contextmanager
def _exclusive(path: Path) -> Iterator[bool]:
    """Holds a lock on ``path``; yields False on a file system without locks, where two builds may run concurrently."""
    descriptor = _open_lock(path)
    locked = True
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        except OSError as error:
            if error.errno not in _NO_LOCKS_HERE:
                raise
            locked = False
        yield locked
    finally:
        if locked:
            fcntl.flock(descriptor, fcntl.LOCK_UN)  # closing is not enough where a child forked meanwhile has it open
        os.close(descriptor)


def _open_lock(path: Path) -> int:
    """Opens a lock file that no other user can lock, replacing one that another user put there."""
    for attempts_left in reversed(range(5)):  # another process may do the same at the same time
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        except OSError as error:
            if error.errno not in _NOT_OURS or not attempts_left:
                raise
        else:
            facts = os.fstat(descriptor)
            if stat.S_ISREG(facts.st_mode) and facts.st_uid == os.geteuid():
                if stat.S_IMODE(facts.st_mode) & 0o077:
                    os.fchmod(descriptor, 0o600)
                return descriptor
            os.close(descriptor)
        _clear(path)
    raise RuntimeError(f"{path} is another user's, and comes back when it is removed")


def writable_root() -> Path:
    """Returns the root to build in.

    A folder named by ``TORCH_EXTENSIONS_DIR`` is used or refused. Torch's default one is replaced by a private folder
    under /tmp where it cannot be used, with a warning.

    Raises:
        RuntimeError: there is none; ``usable_root`` says why.
    """
    root, problem = usable_root()
    if root is None:
        raise RuntimeError(problem)
    if problem:
        warn(f"compiled ops are kept in {root}, because: {problem}. TORCH_EXTENSIONS_DIR names another folder.")
    return root


def usable_root() -> tuple[Path | None, str]:
    """Returns the root to build in, and why it is not the first choice; else None, and the reason with its fix.

    A root can be written, others cannot write to it, and what is in it can be loaded.
    """
    root = trust.default_root()
    problem = _why_not_usable(root)
    if not problem:
        return root, ""
    if os.environ.get("TORCH_EXTENSIONS_DIR"):
        refused = (
            f"TORCH_EXTENSIONS_DIR cannot be written: {problem}; fix: set TORCH_EXTENSIONS_DIR to a folder that can"
        )
        return None, trust.refusal() or refused
    fallback = trust.shared_fallback_root()
    trouble = "there is no folder for temporary files" if fallback is None else _why_no_fallback(fallback)
    if fallback is None or trouble:
        return None, (
            f"there is no folder for compiled ops: {problem}; {trouble}; fix: set TORCH_EXTENSIONS_DIR to a folder "
            "that you can write to, others cannot, and that is not mounted noexec (in a container: --tmpfs /ops:exec)"
        )
    return fallback, problem


def _why_not_usable(root: Path) -> str:
    """Returns why nothing can be built in ``root``, which is made; an empty string if it can."""
    problem = trust.why_not_a_root(root) or trust.noexec(root) or _why_not_writable(root)
    return problem or trust.why_not_trusted(root)  # now it is there


def _why_not_writable(root: Path) -> str:
    """Returns the system's reason why ``root`` has no place for an op; an empty string if it has."""
    try:
        trust.make_folder(root)
        with tempfile.TemporaryFile(dir=root) as file:
            os.posix_fallocate(file.fileno(), 0, _ROOM)
        return ""
    except OSError as error:
        return str(error) if error.filename else f"{error}: '{root}'"


def _why_no_fallback(fallback: Path) -> str:
    with contextlib.suppress(OSError):
        fallback.parent.mkdir(mode=0o700)
    return _why_not_usable(fallback) if trust.is_private(fallback.parent) else f"{fallback.parent} is not private"
