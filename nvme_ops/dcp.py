"""``torch.distributed.checkpoint`` (DCP) at the speed of the device.

    import nvme_ops.dcp
    import torch.distributed.checkpoint as dcp

    nvme_ops.dcp.save(state_dict, "checkpoint")
    nvme_ops.dcp.load(state_dict, "checkpoint")

    dcp.save(state_dict, storage_writer=nvme_ops.dcp.NvmeStorageWriter("checkpoint"))  # for DCP's other arguments
    dcp.load(state_dict, storage_reader=nvme_ops.dcp.NvmeStorageReader("checkpoint"))

The files are those of DCP's own ``FileSystemWriter``: either reader opens what either writer wrote. The code is in
``nvme_ops.checkpoint.dcp``.
"""

from nvme_ops.checkpoint.dcp.api import load as load
from nvme_ops.checkpoint.dcp.api import save as save
from nvme_ops.checkpoint.dcp.api import use_by_default as use_by_default
from nvme_ops.checkpoint.dcp.reader import NvmeStorageReader as NvmeStorageReader
from nvme_ops.checkpoint.dcp.writer import NvmeStorageWriter as NvmeStorageWriter

__all__ = ["NvmeStorageReader", "NvmeStorageWriter", "load", "save", "use_by_default"]


def __dir__() -> list[str]:
    return __all__
