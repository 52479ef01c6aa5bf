"""Where ahead-of-time built ops are installed; empty when ops are built just in time.

Load an op with its builder, for example ``nvme_ops.op_builder.AsyncIOBuilder().load()``, which knows both places.
``nvme_ops.ops.aio``, ``.gds`` and ``.pin_memory`` are where programs for DeepSpeed import the builders from.
"""
