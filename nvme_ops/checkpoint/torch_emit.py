"""Writes the pickle of a plain object: containers, numbers, strings, dense tensors and parameters, and nothing else.

The opcodes are those that ``torch.save`` writes (protocol 2, https://docs.python.org/3/library/pickletools.html), ten
times as fast where there are thousands of tensors: Python's pickler calls back into Python for every object.
"""

from __future__ import annotations

import pickle
import struct
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch

from nvme_ops.memory.carve import is_dense
from nvme_ops.offloaded import OffloadedTensor

_MARK, _TUPLE, _REDUCE = pickle.MARK, pickle.TUPLE, pickle.REDUCE
_BATCH = 1000  # items between MARK and SETITEMS or APPENDS, as in Python's pickler
_LENGTH = struct.Struct("<I")
_SHORT_TUPLES = {1: pickle.TUPLE1, 2: pickle.TUPLE2, 3: pickle.TUPLE3}

#: The names by which the format calls storages; newer dtypes are pickled in another way.
_STORAGES = {
    torch.bfloat16: "BFloat16Storage",
    torch.bool: "BoolStorage",
    torch.complex64: "ComplexFloatStorage",
    torch.complex128: "ComplexDoubleStorage",
    torch.float16: "HalfStorage",
    torch.float32: "FloatStorage",
    torch.float64: "DoubleStorage",
    torch.int8: "CharStorage",
    torch.int16: "ShortStorage",
    torch.int32: "IntStorage",
    torch.int64: "LongStorage",
    torch.uint8: "ByteStorage",
}
_DEVICES = ("cpu", "cuda")
_NAMES = hasattr(torch.Tensor, "has_names")  # named dimensions, in older versions of torch


class NotPlainError(Exception):
    """The object needs Python's pickler."""


def emit(obj: Any) -> tuple[bytes, list[torch.Tensor], list[int]]:
    """Returns the pickle, a tensor in each storage in the order of their keys ``0``, ``1``, ..., and their bytes.

    Raises:
        NotPlainError: the object contains something that this module does not handle.
    """
    emitter = _Emitter()
    emitter.value(obj)
    emitter.out.append(pickle.STOP)
    return b"".join(emitter.out), emitter.owners, emitter.sizes


