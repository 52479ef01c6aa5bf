"""Makes a store of samples from a folder of files, a NumPy array, Parquet files, tars or MDS shards."""

from __future__ import annotations

import json
import math
import os
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from nvme_ops.base.errors import FormatError
from nvme_ops.base.settings import PIECE
from nvme_ops.data import formats, webdataset
from nvme_ops.data.columns import Sample, Spec
from nvme_ops.data.index import NAME
from nvme_ops.data.store import SampleStore
from nvme_ops.data.writer import SampleWriter, is_data_file
from nvme_ops.io.file import shared_handle
from nvme_ops.io.tensors import empty, groups

OnProgress = Callable[[int], object]  # bytes read since the last call
_AT_ONCE = 4 * PIECE  # bytes of files that one request reads
_ROWS = 1024  # the most that are read at once


@dataclass
class SampleSource:
    """Samples to be written, in order, each with its size in bytes at the source."""

    columns: Mapping[str, Spec] | Spec
    samples: Iterator[tuple[Sample, int]]
    nbytes: int
    path: str
    class_names: Sequence[str] = ()  #: as ``SampleWriter`` takes
    left_out: tuple[str, ...] = ()  #: names in the folder that are not converted


def open_source(path: str, dtype: str | None = None, shape: Sequence[int] = ()) -> SampleSource:
    """Opens what is at ``path``: ``.npy``, ``.parquet``, a tar, or a folder of Parquet files, tars, shards or files.

    With a NumPy ``dtype``, it is a file of raw samples of this ``shape``, as ``numpy.memmap`` makes them.

    Raises:
        FileNotFoundError: nothing is there.
        FormatError: what is there cannot be converted.
        ImportError: numpy or pyarrow is needed but not installed; the message says so.
    """
    os.stat(path)
    if dtype is not None:
        return _raw(path, dtype, shape)
    if os.path.isfile(path) and path.endswith(".npy"):
        return _npy(path)
    if os.path.isfile(path) and path.endswith(".parquet"):
        return _parquet([path])
    if any(candidate.matches(path) for candidate in formats.FORMATS.values()):
        return _store(path)
    if tars := webdataset.compressed(path):
        return _compressed(path, tars)
    if not os.path.isdir(path):
        raise FormatError(f"{path}: not a .npy, .parquet, tar or folder; a file without a header needs a dtype")
    tables = sorted(entry.path for entry in os.scandir(path) if entry.name.endswith(".parquet"))
    return replace(_parquet(tables), path=path, left_out=_others(path, ".parquet")) if tables else _folder(path)


def convert(source: SampleSource, writer: SampleWriter, on_progress: OnProgress = lambda _: None) -> int:
    """Writes all samples; returns how many. The writer is left open."""
    for sample, nbytes in source.samples:
        try:
            writer.add(sample)
        except (TypeError, ValueError, KeyError) as error:
            words = error.args[0] if isinstance(error, KeyError) else error
            raise FormatError(f"{source.path}: sample {len(writer)}: {words}") from error
        on_progress(nbytes)
    return len(writer)


def _folder(path: str) -> SampleSource:
    """Opens a folder with a sample in each file. If all are in subfolders, the subfolder's number is the label."""
    names = sorted(os.path.relpath(name, path) for name in _files(path))
    if not names:
        raise FormatError(f"{path}: has no files")
    if table := next((name for name in names if name.endswith(".parquet")), None):
        raise FormatError(f"{path}: has Parquet files in folders, such as {table}: convert the folders one at a time")
    tops = [name.split(os.sep)[0] for name in names]
    labels = {label: number for number, label in enumerate(sorted(set(tops)))}
    labelled = all(os.sep in name for name in names)
    sizes = [os.path.getsize(os.path.join(path, name)) for name in names]
    columns: dict[str, Spec] = {"data": bytes, "name": str, **({"label": torch.int64} if labelled else {})}

    def samples() -> Iterator[tuple[Sample, int]]:
        for name, top, content in zip(names, tops, _contents(path, names, sizes), strict=True):
            label = {"label": labels[top]} if labelled else {}
            yield {"data": content, "name": name, **label}, content.nbytes

    return SampleSource(columns, samples(), sum(sizes), path, list(labels) if labelled else [])


