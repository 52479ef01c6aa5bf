"""Loads the object of a file of ``torch.save``, its storages read to where they stay before torch asks for them.

Pickles are read as ``torch.load(weights_only=True)`` reads them: nothing that ``torch.serialization.add_safe_globals``
was not told of is ever called.
"""

from __future__ import annotations

import io
import pickle
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
import torch._weights_only_unpickler

from nvme_ops import collector
from nvme_ops.checkpoint import torch_plain, torch_read
from nvme_ops.checkpoint.torch_open import PICKLE, TorchFile, require_record
from nvme_ops.checkpoint.torch_verify import require_undamaged, verify_by_zipfile, verify_others
from nvme_ops.checkpoint.torch_zip import Archive
from nvme_ops.errors import FormatError, UnsafeError
from nvme_ops.file import open as open_file
from nvme_ops.formats import torch_pickle
from nvme_ops.text import printable

# Bytes of storages that are read at a time for a function that decides where they go; as many are on their way then.
_AHEAD = 8 << 20


@collector.paused()
def everything(file: TorchFile, map_location: Any, verify: bool) -> Any:
    """The object, its storages where ``map_location``, as of ``torch.load``, says."""
    archive = file.archive()
    if archive is None:
        return _load_by_torch(file, map_location, verify)
    if verify:
        verify_others(file, archive)
    content = file.pickle(archive)
    if isinstance(map_location, Mapping):
        map_location = dict(map_location)  # what torch looks for
    zip_file = torch_read.Zip(archive, file.handle, _fetcher(file, archive, map_location, content, verify))
    if callable(map_location):
        map_location = _noting_failures(map_location, zip_file)
    elif str(map_location).partition(":")[0] != "meta":
        with suppress(_UnusualError):
            return _plain(zip_file, content, map_location, file.path)
    with _in_words(f"{file.path}: {PICKLE}", zip_file):
        return torch.serialization._load(
            zip_file, map_location, torch._weights_only_unpickler, PICKLE, encoding="utf-8"
        )


def _plain(zip_file: torch_read.Zip, content: bytes, map_location: Any, path: str) -> Any:
    """Most objects, faster than torch. Raises ``_UnusualError`` for all others, and for what is wrong with them."""
    only_cpu = map_location is None and not _mentions_device(content)
    devices: dict[str, torch.device] = {}

    def device_of(location: str) -> torch.device:
        if only_cpu and location != "cpu":
            raise torch_pickle.NotReadError(location)
        if location not in devices:
            devices[location] = _device_of(map_location, location, path)
        return devices[location]

    try:
        return torch_plain.make(content, device_of, lambda name, size, _: zip_file.storage(name, size))
    except (FormatError, OSError, MemoryError):
        raise
    except Exception as error:
        raise _UnusualError from error


class _UnusualError(Exception):
    pass


def _fetcher(
    file: TorchFile, archive: Archive, map_location: Any, content: bytes, verify: bool
) -> Callable[[str], torch.Tensor]:
    """Gives the storages. All are read at once, to where they stay, unless a function decides on that."""

    def begin(names: Iterable[str], device: torch.device) -> Callable[[], dict[str, torch.Tensor]]:
        reading = torch_read.begin(archive, file.handle, torch_read.whole(archive, names), device, file.mapped)

        def finish() -> dict[str, torch.Tensor]:
            found = reading()
            if verify and device.type != "meta":
                require_undamaged(file, archive, torch_read.damaged(archive, found))
            return found

        return finish

    def read_now(names: Iterable[str], device: torch.device) -> dict[str, torch.Tensor]:
        return begin(names, device)()

    data = [name for name in archive.records if name.startswith("data/")]
    if callable(map_location):
        return _ReadAhead(archive, data, lambda names: begin(names, torch.device("cpu"))).fetch
    if map_location is None and not _mentions_device(content):
        return read_now(data, torch.device("cpu")).__getitem__
    if isinstance(map_location, str | torch.device):
        return read_now(data, _device_of(map_location, "", file.path)).__getitem__
    _, mentioned = torch_pickle.read(content, file.path)
    for each in mentioned:
        require_record(archive, each)
    found: dict[str, torch.Tensor] = {}
    locations = {each.record: each.location for each in mentioned}
    for device, names in by_device(file, locations, map_location).items():
        found.update(read_now(names, device))
    return found.__getitem__


def _mentions_device(content: bytes) -> bool:
    """Whether the pickle may say that a storage lies elsewhere than on the CPU. torch moves it if one yet does."""
    names = ["cuda", "xpu", "mps", "hpu", "mtia", "meta", torch._C._get_privateuse1_backend_name()]
    return any(name.encode() in content for name in names)


