"""``save_on_nvme``: like torch's ``save_on_cpu``, but what autograd saves goes to storage."""

from __future__ import annotations

import contextlib
import operator
import os
from collections.abc import Sequence
from functools import partial
from typing import Any, Literal

import torch

from nvme_ops.base.native import native
from nvme_ops.base.text import bytes_of, never_raising
from nvme_ops.io.arguments import require_switches
from nvme_ops.io.handle import aio_handle
from nvme_ops.offload.activations.activations import Activations
from nvme_ops.offload.activations.recompute import Away, Choice
from nvme_ops.offload.activations.saved_tensors import Layout, Saved, SavedValue, kept, place_of
from nvme_ops.offload.activations.units import ActivationStats
from nvme_ops.offload.budgets import budgets_of, where_it_computes
from nvme_ops.offload.memory import Memory

Path = str | os.PathLike[str]


class save_on_nvme(torch.autograd.graph.saved_tensors_hooks):  # noqa: N801  (as torch's save_on_cpu)
    """Within the block, tensors that autograd saves for the backward pass go to storage, and come back for it.

        saving = nvme_ops.offload.save_on_nvme("/mnt/nvme")
        for batch in batches:
            with saving:
                loss = model(batch)
            loss.backward()

    Make it once and enter it for each step: it then knows what will have to be written. Tensors are written while
    forward computes, and read ahead, in reverse order, while backward does. Gradients are bit for bit the same as
    without it. What was saved last stays in memory, as much as the budget has room for. Parameters, views of them and
    small tensors stay as well, outside the budget; what is saved several times is written once, and so are parts of
    what was saved as a whole before.

    Args:
        folder: where they go; several, one per device, share the tensors by their measured rates.
        min_bytes: smaller tensors stay in memory.
        device_budget: bytes for saved tensors on an accelerator, or a size such as ``"1G"``; 256 MiB when None.
        host_budget: bytes of page-locked host memory for those of an accelerator that have no room there, and come back
            faster than from storage; ``"auto"``, when None, is what is free less an eighth, ``0`` none.
        memory_budget: another word for the budget of where the tensors are; without an accelerator, that of the host.
        memory: in place of a budget of its own, one that is shared with others.
        policy: ``"nvme"``: as above. ``"auto"``: in addition some tensors are not saved but computed again, where what
            they are computed from is saved anyway and storage would take longer. That is measured, from the first step
            on, and applies to eager pointwise operations, softmax, layer norm and casts.
        checksums: keep a CRC-32C of each tensor and compare it when it comes back.
        handle: moves the bytes; one for the whole process when None.

    Raises:
        ValueError, TypeError: invalid arguments.
        OSError: the folder cannot be used. In forward, ENOSPC: there is no room, and the budget is spent; the
            message names the tensor and the space. In backward: a tensor could not be read.
        RuntimeError: in backward, a tensor was modified in place after it had been saved.
    """

    def __init__(
        self,
        folder: Path | Sequence[Path],
        *,
        min_bytes: int | str = "1M",
        device_budget: int | str | None = None,
        host_budget: int | str | None = None,
        memory_budget: int | str | None = None,
        memory: Memory | None = None,
        policy: Literal["nvme", "auto"] = "nvme",
        checksums: bool = False,
        handle: aio_handle | None = None,
    ) -> None:
        if policy not in ("nvme", "auto"):
            raise ValueError(f"policy={policy!r} is not one of nvme, auto")
        require_switches(checksums=checksums)
        least = max(1, bytes_of("min_bytes", min_bytes, least=0))
        where = where_it_computes()
        budgets = budgets_of(where, memory_budget, memory, device_budget, host_budget, default="256M", least=0)
        host = budgets.host_tier().share()
        self._activations = Activations(
            folder, given=budgets.own, budget_name=budgets.name, host=host, checksums=checksums, handle=handle
        )
        self._choice = Choice(least) if policy == "auto" else None
        self._pooling: list[object] = []  # one for each block that is in progress
        super().__init__(partial(_pack, self._activations, least, self._choice), _unpack)

    def __enter__(self) -> save_on_nvme:  # type: ignore[override]  # torch's returns nothing
        with contextlib.ExitStack() as undo:  # of an entry that Ctrl-C ends, which no ``__exit__`` follows
            self._pooling.append(native().pool_large_tensors())  # the first ones saved are made before that is known
            undo.callback(self._pooling.pop)
            if self._choice is not None:
                undo.enter_context(self._choice)
            undo.pop_all()
            return super().__enter__() or self

    def __exit__(self, *about: Any) -> None:
        try:
            super().__exit__(*about)  # first: nothing may be saved afterwards
        finally:
            try:
                if self._choice is not None:
                    self._choice.__exit__(*about)
            finally:
                self._pooling.pop()

    @never_raising
    def __repr__(self) -> str:
        """Returns for example ``<save_on_nvme: 64 MiB saved, 48 MiB written, at most 16 MiB in memory>``."""
        return f"<save_on_nvme: {self._activations!r}>"

    def stats(self) -> ActivationStats:
        """Returns what was moved so far."""
        stats = self._activations.stats()
        if self._choice is not None:
            stats.bytes_recomputed = self._choice.bytes_again
        return stats

    def explain(self) -> str:
        """Says what was moved and waited for since the last call or the start, and what limits.

        The first call measures the rates of storage and bus. Raises OSError if a folder has no room for 256 MiB.
        """
        return self._activations.explain(self.stats())

    def close(self) -> None:
        """Removes the files. Graphs whose tensors are on storage can no longer run backward. Further calls do nothing.

        It is called when this and the last of these graphs are gone.
        """
        self._activations.close()


@torch._disable_dynamo
def _pack(activations: Activations, least: int, choice: Choice | None, tensor: torch.Tensor) -> SavedValue:
    """Decides what becomes of a tensor that autograd saves."""
    place = place_of(tensor, least)
    if place is None or activations.is_busy():
        return kept(tensor, least)
    # as ``Layout.of``: one call less for each tensor
    layout = Layout(tensor.dtype, tensor.shape, tensor.stride(), int(tensor.storage_offset()) * tensor.itemsize)
    counter = native().share_version(torch.empty(0, device="cpu"), tensor)
    version, may_be_gradient = tensor._version, not tensor.requires_grad
    if choice is not None:
        if (last := activations.take_pass()) is not None:
            choice.end_pass(last)
        again = choice.source_of(place, version, partial(_known, activations))
        if again is not None:
            return Saved(layout, again.value, counter, version, may_be_gradient)
    ticket = activations.put(tensor, place)
    fetch, unit = partial(activations.get, ticket), ticket.unit
    return Saved(layout, fetch, counter, version, may_be_gradient, unit.is_shared, unit.place.part)


def _known(activations: Activations, away: Away) -> SavedValue | None:
    """Returns what a tensor was saved as."""
    ticket = activations.find((away.place, away.whole), away.version)
    if ticket is None:
        return None
    return Saved(away.layout, partial(activations.get, ticket), part=ticket.unit.place.part)


# ``SavedValue.value``; partial, since torch sets an attribute of it
_unpack = torch._disable_dynamo(partial(operator.methodcaller("value")))
