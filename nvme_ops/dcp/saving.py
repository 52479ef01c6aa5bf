"""One save of a folder at a time, of all programs and threads that save there."""

from __future__ import annotations

import os
import threading
import weakref

from nvme_ops.checkpoint.between_processes import Lock

_known: weakref.WeakValueDictionary[str, Saving] = weakref.WeakValueDictionary()


class Saving:
    """Holds the folder until ``end``. DCP tells nobody that a save failed: then its thread or the next one ends it."""

    def __init__(self, metadata: str) -> None:
        path = os.path.realpath(metadata)
        earlier = _known.get(path)
        if earlier is not None and earlier.is_over():
            earlier.end()
        self._thread = threading.current_thread()
        self._lock = Lock(path)
        _known[path] = self

    def is_over(self) -> bool:
        """Whether it can have no other end: its thread has none of its steps to take any more."""
        return self._thread is threading.current_thread() or not self._thread.is_alive()

    def end(self) -> None:
        """Once or more."""
        self._lock.release()
