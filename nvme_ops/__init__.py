"""Moves PyTorch tensors between NVMe storage and memory at the speed of the device.

    import nvme_ops
    handle = nvme_ops.aio_handle()                          # DeepNVMe's interface
    file = nvme_ops.open("weights", "r")                    # a file object that reads tensors
    tensor = nvme_ops.empty(1024, 1024)                     # memory that storage fills fastest: huge pages
    nvme_ops.save(model, "model.safetensors")               # checkpoints, atomic and at the speed of the device
    nvme_ops.load("model.safetensors", into=model)

Importing the package loads nothing: modules load when a name is first used, the compiled op when a handle is made.
``NVME_OPS_DEEPSPEED=1`` is the exception: then importing it installs ``nvme_ops.integrations.deepspeed``.
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nvme_ops import data as data
    from nvme_ops import dcp as dcp
    from nvme_ops import offload as offload
    from nvme_ops import op_builder as op_builder
    from nvme_ops import storage as storage
    from nvme_ops.base.errors import ChecksumError as ChecksumError
    from nvme_ops.base.errors import FormatError as FormatError
    from nvme_ops.checkpoint.api import load as load
    from nvme_ops.checkpoint.api import save as save
    from nvme_ops.checkpoint.background import save_async as save_async
    from nvme_ops.io.engine import Priority as Priority
    from nvme_ops.io.file import File as File
    from nvme_ops.io.file import open as open  # noqa: A004  (used as nvme_ops.open)
    from nvme_ops.io.future import IoFuture as IoFuture
    from nvme_ops.io.gds import gds_handle as gds_handle
    from nvme_ops.io.handle import aio_handle as aio_handle
    from nvme_ops.io.tensors import empty as empty

__version__ = "0.2.0"

_MODULE_OF = {
    "ChecksumError": "nvme_ops.base.errors",
    "File": "nvme_ops.io.file",
    "FormatError": "nvme_ops.base.errors",
    "IoFuture": "nvme_ops.io.future",
    "Priority": "nvme_ops.io.engine",
    "aio_handle": "nvme_ops.io.handle",
    "empty": "nvme_ops.io.tensors",
    "gds_handle": "nvme_ops.io.gds",
    "load": "nvme_ops.checkpoint.api",
    "open": "nvme_ops.io.file",
    "save": "nvme_ops.checkpoint.api",
    "save_async": "nvme_ops.checkpoint.background",
}


_PACKAGES = ["data", "dcp", "offload", "op_builder", "storage"]

__all__ = ["__version__", *_PACKAGES, *_MODULE_OF]

if not TYPE_CHECKING:  # so that type checkers report names that do not exist

    def __getattr__(name: str) -> Any:
        if name in _MODULE_OF:
            value = getattr(importlib.import_module(_MODULE_OF[name]), name)
            globals()[name] = value
            return value
        if name in (*_PACKAGES, "checkpoint"):  # importing sets the attribute
            return importlib.import_module(f"nvme_ops.{name}")
        raise AttributeError(f"module 'nvme_ops' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__


if os.environ.get("NVME_OPS_DEEPSPEED") not in (None, "", "0"):
    importlib.import_module("nvme_ops.integrations.deepspeed").install()
