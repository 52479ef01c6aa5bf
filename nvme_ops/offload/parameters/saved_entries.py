"""Entries of state dicts for programs that save parameters by the address of their memory, as safetensors does."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable
from typing import Any, ClassVar

import torch

from nvme_ops.base.patches import Patch
from nvme_ops.io.tensors import empty
from nvme_ops.lazy.offloaded import Step, apply_steps
from nvme_ops.offload.parameters.swapped import SwappedTensor

aten = torch.ops.aten


class SavedEntry(SwappedTensor):
    """A swapped parameter in a state dict: for whoever asks for its memory, a copy is mapped from storage.

    The copy is of the values at that time, the same for all entries and views of the parameter, and leaves with them.
    Everything else is done as with the parameter itself.
    """

    lazy: ClassVar[dict[Any, Callable[..., Any]]] = dict(SwappedTensor.lazy)

    _mapped: torch.Tensor | None = None  # keeps the copy

    def _derived(self, outline: torch.Tensor, *steps: Step) -> SavedEntry:
        return _as_entry(super()._derived(outline, *steps))

    def in_mapped_memory(self) -> torch.Tensor:
        """Returns an ordinary tensor on the CPU with the values: a copy of them, or a view of one."""
        resident = self._resident
        mapped, changes = (resident.mapped[0](), resident.mapped[1]) if resident.mapped else (None, 0)
        if mapped is None or changes != resident.changes:
            changes = resident.changes
            with self._residents.used(resident, "step") as values:
                mapped = self._residents.mapped(values)
            resident.mapped = weakref.ref(mapped), changes
        self._mapped = mapped
        return apply_steps(self._steps, mapped)

    def data_ptr(self) -> int:
        """Returns the address of the copy."""
        return self.in_mapped_memory().data_ptr()

    def untyped_storage(self) -> Any:
        """Returns the storage of the copy."""
        return self.in_mapped_memory().untyped_storage()

    def _typed_storage(self) -> Any:
        return self.in_mapped_memory()._typed_storage()

    storage = _typed_storage

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickles an ordinary tensor."""
        mapped = self.in_mapped_memory() if self.device.type == "cpu" else super()
        return mapped.__reduce_ex__(protocol)


def _as_entry(tensor: Any) -> SavedEntry:
    tensor.__class__ = SavedEntry  # it shares the version counter of the parameter, which a new one would not
    return tensor  # type: ignore[no-any-return]


def _copied(func: Any, wanted: Callable[[Any], bool]) -> Callable[..., Any]:
    """Returns what makes copies, if ``wanted``, that are mapped as well: programs copy one entry after another."""

    def copy(tensor: SavedEntry, **options: Any) -> Any:
        device = torch.device(options.pop("device", None) or tensor.device)
        if device.type != "cpu" or not wanted(options):
            return NotImplemented
        outline = func(tensor._outline, **options)
        made = empty(outline.numel(), dtype=outline.dtype).as_strided(outline.shape, outline.stride())
        with contextlib.ExitStack() as uses:
            made.copy_(tensor._lend(uses, False))
        return tensor._residents.mapped(made)

    return copy


SavedEntry.lazy[aten._to_copy.default] = _copied(aten._to_copy.default, lambda options: not options.get("pin_memory"))
SavedEntry.lazy[aten.clone.default] = _copied(  # of contiguous(); clone() itself is for memory
    aten.clone.default, lambda options: options.get("memory_format") is torch.contiguous_format
)


def _with_entries(original: Any) -> Callable[..., None]:
    """Returns a ``Module._save_to_state_dict`` that puts swapped parameters in a state dict as ``SavedEntry``s."""

    @functools.wraps(original)
    def save(self: torch.nn.Module, destination: Any, prefix: str, keep_vars: bool) -> None:
        original(self, destination, prefix, keep_vars)
        for name, parameter in self._parameters.items() if not keep_vars else ():
            entry = destination.get(prefix + name)
            if isinstance(parameter, SwappedTensor) and type(entry) is SwappedTensor:
                _as_entry(entry)

    return save


STATE_DICTS = Patch(torch.nn.Module, "_save_to_state_dict", _with_entries)  # while parameters are swapped
