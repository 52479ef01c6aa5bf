"""``Unsynced``: what a store has changed since its last sync, and what it must not write over before the next one."""

from __future__ import annotations

import errno
from collections.abc import Mapping

from nvme_ops.storage.values import Value


class Unsynced:
    """Changes of a store; used with its lock held.

    Args:
        kept: a power failure brings back what the last sync has made durable: until the next one, the extents of such
            a value are not free, though it was replaced or dropped.
    """

    def __init__(self, kept: bool) -> None:
        self._kept = kept
        self.durable: dict[str, Value] = {}  #: what a power failure would bring back
        self._changed: set[str] = set()  # keys put or dropped since the last sync
        self._doubtful: set[str] = set()  # keys put before a sync that failed
        self._held: list[Value] = []
        self._syncing: dict[str, Value | None] | None = None  # what has changed before the sync that is under way
        self._held_before: list[Value] = []

    def put(self, key: str) -> None:
        """Notes that the key has a new value, or none."""
        self._changed.add(key)
        self._doubtful.discard(key)

    def holds(self, key: str, value: Value) -> bool:
        """Returns whether the extents of this value, which the key had, must stay until the next sync."""
        held = self._kept and (self._syncing is not None or self.durable.get(key) is value)
        if held:
            self._held.append(value)
        return held

    def begin(self, values: Mapping[str, Value]) -> None:
        """Begins a sync of ``values``. One of the three below ends it."""
        self._syncing = {key: values.get(key) for key in self._changed}
        self._changed = set()
        self._held_before, self._held = self._held, []

    def flushed(self) -> None:
        """Notes that the values are on the device, unless a sync before has failed."""
        for key, value in (self._syncing or {}).items():
            self.durable.pop(key, None)
            if value is not None:
                self.durable[key] = value

    def failed(self) -> None:
        """Ends a sync that has failed: what was put before it may be lost."""
        self._doubtful |= {key for key, value in (self._syncing or {}).items() if value is not None} - self._changed
        self._undo()

    def ended(self, path: str) -> list[Value]:
        """Ends a sync; returns what need not stay any more.

        Raises OSError if an earlier one has failed and what was put before it was neither put again nor dropped.
        """
        if self._doubtful:
            self._undo()
            shown = ", ".join(map(repr, sorted(self._doubtful)[:5]))
            raise OSError(
                errno.EIO,
                f"a sync has failed: {len(self._doubtful)} tensors put before it may be lost, and are to be put "
                f"again or dropped: {shown}{' ...' if len(self._doubtful) > 5 else ''}",
                path,
            )
        released, self._held_before, self._syncing = self._held_before, [], None
        return released

    @property
    def certain(self) -> bool:
        """False where a sync has failed, and what was put before it may be lost."""
        return not self._doubtful

    @property
    def changed(self) -> bool:
        """Whether anything has changed since the last sync."""
        return bool(self._changed)

    def _undo(self) -> None:
        self._changed |= set(self._syncing or ())
        self._held[:0], self._held_before, self._syncing = self._held_before, [], None
