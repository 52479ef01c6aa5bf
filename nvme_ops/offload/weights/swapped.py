"""``SwappedTensor``: a parameter that is on storage, and in memory for as long as something computes with it."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Hashable, Iterator
from typing import Any, ClassVar

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from nvme_ops.offload.weights.residents import Phase, Resident, Residents
from nvme_ops.offloaded import OffloadedTensor, Step, outline_of

aten = torch.ops.aten

_MANY = 64  # copies from which on those that are gone are forgotten


class _Copy:
    """The values of a parameter, or a part, in another dtype: converted each time they are used, until either changes.

    Args:
        of: what is converted.
        conversion: converts it.
    """

    def __init__(self, of: SwappedTensor, conversion: Step) -> None:
        self._of, self._conversion = of, conversion
        self._values: torch.Tensor | None = None  # in memory of its own, once either has changed

    def whole(self) -> SwappedTensor:
        """Returns the tensor that has all of the values."""
        of = self._of
        return SwappedTensor(of._residents, of._resident, self._conversion(of._outline), (), self)

    def lend(self, uses: contextlib.ExitStack, change: bool) -> torch.Tensor:
        """Returns the values, to be changed or not."""
        values = self._values
        if values is None:
            values = self._conversion(self._of._lend(uses, False))
            if change:
                self._values = values
        return values

    def keep(self, stored: torch.Tensor) -> None:
        """Converts ``stored`` values of the parameter for good, unless that was done before."""
        if self._values is None:
            for step in (*self._of._steps, self._conversion):
                stored = step(stored)
            self._values = stored


class SwappedTensor(OffloadedTensor):
    """A parameter, or a view of one, whose values are on storage and can be changed there.

    What autograd keeps of it for the backward pass is a tensor of this class, not the values, which are fetched again
    there. A copy of another dtype is a tensor of this class as well, until it or the parameter is changed.

    Args:
        residents: fetch it.
        resident: what is fetched.
        outline: has shape, strides and dtype of this tensor; those of ``resident`` when None.
        steps: from the values to this.
        copy: has the values instead.
    """

    _residents: Residents
    _resident: Resident
    _copy: _Copy | None

    writable = True
    lazy: ClassVar[dict[Any, Callable[..., Any]]] = dict(OffloadedTensor.lazy)
    instead: ClassVar[str] = "SwappedParams.gathered lends the values, to_memory() copies them"

    @staticmethod
    def __new__(
        cls,
        residents: Residents,
        resident: Resident,
        outline: torch.Tensor | None = None,
        steps: tuple[Step, ...] = (),
        copy: _Copy | None = None,
    ) -> SwappedTensor:
        """Makes one; nothing is read."""
        if outline is None:
            outline = outline_of(resident.shape, resident.stride, resident.dtype)
        made = cls._outlined(outline, steps, resident.device)
        made._residents, made._resident, made._copy = residents, resident, copy
        return made

    @property
    def resident(self) -> Resident:
        """What is on storage."""
        return self._resident

    @property
    def stored_at(self) -> Hashable:
        """A key shared by all tensors over the same stored values."""
        return id(self._resident if self._copy is None else self._copy)

    @contextlib.contextmanager
    def lent(self, change: bool = False) -> Iterator[torch.Tensor]:
        """Lets the block read, or ``change``, the values: a usual tensor in memory."""
        with contextlib.ExitStack() as uses:
            yield self._lend(uses, change, "step")

    def _lend(self, uses: contextlib.ExitStack, change: bool, phase: Phase | None = None) -> torch.Tensor:
        if phase is None:
            phase = "forward" if torch._C._current_graph_task_id() < 0 else "backward"
        if self._copy is not None:
            values = self._copy.lend(uses, change)
        else:
            values = uses.enter_context(self._residents.used(self._resident, phase, change=change))
            if change:
                self._keep_copies(values)
        for step in self._steps:
            values = step(values)
        return values

    def _keep_copies(self, values: torch.Tensor) -> None:
        """Gives copies of these values, which are about to change, values of their own."""
        copies = self._resident.copies
        while copies:
            copy = copies[-1]()
            if copy is not None:
                copy.keep(values)
            copies.pop()

    def _viewed(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> SwappedTensor | list[SwappedTensor]:
        if self._resident.is_part and func is aten.as_strided.default:  # in torch it reaches what is beside the part
            raise RuntimeError(f"{func}: a part of another tensor was assigned to .data: assign a clone() of it")
        return super()._viewed(func, args, kwargs)

    def _derived(self, outline: torch.Tensor, *steps: Step) -> SwappedTensor:
        return SwappedTensor(self._residents, self._resident, outline, (*self._steps, *steps), self._copy)

    def _converted(self, conversion: Step) -> SwappedTensor:
        """Returns a copy, which is made when it is used."""
        copies = self._resident.copies
        if len(copies) >= _MANY:
            copies[:] = [each for each in copies if each() is not None]
        copy = _Copy(self._derived(self._outline), conversion)
        copies.append(weakref.ref(copy))
        return copy.whole()

    def _whole(self) -> SwappedTensor:
        if not self._steps:
            return self
        return SwappedTensor(self._residents, self._resident) if self._copy is None else self._copy.whole()

    def _copies(self) -> tuple[dict[Any, StorageWeakRef], Any]:
        return self._resident.pickled, self._resident.changes

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Is pickled as a usual tensor, see ``OffloadedTensor``."""
        return super().__reduce_ex__(protocol) if self._copy is None else self._usual().__reduce_ex__(protocol)

    def _assign(self, value: torch.Tensor) -> None:
        """Takes the values of another tensor; existing views keep the old ones."""
        if value.device != self.device:
            raise RuntimeError(f"data: the parameter is on {self.device}, and what is assigned on {value.device}")
        if isinstance(value, SwappedTensor) and value._copy is None:
            made = value._derived(value._outline)
        else:
            if isinstance(value, OffloadedTensor):
                assigned, value = None, value.to_memory()
            elif type(value) not in (torch.Tensor, torch.nn.Parameter) or value.layout != torch.strided:
                raise TypeError(f"data: a tensor on storage cannot take a {type(value).__name__} of {value.layout}")
            else:
                assigned, value = value, value.detach()
            resident = self._residents.put(self._resident.place, value)
            self._residents.require_written(resident)
            made = SwappedTensor(self._residents, resident)
            if assigned is not None and not assigned.is_inference():
                made._resident.assigned = weakref.ref(assigned), assigned._version
            made._resident.is_part = value.untyped_storage().nbytes() > value.nbytes
        self._become(made)


def _to_copy(tensor: Any, *, dtype: torch.dtype | None = None, **options: Any) -> Any:
    """Makes a copy that is converted when it is used, as for autocast."""
    device = options.pop("device", None)
    non_blocking = options.pop("non_blocking", None)
    elsewhere = device is not None and torch.device(device) != tensor.device
    if elsewhere or any(value is not None for value in options.values()) or dtype is None or dtype == tensor.dtype:
        return NotImplemented
    if tensor._copy is not None:
        return NotImplemented
    return tensor._converted(Step(aten._to_copy.default, (), {"dtype": dtype, "non_blocking": bool(non_blocking)}))


SwappedTensor.lazy[aten._to_copy.default] = _to_copy
