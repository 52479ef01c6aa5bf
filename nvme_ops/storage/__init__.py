"""Replaces files atomically, manages folders for a session, and stores tensors by key in extents of files.

``device`` identifies the storage under a path.

from nvme_ops.storage import Session, TensorStore
with Session("/mnt/nvme", name="optimizer") as session:
    store = TensorStore(session)
    store.put("exp_avg.0", tensor).result()
    store.get("exp_avg.0", out=tensor).result()
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nvme_ops.base.lazy_names import attribute

if TYPE_CHECKING:
    from nvme_ops.memory.pool import Pool as Pool
    from nvme_ops.storage.session import Session as Session
    from nvme_ops.storage.store import TensorStore as TensorStore

_MODULE_OF = {
    "Pool": "nvme_ops.memory.pool",
    "Session": "nvme_ops.storage.session",
    "TensorStore": "nvme_ops.storage.store",
}

__all__ = ["Pool", "Session", "TensorStore"]

if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        return attribute(__name__, name, _MODULE_OF)


def __dir__() -> list[str]:
    return __all__
