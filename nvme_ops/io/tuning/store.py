"""Keeps the settings that ``nvme-tune`` found for each device, in a small file in the user's cache folder."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

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


def load(identity: Identity) -> Any:
    """Returns what ``keep`` stored for this device, kernel and way, for ``settings_of``; None if there is nothing.

    Warns:
        RuntimeWarning: the file is ignored: it is damaged or of another format (the next result replaces it), or other
            users can write to it.
    """
    try:
        path = path_of(identity)
    except RuntimeError:
        return None
    try:
        if not path.is_file():  # a pipe would block
            return None
        problem = trust.why_not_trusted(path)
        if not problem:
            return _tuned_in(parse_json(content_of(str(path), _MAX)))
        problem = f"others could change it: {problem}"
    except (OSError, FormatError):
        return None
    except _DAMAGE as error:
        problem = f"{error or 'damaged'} (the next result replaces it)"
    warnings.warn(f"{path} is ignored: {problem}", RuntimeWarning, stacklevel=1)  # one place, so it is shown once
    return None


def _tuned_in(document: Any) -> Any:
    if document["format"] != FORMAT:
        raise ValueError(f"format {document['format']} instead of {FORMAT}")
    tuned = document.get("tuned")
    if tuned is not None:
        settings_of(tuned)
    return tuned


def keep(identity: Identity, settings: Settings, found: Mapping[str, Any]) -> Path:
    """Stores settings and what else was found, in place of what was stored before; returns the file.

    Raises OSError, also if others can write to the folder, and RuntimeError without a home folder.
    """
    path = path_of(identity)
    make_folder(os.fspath(path.parent), mode=0o755)
    if problem := trust.why_not_trusted(path.parent):
        raise PermissionError(f"others could change what is kept in {path.parent}: {problem}")
    document = {"tuned": {**found, "aio": settings.as_json()}, "format": FORMAT, "identity": asdict(identity)}
    publish(os.fspath(path), (json.dumps(document, indent=2) + "\n").encode(), mode=0o600)
    return path


def settings_of(tuned: Any) -> Settings:
    """Returns the settings that ``load`` returned. Raises ValueError, LookupError or TypeError if one is invalid."""
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
    tuned = load(identify(path, way, backend))
    found = {} if tuned is None else settings_of(tuned).as_json()
    if "num_threads" in given or found.get("intra_op_parallelism") == 1:
        found.pop("intra_op_parallelism", None)
    return {**found, **given}
