"""Loads the object in a file of ``torch.save``; its storages are read into their final place beforehand.

Pickles are read as ``torch.load(weights_only=True)`` reads them: it calls only torch's own functions that it considers
safe, and what was given to ``torch.serialization.add_safe_globals``.
"""

from __future__ import annotations

import functools
import io
import pickle
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple, TypeAlias

import torch
import torch._weights_only_unpickler

from nvme_ops.base.errors import FormatError, UnsafeError
from nvme_ops.base.native import native
from nvme_ops.base.text import printable
from nvme_ops.checkpoint import torch_read
from nvme_ops.checkpoint.torch_open import TorchFile, require_record, verify_by_zipfile, verify_others
from nvme_ops.formats import torch_pickle
from nvme_ops.formats.torch_pickle import CODES, NotReadError, Unpickler, dtype_of_storage
from nvme_ops.formats.torch_zip import PICKLE, Archive
from nvme_ops.io.file import open as open_file
from nvme_ops.io.tensors import collector_paused

#: The byte range of a storage that is to be read, and the location that it was saved from.
_Wanted: TypeAlias = tuple[int, int, str]


@collector_paused
def everything(file: TorchFile, map_location: Any, verify: bool) -> Any:
    """Loads the object. ``map_location`` is that of ``torch.load``."""
    archive = file.archive()
    if archive is None:
        return _load_by_torch(file, map_location, verify)
    if verify:
        verify_others(archive)
    content = archive.pickled()
    if isinstance(map_location, Mapping):
        map_location = dict(map_location)  # torch accepts no other mapping
    fetch = functools.partial(_fetch_whole, archive, map_location)
    if not callable(map_location) and str(map_location).partition(":")[0] != "meta":
        with suppress(NotReadError):  # then torch reads it, which is slower
            return make(content, functools.partial(_device_of, map_location, file.path), fetch)
    zip_file = torch_read.Zip(archive, fetch(_whole(archive, map_location, content)))
    if callable(map_location):
        map_location = _noting(map_location, zip_file.failures)
    with _errors_naming(f"{file.path}: {PICKLE}", zip_file.failures):
        return torch.serialization._load(
            zip_file, map_location, torch._weights_only_unpickler, PICKLE, encoding="utf-8"
        )


def _whole(archive: Archive, map_location: Any, content: bytes) -> dict[str, _Wanted]:
    """Returns the byte range of each record of a storage, all of it, and the location."""
    if isinstance(map_location, Mapping) or (map_location is None and _mentions_device(content)):
        _, mentioned = torch_pickle.read(content, archive.path)
        return {storage.record: (0, storage.size, storage.location) for storage in mentioned}
    return {name: (0, entry.size, "cpu") for name, entry in archive.records.items() if name.startswith("data/")}


def _mentions_device(content: bytes) -> bool:
    """Returns whether a storage may have been saved from another device. If that is missed, torch moves it later."""
    names = ["cuda", "xpu", "mps", "hpu", "mtia", "meta", torch._C._get_privateuse1_backend_name()]
    return any(name.encode() in content for name in names)


def _fetch_whole(archive: Archive, map_location: Any, wanted: Mapping[str, _Wanted]) -> Callable[[str], torch.Tensor]:
    """Does what ``fetcher`` does. Raises FormatError for a record that is not as large as its storage."""
    for record, (_, size, _) in wanted.items():
        require_record(archive, record, size)
    return fetcher(archive, map_location, wanted)


def fetcher(archive: Archive, map_location: Any, wanted: Mapping[str, _Wanted]) -> Callable[[str], torch.Tensor]:
    """Returns what maps a record to a tensor over the ``wanted`` byte range of its storage, which has that location.

    All are read now, onto the device to which ``map_location`` maps the location. If that is a function, it decides
    later, and each is read into host memory when it is asked for.
    """
    if callable(map_location):
        host = torch.device("cpu")
        return lambda name: torch_read.read(archive, {name: wanted[name][:2]}, host)[name]
    device_of = functools.cache(functools.partial(_device_of, map_location, archive.path))
    by_device: dict[torch.device, dict[str, tuple[int, int]]] = {}
    for record, (start, end, location) in wanted.items():
        by_device.setdefault(device_of(location), {})[record] = start, end
    tensors: dict[str, torch.Tensor] = {}
    for device, extents in by_device.items():
        tensors |= torch_read.read(archive, extents, device)
    return tensors.__getitem__


