"""``Updates``: torch's own optimizer, on the parameters and states of a chunk."""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from nvme_ops.base.errors import free_frames
from nvme_ops.offload.optimizer.chunks import (
    HALF,
    Chunk,
    Slice,
    cloned,
    is_of_torch,
    options_of,
    require_elementwise_states,
)
from nvme_ops.offload.optimizer.state_dtypes import MASTER, randomness
from nvme_ops.offload.optimizer.states import States

_malloc_trim: Any = getattr(ctypes.CDLL(None), "malloc_trim", None)  # of glibc
_memcmp: Any = ctypes.CDLL(None).memcmp
_memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)

_Groups = Sequence[dict[str, Any]]
_Kind = tuple[int, torch.dtype, torch.device]  # ``Chunk.kind``


def trim_heap() -> None:
    """Returns free memory of the heap to the system."""
    if _malloc_trim is not None:
        _malloc_trim(0)


class Updates:
    """Updates chunks by an optimizer of torch. Its methods take ``groups``, the current parameter groups.

    Args:
        optimizer: the class of torch's optimizer.
        options: keywords for it, beside the options of the groups.
        states: has the chunks.
        seed: of the random numbers by which states are rounded.
    """

    def __init__(
        self, optimizer: type[torch.optim.Optimizer], options: Mapping[str, Any], states: States, seed: int
    ) -> None:
        self._class, self._options, self._states, self._seed = optimizer, options, states, seed
        self._slow: tuple[int, set[_Kind]] = (-1, set())  # an attempt at a step and its slow_kinds
        #: Whether parameters or gradients on storage were lent since the caller has set this to False.
        self.has_lent = False

    def decide(self, groups: _Groups) -> None:
        """Finds the chunks that this step updates in the slow way, once for each attempt at it."""
        if self._slow[0] != self._states.attempt:
            self._slow = (self._states.attempt, self.slow_kinds(groups, early=False))

    def update(self, groups: _Groups, chunk: Chunk, buffer: torch.Tensor) -> None:
        """Updates a chunk's parameters, and its states in the buffer or where they stay."""
        if all(part.parameter.grad is None for part in chunk.slices):
            return
        first = len(self._states.current[chunk].scalars) < len(chunk.slices)
        old, host = self._states.old_and_new(chunk, buffer)
        memory, values = host, chunk.values(buffer)
        if chunk.device.type != "cpu":
            memory = old.to(chunk.device)
            values = torch.empty(chunk.bytes_of_values, dtype=torch.uint8, device=chunk.device)
        elif old is not host:
            host.copy_(old)
        try:
            with contextlib.closing(chunk.borrowed()) as parts:
                for slices in parts:
                    self.has_lent |= slices[0].loan is not None
                    self._compute(options_of(groups[chunk.group]), chunk, buffer, (memory, values), slices)
        except BaseException as error:
            del memory, values, old, host  # an accelerator may need it to put the parameters back
            free_frames(error)
            raise
        if memory is not host:
            host.copy_(memory)
        if first:
            trim_heap()  # torch has made states in the heap, and small ones of each chunk fragment it

    def _compute(
        self,
        options: dict[str, Any],
        chunk: Chunk,
        buffer: torch.Tensor,
        states: tuple[torch.Tensor, torch.Tensor],
        slices: Sequence[Slice],
    ) -> None:
        """Updates some slices, with the chunk's bytes, and room for the values, on its device; see ``Chunk.views``."""
        on_host = chunk.device.type == "cpu"
        views, backup, before = chunk.views(*states), chunk.backup(buffer), self._states.current[chunk].scalars
        nesterov = self._class is torch.optim.SGD and options["nesterov"]
        # These change gradients in place, but gradients must stay as they are in case the step fails.
        changes_gradients = (nesterov or self._class is torch.optim.Adamax) and options.get("foreach") is not False
        is_users = not is_of_torch(self._class)  # which may change them, too
        given: list[tuple[Slice, torch.Tensor, torch.Tensor]] = []
        for part in slices:
            parameter, gradient = part.loan or (part.parameter, part.parameter.grad)
            if gradient is None:
                continue
            if gradient.layout != torch.strided:
                raise RuntimeError("NvmeOptimizer does not support sparse gradients")
            gradient, values = part.part_of(gradient), part.part_of(parameter, copies=False)
            target = values
            if MASTER in views:
                target = views[MASTER][part.place]
                if part not in before:
                    target.copy_(values)
                _follow(target, values, backup[part.place])
                gradient = chunk.gradients(buffer)[part.place].copy_(gradient) if on_host else gradient.to(target.dtype)
            else:
                backup[part.place].copy_(values)
                if changes_gradients or is_users:
                    gradient = gradient.clone()
            chunk.updated.append(part)
            self._states.changed[chunk] = buffer
            if part in before:
                chunk.expand(states[0], views, part)
            target = part.shaped(target)
            target.requires_grad = is_users and part.parameter.requires_grad
            target.grad = part.shaped(gradient)
            given.append((part, part.shaped(values), target))
        if not given:
            return
        targets = [target for _, _, target in given]
        attempt, slow = self._slow
        if attempt == self._states.attempt and chunk.kind in slow:  # add an element without states, as in torch
            targets.append(targets[0].new_zeros(1))
            targets[-1].grad = torch.zeros_like(targets[-1])
        inner = self._class([{**options, "params": targets}], **self._options)
        for part, _, target in given:
            if part in before:
                state = inner.state[target] = dict[str, Any]()
                for name in chunk.names:
                    if name not in before[part]:
                        state[name] = part.shaped(views[name][part.place])
                for name, value in before[part].items():
                    if value is not None:  # None stands for an elementwise state that the slice does not have yet
                        state[name] = cloned(value)
        inner.step()
        for part, values, target in given:
            scalars: dict[str, Any] = dict.fromkeys(chunk.names)
            made = inner.state[target]
            require_elementwise_states(self._class, made, target, chunk.names)
            for name, value in made.items():
                if name not in views:
                    scalars[name] = value
                elif value is not None:
                    del scalars[name]
                    if value.data_ptr() != (view := part.shaped(views[name][part.place])).data_ptr():
                        view.copy_(value)
            if chunk.bytes_of_values:  # a program that goes on from a state dict rounds as this one, by its step
                step = int(scalars.get("step", self._states.stats.steps + 1))
                random = functools.partial(randomness, self._seed, step, part.number, part.begin)
                chunk.pack(states[0], views, part, scalars, random)
            chunk.scalars[part] = scalars
            if chunk.has_master:
                values.copy_(target)
            target.grad = None
        inner.state.clear()
        inner.param_groups.clear()  # torch's optimizers are in reference cycles, which would keep the parameters

    def slow_kinds(self, groups: _Groups, *, early: bool) -> set[_Kind]:
        """Returns the kinds of chunks that torch's optimizer updates in its slow way, since some have no states yet.

        ``SGD(momentum, foreach=True)`` updates momentum buffers one by one until all parameters with a gradient have
        one, which rounds differently in bfloat16 and float16. With ``early``, any parameter may still get a gradient.
        """
        kinds: set[_Kind] = set()
        if self._class is not torch.optim.SGD:
            return kinds
        for chunk in self._states.division.chunks:
            options = groups[chunk.group]
            foreach = options["foreach"] or (
                options["foreach"] is None and chunk.device.type != "cpu" and not options["fused"]
            )
            if not (foreach and options["momentum"]) or chunk.dtype not in HALF or chunk.has_master:
                continue
            scalars = self._states.current[chunk].scalars
            if any(
                (early or part.parameter.grad is not None)
                and (part not in scalars or "momentum_buffer" in scalars[part])  # it is None
                for part in chunk.slices
            ):
                kinds.add(chunk.kind)
        return kinds


def _follow(master: torch.Tensor, values: torch.Tensor, backup: torch.Tensor) -> None:
    """Copies a parameter to ``backup``, and elements that the program has changed to the parameter's float32 copy.

    Changes are seen by comparing: ``data`` has no version. Where there are none, that is one pass over the parameter.
    """
    on_host = values.device.type == "cpu"
    compared = backup.copy_(master) if on_host else master.to(values.dtype)
    is_same = _same_bytes(compared, values)
    if not is_same:
        torch.where(compared == values, master, values, out=master)
    if not (on_host and is_same):
        backup.copy_(values)


def _same_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Compares vectors of one dtype and device; on the CPU in a third of the time that ``torch.equal`` takes."""
    if one.device.type == "cpu":
        return not _memcmp(one.data_ptr(), other.data_ptr(), one.nbytes)
    return torch.equal(one, other)
