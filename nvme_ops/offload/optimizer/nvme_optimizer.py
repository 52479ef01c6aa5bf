"""``NvmeOptimizer``: an optimizer of torch, elementwise or of whole parameters, with its states on storage.

A step goes over chunks of states: while torch's own optimizer updates one, the next are read and the last are written.
The states have two places on storage. A step reads one and writes the other, so the states of the step before stay
intact until the new ones are complete: a step writes all states once, and they take twice their space. What a larger
budget holds in memory is neither read nor written. See ``States``.
"""

from __future__ import annotations

import collections
import contextlib
import os
import time
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, overload

import torch
from torch.utils.weak import WeakIdRef

from nvme_ops.base.errors import note
from nvme_ops.base.lifetime import Closing
from nvme_ops.base.limits import host_bytes
from nvme_ops.base.text import MIB, never_raising, size_words
from nvme_ops.io.arguments import require_switches
from nvme_ops.io.file import handle_of
from nvme_ops.io.handle import aio_handle
from nvme_ops.io.tensors import is_dense
from nvme_ops.memory.pool import charge_of
from nvme_ops.offload.budgets import budgets_of
from nvme_ops.offload.memory import Memory
from nvme_ops.offload.optimizer import saved
from nvme_ops.offload.optimizer.backward import BackwardPass
from nvme_ops.offload.optimizer.chunks import (
    HALF,
    Chunk,
    Chunks,
    Division,
    MemoryLayout,
    ParameterLayout,
    Version,
    divide,
    needs_whole,
    options_of,
    outline,
    regions_of,
    whole_bytes,
)
from nvme_ops.offload.optimizer.parameter_states import ParameterStates
from nvme_ops.offload.optimizer.records import session_name, warn_of_others
from nvme_ops.offload.optimizer.state_dtypes import (
    MASTER,
    Region,
    StateDtype,
    from_bitsandbytes,
    packed,
    require_state_dtype,
)
from nvme_ops.offload.optimizer.states import OptimizerStats, States, buffers_of
from nvme_ops.offload.optimizer.updates import Updates, trim_heap
from nvme_ops.offload.parameters.gradients import require_one_rank

MIN_BUDGET = 1 * MIB  #: bytes of the smallest budget


Path = str | os.PathLike[str]


def _switches(options: Mapping[str, Any]) -> dict[str, bool]:
    """Returns which options of a group are on; these determine the states that its parameters have."""
    return {name: bool(value) for name, value in options.items() if isinstance(value, bool | int | float)}


def _identities_of(parameters: Iterable[torch.Tensor]) -> list[Any]:
    """Returns what tells whether parameters are the same objects, with the same layout, as before."""
    return [(id(tensor), tensor.dtype, tensor.device, tensor.shape, tensor.stride()) for tensor in parameters]


def _layout_of(parameter: torch.Tensor) -> MemoryLayout:
    whole = outline(parameter)
    return MemoryLayout(whole.shape, whole.stride())


def _without_strides(made: Any) -> Any:
    optimizer, master, parameters, *rest = made
    return optimizer, master, [[described[:2] for described in group] for group in parameters], rest


def _identities(parameters: Iterable[torch.Tensor]) -> list[Any]:
    """Returns, for each parameter, a reference to its gradient and the gradient's version; None if it has none."""
    gradients = [parameter.grad for parameter in parameters]
    return [None if gradient is None else (WeakIdRef(gradient), gradient._version) for gradient in gradients]


