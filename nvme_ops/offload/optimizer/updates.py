"""``Updates``: torch's own optimizer at work on one chunk, whose states are in a buffer."""

from __future__ import annotations

import contextlib
import ctypes
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from nvme_ops.offload.optimizer.chunks import ELEMENTWISE, MASTER, Chunk, Slice, copied
from nvme_ops.offload.optimizer.states import States

LOW = (torch.bfloat16, torch.float16)  #: dtypes that master weights are for

_malloc_trim: Any = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's

_Groups = Sequence[dict[str, Any]]
_Kind = tuple[int, torch.dtype, torch.device]  # of a chunk


def trim_heap() -> None:
    """Gives what is free in the heap back to the system."""
    if _malloc_trim is not None:
        _malloc_trim(0)


class Updates:
    """Updates chunks by an optimizer of torch.

    Args:
        optimizer: its class.
        options: that it is made with, beside those of its groups.
        states: has the chunks.

    Methods are given ``groups``, the parameter groups of now.
    """

    def __init__(self, optimizer: type[torch.optim.Optimizer], options: Mapping[str, Any], states: States) -> None:
        self._class, self._options, self._states = optimizer, options, states
        self._late: tuple[int, set[_Kind]] = (-1, set())  # of an attempt at a step; see _late_kinds
        #: Whether parameters or gradients were lent by storage, since the caller has set this to False.
        self.has_lent = False

    def decide(self, groups: _Groups) -> None:
        """Looks which parameters have a gradient in the step at hand, and no states yet. Once for each attempt."""
        if self._late[0] != self._states.attempt:
            self._late = (self._states.attempt, self._late_kinds(groups, early=False))

    def update_early(self, groups: _Groups, chunk: Chunk, buffer: torch.Tensor) -> None:
        """Updates a chunk during the backward pass, unless its bits depend on which other gradients will come."""
        if chunk.kind not in self._late_kinds(groups, early=True):
            self.update(groups, chunk, buffer)

    def update(self, groups: _Groups, chunk: Chunk, buffer: torch.Tensor) -> None:
        """Updates a chunk's parameters, and its states in the buffer."""
        first = len(self._states.now[chunk].scalars) < len(chunk.slices)
        host = buffer[: chunk.nbytes]
        memory = host if chunk.device.type == "cpu" else host.to(chunk.device)
        with contextlib.closing(chunk.borrowed()) as parts:
            for slices in parts:
                self.has_lent |= slices[0].loan is not None
                self._compute(copied(groups[chunk.group]), chunk, buffer, memory, slices)
        if memory is not host:
            host.copy_(memory)
        if first:
            trim_heap()  # torch has made states, and each chunk's small ones would keep a hole in the heap

    def _compute(
        self,
        options: dict[str, Any],
        chunk: Chunk,
        buffer: torch.Tensor,
        memory: torch.Tensor,
        slices: Sequence[Slice],
    ) -> None:
        """Updates some slices, with the chunk's states in ``memory`` of its device."""
        on_host = chunk.device.type == "cpu"
        views, backup, before = chunk.views(memory), chunk.backup(buffer), self._states.now[chunk].scalars
        nesterov = self._class is torch.optim.SGD and options["nesterov"]
        # These change gradients, which a step that fails leaves as they were.
        spoils = (nesterov or self._class is torch.optim.Adamax) and options.get("foreach") is not False
        given: list[tuple[Slice, torch.Tensor, torch.Tensor]] = []
        for each in slices:
            gradient = each.gradient()
            if gradient is None:
                continue
            values = target = each.values()
            backup[each.place].copy_(values)
            chunk.updated.append(each)
            self._states.changed[chunk] = buffer
            if MASTER in views:
                target = views[MASTER][each.place]
                if each not in before:
                    target.copy_(values)
                gradient = chunk.gradients(buffer)[each.place].copy_(gradient) if on_host else gradient.to(target.dtype)
            elif spoils:
                gradient = gradient.clone()
            target.grad = gradient
            given.append((each, values, target))
        if not given:
            return
        targets = [target for _, _, target in given]
        attempt, late = self._late
        if attempt == self._states.attempt and chunk.kind in late:  # add one without states, as torch would see
            targets.append(torch.zeros_like(targets[0][:1]))
            targets[-1].grad = torch.zeros_like(targets[-1])
        inner = self._class([{**options, "params": targets}], **self._options)
        for each, _, target in given:
            if each in before:
                inner.state[target] = _states_of(each, chunk.names, views, before[each])
        inner.step()
        for each, values, target in given:
            scalars: dict[str, Any] = dict.fromkeys(chunk.names)
            for name, value in inner.state[target].items():
                if name not in views:
                    scalars[name] = value
                elif value is not None:
                    del scalars[name]
                    if value.data_ptr() != (view := views[name][each.place]).data_ptr():
                        view.copy_(value)
            chunk.scalars[each] = scalars
            if target is not values:
                values.copy_(target)
            target.grad = None
        inner.state.clear()
        inner.param_groups.clear()  # torch's optimizers are in cycles, and would keep the parameters' memory

    def _late_kinds(self, groups: _Groups, *, early: bool) -> set[_Kind]:
        """Returns kinds of chunks that torch's optimizer updates in its slower way, since some have no states yet.

        ``SGD(momentum, foreach=True)`` changes all momentum buffers one by one until all parameters with a gradient
        have one. In bfloat16 and float16 that rounds otherwise. ``early``: it is not known which will have a gradient.
        """
        found: set[_Kind] = set()
        if self._class is not torch.optim.SGD:
            return found
        for chunk in self._states.chunks:
            options = groups[chunk.group]
            foreach = options["foreach"] or (
                options["foreach"] is None and chunk.device.type != "cpu" and not options["fused"]
            )
            if not (foreach and options["momentum"]) or chunk.dtype not in LOW or chunk.has_master:
                continue
            scalars = self._states.now[chunk].scalars
            if any(
                (early or each.parameter.grad is not None)
                and (each not in scalars or "momentum_buffer" in scalars[each])  # where it is None
                for each in chunk.slices
            ):
                found.add(chunk.kind)
        return found


