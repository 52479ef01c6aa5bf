"""``tuned_handle``: an ``aio_handle`` with the settings that suit the device under a path."""

from __future__ import annotations

import os
from functools import partial
from typing import Any

from nvme_ops.handle import aio_handle
from nvme_ops.settings import Settings
from nvme_ops.storage.identity import BARE, folder_of, identify
from nvme_ops.tune import store
from nvme_ops.tune.background import Watched, tuner_of

__all__ = ["stored_settings", "tuned_handle"]


def stored_settings(path: str | os.PathLike[str], way: str = "cpu", backend: str | None = None) -> Settings | None:
    """Returns the settings stored for the device under ``path``, or None.

    Args:
        path: a file or folder, which need not exist yet.
        way: ``"cpu"``; ``"gpu"`` or ``"gds"`` for what ``nvme-tune --gpu`` and ``--gds`` found:
            ``gds_handle(**stored_settings(path, "gds").as_json())``.
        backend: of the handle; by default the one that a handle takes here.
    """
    return store.load(identify(path, way, backend or aio_handle().backend))


class tuned_handle(aio_handle):  # noqa: N801  (as aio_handle)
    """An ``aio_handle`` with the settings found for the device under ``path``, by ``nvme-tune`` or by itself.

    If none are stored it starts with the defaults and, after its first transfer of 16 MiB or more, tunes the device in
    the background: while no tuned handle of the process moves anything, for at most 20 seconds of measuring, in a
    nameless scratch file of 128 MiB in the folder of ``path`` (not without room or permission for it). Later transfers
    have the new settings. The result is stored for the next program. Several handles, threads and processes that use
    the same device tune it once; a forked child leaves it to its parent. A failed tuning issues one ``RuntimeWarning``.

    ``path`` only identifies the device: the handle reads and writes any file.

    Args:
        path: a file or folder, which need not exist yet.
        tune: False uses stored settings and never tunes; so does ``NVME_OPS_TUNE=off``.
        overrides: arguments of ``aio_handle``, which are never changed.

    Raises:
        ValueError: as ``aio_handle``; an unknown value of ``NVME_OPS_TUNE``.
    """

    def __init__(self, path: str | os.PathLike[str], *, tune: bool = True, **overrides: Any) -> None:
        mode = os.environ.get("NVME_OPS_TUNE") or "auto"
        if mode not in ("auto", "off"):
            raise ValueError(f"NVME_OPS_TUNE={mode!r} is not one of auto, off")
        super().__init__(**overrides)
        self._overrides = {name: value for name, value in overrides.items() if value is not None}
        identity = identify(path, "cpu", self.backend)
        found = store.load(identity)
        if found is not None:
            self.adopt(found)
        elif tune and mode == "auto" and self._cache != "buffered" and identity.file_system != BARE:
            same: dict[str, Any] = {"backend": overrides.get("backend"), "cache": self._cache}
            tuner = tuner_of(identity, partial(aio_handle, **same))
            tuner.join(self, folder_of(path))
            self._engine = Watched(self._engine, tuner)

    def adopt(self, settings: Settings | None) -> None:
        """Uses these settings from the next transfer on; pending ones keep theirs. None: tuning is over."""
        engine: Any = self._engine
        if settings is None:
            self._engine = engine.engine if isinstance(engine, Watched) else engine
            return
        values = {**settings.as_json(), **self._overrides, "cache": self._cache}
        if self._overrides.get("num_threads") is not None:  # the other name of the same setting
            del values["intra_op_parallelism"]
        tuned = aio_handle(**values)
        for name in ("_block_size", "_queue_depth", "_single_submit", "_overlap_events", "_lanes", "_engine"):
            setattr(self, name, getattr(tuned, name))
