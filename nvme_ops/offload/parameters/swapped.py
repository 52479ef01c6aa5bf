"""``SwappedTensor``: a parameter that is on storage, and in memory while something computes with it."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Hashable, Iterator
from typing import Any, ClassVar

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from nvme_ops.lazy.offloaded import OffloadedTensor, Step, apply_steps, outline_of
from nvme_ops.offload.parameters.residents import Phase, Resident, Residents

aten = torch.ops.aten

_MANY = 64  # references to copies from which on dead ones are removed


class _Copy:
    """A copy of a parameter, or of a view, in another dtype: converted at each use until the copy or parameter changes.

    Args:
        of: the tensor that is copied.
        conversion: converts its values.
    """

    def __init__(self, of: SwappedTensor, conversion: Step) -> None:
        self._of, self._conversion = of, conversion
        self._values: torch.Tensor | None = None  # its own, once the copy or parameter has changed

    def whole(self) -> SwappedTensor:
        """Returns a tensor over all values of the copy."""
        of = self._of
        return SwappedTensor(of._residents, of._resident, self._conversion(of._outline), (), self)

    def lend(self, uses: contextlib.ExitStack, change: bool) -> torch.Tensor:
        """Returns the values, which the caller may write to if ``change``."""
        values = self._values
        if values is None:
            values = self._conversion(self._of._lend(uses, False))
            if change:
                self._values = values
        return values

    def keep(self, stored: torch.Tensor) -> None:
        """Converts the parameter's ``stored`` values, which are about to change, unless that was done before."""
        if self._values is None:
            self._values = apply_steps((*self._of._steps, self._conversion), stored)


class SwappedTensor(OffloadedTensor):
    """A parameter, or a view of one, whose values are on storage and can be changed there.

    For the backward pass autograd keeps a tensor of this class, not the values, which are fetched again there. A copy
    in another dtype is a tensor of this class as well, and converted at each use until it or the parameter changes.

    Args:
        residents: fetch the values.
        resident: the entry with the stored values.
        outline: has shape, strides and dtype of this tensor; those of ``resident`` when None.
        steps: views that lead from the stored values to this tensor.
        copy: has the values in place of ``resident``.
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
        """Makes a tensor without reading anything."""
        if outline is None:
            outline = outline_of(resident.shape, resident.stride, resident.dtype)
        made = cls._outlined(outline, steps, resident.device)
        made._residents, made._resident, made._copy = residents, resident, copy
        return made

    @property
    def resident(self) -> Resident:
        """The entry with the stored values."""
        return self._resident

    @property
    def stored_at(self) -> Hashable:
        """A key shared by all tensors that in torch would share memory; a conversion is a copy."""
        return id(self._resident if self._copy is None else self._copy)

    @contextlib.contextmanager
    def lent(self, change: bool = False) -> Iterator[torch.Tensor]:
        """Yields the values, an ordinary tensor in memory, for the block to read or ``change``."""
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
        return apply_steps(self._steps, values)

    def _keep_copies(self, values: torch.Tensor) -> None:
        """Gives all copies of these values, which are about to change, values of their own."""
        copies = self._resident.copies
        while copies:
            copy = copies[-1]()
            if copy is not None:
                copy.keep(values)
            copies.pop()

    def _viewed(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> SwappedTensor | list[SwappedTensor]:
        if self._resident.is_part and func is aten.as_strided.default:  # in torch it can reach beyond the part
            raise RuntimeError(f"{func}: a part of another tensor was assigned to .data: assign a clone() of it")
        return super()._viewed(func, args, kwargs)

    def _derived(self, outline: torch.Tensor, *steps: Step) -> SwappedTensor:
        return SwappedTensor(self._residents, self._resident, outline, (*self._steps, *steps), self._copy)

    def _converted(self, conversion: Step) -> SwappedTensor:
        """Returns a copy that is converted when it is used."""
        copies = self._resident.copies
        if len(copies) >= _MANY:
            copies[:] = [reference for reference in copies if reference() is not None]
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
        """Pickles an ordinary tensor, see ``OffloadedTensor``."""
        return super().__reduce_ex__(protocol) if self._copy is None else self._ordinary().__reduce_ex__(protocol)

    def _assign(self, value: torch.Tensor) -> None:
        """Replaces the values by those of another tensor; existing views keep the old ones."""
        if value.device != self.device:
            raise RuntimeError(f"data: the parameter is on {self.device}, and the assigned tensor on {value.device}")
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
            self._residents.wait_until_written(resident)
            made = SwappedTensor(self._residents, resident)
            if assigned is not None and not assigned.is_inference():
                made._resident.assigned = weakref.ref(assigned), assigned._version
            made._resident.is_part = value.untyped_storage().nbytes() > value.nbytes
        self._become(made)


def _to_copy(tensor: Any, *, dtype: torch.dtype | None = None, **options: Any) -> Any:
    """Returns a copy in another dtype that is converted when it is used, as autocast needs."""
    device = options.pop("device", None)
    non_blocking = options.pop("non_blocking", None)
    elsewhere = device is not None and torch.device(device) != tensor.device
    if elsewhere or any(value is not None for value in options.values()) or dtype is None or dtype == tensor.dtype:
        return NotImplemented
    if tensor._copy is not None:
        return NotImplemented
    return tensor._converted(Step(aten._to_copy.default, (), {"dtype": dtype, "non_blocking": bool(non_blocking)}))


SwappedTensor.lazy[aten._to_copy.default] = _to_copy
