"""What can feed a job: each reader writes the data set in its own format, and reads it batch by batch."""

from __future__ import annotations

import functools
import io
import itertools
import random
import shutil
import signal
import tarfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nvme_ops.base.text import MIB, size_words
from nvme_ops.measure.rows import Unavailable, WrongData

if TYPE_CHECKING:
    import torch

OURS = "nvme_ops"
_CONTENT = 16 << 20  # bytes of noise, parts of which are the samples
_NUMBER = 8  # bytes of a sample's number, with which it begins
_SHARDS = 8
_FILES, _MAX_FILES = ("plain", "safetensors"), 1 << 13  # readers with a file for each sample
MIN_BATCHES = 8  # in an epoch: fewer would all be read ahead
_SHARED_MEMORY = "/dev/shm"  # torch's workers put their batches there
_PREFETCHED = 2  # batches of each of torch's workers, by default

Batches = Iterable[Sequence[Any]]


@dataclass(frozen=True)
class DataSet:
    """The samples of a job.

    Args:
        folder: where readers write them.
        sizes: bytes of each sample, at least 8.
        batch: samples of a batch.
        shuffled: read at random.
        workers: processes of torch's loaders.
    """

    folder: Path
    sizes: Sequence[int]
    batch: int
    shuffled: bool = True
    workers: int = 2

    @functools.cached_property
    def _noise(self) -> bytes:
        return random.Random(0).randbytes(_CONTENT)

    def sample(self, number: int) -> bytes:
        """Returns a sample: its number, and noise."""
        size, place = self.sizes[number] - _NUMBER, number * 4096 % _CONTENT
        noise = self._noise[place : place + size]
        left = size - len(noise)
        noise += self._noise * (left // _CONTENT) + self._noise[: left % _CONTENT]
        return number.to_bytes(_NUMBER, "little") + noise

    def samples(self) -> Iterator[bytes]:
        """Returns all samples, in order."""
        return map(self.sample, range(len(self.sizes)))

    def is_sample(self, found: Any) -> bool:
        """Returns whether ``found``, bytes or a tensor, is a sample."""
        content = found if isinstance(found, bytes) else bytes(found.numpy().data)
        number = int.from_bytes(content[:_NUMBER], "little")
        return number < len(self.sizes) and content == self.sample(number)

    def part(self, count: int) -> DataSet:
        """Returns the first ``count`` samples, in whole batches, at least one."""
        return replace(self, sizes=self.sizes[: count - count % self.batch or self.batch])

    @property
    def nbytes(self) -> int:
        """Bytes of all samples."""
        return sum(self.sizes)

    def path(self, name: str) -> Path:
        """Makes a folder; returns its path."""
        made = self.folder / name
        made.mkdir()
        return made


@dataclass
class Reader:
    """A data set in some format. ``batches`` begins an epoch; ``files`` are dropped from the page cache before it."""

    name: str
    data: DataSet
    files: list[Path]
    batches: Callable[[], Batches]


def ours(data: DataSet) -> Reader:
    """This package's loader."""
    from nvme_ops.data import Loader, SampleStore

    folder, files = _our_store(data)
    loader = Loader(SampleStore(folder), data.batch, shuffle=data.shuffled, memory_budget="2G")
    return Reader(OURS, data, files, lambda: loader)


def dataset(data: DataSet) -> Reader:
    """This package's dataset in torch's loader."""
    from nvme_ops.data import SampleStore

    folder, files = _our_store(data)
    return Reader("dataset", data, files, _torch_loader(data, SampleStore(folder)))


def _our_store(data: DataSet) -> tuple[Path, list[Path]]:
    folder = data.folder / OURS
    if not folder.exists():
        import torch

        from nvme_ops.data import SampleWriter

        spec = (torch.uint8, (data.sizes[0],)) if len(set(data.sizes)) == 1 else bytes
        with SampleWriter(data.path(OURS), spec, checksums=False) as writer:
            writer.extend(data.samples())
    return folder, sorted(folder.glob("samples-*"))


def _torch_loader(data: DataSet, samples: Any, **more: Any) -> Callable[[], Batches]:
    from torch.utils.data import DataLoader

    given: dict[str, Any] = {"batch_size": data.batch, "shuffle": data.shuffled, "collate_fn": _collated, **more}
    loader = DataLoader(
        samples, num_workers=data.workers, persistent_workers=True, worker_init_fn=_without_ctrl_c, **given
    )
    return lambda: loader


def _without_ctrl_c(_: int) -> None:
    """Leaves Ctrl-C to the parent, which ends its workers; otherwise they would seem to have failed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _require_shared_memory(data: DataSet) -> None:
    """Raises Unavailable if the batches of torch's workers do not fit: torch would wait forever to place one."""
    if not data.workers:
        return
    needed = (_PREFETCHED * data.workers + 1) * data.batch * max(data.sizes)
    try:
        free = shutil.disk_usage(_SHARED_MEMORY).free
    except OSError:
        free = 0
    if free < needed:
        raise Unavailable(
            f"batches of {data.workers} workers need {size_words(needed)} in {_SHARED_MEMORY} and {size_words(free)} "
            f"are free: docker run --shm-size={-(-needed // MIB)}m, or fewer --workers"
        )


def _tensor(sample: Any) -> torch.Tensor:
    import torch

    return torch.frombuffer(bytearray(sample), dtype=torch.uint8) if isinstance(sample, bytes) else sample


def _collated(samples: list[Any]) -> Any:
    import torch

    rows = list(map(_tensor, samples))
    return torch.stack(rows) if len(set(map(len, rows))) == 1 else rows


class _Samples:
    """A dataset whose samples are what ``read`` returns for each of ``places``."""

    def __init__(self, places: Sequence[Any], read: Callable[[Any], Any]) -> None:
        self._places, self._read = places, read

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, number: int) -> Any:
        return self._read(self._places[number])


