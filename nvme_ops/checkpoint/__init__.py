"""Saves and loads checkpoints at the speed of the device, atomically, in the formats that people use.

``api`` and ``background`` are the interface; ``safetensors_file``, ``torch_file`` and ``sharded`` are the formats;
``dcp`` is for several ranks; ``cli`` is the command ``nvme-checkpoint``. ``nvme_ops.memory`` moves the data,
``nvme_ops.filesystem.publication`` replaces the files.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

FormatName: TypeAlias = Literal["safetensors", "torch", "pt", "sharded"]

#: For each format the suffixes that select it.
FORMATS: dict[str, tuple[str, ...]] = {
    "sharded": (".safetensors.index.json", ".bin.index.json"),
    "safetensors": (".safetensors",),
    "torch": (".pt", ".pth", ".bin", ".ckpt"),
}

if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name != "background":  # users may call its release_memory() before the first save
            raise AttributeError(f"module 'nvme_ops.checkpoint' has no attribute {name!r}")
        return importlib.import_module("nvme_ops.checkpoint.background")
