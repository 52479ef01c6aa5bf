"""``Closing``: a context manager that is closed at the end of its block."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing_extensions import Self


class Closing:
    """Calls ``close`` at the end of a ``with`` block."""

    def close(self) -> None:
        """Closes the object."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        """Returns the object, which is closed at the end of the block."""
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
