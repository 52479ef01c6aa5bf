"""The builders: what all of them can do (``OpBuilder``), what each op is made of, and what it needs."""

from __future__ import annotations

import importlib
import os
import platform
import shutil
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, ClassVar

from . import finished, jit, machine
from .console import announce, say, warn
from .recipe import CSRC, UNITED, Recipe, compiled, headers, requirements

if TYPE_CHECKING:
    from setuptools import Extension

#: -O2 because the CPU's part is small; no -march, so that a prebuilt op runs on any CPU of its architecture.
CXX_ARGS = ("-O2", "-g0", "-fvisibility=hidden", "-Wall", "-Wextra")

NO_NINJA = "ninja is not installed; fix: pip install ninja"

_loaded: dict[str, ModuleType] = {}
_loading = threading.RLock()
# A fork waits for a build under way: the child would have the compiler's pipes, whose end the build waits for, while
# the child waits for the build.
os.register_at_fork(before=_loading.acquire, after_in_parent=_loading.release, after_in_child=_loading.release)


class OpBuilder:
    """Finds, compiles and loads one native op.

    A subclass says what the op is made of (``sources``, ``include_paths``, ``cxx_args``, ``extra_ldflags``) and what it
    needs (``is_compatible``). Making a builder does nothing yet.
    """

    #: The environment variable that requests this op at install time, for example ``NVME_BUILD_AIO``.
    BUILD_VAR: ClassVar[str] = ""
    #: The op's name.
    NAME: ClassVar[str] = ""

    def __init__(self, name: str) -> None:
        self.name = name
        #: Whether this builder compiled, or took from the cache, what it loaded.
        self.jit_mode = False
        #: Whether the op is compiled without CUDA, as host-only ops always are.
        self.build_for_cpu = False
        #: Why the op cannot be built here, after ``is_buildable`` or ``is_compatible`` returned False.
        self.error_log: str | None = None
        #: Why ``load`` would fail, after ``is_buildable`` returned False.
        self.build_problem: str | None = None
        #: The finished op that ``is_buildable`` found and ``load`` would use; None if it would compile first.
        self.built: finished.BuiltOp | None = None
        #: What ``is_buildable`` found missing that the op can do without.
        self.warnings: list[str] = []

    def __repr__(self) -> str:
        """Returns for example ``<AsyncIOBuilder of async_io, loaded>``."""
        name = vars(self).get("name", self.NAME)
        return f"<{type(self).__name__} of {name}{', loaded' * (name in _loaded)}>"

    # What the op consists of

    def absolute_name(self) -> str:
        """Returns the name of the module that an ahead-of-time build installs."""
        return f"nvme_ops.ops.{self.name}"

    def source_root(self) -> Path:
        """Returns the folder of the native code; all headers below it are inputs of the build."""
        return CSRC

    def sources(self) -> list[str]:
        """Returns absolute paths of the files to compile."""
        return []

    def united_sources(self) -> list[list[str]]:
        """Returns groups of ``sources`` that are compiled as one file each, to save time."""
        return []

    def include_paths(self) -> list[str]:
        """Returns absolute paths of the folders to search for headers."""
        return [str(self.source_root())]

    def cxx_args(self) -> list[str]:
        """Returns flags for the C++ compiler."""
        return []

    def nvcc_args(self) -> list[str]:
        """Returns flags for nvcc: none, because no op compiles CUDA code."""
        return []

    def extra_ldflags(self) -> list[str]:
        """Returns flags for the linker."""
        return []

    # What this machine offers

    def is_compatible(self, verbose: bool = False) -> bool:
        """Returns whether the op can be built, loaded and used here; otherwise like ``is_buildable``."""
        return self.is_buildable(verbose)

    def is_buildable(self, verbose: bool = False) -> bool:  # noqa: ARG002  (for subclasses)
        """Returns whether ``load`` can succeed: the op is built, or ``jit.why_not_built`` returns None.

        On False ``error_log`` holds the reason and the fix. ``warnings`` holds what is missing but not needed;
        ``verbose=True`` prints these.
        """
        self.built = self.find_built()
        self.error_log = self.build_problem = None if self.built else jit.why_not_built(self)
        return self.build_problem is None

    def is_loaded(self) -> bool:
        """Returns whether this process has loaded the op."""
        return self.name in _loaded

    def find_built(self) -> finished.BuiltOp | None:
        """Returns the finished op that ``load`` would use: prebuilt, else from the cache; None if it would compile."""
        prebuilt = finished.find_prebuilt(self.name)
        if prebuilt is not None and not finished.mismatch(prebuilt, self._requirements()):
            return prebuilt
        entry = finished.find_cached(self.recipe())
        record = entry.record() if entry is not None else None
        return finished.BuiltOp("cached", entry.library, record) if entry is not None and record is not None else None

    def has_function(
        self, funcname: str, libraries: Sequence[str], library_dirs: Sequence[str] | None = None, verbose: bool = False
    ) -> bool:
        """Returns whether a program that calls ``funcname`` compiles and links with ``libraries``."""
        problem = machine.has_function(funcname, libraries, library_dirs or ())
        if problem and verbose:
            self.warning(f"{self.name}: {funcname} cannot be linked: {problem}")
        return not problem

    def command_exists(self, cmd: str) -> bool:
        """Returns whether ``cmd``, or one of several separated by ``|``, is on the PATH."""
        return any(shutil.which(name.strip()) for name in cmd.split("|"))

    def cpu_arch(self) -> str:
        """Returns the compiler flag for this CPU. No op uses it: a prebuilt one must run on other machines."""
        return "-mcpu=native" if platform.machine().startswith("ppc") else "-march=native"

    @staticmethod
    def is_rocm_pytorch() -> bool:
        """Returns whether torch was built for ROCm."""
        import torch

        return torch.version.hip is not None

    @staticmethod
    def validate_torch_version(torch_info: Mapping[str, str]) -> None:
        """Raises unless an op compiled with ``torch_info["version"]`` fits the torch in use.

        Raises:
            RuntimeError: the major or minor versions differ.
        """
        import torch
        from packaging.version import Version

        installed, current = torch_info["version"], str(torch.__version__)
        if Version(installed).release[:2] != Version(current).release[:2]:
            raise RuntimeError(
                "PyTorch version mismatch! The ops were compiled with a different version than what is being used at "
                f"runtime. Install torch version={installed}, Runtime torch version={current}"
            )

    # Building and loading

    def load(self, verbose: bool = False) -> ModuleType:
        """Returns the op's module: already loaded, else prebuilt, else from the cache, else compiled now.

        Raises:
            RuntimeError: it cannot be built or loaded; the message holds the compiler's or the probe's words.
        """
        return _loaded.get(self.name) or self._load(verbose, try_prebuilt=True)

    def jit_load(self, verbose: bool = True) -> ModuleType:
        """Does what ``load`` does, ignoring prebuilt ops. ``verbose=True`` reports on stderr how long a build took."""
        return _loaded.get(self.name) or self._load(verbose, try_prebuilt=False)

    def load_prebuilt(self) -> ModuleType | None:
        """Returns the prebuilt op, or None, with a warning if there is one that does not fit or load."""
        prebuilt = finished.find_prebuilt(self.name)
        if prebuilt is None:
            return None
        problem = finished.mismatch(prebuilt, self._requirements())
        if not problem:
            try:
                return jit.import_library(self.absolute_name(), prebuilt.library)
            except ImportError as error:
                problem = str(error)
        warn(f"the prebuilt {self.name} op is not used ({problem}); it is built just in time instead")
        return None

    def builder(self) -> Extension:
        """Returns the op as an extension module for setuptools.

        Raises:
            RuntimeError: torch is not installed.
        """
        try:
            from torch.utils.cpp_extension import CppExtension
        except ImportError as error:
            raise RuntimeError(f"the {self.name} op needs torch, which cannot be imported: {error}") from error
        return CppExtension(
            self.absolute_name(),
            [os.path.relpath(path) for path in self.sources()],
            include_dirs=self.include_paths(),
            extra_compile_args={"cxx": self.strip_empty_entries(self.cxx_args())},
            extra_link_args=self.strip_empty_entries(self.extra_ldflags()),
        )

    def recipe(self) -> Recipe:
        """Returns everything that determines what a build produces, including flags from the environment."""
        return Recipe(
            name=self.name,
            sources=tuple(map(Path, self.strip_empty_entries(self.sources()))),
            united=tuple([tuple(map(Path, group)) for group in self.united_sources()]),
            headers=tuple(headers(self.source_root())),
            include_paths=tuple(self.strip_empty_entries(self.include_paths())),
            cxx_args=tuple(self.strip_empty_entries([*self.cxx_args(), *machine.compile_flags()])),
            ldflags=tuple(self.strip_empty_entries([*self.extra_ldflags(), *machine.link_flags()])),
            compiler=machine.find_compiler(),
        )

    def strip_empty_entries(self, args: Iterable[str]) -> list[str]:
        """Returns ``args`` without empty strings, which a compiler would take for files."""
        return list(filter(None, args))

    def warning(self, msg: str) -> None:
        """Prints ``msg`` on stderr as a warning."""
        say(f" [WARNING]  {msg}")

    def _requirements(self) -> dict[str, str]:
        sources = map(Path, self.strip_empty_entries(self.sources()))
        return requirements([*sources, *headers(self.source_root())])  # asks no compiler

    def _load(self, verbose: bool, try_prebuilt: bool) -> ModuleType:
        with _loading:
            return load_finished(self, try_prebuilt) or self._load_built(verbose)

    def _load_cached(self) -> ModuleType | None:
        self.jit_mode = True
        entry = finished.find_cached(self.recipe())
        if entry is None:
            return None
        try:
            return jit.import_library(self.absolute_name(), entry.library)
        except ImportError as error:  # for example copied from another machine
            warn(f"the cached {self.name} op is built anew, because it cannot be loaded: {error}")
            return None

    def _load_built(self, verbose: bool) -> ModuleType:
        if (entry := finished.find_cached(self.recipe())) is not None:  # and cannot be loaded
            entry.discard()
        problem = None if self.is_buildable(verbose) else self.error_log
        if self.built:  # and cannot be loaded
            problem = jit.why_not_built(self)
        if problem:
            raise RuntimeError(f"Unable to JIT load the {self.name} op: {problem}")
        started = time.monotonic()
        announce(
            f"nvme_ops: compiling the {self.name} op, once for this torch and compiler "
            "(10 to 80 s; docs/install.md says how to avoid that; NVME_OPS_QUIET=1 hides this line)"
        )
        entry = jit.build(self.recipe())
        if verbose:
            say(f"Time to build the {self.name} op: {time.monotonic() - started:.1f} seconds")
        try:
            module = _loaded[self.name] = jit.import_library(self.absolute_name(), entry.library)
        except ImportError as error:
            raise RuntimeError(f"the {self.name} op was built but cannot be loaded: {error}") from error
        return module

    def toolchain_problem(self) -> str | None:
        """Returns why nothing can be compiled here, with the fix; None if it can."""
        compiler = machine.find_compiler()
        if compiler is None:
            wanted = os.environ.get("CXX") or ", ".join(machine.DEFAULT_COMMANDS)
            return f"no C++ compiler was found ({wanted}); fix: install one (apt-get install g++), or set CXX"
        empty = "int main() { return 0; }\n"
        problem = machine.try_program(compiler, empty, machine.compile_flags(), machine.link_flags())
        if problem:
            return f"the C++ compiler {' '.join(compiler.command)} does not work: {problem}"
        return machine.python_header() or (NO_NINJA if machine.ninja_directory() is None else None)


