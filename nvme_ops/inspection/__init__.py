"""Lists, verifies, compares and converts checkpoints of all formats without loading them: ``nvme-checkpoint``."""
