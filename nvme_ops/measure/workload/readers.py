"""What can feed a job: each reader writes the data set in its own format, and reads it batch by batch."""

from __future__ import annotations

import functools
import random
import shutil
import signal
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
_MAX_FILES = 1 << 13  # of readers with a file for each sample
MIN_BATCHES = 8  # in an epoch: fewer would all be read ahead
_SHARED_MEMORY = "/dev/shm"  # torch's workers put their batches there
_PREFETCHED = 2  # batches of each of torch's workers, by default

Batches = Iterable[Sequence[Any]]


@dataclass(frozen=True)
class DataSet:
    """The samples of a job, which are read in random order.

    Args:
        folder: where readers write them.
        sizes: bytes of each sample, at least 8.
        batch: samples of a batch.
        workers: processes of torch's loaders.
    """

    folder: Path
    sizes: Sequence[int]
    batch: int
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

    def is_sample(self, sample: Any) -> bool:
        """Returns whether ``sample``, bytes or a tensor, is one of these."""
        content = sample if isinstance(sample, bytes) else bytes(sample.numpy().data)
        number = int.from_bytes(content[:_NUMBER], "little")
        return number < len(self.sizes) and content == self.sample(number)

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

    folder, files = our_store(data)
    loader = Loader(SampleStore(folder), data.batch, shuffle=True, memory_budget="2G")
    return Reader(OURS, data, files, lambda: loader)


def our_store(data: DataSet) -> tuple[Path, list[Path]]:
    """Returns the folder of this package's store, written once, and its files of samples."""
    folder = data.folder / OURS
    if not folder.exists():
        import torch

        from nvme_ops.data import SampleWriter

        spec = (torch.uint8, (data.sizes[0],)) if len(set(data.sizes)) == 1 else bytes
        with SampleWriter(data.path(OURS), spec, checksums=False) as writer:
            writer.extend(data.samples())
    return folder, sorted(folder.glob("samples-*"))


def torch_loader(data: DataSet, samples: Any, **more: Any) -> Callable[[], Batches]:
    """Returns a function that begins an epoch of torch's loader, whose workers stay alive between epochs."""
    from torch.utils.data import DataLoader

    given: dict[str, Any] = {"batch_size": data.batch, "shuffle": True, "collate_fn": collated, **more}
    loader = DataLoader(
        samples, num_workers=data.workers, persistent_workers=True, worker_init_fn=_without_ctrl_c, **given
    )
    return lambda: loader


def _without_ctrl_c(_: int) -> None:
    """Leaves Ctrl-C to the parent, which ends its workers; otherwise they would seem to have failed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _require_shared_memory(data: DataSet) -> None:
    """Raises Unavailable if the batches of torch's workers do not fit: torch would wait forever to place one."""
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


def tensor_of(sample: Any) -> torch.Tensor:
    """Returns a sample as a tensor of bytes."""
    import torch

    return torch.frombuffer(bytearray(sample), dtype=torch.uint8) if isinstance(sample, bytes) else sample


def collated(samples: list[Any]) -> Any:
    """Returns a batch: a tensor, or a list of tensors of different sizes."""
    import torch

    rows = list(map(tensor_of, samples))
    return torch.stack(rows) if len(set(map(len, rows))) == 1 else rows


class NumberedSamples:
    """A dataset whose samples are what ``read`` returns for each of ``places``."""

    def __init__(self, places: Sequence[Any], read: Callable[[Any], Any]) -> None:
        self._places, self._read = places, read

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, number: int) -> Any:
        """Returns a sample."""
        return self._read(self._places[number])


def _content(path: Path) -> bytes:
    with open(path, "rb", buffering=0) as file:
        return file.readall()


def plain(data: DataSet) -> Reader:
    """A file for each sample, read by torch's DataLoader."""
    return per_file("plain", data, _content, Path.write_bytes)


def per_file(name: str, data: DataSet, read: Callable[[Path], Any], write: Callable[[Path, bytes], object]) -> Reader:
    """Returns a reader with a file for each sample: of the first 8,192 samples, or of 8 batches if that is more."""
    count = max(_MAX_FILES, MIN_BATCHES * data.batch)
    data = replace(data, sizes=data.sizes[: count - count % data.batch])
    folder = data.path(name)
    paths = [folder / f"{number:07d}" for number in range(len(data.sizes))]
    for path, sample in zip(paths, data.samples(), strict=True):
        write(path, sample)
    return Reader(name, data, paths, torch_loader(data, NumberedSamples(paths, read)))


#: Readers by their names on the command line.
READERS: dict[str, Callable[[DataSet], Reader]] = {OURS: ours, "plain": plain}


def made(make: Callable[[DataSet], Reader], data: DataSet) -> Reader:
    """Returns a reader of the data set. Raises Unavailable."""
    if make is not ours:
        _require_shared_memory(data)
    return make(data)


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
