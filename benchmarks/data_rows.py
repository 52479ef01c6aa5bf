"""The contenders of ``data.py``: each reads all samples of a data set once, in random order, into batches."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import torch
from torch.utils.data import DataLoader

from nvme_ops.bench import fio
from nvme_ops.bench.measure import Row, Unavailable, WrongData, timed
from nvme_ops.data import Dataset, Loader, SampleStore, SampleWriter
from nvme_ops.measuring.files import make_cold
from nvme_ops.text import MIB

OURS = "nvme_ops.data.Loader"
PLAIN = "DataLoader, plain files"
_MOST_FILES = 8192
_MOST_BATCH_BYTES = 64 * MIB
_CONTENT = 16 * MIB


class Work:
    """Samples of one size, in every format, and how many of them are read in a pass."""

    def __init__(self, folder: str, each: int, total: int, workers: int) -> None:
        self.each, self.count, self.workers = each, total // each, workers
        self.batch = max(1, min(256, _MOST_BATCH_BYTES // each, self.count))
        self.few = min(self.count, _MOST_FILES)  # of formats that take seconds for what this takes milliseconds
        self.folder = Path(folder)
        self._content = numpy.random.default_rng(0).bytes(_CONTENT + each)

    def sample(self, number: int) -> bytes:
        """Returns a sample, which begins with its number."""
        place = number * 4096 % _CONTENT
        return number.to_bytes(8, "little") + self._content[place : place + self.each - 8]

    def path(self, name: str) -> Path:
        """Returns a new folder."""
        made = self.folder / f"{name}-{self.each}"
        made.mkdir()
        return made

    def row(self, name: str, batches: Callable[[], Iterable[Any]], files: list[Path], count: int) -> Row:
        """Reads the whole of ``batches()``, each a tensor of rows. The CPU time of workers is not known."""

        def run() -> Any:
            def work() -> None:
                seen = sum(len(batch) for batch in batches())
                if seen != count:
                    raise WrongData(f"{seen} samples instead of {count}")

            sample = timed(work, count * self.each)
            return sample if name == OURS else replace(sample, cpu_seconds=None)

        def before() -> None:
            for path in files:
                make_cold(str(path))

        def check() -> None:
            seen = set()
            for batch in batches():
                for sample in batch:
                    content = bytes(numpy.asarray(sample).data) if not isinstance(sample, bytes) else sample
                    number = int.from_bytes(content[:8], "little")
                    seen.add(number)
                    if len(seen) % 97 == 1 and content != self.sample(number):
                        raise WrongData(f"sample {number} differs")
            if len(seen) != count:
                raise WrongData(f"{len(seen)} samples instead of {count}")

        return Row(name, run, before, check)


def our_rows(work: Work) -> list[Row]:
    """This package: alone, and within torch's loader."""
    folder = work.path("nvme_ops")
    with SampleWriter(folder, (torch.uint8, (work.each,)), checksums=False) as writer:
        writer.extend(
            torch.frombuffer(bytearray(work.sample(number)), dtype=torch.uint8) for number in range(work.count)
        )
    files = list(folder.glob("samples-*"))
    store = SampleStore(folder)
    loader = Loader(store, work.batch, shuffle=True)
    inside = torch_loader(work, Dataset(store))
    return [
        work.row(OURS, lambda: loader, files, work.count),
        work.row("nvme_ops.data.Dataset in DataLoader", lambda: inside, files, work.count),
    ]


def torch_loader(work: Work, dataset: Any, **more: Any) -> DataLoader[Any]:
    """Returns torch's loader, whose workers stay between passes."""
    given: dict[str, Any] = {"batch_size": work.batch, "shuffle": True, **more}
    return DataLoader(dataset, num_workers=work.workers, persistent_workers=True, **given)


class _Files(torch.utils.data.Dataset[Any]):
    def __init__(self, paths: list[Path]) -> None:
        self._paths = [str(path) for path in paths]

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, number: int) -> torch.Tensor:
        with open(self._paths[number], "rb") as file:
            return torch.frombuffer(bytearray(file.read()), dtype=torch.uint8)


