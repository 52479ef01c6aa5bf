"""Reads what a pickle of ``torch.save`` describes, without making any of it: nothing that it names is called."""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from nvme_ops.errors import FormatError

#: What torch's own reader takes with weights_only; anything else ends the reading.
CODES = (
    pickle.APPEND, pickle.APPENDS, pickle.BINFLOAT, pickle.BINGET, pickle.BININT, pickle.BININT1, pickle.BININT2,
    pickle.BINPERSID, pickle.BINPUT, pickle.BINUNICODE, pickle.BUILD, pickle.EMPTY_DICT, pickle.EMPTY_LIST,
    pickle.EMPTY_SET, pickle.EMPTY_TUPLE, pickle.GLOBAL, pickle.LONG1, pickle.LONG_BINGET, pickle.LONG_BINPUT,
    pickle.MARK, pickle.NEWFALSE, pickle.NEWOBJ, pickle.NEWTRUE, pickle.NONE, pickle.PROTO, pickle.REDUCE,
    pickle.SETITEM, pickle.SETITEMS, pickle.SHORT_BINSTRING, pickle.STOP, pickle.TUPLE, pickle.TUPLE1, pickle.TUPLE2,
    pickle.TUPLE3,
)  # fmt: skip


@dataclass(frozen=True)
class Storage:
    """A storage that the pickle refers to; its bytes are the record ``data/key``."""

    key: str
    dtype: torch.dtype
    location: str
    size: int

    @property
    def record(self) -> str:
        """Its name in the archive."""
        return f"data/{self.key}"


@dataclass(frozen=True)
class Described:
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
        """The bytes of the storage from its first element to the end of its last."""
        if 0 in self.shape:
            return 0, 0
        reach = sum((length - 1) * step for length, step in zip(self.shape, self.stride, strict=True))
        start = self.offset * self.dtype.itemsize
        return start, start + (reach + 1) * self.dtype.itemsize

    @property
    def contiguous(self) -> bool:
        """Whether its elements follow each other in the file as they do in a contiguous tensor."""
        expected = 1
        for length, step in zip(reversed(self.shape), reversed(self.stride), strict=True):
            if length != 1 and step != expected:
                return 0 in self.shape
            expected *= length
        return True


@dataclass
class Other:
    """A tensor that is no plain view of one storage: sparse, quantized, nested, of a subclass."""

    storages: list[Storage]


class Named:
    """What the pickle calls ``path``. Calling it makes a note of the call."""

    def __init__(self, module: str, name: str) -> None:
        self.path = f"{module}.{name}"

    def __call__(self, *arguments: Any) -> Call:
        """What is noted instead."""
        return Call(self, arguments)


class Call:
    """The note: what was to be called, with what, and what was to be put into the result."""

    def __init__(self, function: Any, arguments: tuple[Any, ...]) -> None:
        self.path = function.path if isinstance(function, Named) else ""
        self.arguments = arguments
        self.items: dict[Any, Any] = {}
        self.elements: list[Any] = []
        self.state: Any = None

    def __setitem__(self, key: Any, value: Any) -> None:
        self.items[key] = value

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def extend(self, elements: list[Any]) -> None:
        """What the pickle does to lists."""
        self.elements.extend(elements)

    def append(self, element: Any) -> None:
        """What the pickle does to lists."""
        self.elements.append(element)


class _Reader(pickle._Unpickler):
    """Python's own, which has no table that a large number in the file could make large."""

    def __init__(self, content: bytes, path: str) -> None:
        super().__init__(io.BytesIO(content), encoding="utf-8")
        self.file_path = path
        self.storages: dict[Any, Storage] = {}

    stack: list[Any]  # Python's

    def find_class(self, module: str, name: str) -> Any:
        return Named(module, name)

    def persistent_load(self, identity: Any) -> Storage:
        if not isinstance(identity, tuple) or len(identity) != 5 or identity[0] != "storage":
            raise FormatError(f"{self.file_path}: data.pkl: {identity!r} is no storage")
        _, kind, key, location, count = identity
        if not (isinstance(key, str) and isinstance(location, str) and type(count) is int and count >= 0):
            raise FormatError(f"{self.file_path}: data.pkl: storage {key!r} at {location!r} has {count!r} elements")
        dtype = self._dtype(kind)
        return self.storages.setdefault(key, Storage(key, dtype, location, count * dtype.itemsize))

    def _dtype(self, kind: Any) -> torch.dtype:
        name = kind.path.rpartition(".")[2] if isinstance(kind, Named) else ""
        if name == "UntypedStorage":
            return torch.uint8
        try:
            dtype: torch.dtype = torch.serialization.StorageType(name).dtype
        except KeyError:
            raise FormatError(f"{self.file_path}: data.pkl: {name!r} is no type of storage") from None
        return dtype

    def new_object(self) -> None:
        """For ``NEWOBJ``: Python would look into the class."""
        arguments = self.stack.pop()
        self.stack[-1] = Call(self.stack[-1], tuple(arguments))

    dispatch: ClassVar[dict[int, Any]] = {
        **{code[0]: pickle._Unpickler.dispatch[code[0]] for code in CODES},
        pickle.NEWOBJ[0]: new_object,
    }


