"""``tuned_handle``: an ``aio_handle`` with the settings that ``nvme-tune`` found for the device under a path."""

from __future__ import annotations

import os
from typing import Any

from nvme_ops.handle import aio_handle, made
from nvme_ops.settings import Settings
from nvme_ops.storage.identity import identify
from nvme_ops.tune import store

__all__ = ["stored_settings", "tuned_handle"]


def stored_settings(path: str | os.PathLike[str], way: str = "cpu", backend: str | None = None) -> Settings | None:
    """Returns the settings stored for the device under ``path``, or None.

    Args:
        path: a file or folder, which need not exist yet; the folder that it is to be in must.
        way: ``"cpu"``; ``"gpu"`` or ``"gds"`` for what ``nvme-tune --gpu`` and ``--gds`` found:
            ``gds_handle(**stored_settings(path, "gds").as_json())``.
        backend: of the handle; by default the one that a handle takes here.

    Raises:
        FileNotFoundError: the folder of ``path`` is missing.
    """
    return store.load(identify(path, way, backend or aio_handle().backend))


class tuned_handle(aio_handle):  # noqa: N801  (as aio_handle)
    """An ``aio_handle`` with the settings that ``nvme-tune`` found for the device under ``path``; else the defaults.

    They never change; ``adaptive_handle`` goes on from them by what it learns.

    ``path`` only identifies the device: the handle reads and writes any file.

    Args:
        path: a file or folder, which need not exist yet; the folder that it is to be in must.
        overrides: arguments of ``aio_handle``, which are used as they are given.

    Raises:
        FileNotFoundError: the folder of ``path`` is missing.
        ValueError: as ``aio_handle``.
    """

    def __init__(self, path: str | os.PathLike[str], **overrides: Any) -> None:
        self._path = os.path.abspath(os.fspath(path))
        self._overrides = {name: value for name, value in overrides.items() if value is not None}
        self._identity = identify(path, "cpu", aio_handle(backend=overrides.get("backend")).backend)
        found = store.load(self._identity)
        values = {**(found.as_json() if found else {}), **self._overrides}
        if "num_threads" in self._overrides:  # the other name of the same setting
            values.pop("intra_op_parallelism", None)
            values.update({name: value for name, value in overrides.items() if name == "intra_op_parallelism"})
        super().__init__(**values)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles path and arguments: unpickling makes a handle with what is stored there."""
        return made, (type(self), {"path": self._path, **self._overrides})
