"""The files of ``torch.distributed.checkpoint`` (DCP), written and read at the speed of the device: ``nvme_ops.dcp``.

``writer`` and ``reader`` are what DCP calls; ``api`` calls DCP with them, or makes them replace DCP's own. ``writer``
writes a rank's file, with what torch's format puts around a tensor's bytes (``frame``); ``reader`` reads what is
``stored``, into the targets or through a ring. ``folder`` keeps the old checkpoint until the new one is complete, that
is until ``.metadata`` is replaced; ``contents`` lists what a checkpoint has.
"""
