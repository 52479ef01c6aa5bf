"""Builds the object of a plain pickle: containers, numbers, strings, dense tensors and parameters, and nothing else.

Torch's own reader handles every pickle, but takes ten times as long for thousands of tensors. Here Python's
reader in C makes the object, from a pickle that was scanned before. Its tensors are empty at first; one native call
gives all of them their storages at the end.
"""

from __future__ import annotations

import pickle
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from nvme_ops import collector
from nvme_ops._native import native
from nvme_ops.formats.torch_pickle import CODES, NotReadError, Unpickler, dtype_of_storage

_CODES = [code for code in CODES if code != pickle.NEWOBJ]


class _Typed(NamedTuple):
    """A storage, by its key, and the dtype of its elements."""

    key: str
    dtype: torch.dtype
    device: torch.device


#: ``fetch(record, size, location)`` gives a tensor over the storage, which stays where it is.
Fetch = Callable[[str, int, str], torch.Tensor]


@collector.paused()
def make(content: bytes, device_of: Callable[[str], torch.device], fetch: Fetch) -> Any:
    """Builds the object that ``torch.load(weights_only=True)`` would build.

    Args:
        content: the pickle.
        device_of: maps a location to the device of its storage.
        fetch: called once for each storage, after the whole pickle was read.

    Raises:
        Exception: whatever damaged bytes make of an interpreter.
        NotReadError: there is more in it. Nothing that it names was called.
    """
    maker = _Maker(content, device_of)
    made = maker.load()
    if maker.unused:
        raise NotReadError("a storage by itself")
    maker.fill(fetch)
    return made


class _Function:
    """A stand-in for a function of torch's: a pickle can call it, but cannot set attributes of it."""

    __slots__ = ("_function",)

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __call__(self, *arguments: Any) -> Any:
        return self._function(*arguments)

    def __setstate__(self, _: Any) -> None:
        raise NotReadError("the state of a function")


class _Maker(Unpickler):
    """Calls the functions below, which stand for torch's, and no others."""

    def __init__(self, content: bytes, device_of: Callable[[str], torch.device]) -> None:
        super().__init__(content, _CODES)
        self._device_of = device_of
        self._storages: dict[str, tuple[int, str]] = {}  # by key: bytes and location
        self._kinds: dict[Any, _Typed] = {}
        self._empty: dict[tuple[torch.dtype, torch.device], torch.Tensor] = {}
        self._tensors: list[torch.Tensor] = []
        self._views: list[tuple[str, int, Any, Any]] = []  # of each: key, offset, size, stride
        self._numbers: dict[int, int] = {}  # indices of tensors by their ids, which _tensors keeps alive
        self.unused = 0  # storages that no tensor uses
        self._functions = {
            ("collections", "OrderedDict"): OrderedDict,
            ("torch", "Size"): torch.Size,
            ("torch._utils", "_rebuild_tensor_v2"): _Function(self._tensor),
            ("torch._utils", "_rebuild_tensor_v3"): _Function(self._tensor_of_dtype),
            ("torch._utils", "_rebuild_parameter"): _Function(self._parameter),
        }

    def find_class(self, module: str, name: str, /) -> Any:
        """Handles ``GLOBAL``."""
        if (module, name) in self._functions:
            return self._functions[module, name]
        if module in ("torch", "torch.storage") and name.endswith("Storage"):
            return dtype_of_storage(name)
        found = getattr(torch, name, None) if module == "torch" else None
        if isinstance(found, torch.dtype):
            return found
        raise NotReadError(f"{module}.{name}")

    def persistent_load(self, identity: Any, /) -> _Typed:
        """Returns a storage."""
        self.unused += 1
        found = self._kinds.get(identity)
        if found is None:
            _, dtype, key, location, count = identity
            size = count * dtype.itemsize
            if self._storages.setdefault(key, (size, location)) != (size, location):
                raise NotReadError("a storage that is described in two ways")
            found = self._kinds[identity] = _Typed(key, dtype, self._device_of(location))
        return found

    def _new(self, dtype: torch.dtype, device: torch.device, view: tuple[str, int, Any, Any]) -> torch.Tensor:
        empty = self._empty.get((dtype, device))
        if empty is None:
            empty = self._empty[dtype, device] = torch.empty(0, dtype=dtype, device=device)
        tensor = empty.data
        self._numbers[id(tensor)] = len(self._tensors)
        self._tensors.append(tensor)
        self._views.append(view)
        return tensor

    def _tensor(
        self, typed: _Typed, offset: int, size: Any, stride: Any, requires_grad: bool, hooks: Any, metadata: Any = None
    ) -> torch.Tensor:
        self.unused -= 1
        tensor = self._new(typed.dtype, typed.device, (typed.key, offset, size, stride))
        if requires_grad:
            tensor.requires_grad = True
        if metadata:
            torch._utils.set_tensor_metadata(tensor, metadata)
        if hooks:
            tensor._backward_hooks = hooks
        return tensor

    def _tensor_of_dtype(
        self, typed: _Typed, offset: int, size: Any, stride: Any, requires_grad: bool, hooks: Any,
        dtype: torch.dtype, metadata: Any = None,
    ) -> torch.Tensor:  # fmt: skip
        return self._tensor(typed._replace(dtype=dtype), offset, size, stride, requires_grad, hooks, metadata)

    def _parameter(self, data: torch.Tensor, requires_grad: bool, hooks: Any) -> torch.nn.Parameter:
        number = self._numbers.get(id(data))
        if number is None:
            raise NotReadError("a parameter of something else")
        parameter = torch.nn.Parameter(data, requires_grad)
        self._tensors.append(parameter)
        self._views.append(self._views[number])
        parameter._backward_hooks = hooks
        return parameter

    def fill(self, fetch: Fetch) -> None:
        """Gives the tensors their storages."""
        if any(empty.untyped_storage().nbytes() for empty in self._empty.values()):
            raise NotReadError("a tensor that the pickle has changed")
        owners = {key: fetch(f"data/{key}", size, location) for key, (size, location) in self._storages.items()}
        native().set_storages(
            self._tensors, [owners[view[0]] for view in self._views], *(
                [view[place] for view in self._views] for place in (1, 2, 3)
            )
        )  # fmt: skip
