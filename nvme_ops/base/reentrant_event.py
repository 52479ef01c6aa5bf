"""``ReentrantEvent``: what a signal handler may wait for, also where it interrupts a wait for the same."""

from __future__ import annotations

import contextlib
import threading


class ReentrantEvent:
    """Set once, and waited for like ``threading.Event``.

    That one has a lock, which ``wait`` holds for a moment as it begins and ends: where a signal handler interrupts the
    wait then, and itself waits for the thread that sets the event, neither goes on. Here nothing is locked.
    """

    def __init__(self) -> None:
        self._is_set = False
        self._waiters: list[threading.Lock] = []

    def is_set(self) -> bool:
        """Returns whether ``set`` was called."""
        return self._is_set

    def set(self) -> None:
        """Wakes all who wait. Further calls do nothing."""
        self._is_set = True
        for waiter in list(self._waiters):
            with contextlib.suppress(RuntimeError):  # it was woken before
                waiter.release()

    def wait(self, timeout: float | None = None) -> bool:
        """Waits until the event is set; returns False after ``timeout`` seconds."""
        waiter = threading.Lock()
        waiter.acquire()
        self._waiters.append(waiter)
        try:
            if not self._is_set:  # otherwise ``set`` may not have seen this waiter
                waiter.acquire(timeout=-1 if timeout is None else max(timeout, 0))
        finally:
            self._waiters.remove(waiter)
        return self._is_set
