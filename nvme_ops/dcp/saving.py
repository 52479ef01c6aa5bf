"""Serializes the saves to one folder, across programs and threads."""

from __future__ import annotations

import os
import threading
import weakref

from nvme_ops.storage.locks import Lock

_known: weakref.WeakValueDictionary[str, Saving] = weakref.WeakValueDictionary()


class Saving:
    """Holds the folder until ``end``. DCP tells nobody of a failed save: then its thread or the next one ends it."""

    def __init__(self, metadata: str) -> None:
        path = os.path.realpath(metadata)
        earlier = _known.get(path)
        if earlier is not None and earlier.is_over():
            earlier.end()
        self._thread = threading.current_thread()
        self._lock = Lock(path)
        _known[path] = self

    def is_over(self) -> bool:
        """Returns whether the save can only have failed: its thread has no step left to take."""
        return self._thread is threading.current_thread() or not self._thread.is_alive()

    def end(self) -> None:
        """Releases the folder. Further calls do nothing."""
        self._lock.release()
