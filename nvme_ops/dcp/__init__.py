"""``torch.distributed.checkpoint`` (DCP) at the speed of the device.

    import nvme_ops.dcp
    import torch.distributed.checkpoint as dcp

    nvme_ops.dcp.save(state_dict, "checkpoint")
    nvme_ops.dcp.load(state_dict, "checkpoint")

    dcp.save(state_dict, storage_writer=nvme_ops.dcp.NvmeStorageWriter("checkpoint"))  # with DCP's other settings
    dcp.load(state_dict, storage_reader=nvme_ops.dcp.NvmeStorageReader("checkpoint"))

The files are those of DCP's own ``FileSystemWriter``: either reader opens what either writer wrote.

``writer`` and ``reader`` are the two, ``api`` calls DCP with them, ``default`` makes them replace DCP's own.
``items`` writes a rank's file, with what torch's format puts around a tensor's bytes (``frame``). ``loading`` reads the
``spans`` of what is ``stored``, into the targets or through a ring. ``folder`` keeps the old checkpoint until the new
one is complete, that is until ``metadata_file`` has replaced ``.metadata``.
"""

from nvme_ops.dcp.api import load as load
from nvme_ops.dcp.api import save as save
from nvme_ops.dcp.default import use_by_default as use_by_default
from nvme_ops.dcp.reader import NvmeStorageReader as NvmeStorageReader
from nvme_ops.dcp.writer import NvmeStorageWriter as NvmeStorageWriter

__all__ = ["NvmeStorageReader", "NvmeStorageWriter", "load", "save", "use_by_default"]


def __dir__() -> list[str]:
    return __all__
