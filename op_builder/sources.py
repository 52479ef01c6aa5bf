"""The single list of native sources: the files of each op, in the order of the layers."""

from __future__ import annotations

import importlib.metadata
import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import unquote, urlsplit

#: The package's folder: ``nvme_ops``, or the checkout when ``op_builder`` is imported from its real place.
PACKAGE = Path(__file__).parent.parent

#: Root of the native code, and the include root. Not resolved, so that it holds for checkout, sdist and wheel.
CSRC = PACKAGE / "csrc"

#: Includes point from right to left only.
LAYERS = ("base", "backends", "engine", "binding")

#: Groups of layers that are compiled as one file each. Most of the time goes into headers that the files of a group
#: share, so this takes a third of it; the groups are compiled side by side. Files of a group must not define the same
#: name twice, not even in unnamed namespaces (they are then compiled one by one, and a test fails).
UNITED = (("base", "backends", "engine"), ("binding",))

#: Files whose names start so belong to one op; all others to every op.
OWN = {"async_io": ("async_io",), "gds": ("gds", "cufile", "cuda")}

HEADERS = ("*.h", "*.hpp", "*.inc")


def compiled(op: str, root: Path = CSRC, layers: Sequence[str] = LAYERS) -> list[Path]:
    """Returns every file compiled into ``op``, sorted within its layer so that builds are reproducible."""
    others = tuple(start for name, starts in OWN.items() if name != op for start in starts)
    files = (path for layer in layers for path in sorted((root / layer).rglob("*.cpp")))
    return [path for path in files if not path.name.startswith(others)]


def headers(root: Path) -> list[Path]:
    """Returns every file under ``root`` that sources may include."""
    return sorted(path for pattern in HEADERS for path in root.rglob(pattern))


def requirement() -> str:
    """Returns what pip needs to install this package again: its source folder or file, else its name on an index."""
    try:
        noted = importlib.metadata.distribution("nvme-ops").read_text("direct_url.json")
        url = urlsplit(str(json.loads(noted or "{}").get("url", "")))
    except (importlib.metadata.PackageNotFoundError, ValueError):
        url = urlsplit(
            PACKAGE.resolve().parent.as_uri() if (PACKAGE.resolve().parent / "pyproject.toml").exists() else ""
        )
    place = unquote(url.path) if url.scheme == "file" else "nvme-ops"
    return shlex.quote(place)
