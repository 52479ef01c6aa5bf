"""Parses a pickle of ``torch.save`` without executing anything that it names."""

from __future__ import annotations

import functools
import io
import math
import pickle
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch

from nvme_ops.base.errors import FormatError
from nvme_ops.formats.mistaken import refuse
from nvme_ops.formats.pickle_scan import scan

#: The opcodes that torch's own reader accepts with weights_only.
CODES = (
    pickle.APPEND, pickle.APPENDS, pickle.BINFLOAT, pickle.BINGET, pickle.BININT, pickle.BININT1, pickle.BININT2,
    pickle.BINPERSID, pickle.BINPUT, pickle.BINUNICODE, pickle.BUILD, pickle.EMPTY_DICT, pickle.EMPTY_LIST,
    pickle.EMPTY_SET, pickle.EMPTY_TUPLE, pickle.GLOBAL, pickle.LONG1, pickle.LONG_BINGET, pickle.LONG_BINPUT,
    pickle.MARK, pickle.NEWFALSE, pickle.NEWOBJ, pickle.NEWTRUE, pickle.NONE, pickle.PROTO, pickle.REDUCE,
    pickle.SETITEM, pickle.SETITEMS, pickle.SHORT_BINSTRING, pickle.STOP, pickle.TUPLE, pickle.TUPLE1, pickle.TUPLE2,
    pickle.TUPLE3,
)  # fmt: skip


class Storage(NamedTuple):  # a tuple, which a pickle cannot change
    """A storage that the pickle refers to; its bytes are in the record ``data/key``."""

    key: str
    dtype: torch.dtype
    location: str
    size: int

    @property
    def record(self) -> str:
        """Name of its record in the archive."""
        return f"data/{self.key}"


def contiguous_stride(shape: Sequence[int]) -> tuple[int, ...]:
    """Returns the strides of a contiguous tensor of this shape, however large."""
    return tuple(math.prod(max(1, size) for size in shape[place + 1 :]) for place in range(len(shape)))