def load_finished(builder: OpBuilder, try_prebuilt: bool = True) -> ModuleType | None:
    """Does what ``load`` does before it compiles; None, with a warning if there is an op that does not load."""
    with _loading:
        module = _loaded.get(builder.name) or (builder.load_prebuilt() if try_prebuilt else None)
        module = module or builder._load_cached()
        if module is not None:
            _loaded[builder.name] = module
        return module


# The ops


class EngineOpBuilder(OpBuilder):
    """Builds an op that requires only a C++ compiler; libaio is used if its header is found."""

    def __init__(self) -> None:
        super().__init__(self.NAME)
        self.build_for_cpu = True

    def sources(self) -> list[str]:
        """Returns the op's files in all layers of the native code."""
        return [str(path) for path in compiled(self.NAME, self.source_root())]

    def united_sources(self) -> list[list[str]]:
        """Returns the layers of each group of ``UNITED``."""
        root = self.source_root()
        return [[str(path) for path in compiled(self.NAME, root, group)] for group in UNITED]

    def cxx_args(self) -> list[str]:
        """Returns the op's flags, and the define for the libaio backend if the header is found."""
        flags = self._libaio_flags()
        return [*CXX_ARGS] if flags is None else [*CXX_ARGS, "-DNVME_OPS_HAVE_LIBAIO=1", *flags]

    def is_buildable(self, verbose: bool = False) -> bool:
        """Does what the base class does; a missing libaio header is a warning."""
        self.warnings.clear()
        if machine.find_compiler() is not None and self._libaio_flags() is None:
            missing = f"{self.NAME} requires the dev libaio .so object and headers but these were not found."
            self.warnings.append(missing)
            self.check_for_libaio_pkg()
            self.warnings.append(
                "If libaio is already installed (perhaps from source), try setting the CFLAGS and LDFLAGS environment "
                "variables to where it can be found."
            )
        if verbose:
            for text in self.warnings:
                self.warning(text)
        return super().is_buildable(verbose)

    def check_for_libaio_pkg(self) -> bool:
        """Returns whether libaio's headers are installed; if not, ``warnings`` gets the package to install."""
        installed, package = machine.libaio_package()
        if not installed and package:
            self.warnings.append(f"{self.NAME}: please install the {package}")
        return installed

    def _libaio_flags(self) -> list[str] | None:
        compiler = machine.find_compiler()
        return machine.header_flags("libaio.h", machine.include_directories(compiler)) if compiler is not None else None


