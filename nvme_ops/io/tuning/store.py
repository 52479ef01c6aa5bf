"""Keeps the settings that ``nvme-tune`` found for each device, in a small file in the user's cache folder."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from nvme_ops.base.errors import FormatError
from nvme_ops.base.settings import Settings
from nvme_ops.base.text import parse_json
from nvme_ops.filesystem.device import Identity, identify
from nvme_ops.filesystem.files import make_folder, try_lock, unlock_and_close
from nvme_ops.filesystem.publication import content_of, publish
from nvme_ops.op_builder import trust

#: Version of the files; others are ignored. It also changes when the engine moves bytes in another way.
FORMAT = 2
_PATIENCE = 50  # tenths of a second that a process waits for others to save
_MAX = 16 << 20  # bytes of a file
_DAMAGE = ValueError, LookupError, TypeError, AttributeError, OverflowError


def folder() -> Path:
    """Returns ``nvme_ops/tune`` in ``$XDG_CACHE_HOME`` (ignored if relative), else in ``~/.cache``.

    Raises RuntimeError without a home folder.
    """
    given = os.environ.get("XDG_CACHE_HOME", "")
    base = Path(given) if os.path.isabs(given) else Path.home() / ".cache"
    if not base.is_absolute():
        raise RuntimeError(f"HOME={os.environ.get('HOME')!r} is not an absolute path")
    return base / "nvme_ops" / "tune"


def path_of(identity: Identity) -> Path:
    """Returns the file of a device. Raises RuntimeError without a home folder."""
    return folder() / f"{identity.file_system}-{identity.way}-{identity.key}.json".replace("/", "-")


def load(identity: Identity, section: str, check: Callable[[Any], object]) -> Any:
    """Returns a section of the file for this device, kernel and way; None if there is none.

    ``check`` raises ValueError, LookupError, TypeError, AttributeError or OverflowError for a damaged section.

    Warns:
        RuntimeWarning: the file is ignored: it is damaged or of another format (the next result replaces it), or other
            users can write to it.
    """
    try:
        path = path_of(identity)
    except RuntimeError:
        return None
    document, problem = _read(path)
    found = document.get(section)
    if found is not None and not problem:
        problem = problem_of(found, check)
    if problem:
        warnings.warn(f"{path} is ignored: {problem}", RuntimeWarning, stacklevel=1)  # one place, so it is shown once
    return None if problem else found


def _read(path: Path) -> tuple[dict[str, Any], str]:
    """Returns the file's content, or an empty one and why the file is ignored."""
    try:
        if not path.is_file():  # a pipe would block
            return {}, ""
        if loose := trust.why_not_trusted(path):
            return {}, f"others could change it: {loose}"
        document = parse_json(content_of(str(path), _MAX))
        if document["format"] != FORMAT:
            raise ValueError(f"format {document['format']} instead of {FORMAT}")
        return dict(document), ""
    except (OSError, FormatError):
        return {}, ""
    except _DAMAGE as error:
        return {}, _damage(error)


def problem_of(found: Any, check: Callable[[Any], object]) -> str:
    """Returns what is wrong with a section, if anything; ``check`` as for ``load``."""
    try:
        check(found)
    except _DAMAGE as error:
        return _damage(error)
    return ""


def _damage(error: Exception) -> str:
    return f"{error or 'damaged'} (the next result replaces it)"


@contextmanager
def changing(identity: Identity) -> Iterator[dict[str, Any]]:
    """Yields the content of a device's file to be changed, and replaces the file at the end of the block.

    One process at a time does so; after waiting for 5 seconds another one goes ahead. A damaged file counts as empty.
    Raises OSError, also if others can write to the folder, and RuntimeError without a home folder.
    """
    path = path_of(identity)
    make_folder(os.fspath(path.parent), mode=0o755)
    if problem := trust.why_not_trusted(path.parent):
        raise PermissionError(f"others could change what is kept in {path.parent}: {problem}")
    lock = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        any(try_lock(lock, patient=True) for _ in range(_PATIENCE))
        document, _ = _read(path)
        yield document
        document.update(format=FORMAT, identity=asdict(identity))
        publish(os.fspath(path), (json.dumps(document, indent=2) + "\n").encode(), mode=0o600)
    finally:
        unlock_and_close(lock)


def keep(identity: Identity, settings: Settings, found: Mapping[str, Any]) -> Path:
    """Stores settings and what else was found as the section ``tuned``; returns the file. Raises as ``changing``."""
    with changing(identity) as document:
        document["tuned"] = {**found, "aio": settings.as_json()}
    return path_of(identity)


def settings_of(tuned: Any) -> Settings:
    """Returns the settings in a section ``tuned``. Raises ValueError, LookupError or TypeError if one is invalid."""
    values = tuned["aio"]
    types = {name: type(value) for name, value in Settings().as_json().items()}
    if {name: type(value) for name, value in values.items()} != types or any(
        value < 1 for value in values.values() if not isinstance(value, bool)
    ):
        raise ValueError(f"its settings are {values}")
    return Settings(**values)


def arguments(path: str | os.PathLike[str], way: str, backend: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments of a handle: those given, and for the others what ``nvme-tune`` found, if anything.

    One lane, the default, is left to the engine. Raises FileNotFoundError if the folder of ``path`` is missing.
    """
    given = {name: value for name, value in given.items() if value is not None}
    tuned = load(identify(path, way, backend), "tuned", settings_of)
    found = {} if tuned is None else settings_of(tuned).as_json()
    if "num_threads" in given or found.get("intra_op_parallelism") == 1:
        found.pop("intra_op_parallelism", None)
    return {**found, **given}
