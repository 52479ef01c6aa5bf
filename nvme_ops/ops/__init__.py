"""Where ahead-of-time built ops are installed; empty when ops are built just in time.

Load an op with its builder, for example ``nvme_ops.op_builder.AsyncIOBuilder().load()``, which knows both places.
"""
