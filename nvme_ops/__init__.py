"""Moves PyTorch tensors between NVMe storage and memory at the speed of the device."""

__version__ = "0.1.0"
