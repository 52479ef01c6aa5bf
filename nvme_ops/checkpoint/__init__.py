"""Checkpoints: saves and loads tensors at the speed of the device, atomically, in the formats that people use.

``api`` is the interface; ``safetensors_file``, ``torch_file`` and ``sharded`` are the formats; ``integrity`` keeps and
compares checksums. The data move through ``nvme_ops.memory``, files are replaced by ``nvme_ops.storage.atomic``.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

Format: TypeAlias = Literal["safetensors", "torch", "pt", "sharded"]

#: By format the module that has ``plan`` and ``load``, imported when it is needed, and the suffixes by which it is
#: chosen, the more special first.
FORMATS = {
    "sharded": ("nvme_ops.checkpoint.sharded", (".safetensors.index.json", ".bin.index.json")),
    "safetensors": ("nvme_ops.checkpoint.safetensors_file", (".safetensors",)),
    "torch": ("nvme_ops.checkpoint.torch_file", (".pt", ".pth", ".bin", ".ckpt")),
}
