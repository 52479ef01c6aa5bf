"""Checks switches and callbacks; reconciles arguments that have two names, or that DeepNVMe accepts as another type."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from typing import TypeAlias

    import torch

    from nvme_ops.ops.async_io import OpenFile

    class KeepsOpen(Protocol):
        """An ``nvme_ops.File``."""

        _open_file: OpenFile

    FileName: TypeAlias = str | bytes | os.PathLike[str] | os.PathLike[bytes] | int | KeepsOpen | OpenFile

CACHE, BACKEND, POOL_BYTES = "NVME_OPS_CACHE", "NVME_OPS_BACKEND", "NVME_OPS_POOL_BYTES"
#: In the order in which they are tried, as in ``csrc/backends/registry.cpp``.
BACKENDS = ("io_uring", "libaio", "threads")
_CACHE_MODES = ("auto", "direct", "buffered")


def flag(name: str, value: object) -> bool:
    """Converts what pybind11, and therefore DeepNVMe, accepts as a bool: also numbers, but no strings."""
    if value is None or hasattr(type(value), "__bool__"):
        return bool(value)
    raise TypeError(f"{name} must be a bool, not {type(value).__name__}")


def require_switches(**given: object) -> None:
    """Raises TypeError for values that are not bools, such as ``"no"``, which Python would take for True."""
    for name, value in given.items():
        flag(name, value)


def require_callables(**given: object) -> None:
    """Raises TypeError for values that are neither None nor can be called."""
    for name, value in given.items():
        if value is not None and not callable(value):
            raise TypeError(f"{name} must be callable, not {type(value).__name__}")


def asynchronous(method: str, async_op: object, others: Mapping[str, Any]) -> bool:
    """Returns whether a call is asynchronous: ``async_op``, or ``async`` given as ``**{"async": True}``."""
    for unknown in others.keys() - {"async"}:
        raise TypeError(f"{method}() got an unexpected keyword argument '{unknown}'")
    if "async" not in others:
        return flag("async_op", async_op)
    if async_op is not None:
        raise TypeError(f"{method}() got both async_op (or a fourth argument by position) and async: give one of them")
    return flag("async", others["async"])


def one_file(method: str, filename: FileName | None, fd: int | None) -> FileName:
    """Returns the file of a call that accepts ``fd`` in place of ``filename``. Raises TypeError unless one is given."""
    if fd is None:
        if filename is None:
            raise TypeError(f"a file must be a path or a file descriptor: {method}() needs a filename or an fd")
        return filename
    if filename is not None:
        raise TypeError(f"{method}() got both a filename and an fd: give one of them")
    if isinstance(fd, bool) or not hasattr(fd, "__index__"):
        raise TypeError(f"fd must be an int, not {type(fd).__name__}")
    return fd


def one_example(example_tensor: torch.Tensor | None, example_tenosr: torch.Tensor | None) -> torch.Tensor:
    """Returns the one that was given. Raises TypeError unless it is one tensor. DeepNVMe misspells the keyword."""
    if example_tensor is not None and example_tenosr is not None:
        raise TypeError("example_tensor and example_tenosr are two names for one argument: give one of them")
    import torch

    example = example_tenosr if example_tensor is None else example_tensor
    if not isinstance(example, torch.Tensor):
        raise TypeError(f"example_tensor must be a torch.Tensor, not {type(example).__name__}")
    return example


def cache_mode(cache: str | None) -> str:
    """Returns ``cache`` if given, else ``NVME_OPS_CACHE``, else ``"auto"``."""
    if cache is not None:
        return cache  # the engine validates it
    chosen = os.environ.get(CACHE) or "auto"
    if chosen not in _CACHE_MODES:
        raise ValueError(f"{CACHE}={chosen!r} is not one of {', '.join(_CACHE_MODES)}")
    return chosen


def require_usable_names(backend: str | None) -> None:
    """Raises ValueError for a backend or a size of the pool that the op would refuse, which may be compiled first.

    Args:
        backend: the argument of a handle; ``NVME_OPS_BACKEND`` counts without it.
    """
    name, chosen = ("backend", backend) if backend else (BACKEND, os.environ.get(BACKEND) or "auto")
    if chosen not in ("auto", *BACKENDS):
        raise ValueError(f"{name}={chosen!r} is not one of auto, {', '.join(BACKENDS)}")
    size = os.environ.get(POOL_BYTES, "")
    if not re.fullmatch("([0-9]+[KMG]?)?", size):
        raise ValueError(f"{POOL_BYTES}={size!r} is not a number of bytes such as 256M")
