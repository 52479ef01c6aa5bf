"""The ``gds`` op: tensors on a GPU to and from files through cuFile."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from . import cufile
from .engine import EngineOpBuilder

if TYPE_CHECKING:
    from .modules import GDSModule


class GDSBuilder(EngineOpBuilder):
    """Builds ``gds``, whose handle is ``gds_handle``. Neither CUDA's toolkit nor cuFile is needed to build it."""

    BUILD_VAR: ClassVar[str] = "NVME_BUILD_GDS"
    NAME: ClassVar[str] = "gds"

    def __init__(self) -> None:
        super().__init__()
        #: Stands before the paths of the files that tell of GPU, driver and cuFile.
        self.root = Path("/")

    def pieces(self) -> list[cufile.Requirement]:
        """Returns what the op requires beyond a compiler, the GPU first; what is optional comes last."""
        import torch

        return cufile.pieces(str(torch.__version__), torch.version.cuda, self.root)

    def is_compatible(self, verbose: bool = False) -> bool:
        """Returns whether the op can be built and used here; ``load`` needs no more than ``is_buildable``.

        On False ``error_log`` names everything that is missing, a line each, with its fix. What the op can do without
        is added to ``warnings``. Only reads files: neither CUDA nor cuFile's driver is used.
        """
        problems = [] if self.is_buildable(verbose) else [str(self.error_log)]
        missing = [(piece.needed, f"{piece.missing}; fix: {piece.fix}") for piece in self.pieces() if not piece.found]
        problems += [text for needed, text in missing if needed]
        hints = [text for needed, text in missing if not needed]
        self.error_log = "\n".join(problems) or None
        self.warnings += [f"{self.NAME}: {hint}" for hint in hints]
        if verbose:
            for text in [*problems, *hints]:
                self.warning(f"{self.NAME}: {text}")
        return not problems

    if TYPE_CHECKING:

        def load(self, verbose: bool = False) -> GDSModule: ...  # noqa: D102
        def jit_load(self, verbose: bool = True) -> GDSModule: ...  # noqa: D102
