"""PyTorch as installed, and this package's path and version."""

from __future__ import annotations

import functools
import importlib
import platform
import sys
from pathlib import Path
from types import ModuleType

from .result import Result, Status

LEAST = "2.4"
# The parent package is imported with this one; its capabilities must not be.
_PACKAGE = sys.modules[__name__.partition(".")[0]]
PACKAGE_VERSION = str(getattr(_PACKAGE, "__version__", "unknown"))
_INSTALL = f"{sys.executable} -m pip install torch"


def problem() -> Result | None:
    """Returns why torch cannot be imported; None if it can."""
    outcome = _import()
    return outcome if isinstance(outcome, Result) else None


@functools.cache  # a broken torch may take seconds to fail
def _import() -> ModuleType | Result:
    try:
        return importlib.import_module("torch")
    except Exception as error:  # a half-installed torch can raise anything
        words, fix = f"cannot be imported: {type(error).__name__}: {error}", f"{_INSTALL} --force-reinstall"
        if isinstance(error, ModuleNotFoundError) and error.name == "torch":
            words, fix = "not installed: no op can be compiled or loaded", _INSTALL
        return Result("torch", Status.NO, words, fix, {"error": str(error)})


def build() -> tuple[str, str | None]:
    """Returns torch's version and CUDA version; an unknown version and None if it cannot be imported."""
    module = _import()
    if isinstance(module, Result):
        return "(which cannot be imported)", None
    return str(module.__version__), module.version.cuda


def versions() -> list[str]:
    """Returns the versions of this package, torch, Python and the kernel, each with its name."""
    python = platform.python_version()
    return [f"nvme_ops {PACKAGE_VERSION}", f"torch {build()[0]}", f"Python {python}", f"Linux {platform.release()}"]


def torch() -> list[Result]:
    """Reports torch's path, version, CUDA or ROCm and C++ ABI; one line if it cannot be imported."""
    module = _import()
    if isinstance(module, Result):
        return [module]
    cuda, hip = module.version.cuda, module.version.hip
    abi = bool(module.compiled_with_cxx11_abi())
    path = str(Path(module.__file__ or "").parent)
    build = f"CUDA {cuda}" if cuda else f"ROCm {hip}" if hip else "none (CPU build)"
    return [
        Result("torch install path", Status.INFO, path, data={"path": path}),
        _version(str(module.__version__)),
        Result("torch cuda version", Status.INFO, build, data={"cuda": cuda, "hip": hip}),
        Result("torch C++ ABI", Status.INFO, f"_GLIBCXX_USE_CXX11_ABI={int(abi)}", data={"cxx11": abi}),
    ]


def _version(version: str) -> Result:
    from packaging.version import Version  # in the check, which fails alone where this is missing

    data = {"version": version}
    if Version(version).release < Version(LEAST).release:  # a nightly of it will do
        words = f"{version}, older than {LEAST}"
        return Result("torch version", Status.WARNING, words, f"{_INSTALL} --upgrade", data)
    return Result("torch version", Status.INFO, version, data=data)


def package() -> list[Result]:
    """Reports nvme_ops's path and version, and the Python that runs it."""
    path, python = str(next(iter(_PACKAGE.__path__))), f"{platform.python_version()}, {sys.executable}"
    return [
        Result("nvme_ops install path", Status.INFO, path, data={"path": path}),
        Result("nvme_ops version", Status.INFO, PACKAGE_VERSION, data={"version": PACKAGE_VERSION}),
        Result("python", Status.INFO, python, data={"executable": sys.executable}),
    ]
