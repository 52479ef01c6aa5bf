"""``nvme_ops.op_builder`` as type checkers see it, which learn here what ``load`` returns: it is of a floor above.

At run time the modules that it returns are plain ones.
"""

from collections.abc import Callable
from types import ModuleType

from nvme_ops.io import gds, handle, pin_memory

from . import builder
from .builder import ALL_OPS as ALL_OPS
from .builder import OpBuilder as OpBuilder

class AsyncIOModule(ModuleType):
    """The result of ``AsyncIOBuilder().load()``; ``nvme_ops/ops/async_io.pyi`` describes its internal part."""

    aio_handle: type[handle.aio_handle]
    aio_read: Callable[..., int]
    aio_write: Callable[..., int]
    deepspeed_memcpy: Callable[..., int]
    backends: Callable[[], dict[str, str | None]]
    trim_pool: Callable[[], None]

class GDSModule(ModuleType):
    """The result of ``GDSBuilder().load()``."""

    gds_handle: type[gds.gds_handle]

class PinMemoryModule(ModuleType):
    """The result of ``PinMemoryBuilder().load()``."""

    pin_handle: type[pin_memory.pin_handle]

class AsyncIOBuilder(builder.AsyncIOBuilder):
    """Builds ``async_io``, whose handle is ``aio_handle``."""

    def load(self, verbose: bool = False) -> AsyncIOModule:
        """Returns the module with ``aio_handle``, compiled if need be; RuntimeError if that fails."""

    def jit_load(self, verbose: bool = True) -> AsyncIOModule:
        """Does what ``load`` does, ignoring a prebuilt op."""

class GDSBuilder(builder.GDSBuilder):
    """Builds ``gds``, whose handle is ``gds_handle``. Neither CUDA's toolkit nor cuFile is needed to build it."""

    def load(self, verbose: bool = False) -> GDSModule:
        """Returns the module with ``gds_handle``, compiled if need be; RuntimeError if that fails."""

    def jit_load(self, verbose: bool = True) -> GDSModule:
        """Does what ``load`` does, ignoring a prebuilt op."""

class PinMemoryBuilder(builder.PinMemoryBuilder):
    """Loads ``pin_memory``, whose handle is ``pin_handle``, and compiles nothing but ``async_io``."""

    def load(self, verbose: bool = False) -> PinMemoryModule:
        """Returns the module with ``pin_handle``, after loading ``async_io``; RuntimeError as there."""

    def jit_load(self, verbose: bool = True) -> PinMemoryModule:
        """Does what ``load`` does, ignoring a prebuilt op."""
