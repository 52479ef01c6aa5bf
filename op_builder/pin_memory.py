"""The ``pin_memory`` op: page-locked CPU tensors. It compiles nothing of its own: the memory is ``async_io``'s."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, ClassVar, cast

from .async_io import AsyncIOBuilder
from .builder import OpBuilder

if TYPE_CHECKING:
    from setuptools import Extension

    from .modules import PinMemoryModule


class PinMemoryBuilder(OpBuilder):
    """Loads ``pin_memory``, whose handle is ``pin_handle``. It needs what ``AsyncIOBuilder`` needs, no more.

    It is not in ``ALL_OPS``, the table of what is compiled.
    """

    BUILD_VAR: ClassVar[str] = AsyncIOBuilder.BUILD_VAR
    NAME: ClassVar[str] = "pin_memory"

    def __init__(self) -> None:
        super().__init__(self.NAME)
        self.build_for_cpu = True
        self._compiled = AsyncIOBuilder()

    def absolute_name(self) -> str:
        """Returns the name of the module that ``load`` returns."""
        return "nvme_ops.pin_memory"

    def is_buildable(self, verbose: bool = False) -> bool:
        """Returns whether ``async_io`` can be loaded here; ``error_log`` and ``warnings`` are that op's."""
        found = self._compiled.is_buildable(verbose)
        self.error_log, self.warnings = self._compiled.error_log, self._compiled.warnings
        return found

    def is_installed(self) -> bool:
        """Returns whether ``async_io`` was built ahead of time and fits."""
        return self._compiled.is_installed()

    def is_cached(self) -> bool:
        """Returns whether ``async_io`` is in the cache."""
        return self._compiled.is_cached()

    def load(self, verbose: bool = False) -> PinMemoryModule:
        """Returns the module with ``pin_handle``, after loading ``async_io``; RuntimeError as there."""
        self._compiled.load(verbose)
        return self._module()

    def jit_load(self, verbose: bool = True) -> PinMemoryModule:
        """Does what ``load`` does, ignoring a prebuilt ``async_io``."""
        self._compiled.jit_load(verbose)
        return self._module()

    def builder(self) -> Extension:
        """Returns ``async_io`` as an extension module for setuptools."""
        return self._compiled.builder()

    def _module(self) -> PinMemoryModule:
        self.jit_mode = self._compiled.jit_mode
        return cast("PinMemoryModule", importlib.import_module(self.absolute_name()))
