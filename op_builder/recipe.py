"""What an op is made of: native sources, flags, compiler and torch, which together determine a build."""

from __future__ import annotations

import hashlib
import importlib.machinery
import importlib.metadata
import json
import platform
import shlex
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

from .machine import Compiler

#: The package's folder: ``nvme_ops``, or the checkout when ``op_builder`` is imported from its real place.
PACKAGE = Path(__file__).parent.parent

#: Root of the native code, and the include root. Not resolved, so that it holds for checkout, sdist and wheel.
CSRC = PACKAGE / "csrc"

#: Includes point from right to left only.
LAYERS = ("base", "packed", "backends", "engine", "binding")

#: Groups of layers that are compiled as one file each. Most of the time goes into headers that the files of a group
#: share, so this takes a third of it; the groups are compiled side by side. Files of a group must not define the same
#: name twice, not even in unnamed namespaces (they are then compiled one by one, and a test fails).
UNITED = (("base", "backends", "engine"), ("packed",), ("binding",))

#: The oldest torch whose headers the ops compile with.
LEAST_TORCH = "2.4"

#: Beginnings of the names of files that belong to one op alone; all others belong to every op.
OWN = {"async_io": ("async_io",), "gds": ("gds", "cufile")}

_OTHERS = {op: tuple(start for name, starts in OWN.items() if name != op for start in starts) for op in OWN}

HEADERS = ("*.h", "*.hpp", "*.inc")


def compiled(op: str, root: Path = CSRC, layers: Sequence[str] = LAYERS) -> list[Path]:
    """Returns every file compiled into ``op``, sorted within its layer so that builds are reproducible."""
    files: list[Path] = []
    for layer in layers:
        files += sorted((root / layer).rglob("*.cpp"))
    return [path for path in files if not path.name.startswith(_OTHERS[op])]


def headers(root: Path) -> list[Path]:
    """Returns every file under ``root`` that sources may include."""
    return sorted([path for pattern in HEADERS for path in root.rglob(pattern)])


@dataclass(frozen=True)
class Recipe:
    """The inputs of one build. Two recipes with the same key produce interchangeable ops."""

    name: str
    sources: tuple[Path, ...]  #: what is compiled
    united: tuple[tuple[Path, ...], ...]  #: groups of sources that are compiled as one file each, to save time
    headers: tuple[Path, ...]  #: what the sources may include; hashed, not compiled
    include_paths: tuple[str, ...]
    cxx_args: tuple[str, ...]
    ldflags: tuple[str, ...]
    compiler: Compiler | None  #: None without one: such a recipe can find builds but not make them

    def requirements(self) -> dict[str, str]:
        """Returns what any finished op must have been made from and for, to be loadable here."""
        return requirements([*self.sources, *self.headers])

    def facts(self) -> dict[str, object]:
        """Returns all inputs, as recorded beside a finished op."""
        return {
            "name": self.name,
            **self.requirements(),
            "include_paths": list(self.include_paths),
            "cxx_args": list(self.cxx_args),
            "ldflags": list(self.ldflags),
            "compiler": self.compiler and [*self.compiler.command, self.compiler.identity],
        }

    def key(self) -> str:
        """Returns 20 hexadecimal digits: enough to be unique, short enough for a folder name."""
        text = json.dumps(self.facts(), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:20]


def requirements(files: Iterable[Path]) -> dict[str, str]:
    """Returns what an op made of ``files`` must match to be loadable here; compiler and flags do not matter."""
    return {"sources": content_hash(files), **runtime()}


def content_hash(files: Iterable[Path]) -> str:
    """Returns a hash of the names and contents of ``files``, independent of their location."""
    digest = hashlib.sha256()
    for path in files:
        data = path.read_bytes()
        digest.update(f"{path.parent.name}/{path.name} {len(data)}\n".encode())
        digest.update(data)
    return digest.hexdigest()


def runtime() -> dict[str, str]:
    """Returns the torch, Python and machine of this process: a compiled op fits no other."""
    import torch

    return {
        "torch": str(torch.__version__),
        "torch_commit": str(torch.version.git_version),
        "cxx11_abi": str(torch.compiled_with_cxx11_abi()),
        "cuda": str(torch.version.cuda),
        "hip": str(torch.version.hip),
        "python": importlib.machinery.EXTENSION_SUFFIXES[0],  # implementation, version, ABI and platform in one word
        "machine": platform.machine(),
    }


def old_torch(version: str = "") -> str:
    """Returns that this version of torch, or the installed one, is too old, with the fix; empty if it is not."""
    import torch
    from packaging.version import Version

    version = version or str(torch.__version__)
    if Version(version).release >= Version(LEAST_TORCH).release:  # a nightly of it will do
        return ""
    pip = f"{shlex.quote(sys.executable)} -m pip"
    return f"torch {version} is older than {LEAST_TORCH}; fix: {pip} install --upgrade torch"


def requirement() -> str:
    """Returns what pip needs to install this package again: its source folder or file, else its name on an index."""
    try:
        noted = importlib.metadata.distribution("nvme-ops").read_text("direct_url.json")
        url = urlsplit(str(json.loads(noted or "{}").get("url", "")))
        place = unquote(url.path) if url.scheme == "file" else "nvme-ops"
    except (importlib.metadata.PackageNotFoundError, ValueError, OSError):
        checkout = PACKAGE.resolve().parent
        place = str(checkout) if (checkout / "pyproject.toml").exists() else "nvme-ops"
    return shlex.quote(place)
