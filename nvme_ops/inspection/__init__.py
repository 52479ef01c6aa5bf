"""``nvme-checkpoint``: what checkpoints of all formats hold, listed, verified and compared without loading them."""
