"""``SwappedTensor``: a parameter that is on storage, and in memory for as long as something computes with it."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from nvme_ops.offload.residents import Phase, Resident, Residents

aten = torch.ops.aten

_MANY = 64  # copies from which on those that are gone are forgotten


class SwappedTensor(torch.Tensor):
    """Has shape, strides, dtype and device of a parameter, and its values on storage.

    Each operation gets the values in memory; what it returns are usual tensors. What autograd keeps of a matrix for the
    backward pass is a tensor of this class, or its transpose: not the values, which are fetched again there. Operations
    in place change what is on storage.

    Args:
        residents: fetch it.
        resident: what is fetched.
        dtype: what the values are converted to; as they are when None.
        turned: whether it is the transpose.
    """

    _residents: Residents
    _resident: Resident
    _turned: bool
    _copied: torch.Tensor | None

    @staticmethod
    def __new__(
        cls, residents: Residents, resident: Resident, dtype: torch.dtype | None = None, turned: bool = False
    ) -> SwappedTensor:
        """Makes one; nothing is read."""
        shape, stride = resident.shape, resident.stride
        made: SwappedTensor = torch.Tensor._make_wrapper_subclass(
            cls,
            shape[::-1] if turned else shape,
            strides=stride[::-1] if turned else stride,
            dtype=dtype or resident.dtype,
            device=resident.device,
        )
        made._residents, made._resident, made._turned, made._copied = residents, resident, turned, None
        if made.dtype != resident.dtype:  # a copy, which does not change with the values
            if len(resident.copies) >= _MANY:
                resident.copies = [each for each in resident.copies if each() is not None]
            resident.copies.append(weakref.ref(made))
        return made

    @property
    def resident(self) -> Resident:
        """What is on storage."""
        return self._resident

    @contextlib.contextmanager
    def lent(self, change: bool = False, phase: Phase = "step") -> Iterator[torch.Tensor]:
        """Lets the block read, or ``change``, the values: a usual tensor in memory, of the dtype that is stored."""
        with self._residents.used(self._resident, phase, change=change) as values:
            if change:
                self._keep_copies(values)
            yield values.t() if self._turned else values

    def _keep_copies(self, values: torch.Tensor) -> None:
        """Gives copies that are still to be made of these values what they need."""
        copies, self._resident.copies = self._resident.copies, []
        for reference in copies:
            copy = reference()
            if copy is not None:
                copy._copied = (values.t() if copy._turned else values).to(copy.dtype)

    def to_memory(self) -> torch.Tensor:
        """Returns a usual tensor with the values, in memory of its own."""
        with self.lent() as values:
            return self.converted(values).clone()

    def converted(self, values: torch.Tensor) -> torch.Tensor:
        """Returns what the values are to whoever computes with them."""
        if self._copied is not None:
            return self._copied
        return values if values.dtype == self.dtype else values.to(self.dtype)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]  # torch declares it without types
        """For example ``SwappedTensor(shape=(4096, 4096), dtype=torch.bfloat16)``."""
        return f"SwappedTensor(shape={tuple(self.shape)}, dtype={self.dtype})"

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        """A usual tensor, or a parameter where this is one."""
        made = memo[id(self)] = self._usual()
        return made

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Is pickled as a usual tensor."""
        return self._usual().__reduce_ex__(protocol)

    def _usual(self) -> torch.Tensor:
        values = self.to_memory()
        return torch.nn.Parameter(values, self.requires_grad) if isinstance(self, torch.nn.Parameter) else values

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch declares it without cls
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if (lazily := _LAZY.get(func)) is not None:
            found = lazily(*args, **kwargs)
            if found is not NotImplemented:
                return found
        swapped = [each for each in tree_leaves((args, kwargs)) if isinstance(each, SwappedTensor)]
        written = _written(func, args, kwargs)
        phase: Phase = "forward" if torch._C._current_graph_task_id() < 0 else "backward"
        values: dict[int, torch.Tensor] = {}
        try:
            with contextlib.ExitStack() as uses:
                for each in swapped:
                    if id(each) not in values:
                        values[id(each)] = each.converted(uses.enter_context(each.lent(id(each) in written, phase)))

                def in_memory(value: Any) -> Any:
                    return values[id(value)] if isinstance(value, SwappedTensor) else value

                result = func(*tree_map(in_memory, tuple(args)), **tree_map(in_memory, dict(kwargs)))
                if not written and _is_view(func):
                    for each in swapped:
                        each._residents.note_view(each._resident, each)
                back = {id(values[key]): each for key, each in written.items()}
                return tree_map(lambda each: back.get(id(each), each), result) if back else result
        finally:
            values.clear()  # which a traceback would keep


def _written(func: Any, args: Any, kwargs: Any) -> dict[int, SwappedTensor]:
    """Returns the tensors that an operation writes to. Raises RuntimeError for a converted copy."""
    found: dict[int, SwappedTensor] = {}
    if not func._schema.is_mutable:
        return found
    for number, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[number] if number < len(args) else kwargs.get(argument.name)
            for each in tree_leaves(value):
                if isinstance(each, SwappedTensor):
                    if each.dtype != each.resident.dtype:
                        raise RuntimeError(f"{func}: a converted copy of a swapped parameter cannot be changed")
                    found[id(each)] = each
    return found


def _is_view(func: Any) -> bool:
    return any(each.alias_info is not None for each in func._schema.returns)


# Operations of which nothing has to be read. Each returns NotImplemented for what it cannot do.


def _same(tensor: Any, *_: Any) -> Any:
    made = SwappedTensor(tensor._residents, tensor._resident, tensor.dtype, tensor._turned)
    made._copied = tensor._copied
    return made


def _t(tensor: Any) -> Any:
    """Autograd keeps it for the backward of a linear layer."""
    if tensor.dim() != 2:
        return NotImplemented
    made = SwappedTensor(tensor._residents, tensor._resident, tensor.dtype, not tensor._turned)
    made._copied = None if tensor._copied is None else tensor._copied.t()
    return made


def _transpose(tensor: Any, first: int, second: int) -> Any:
    return _t(tensor) if tensor.dim() == 2 and (first - second) % 2 else NotImplemented


def _to_copy(tensor: Any, *, dtype: torch.dtype | None = None, **options: Any) -> Any:
    """Makes a copy that is converted each time it is used, as for autocast."""
    device = options.pop("device", None)
    options.pop("non_blocking", None)
    elsewhere = device is not None and torch.device(device) != tensor.device
    if elsewhere or any(value is not None for value in options.values()) or tensor.dtype != tensor.resident.dtype:
        return NotImplemented
    if dtype is None or dtype == tensor.dtype:
        return NotImplemented
    return SwappedTensor(tensor._residents, tensor._resident, dtype, tensor._turned)


def _made_like(func: Any) -> Callable[..., Any]:
    def make(tensor: Any, *args: Any, **options: Any) -> Any:
        like = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
        return func(like, *args, **{**options, "device": options.get("device") or tensor.device})

    return make


_MAKERS = (
    *(aten.empty_like, aten.zeros_like, aten.ones_like, aten.full_like, aten.rand_like, aten.randn_like),
    *(aten.new_empty, aten.new_zeros, aten.new_ones, aten.new_full),
)

_LAZY: dict[Any, Callable[..., Any]] = {
    **{each.default: _made_like(each.default) for each in _MAKERS},
    aten.detach.default: _same,
    aten.alias.default: _same,
    aten.lift_fresh.default: _same,
    aten.t.default: _t,
    aten.transpose.int: _transpose,
    aten._to_copy.default: _to_copy,
}
