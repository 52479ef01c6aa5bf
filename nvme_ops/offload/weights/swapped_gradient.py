"""``SwappedGradient``: what a parameter has as its ``grad`` while the values of that are on storage."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, cast

import torch

from nvme_ops.offload.weights.resident import Phase, Resident
from nvme_ops.offload.weights.residents import Residents
from nvme_ops.offload.weights.swapped import SwappedTensor

aten = torch.ops.aten


class GradientValues:
    """The values of one gradient. Stands for ``Residents`` in all tensors over them, and so sees what changes them.

    It is alive as long as one of these tensors.
    """

    def __init__(self, residents: Residents, resident: Resident, norm: torch.Tensor) -> None:
        self._residents, self._resident = residents, resident
        self._norm: torch.Tensor | None = norm
        self._zero = False  # they are to be zeros when they are used

    def __getattr__(self, name: str) -> Any:
        return getattr(self._residents, name)

    @contextlib.contextmanager
    def used(self, resident: Resident, phase: Phase, *, change: bool = False) -> Iterator[torch.Tensor]:
        """Lets the block compute with the values, or ``change`` them."""
        if change:
            self._norm = None
        with self._residents.used(resident, phase, change=change or self._zero) as values:
            if self._zero:
                values.zero_()
                self._zero = False
            yield values

    def norm(self) -> torch.Tensor:
        """Returns the norm, and remembers it until the values are changed."""
        found = self._norm
        if found is None:
            with self.used(self._resident, "backward") as values:
                found = torch.linalg.vector_norm(values)
            if not self._resident.is_used():  # by who may change them unseen
                self._norm = found
        return found

    def zero(self) -> bool:
        """Has them be zeros, and reads and writes nothing. Returns False where it has to be done at once."""
        if self._is_seen():
            return False
        self._zero, self._norm = True, None
        self._residents.clear(self._resident)
        return True

    def scale(self, by: torch.Tensor) -> bool:
        """Has them multiplied when they arrive the next time. Returns False where it has to be done at once."""
        if self._zero or self._is_seen() or not self._residents.scale(self._resident, by):
            return False
        self._norm = None
        return True

    def _is_seen(self) -> bool:
        """Whether somebody has, or is to have, what they are now."""
        return self._resident.is_used() or any(each() is not None for each in self._resident.copies)


class SwappedGradient(SwappedTensor):
    """The ``grad`` of a parameter, with its values on storage.

    Autograd adds to it, and anybody may, as to any other: there is no other state than these values.
    """

    @property
    def shared(self) -> GradientValues:
        """What all tensors over its values have in common."""
        return cast("GradientValues", self._residents)

    def is_whole(self) -> bool:
        """Whether it has all of the values, as they lie."""
        return (tuple(self.shape), self.stride()) == (self.resident.shape, self.resident.stride)

    def _assign(self, value: torch.Tensor) -> None:
        del value
        raise RuntimeError("data of a gradient that is on storage cannot be replaced: assign to grad")

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch declares it without cls
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is aten.zero_.default and args[0].is_whole() and args[0].shared.zero():
            return args[0]
        if func is aten._to_copy.default:  # once: nothing is gained by converting it for each use, as a parameter is
            with args[0].lent() as values:
                return func(values, *args[1:], **kwargs)
        if func is aten._foreach_zero_.default:
            for each in args[0]:
                each.zero_()
            return None
        return super().__torch_dispatch__(func, types, args, kwargs)
