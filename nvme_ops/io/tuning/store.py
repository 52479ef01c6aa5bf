"""Keeps the settings that ``nvme-tune`` found for each device, in a small file in the user's cache folder."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar, cast

from nvme_ops.base.errors import FormatError
from nvme_ops.base.settings import Settings
from nvme_ops.base.text import parse_json
from nvme_ops.filesystem.device import Identity, identify
from nvme_ops.filesystem.files import make_folder
from nvme_ops.filesystem.publication import content_of, publish
from nvme_ops.op_builder import trust

#: Version of the files; others are ignored. It also changes when the engine moves bytes in another way.
FORMAT = 2
_MAX = 16 << 20  # bytes of a file
_Handle = TypeVar("_Handle")


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


def load(identity: Identity) -> Any:
    """Returns what ``keep`` stored for this device, kernel and way, for ``settings_of``; None if there is nothing.

    Warns:
        RuntimeWarning: the file is ignored: it is damaged or of another format (the next result replaces it), or other
            users can write to it.
    """
    try:
        path = path_of(identity)
        if not path.is_file():  # a pipe would block
            return None
        problem = trust.why_not_trusted(path)
        if not problem:
            document = parse_json(content_of(str(path), _MAX))
            if document["format"] != FORMAT:
                raise ValueError(f"format {document['format']} instead of {FORMAT}")
            settings_of(document["tuned"])
            return document["tuned"]
        problem = f"others could change it: {problem}"
    except (OSError, RuntimeError, FormatError):
        return None
    except (ValueError, LookupError, TypeError, AttributeError, OverflowError) as error:
        problem = f"{error or 'damaged'} (the next result replaces it)"
    warnings.warn(f"{path} is ignored: {problem}", RuntimeWarning, stacklevel=1)  # one place, so it is shown once
    return None


def keep(identity: Identity, settings: Settings, results: Mapping[str, Any]) -> Path:
    """Stores settings and what else was found, in place of what was stored before; returns the file.

    Raises OSError, also if others can write to the folder, and RuntimeError without a home folder.
    """
    path = path_of(identity)
    make_folder(os.fspath(path.parent), mode=0o755)
    if problem := trust.why_not_trusted(path.parent):
        raise PermissionError(f"others could change what is kept in {path.parent}: {problem}")
    document = {"tuned": {**results, "aio": settings.as_json()}, "format": FORMAT, "identity": asdict(identity)}
    publish(os.fspath(path), (json.dumps(document, indent=2) + "\n").encode(), mode=0o600)
    return path


def settings_of(tuned: Any) -> Settings:
    """Returns the settings that ``load`` returned. Raises ValueError, LookupError or TypeError if one is invalid."""
    values = tuned["aio"]
    types = {name: type(value) for name, value in Settings().as_json().items()}
    least = min(value for value in values.values() if value is not False)  # a switch can be off, a number not 0
    if {name: type(value) for name, value in values.items()} != types or least < 1:
        raise ValueError(f"its settings are {values}")
    return Settings(**values)


def tuned(make: Callable[..., _Handle], path: str | os.PathLike[str], way: str, given: Mapping[str, Any]) -> _Handle:
    """Makes a handle with the arguments given and, for the others, what is kept for that device, if anything.

    One lane, the default, is left to the engine. Raises as ``aio_handle.tuned``.
    """
    given = {name: value for name, value in given.items() if value is not None}
    handle: Any = make(**given)
    kept = load(identify(path, way, handle.backend))
    if kept is None:
        return cast("_Handle", handle)
    settings = settings_of(kept).as_json()
    if "num_threads" in given or settings["intra_op_parallelism"] == 1:
        del settings["intra_op_parallelism"]
    return make(**{**settings, **given})