def _device_of(map_location: Any, path: str, location: str) -> torch.device:
    """Returns the device on which torch restores a storage of this location."""
    if isinstance(map_location, Mapping):
        location = map_location.get(location, location)
    elif map_location is not None:
        location = str(map_location)
    try:
        restored: torch.UntypedStorage = torch.serialization.default_restore_location(torch.UntypedStorage(0), location)
        return restored.device
    except RuntimeError as error:
        unknown = "don't know how to restore" in str(error)  # otherwise this machine has no such device
        raise (FormatError if unknown else RuntimeError)(f"{path}: {PICKLE}: {error}") from None


def _noting(call: Callable[..., Any], failures: list[Exception]) -> Callable[..., Any]:
    """Returns ``call``, which then notes what it raises."""

    def called(*arguments: Any) -> Any:
        try:
            return call(*arguments)
        except Exception as error:
            failures.append(error)
            raise

    return called


@contextmanager
def _errors_naming(where: str, failures: Sequence[Exception] = ()) -> Iterator[None]:
    """Turns what torch raises about a file into errors that begin with ``where``, except these ``failures``."""
    try:
        yield
    except (FormatError, OSError, NotImplementedError):
        raise
    except pickle.UnpicklingError as error:
        raise UnsafeError(f"{where}: {error}") from None
    except Exception as error:  # a damaged pickle can raise anything
        if error in failures:
            raise
        kind = next((made for known, made in _FORMAT_ERRORS.items() if isinstance(error, known)), FormatError)
        raise kind(f"{where}: {str(error) or type(error).__name__}") from error


def _text(error: Exception) -> str:
    return printable(error.args[0], lines=True)


# FormatErrors that are also of torch's type, for callers that expect that.
_FORMAT_ERRORS: dict[type[Exception], type[FormatError]] = {
    known: type("FormatError", (FormatError, known), {"__module__": FormatError.__module__, "__str__": _text})
    for known in (NotImplementedError, RuntimeError, EOFError, TypeError, KeyError, AttributeError, MemoryError)
}


def _load_by_torch(file: TorchFile, map_location: Any, verify: bool) -> Any:
    """Loads legacy and compressed files, and those of the other byte order, by torch alone, through a stream."""
    if verify:
        verify_by_zipfile(file)
    with open_file(file.path, handle=file.handle) as stream, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*TorchScript archive.*")  # the error says so, too
        with _errors_naming(file.path):
            return torch.load(io.BufferedReader(stream), map_location=map_location, weights_only=True)


_CODES = [code for code in CODES if code != pickle.NEWOBJ]


class _TypedStorage(NamedTuple):
    """A storage, by its record, the dtype of its elements, and the device where it will be."""

    record: str
    dtype: torch.dtype
    device: torch.device


#: Reads storages, and returns what maps a record to a tensor over its storage in the final place.
Fetch = Callable[[Mapping[str, _Wanted]], Callable[[str], torch.Tensor]]


def make(content: bytes, device_of: Callable[[str], torch.device], fetch: Fetch) -> Any:
    """Builds the object that ``torch.load(weights_only=True)`` would build.

    Args:
        content: the pickle.
        device_of: maps a location to the device of its storage.
        fetch: called once, after the whole pickle was read.

    Raises:
        NotReadError: the pickle is damaged, or needs more than this reader supports. Nothing that it names was called.
        FormatError, OSError, MemoryError: as ``device_of`` and ``fetch`` raise them.
    """
    maker = _Maker(content, device_of)
    try:
        made = maker.load()
        maker.fill(fetch)
        return made
    except (NotReadError, FormatError, OSError, MemoryError):
        raise
    except Exception as error:  # a damaged pickle can raise anything
        raise NotReadError(str(error)) from error
    finally:
        # It has methods of the maker. The cycle, and so all tensors, would stay until Python's garbage collector runs,
        # and for ever where that does not look into a memo (Python 3.11.2).
        maker.memo = {}