def read(content: bytes, path: str) -> tuple[Any, list[Storage]]:
    """The object as a tree of containers, numbers, strings and notes, and the storages in the order of their mention.

    Raises:
        FormatError: bytes that are no pickle, or none that weights_only would take.
    """
    reader = _Reader(content, path)
    try:
        root = reader.load()
    except FormatError:
        raise
    except Exception as error:  # whatever damaged bytes make of an interpreter
        reason = f"code {error} is not allowed" if isinstance(error, KeyError) else f"{type(error).__name__}: {error}"
        raise FormatError(f"{path}: data.pkl: {reason}") from error
    return root, list(reader.storages.values())


def tensors(root: Any, path: str) -> Iterator[tuple[str, Described | Other]]:
    """Each tensor with its name: keys, indices and attributes from the root on, joined by dots.

    A container that is met again is not walked again. Raises FormatError for a tensor that its storage cannot hold.
    """
    waiting: list[tuple[str, Any]] = [("", root)]
    seen = set()
    while waiting:
        name, node = waiting.pop()
        if isinstance(node, Call) and (tensor := _tensor(node, name, path)) is not None:
            yield name, tensor
            continue
        if not isinstance(node, dict | list | tuple | Call) or id(node) in seen:
            continue
        seen.add(id(node))
        waiting.extend((f"{name}.{key}" if name else str(key), child) for key, child in reversed(_children(node)))


def _children(node: Any) -> list[tuple[Any, Any]]:
    if isinstance(node, dict):
        return list(node.items())
    if isinstance(node, Call):
        state = node.state if isinstance(node.state, dict) else {"__dict__": node.state}
        # the pairs of an ordered dictionary, as Python 2 wrote it, are in its arguments
        return [*enumerate([*node.arguments, *node.elements]), *state.items(), *node.items.items()]
    return list(enumerate(node))


def _tensor(call: Call, name: str, path: str) -> Described | Other | None:
    module, _, function = call.path.rpartition(".")
    if module not in ("torch._utils", "torch._tensor") or not function.startswith("_rebuild"):
        return None
    if function in ("_rebuild_parameter", "_rebuild_parameter_with_state"):
        data = call.arguments[0] if call.arguments else None
        inner = None
        if isinstance(data, Call) and not data.path.startswith("torch._utils._rebuild_parameter"):
            inner = _tensor(data, name, path)
        if isinstance(inner, Described) and function == "_rebuild_parameter" and len(call.arguments) > 1:
            return Described(**{**vars(inner), "requires_grad": bool(call.arguments[1]), "parameter": True})
        return Other(_storages(call))
    places = {"_rebuild_tensor": (4, None, None), "_rebuild_tensor_v2": (6, None, 6), "_rebuild_tensor_v3": (7, 6, 7)}
    if function not in places or call.state is not None:
        return Other(_storages(call))
    least, dtype_place, metadata_place = places[function]
    try:
        if len(call.arguments) < least:
            raise ValueError(f"{len(call.arguments)} arguments")
        return _described(call.arguments, dtype_place, metadata_place)
    except ValueError as error:
        raise FormatError(f"{path}: data.pkl: tensor {name!r}: {error}") from None


def _described(arguments: tuple[Any, ...], dtype_place: int | None, metadata_place: int | None) -> Described:
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
        named = getattr(torch, getattr(arguments[dtype_place], "path", "").removeprefix("torch."), None)
        if not isinstance(named, torch.dtype):
            raise ValueError("has no dtype")
        dtype = named
    metadata = arguments[metadata_place] if metadata_place and len(arguments) > metadata_place else None
    found = Described(
        storage=storage,
        dtype=dtype,
        offset=offset,
        shape=shape,
        stride=stride,
        requires_grad=bool(arguments[4]) if len(arguments) > 4 else False,
        parameter=False,
        metadata=dict(metadata) if isinstance(metadata, Mapping) else {},
    )
    if found.extent[1] > storage.size:
        raise ValueError(
            f"size {shape} and stride {stride} from {offset} on reach beyond the {storage.size} bytes of its storage"
        )
    return found


def _storages(call: Call) -> list[Storage]:
    """All that are mentioned anywhere in it."""
    found: dict[str, Storage] = {}
    waiting: list[Any] = [call]
    seen = set()
    while waiting:
        node = waiting.pop()
        if isinstance(node, Storage):
            found[node.key] = node
        elif isinstance(node, dict | list | tuple | Call) and id(node) not in seen:
            seen.add(id(node))
            waiting.extend(child for _, child in _children(node))
    return list(found.values())
