"""Random reads of samples into batches, cold: this package beside the loaders and formats that people use.

Every pass reads all samples of a size once, in an order of its own. Workers of torch's loaders stay alive between
passes. Formats with a file for each sample are measured with 8,192 of them at most. Two more groups open a large index
and append to a log.
"""

from __future__ import annotations

import io
import itertools
import os
import statistics
import tarfile
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch

from benchmarks import command, fio
from nvme_ops.base.command_line import size
from nvme_ops.base.text import MIB, rounded, size_words
from nvme_ops.data import AsyncLog, SampleStore
from nvme_ops.data.columns import Columns
from nvme_ops.data.index import NAME, DataFile, SampleIndex, write_index
from nvme_ops.data.store import trailer
from nvme_ops.data.writer import data_file
from nvme_ops.io.file import shared_handle
from nvme_ops.measure.engines import unavailable
from nvme_ops.measure.files import make_cold
from nvme_ops.measure.rows import Row, Sample, Unavailable, WrongData, percentile, timed
from nvme_ops.measure.tables import Table
from nvme_ops.measure.workload import readers
from nvme_ops.measure.workload.feed import cool
from nvme_ops.measure.workload.readers import OURS, DataSet, Reader, checked, collated, made, per_file, torch_loader

GROUPS = {
    "random": "samples of each size in random order, in GB/s",
    "index": "a large index, cold, in a new process, in s",
    "log": "records of 200 bytes at a rate: what each call costs, in us",
}
_DEPTHS = (128, 1024)  # enough to keep a device busy; and as much memory as the batches of 128 KiB samples
_BATCH, _MAX_BATCH_BYTES = 256, 64 * MIB
_SHARDS = 8
RECORD_BYTES = 64  # of a sample of the index, on average
_STORE = "benchmark"  # its identity
_PIECE = 256 * MIB

_OPENING = """
import json, sys, time
import nvme_ops
from nvme_ops.measure.rows import timed
from nvme_ops.data import Loader, SampleStore

def work():
    marks.append(time.perf_counter())
    store = SampleStore(sys.argv[1])
    marks.append(time.perf_counter())
    next(iter(Loader(store, 256, shuffle=True)))
    marks.append(time.perf_counter())

nvme_ops.aio_handle()  # loads the op
marks = []
peak = timed(work, 1).peak_bytes
print(json.dumps([marks[1] - marks[0], marks[2] - marks[1], peak]))
"""


def dataset(data: DataSet) -> Reader:
    """This package's dataset in torch's loader."""
    folder, files = readers.our_store(data)
    return Reader("dataset", data, files, torch_loader(data, SampleStore(folder)))


def memmap(data: DataSet) -> Reader:
    """All samples in a file that NumPy maps, read by torch's loader."""
    numpy = _needed("numpy", "numpy")
    path = data.path("memmap") / "samples"
    with path.open("wb") as file:
        file.writelines(data.samples())
    places = [slice(end - size, end) for end, size in zip(itertools.accumulate(data.sizes), data.sizes, strict=True)]
    mapped = numpy.memmap(path, numpy.uint8, "r")
    samples = readers.NumberedSamples(places, partial(_mapped_sample, mapped))
    return Reader("memmap", data, [path], torch_loader(data, samples))


def _mapped_sample(mapped: Any, place: slice) -> Any:
    return torch.from_numpy(mapped[place].copy())


def safetensors(data: DataSet) -> Reader:
    """A safetensors file for each sample, read by torch's loader."""
    save_file = _needed("safetensors.torch", "safetensors").torch.save_file
    return per_file(
        "safetensors", data, _first_tensor, lambda path, sample: save_file({"sample": readers.tensor_of(sample)}, path)
    )


def _first_tensor(path: Path) -> Any:
    from safetensors.torch import load_file

    return load_file(path)["sample"].clone()  # load_file maps the file: only what is used is read


