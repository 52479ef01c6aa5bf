"""What the builders of all ops that contain the engine of ``csrc`` have in common."""

from __future__ import annotations

from . import cache, compiler, probes, sources
from .builder import OpBuilder

#: -O2 because the CPU's part is small; no -march, so that a prebuilt op runs on any CPU of its architecture.
CXX_ARGS = ("-O2", "-g0", "-fvisibility=hidden", "-Wall", "-Wextra")


class EngineOpBuilder(OpBuilder):
    """Needs only a C++ compiler to build; libaio is used if its header is found."""

    def __init__(self) -> None:
        super().__init__(self.NAME)
        self.build_for_cpu = True

    def sources(self) -> list[str]:
        """Returns the op's files in all layers of the native code."""
        return [str(path) for path in sources.compiled(self.NAME, self.source_root())]

    def united_sources(self) -> list[list[str]]:
        """Returns the layers of each group of ``sources.UNITED``."""
        root = self.source_root()
        return [[str(path) for path in sources.compiled(self.NAME, root, group)] for group in sources.UNITED]

    def cxx_args(self) -> list[str]:
        """Returns the op's flags, and the define for the libaio backend if the header is found."""
        found = self._libaio_flags()
        return [*CXX_ARGS] if found is None else [*CXX_ARGS, "-DNVME_OPS_HAVE_LIBAIO=1", *found]

    def is_buildable(self, verbose: bool = False) -> bool:
        """Does what the base class does; a missing libaio header is a warning."""
        self.warnings.clear()
        if compiler.find() is not None and self._libaio_flags() is None:
            self._note_missing_libaio()
        if verbose:
            for text in self.warnings:
                self.warning(text)
        return super().is_buildable(verbose)

    def check_for_libaio_pkg(self) -> bool:
        """Returns whether libaio's headers are installed; if not, ``warnings`` gets the package to install."""
        installed, package = probes.libaio_package()
        if not installed and package:
            self.warnings.append(f"{self.NAME}: please install the {package}")
        return installed

    def _libaio_flags(self) -> list[str] | None:
        found = compiler.find()
        if found is None:
            return None
        return probes.header_flags("libaio.h", compiler.include_directories(found, cache.roots()))

    def _note_missing_libaio(self) -> None:
        self.warnings.append(f"{self.NAME} requires the dev libaio .so object and headers but these were not found.")
        self.check_for_libaio_pkg()
        self.warnings.append(
            "If libaio is already installed (perhaps from source), try setting the CFLAGS and LDFLAGS environment "
            "variables to where it can be found."
        )
