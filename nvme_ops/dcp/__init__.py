"""``torch.distributed.checkpoint`` at the speed of the device: the argument ``storage_writer`` or ``storage_reader``.

    import torch.distributed.checkpoint as dcp
    from nvme_ops.dcp import NvmeStorageReader, NvmeStorageWriter

    dcp.save(state_dict, storage_writer=NvmeStorageWriter("checkpoint"))
    dcp.load(state_dict, storage_reader=NvmeStorageReader("checkpoint"))

The files are those of DCP's own ``FileSystemWriter``: either reader opens what either writer wrote.

``writer`` and ``reader`` are the two, ``default`` puts them in the place of DCP's. ``items`` writes a rank's file, with
what torch's format puts around a tensor's bytes (``frame``). ``loading`` reads, straight to the targets or ``through``
buffers, the ``spans`` of what is ``stored``. ``folder`` keeps the old checkpoint until the new one is complete, that is
when ``metadata_file`` has replaced ``.metadata``.
"""

from nvme_ops.dcp.default import use_by_default as use_by_default
from nvme_ops.dcp.reader import NvmeStorageReader as NvmeStorageReader
from nvme_ops.dcp.writer import NvmeStorageWriter as NvmeStorageWriter

__all__ = ["NvmeStorageReader", "NvmeStorageWriter", "use_by_default"]
