"""``PinMemoryBuilder`` where programs for DeepSpeed import it from."""

from nvme_ops.op_builder import PinMemoryBuilder

__all__ = ["PinMemoryBuilder"]