def webdataset(data: DataSet) -> Reader:
    """Tars, read by webdataset and shuffled its way: the order of the shards, and a buffer of samples."""
    wds = _needed("webdataset", "webdataset")
    folder = data.path("webdataset")
    for shard in range(min(_SHARDS, len(data.sizes))):
        with tarfile.open(folder / f"{shard}.tar", "w") as tar:
            for number in range(shard, len(data.sizes), _SHARDS):
                member = tarfile.TarInfo(f"{number:07d}.bin")
                member.size = data.sizes[number]
                tar.addfile(member, io.BytesIO(data.sample(number)))
    files = sorted(folder.iterdir())
    pipeline = wds.WebDataset([str(path) for path in files], shardshuffle=_SHARDS, empty_check=False).shuffle(256)
    pipeline = pipeline.to_tuple("bin").map(itemgetter(0)).batched(data.batch, collation_fn=collated)
    workers = replace(data, workers=min(data.workers, len(files)))
    batches = torch_loader(workers, pipeline, batch_size=None, shuffle=None, collate_fn=None)
    return Reader("webdataset", data, files, batches)


def streaming(data: DataSet) -> Reader:
    """MDS shards, read by MosaicML's package."""
    mds = _needed("streaming", "mosaicml-streaming")
    folder = data.path("streaming")
    with mds.MDSWriter(out=str(folder), columns={"bin": "bytes"}, exist_ok=True) as writer:
        for sample in data.samples():
            writer.write({"bin": sample})
    samples = mds.StreamingDataset(local=str(folder), shuffle=True, batch_size=data.batch)
    batches = torch_loader(data, samples, shuffle=False, collate_fn=_collated_dicts)
    return Reader("streaming", data, sorted(folder.glob("*.mds")), batches)


def _collated_dicts(samples: list[dict[str, bytes]]) -> Any:
    return collated([sample["bin"] for sample in samples])


def _needed(module: str, package: str) -> Any:
    try:
        return __import__(module)
    except (ImportError, RuntimeError) as error:
        raise Unavailable(f"pip install {package} ({error})") from None


_OTHERS = (dataset, readers.plain, memmap, safetensors, webdataset, streaming)
READERS = {OURS: readers.ours} | {reader.__name__: reader for reader in _OTHERS}


def reader_row(name: str, data: DataSet) -> Row:
    """Returns a row that reads all batches of an epoch. The CPU time of workers is not known."""
    try:
        reader = made(READERS[name], data)
    except Unavailable as reason:
        return unavailable(name, str(reason))
    sizes = reader.data.sizes

    def read() -> None:
        seen = sum(len(batch) for batch in reader.batches())
        if seen != len(sizes):
            raise WrongData(f"{seen} samples instead of {len(sizes)}")

    def run() -> Sample:
        sample = timed(read, sum(sizes))
        return sample if name == OURS else replace(sample, cpu_seconds=None)

    def check() -> None:
        for _ in checked(reader):
            pass

    return Row(name, run, partial(cool, reader), check)


def fio_row(data: DataSet, depth: int) -> Row:
    """Returns fio's row: blocks of the same size from this package's file, into ``depth`` buffers that are reused."""
    (path,) = map(str, (data.folder / OURS).glob("samples-*"))
    shapes = fio.variants([f"--bs={data.sizes[0]}", f"--iodepth={depth}"])
    before = partial(make_cold, path)
    return fio.row(f"fio randread, depth {depth}", "randread", lambda: path, sum(data.sizes), before, shapes)


