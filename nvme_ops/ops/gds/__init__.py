"""``GDSBuilder`` where programs for DeepSpeed import it from.

A package, because Python prefers one to a prebuilt ``gds.*.so`` beside it. The native module, which takes the place of
this one in ``sys.modules`` once it is loaded, shows ``GDSBuilder`` too.
"""

from nvme_ops.op_builder import GDSBuilder

__all__ = ["GDSBuilder"]
