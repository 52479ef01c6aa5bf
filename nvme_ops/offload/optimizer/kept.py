"""Names the sessions of an optimizer's states by rank, and finds those that were kept by other numbers of ranks."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Sequence

from nvme_ops.base import ranks
from nvme_ops.offload.optimizer.records import steps_in
from nvme_ops.storage.session import kept_sessions

_ALONE = " of rank 0 of 1"  # earlier versions have named a launcher's only rank so

Folders = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]


def session_name(folders: Folders, name: str, reuse: bool) -> str:
    """Returns the name of this rank's session: ``name`` for the only one, whether a launcher has started it or not."""
    me = ranks.distributed()
    if me is not None and me.world_size > 1:
        return f"{name} of rank {me.rank} of {me.world_size}"
    found = [each for each, *_ in kept_sessions(_first(folders))] if reuse else []
    return name + _ALONE if name + _ALONE in found and name not in found else name


def warn_of_others(folders: Folders, name: str) -> None:
    """Warns that states begin anew although others have kept some under this name in the first folder."""
    found = _kept(folders, name)
    if not found:
        return
    me = ranks.distributed() or ranks.Rank(0, 1)
    those = ", ".join(f"step {steps} of {each!r} in {path}" for each, (steps, path) in found.items())
    if me.world_size == 1:
        take = f"If each of those ranks had all parameters, name={next(iter(found))!r} continues with its states"
    else:
        take = "If each rank has all parameters, save_states there and load_states here are enough"
    warnings.warn(
        f"{name!r} begins without states, at step 0, as rank {me.rank} of {me.world_size}, but other ranks have kept "
        f"some here: {those}. The same number of ranks would continue with them. To take them over, save the result of "
        "get_optimizer_state_dict there and give it to set_optimizer_state_dict here, both of "
        f"torch.distributed.checkpoint. {take}. Remove these folders if nobody needs them",
        stacklevel=3,
    )


def _kept(folders: Folders, name: str) -> dict[str, tuple[int, str]]:
    """Returns steps and path, by session, of states kept under a name by any number of ranks, in the first folder."""
    pattern = re.compile(re.escape(name) + r"(?: of rank \d+ of \d+)?")
    found: dict[str, tuple[int, str]] = {}
    for each, path, in_use in kept_sessions(_first(folders)):
        if not in_use and pattern.fullmatch(each) and (steps := steps_in(path)) is not None:
            found[each] = steps, path
    return found


def _first(folders: Folders) -> str | os.PathLike[str]:
    """Returns the folder that has the records; an empty text if none is given, which ``Session`` will refuse."""
    return folders if isinstance(folders, str | os.PathLike) else next(iter(folders), "")
