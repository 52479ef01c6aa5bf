"""``adaptive_handle``: an ``aio_handle`` that learns how each kind of transfer is best moved."""

from __future__ import annotations

import os
import weakref
from typing import TYPE_CHECKING, Any

import torch

from nvme_ops import gds
from nvme_ops._native import native
from nvme_ops.adaptive.dictionary import Dictionary, Learned, dictionary_of
from nvme_ops.handle import made
from nvme_ops.keywords import CACHE
from nvme_ops.tune.handle import tuned_handle

if TYPE_CHECKING:
    from nvme_ops.engine import Engine

__all__ = ["adaptive_handle"]

MODE = "NVME_OPS_ADAPTIVE"
_MODES = ("learn", "frozen", "off")
_MOST_LANES = 8  # more do not copy from the page cache any faster


class adaptive_handle(tuned_handle):  # noqa: N801  (as aio_handle)
    """A ``tuned_handle`` that learns, for each class of transfers, which of several tools moves them fastest.

    A class is a direction, a size (powers of 4 from 4 KiB to 1 GiB), a place in memory (pageable, aligned, huge or
    page-locked pages, an accelerator), whether the page cache has the bytes, and how much else is in flight. The tools
    of a class differ from the handle's settings in one respect each: block size, queue depth, lanes, staged or in
    place, the page cache, cuFile or page-locked memory. All of them move the same bytes.

    The first 20 transfers or so of a class try its tools and drop the worst first; later ones use the best. The tools
    are tried again when the best one's cost rises or falls by a factor of 1.5, and after 1024 transfers in any case.
    Nothing is transferred that the program does not ask for. What was learned is kept for each device in the user's
    cache folder, when a handle is closed or dropped and at exit; the next program starts from it. The handles of a
    process that use the same device learn together.

    The environment variable ``NVME_OPS_ADAPTIVE``, read when a handle is made, limits it: ``frozen`` uses what is
    known and learns nothing, so that the same calls always use the same tools; ``off`` makes it a ``tuned_handle``.

    ``path`` only identifies the device: the handle reads and writes any file.

    Args:
        path: a file or folder, which need not exist yet; the folder that it is to be in must.
        gds: whether to let cuFile move accelerator tensors. None: if the gds op is built and works here.
        overrides: arguments of ``aio_handle``, which are never changed.

    Raises:
        FileNotFoundError: the folder of ``path`` is missing.
        ValueError: as ``aio_handle``; an unknown value of ``NVME_OPS_ADAPTIVE``.
        RuntimeError: cuFile was asked for and cannot work here; the message says why.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        gds: bool | None = None,
        **overrides: Any,
    ) -> None:
        self._mode = os.environ.get(MODE) or "learn"
        if self._mode not in _MODES:
            raise ValueError(f"{MODE}={self._mode!r} is not one of {', '.join(_MODES)}")
        self._with_gds = gds
        self._dictionary: Dictionary | None = None
        super().__init__(path, **overrides)

    def _make_engine(self, settings: tuple[Any, ...]) -> Engine:
        if self._mode == "off":
            return super()._make_engine(settings)
        block_size, queue_depth, *switches, lanes, backend, cache = settings
        lanes = lanes or 1
        lanes_fixed = {"intra_op_parallelism", "num_threads"} & set(self._overrides)
        most_lanes = lanes if lanes_fixed else max(lanes, min(_MOST_LANES, max(2, len(os.sched_getaffinity(0)))))
        fixed = (
            "block_size" in self._overrides,
            "queue_depth" in self._overrides,
            bool(lanes_fixed),
            "cache" in self._overrides or bool(os.environ.get(CACHE)),
        )
        self._dictionary = dictionary_of(
            self._identity,
            (block_size, queue_depth, lanes, False, False, ("auto", "direct", "buffered").index(cache)),
            most_lanes,
            fixed,
            self._mode == "frozen",
        )
        weakref.finalize(self, self._dictionary.save)
        same = (block_size, queue_depth, *switches, most_lanes, backend, cache)
        host: Engine = native().Engine(*same, self._dictionary.of(native(), cufile=False))
        module = _gds_module(self._with_gds)
        if module is None:
            return host
        return gds.Engines(host, module.Engine(*same, self._dictionary.of(module, cufile=True)))

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles path and arguments: unpickling makes a handle with what is known there."""
        given = {"path": self._path, "gds": self._with_gds, **self._overrides}
        return made, (type(self), given)

    def close(self) -> None:
        """Closes it as ``aio_handle`` does, and keeps what was learned."""
        super().close()
        if self._dictionary is not None:
            self._dictionary.save()

    def learned(self) -> list[Learned]:
        """Returns what is known about each class of transfers on this device; nothing if ``NVME_OPS_ADAPTIVE=off``."""
        if self._dictionary is None:
            return []
        if not self.closed:
            self._engine.sweep()
        return self._dictionary.learned()

    def explain(self) -> str:
        """Returns the dictionary in words: for each class what is used, how fast it is, and what else was tried."""
        if self._dictionary is None:
            return f"{MODE}=off: every transfer uses the handle's settings"
        lines = [str(one) for one in self.learned()]
        return "\n".join([*lines, "" if lines else "nothing was transferred yet", self._dictionary.words()]).strip()


def _gds_module(wanted: bool | None) -> Any:
    """Returns the native module ``gds`` if cuFile is to be used; None if not. Compiles it only if asked for."""
    if wanted is False or (wanted is None and not (torch.cuda.is_available() and gds.is_ready())):
        return None
    try:
        return gds.opened(gds.mode_of_environment())
    except RuntimeError:
        if wanted:
            raise
        return None
