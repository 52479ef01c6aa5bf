"""Makes the object of a plain pickle: containers, numbers, strings, dense tensors and parameters, and nothing else.

Torch's own reader makes everything, and takes three times as long where there are thousands of tensors.
"""

from __future__ import annotations

import io
import pickle
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import torch

from nvme_ops.checkpoint.torch_pickle import CODES


class NotPlainError(Exception):
    """Something that is left to torch's own reader."""


class _Typed(NamedTuple):
    """A storage and what its elements are."""

    storage: torch.UntypedStorage
    dtype: torch.dtype


#: ``fetch(record, size, location)`` gives a storage where it is to stay, or raises NotPlainError.
Fetch = Callable[[str, int, str], torch.UntypedStorage]


def make(content: bytes, fetch: Fetch) -> Any:
    """What ``torch.load(weights_only=True)`` makes of the pickle.

    Raises:
        Exception: whatever damaged bytes make of an interpreter.
        NotPlainError: there is more in it. Nothing that it names was called.
    """
    maker = _Maker(content, fetch)
    made = maker.load()
    if maker.unused:
        raise NotPlainError("a storage by itself")
    return made


def _tensor(
    typed: _Typed,
    offset: int,
    size: Any,
    stride: Any,
    requires_grad: bool,
    hooks: Any,
    metadata: dict[str, bool] | None = None,
) -> torch.Tensor:
    tensor = torch.empty((0,), dtype=typed.dtype, device=typed.storage.device)
    tensor.set_(typed.storage, offset, size, stride)
    tensor.requires_grad = requires_grad
    if metadata:
        torch._utils.set_tensor_metadata(tensor, metadata)
    tensor._backward_hooks = hooks
    return tensor


def _tensor_of_dtype(
    typed: _Typed,
    offset: int,
    size: Any,
    stride: Any,
    requires_grad: bool,
    hooks: Any,
    dtype: torch.dtype,
    metadata: dict[str, bool] | None = None,
) -> torch.Tensor:
    return _tensor(_Typed(typed.storage, dtype), offset, size, stride, requires_grad, hooks, metadata)


def _parameter(data: torch.Tensor, requires_grad: bool, hooks: Any) -> torch.nn.Parameter:
    parameter = torch.nn.Parameter(data, requires_grad)
    parameter._backward_hooks = hooks
    return parameter


_TENSORS = (_tensor, _tensor_of_dtype)
_FUNCTIONS: dict[tuple[str, str], Any] = {
    ("collections", "OrderedDict"): OrderedDict,
    ("torch", "Size"): torch.Size,
    ("torch._utils", "_rebuild_tensor_v2"): _tensor,
    ("torch._utils", "_rebuild_tensor_v3"): _tensor_of_dtype,
    ("torch._utils", "_rebuild_parameter"): _parameter,
}


def _checked(code: bytes, target: Callable[[Any], Any], kinds: tuple[type, ...]) -> Callable[[Any], None]:
    """Python's way to fill a container, where it is one."""
    fill = pickle._Unpickler.dispatch[code[0]]

    def load(reader: Any) -> None:
        if type(target(reader)) not in kinds:
            raise NotPlainError("an object that is filled like a container")
        fill(reader)

    return load


_DICTS = (dict, OrderedDict)


class _Maker(pickle._Unpickler):
    """Python's own reader, with the functions above and no others."""

    def __init__(self, content: bytes, fetch: Fetch) -> None:
        super().__init__(io.BytesIO(content), encoding="utf-8")
        self._fetch = fetch
        self._storages: dict[str, torch.UntypedStorage] = {}
        self.unused = 0  # storages that are in no tensor

    stack: list[Any]  # Python's

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _FUNCTIONS:
            return _FUNCTIONS[module, name]
        if module in ("torch", "torch.storage") and name.endswith("Storage"):
            return torch.uint8 if name == "UntypedStorage" else torch.serialization.StorageType(name).dtype
        found = getattr(torch, name, None) if module == "torch" else None
        if isinstance(found, torch.dtype):
            return found
        raise NotPlainError(f"{module}.{name}")

    def persistent_load(self, identity: Any) -> _Typed:
        _, dtype, key, location, count = identity
        storage = self._storages.get(key)
        if storage is None:
            storage = self._storages[key] = self._fetch(f"data/{key}", count * dtype.itemsize, location)
        self.unused += 1
        return _Typed(storage, dtype)

    def call(self) -> None:
        """For ``REDUCE``."""
        arguments = self.stack.pop()
        function = self.stack[-1]
        if function in _TENSORS:
            self.unused -= 1
        elif function not in (OrderedDict, torch.Size, _parameter):
            raise NotPlainError("a function")
        self.stack[-1] = function(*arguments)

    def set_state(self) -> None:
        """For ``BUILD``."""
        state = self.stack.pop()
        if type(self.stack[-1]) is not OrderedDict:
            raise NotPlainError("the state of an object")
        self.stack[-1].__dict__.update(state)

    dispatch: ClassVar[dict[int, Any]] = {
        **{code[0]: pickle._Unpickler.dispatch[code[0]] for code in CODES if code != pickle.NEWOBJ},
        pickle.REDUCE[0]: call,
        pickle.BUILD[0]: set_state,
        pickle.APPEND[0]: _checked(pickle.APPEND, lambda reader: reader.stack[-2], (list,)),
        pickle.APPENDS[0]: _checked(pickle.APPENDS, lambda reader: reader.metastack[-1][-1], (list,)),
        pickle.SETITEM[0]: _checked(pickle.SETITEM, lambda reader: reader.stack[-3], _DICTS),
        pickle.SETITEMS[0]: _checked(pickle.SETITEMS, lambda reader: reader.metastack[-1][-1], _DICTS),
    }