class _Mapped(torch.utils.data.Dataset[Any]):
    def __init__(self, path: Path) -> None:
        self._rows = numpy.load(path, mmap_mode="r")

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, number: int) -> torch.Tensor:
        return torch.from_numpy(numpy.array(self._rows[number]))


def plain_row(work: Work) -> Row:
    """A file for each sample."""
    folder = work.path("plain")
    paths = [folder / f"{number:07d}" for number in range(work.few)]
    for number, path in enumerate(paths):
        path.write_bytes(work.sample(number))
    loader = torch_loader(work, _Files(paths))
    return work.row(f"{PLAIN}, {work.workers} workers", lambda: loader, paths, work.few)


def mapped_row(work: Work) -> Row:
    """A NumPy array in a file."""
    path = work.path("numpy") / "rows.npy"
    rows = numpy.lib.format.open_memmap(path, "w+", numpy.uint8, (work.count, work.each))
    for number in range(work.count):
        rows[number] = numpy.frombuffer(work.sample(number), numpy.uint8)
    rows.flush()
    del rows
    loader = torch_loader(work, _Mapped(path))
    return work.row(f"DataLoader, NumPy memmap, {work.workers} workers", lambda: loader, [path], work.count)


def webdataset_row(work: Work) -> Row:
    """Tars, as webdataset shuffles them: the order of the shards, and a buffer of samples."""
    name = f"WebDataset, local shards, {work.workers} workers"
    try:
        import webdataset  # type: ignore[import-not-found,import-untyped,unused-ignore]
    except ImportError:
        return unavailable(name, "pip install webdataset")
    folder, shards = work.path("tars"), 8
    for shard in range(shards):
        with tarfile.open(folder / f"{shard}.tar", "w") as tar:
            for number in range(shard, work.count, shards):
                member = tarfile.TarInfo(f"{number:07d}.bin")
                member.size = work.each
                tar.addfile(member, io.BytesIO(work.sample(number)))
    files = sorted(folder.iterdir())
    pipeline = (
        webdataset.WebDataset([str(path) for path in files], shardshuffle=shards, empty_check=False)
        .shuffle(256)
        .to_tuple("bin")
        .map(lambda sample: torch.frombuffer(bytearray(sample[0]), dtype=torch.uint8))
        .batched(work.batch, collation_fn=torch.stack)
    )
    loader = DataLoader(pipeline, batch_size=None, num_workers=work.workers, persistent_workers=True)
    return work.row(name, lambda: loader, files, work.count)


def streaming_row(work: Work) -> Row:
    """MDS shards, as MosaicML's streaming shuffles them."""
    name = f"MosaicML streaming, local shards, {work.workers} workers"
    try:
        import streaming  # type: ignore[import-not-found,import-untyped,unused-ignore]
    except (ImportError, RuntimeError) as error:
        return unavailable(name, f"pip install mosaicml-streaming ({error})")
    folder = work.path("mds")
    with streaming.MDSWriter(out=str(folder), columns={"bin": "bytes"}, exist_ok=True) as writer:
        for number in range(work.count):
            writer.write({"bin": work.sample(number)})
    dataset = streaming.StreamingDataset(local=str(folder), shuffle=True, batch_size=work.batch)
    loader = torch_loader(work, dataset, shuffle=False, collate_fn=_stacked)
    return work.row(name, lambda: loader, list(folder.glob("*.mds")), work.count)


def _stacked(samples: list[dict[str, bytes]]) -> torch.Tensor:
    return torch.stack([torch.frombuffer(bytearray(sample["bin"]), dtype=torch.uint8) for sample in samples])


def fio_row(work: Work) -> Row:
    """Blocks of the same size, as deep as a device likes."""
    (path,) = (work.folder / f"nvme_ops-{work.each}").glob("samples-*")
    nbytes = work.count * work.each
    shapes = fio.variants([f"--bs={work.each}", "--iodepth=128"])
    return fio.row(
        "fio randread, depth 128", "randread", lambda: str(path), nbytes, partial(make_cold, str(path)), shapes
    )


def unavailable(name: str, words: str) -> Row:
    """Returns a row that says why it is empty."""

    def run() -> Any:
        raise Unavailable(words)

    return Row(name, run)
