"""``Patch``: what is replaced in another package as long as somebody needs it. docs/patches.md lists all of them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

_INHERITED: Any = object()  # stands for what the owner itself has not


class Patch:
    """Replaces a method of a class or an object, or a function of a module, from the first user to the last.

    Args:
        owner: the class, object or module.
        name: of the method or function.
        replacement: makes the new one of the one before. It has to work without users, too: if somebody else has
            replaced it since, it stays below theirs.
    """

    def __init__(self, owner: object, name: str, replacement: Callable[[Any], Any]) -> None:
        self._owner, self._name, self._replacement = owner, name, replacement
        self._users: set[object] = set()
        self._ours: Any = None
        self._before: Any = None

    def take(self) -> Callable[[], None]:
        """Adds a user. Returns the function that ends its use, from the second call on without effect."""
        user = object()
        self._users.add(user)
        self._update()
        return functools.partial(self._leave, user)

    def _leave(self, user: object) -> None:
        self._users.discard(user)
        self._update()

    def _update(self) -> None:
        """Replaces or restores it. Without a lock: a garbage collection may end uses, also within this."""
        while (current := vars(self._owner).get(self._name, _INHERITED)) is self._ours or self._users:
            if current is self._ours:
                if self._users:
                    return
                if self._before is _INHERITED:
                    delattr(self._owner, self._name)
                else:
                    setattr(self._owner, self._name, self._before)
            else:
                self._before = current
                self._ours = self._replacement(getattr(self._owner, self._name) if current is _INHERITED else current)
                setattr(self._owner, self._name, self._ours)