class _Emitter:
    def __init__(self) -> None:
        self.out: list[bytes] = [pickle.PROTO + b"\2"]
        self.owners: list[torch.Tensor] = []
        self.sizes: list[int] = []
        self._keys: dict[Any, bytes] = {}  # pickled, by the address of the storage, or the place on storage
        self._dtypes: dict[tuple[torch.device, int], torch.dtype] = {}
        self._memo: dict[int, bytes] = {}  # opcodes that fetch an object again, by its id
        self._kept: list[Any] = []  # keeps objects alive, so that no id is reused
        self._count = 0
        self._open: set[int] = set()  # ids of tuples being pickled
        self._constants: dict[str, bytes] = {}
        self._plain: set[Any] = set()  # kinds of tensors known to be plain
        self._ends: dict[Any, tuple[bytes, bytes]] = {}  # by everything about a tensor but its storage
        self._kinds: dict[type, Callable[[Any], None]] = {
            bool: self._bool,
            dict: self._dict,
            float: self._float,
            int: self._int,
            list: self._list,
            OrderedDict: self._ordered,
            str: self._str,
            torch.nn.Parameter: self._parameter,
            torch.Tensor: self._tensor,
            tuple: self._tuple,
            type(None): self._none,
        }

    def value(self, obj: Any) -> None:
        known = self._memo.get(id(obj))
        if known is not None:
            self.out.append(known)
            return
        kind = self._kinds.get(type(obj))
        if kind is None and isinstance(obj, OffloadedTensor):
            kind = self._parameter if isinstance(obj, torch.nn.Parameter) else self._tensor
        if kind is None:
            raise NotPlainError(type(obj).__name__)
        kind(obj)

    def _put(self) -> tuple[bytes, bytes]:
        """Returns the opcodes that memoize the object on top of the stack, and that fetch it again."""
        number = self._count
        self._count += 1
        if number < 256:
            byte = bytes((number,))
            return pickle.BINPUT + byte, pickle.BINGET + byte
        packed = _LENGTH.pack(number)
        return pickle.LONG_BINPUT + packed, pickle.LONG_BINGET + packed

    def _remember(self, obj: Any) -> None:
        put, self._memo[id(obj)] = self._put()
        self._kept.append(obj)
        self.out.append(put)

    def _none(self, _: None) -> None:
        self.out.append(pickle.NONE)

    def _bool(self, value: bool) -> None:
        self.out.append(pickle.NEWTRUE if value else pickle.NEWFALSE)

    def _int(self, value: int) -> None:
        self.out.append(_integer(value))

    def _float(self, value: float) -> None:
        self.out.append(pickle.BINFLOAT + struct.pack(">d", value))

    def _str(self, value: str) -> None:
        self.out.append(_string(value))

    def _dict(self, value: dict[Any, Any]) -> None:
        self.out.append(pickle.EMPTY_DICT)
        self._remember(value)
        self._items(value)

    def _ordered(self, value: OrderedDict[Any, Any]) -> None:
        self.out.append(self._constant("collections", "OrderedDict") + pickle.EMPTY_TUPLE + _REDUCE)
        self._remember(value)
        self._items(value)
        if state := vars(value):  # a module's _metadata
            self.value(state)
            self.out.append(pickle.BUILD)

    def _items(self, value: dict[Any, Any]) -> None:
        if not value:
            return
        for number, (key, each) in enumerate(value.items()):
            if number % _BATCH == 0:
                self.out.append(pickle.SETITEMS + _MARK if number else _MARK)
            if type(key) is str:
                self.out.append(_string(key))
            else:
                self.value(key)
            if type(each) is torch.Tensor and id(each) not in self._memo:
                self._tensor(each)
            else:
                self.value(each)
        self.out.append(pickle.SETITEMS)

    def _list(self, value: list[Any]) -> None:
        self.out.append(pickle.EMPTY_LIST)
        self._remember(value)
        for number, each in enumerate(value):
            if number % _BATCH == 0:
                self.out.append(pickle.APPENDS + _MARK if number else _MARK)
            self.value(each)
        if value:
            self.out.append(pickle.APPENDS)

    def _tuple(self, value: tuple[Any, ...]) -> None:
        if not value:
            self.out.append(pickle.EMPTY_TUPLE)
            return
        if id(value) in self._open:
            raise NotPlainError("a tuple that holds itself")
        self._open.add(id(value))
        short = _SHORT_TUPLES.get(len(value))
        if short is None:
            self.out.append(_MARK)
        for each in value:
            self.value(each)
        self._open.discard(id(value))
        self.out.append(short or _TUPLE)
        self._remember(value)

    def _constant(self, module: str, name: str = "") -> bytes:
        """Returns the opcodes for a global, or without ``name`` for a string; memoized after the first time."""
        word = f"{module}\n{name}\n"
        known = self._constants.get(word)
        if known is None:
            put, self._constants[word] = self._put()
            made = pickle.GLOBAL + word.encode() if name else _string(module)
            return made + put
        return known

    def _parameter(self, value: torch.nn.Parameter) -> None:
        self._require_bare(value)
        self.out.append(self._constant("torch._utils", "_rebuild_parameter"))
        self._tensor(value.data)
        self.out.append(
            (pickle.NEWTRUE if value.requires_grad else pickle.NEWFALSE)
            + self._constant("collections", "OrderedDict") + pickle.EMPTY_TUPLE + _REDUCE + pickle.TUPLE3 + _REDUCE
        )  # fmt: skip
        self._remember(value)

    def _require_bare(self, value: torch.Tensor) -> None:
        """Raises NotPlainError for a tensor with attributes or hooks."""
        if value._backward_hooks or (value.__dict__ and not isinstance(value, OffloadedTensor)):
            raise NotPlainError("a tensor with more than its data")

    def _tensor(self, value: torch.Tensor) -> None:
        kind = (value.dtype, value.layout, value.device, value.requires_grad)
        if kind not in self._plain:
            _require_plain(*kind[:3])
            self._plain.add(kind)
        if value.is_nested or value.is_conj() or value.is_neg() or _has_names(value):
            raise NotPlainError("a tensor of a kind of its own")
        size, stride, offset = value.size(), value.stride(), int(value.storage_offset())
        self._require_bare(value)
        place: Any
        if isinstance(value, OffloadedTensor):
            if not is_dense(value):
                raise NotPlainError("a part of a tensor on storage, with gaps")
            place, bytes_, offset, address = (value.place, size, stride), value.nbytes, 0, 0
        else:
            storage = value.untyped_storage()
            place, bytes_, address = storage._cdata, storage.nbytes(), storage.data_ptr()
        ends = self._ends.get((kind, size, stride, offset, bytes_))
        key = self._keys.get(place)
        if key is None:
            key = self._keys[place] = _string(str(len(self.owners)))
            self.owners.append(value)
            self.sizes.append(bytes_)
        if address:
            found = self._dtypes.setdefault((value.device, address), value.dtype)
            if found != value.dtype:
                raise NotPlainError("views of one memory as two dtypes")
        if ends is None:
            before, after = self._around(kind, tuple(size), stride, offset, bytes_ // value.element_size())
            self.out += (before, key, after)
            # from now on all its constants are memoized
            ends = self._around(kind, tuple(size), stride, offset, bytes_ // value.element_size())
            self._ends[kind, size, stride, offset, bytes_] = ends
        else:
            self.out += (ends[0], key, ends[1])
        self._remember(value)

    def _around(
        self, kind: tuple[Any, ...], size: tuple[int, ...], stride: tuple[int, ...], offset: int, count: int
    ) -> tuple[bytes, bytes]:
        dtype, _, device, requires_grad = kind
        before = (
            self._constant("torch._utils", "_rebuild_tensor_v2") + _MARK + _MARK + self._constant("storage")
            + self._constant("torch", _STORAGES[dtype])
        )  # fmt: skip
        after = (
            self._constant(str(device)) + _integer(count) + _TUPLE + pickle.BINPERSID + _integer(offset)
            + _integers(size) + _integers(stride) + (pickle.NEWTRUE if requires_grad else pickle.NEWFALSE)
            + self._constant("collections", "OrderedDict") + pickle.EMPTY_TUPLE + _REDUCE + _TUPLE + _REDUCE
        )  # fmt: skip
        return before, after


def _require_plain(dtype: torch.dtype, layout: torch.layout, device: torch.device) -> None:
    if dtype not in _STORAGES or layout != torch.strided or device.type not in _DEVICES:
        raise NotPlainError(f"{dtype}, {layout}, {device}")


def _has_names(value: Any) -> bool:
    return _NAMES and bool(value.has_names())


def _string(value: str) -> bytes:
    encoded = value.encode("utf-8", "surrogatepass")
    return b"X" + _LENGTH.pack(len(encoded)) + encoded  # BINUNICODE


def _integer(value: int) -> bytes:
    if 0 <= value < 1 << 8:
        return pickle.BININT1 + bytes((value,))
    if 0 <= value < 1 << 16:
        return pickle.BININT2 + struct.pack("<H", value)
    if -1 << 31 <= value < 1 << 31:
        return pickle.BININT + struct.pack("<i", value)
    encoded = pickle.encode_long(value)
    if len(encoded) > 255:
        raise NotPlainError("a large number")
    return pickle.LONG1 + bytes((len(encoded),)) + encoded


def _integers(values: tuple[int, ...]) -> bytes:
    words = b"".join(map(_integer, values))
    if not values:
        return pickle.EMPTY_TUPLE
    return words + _SHORT_TUPLES[len(values)] if len(values) in _SHORT_TUPLES else _MARK + words + _TUPLE
