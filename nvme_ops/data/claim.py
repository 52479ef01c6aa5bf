"""``WriterClaim``: marks data files that no store names yet, or no longer. The next writer removes a killed one's."""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Sequence
from io import FileIO

from nvme_ops.data.index import read_index
from nvme_ops.durable import sync, sync_folder
from nvme_ops.errors import FormatError, naming
from nvme_ops.storage import unlink
from nvme_ops.storage.locks import abandoned, hold, take
from nvme_ops.storage.publication import content_of
from nvme_ops.text import parse_json

_PREFIX = "samples-"
_MARK = ".nvme_ops-claim"
_MOST = 1 << 20  # bytes of a claim
_CLAIM = re.compile(r"\.samples-([0-9a-f]{16})" + re.escape(_MARK))


def data_file(store: str, number: int) -> str:
    """Returns the name of a data file."""
    return f"{_PREFIX}{store}-{number:05d}"


def is_data_file(name: str) -> bool:
    """Returns whether ``name`` is that of a data file."""
    return re.fullmatch(_PREFIX + r"[0-9a-f]{16}-\d{5,}", name) is not None


class WriterClaim:
    """A hidden file beside the index, locked while its writer lives.

    Args:
        index: the path of the index.
        store: the identity of the store that has the data files.
        folders: the folders with the data files.

    Raises:
        OSError: it cannot be written.
    """

    _file: FileIO | None = None

    def __init__(self, index: str, store: str, folders: Sequence[str]) -> None:
        self._index, self._process = index, os.getpid()
        self.path = os.path.join(os.path.dirname(index), f".{_PREFIX}{store}{_MARK}")
        file = self._file = _locked(self.path)
        try:
            text = json.dumps({"index": index, "folders": list(folders)}).encode()
            with naming("write", self.path):
                os.ftruncate(file.fileno(), 0)
                os.pwrite(file.fileno(), text, 0)
            sync(file.fileno(), self.path, "fsync")
            sync_folder(os.path.dirname(index))
        except BaseException:
            file.close()
            os.unlink(self.path)
            raise

    def settle(self) -> None:
        """Removes the claim, and the data files unless the index names them. Further calls do nothing."""
        if self._file is not None and not self._file.closed:
            _settle(self._index, self.path)
            self._file.close()

    def __del__(self) -> None:
        if self._file is not None and self._process == os.getpid():  # Ctrl-C came before the caller had it
            self.settle()


def settle_abandoned(index: str) -> None:
    """Removes what killed writers of this store left behind."""
    folder = os.path.dirname(index)
    for name in os.listdir(folder):
        path = os.path.join(folder, name)
        # Another user's claim could name any folder.
        with contextlib.suppress(OSError):
            if _CLAIM.fullmatch(name) and os.lstat(path).st_uid == os.geteuid():
                with abandoned(path):
                    _settle(index, path)


def _locked(path: str) -> FileIO:
    """Opens a claim, and locks it where locks work; where they do not, no claim counts as abandoned."""
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    # patient: somebody may be checking for a moment whether it is abandoned
    return hold(path, lambda path: FileIO(os.open(path, flags, 0o600), "r+"), lambda fd: take(fd, patient=True))


def _settle(index: str, path: str) -> None:
    found = _CLAIM.fullmatch(os.path.basename(path))
    if found is None:
        return
    store = found[1]
    try:
        wanted = read_index(index, ()).id == store
    except FileNotFoundError:
        wanted = False
    except (FormatError, OSError):  # the index may be this store's
        return
    if not wanted:
        for folder in _folders(index, path):
            with contextlib.suppress(OSError, ValueError):  # a name that no folder can have
                for name in os.listdir(folder):
                    if is_data_file(name) and name.startswith(f"{_PREFIX}{store}-"):
                        unlink.unlink(os.path.join(folder, name))
    with contextlib.suppress(OSError):
        os.unlink(path)


def _folders(index: str, path: str) -> list[str]:
    """Returns the folder of the index, and the others unless the claim is a copy, made for another index."""
    mine = os.path.dirname(index)
    with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
        found = parse_json(content_of(path, _MOST))
        if found["index"] == index:
            return list(dict.fromkeys([mine, *map(str, found["folders"])]))
    return [mine]
