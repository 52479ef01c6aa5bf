"""``AsyncIOBuilder`` where programs for DeepSpeed import it from."""

from nvme_ops.op_builder import AsyncIOBuilder

__all__ = ["AsyncIOBuilder"]
