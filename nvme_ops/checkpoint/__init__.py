"""Checkpoints: saves and loads tensors at the speed of the device, atomically, in the formats that people use.

``api`` is the interface; ``safetensors_file``, ``torch_file`` and ``sharded`` are the formats; ``integrity`` keeps and
compares checksums. The data move through ``nvme_ops.memory``, files are replaced by ``nvme_ops.storage.publication``.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

Format: TypeAlias = Literal["safetensors", "torch", "pt", "sharded"]

#: By format the module that has ``plan`` and ``load``, imported when it is needed, and the suffixes by which it is
#: chosen, the more special first.
FORMATS = {
    "sharded": ("nvme_ops.checkpoint.sharded", (".safetensors.index.json", ".bin.index.json")),
    "safetensors": ("nvme_ops.checkpoint.safetensors_file", (".safetensors",)),
    "torch": ("nvme_ops.checkpoint.torch_file", (".pt", ".pth", ".bin", ".ckpt")),
}

if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name != "background":  # whose release_memory() is for users, before the first save too
            raise AttributeError(f"module 'nvme_ops.checkpoint' has no attribute {name!r}")
        return importlib.import_module("nvme_ops.checkpoint.background")
