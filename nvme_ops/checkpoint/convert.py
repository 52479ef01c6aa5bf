"""Converts the tensors of a checkpoint to another format, piece by piece: ``nvme-checkpoint convert``."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any

import torch

from nvme_ops.base.errors import ChangedFileError, ChecksumError, named
from nvme_ops.base.settings import LARGE
from nvme_ops.base.text import size_words
from nvme_ops.checkpoint import FORMATS, safetensors_file, torch_file, torch_load
from nvme_ops.checkpoint.contents import OnProgress, damaged
from nvme_ops.checkpoint.format import format_name, plan_for
from nvme_ops.checkpoint.framed import SMALL
from nvme_ops.checkpoint.modules import is_strided, with_ties, without_ties
from nvme_ops.checkpoint.packed_model import PackedModel, beside
from nvme_ops.checkpoint.request import FileFormat, SaveOptions, entries_error, listed
from nvme_ops.checkpoint.sharded import from_one_save
from nvme_ops.checkpoint.torch_open import TorchFile, require_record
from nvme_ops.filesystem.publication import OpenFiles, open_leased
from nvme_ops.formats import KINDS, Kind, safetensors_format, torch_pickle
from nvme_ops.formats.integrity import INDEX, ShardEntry
from nvme_ops.formats.mistaken import refuse
from nvme_ops.formats.sharded_index import ShardedIndex, resolved, shards_of
from nvme_ops.formats.torch_pickle import Call, DenseTensor
from nvme_ops.formats.torch_zip import Archive, is_zip
from nvme_ops.io.engine import Priority
from nvme_ops.io.file import shared_handle
from nvme_ops.io.tensors import cut, empty, is_dense
from nvme_ops.memory.ring import Place, Ring
from nvme_ops.offload.weights.stored import StoredTensor, Weights, stored_tensors
from nvme_ops.storage.source import FileExtent, Source, WeightFile

# The most bytes that a byte of the source may become, where they are more than _PLENTY.
_MAX_EXPANSION, _PLENTY = 16, 1 << 30
_TRIES = 4  # while saves replace the source
_Begin = Callable[[int], contextlib.AbstractContextManager[OnProgress]]


@dataclass
class Conversion:
    """Describes the checkpoint that was written."""

    path: str  # the file, or the index
    tensors: int
    bytes: int
    tied: dict[str, str] = field(default_factory=dict)  # names that are not stored -> names that have their values
    kept: dict[str, int] = field(default_factory=dict)  # with ``to=``: matrices that stay as they are, and their bytes
    error: float = 0.0  # with ``to=``: root mean square error of what was packed, relative to its values


def convert(
    source: str,
    target: str,
    *,
    key: str = "",
    format: str | None = None,
    max_shard_size: int | str | None = None,
    checksums: bool = True,
    verify: bool = True,
    to: Kind | None = None,
    exclude: str | Sequence[str] = (),
    on_progress: _Begin | None = None,
) -> Conversion:
    """Writes the tensors of one checkpoint as another one, atomically, in about 80 MiB of memory.

    safetensors files store a tensor with several names under one of them; the other names are in the metadata, as when
    ``nvme_ops.save`` saves a module. Files of ``torch.save`` that are compressed, older than torch 1.6 or have other
    tensors than dense ones are loaded as a whole.

    Args:
        source: a file of safetensors or of ``torch.save``, an index, a folder with one of these, or one of DCP.
        target: a path as for ``nvme_ops.save``: its suffix chooses the format.
        key: the entry with the tensors, if a file of ``torch.save`` or of DCP has others: ``"model"``, or ``"a.b"``.
        format: the format of the target, instead of the one that its name implies.
        max_shard_size: as in ``nvme_ops.save``.
        checksums: as in ``nvme_ops.save``.
        verify: first compare the checksums that the source has, so that damaged bytes get no new ones.
        to: packs the model in the folder ``source`` as ``"int8"``, ``"int4"`` or ``"mxfp4"``, into a folder that has
            none yet, in the layout of compressed-tensors, by which ``"mxfp4"`` is computed in bfloat16; what else the
            folder has is copied. Needs transformers.
        exclude: names of tensors that then stay as they are, or patterns such as ``"*.visual.*"`` (``fnmatch``).
        on_progress: given the total of bytes, returns a context manager that yields an ``OnProgress``.

    Raises:
        OSError: the source cannot be read, or the target cannot be written.
        FormatError: the source is damaged.
        ChecksumError: some of its tensors do not match their checksums.
        ValueError: the target is the source; the source has no such entry, or one that is not a tensor, or something
            that the format of the target cannot store. With ``to``: the source is no model that transformers has, or
            is quantized already, or the target has one.
    """
    options = SaveOptions(checksums=checksums, max_shard_size=max_shard_size)
    if to is not None:
        if to not in KINDS:
            raise ValueError(f"to must be one of {', '.join(map(repr, KINDS))}, not {to!r}")
        if key or any(map(os.path.isfile, (source, target))) or format_name(target, format) != "sharded":
            raise ValueError("to= packs the model in a folder, into another one")
    elif exclude:
        raise ValueError("exclude= is for to=, which packs weights")
    patterns = [exclude] if isinstance(exclude, str) else exclude
    pack = None if to is None else functools.partial(PackedModel, source, kind=to, exclude=patterns)
    attempt = functools.partial(_convert, source, target, key, format, options, verify, on_progress, pack)
    for _ in range(_TRIES):
        with contextlib.suppress(ChangedFileError):  # such as where a killed save's second name of it is replaced
            return attempt()
    return attempt()


def _convert(
    source: str, target: str, key: str, format: str | None, options: SaveOptions, verify: bool, begin: _Begin | None,
    pack: Callable[..., PackedModel] | None,
) -> Conversion:  # fmt: skip
    weights: Any = Weights()
    model = None
    with contextlib.ExitStack() as ends:
        copy = None if pack is None else ends.enter_context(beside(source, target))
        reader = _Reader(weights, ends, verify)
        is_dcp = os.path.exists(os.path.join(source, ".metadata"))
        tensors, metadata = reader.read_dcp(source, key) if is_dcp else reader.read(resolved(source), key)
        tied: dict[str, str] = {}
        if is_torch := format_name(target, format) == "torch":
            tensors, metadata = with_ties(tensors, metadata)
        else:
            tensors, tied = without_ties(_named(tensors, source))
        if pack is not None and copy is not None:
            model = pack(tensors, weights)
            tensors = model.tensors
            copy(model.settings)
        plan = plan_for(named(target), tensors, format, replace(options, metadata={**metadata, **tied}))
        path = plan.target(target)
        for replaced in _replaced(path):
            if os.path.realpath(replaced) in reader.paths:
                raise ValueError(f"{replaced} is part of the source: name another target")
        total = sum(tensor.nbytes for tensor in plan.tensors)
        if total > max(_PLENTY, _MAX_EXPANSION * reader.nbytes):
            name = max(tensors, key=lambda name: tensors[name].nbytes)
            raise ValueError(
                f"{source} would become {size_words(total)}: {name!r} is expanded, each of its elements seen many "
                f"times as {tuple(tensors[name].shape)}, and safetensors holds all one by one: convert it to .pt"
            )
        # as they are written: files of torch begin with small ones
        ordered = sorted(plan.tensors, key=lambda value: is_torch * ((value.nbytes >= LARGE) + (value.nbytes >= SMALL)))
        weights.window = pieces = _Pieces(ordered)
        if begin is not None:
            pieces.on_progress = ends.enter_context(begin(total if model is None else pieces.nbytes))
        ends.callback(pieces.reads.close)
        plan.write(target, shared_handle())
    kept, error = ({}, 0.0) if model is None else (model.kept, model.error)
    return Conversion(path, len(tensors), total, tied, kept, error)


def _replaced(path: str) -> list[str]:
    """Returns the files that writing ``path`` replaces or removes; for an index also its shards, and a single file."""
    suffix = FORMATS["sharded"][0]
    if not path.endswith(suffix):
        return [path]
    folder, name = os.path.split(path)
    stem = name.removesuffix(suffix)
    shards = shards_of(folder, stem) if os.path.isdir(folder) else []
    return [path, *(os.path.join(folder, name) for name in (f"{stem}.safetensors", *shards))]


class _Pieces:
    """Stands for a window: reads the pieces in which tensors are written, each once, ahead of their use.

    Args:
        tensors: in the order in which they are written.
    """

    room = staticmethod(lambda _, nbytes: empty(nbytes, dtype=torch.uint8))

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        # of no more priority, since hardly anything is written while demanded reads are in flight
        ring = Ring(priority=Priority.PREFETCH)
        self.on_progress: OnProgress = lambda _: None  #: gets the bytes of each piece when it is used
        parts = (part for tensor in tensors for part in cut(tensor, ring.piece) if isinstance(part, StoredTensor))
        # without repetitions: all pieces of a transposed tensor are made of all that is stored of it
        order = [next(some) for _, some in itertools.groupby((part.source for part in parts), attrgetter("extents"))]
        places = [Place(file.file, start, nbytes) for source in order for file, start, nbytes in source.extents]
        self.reads = ring.read(shared_handle(), places)  #: to be closed before the files
        self.nbytes = sum(source.nbytes for source in order)  #: of all pieces
        self._order, self._last = iter(order), Source((), torch.uint8, (0,))
        self._values = self._whole = empty(max([0, *(source.nbytes for source in order)]), dtype=torch.uint8)

    def fetch(self, source: Source) -> torch.Tensor:
        """Returns what is stored, valid until another source is fetched."""
        while source.extents != self._last.extents:
            piece = self._last = next(self._order)
            self.on_progress(piece.nbytes)
            try:
                self._values = next(self.reads)
                if self._values.nbytes < piece.nbytes:  # in several places, or larger than a buffer
                    self._values = self._whole[: self._values.nbytes].copy_(self._values)
                while (filled := self._values.nbytes) < piece.nbytes:
                    self._values = self._whole[: filled + (part := next(self.reads)).nbytes]
                    self._values[filled:] = part
            finally:
                for extent in piece.extents:  # only now, after the read, does this cover all of it
                    extent.file.require_unchanged()
        return self._values.view(source.dtype).view(source.shape)


class _Reader:
    """Opens files and describes the tensors in them, without reading their data yet.

    Args:
        weights: reads the tensors later.
        ends: closes the files.
        verify: compare the checksums of files that are loaded as a whole.
    """

    def __init__(self, weights: Weights, ends: contextlib.ExitStack, verify: bool) -> None:
        self._weights, self._ends, self._verify = weights, ends, verify
        self._files = ends.enter_context(OpenFiles())
        self.paths: set[str] = set()  # of the files that were opened
        self.nbytes = 0  # in them

    def read(self, path: str, key: str) -> tuple[dict[Any, torch.Tensor], dict[str, str]]:
        """Returns the tensors by name, and the metadata."""
        if not path.endswith(".index.json"):
            return self._file(path, key)
        return from_one_save(path, lambda index: self._shards(index, key))

    def read_dcp(self, folder: str, key: str) -> tuple[dict[Any, torch.Tensor], dict[str, str]]:
        """Does what ``read`` does for a checkpoint of torch.distributed.checkpoint; ``key``: how the names begin."""
        from nvme_ops.checkpoint.dcp.contents import described  # slow to import
        from nvme_ops.checkpoint.dcp.tensors import sources_of

        listing, metadata = described(folder, self._files)
        if self._verify and (wrong := damaged(listing, files=self._files)):
            raise ChecksumError(folder, wrong)
        sources = sources_of(folder, key, metadata, self._data_file)
        return {
            name: StoredTensor(self._weights, entry) if isinstance(entry, Source) else entry
            for name, entry in sources.items()
        }, {}

    def _data_file(self, path: str, fd: int = -1) -> WeightFile:
        self.paths.add(os.path.realpath(path))
        file = WeightFile(open_leased(path) if fd < 0 else os.dup(fd), path, shared_handle())
        self._ends.callback(file.close)
        self.nbytes += file.size
        return file

    def _shards(self, index: ShardedIndex, key: str) -> tuple[dict[Any, torch.Tensor], dict[str, str]]:
        self._files.close()  # shards of another save
        self.paths, self.nbytes = {os.path.realpath(index.path)}, 0
        if self._verify and index.fits is False:
            raise ChecksumError(index.path, [INDEX])
        shards = index.shards(index.places)
        for shard in shards:  # before one is verified, which may take longer than a save
            with self._files.opened(shard):
                pass
        merged: dict[str, torch.Tensor] = {}
        for shard, names in shards.items():
            tensors, _ = self._file(shard, key, index.part(shard))
            if missing := [name for name in names if name not in tensors]:
                refuse(index.path, f"weight_map says that {missing[0]!r} is in {shard}, and it is not")
            merged.update((name, tensors[name]) for name in names)
        return {name: merged[name] for name in index.places}, index.metadata

    def _file(
        self, path: str, key: str, part: ShardEntry | None = None
    ) -> tuple[dict[Any, torch.Tensor], dict[str, str]]:
        is_torch = not path.endswith(".safetensors")
        with self._files.opened(path) as fd:
            file = self._data_file(path, fd)
        if self._verify:
            self._require_undamaged(path, torch_file if is_torch else safetensors_file, part)
        if is_torch:
            loaded = self._of_torch(file, fd, key)
            file.require_unchanged()  # some may be in memory already
            return loaded
        if key:
            raise ValueError(f"{path}: safetensors files have no nested entries: leave out --key")
        header = safetensors_format.read(fd, path)
        if part is not None:
            part.require(path, header.metadata, False)  # raises if it belongs to another save
        stored = stored_tensors(file, header, self._weights)
        tensors = {
            name: tensor if tensor.nbytes else torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
            for name, tensor in stored
        }
        return tensors, header.metadata

    def _require_undamaged(self, path: str, format: FileFormat, part: ShardEntry | None) -> None:
        try:
            listing = format.contents(path, self._files, part)
        except ValueError:
            if format is safetensors_file:
                raise
            return  # compressed, so verified when it is loaded as a whole; or older, without checksums
        if wrong := damaged(listing, files=self._files):
            raise ChecksumError(path, wrong)

    def _of_torch(self, file: WeightFile, fd: int, key: str) -> tuple[dict[Any, torch.Tensor], dict[str, str]]:
        opened = TorchFile(fd, file.path, shared_handle())
        archive = opened.archive()
        metadata = {} if archive is None else torch_file.metadata(archive)
        if archive is not None:
            root, _ = torch_pickle.read(archive.pickled(), file.path)
            entries = _entry(root, key, file.path)
            described = {name: torch_pickle.tensor(entry, str(name), file.path) for name, entry in entries.items()}
            _require_tensors(entries, [name for name, tensor in described.items() if tensor is None], file.path)
            plain = {
                name: tensor
                for name, tensor in described.items()
                if isinstance(tensor, DenseTensor) and type(name) in (str, int)  # others are recorded calls
            }
            if len(plain) == len(entries) and not any(tensor.metadata for tensor in plain.values()):
                return self._views(file, archive, plain), metadata
        verify = self._verify and is_zip(fd)  # others have no checksums
        loaded = _entry(torch_load.everything(opened, "cpu", verify), key, file.path)
        others = [name for name, value in loaded.items() if not isinstance(value, torch.Tensor)]
        _require_tensors(loaded, others, file.path)
        return _apart(loaded), metadata

    def _views(
        self, file: WeightFile, archive: Archive, described: Mapping[Any, DenseTensor]
    ) -> dict[Any, torch.Tensor]:
        for tensor in described.values():
            require_record(archive, tensor.storage.record, tensor.storage.size)
        archive.locate({tensor.storage.record for tensor in described.values()})
        known: dict[Any, Source] = {}  # tied tensors share a source

        def view(tensor: DenseTensor) -> torch.Tensor:
            begin, end = tensor.extent
            if begin == end:
                return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
            extent = FileExtent(file, archive.starts[tensor.storage.record] + begin, end - begin)
            shape = tensor.shape if tensor.contiguous else ((end - begin) // tensor.dtype.itemsize,)
            source = known.setdefault((extent, tensor.dtype, shape), Source([extent], tensor.dtype, shape))
            stored = StoredTensor(self._weights, source)
            if tensor.contiguous:
                return stored
            strided: Any = stored.as_strided(tensor.shape, tensor.stride)
            made: torch.Tensor = strided if is_dense(strided) else strided.to_memory()
            return made

        return {name: view(tensor) for name, tensor in described.items()}


def _apart(tensors: Mapping[Any, torch.Tensor]) -> dict[Any, torch.Tensor]:
    """Copies tensors that are parts of larger storages, since safetensors refuses tensors that share memory."""
    made: dict[Any, torch.Tensor] = {}

    def own(tensor: torch.Tensor) -> torch.Tensor:
        if not is_strided(tensor) or tensor.untyped_storage().nbytes() == tensor.nbytes:
            return tensor
        place = tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()
        return made.setdefault(place, tensor.detach().clone())

    return {name: own(tensor) for name, tensor in tensors.items()}


def _named(tensors: Mapping[Any, torch.Tensor], path: str) -> dict[str, torch.Tensor]:
    """Returns the tensors by names of text. Raises ValueError for keys that have none, or the same."""
    names: dict[str, Any] = {}
    for key in tensors:
        if type(key) not in (str, int):
            raise ValueError(f"{path}: names in safetensors files are text, and {key!r} is a {type(key).__name__}")
        if str(key) in names:
            raise ValueError(f"{path}: the keys {names[str(key)]!r} and {key!r} are one name in a safetensors file")
        names[str(key)] = key
    return {name: tensors[key] for name, key in names.items()}


def _entry(root: Any, key: str, path: str) -> dict[Any, Any]:
    """Returns the entries of the dictionary that ``key`` leads to."""
    node, rest = _members(root), key
    while node is not None and rest:
        step = next((name for name in node if rest == name or rest.startswith(f"{name}.")), None)
        if step is None:
            break
        node, rest = _members(node[step]), rest[len(step) + 1 :]
    if node is None:
        raise ValueError(f"{path}: {repr(key) if key else 'its content'} is not a dictionary of tensors by name")
    if rest:
        raise ValueError(f"{path} has no entry {key!r}; it has {listed(node)}")
    return dict(node)


def _members(node: Any) -> Mapping[Any, Any] | None:
    if isinstance(node, Call):
        return node.items if node.path == "collections.OrderedDict" else None
    return node if isinstance(node, Mapping) else None


def _require_tensors(entries: Mapping[Any, Any], others: list[Any], path: str) -> None:
    if others:
        raise entries_error(path, others, [name for name in others if _members(entries[name])])
