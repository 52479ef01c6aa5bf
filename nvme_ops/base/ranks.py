"""Finds which of several processes this is, and expands folder names like ``"/mnt/nvme{local_rank}"``."""

from __future__ import annotations

import os
from typing import NamedTuple

import torch


class Rank(NamedTuple):
    """One of the ``world_size`` processes that work together, counted from 0."""

    rank: int
    world_size: int


def distributed() -> Rank | None:
    """Returns the rank of this process in ``torch.distributed``; None unless that is initialized."""
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return None
    return Rank(torch.distributed.get_rank(), torch.distributed.get_world_size())


def started() -> Rank:
    """Returns the rank that ``torchrun`` or another launcher has set in the environment; 0 of 1 without one.

    Raises ValueError for a variable that is not a number.
    """
    return Rank(_from_environment("RANK", 0), _from_environment("WORLD_SIZE", 1))


def expanded(folder: str | os.PathLike[str]) -> str:
    """Returns the name of a folder with ``{rank}``, ``{local_rank}`` and ``{hostname}`` replaced, and nothing else.

    Raises ValueError for ``{local_rank}`` if there are several ranks and the launcher has not set ``LOCAL_RANK``.
    """
    name = os.fspath(folder)
    if "{rank}" in name:
        name = name.replace("{rank}", str((distributed() or started()).rank))
    if "{local_rank}" in name:
        local = _from_environment("LOCAL_RANK", -1)
        if local < 0 and (me := distributed() or started()).world_size > 1:
            raise ValueError(f"{name}: LOCAL_RANK is not set, and this is rank {me.rank} of {me.world_size}")
        name = name.replace("{local_rank}", str(max(0, local)))
    return name.replace("{hostname}", os.uname().nodename)


def _from_environment(name: str, default: int) -> int:
    value = os.environ.get(name) or str(default)
    try:
        return int(value)
    except ValueError:
        raise ValueError(f"{name}={value!r} in the environment is not a number") from None
