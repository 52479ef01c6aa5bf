"""Exceptions of this package. Each is also a subclass of the exception that callers would expect without it."""

from __future__ import annotations

import errno
import os
import pickle
import traceback
from collections.abc import Iterable, Sequence
from typing import Any

from nvme_ops.base.text import printable


class naming:  # noqa: N801  (used like contextlib's)
    """A context that adds the operation and the file's name to an OSError of a system call on a descriptor.

    Args:
        operation: what the block does.
        path: the file's, or its descriptor.
    """

    __slots__ = ("_operation", "_path")

    def __init__(self, operation: str, path: str | bytes | int | os.PathLike[str] | os.PathLike[bytes]) -> None:
        self._operation, self._path = operation, path

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if isinstance(error, OSError):
            name_failure(error, self._operation, self._path)


def name_failure(
    error: OSError, operation: str, path: str | bytes | int | os.PathLike[str] | os.PathLike[bytes]
) -> None:
    """Raises an OSError that names no file anew, as ``naming`` does. Returns if it already names one."""
    if error.filename is None and error.errno is not None:
        path = os.readlink(f"/proc/self/fd/{path}") if isinstance(path, int) else path
        raise OSError(error.errno, f"{operation}: {error.strerror}", path) from error


def named(path: str | os.PathLike[str]) -> str:
    """Returns the path as text. Raises FileNotFoundError for an empty one, which ``os.path`` takes for this folder."""
    name = os.fspath(path)
    if not name:
        raise FileNotFoundError(errno.ENOENT, "the path is empty", name)
    return name


def paths_of(given: Any, argument: str) -> list[Any]:
    """Returns a path, or several in a list or other collection, as a list. Raises TypeError for anything else."""
    if isinstance(given, str | os.PathLike):
        return [given]
    if isinstance(given, bytes) or not isinstance(given, Iterable):
        raise TypeError(f"{argument} must be a path, or a list of several, not {type(given).__name__}")
    return list(given)


class FormatError(ValueError):
    """The file is damaged, or not of the format that its name says; the message names the file and the field."""

    def __str__(self) -> str:
        """Returns the message with control characters escaped, since it contains names from the file."""
        return printable(super().__str__(), lines=True)


class ChangedFileError(FormatError):
    """Only the change time (ctime) of a file differs from when it was opened: its links have changed, or its bytes."""


class AnotherSaveError(FormatError):
    """A shard and its index are from different saves."""


class UnsafeError(FormatError, pickle.UnpicklingError):
    """A pickle needs more than tensors; ``torch.load(weights_only=True)`` refuses it too."""


class ChecksumError(OSError):
    """The bytes read differ from those that were saved. ``tensors`` lists the names of all tensors concerned."""

    def __init__(self, path: str, tensors: Sequence[str]) -> None:
        shown = ", ".join(map(repr, tensors[:10])) + (f" and {len(tensors) - 10} more" if len(tensors) > 10 else "")
        super().__init__(errno.EIO, f"the data read does not have the checksums that were saved, in {shown}", path)
        self.tensors = list(tensors)

    def __reduce__(self) -> tuple[type[ChecksumError], tuple[str, list[str]]]:
        return type(self), (self.filename, self.tensors)


class MissingTensorError(KeyError, RuntimeError):
    """A name that only one side has: a KeyError like a dict's, a RuntimeError like ``Module.load_state_dict``'s."""

    def __str__(self) -> str:
        return str(self.args[0])


class SharedMemoryError(ValueError, RuntimeError):
    """Tensors share memory, which the format cannot represent."""


class DeadlockError(RuntimeError):
    """A wait for memory that could never end, because all threads that hold memory are waiting for more."""


def note(error: BaseException, text: str) -> None:
    """Adds a note to an exception as ``add_note`` does, which Python 3.10 lacks."""
    if hasattr(error, "add_note"):
        error.add_note(text)


def free_frames(error: BaseException) -> None:
    """Clears the frames of a traceback, which would keep tensors alive as long as the exception."""
    traceback.clear_frames(error.__traceback__)