class NvmeOptimizer(Closing, torch.optim.Optimizer):
    """A ``torch.optim`` optimizer whose states are on storage.

        optimizer = NvmeOptimizer(model.parameters(), torch.optim.AdamW, "/mnt/nvme", memory_budget="1G", lr=1e-4)

    It is used like the optimizer itself, by schedulers, ``GradScaler`` and trainers too, and computes the same bits.
    What ``optimizer.state`` has for a parameter is read from storage when it is looked up. Changes to it, to the lists
    of parameters in ``param_groups`` and to memory layouts are taken over by the next step, save or load.

    If a step fails (the device, a full disk, Ctrl-C), each chunk of parameters has either the values and states of the
    step before or those of this one. The exception says how many chunks are done; calling ``step`` again with the same
    gradients updates the others.

    Args:
        params: parameters or groups of them, as for any optimizer.
        optimizer_class: a class of ``torch.optim`` that updates each element by itself, such as ``AdamW``, or whole
            parameters, ``Muon``; or another one, see ``chunks``.
        folder: where the states go; several folders, one on each device, share them by their measured rates.
        host_budget: bytes of host memory, a size such as ``"32G"``, or ``"auto"``: most of what is free; 256 MiB when
            None. These suffice for states on their way. More holds states, page-locked for parameters on an
            accelerator: always the same part, which a step neither reads nor writes. With ``reuse`` it is still
            written, as a killed program would lose it.
        memory_budget: another name for it.
        memory: in place of a budget of its own, one that is shared with others. A step takes at most a quarter of it,
            for states on their way. For parameters on an accelerator it is its ``Memory(device=, host=)``, whose host
            memory has these states, and holds others as far as it has room.
        master_weights: keep a float32 copy of each bfloat16 and float16 parameter among the states, and update that.
            Elements of the parameter that the program has changed since are taken from the parameter.
        reuse: leave the states to the next program that makes the same optimizer in this folder. It continues with the
            last completed step, or after a power failure perhaps with the one before; its parameters must be those of
            that step, see ``steps``. A warning says if there are states, but those of another number of ranks.
        name: distinguishes optimizers that are kept in one folder. Each rank has its own states under it.
        overlap: ``"backward"`` begins the step during the backward pass, for each chunk as soon as its gradients are
            complete; ``step`` ends it. Gradients then cannot be clipped or scaled between the two, and several
            backward passes for one step need ``accumulate``.
        free_gradients: set each gradient to None when its parameter is updated. With ``overlap`` they are then never
            all in memory: the backward pass waits while more than 256 MiB of them, a smaller budget or a quarter of
            ``memory``, await their update.
        checksums: keep a CRC-32C of each chunk and compare it when it comes back.
        handle: moves the bytes; one for the whole process when None.
        state_dtype: in which moments are stored, which are float32 to the optimizer, in ``state_dict`` and in
            ``state``. ``"int8"`` as by bitsandbytes' 8-bit optimizers: blocks of 256, each with a scale, of parameters
            of 4,096 elements or more. ``"bfloat16"``, rounded stochastically. ``master_weights`` stay float32.
        seed: of that rounding: the same one gives the same bits, also after a kill, or from a state dict with ``step``.
        chunks: for a class of your own: ``"elements"`` if it updates each element by itself, else ``"parameter"``: it
            then gets whole parameters, of which a buffer has to hold each with its states. What a step keeps must be
            scalars in ``state[parameter]``, or have the parameter's shape from the first step on.
        defaults: keywords for ``optimizer_class``.

    Raises:
        TypeError: the optimizer is neither, such as ``LBFGS``, and ``chunks`` is None.
        ValueError: the budget is below 1 MiB, or two buffers for the largest whole parameter; ``state_dtype`` is for
            moments, and the optimizer has other states or does not compute them in float32; there are no parameters, or
            one has gaps in its memory; with ``reuse``, the states are of other parameters or another optimizer, of
            another ``state_dtype``, or were made with a larger budget; with ``overlap``, there are several ranks and
            parameters that are no DTensors.
        BlockingIOError: another program is using the kept states.
        OSError: the folder cannot be used.
    """

    def __init__(
        self,
        params: Iterable[Any],
        optimizer_class: type[torch.optim.Optimizer],
        folder: Path | Sequence[Path],
        *,
        memory_budget: int | str | None = None,
        host_budget: int | str | None = None,
        memory: Memory | None = None,
        master_weights: bool = True,
        reuse: bool = False,
        name: str = "optimizer",
        overlap: Literal["backward"] | None = None,
        free_gradients: bool = False,
        checksums: bool = False,
        handle: aio_handle | None = None,
        state_dtype: StateDtype | None = None,
        seed: int = 0,
        chunks: Chunks | None = None,
        **defaults: Any,
    ) -> None:
        if isinstance(params, torch.nn.Module | type):
            what = "a module" if isinstance(params, torch.nn.Module) else f"the class {params.__name__}"
            raise TypeError(f"params must be parameters, not {what}: model.parameters()")
        require_switches(master_weights=master_weights, reuse=reuse, free_gradients=free_gradients, checksums=checksums)
        self._whole = needs_whole(optimizer_class, chunks)
        self._class, self._options, self._master = optimizer_class, defaults, master_weights
        self._state_dtype = require_state_dtype(state_dtype)
        if overlap not in (None, "backward"):
            raise ValueError(f"overlap must be None or 'backward', not {overlap!r}")
        self._failed_with: list[Any] = []  # identities of the gradients of a failed step
        self._has_shown: set[torch.Tensor] = set()  # what state lacks of these the program has deleted
        self._shown: weakref.WeakValueDictionary[torch.Tensor, ParameterStates] = weakref.WeakValueDictionary()
        self._switches: list[dict[str, bool]] = []  # by group: what _switches was when room was made
        self._overlap = overlap is not None
        self._hooks: dict[torch.Tensor, torch.utils.hooks.RemovableHandle] = {}
        self._pass: BackwardPass | None = None
        self._order: list[Chunk] = []  # in which their gradients became complete last time
        self._most_gradients: int | None = None  # bytes that may await their update
        self._handle = handle_of(handle)
        if self._whole:  # a class of whole parameters may refuse some shapes
            made = optimizer_class(params, **defaults)
            super().__init__(made.param_groups, made.defaults)
            del made
        else:
            super().__init__(params, optimizer_class([torch.zeros(1, device="cpu")], **defaults).defaults)
        pinned = any(parameter.device.type != "cpu" for parameter in self._parameters())
        if pinned and host_budget is not None:
            host_budget = host_bytes(host_budget)
        if pinned and isinstance(memory, Memory) and memory.is_of_accelerator and memory.host is None:
            memory = None  # each has a host_budget of its own
        given = budgets_of(torch.device("cpu"), memory_budget, memory, None, host_budget, default="256M", least=0).own
        if isinstance(given, int):
            what = "memory_budget" if host_budget is None else "host_budget"
        else:
            what = "a quarter of memory" if given.host is None else "a sixteenth of Memory(host=)"
        least = self._bytes_of_largest()
        _, budget, buffer = buffers_of(given, least)
        if budget < MIN_BUDGET:
            raise ValueError(f"{what} must be at least {size_words(MIN_BUDGET)}, not {size_words(budget)}")
        if buffer < least:
            needed, in_all = (size_words(count * charge_of(least)) for count in (1, 2))
            raise ValueError(
                f"{what}, {size_words(budget)}, must be at least {in_all}: two buffers of {needed} for the largest "
                "parameter, which has to be whole"
            )
        with contextlib.ExitStack() as undo:
            self._states = States(
                folder, session_name(folder, name, reuse), reuse=reuse, given=given, pinned=pinned,
                checksums=checksums, handle=self._handle, least=least,
            )  # fmt: skip
            undo.callback(self._states.close)
            self._updates = Updates(self._class, defaults, self._states, seed)
            if free_gradients:
                self._states.when_done = self._free_gradients
                self._most_gradients = self._states.budget
            record = self._states.committed()
            if reuse and record is None:
                warn_of_others(folder, name)
            if record is None:
                self._arrange()
            else:
                if record["buffer"] > self._states.buffer:
                    needed = size_words(4 * record["buffer"])
                    raise ValueError(f"{name!r} was kept with larger chunks: {what} must be {needed}")
                self._states.buffer = record["buffer"]
                if (division := self._division_for(record["made"])) is None:
                    raise ValueError(
                        f"{name!r} in {folder} has the states of other parameters, or of another optimizer"
                    )
                self._states.resume(division)
                self._after_arranging()
                self._show_states()
            undo.pop_all()

    def _division_for(self, made: Any) -> Division | None:
        """Returns chunks for states that were made for parameters like these.

        Their memory layouts may be others, which ``_arrange`` sees, and puts the states in the order of now.

        Args:
            made: a ``Division.made``; earlier versions did not have the strides in it, and took them for the same.

        Returns:
            None if it is of other parameters or another optimizer.

        Raises:
            ValueError: the states are stored in another dtype.
        """
        kept = made[4].get("state_dtype") if len(made) > 4 and isinstance(made[4], dict) else None
        if kept != self._state_dtype:
            theirs, ours = (f"state_dtype={dtype!r}" for dtype in (kept, self._state_dtype))
            raise ValueError(
                f"these states were kept with {theirs}, and this NvmeOptimizer is made with {ours}: make it with "
                f"{theirs}, or move them by state_dict() and load_state_dict(), which convert"
            )
        try:
            strides = {
                parameter: tuple(map(int, described[2]))
                for group, those in zip(self.param_groups, made[2], strict=True)
                for parameter, described in zip(group["params"], those, strict=True)
                if len(described) > 2
            }
            wanted = _without_strides(made)
            laid_out = [torch.empty_strided(outline(key).shape, strides[key], device="meta") for key in strides]
        except (ValueError, TypeError, LookupError, OverflowError, RuntimeError):  # torch's, for strides that are none
            return None
        if not all(map(is_dense, laid_out)):
            return None
        division = self._divided(0, strides)
        return division if wanted == _without_strides(division.made) else None

    # Public methods

    @property
    def steps(self) -> int:
        """The number of completed steps; with ``reuse``, since the states were made."""
        return self._states.stats.steps

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Updates all parameters that have a gradient.

        Raises:
            OSError: the device fails or is full; the exception's note says what is done, and how to continue.
            RuntimeError: a gradient is sparse; with ``overlap``, states or groups were changed after the backward pass.
            ValueError: the optimizer is closed; or states do not fit their parameters, or a parameter is in the groups
                twice or has gaps in its memory. Nothing was done then.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        begin, computing = time.perf_counter(), 0.0
        states = self._states
        states.require_open()
        if self._pass is not None and self._pass.abandoned:
            self._abandon_pass()
        self._arrange()
        self._require_room()
        backward, with_gradient = self._pass, []
        under_way = backward is not None  # chunks may be done
        try:
            if backward is None and not self._same_gradients():
                states.attempt += 1
            under_way = True
            with_gradient = [
                chunk
                for chunk in states.division.chunks
                if any(part.parameter.grad is not None for part in chunk.slices)
            ]
            if backward is not None:
                self._order = backward.order()
                backward.finish()
                self._pass = None
            self._updates.decide(self.param_groups)
            waiting = [chunk for chunk in with_gradient if not states.is_done(chunk)]
            with contextlib.closing(states.update(waiting)) as updates:
                for chunk, buffer in updates:
                    started = time.perf_counter()
                    self._updates.update(self.param_groups, chunk, buffer)
                    computing += time.perf_counter() - started
            if states.when_done is not None:
                for chunk in with_gradient:
                    states.when_done(chunk)  # again for chunks of an interrupted attempt
            states.commit(self.steps + (states.last_commit != states.attempt))
            self._show_states()
            if self._updates.has_lent:
                self._updates.has_lent = False
                trim_heap()  # memory that libraries allocate for matrices fragments the heap, more with each step
            seconds = time.perf_counter() - begin
            states.stats.seconds += seconds
            states.stats.seconds_waited += seconds - computing
            self._failed_with = []
            return loss
        except BaseException as error:
            try:
                self._abandon_pass()
            finally:
                if under_way:
                    self._failed_with = _identities(self._parameters())
                done, mixed = sum(states.is_done(chunk) for chunk in with_gradient), len(states.changed)
                but = f", but for {mixed} that could not be put back, which a step, save or load does" * (mixed > 0)
                text = (
                    f"step {self.steps + (states.last_commit != states.attempt)} of NvmeOptimizer: {done} of "
                    f"{len(with_gradient)} chunks of parameters are updated, the others are as they were{but}; step() "
                    "with the same gradients continues with these"
                )
                note(error, text)
            raise

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Resets the gradients. A step that began during a backward pass and has not ended is abandoned."""
        self._abandon_pass()
        super().zero_grad(set_to_none)

    @contextlib.contextmanager
    def accumulate(self) -> Iterator[None]:
        """Lets backward passes in the block only add to the gradients: with ``overlap``, they begin no step."""
        before, self._overlap = self._overlap, False
        try:
            yield
        finally:
            self._overlap = before

    @never_raising
    def __repr__(self) -> str:
        """Returns the parameter groups as those of other optimizers: ``NvmeOptimizer of AdamW (...)``."""
        return super().__repr__().replace(" ", f" of {self._class.__name__}{', closed' * self._states.closed} ", 1)

    def stats(self) -> OptimizerStats:
        """Returns what was moved so far."""
        return self._states.measure()

    def explain(self) -> str:
        """Says what was moved and waited for since the last call or the start, and what limits.

        The first call measures the rates of storage and bus. Raises OSError if a folder has no room for 256 MiB.
        """
        return self._states.account.explain(self.stats(), torch.device("cpu"))

    def close(self) -> None:
        """Removes the files, or with ``reuse`` leaves them, durable, to the next program. Further calls do nothing.

        Raises OSError if they cannot be made durable.
        """
        try:
            self._abandon_pass()
            if self._states.is_kept and not self._states.closed:
                self._arrange()
                self._states.recommit()
        finally:
            for hook in self._hooks.values():
                hook.remove()
            self._states.close()

    def state_dict(self) -> dict[str, Any]:
        """Returns the states as the optimizer itself does, and ``master_weights`` with them.

        The tensors are mapped from a file without a name beside the states: the system can reclaim their memory when it
        needs it. They do not change with later steps. Those of a ``state_dtype`` are float32, so the optimizer itself
        can load them too, and ``load_state_dict`` makes the same bytes of them again.

        Raises:
            OSError: the device fails, or is full (ENOSPC).
            RuntimeError: with ``overlap``, between the backward pass and ``step``.
        """
        self._require_idle()
        shown = self.state
        self.state = collections.defaultdict(dict, saved.to_state_dict(self._states, self._handle))
        try:
            return super().state_dict()
        finally:
            self.state = shown

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Replaces the groups' options and all states, for example by those that torch's optimizer has saved.

        With any ``state_dtype`` they may be in any other, or those of bitsandbytes' 8-bit Adam, AdamW, SGD, RMSprop or
        Adagrad, which with ``"int8"`` are taken over exactly.

        Load the parameters before: missing ``master_weights`` are copied from them. If this fails or is interrupted,
        all options and states stay as they were.

        Raises:
            ValueError: groups differ in size, a state is missing or of another shape than its parameter, or there are
                states or options, such as ``momentum``, for which this optimizer has no room.
            OSError: the device fails or is full.
            RuntimeError: with ``overlap``, between the backward pass and ``step``.
        """
        self._require_idle()
        state, before = state_dict["state"], self.param_groups
        versions: dict[Chunk, Version] | None = None
        try:
            super().load_state_dict({**state_dict, "state": self.state})  # whose keys are no numbers: it stays
            for group in self.param_groups:
                group.update(self._as_of_now(group, {})[0])
            self._require_room(ValueError)
            states: dict[torch.Tensor, dict[str, Any]] = {}
            for theirs, group in zip(state_dict["param_groups"], self.param_groups, strict=True):
                for number, parameter in zip(theirs["params"], group["params"], strict=True):
                    if number in state:
                        given = {  # torch.distributed.checkpoint has looked for those that are {} in vain
                            name: value
                            for name, value in from_bitsandbytes(self._class.__name__, state[number]).items()
                            if not isinstance(value, dict) or value
                        }
                        states[parameter] = self._as_of_now(group, given, parameter.device)[1]
            versions = saved.write_states(self._states, states, self._needed, groups=self.param_groups)
            self._states.commit(self.steps, versions)
        except BaseException:
            if self._states.current is not versions:
                self.param_groups = before
            raise
        finally:
            self._show_states(anew=self._states.current is versions)

    def _as_of_now(
        self, group: Mapping[str, Any], state: Mapping[str, Any], device: torch.device | str = "cpu"
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Returns a group's options and a parameter's states as this version of torch has them.

        State dicts of earlier versions lack options such as ``foreach``, and have numbers in place of tensors.
        """
        sample = torch.zeros(1, *[1] * self._whole, device=device)
        inner = self._class([sample], **self._options)
        options = {name: value for name, value in group.items() if name != "params"}
        states: dict[torch.Tensor, dict[str, Any]] = {sample: dict(state)} if state else {}
        inner.__setstate__({"state": states, "param_groups": [{**options, "params": [sample]}]})
        return {**options_of(inner.param_groups[0])}, states.get(sample, {})

    def save_states(self, path: Path, *, durable: bool = True) -> bool:
        """Saves the states of the last step to a file, for ``load_states`` of the same optimizer in any folder.

        This takes no time and no space if files can share blocks (XFS, Btrfs), the optimizer has a single folder and
        ``path`` is on the same file system: later steps write to new blocks. Otherwise all bytes are copied. An
        existing file is replaced when the new one is complete. The parameters are not in the file.

        Args:
            path: the file.
            durable: whether the file survives a power failure as soon as this returns.

        Returns:
            Whether the file shares its blocks with the states.

        Raises:
            OSError: the device fails, or is full (ENOSPC).
            RuntimeError: with ``overlap``, between the backward pass and ``step``.
        """
        require_switches(durable=durable)
        self._require_idle()
        self._states.rewrite()
        return saved.to_file(self._states, os.fspath(path), durable, self._handle)

    def load_states(self, path: Path) -> None:
        """Replaces all states by those that ``save_states`` has saved, and sets ``steps`` to theirs.

        Load the parameters of the same step, before or after. The options of the groups are not in the file, but in
        ``state_dict()`` and in that of a scheduler.

        Raises:
            FormatError: ``save_states`` has not written this file, or it is damaged.
            ValueError: the states are of other parameters, of another optimizer, or of another ``memory_budget``.
            OSError: the device fails or is full. All states then stay as they were.
            RuntimeError: with ``overlap``, between the backward pass and ``step``.
        """
        self._require_idle()
        steps, versions, division = saved.from_file(self._states, os.fspath(path), self._division_for, self._handle)
        self._states.commit(steps, versions, division)
        self._show_states(anew=True)

    def __reduce_ex__(self, _: Any) -> Any:
        """Raises TypeError: the states are in files that belong to this optimizer."""
        raise TypeError(
            "an NvmeOptimizer cannot be copied or pickled: its states are in files, which have one owner. Use "
            "state_dict() or save_states() for another NvmeOptimizer"
        )

    # A step

    def _arrived(self, parameter: torch.Tensor) -> None:
        """Passes a complete gradient to the backward pass's step, and begins this with the first one."""
        if self._overlap:
            if self._pass is not None and self._pass.abandoned:
                self._abandon_pass()
            if self._pass is None:
                self._arrange()
                self._states.attempt += 1
                chunks = self._states.division.chunks[::-1]
                order = list(dict.fromkeys([*(chunk for chunk in self._order if chunk in chunks), *chunks]))
                self._pass = BackwardPass(self._states, order, self._update_early, self._most_gradients)
                self._pass.start()
            self._pass.arrived(parameter)

    def _abandon_pass(self) -> None:
        """Abandons a step that began in the backward pass. If this is interrupted, call it again."""
        if self._pass is not None:
            self._pass.abandon()
            self._pass = None

    def _update_early(self, chunk: Chunk, buffer: torch.Tensor) -> None:
        """Updates a chunk during the backward pass, unless its bits depend on gradients that may still come."""
        if chunk.kind not in self._updates.slow_kinds(self.param_groups, early=True):
            self._updates.update(self.param_groups, chunk, buffer)

    def _show_states(self, anew: bool = False) -> None:
        """Makes ``state`` have the states of each parameter, which torch.distributed.checkpoint looks up there, too.

        With ``anew`` tensors that the program has looked up keep what they have, as other ones were loaded.
        """
        states, require_readable = self._states, weakref.WeakMethod(self._require_readable)
        for entry in list(self._shown.values()):
            entry.renew(anew)
        with_states = {part.parameter for version in states.current.values() for part in version.scalars}
        for parameter in states.division.parts:
            if parameter not in with_states:
                self._has_shown.discard(parameter)
                self.state.pop(parameter, None)
                continue
            shown = self._shown.get(parameter)
            if shown is None or shown.states is not states:
                given = {} if anew else self.state.get(parameter, {})  # by the program, and taken over
                self._shown[parameter] = shown = ParameterStates(states, parameter, require_readable, given)
                del given
            if self.state.get(parameter) is not shown:
                self.state[parameter] = shown
                shown.renew(anew)
            self._has_shown.add(parameter)

    def _free_gradients(self, chunk: Chunk) -> None:
        """Frees the gradients in a chunk of parameters whose chunks are all updated."""
        parts = self._states.division.parts
        for part in chunk.slices:
            gradient = part.parameter.grad
            if gradient is not None and all(self._states.is_done(other) for other, _ in parts[part.parameter]):
                part.parameter.grad = None
                if self._pass is not None:
                    self._pass.freed(gradient.nbytes)

    def _parameters(self) -> list[torch.Tensor]:
        return [parameter for group in self.param_groups for parameter in group["params"]]

    def _arrange(self) -> None:
        """Takes over what the program has changed in ``param_groups``, in layouts of parameters and in ``state``.

        Raises:
            ValueError: there are states that do not fit, a parameter twice, or one with gaps in its memory.
            RuntimeError: a step has begun in the backward pass, or has failed after some chunks.
        """
        states, now = self._states, [_identities_of(group["params"]) for group in self.param_groups]
        before = states.division.identities
        is_other = now[: len(before)] != before
        if not is_other and len(now) > len(before):
            states.extend(self._divided(len(before)))
        changed = self._changed_states()
        if self._pass is not None:
            if is_other or changed:
                raise RuntimeError(
                    "parameter groups, layouts of parameters or optimizer.state were changed after a step had begun in "
                    "the backward pass: change them before it or after step(); zero_grad() abandons this step"
                )
        elif is_other or changed:
            if not states.is_between_steps():
                if not is_other and self._same_gradients():
                    return  # the step that these continue does not know of the changes
                if states.is_kept:
                    raise RuntimeError(
                        "parameter groups, layouts of parameters or optimizer.state were changed after a step had "
                        "failed halfway: call step() with the same gradients before, or load_state_dict()"
                    )
            self._take(changed, is_other)
        self._after_arranging()

    def _take(self, changed: Mapping[torch.Tensor, Mapping[str, Any]], is_other: bool) -> None:
        """Writes ``changed`` states, all of them into new chunks if groups or layouts are other ones.

        States of parameters that are in no group any more stay in ``state``, as in torch, but in memory.
        """
        states, wanted = self._states, {parameter: dict(entry) for parameter, entry in changed.items()}
        stored: dict[torch.Tensor, dict[str, Any]] = {}
        division = None
        if is_other:
            states.rewrite()
            stored = saved.to_state_dict(states, self._handle)
            division = self._divided(0)
            new = division.parts.keys() - states.division.parts.keys()
            wanted = {**stored, **wanted, **{parameter: dict(self.state.get(parameter) or {}) for parameter in new}}
        versions = saved.write_states(states, wanted, self._needed, division=division, keep=not is_other)
        every = (division or states.division).parts
        for parameter, entry in list(self._shown.items()):
            if parameter not in every or self.state.get(parameter) is not entry:
                entry.detach(stored.get(parameter))
        if versions is not None:
            states.commit(self.steps, versions, division)
            self._failed_with = []
        if is_other:
            self._switches.clear()
        self._show_states()

    def _changed_states(self) -> dict[torch.Tensor, Mapping[str, Any]]:
        """Returns the entries of ``state`` that may have other states than those on storage, or had before the pass."""
        changed: dict[torch.Tensor, Mapping[str, Any]] = {}
        states = self._states
        for parameter, parts in states.division.parts.items():
            entry = self.state.get(parameter)
            if isinstance(entry, ParameterStates) and entry.parameter is parameter and entry.states is states:
                if entry.may_differ() if self._pass is None else entry.differs():
                    changed[parameter] = entry
            elif entry or (
                parameter in self._has_shown and any(part in states.current[chunk].scalars for chunk, part in parts)
            ):
                changed[parameter] = entry or {}
        return changed

    def _divided(self, first: int, strides: Mapping[torch.Tensor, tuple[int, ...]] | None = None) -> Division:
        """Divides the groups from number ``first`` on into chunks; those before keep the chunks that they have.

        Args:
            first: the number of the first group.
            strides: those in which states of parameters lie, where these may be others than the parameters' own.

        Raises:
            ValueError: a parameter has gaps in its memory or is there twice; with ``overlap``, ranks reduce gradients.
        """
        chunks = self._states.division.chunks[:] if first else []
        identities: list[list[Any]] = []
        described: list[list[Any]] = []
        count = 0  # of parameters
        every = self._parameters()
        if len(every) != len(set(map(id, every))):
            raise ValueError("a parameter is more than once in the parameter groups")
        for number, group in enumerate(self.param_groups):
            regions: dict[Any, tuple[Region, ...]] = {}
            new: dict[torch.Tensor, ParameterLayout] = {}
            identities.append(_identities_of(group["params"]))
            described.append([])
            for place, parameter in enumerate(group["params"]):
                shape = parameter.shape if self._whole or self._state_dtype else None  # on which states depend then
                kind, layout = (parameter.dtype, parameter.device, shape), _layout_of(parameter)
                if strides is not None and (stride := strides.get(parameter, layout.stride)) != layout.stride:
                    layout = MemoryLayout(layout.shape, stride)
                    identities[-1][place] = None  # none that a parameter can have
                described[-1].append([str(parameter.dtype), *map(list, layout)])
                if number >= first:
                    if kind not in regions:
                        regions[kind] = self._regions(group, parameter)
                    new[parameter] = ParameterLayout(layout, regions[kind], count, self._whole)
                count += 1
            chunks += divide(new, number, self._states.buffer)
            if self._overlap:
                require_one_rank(group["params"])
        for number, chunk in enumerate(chunks):
            chunk.number = number
        names = [[region.name for region in chunk.regions] for chunk in chunks]
        made = [self._class.__name__, self._master, described, names]
        if self._state_dtype is not None:  # else it is as earlier versions have made it
            made.append({"state_dtype": self._state_dtype})
        return Division(chunks, identities, made)

    def _after_arranging(self) -> None:
        """Notes the options of groups, and adds hooks to parameters that may get a gradient."""
        self._switches += map(_switches, self.param_groups[len(self._switches) :])
        if self._overlap:
            arrived = weakref.WeakMethod(self._arrived)  # parameters and their hooks do not keep the optimizer alive

            def hook(parameter: torch.Tensor) -> None:
                if (method := arrived()) is not None:
                    method(parameter)

            wanted = {parameter for parameter in self._parameters() if parameter.requires_grad}
            for parameter in wanted - self._hooks.keys():
                self._hooks[parameter] = parameter.register_post_accumulate_grad_hook(hook)
            for parameter in self._hooks.keys() - set(self._parameters()):
                self._hooks.pop(parameter).remove()

    def _regions(self, group: Mapping[str, Any], parameter: torch.Tensor) -> tuple[Region, ...]:
        """Returns the elementwise states that the optimizer keeps of a parameter with the group's current options."""
        master = self._master and parameter.dtype in HALF
        regions = regions_of(self._class, self._options, group, parameter, master, self._whole)
        return packed(regions, self._state_dtype, parameter, self._class.__name__)

    def _bytes_of_largest(self) -> int:
        """Returns the bytes of a buffer that the largest parameter needs if they are to be whole, else 0."""
        if not self._whole:
            return 0
        pairs = ((group, parameter) for group in self.param_groups for parameter in group["params"])
        return max((whole_bytes(parameter, self._regions(group, parameter)) for group, parameter in pairs), default=0)

    def _needed(self, chunk: Chunk) -> Collection[str]:
        """Returns the names of elementwise states that parameters with any states must have."""
        if self._class is torch.optim.SGD:  # it makes a missing momentum buffer at any step
            return ()
        regions = self._regions(self.param_groups[chunk.group], chunk.slices[0].parameter)
        return [region.name for region in regions if region.name != MASTER]

    def _require_room(self, error: type[Exception] = RuntimeError) -> None:
        """Raises ``error`` if options were changed such that the chunks have no room for the states."""
        for number, group in enumerate(self.param_groups):
            on, before = _switches(group), self._switches[number]
            if on == before:
                continue
            for chunk in self._states.division.chunks:
                if chunk.group != number or set(self._regions(group, chunk.slices[0].parameter)) <= set(chunk.regions):
                    continue
                changed = ", ".join(
                    f"{name}={group[name]!r}" for name, value in on.items() if value and not before.get(name)
                )
                raise error(
                    f"a parameter group has {changed} now, and NvmeOptimizer has made no room for the states that "
                    f"{self._class.__name__} keeps with it: give it that option when it is made"
                )
            self._switches[number] = on

    def _same_gradients(self) -> bool:
        """Returns whether the gradients are those of the step that failed."""
        if not (failed := self._failed_with):
            return False
        now = _identities(self._parameters())
        freed = self._most_gradients is not None  # the failed step may have freed some
        return len(failed) == len(now) and all(
            old == new or (freed and new is None) for old, new in zip(failed, now, strict=True)
        )

    def _require_idle(self) -> None:
        """Raises ValueError if closed, or RuntimeError within a step; takes over what the program has changed."""
        self._require_readable()
        self._arrange()

    def _require_readable(self) -> None:
        """Raises ValueError if closed, or RuntimeError within a step."""
        self._states.require_open()
        if self._pass is not None:
            raise RuntimeError("a step has begun in the backward pass: call step() or zero_grad() before this")
