"""The files of ``torch.distributed.checkpoint`` (DCP), written and read at the speed of the device: ``nvme_ops.dcp``.

DCP calls ``writer`` and ``reader``; ``api`` calls DCP with them, or makes them replace DCP's own. ``writer`` writes a
rank's file, each tensor as the archive that ``torch.save`` would write; ``reader`` reads such tensors straight into
their targets or through a ring. ``folder`` keeps the old checkpoint until the new one is complete, that is until
``.metadata`` is replaced; ``contents`` lists what a checkpoint contains.
"""
