"""The folder for ops built ahead of time; empty when ops are built just in time.

Load an op with its builder, for example ``nvme_ops.op_builder.AsyncIOBuilder().load()``, which knows both places.
Programs for DeepSpeed import the builders from ``nvme_ops.ops.aio``, ``.gds`` and ``.pin_memory``.
"""