class _Function:
    """Stands for a function of torch's: a pickle can call it, but cannot set its attributes."""

    __slots__ = ("_function",)

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __call__(self, *arguments: Any) -> Any:
        return self._function(*arguments)

    def __setstate__(self, _: Any) -> None:
        raise NotReadError("the state of a function")


_CLASSES = {("collections", "OrderedDict"): OrderedDict, ("torch", "Size"): torch.Size}
_REBUILT_BY = {  # torch's functions and what stands for them
    "_rebuild_tensor_v2": "_tensor",
    "_rebuild_tensor_v3": "_tensor_of_dtype",
    "_rebuild_parameter": "_parameter",
}


class _Maker(Unpickler):
    """Builds tensors by the methods below, which stand for torch's functions; calls nothing else."""

    def __init__(self, content: bytes, device_of: Callable[[str], torch.device]) -> None:
        super().__init__(content, _CODES)
        self._device_of = functools.cache(device_of)
        self._storages: dict[str, _Wanted] = {}  # by record
        self._kinds: dict[Any, _TypedStorage] = {}
        self._empty: dict[tuple[torch.dtype, torch.device], torch.Tensor] = {}
        self._tensors: list[torch.Tensor] = []
        self._views: list[tuple[str, int, Any, Any]] = []  # for each tensor: record, offset, size, stride
        self._numbers: dict[int, int] = {}  # indices of tensors by their id(), valid while _tensors keeps them alive
        self._unused = 0  # storages that no tensor uses

    def find_class(self, module: str, name: str, /) -> Any:
        """Returns what the opcode ``GLOBAL`` puts on the stack."""
        if module == "torch._utils" and name in _REBUILT_BY:
            return _Function(getattr(self, _REBUILT_BY[name]))
        if (module, name) in _CLASSES:
            return _CLASSES[module, name]
        if module in ("torch", "torch.storage") and name.endswith("Storage"):
            return dtype_of_storage(name)
        value = getattr(torch, name, None) if module == "torch" else None
        if isinstance(value, torch.dtype):
            return value
        raise NotReadError(f"{module}.{name}")

    def persistent_load(self, identity: Any, /) -> _TypedStorage:
        """Returns what stands for a storage until ``fill``."""
        self._unused += 1
        storage = self._kinds.get(identity)
        if storage is None:
            _, dtype, key, location, count = identity
            record, whole = "data/" + key, (0, count * dtype.itemsize, location)
            if self._storages.setdefault(record, whole) != whole:
                raise NotReadError("a storage that is described in two ways")
            storage = self._kinds[identity] = _TypedStorage(record, dtype, self._device_of(location))
        return storage

    def _tensor(
        self,
        typed: _TypedStorage,
        offset: int,
        size: Any,
        stride: Any,
        requires_grad: bool,
        hooks: Any,
        metadata: Any = None,
    ) -> torch.Tensor:
        self._unused -= 1
        record, dtype, device = typed
        empty = self._empty.get((dtype, device))
        if empty is None:
            empty = self._empty[dtype, device] = torch.empty(0, dtype=dtype, device=device)
        tensor = empty.data
        self._numbers[id(tensor)] = len(self._tensors)
        self._tensors.append(tensor)
        self._views.append((record, offset, size, stride))
        if requires_grad:
            tensor.requires_grad = True
        if metadata:
            torch._utils.set_tensor_metadata(tensor, metadata)
        if hooks:
            tensor._backward_hooks = hooks
        return tensor

    def _tensor_of_dtype(
        self, typed: _TypedStorage, offset: int, size: Any, stride: Any, requires_grad: bool, hooks: Any,
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
        if self._unused:
            raise NotReadError("a storage by itself")
        if any(empty.untyped_storage().nbytes() for empty in self._empty.values()):
            raise NotReadError("a tensor that the pickle has changed")
        owner_of = fetch(self._storages)
        if self._views:
            records, *views = zip(*self._views, strict=True)
            native().set_storages(self._tensors, list(map(owner_of, records)), *views)
