"""A save that is decided and not yet written."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch

from nvme_ops.checkpoint.pieces import Borrowed
from nvme_ops.handle import aio_handle


class Plan(Protocol):
    """What a format has made of an object: everything but the bytes of its tensors.

    ``tensors`` are read when it is written; whoever wants to change them sooner puts copies in their places.
    """

    tensors: list[torch.Tensor]

    def write(self, path: str, *, durable: bool, handle: aio_handle, borrowed: Borrowed | None = None) -> None:
        """Writes it all, atomically. ``borrowed``: tensors to be read first."""


def require_strings(metadata: Mapping[str, str]) -> None:
    """Raises TypeError for ``metadata`` that a file cannot keep."""
    for key, value in metadata.items():
        if not isinstance(key, str) or not isinstance(value, str):
            raise TypeError(f"metadata must be strings by strings, not {value!r} by {key!r}")
