"""Errors for saved tensors that cannot be written or read. They name the tensor, and keep none alive."""

from __future__ import annotations

import errno
import traceback

from nvme_ops.errors import ChecksumError
from nvme_ops.offload.activations.units import Unit

NOT_READ = "saved for the backward pass, could not be read"


def without_frames(failure: OSError) -> OSError:
    """Returns the error; it and those that led to it lose their frames, which would keep tensors alive."""
    each: BaseException | None = failure
    while each is not None:
        each.__traceback__ = None
        each = each.__context__
    return failure


def named(failure: BaseException, unit: Unit, what: str) -> BaseException:
    """Returns the failure, naming the tensor if it is about storage. It keeps no tensor alive."""
    traceback.clear_frames(failure.__traceback__)
    words = f"{unit.describe()}, {what}"
    if isinstance(failure, ChecksumError):
        return ChecksumError(failure.filename, [words])
    if isinstance(failure, OSError) and failure.errno is not None:
        return OSError(failure.errno, f"{words}: {failure.strerror}", failure.filename)
    return OSError(errno.EIO, f"{words}: {failure}") if isinstance(failure, EOFError) else failure