def is_contiguous(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Returns whether elements with these strides follow each other as in a contiguous tensor."""
    expected = contiguous_stride(shape)
    return 0 in shape or all(shape[dim] == 1 or stride[dim] == expected[dim] for dim in range(len(shape)))


@dataclass(frozen=True)
class DenseTensor:
    """A dense tensor: a view of a storage, ``offset`` and ``stride`` in elements."""

    storage: Storage
    dtype: torch.dtype
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    requires_grad: bool
    parameter: bool
    metadata: dict[str, bool]

    @property
    def extent(self) -> tuple[int, int]:
        """The byte range of the storage from the first element to the end of the last one."""
        if 0 in self.shape:
            return 0, 0
        reach = sum((length - 1) * step for length, step in zip(self.shape, self.stride, strict=True))
        start = self.offset * self.dtype.itemsize
        return start, start + (reach + 1) * self.dtype.itemsize

    @property
    def contiguous(self) -> bool:
        """True when the elements follow each other in the file as in a contiguous tensor."""
        return is_contiguous(self.shape, self.stride)


@dataclass
class OtherTensor:
    """A tensor that is not a plain view of one storage: sparse, quantized, nested, or of a subclass."""

    storages: list[Storage]


class Call:
    """Records a call instead of making it: the function, its arguments, and what was to be put into the result.

    Every name in a pickle becomes a class derived from this, since Python's reader in C accepts only classes for
    ``NEWOBJ``. A pickle can change nothing in such a class.
    """

    path: ClassVar[str]  # the name of what was to be called

    def __new__(cls, *arguments: Any) -> Call:
        """Records the arguments."""
        call = super().__new__(cls)
        call.arguments = arguments
        call.items = {}
        call.elements = []
        call.state = None
        return call

    arguments: tuple[Any, ...]
    items: dict[Any, Any]
    elements: list[Any]
    state: Any

    def __setitem__(self, key: Any, value: Any) -> None:
        self.items[key] = value

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def extend(self, elements: list[Any]) -> None:
        """Records items added to a list."""
        self.elements.extend(elements)


_DEEPEST = 2000  # levels of nesting, more than Python can pickle
_LONG_NAME = 256  # characters; classes for longer names are not cached


@functools.lru_cache(maxsize=256)  # torch's own names are fewer
def _named(path: str) -> type[Call]:
    return type("Call", (Call,), {"path": path})


def path_of(named: Any) -> str:
    """Returns what a name in the pickle stands for, such as ``torch.float32``; empty for anything else."""
    return named.path if isinstance(named, type) and issubclass(named, Call) else ""


def dtype_of_storage(name: str) -> torch.dtype:
    """Returns the dtype of a class of storages, by its name. Raises KeyError if there is no such class."""
    dtype: torch.dtype = torch.uint8 if name == "UntypedStorage" else torch.serialization.StorageType(name).dtype
    return dtype


class Unpickler(pickle.Unpickler):
    """Python's reader in C, for a pickle that is scanned first, for its opcodes and for what would cost memory.

    Raises NotReadError if it has other opcodes than ``codes``, ends too early, or numbers more objects than it has.
    """

    def __init__(self, content: bytes, codes: Iterable[bytes] = CODES) -> None:
        if problem := scan(content, codes):
            raise NotReadError(problem)
        super().__init__(io.BytesIO(content), encoding="utf-8")


class NotReadError(Exception):
    """A pickle is not read; the message says why."""


class _TorchUnpickler(Unpickler):
    def __init__(self, content: bytes, path: str) -> None:
        super().__init__(content)
        self._path = path
        self.storages: dict[str, Storage] = {}

    def find_class(self, module: str, name: str, /) -> type[Call]:
        path = f"{module}.{name}"
        return _named(path) if len(path) < _LONG_NAME else _named.__wrapped__(path)

    def persistent_load(self, identity: Any, /) -> Storage:
        if isinstance(identity, tuple) and len(identity) == 6 and identity[5] is None:
            identity = identity[:5]  # before torch 1.6: the last one is for views of storages
        if not isinstance(identity, tuple) or len(identity) != 5 or identity[0] != "storage":
            refuse(self._path, f"data.pkl: {identity!r} is not a storage")
        _, kind, key, location, count = identity
        if not (isinstance(key, str) and isinstance(location, str) and type(count) is int and count >= 0):
            refuse(self._path, f"data.pkl: storage {key!r} at {location!r} has {count!r} elements")
        name = path_of(kind).rpartition(".")[2]
        try:
            dtype = dtype_of_storage(name)
        except KeyError:
            refuse(self._path, f"data.pkl: {name!r} is not a type of storage")
        return self.storages.setdefault(key, Storage(key, dtype, location, count * dtype.itemsize))


def read(content: bytes, path: str) -> tuple[Any, list[Storage]]:
    """Parses a pickle. Returns a tree of containers, numbers, strings and recorded calls, and its storages in order.

    Raises:
        FormatError: ``content`` is not a pickle, or one that weights_only would refuse.
    """
    try:
        reader = _TorchUnpickler(content, path)
        root = reader.load()
    except FormatError:
        raise
    except NotReadError as error:
        refuse(path, f"data.pkl: {error}")
    except Exception as error:  # a damaged pickle can raise anything
        refuse(path, f"data.pkl: {type(error).__name__}: {error}")
    return root, list(reader.storages.values())


def tensors(root: Any, path: str) -> Iterator[tuple[str, DenseTensor | OtherTensor]]:
    """Yields each tensor with its name: keys, indices and attributes from the root on, joined by dots.

    A container is walked only once. Raises FormatError for a tensor that does not fit its storage.
    """
    waiting: list[tuple[str, Any, int]] = [("", root, 0)]
    seen = set()
    while waiting:
        name, node, depth = waiting.pop()
        if (described := tensor(node, name, path)) is not None:
            if depth > _DEEPEST:
                refuse(path, f"data.pkl: a tensor is nested in more than {_DEEPEST} levels")
            yield name, described
            continue
        if not isinstance(node, dict | list | tuple | Call) or id(node) in seen:
            continue
        seen.add(id(node))
        try:
            for key, child in reversed(_children(node)):
                # Names that grow with the nesting would take time and memory in proportion to its square.
                longer = name if depth >= _DEEPEST else f"{name}.{key}" if name else str(key)
                waiting.append((longer, child, depth + 1))
        except RecursionError:
            refuse(path, "data.pkl: a key is nested too deeply")


def _children(node: Any) -> list[tuple[Any, Any]]:
    if isinstance(node, dict):
        return list(node.items())
    if isinstance(node, Call):
        state = node.state if isinstance(node.state, dict) else {"__dict__": node.state}
        # the pairs of an ordered dictionary, as Python 2 wrote it, are in its arguments
        return [*enumerate([*node.arguments, *node.elements]), *state.items(), *node.items.items()]
    return list(enumerate(node))


def tensor(call: Any, name: str, path: str) -> DenseTensor | OtherTensor | None:
    """Returns what the pickle says of a tensor if ``call`` makes one, else None. Raises as ``tensors``."""
    if not isinstance(call, Call):
        return None
    module, _, function = call.path.rpartition(".")
    if module not in ("torch._utils", "torch._tensor") or not function.startswith("_rebuild"):
        return None
    if function in ("_rebuild_parameter", "_rebuild_parameter_with_state"):
        data = call.arguments[0] if call.arguments else None
        inner = None
        if isinstance(data, Call) and not data.path.startswith("torch._utils._rebuild_parameter"):
            inner = tensor(data, name, path)
        if isinstance(inner, DenseTensor) and function == "_rebuild_parameter" and len(call.arguments) > 1:
            return DenseTensor(**{**vars(inner), "requires_grad": bool(call.arguments[1]), "parameter": True})
        return OtherTensor(_storages(call))
    places = {"_rebuild_tensor": (4, None, None), "_rebuild_tensor_v2": (6, None, 6), "_rebuild_tensor_v3": (7, 6, 7)}
    if function not in places or call.state is not None:
        return OtherTensor(_storages(call))
    least, dtype_place, metadata_place = places[function]
    try:
        if len(call.arguments) < least:
            raise ValueError(f"{len(call.arguments)} arguments")
        return _described(call.arguments, dtype_place, metadata_place)
    except (ValueError, RecursionError) as error:  # the latter from the message of the former, if deeply nested
        refuse(path, f"data.pkl: tensor {name!r}: {error}")


def _described(arguments: tuple[Any, ...], dtype_place: int | None, metadata_place: int | None) -> DenseTensor:
    storage, offset, shape, stride = arguments[:4]
    if not isinstance(storage, Storage):
        raise ValueError("has no storage")
    if isinstance(shape, Call) and shape.path == "torch.Size":
        shape = shape.arguments[0] if shape.arguments else ()
    if not isinstance(shape, list | tuple) or not isinstance(stride, list | tuple):
        raise ValueError(f"size {shape!r}, stride {stride!r}")
    shape, stride = tuple(shape), tuple(stride)
    numbers = (offset, *shape, *stride)
    if len(shape) != len(stride) or not all(type(number) is int and 0 <= number < 2**63 for number in numbers):
        raise ValueError(f"offset {offset!r}, size {shape!r}, stride {stride!r}")
    dtype = storage.dtype
    if dtype_place is not None:
        named = getattr(torch, path_of(arguments[dtype_place]).removeprefix("torch."), None)
        if not isinstance(named, torch.dtype):
            raise ValueError("has no dtype")
        dtype = named
    metadata = arguments[metadata_place] if metadata_place and len(arguments) > metadata_place else None
    requires_grad = len(arguments) > 4 and bool(arguments[4])
    marks = dict(metadata) if isinstance(metadata, Mapping) else {}
    dense = DenseTensor(storage, dtype, offset, shape, stride, requires_grad, parameter=False, metadata=marks)
    if dense.extent[1] > storage.size:
        raise ValueError(
            f"size {shape} and stride {stride} from {offset} on reach beyond the {storage.size} bytes of its storage"
        )
    return dense


def _storages(call: Call) -> list[Storage]:
    """Returns all storages that appear anywhere in the tree."""
    by_key: dict[str, Storage] = {}
    waiting: list[Any] = [call]
    seen = set()
    while waiting:
        node = waiting.pop()
        if isinstance(node, Storage):
            by_key[node.key] = node
        elif isinstance(node, dict | list | tuple | Call) and id(node) not in seen:
            seen.add(id(node))
            waiting.extend(child for _, child in _children(node))
    return list(by_key.values())
