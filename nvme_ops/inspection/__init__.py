"""``nvme-checkpoint``: checkpoints of all formats listed, verified, compared and converted without loading them."""
