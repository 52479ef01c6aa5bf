"""The I/O of training data: samples in a few large files, read at random at the speed of the device.

from nvme_ops.data import Loader, SampleWriter
with SampleWriter("/mnt/nvme/train", {"image": bytes, "label": torch.int64}) as writer:
    writer.add({"image": jpeg, "label": 3})
for batch in Loader("/mnt/nvme/train", 256, shuffle=True): ...
"""

from nvme_ops.data.loader import Loader as Loader
from nvme_ops.data.log import AsyncLog as AsyncLog
from nvme_ops.data.store import SampleStore as SampleStore
from nvme_ops.data.writer import SampleWriter as SampleWriter

__all__ = ["AsyncLog", "Loader", "SampleStore", "SampleWriter"]


def __dir__() -> list[str]:
    return __all__
