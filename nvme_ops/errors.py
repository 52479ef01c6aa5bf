"""The exceptions of this package that are more than Python's own. Each is also the type that callers know already."""

from __future__ import annotations

import errno
import pickle
from collections.abc import Sequence


class FormatError(ValueError):
    """A file that is not what its name says, or was damaged; the message names the file and the field."""


class AnotherSaveError(FormatError):
    """A shard that is not of the save that its index is of."""


class UnsafeError(FormatError, pickle.UnpicklingError):
    """A pickle that asks for more than tensors, which is refused as ``torch.load(weights_only=True)`` refuses it."""


class ChecksumError(OSError):
    """What was read is not what was saved. ``tensors`` names all that differ."""

    def __init__(self, path: str, tensors: Sequence[str]) -> None:
        shown = ", ".join(map(repr, tensors[:10])) + (f" and {len(tensors) - 10} more" if len(tensors) > 10 else "")
        super().__init__(errno.EIO, f"other data than were saved, by their checksums, in {shown}", path)
        self.tensors = list(tensors)

    def __reduce__(self) -> tuple[type[ChecksumError], tuple[str, list[str]]]:
        return type(self), (self.filename, self.tensors)


class MissingTensorError(KeyError, RuntimeError):
    """A name that one side lacks: a KeyError as of a dict, a RuntimeError as of ``Module.load_state_dict``."""

    def __str__(self) -> str:
        return str(self.args[0])


class SharedMemoryError(ValueError, RuntimeError):
    """Tensors that share memory, which a format cannot store so."""


class DeadlockError(RuntimeError):
    """A wait for memory that could never end: those who hold it all wait for more themselves."""
