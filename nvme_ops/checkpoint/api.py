"""``nvme_ops.save`` and ``nvme_ops.load``; ``save_async`` is in ``background``."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from operator import attrgetter
from typing import Any, TypeAlias

import torch

from nvme_ops.base.errors import named
from nvme_ops.base.lifetime import at_fork, forkable_lock
from nvme_ops.checkpoint import FormatName
from nvme_ops.checkpoint.format import format_of, plan_for
from nvme_ops.checkpoint.request import Request, SaveOptions
from nvme_ops.io.arguments import require_switches
from nvme_ops.io.file import handle_of
from nvme_ops.io.handle import aio_handle

Path: TypeAlias = str | os.PathLike[str]
MapLocation: TypeAlias = (
    str
    | torch.device
    | int
    | Mapping[str, str]
    | Callable[[torch.UntypedStorage, str], torch.UntypedStorage | None]
    | None
)

turns_lock = forkable_lock()  # taken directly: Ctrl-C while a Condition is entered may leave its lock taken
_changed = threading.Condition(turns_lock)
_RECHECK = 1.0  # seconds after which a waiter checks whether an earlier save has ended without notifying it
_turns: dict[str, deque[Turn]] = {}  # by path: saves in progress and waiting


def save(
    obj: Any,
    path: Path,
    *,
    format: FormatName | None = None,
    durable: bool = True,
    checksums: bool = True,
    metadata: Mapping[str, str] | None = None,
    max_shard_size: int | str | None = None,
    recycle: bool = False,
    handle: aio_handle | None = None,
) -> None:
    """Saves tensors at the speed of the device, atomically: a crash at any point leaves the old file or the new one.

    The format is chosen by the name: ``.safetensors`` for a flat dict of tensors by name, ``.pt``, ``.pth`` and
    ``.bin`` for anything that ``torch.save`` accepts, ``.safetensors.index.json`` or a folder for a dict in several
    files. A name without a suffix means a folder, which is created. Besides the tensors, on the CPU or an accelerator,
    at most 64 MiB of memory are used. Waits for a ``save_async`` of the same path.

    Args:
        obj: what to save; for a module its state dict, tied weights once, as safetensors' ``save_model`` does.
        path: the file or folder, replaced atomically once everything is written.
        format: ``"safetensors"``, ``"torch"`` (or ``"pt"``) or ``"sharded"``; by default chosen by the name.
        durable: return only when data and name are on the device. If False, a power failure may restore the old file.
        checksums: store a CRC-32C of every tensor, for ``load(verify=True)`` and ``nvme-checkpoint verify``.
        metadata: strings to store in the file, if the format has a place for them.
        max_shard_size: if there are several files, the most bytes of tensors in each, unless one tensor is larger; also
            as text: ``"2GB"`` or ``"500MiB"``. 5 GB when None.
        recycle: keep the replaced file under a hidden name, and write the next checkpoint of this path over it: no new
            blocks are then allocated, which is faster if one path is saved repeatedly. It takes the space of one more
            checkpoint, until a save without it or ``nvme-checkpoint clean``. Programs that still have the checkpoint
            before the last one open, or mapped, see it change. Only for single files, and with ``durable``.
        handle: the handle whose settings the transfers use; one shared by the whole process when None.

    Raises:
        TypeError: ``obj`` holds something that the format cannot store.
        ValueError: an unknown format; tensors that share memory if the format would store them twice (also a
            RuntimeError, as in safetensors).
        OSError: no space, no permission, a device error. The old file is unchanged.
        RuntimeError: called by a signal handler that interrupts a save of the same path: use ``save_async`` there.
    """
    name = name_of(path, "save(obj, path)")
    plan = plan_for(name, obj, format, SaveOptions(durable, checksums, metadata, max_shard_size, recycle))
    turn = Turn(os.path.realpath(plan.target(name)))
    try:
        if turn.begin():
            raise RuntimeError(
                f"{name}: a signal handler called save() while this thread is saving to the same path, which cannot "
                "continue until the handler returns: call save_async() there, whose thread saves afterwards"
            )
        turn.wait()
        plan.write(name, handle_of(handle))
    finally:
        turn.over = True
        turn.end()


def load(
    path: Path,
    *,
    map_location: MapLocation = None,
    keys: Iterable[str] | None = None,
    into: Mapping[str, Any] | torch.nn.Module | None = None,
    strict: bool = True,
    verify: bool = False,
    mmap: bool = False,
    format: FormatName | None = None,
    handle: aio_handle | None = None,
) -> Any:
    """Loads what ``save``, safetensors or ``torch.save`` wrote, bypassing the page cache for data not already in it.

    New CPU tensors of one call share one allocation, which is freed with the last of them.

    Args:
        path: the file, the ``.safetensors.index.json``, or a folder that ``save_pretrained`` wrote.
        map_location: where the tensors go, as for ``torch.load``; the CPU when None. For safetensors files, which
            record no devices, it must be a single device.
        keys: read only the tensors with these names.
        into: a state dict or module whose tensors are filled in place, on any device, without a copy in between.
            Without ``keys`` its names must be those in the file; for tied weights one of their names is enough.
        strict: if False, names found only in the file, or only in ``keys`` or ``into``, are ignored.
        verify: compare the checksums stored by ``save``.
        mmap: map the file (MAP_PRIVATE), so that the tensors are in the page cache: nothing is copied, and only what is
            touched is read. The file must not change while they are in use. Replacing it, as ``save`` does, is safe; a
            program that overwrites it changes the tensors, and after one has truncated it, touching them kills this
            process by SIGBUS. Without ``mmap`` the tensors are copies.
        format: as for ``save``.
        handle: as for ``save``.

    Returns:
        The tensors by name; for a ``.pt`` file the object that was saved.

    Raises:
        FormatError: (a ValueError) the file is damaged, or of another format; the message names the file and the field.
        ChecksumError: (an OSError) ``verify`` found a difference; it names the tensors.
        KeyError: ``keys`` or ``into`` has a name that the file lacks, or the file one that ``into`` lacks; also a
            RuntimeError, as in ``Module.load_state_dict``.
        ValueError: shapes or dtypes in ``into`` differ, or the file has no checksums to verify.
        OSError: the file cannot be read.
        MemoryError: there is not enough memory for the tensors.
    """
    name = name_of(path, "load(path)")
    require_switches(strict=strict, verify=verify, mmap=mmap)
    if into is not None and not isinstance(into, Mapping | list | tuple | torch.nn.Module):
        raise TypeError(f"into must be a module or a dict of tensors, not {type(into).__name__}")
    if isinstance(map_location, int | str):
        map_location = torch.device(map_location)
    if keys is not None:
        keys = (keys,) if isinstance(keys, str) else tuple(keys)
    request = Request(handle_of(handle), map_location, keys, verify, mmap, strict)
    return format_of(name, format).load(name, into, request)


def name_of(path: Any, call: str) -> str:
    """Returns the name of a file.

    Raises TypeError for anything else, with ``call``, the right usage, and FileNotFoundError for an empty name.
    """
    if not isinstance(path, str | os.PathLike) or not isinstance(name := os.fspath(path), str):
        raise TypeError(f"the path must be a str or an os.PathLike, not {type(path).__name__}: {call}")
    return named(name)


class Turn:
    """A place in the queue of saves to ``path``, which run one at a time: from ``begin`` until ``over`` is set.

    A signal handler may raise wherever a function is entered, also in ``end``. So the caller of ``begin`` sets ``over``
    itself, first thing in a ``finally`` clause; ``end`` then wakes those who wait.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._queue: deque[Turn] = deque()
        self.thread = threading.get_ident()  # the thread that makes this save
        self.over = False

    def begin(self) -> bool:
        """Queues up behind all saves that have begun. Returns whether this thread makes one of them.

        In that case this is a signal handler, and waiting would be a deadlock.
        """
        with turns_lock:
            self._queue = _turns.setdefault(self._path, deque())
            self._queue.append(self)
            _turns[self._path] = self._queue  # a signal handler's save may have removed it since the line before last
            return self._queue[0] is not self and self.thread in map(attrgetter("thread"), self._before())

    def wait(self) -> None:
        """Waits until all earlier saves have ended.

        Needs no lock if there is none: the main thread may have it, in a signal handler that waits for this save.
        """
        while self._queue[0] is not self and self._before():
            with turns_lock:
                if self._before():
                    _changed.wait(_RECHECK)

    def end(self) -> None:
        """Leaves the queue and lets the next save begin. Further calls do nothing."""
        with turns_lock:
            for turn in list(self._queue):
                if turn.over and turn in self._queue:  # not removed by a signal handler's save meanwhile
                    self._queue.remove(turn)
            if _turns.get(self._path) is self._queue and not self._queue:
                _turns.pop(self._path, None)
            _changed.notify_all()

    def _before(self) -> list[Turn]:
        """Returns a snapshot of the earlier saves that are not over: a signal handler's may come and go."""
        queue = list(self._queue)
        place = queue.index(self)
        return [turn for turn in queue[:place] if not turn.over] if place else []


at_fork(_turns.clear)  # those of the parent's threads