def by_device(file: TorchFile, locations: Mapping[str, str], map_location: Any) -> dict[torch.device, list[str]]:
    """The records that go to each device."""
    found: dict[torch.device, list[str]] = {}
    devices: dict[str, torch.device] = {}
    for record, location in locations.items():
        if location not in devices:
            devices[location] = _device_of(map_location, location, file.path)
        found.setdefault(devices[location], []).append(record)
    return found


def _device_of(map_location: Any, location: str, path: str) -> torch.device:
    """Where torch puts a storage of this location."""
    if isinstance(map_location, Mapping):
        location = map_location.get(location, location)
    elif map_location is not None:
        location = str(map_location)
    try:
        restored: torch.UntypedStorage = torch.serialization.default_restore_location(torch.UntypedStorage(0), location)
        return restored.device
    except RuntimeError as error:
        unknown = "don't know how to restore" in str(error)  # otherwise there is no such device here
        raise (FormatError if unknown else RuntimeError)(f"{path}: {PICKLE}: {error}") from None


class _ReadAhead:
    """Storages in the order of the file, some at a time, each given away once, while the next ones are read.

    Args:
        archive: has the records.
        names: of all that may be asked for.
        begin: starts to read some; what it returns waits for them.
    """

    def __init__(
        self,
        archive: Archive,
        names: Sequence[str],
        begin: Callable[[Sequence[str]], Callable[[], dict[str, torch.Tensor]]],
    ) -> None:
        self._archive, self._begin = archive, begin
        self._waiting = dict.fromkeys(sorted(names, key=lambda name: archive.records[name].header))
        self._ready: dict[str, torch.Tensor] = {}
        self._under_way: tuple[set[str], Callable[[], dict[str, torch.Tensor]]] | None = None

    def fetch(self, name: str) -> torch.Tensor:
        """Return the storage of a record."""
        if name not in self._ready:
            if self._under_way is None or name not in self._under_way[0]:
                self._ready.update(self._begin(self._next(name))())
            else:
                self._ready.update(self._under_way[1]())
                self._under_way = None
        if self._under_way is None and self._waiting:
            names = self._next(next(iter(self._waiting)))
            self._under_way = set(names), self._begin(names)
        return self._ready.pop(name)

    def _next(self, name: str) -> list[str]:
        """This one, and others in the file's order while they are little."""
        self._waiting.pop(name, None)
        chosen, size = [name], self._archive.records[name].size
        for other in self._waiting:
            size += self._archive.records[other].size
            if size > _AHEAD:
                break
            chosen.append(other)
        for each in chosen:
            self._waiting.pop(each, None)
        return chosen


def _noting_failures(map_location: Callable[..., Any], zip_file: torch_read.Zip) -> Callable[..., Any]:
    def called(storage: Any, location: str) -> Any:
        try:
            return map_location(storage, location)
        except Exception as error:
            zip_file.failure = error
            raise

    return called


@contextmanager
def _in_words(where: str, zip_file: torch_read.Zip | None = None) -> Iterator[None]:
    """Turns what torch raises about a file into errors that name it."""
    try:
        yield
    except (FormatError, OSError, NotImplementedError):
        raise
    except pickle.UnpicklingError as error:
        raise UnsafeError(f"{where}: {error}") from None
    except Exception as error:  # whatever damaged bytes make of an interpreter
        if zip_file is not None and error is zip_file.failure:
            raise
        reason = str(error) or type(error).__name__
        raise _format_error_of(error)(f"{where}: {reason}") from error


def _text(error: Exception) -> str:
    return printable(error.args[0], lines=True)


# A FormatError that those who expect torch's type catch too.
_FORMAT_ERRORS: dict[type[Exception], type[FormatError]] = {
    known: type("FormatError", (FormatError, known), {"__module__": FormatError.__module__, "__str__": _text})
    for known in (NotImplementedError, RuntimeError, EOFError, TypeError, KeyError, AttributeError, MemoryError)
}


def _format_error_of(error: Exception) -> type[FormatError]:
    return next((made for known, made in _FORMAT_ERRORS.items() if isinstance(error, known)), FormatError)


def _load_by_torch(file: TorchFile, map_location: Any, verify: bool) -> Any:
    """Legacy files, compressed ones, those of the other byte order: through a stream, by torch alone."""
    if verify:
        verify_by_zipfile(file)
    with open_file(file.path, handle=file.handle) as stream, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*TorchScript archive.*")  # the error says it
        with _in_words(file.path):
            return torch.load(io.BufferedReader(stream), map_location=map_location, weights_only=True)
