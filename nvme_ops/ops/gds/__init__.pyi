"""The native module ``gds``: the engine with cuFile, and the names of ``nvme_ops.io.gds``.

Before it is loaded, ``GDSBuilder`` is all that ``nvme_ops.ops.gds`` has.
"""

from collections.abc import Sequence
from typing import Any

import torch

from nvme_ops.io.gds import gds_handle as gds_handle
from nvme_ops.op_builder import GDSBuilder as GDSBuilder
from nvme_ops.ops.async_io import Engine as Engine
from nvme_ops.ops.async_io import Operation as Operation

def open_driver(candidates: Sequence[str], /) -> dict[str, Any]: ...
def pin(tensor: torch.Tensor, /) -> bool: ...
def unpin(tensor: torch.Tensor, /) -> bool: ...
def is_pinned(tensor: torch.Tensor, /) -> bool: ...
def shut_down() -> None: ...
