"""The place of ``python -m nvme_ops.bench``; what it runs is in ``nvme_ops.measure``."""