class AsyncIOBuilder(EngineOpBuilder):
    """Builds ``async_io``, whose handle is ``aio_handle``."""

    BUILD_VAR: ClassVar[str] = "NVME_BUILD_AIO"
    NAME: ClassVar[str] = "async_io"


class GDSBuilder(EngineOpBuilder):
    """Builds ``gds``, whose handle is ``gds_handle``. Neither CUDA's toolkit nor cuFile is needed to build it."""

    BUILD_VAR: ClassVar[str] = "NVME_BUILD_GDS"
    NAME: ClassVar[str] = "gds"

    def __init__(self) -> None:
        super().__init__()
        #: The kernel's files about GPU, driver and cuFile.
        self.host = machine.Host()

    def pieces(self) -> list[machine.Requirement]:
        """Returns what the op requires beyond a compiler, the GPU first; what is optional comes last."""
        import torch

        return machine.gds_requirements(str(torch.__version__), torch.version.cuda, self.host)

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


class PinMemoryBuilder(OpBuilder):
    """Loads ``pin_memory``, whose handle is ``pin_handle``, and compiles nothing: the memory is that of ``async_io``.

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
        return "nvme_ops.io.pin_memory"

    def is_buildable(self, verbose: bool = False) -> bool:
        """Returns whether ``async_io`` can be loaded here; ``error_log`` and ``warnings`` are that op's."""
        op = self._compiled
        buildable = op.is_buildable(verbose)
        self.error_log, self.warnings = op.error_log, op.warnings
        self.build_problem, self.built = op.build_problem, op.built
        return buildable

    def load(self, verbose: bool = False) -> ModuleType:
        """Returns the module with ``pin_handle``, after loading ``async_io``; RuntimeError as there."""
        self._compiled.load(verbose)
        return self._module()

    def jit_load(self, verbose: bool = True) -> ModuleType:
        """Does what ``load`` does, ignoring a prebuilt ``async_io``."""
        self._compiled.jit_load(verbose)
        return self._module()

    def builder(self) -> Extension:
        """Returns ``async_io`` as an extension module for setuptools."""
        return self._compiled.builder()

    def _module(self) -> ModuleType:
        self.jit_mode = self._compiled.jit_mode
        return importlib.import_module(self.absolute_name())


#: Op name -> its builder, for every op that is compiled; the report, setup.py and the tests go through this table.
ALL_OPS: dict[str, OpBuilder] = {builder.NAME: builder for builder in (AsyncIOBuilder(), GDSBuilder())}