def random_tables(args: Namespace, scratch: Path, _: dict[str, Any]) -> Iterator[Table]:
    """Yields a table for each size."""
    for nbytes in args.sizes:
        command.show_progress(f"writing samples of {size_words(nbytes)} in each format")
        folder = scratch / str(nbytes)
        folder.mkdir()
        batch = max(1, min(_BATCH, _MAX_BATCH_BYTES // nbytes))
        data = DataSet(folder, [nbytes] * (args.size // nbytes), batch, workers=args.workers)
        rows = [reader_row(name, data) for name in READERS]
        rows += [fio_row(data, depth) for depth in _DEPTHS if depth * nbytes <= 128 * MIB]
        title = f"random samples of {size_words(nbytes)}, cold, batches of {batch}, {args.workers} workers"
        yield Table("random", title, "GB/s", rows, OURS, ("CPU s/GiB",))


def make_store(folder: Path, records: int) -> None:
    """Writes samples of 1 to 127 bytes; not by ``SampleWriter``, which takes minutes for 100 million."""
    ends = torch.randint(1, 2 * RECORD_BYTES, (records,), dtype=torch.int64).cumsum_(0)
    nbytes = int(ends[-1])
    name = data_file(_STORE, 0)
    noise = torch.randint(256, (min(_PIECE, nbytes),), dtype=torch.uint8)
    for offset in range(0, nbytes, _PIECE):
        shared_handle().write(noise[: nbytes - offset], folder / name, False, offset)
    with open(folder / name, "ab") as file:
        file.write(bytes(-nbytes % 4096) + trailer(_STORE, 0))
    files = [DataFile(name, os.path.getsize(folder / name), 0)]
    index = SampleIndex(_STORE, "native", records, files, columns=Columns().as_json(), ends=ends)
    write_index(str(folder / NAME), index)


def index_tables(args: Namespace, scratch: Path, result: dict[str, Any]) -> Iterator[Table]:
    """Yields the table of one index; each pass is a new process, with cold files."""
    command.show_progress(f"writing {args.records:,} samples")
    folder, peaks = scratch / "index", list[int]()
    folder.mkdir()
    make_store(folder, args.records)

    def run(which: int) -> Sample:
        *seconds, peak = command.in_new_process(_OPENING, str(folder))
        peaks.append(peak)
        return Sample(seconds[which], 1)

    rows = [Row(name, partial(run, which), partial(command.forget, str(folder)))
            for which, name in enumerate(("SampleStore", "the first shuffled batch of 256"))]  # fmt: skip
    yield Table("index", f"{args.records:,} samples of varying size, cold", "s", rows)
    if peaks:
        command.note(result, f"memory for both: {size_words(int(statistics.median(peaks)))}")


def log_tables(args: Namespace, scratch: Path, result: dict[str, Any]) -> Iterator[Table]:
    """Yields the table of one rate, with the median time of a call.

    Records are due one by one at the rate; a row that falls behind goes on as fast as it can.
    """
    record, latest = bytes(200), dict[str, list[float]]()

    with AsyncLog(scratch / "log", keep=1) as log, open(scratch / "plain", "wb") as file:

        def begin_anew() -> None:
            log.flush()
            file.seek(0)

        def flushed(record: bytes) -> None:
            file.write(record)
            file.flush()

        def durable(record: bytes) -> None:
            flushed(record)
            os.fdatasync(file.fileno())

        def paced(name: str, count: int, append: Callable[[bytes], object]) -> Row:
            def run() -> Sample:
                times = []
                begin = time.perf_counter_ns()
                for number in range(count):
                    due = begin + number * 1_000_000_000 // args.rate
                    while (now := time.perf_counter_ns()) < due:
                        pass
                    append(record)
                    times.append(time.perf_counter_ns() - now)
                latest.setdefault(name, []).append(percentile(times, 0.99))
                return Sample(percentile(times, 0.5) / 1e9, 1)

            return Row(name, run, begin_anew)

        rows = [
            paced("AsyncLog.append", args.log_records, log.append),
            paced("write and flush", args.log_records, flushed),
            paced("write, flush and fdatasync", max(1, args.log_records // 500), durable),
        ]
        yield Table("log", f"records of 200 bytes, {args.rate:,} a second, each call", "us", rows)
    for name, times in latest.items():
        command.note(result, f"99 % of each pass of {name}: {rounded(statistics.median(times) / 1e3, 3)} us")


def tables(run: command.Run, scratch: str, result: dict[str, Any]) -> Iterator[Table]:
    """Yields the tables of one folder."""
    for group, make in {"random": random_tables, "index": index_tables, "log": log_tables}.items():
        if group in run.args.groups:
            yield from make(run.args, Path(scratch), result)


def copies(args: Namespace) -> int:
    """Returns how many files of ``--size`` the groups take."""
    index = -(-args.records * (RECORD_BYTES + 8) // args.size)  # each sample and its place
    return (7 * len(args.sizes) if "random" in args.groups else 0) + (index if "index" in args.groups else 0)


_FLAGS = {
    "--sizes": ("of a sample", ["4K", "128K", "1M"], size),
    "--workers": ("of torch's loaders", 2),
    "--records": ("of the index", 100_000_000),
    "--log-records": ("of a pass of the log", 100_000),
    "--rate": ("of the log's records, a second", 100_000),
}
PROGRAM = command.Program(GROUPS, tables, copies, _FLAGS)
