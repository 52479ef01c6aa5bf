"""Exceptions of this package. Each is also a subclass of the exception that callers would expect without it."""

from __future__ import annotations

import errno
import pickle
from collections.abc import Sequence

from nvme_ops.text import printable


class FormatError(ValueError):
    """The file is damaged, or not of the format that its name says; the message names the file and the field."""

    def __str__(self) -> str:
        """Returns the message, with what a terminal would act on escaped: it has names from the file."""
        return printable(super().__str__(), lines=True)


class AnotherSaveError(FormatError):
    """A shard belongs to another save than its index."""


class UnsafeError(FormatError, pickle.UnpicklingError):
    """A pickle needs more than tensors; ``torch.load(weights_only=True)`` refuses it too."""


class ChecksumError(OSError):
    """The bytes read differ from those that were saved. ``tensors`` names all tensors concerned."""

    def __init__(self, path: str, tensors: Sequence[str]) -> None:
        shown = ", ".join(map(repr, tensors[:10])) + (f" and {len(tensors) - 10} more" if len(tensors) > 10 else "")
        super().__init__(errno.EIO, f"other data than were saved, by their checksums, in {shown}", path)
        self.tensors = list(tensors)

    def __reduce__(self) -> tuple[type[ChecksumError], tuple[str, list[str]]]:
        return type(self), (self.filename, self.tensors)


class MissingTensorError(KeyError, RuntimeError):
    """A name that only one side has: a KeyError as of a dict, a RuntimeError as of ``Module.load_state_dict``."""

    def __str__(self) -> str:
        return str(self.args[0])


class SharedMemoryError(ValueError, RuntimeError):
    """Tensors share memory, which the format cannot represent."""


class DeadlockError(RuntimeError):
    """A wait for memory that could never end, because those who hold it all wait for more themselves."""
