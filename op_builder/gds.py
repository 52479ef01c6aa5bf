"""The ``gds`` op: tensors to and from files through cuFile. Its native code is not part of this version."""

from __future__ import annotations

from typing import ClassVar

from . import probes
from .builder import OpBuilder


class GDSBuilder(OpBuilder):
    """Stands in for the op's builder and says that the op is not available."""

    BUILD_VAR: ClassVar[str] = "NVME_BUILD_GDS"
    NAME: ClassVar[str] = "gds"

    def __init__(self) -> None:
        super().__init__(self.NAME)

    def is_compatible(self, verbose: bool = False) -> bool:
        """False, with the reason in ``error_log``."""
        self.error_log = "The gds op is not part of this version of nvme_ops. GPU tensors work with the async_io op."
        if verbose:
            self.warning(self.error_log)
        return False

    def is_installed(self) -> bool:
        """False: there is nothing to install."""
        return False

    def is_cached(self) -> bool:
        """False: there is nothing to build."""
        return False

    def check_for_libaio_pkg(self) -> bool:
        """Whether the package manager has libaio's headers."""
        return probes.libaio_package()[0]