def _states_of(
    each: Slice, names: Iterable[str], views: Mapping[str, torch.Tensor], scalars: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns the states of a slice as torch's optimizer has them: views of the chunk's, and copies of its scalars."""
    found: dict[str, Any] = {}
    for name in names:
        if name not in scalars:  # where it is None
            found[name] = views[name][each.place]
    for name, value in scalars.items():
        if value is not None:
            found[name] = value.clone() if isinstance(value, torch.Tensor) else value  # it may be changed in place
    return found


def require_elementwise(optimizer: type[torch.optim.Optimizer]) -> type[torch.optim.Optimizer]:
    """Returns it. Raises TypeError unless it is one of ``ELEMENTWISE``."""
    if not any(optimizer is getattr(torch.optim, name, None) for name in ELEMENTWISE):
        if isinstance(optimizer, torch.optim.Optimizer):
            name = type(optimizer).__name__
            raise TypeError(
                f"an optimizer was given, not its class: NvmeOptimizer(params, torch.optim.{name}, folder, ...)"
            )
        name = getattr(optimizer, "__qualname__", repr(optimizer))
        raise TypeError(f"{name} is not one of torch.optim's elementwise optimizers: {', '.join(ELEMENTWISE)}")
    return optimizer


def switches(options: Mapping[str, Any]) -> dict[str, bool]:
    """Returns which options of a group are on: what decides which states there are."""
    return {name: bool(value) for name, value in options.items() if isinstance(value, bool | int | float)}


def identities(parameters: Iterable[torch.Tensor]) -> list[tuple[Any, int]]:
    """Returns what tells each gradient from another, and from itself once changed."""
    gradients = [each.grad for each in parameters]
    return [(None, 0) if each is None else (weakref.ref(each), each._version) for each in gradients]
