"""The I/O of training data: samples in a few large files, read at random at the speed of the device.

from nvme_ops.data import Loader, SampleWriter
with SampleWriter("/mnt/nvme/train", {"image": bytes, "label": torch.int64}) as writer:
    writer.add({"image": jpeg, "label": 3})
for batch in Loader("/mnt/nvme/train", 256, shuffle=True): ...
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nvme_ops.base.lazy_names import attribute

if TYPE_CHECKING:
    from nvme_ops.data.loader import Loader as Loader
    from nvme_ops.data.log import AsyncLog as AsyncLog
    from nvme_ops.data.store import SampleStats as SampleStats
    from nvme_ops.data.store import SampleStore as SampleStore
    from nvme_ops.data.writer import SampleWriter as SampleWriter

_MODULE_OF = {
    "AsyncLog": "nvme_ops.data.log",
    "Loader": "nvme_ops.data.loader",
    "SampleStats": "nvme_ops.data.store",
    "SampleStore": "nvme_ops.data.store",
    "SampleWriter": "nvme_ops.data.writer",
}

__all__ = [*_MODULE_OF]

if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        return attribute(__name__, name, _MODULE_OF)


def __dir__() -> list[str]:
    return __all__
