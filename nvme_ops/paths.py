"""What can be said, and done, about names of files."""

from __future__ import annotations

import os
import re

#: The beginning of a name that no local file has: ``s3://``, ``hf://``, ``https://``.
URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")


def sync_folder(folder: str | bytes) -> None:
    """Makes the names in a folder durable. Raises OSError, with the operation."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError as error:
        raise OSError(error.errno, f"fsync of a folder: {error.strerror}", folder) from error
    finally:
        os.close(fd)
