"""Builders that find, compile and load the native ops.

Importing this package probes nothing, compiles nothing and prints nothing, and it does not import torch.
"""

if __name__ == "op_builder":  # a checkout is on sys.path, and DeepSpeed looks for a package of its own by this name
    raise ImportError("this is nvme_ops.op_builder")

from .builder import ALL_OPS, AsyncIOBuilder, GDSBuilder, OpBuilder, PinMemoryBuilder

__all__ = ["ALL_OPS", "AsyncIOBuilder", "GDSBuilder", "OpBuilder", "PinMemoryBuilder"]


def __dir__() -> list[str]:
    return __all__