def _files(folder: str, above: tuple[tuple[int, int], ...] = ()) -> Iterator[str]:
    """Yields the paths of the files below a folder, except hidden ones and stores; follows links. Raises OSError."""
    status = os.stat(folder)
    if (here := (status.st_dev, status.st_ino)) in above:  # a link to a folder that contains it
        return
    for entry in list(os.scandir(folder)):
        if entry.is_dir():
            yield from _files(entry.path, (*above, here))
            continue
        skipped = entry.name.startswith(".") or entry.name == NAME or is_data_file(entry.name)
        if not skipped and stat.S_ISREG(os.stat(entry.path).st_mode):
            yield entry.path


def _contents(path: str, names: list[str], sizes: list[int]) -> Iterator[torch.Tensor]:
    """Yields the contents of files; one request reads many of them."""
    for group in groups(sizes, _AT_ONCE):
        its = slice(group.start, group.stop)
        parts = empty(sum(sizes[its]), dtype=torch.uint8).split(sizes[its])
        files = [os.path.join(path, name) for name in names[its]]
        shared_handle().submit_preadv(parts, files, [0] * len(files)).result()
        yield from parts


def _rows(nbytes: float) -> int:
    """Returns how many rows of ``nbytes`` each are read at once."""
    return int(max(1, min(_ROWS, _AT_ONCE / max(1, nbytes))))


def _npy(path: str) -> SampleSource:
    numpy = _needed("numpy", path)
    try:
        rows = numpy.load(path, mmap_mode="r", allow_pickle=False)
    except OSError:
        raise
    except Exception as error:  # numpy raises many kinds
        raise FormatError(f"{path}: {type(error).__name__}: {error}") from error
    if rows.ndim == 0:
        raise FormatError(f"{path}: an array without dimensions has no samples")
    if len(rows) and not rows.nbytes:  # the header could claim any number of them
        raise FormatError(f"{path}: a sample of the shape {rows.shape[1:]} has no bytes")
    return _rows_source(rows, numpy, path)


def _raw(path: str, dtype: str, shape: Sequence[int]) -> SampleSource:
    """Opens a file of raw samples."""
    numpy = _needed("numpy", path)
    try:
        kind = numpy.dtype(dtype)
    except TypeError as error:
        raise FormatError(f"{dtype!r} is not a NumPy dtype") from error
    length = kind.itemsize * math.prod(shape)
    if length < 1 or min(shape, default=1) < 1:
        raise FormatError(f"a sample of the shape {tuple(shape)} has no bytes")
    count, rest = divmod(os.path.getsize(path), length)
    if rest or not count:
        raise FormatError(f"{path}: {os.path.getsize(path)} bytes are not samples of {length} bytes")
    return _rows_source(numpy.memmap(path, kind, "r", shape=(count, *shape)), numpy, path)


def _rows_source(rows: Any, numpy: Any, path: str) -> SampleSource:
    try:
        dtype = torch.from_numpy(numpy.empty(0, rows.dtype)).dtype
    except (TypeError, ValueError) as error:
        raise FormatError(f"{path}: {error}") from error

    def samples() -> Iterator[tuple[Sample, int]]:
        step = _rows(rows.nbytes / max(1, len(rows)))
        for start in range(0, len(rows), step):
            for row in torch.from_numpy(numpy.array(rows[start : start + step])):
                yield row, row.nbytes

    return SampleSource((dtype, rows.shape[1:]), samples(), rows.nbytes, path)


