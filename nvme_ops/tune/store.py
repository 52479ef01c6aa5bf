"""Stores what was found for each device, in a small file in the user's cache folder."""

from __future__ import annotations

import fcntl
import json
import os
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from nvme_ops.errors import FormatError
from nvme_ops.op_builder import trust
from nvme_ops.settings import Settings
from nvme_ops.storage.atomic import content_of, make_folder, replacing
from nvme_ops.storage.identity import Identity
from nvme_ops.text import parse_json

_PATIENCE = 500  # hundredths of a second for which a process waits for others that save
_MOST = 16 << 20  # bytes of a file
FORMAT = 1  # of the files; those of another one are ignored
_HASTY = 0.25  # of the earlier run's seconds


def folder() -> Path:
    """Returns ``nvme_ops/tune`` in ``$XDG_CACHE_HOME`` (ignored if relative), else in ``~/.cache``.

    Raises RuntimeError without a home folder.
    """
    given = os.environ.get("XDG_CACHE_HOME", "")
    base = Path(given) if os.path.isabs(given) else Path.home() / ".cache"
    if not base.is_absolute():
        raise RuntimeError(f"HOME={os.environ.get('HOME')!r} is not an absolute path")
    return base / "nvme_ops" / "tune"


def path_of(identity: Identity, section: str = "") -> Path:
    """Returns the file with the settings of a device, or another section's. Raises RuntimeError without a home."""
    words = [identity.file_system, identity.way, identity.key, section]
    return folder() / f"{'-'.join(filter(None, words))}.json".replace("/", "-")


def load(identity: Identity) -> Settings | None:
    """Returns the settings stored for this device, kernel and way, or None. Warns as ``document`` does."""
    found = document(identity)
    return None if found is None else settings_of(found)


def settings_of(document: Mapping[str, Any]) -> Settings:
    """Returns the settings in what ``document`` returned. Raises one of its errors unless they are complete."""
    return _settings_of(document["aio"])


def document(
    identity: Identity, section: str = "", check: Callable[[Mapping[str, Any]], object] = settings_of
) -> dict[str, Any] | None:
    """Returns everything stored for this device, kernel and way, in this section; or None.

    Args:
        identity: of the device.
        section: of those given to ``save_section``; empty: the settings found.
        check: raises ValueError, LookupError, TypeError or AttributeError if the content is not what was stored.

    Warns:
        RuntimeWarning: the file is damaged or of another format; it is ignored and the next tuning replaces it. Or
            other users can write to it.
    """
    try:
        path = path_of(identity, section)
        if path.exists() and (problem := trust.why_not(path)):
            warnings.warn(f"{path} is ignored, because others could change it: {problem}", RuntimeWarning, stacklevel=2)
            return None
        if path.exists() and not path.is_file():  # a pipe would be waited for
            return None
        content = content_of(str(path), _MOST)
    except (OSError, RuntimeError, FormatError):
        return None
    try:
        found = parse_json(content)
        if found["format"] != FORMAT:
            raise ValueError(f"format {found['format']} instead of {FORMAT}")
        check(found)
        return dict(found)
    except (ValueError, LookupError, TypeError, AttributeError, OverflowError) as error:
        warnings.warn(
            f"{path} is ignored: {error or 'damaged'} (the next result replaces it)", RuntimeWarning, stacklevel=2
        )
        return None


def _settings_of(values: dict[str, Any]) -> Settings:
    """Raises ValueError unless it has all settings, of their types, and no others."""
    types = {name: type(value) for name, value in Settings().as_json().items()}
    if {name: type(value) for name, value in values.items()} != types or any(
        value < 1 for value in values.values() if not isinstance(value, bool)
    ):
        raise ValueError(f"its settings are {values}")
    return Settings(**values)


def save(identity: Identity, settings: Settings, found: Mapping[str, Any]) -> Path:
    """Writes a file atomically; of several writers the last one wins. Returns its path.

    ``found``: whatever else is worth storing. Raises OSError, also if others can write to the folder, and RuntimeError
    without a home folder.
    """
    return save_section(identity, "", {**found, "aio": settings.as_json()})


@contextmanager
def locked(identity: Identity, section: str) -> Iterator[None]:
    """Lets one process at a time read the file of a section and replace it; for seconds only. Raises as ``save``."""
    folder = path_of(identity, section).parent
    _make(folder)
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for _ in range(_PATIENCE):
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(0.01)
            except OSError:  # a file system without locks
                break
        yield
    finally:
        with suppress(OSError):
            fcntl.flock(fd, fcntl.LOCK_UN)  # a child of a fork may have it open too
        os.close(fd)


def save_section(identity: Identity, section: str, content: Mapping[str, Any]) -> Path:
    """Writes the file of a section as ``save`` does."""
    path = path_of(identity, section)
    _make(path.parent)
    kept = {
        **content,
        "format": FORMAT,
        "identity": asdict(identity),
        "tuned": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }
    with replacing(path) as new, open(new.fd, "w", encoding="utf-8", closefd=False) as file:
        os.fchmod(new.fd, 0o600)
        file.write(json.dumps(kept, indent=2) + "\n")
    return path


def why_keep(known: Mapping[str, Any], found: Mapping[str, Any]) -> str:
    """Returns why ``known`` is more reliable than ``found``; an empty string if ``found`` may replace it.

    Both come from ``report.details``; ``known`` may also come from a version that tuned in the background.
    """
    if (known.get("from_page_cache") or 0) < 0.5 <= (found.get("from_page_cache") or 0):
        return "this run read from the page cache, that one from the device"
    if missing := sorted(_directions(known) - _directions(found)):
        return f"this run left out {' and '.join(missing)}s"
    if known.get("complete") and not found.get("complete"):
        return "the final of this run was cut short"
    if found["seconds"] < _HASTY * known.get("seconds", 0):
        return f"this run took {found['seconds']:.0f} s, that one {known['seconds']:.0f} s"
    return ""


def _directions(document: Mapping[str, Any]) -> set[str]:
    return set(document.get("bytes_per_second", {}).get("best", {}))


def _make(place: Path) -> None:
    """Makes the folder. Raises PermissionError if others can write to it: what is kept there would be theirs."""
    make_folder(os.fspath(place), mode=0o755)
    if problem := trust.why_not(place):
        raise PermissionError(f"others could change what is kept in {place}: {problem}")