def _content(path: Path) -> bytes:
    with open(path, "rb", buffering=0) as file:
        return file.readall()


def plain(data: DataSet) -> Reader:
    """A file for each sample, read by torch's loader."""
    return _per_file("plain", data, _content, Path.write_bytes)


def _first_tensor(path: Path) -> Any:
    from safetensors.torch import load_file

    return load_file(path)["sample"].clone()  # load_file maps the file: only what is used is read


def safetensors(data: DataSet) -> Reader:
    """A safetensors file for each sample, read by torch's loader."""
    _needed("safetensors", "safetensors")
    from safetensors.torch import save_file

    return _per_file(
        "safetensors", data, _first_tensor, lambda path, sample: save_file({"sample": _tensor(sample)}, path)
    )


def _per_file(name: str, data: DataSet, read: Callable[[Path], Any], write: Callable[[Path, bytes], object]) -> Reader:
    folder = data.path(name)
    paths = [folder / f"{number:07d}" for number in range(len(data.sizes))]
    for path, sample in zip(paths, data.samples(), strict=True):
        write(path, sample)
    return Reader(name, data, paths, _torch_loader(data, _Samples(paths, read)))


def _row(content: Any, place: slice) -> Any:
    import torch

    return torch.from_numpy(content[place].copy())


def memmap(data: DataSet) -> Reader:
    """All samples in a file that NumPy maps, read by torch's loader."""
    numpy = _needed("numpy", "numpy")
    path = data.path("memmap") / "samples"
    with path.open("wb") as file:
        file.writelines(data.samples())
    places = [slice(end - size, end) for end, size in zip(itertools.accumulate(data.sizes), data.sizes, strict=True)]
    samples = _Samples(places, functools.partial(_row, numpy.memmap(path, numpy.uint8, "r")))
    return Reader("memmap", data, [path], _torch_loader(data, samples))


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
    shuffled = _SHARDS if data.shuffled else False
    pipeline = wds.WebDataset([str(path) for path in files], shardshuffle=shuffled, empty_check=False)
    if data.shuffled:
        pipeline = pipeline.shuffle(256)
    pipeline = pipeline.to_tuple("bin").map(_first).batched(data.batch, collation_fn=_collated)
    workers = replace(data, workers=min(data.workers, len(files)))
    return Reader(
        "webdataset", data, files, _torch_loader(workers, pipeline, batch_size=None, shuffle=None, collate_fn=None)
    )


def _first(sample: Sequence[Any]) -> Any:
    return sample[0]


def streaming(data: DataSet) -> Reader:
    """MDS shards, read by MosaicML's package."""
    mds = _needed("streaming", "mosaicml-streaming")
    folder = data.path("streaming")
    with mds.MDSWriter(out=str(folder), columns={"bin": "bytes"}, exist_ok=True) as writer:
        for sample in data.samples():
            writer.write({"bin": sample})
    samples = mds.StreamingDataset(local=str(folder), shuffle=data.shuffled, batch_size=data.batch)
    batches = _torch_loader(data, samples, shuffle=False, collate_fn=_collated_dicts)
    return Reader("streaming", data, sorted(folder.glob("*.mds")), batches)


def _collated_dicts(samples: list[dict[str, bytes]]) -> Any:
    return _collated([sample["bin"] for sample in samples])


def _needed(module: str, package: str) -> Any:
    try:
        return __import__(module)
    except (ImportError, RuntimeError) as error:
        raise Unavailable(f"pip install {package} ({error})") from None


#: Readers by their names on the command line.
READERS: dict[str, Callable[[DataSet], Reader]] = {
    each.__name__ if each is not ours else OURS: each
    for each in (ours, dataset, plain, memmap, safetensors, webdataset, streaming)
}


def made(name: str, data: DataSet) -> Reader:
    """Returns a reader of the data set. Raises Unavailable.

    Readers with a file for each sample get the first 8,192 samples, or 8 batches if that is more.
    """
    if name != OURS:
        _require_shared_memory(data)
    return READERS[name](data.part(max(_MAX_FILES, MIN_BATCHES * data.batch)) if name in _FILES else data)


def checked(reader: Reader) -> Iterator[Sequence[Any]]:
    """Yields the batches of an epoch. Raises WrongData if the first or last sample of one is not as it was written."""
    seen = 0
    for batch in reader.batches():
        if not reader.data.is_sample(batch[0]) or not reader.data.is_sample(batch[len(batch) - 1]):
            raise WrongData(f"{reader.name}: a sample has other bytes than were written")
        seen += len(batch)
        yield batch
    if seen != len(reader.data.sizes):
        raise WrongData(f"{reader.name}: {seen} samples instead of {len(reader.data.sizes)}")