def _parquet(paths: list[str]) -> SampleSource:
    pyarrow = _needed("pyarrow", paths[0])
    from pyarrow import parquet  # type: ignore[import-not-found,import-untyped,unused-ignore]

    schema = parquet.ParquetFile(paths[0]).schema_arrow
    columns = {field.name: _arrow_spec(field, pyarrow, paths[0]) for field in schema}
    if len(columns) < len(schema):
        raise FormatError(f"{paths[0]}: two columns have the same name")

    def samples() -> Iterator[tuple[Sample, int]]:
        for path in paths:
            with parquet.ParquetFile(path) as file:
                if file.schema_arrow != schema:
                    raise FormatError(f"{path}: other columns than those of {paths[0]}")
                mean = os.path.getsize(path) / max(1, file.metadata.num_rows)
                for number, row in enumerate(
                    row for batch in file.iter_batches(_rows(mean)) for row in batch.to_pylist()
                ):
                    missing = next((name for name, value in row.items() if value is None), None)
                    if missing is not None:
                        raise FormatError(f"{path}: column {missing!r} has no value in some row")
                    yield row, int(mean * (number + 1)) - int(mean * number)

    return SampleSource(columns, samples(), sum(map(os.path.getsize, paths)), paths[0])


def _arrow_spec(field: Any, pyarrow: Any, path: str) -> Spec:
    kind = field.type
    if pyarrow.types.is_string(kind) or pyarrow.types.is_large_string(kind):
        return str
    if pyarrow.types.is_binary(kind) or pyarrow.types.is_large_binary(kind):
        return bytes
    values = kind.value_type if pyarrow.types.is_list(kind) or pyarrow.types.is_large_list(kind) else kind
    names = {"halffloat": "float16", "float": "float32", "double": "float64"}
    dtype = getattr(torch, names.get(str(values), str(values)), None)
    if not isinstance(dtype, torch.dtype):
        raise FormatError(f"{path}: column {field.name!r} is of {kind}, which cannot be stored")
    return dtype if values is kind else (dtype, (-1,))


def _store(path: str) -> SampleSource:
    store = SampleStore(path)
    if store.columns is not None:
        columns = store.columns.given
    elif len(store):
        columns = {name: _spec_of(value) for name, value in store[0].items()}
    else:
        raise FormatError(f"{path}: has no samples")

    def samples() -> Iterator[tuple[Sample, int]]:
        mean = store.nbytes // max(1, len(store))
        for numbers in store.ranges(_AT_ONCE):
            for sample in store.read(numbers):
                yield sample if store.columns is not None else _plain(sample), mean

    others = _others(path, ".tar") if store.index.kind == "webdataset" and os.path.isdir(path) else ()
    return SampleSource(columns, samples(), store.nbytes, path, store.class_names, others)


def _compressed(path: str, tars: list[str]) -> SampleSource:
    """Opens compressed tars, whose samples are read one after the other."""
    first, _ = next(webdataset.samples_of(tars[0]), (None, 0))
    if first is None:
        raise FormatError(f"{tars[0]}: has no samples")
    columns: dict[str, Spec] = {name: str if name == webdataset.KEY else bytes for name in first}

    def samples() -> Iterator[tuple[Sample, int]]:
        for tar in tars:
            before = 0
            for sample, reached in webdataset.samples_of(tar):
                yield sample, reached - before
                before = reached

    others = _others(path, webdataset.COMPRESSED) if os.path.isdir(path) else ()
    return SampleSource(columns, samples(), sum(map(os.path.getsize, tars)), path, left_out=others)


def _others(folder: str, suffix: str | tuple[str, ...]) -> tuple[str, ...]:
    """Returns the names in a folder that are not hidden and do not end with ``suffix``."""
    names = sorted(os.listdir(folder))
    return tuple(name for name in names if not name.startswith(".") and not name.endswith(suffix))


def _spec_of(value: object) -> Spec:
    """Returns the spec of a column for values like this one. Raises FormatError if there is none."""
    if isinstance(value, torch.Tensor):
        return (value.dtype, (-1, *value.shape[1:])) if value.dim() else value.dtype
    if isinstance(value, str | dict | list):
        return str
    if isinstance(value, bool | int | float):
        return type(value)
    raise FormatError(f"values of {type(value).__name__} cannot be stored")


def _plain(sample: Mapping[str, Any]) -> Sample:
    return {name: json.dumps(value) if isinstance(value, dict | list) else value for name, value in sample.items()}


def _needed(package: str, path: str) -> Any:
    try:
        return __import__(package)
    except ImportError:
        raise ImportError(f"{path}: reading it needs {package}: pip install {package}") from None
