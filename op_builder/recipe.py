"""Everything that determines what a build of an op produces, and its key."""

from __future__ import annotations

import hashlib
import importlib.machinery
import json
import platform
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from .compiler import Compiler


@dataclass(frozen=True)
class Recipe:
    """The inputs of one build. Two recipes with the same key produce interchangeable ops."""

    name: str
    sources: tuple[Path, ...]  #: what is compiled
    united: tuple[tuple[Path, ...], ...]  #: groups of sources that are compiled as one file each, to save time
    headers: tuple[Path, ...]  #: what the sources may include; hashed, not compiled
    include_paths: tuple[str, ...]
    cxx_args: tuple[str, ...]
    nvcc_args: tuple[str, ...]
    ldflags: tuple[str, ...]
    compiler: Compiler | None  #: None where there is none: such a recipe finds builds but makes none

    def requirements(self) -> dict[str, str]:
        """What any finished op must have been made from and for, to be loadable here."""
        return requirements([*self.sources, *self.headers])

    def facts(self) -> dict[str, object]:
        """All inputs, as recorded beside a finished op."""
        return {
            "name": self.name,
            **self.requirements(),
            "include_paths": list(self.include_paths),
            "cxx_args": list(self.cxx_args),
            "nvcc_args": list(self.nvcc_args),
            "ldflags": list(self.ldflags),
            "compiler": self.compiler and [*self.compiler.command, self.compiler.identity],
        }

    def key(self) -> str:
        """20 hexadecimal digits: enough to be unique, short enough for a folder name."""
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
