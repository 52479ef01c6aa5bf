"""``nvme_ops.save`` and ``nvme_ops.load``; ``save_async`` is in ``background``."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias

import torch

from nvme_ops.checkpoint import Format, turns
from nvme_ops.checkpoint.formats import format_of
from nvme_ops.checkpoint.plan import plan_for
from nvme_ops.checkpoint.request import Request
from nvme_ops.file import shared_handle
from nvme_ops.handle import aio_handle

Path: TypeAlias = str | os.PathLike[str]
MapLocation: TypeAlias = (
    str
    | torch.device
    | int
    | Mapping[str, str]
    | Callable[[torch.UntypedStorage, str], torch.UntypedStorage | None]
    | None
)


def save(
    obj: Any,
    path: Path,
    *,
    format: Format | None = None,
    durable: bool = True,
    checksum: bool = True,
    metadata: Mapping[str, str] | None = None,
    max_shard_size: int | str | None = None,
    recycle: bool = False,
    handle: aio_handle | None = None,
) -> None:
    """Saves tensors at the speed of the device, atomically: a crash at any point leaves the old file or the new one.

    The format is chosen by the name: ``.safetensors`` for a flat dict of tensors by name, ``.pt``, ``.pth`` and
    ``.bin`` for anything that ``torch.save`` takes, ``.safetensors.index.json`` or a folder for a dict in several
    files. A name without an ending is that of a folder, which is made.
    At most 64 MiB of memory are used beside the tensors, on the CPU or on an accelerator. A ``save_async`` of the same
    path that is under way comes first.

    Args:
        obj: what to save; of a module its state dict, of tied weights one, as safetensors' ``save_model`` does.
        path: the file or folder, replaced at once when all is written.
        format: ``"safetensors"``, ``"torch"`` (or ``"pt"``) or ``"sharded"``, whatever the name.
        durable: return when data and name are on the device. Without it a power failure may take the new file, not the
            old one's place.
        checksum: keep a CRC-32C of every tensor, for ``load(verify=True)`` and ``nvme-checkpoint verify``.
        metadata: strings to keep in the file, where the format has a place for them.
        max_shard_size: bytes of tensors in one file of several, unless one tensor is larger; also in words, as in
            ``"2GB"`` or ``"500MiB"``. 5 GB when None.
        recycle: keep the file that is replaced, under a hidden name, and write the next checkpoint of this path over
            it: the device needs no new blocks then, which is faster where one path is saved again and again. It takes
            the room of one more checkpoint, until a save without it or ``nvme-checkpoint clean``. Whoever still has the
            checkpoint before the last one open, or mapped, sees it change. Only for one file, and with ``durable``.
        handle: whose settings the transfers use; one for the whole process when None.

    Raises:
        TypeError: something that the format cannot hold.
        ValueError: an unknown format; tensors that share memory where the format would store them twice, which is a
            RuntimeError too, as of safetensors.
        OSError: no space, no permission, a device error. The old file is untouched.
        RuntimeError: called by a signal handler that interrupts a save of the same path: use ``save_async`` there.
    """
    name = os.fspath(path)
    plan = plan_for(name, obj, format, checksum, metadata, max_shard_size, durable, recycle)
    turn = turns.Turn(os.path.realpath(plan.target(name)))
    try:
        if turn.interrupts_another():
            raise RuntimeError(
                f"{name}: a signal handler called save() while this thread is in a save of the same path, which cannot "
                "go on before the handler returns: call save_async() there, whose thread saves after that one"
            )
        turn.wait()
        plan.write(name, durable=durable, handle=handle or shared_handle())
    finally:
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
    format: Format | None = None,
    handle: aio_handle | None = None,
) -> Any:
    """Loads what ``save``, safetensors or ``torch.save`` wrote, past the page cache or from it where it lies there.

    New CPU tensors of one call share one memory, which is freed with the last of them.

    Args:
        path: the file, the ``.safetensors.index.json``, or a folder of ``save_pretrained``.
        map_location: as of ``torch.load``: where the tensors go; the CPU when None. safetensors files know no devices,
            so for them it is one device.
        keys: only the tensors of these names are read.
        into: a state dict or module whose tensors are filled in place, on whatever device they are, without a copy in
            between. Without ``keys`` its names must be those of the file, of tied weights one of them.
        strict: with False names in ``keys`` or ``into`` that the file lacks are passed over, and the other way round.
        verify: compare the checksums that ``save`` kept.
        mmap: the tensors lie in the page cache, by a private mapping of the file: nothing is copied, and only what is
            touched is read. The file must stay as it is while they are in use. Replacing it, as ``save`` does, is no
            change; a program that writes over it changes the tensors, and one that truncates it kills this one by
            SIGBUS when they are touched. Without it the tensors are copies, which nobody can change.
        format: as of ``save``.
        handle: as of ``save``.

    Returns:
        The tensors by name; of a ``.pt`` file whatever object was saved.

    Raises:
        FormatError: (a ValueError) the file is damaged or no such file; the message names the file and the field.
        ChecksumError: (an OSError) ``verify`` found a difference; it names the tensors.
        KeyError: a name in ``keys`` or ``into`` that the file lacks, or the other way round; a RuntimeError too, as of
            ``Module.load_state_dict``.
        ValueError: shapes or dtypes of ``into`` differ, or there is nothing to verify.
        OSError: the file cannot be read.
        MemoryError: there is not enough memory for the tensors.
    """
    name = os.fspath(path)
    if isinstance(map_location, int):
        map_location = torch.device(map_location)
    if keys is not None:
        keys = (keys,) if isinstance(keys, str) else tuple(keys)
    request = Request(handle or shared_handle(), map_location, keys, verify, mmap, strict)
    return format_of(name, format).load(name, into, request)
