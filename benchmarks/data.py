"""Random reads of samples into batches, cold: this package beside the loaders and formats that people use.

Every pass reads all samples of a size once, in an order of its own. Workers of torch's loaders stay alive between
passes. Formats with a file for each sample are measured with 8,192 of them at most.
"""

from __future__ import annotations

import io
import itertools
import tarfile
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch

from benchmarks import command, fio
from benchmarks.peers import needed
from nvme_ops.base.command_line import size
from nvme_ops.base.text import MIB, size_words
from nvme_ops.data import SampleStore
from nvme_ops.measure.engines import unavailable
from nvme_ops.measure.files import make_cold
from nvme_ops.measure.rows import Row, Sample, Unavailable, WrongData, timed
from nvme_ops.measure.tables import Table
from nvme_ops.measure.workload import readers
from nvme_ops.measure.workload.feed import cool
from nvme_ops.measure.workload.readers import OURS, DataSet, Reader, checked, collated, made, per_file, torch_loader

GROUPS = {"random": "samples of each size in random order, in GB/s"}
_DEPTHS = (128, 1024)  # enough to keep a device busy; and as much memory as the batches of 128 KiB samples
_BATCH, _MAX_BATCH_BYTES = 256, 64 * MIB
_SHARDS = 8


def dataset(data: DataSet) -> Reader:
    """This package's dataset in torch's loader."""
    folder, files = readers.our_store(data)
    return Reader("dataset", data, files, torch_loader(data, SampleStore(folder)))


def memmap(data: DataSet) -> Reader:
    """All samples in a file that NumPy maps, read by torch's loader."""
    numpy = needed("numpy", "numpy")
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
    save_file = needed("safetensors.torch", "safetensors").torch.save_file
    return per_file(
        "safetensors", data, _first_tensor, lambda path, sample: save_file({"sample": readers.tensor_of(sample)}, path)
    )


def _first_tensor(path: Path) -> Any:
    from safetensors.torch import load_file

    return load_file(path)["sample"].clone()  # load_file maps the file: only what is used is read


def webdataset(data: DataSet) -> Reader:
    """Tars, read by webdataset and shuffled its way: the order of the shards, and a buffer of samples."""
    wds = needed("webdataset", "webdataset")
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
    mds = needed("streaming", "mosaicml-streaming")
    folder = data.path("streaming")
    with mds.MDSWriter(out=str(folder), columns={"bin": "bytes"}, exist_ok=True) as writer:
        for sample in data.samples():
            writer.write({"bin": sample})
    samples = mds.StreamingDataset(local=str(folder), shuffle=True, batch_size=data.batch)
    batches = torch_loader(data, samples, shuffle=False, collate_fn=_collated_dicts)
    return Reader("streaming", data, sorted(folder.glob("*.mds")), batches)


def _collated_dicts(samples: list[dict[str, bytes]]) -> Any:
    return collated([sample["bin"] for sample in samples])


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

    return Row(name, run, partial(cool, reader), lambda: deque(checked(reader), maxlen=0).clear())


def fio_row(data: DataSet, depth: int) -> Row:
    """Returns fio's row: blocks of the same size from this package's file, into ``depth`` buffers that are reused."""
    (path,) = map(str, (data.folder / OURS).glob("samples-*"))
    shapes = fio.variants([f"--bs={data.sizes[0]}", f"--iodepth={depth}"])
    before = partial(make_cold, path)
    return fio.row(f"fio randread, depth {depth}", "randread", lambda: path, sum(data.sizes), before, shapes)


def tables(run: command.Run, scratch: str, _: dict[str, Any]) -> Iterator[Table]:
    """Yields a table of one folder for each size."""
    args = run.args
    for nbytes in args.sizes:
        command.show_progress(f"writing samples of {size_words(nbytes)} in each format")
        folder = Path(scratch, str(nbytes))
        folder.mkdir()
        batch = max(1, min(_BATCH, _MAX_BATCH_BYTES // nbytes))
        data = DataSet(folder, [nbytes] * (args.size // nbytes), batch, workers=args.workers)
        rows = [reader_row(name, data) for name in READERS]
        rows += [fio_row(data, depth) for depth in _DEPTHS if depth * nbytes <= 128 * MIB]
        title = f"random samples of {size_words(nbytes)}, cold, batches of {batch}, {args.workers} workers"
        yield Table("random", title, "GB/s", rows, OURS, ("CPU s/GiB",))


_FLAGS = {"--sizes": ("of a sample", ["4K", "128K", "1M"], size), "--workers": ("of torch's loaders", 2)}
PROGRAM = command.Program(GROUPS, tables, lambda args: 7 * len(args.sizes), _FLAGS)
