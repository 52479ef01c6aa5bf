"""What the package does with storage, an adapter for each capability that can be done again and again."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch

import nvme_ops
from nvme_ops.data import AsyncLog, Loader, SampleStore, SampleWriter
from nvme_ops.integrations.safetensors import safe_open

SHAPE = 310, 901  # a tensor has 1.1 MB, which no system call writes at once, and no whole number of pages


class WrongResultError(Exception):
    """Nothing failed, and the bytes are others."""


def require(right: bool, what: str) -> None:
    if not right:
        raise WrongResultError(what)


@functools.lru_cache(8)
def tensors(version: int, count: int = 3) -> dict[str, torch.Tensor]:
    """Returns tensors that say of which version they are."""
    made = torch.Generator().manual_seed(version)
    return {f"tensor{number}": torch.rand(SHAPE, generator=made, device="cpu") for number in range(count)}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(tensor, other[name]) for name, tensor in one.items())


class Capability:
    """One of them, at work in ``folder`` while the disk is well.

    Attributes:
        waits: what a stalled device has to answer before Ctrl-C comes through: read, write, flush. The docs say so.
        more_files: the most files that failures may leave.
        kept: what was completed is there for the next program: ``found`` has it.
        verified: damage is found by its checksums.
        handle: what it works with, where that can be chosen.
        main: which attribute is what a program has open and closes, if any is.
    """

    waits: ClassVar[Sequence[str]] = ()
    more_files: ClassVar[int] = 0
    kept: ClassVar[bool] = False
    verified: ClassVar[bool] = False
    main: ClassVar[str] = ""

    def __init__(self, folder: Path, handle: nvme_ops.aio_handle | None = None) -> None:
        self.folder = folder
        self.handle: Any = handle
        self.version = 0  # of what was completed
        self.noticed: Callable[[], object] = lambda: None  # is called once Ctrl-C has come through
        self.start()

    def start(self) -> None:
        """Makes what is used by ``work``, on a disk that is well."""

    def work(self) -> None:
        """Does it, perhaps on a disk that fails. Raises WrongResultError. Done again after a failure, it succeeds."""
        self.do(self.version + 1)
        self.version += 1

    def do(self, version: int) -> None:
        """Does it with the tensors of this version."""

    def check(self) -> None:
        """Raises WrongResultError unless what was completed is there, or what was begun after it, on a well disk."""

    @classmethod
    def found(cls, folder: Path, version: int) -> Capability:
        """Returns what another program has completed in ``folder``, for ``check``."""
        one = cls.__new__(cls)
        vars(one).update(folder=folder, handle=None, path=folder / getattr(cls, "name", "file"), version=version)
        return one

    def opened(self) -> Any:
        return getattr(self, self.main) if self.main else None

    def leave(self) -> None:
        """Does it, for a program that ends at once: what returns before it is done is not waited for."""
        self.work()

    def left(self) -> bool:
        """Returns whether what ``leave`` began is complete, in another program."""
        return True

    def close(self) -> None:
        """Ends it."""
        if self.main:
            self.opened().close()

    @contextlib.contextmanager
    def ending(self, one: Any) -> Iterator[Any]:
        """Is ``one`` in its ``with`` block. Raises what went wrong there; ending it may wait for the device."""
        with contextlib.ExitStack() as end:
            end.push(one)
            try:
                yield one
            except BaseException as error:
                if isinstance(error, KeyboardInterrupt):
                    self.noticed()
                end.pop_all()
                with contextlib.suppress(OSError):
                    one.__exit__(type(error), error, None)
                raise


def once(kind: type[Capability], place: Path) -> None:
    """Does it once in this folder."""
    place.mkdir(exist_ok=True)
    one = kind(place)
    one.work()
    one.check()
    one.close()


class Save(Capability):
    """``save``, read by ``load``."""

    kept = verified = True
    name: ClassVar[str] = "checkpoint.safetensors"
    options: ClassVar[dict[str, Any]] = {}

    def start(self) -> None:
        self.path = self.folder / self.name
        self.do(0)

    def do(self, version: int) -> None:
        nvme_ops.save(tensors(version), self.path, handle=self.handle, **self.options)

    def check(self) -> None:
        loaded = nvme_ops.load(self.path, verify=True, handle=self.handle)
        require(any(same(loaded, tensors(self.version + more)) for more in (0, 1)), "neither the old nor the new one")


class SaveTorch(Save):
    """The same, of torch's format."""

    name = "checkpoint.pt"


class SaveSharded(Save):
    """The same, in several files."""

    name = "folder"
    options: ClassVar[dict[str, Any]] = {"max_shard_size": 1_200_000}


class SaveAsync(Save):
    """``save_async``, over the file before the last one."""

    options: ClassVar[dict[str, Any]] = {"recycle": True}

    def do(self, version: int) -> None:
        nvme_ops.save_async(tensors(version), self.path, handle=self.handle, **self.options).result()

    def leave(self) -> None:
        nvme_ops.save_async(tensors(1), self.path)

    def left(self) -> bool:
        return same(nvme_ops.load(self.path, verify=True), tensors(1))


class Load(Capability):
    """``load``, into new tensors, from several files."""

    name: ClassVar[str] = "folder"
    options: ClassVar[dict[str, Any]] = SaveSharded.options

    def start(self) -> None:
        self.path = self.folder / self.name
        nvme_ops.save(tensors(0), self.path, **self.options)

    def do(self, version: int) -> None:
        require(same(nvme_ops.load(self.path, handle=self.handle), tensors(0)), "other tensors than were saved")


class LoadTorch(Load):
    """The same, from one file of torch's format."""

    name = "checkpoint.pt"
    options: ClassVar[dict[str, Any]] = {}


class SafeOpen(Load):
    """``safe_open``, as safetensors has it: the tensors one by one, and in parts."""

    name = "checkpoint.safetensors"
    options: ClassVar[dict[str, Any]] = {}

    def do(self, version: int) -> None:
        with self.ending(safe_open(self.path, framework="pt", handle=self.handle)) as file:
            loaded = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (it is no mapping)
            part = file.get_slice("tensor0")[100:200]
        require(same(loaded, tensors(0)), "other tensors than were saved")
        require(torch.equal(part, tensors(0)["tensor0"][100:200]), "another part than was asked for")


class LoadInto(Load):
    """The same, into tensors that are there: the caller's own memory."""

    name = "checkpoint.safetensors"
    options: ClassVar[dict[str, Any]] = {}
    waits = ("read",)

    def do(self, version: int) -> None:
        targets = {name: torch.zeros(SHAPE, device="cpu") for name in tensors(0)}
        nvme_ops.load(self.path, into=targets, handle=self.handle)
        require(same(targets, tensors(0)), "other tensors than were saved")


class DcpSave(Capability):
    """``dcp.save``."""

    kept = verified = True
    name: ClassVar[str] = "checkpoint"

    def start(self) -> None:
        self.path = self.folder / self.name
        self.do(0)

    def do(self, version: int) -> None:
        nvme_ops.dcp.save(dict(tensors(version)), self.path, handle=self.handle)

    def check(self) -> None:
        state = {name: torch.zeros(SHAPE, device="cpu") for name in tensors(0)}
        nvme_ops.dcp.load(state, self.path, verify=True, handle=self.handle)
        require(any(same(state, tensors(self.version + more)) for more in (0, 1)), "neither the old nor the new one")


class DcpLoad(DcpSave):
    """``dcp.load``, into the caller's own memory."""

    waits = ("read",)
    kept = verified = False

    def start(self) -> None:
        super().start()
        super().do(0)

    def do(self, version: int) -> None:
        if version:
            state = {name: torch.zeros(SHAPE, device="cpu") for name in tensors(0)}
            nvme_ops.dcp.load(state, self.path, handle=self.handle)
            require(same(state, tensors(0)), "other tensors than were saved")

    def check(self) -> None:
        pass


class Handle(Capability):
    """``aio_handle``: what blocks. It moves the caller's own memory, which must stay his."""

    waits: ClassVar[Sequence[str]] = ("read", "write", "flush")  # a flush is the program's own
    main = "handle"

    def start(self) -> None:
        self.handle = self.handle or self.made()
        self.path = self.folder / "file"

    def made(self) -> nvme_ops.aio_handle:
        return nvme_ops.aio_handle()

    def do(self, version: int) -> None:
        (data,) = tensors(version, 1).values()
        back = torch.zeros_like(data)
        self.move(data, back)
        require(torch.equal(back, data), "other bytes than were written")

    def move(self, data: torch.Tensor, back: torch.Tensor) -> None:
        self.handle.sync_pwrite(data, self.path)
        self.make_durable()
        self.handle.sync_pread(back, self.path)

    def make_durable(self) -> None:
        """Has it on the device, and out of the page cache. An error of the program's own system call names the file."""
        with self.path.open("r+b") as file:
            try:
                os.fsync(file.fileno())
            except OSError as error:
                raise OSError(error.errno, f"fsync: {error.strerror}", str(self.path)) from error
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


class Futures(Handle):
    """``submit_pwrite`` and ``submit_pread``; ``async_pread`` and ``wait``."""

    waits = ("flush",)

    def move(self, data: torch.Tensor, back: torch.Tensor) -> None:
        self.handle.submit_pwrite(data, self.path).result()
        self.make_durable()
        self.handle.submit_pread(back, self.path).result()
        require(torch.equal(back, data), "other bytes than were written")
        self.handle.async_pread(back.zero_(), self.path)
        self.handle.wait()


class Adaptive(Futures):
    """``aio_handle.adaptive``."""

    def made(self) -> nvme_ops.aio_handle:
        return nvme_ops.aio_handle.adaptive(self.folder)


class File(Capability):
    """``nvme_ops.open``: written in parts of any size, made durable, and read, which is what blocks."""

    waits = ("read",)

    def start(self) -> None:
        self.path = self.folder / "file"

    def do(self, version: int) -> None:
        (data,) = tensors(version, 1).values()
        content = memoryview(data.numpy().data).cast("B")
        with self.ending(nvme_ops.open(self.path, "w+", handle=self.handle)) as file:
            for start in range(0, len(content), 250_000):
                file.write(content[start : start + 250_000])
            file.sync()
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            file.seek(0)
            require(file.read() == bytes(content), "other bytes than were written")

    def leave(self) -> None:
        self.file = nvme_ops.open(self.path, "w")
        self.file.write(b"left" * 500_000)

    def left(self) -> bool:
        return self.path.read_bytes() == b"left" * 500_000


class Log(Capability):
    """``AsyncLog``. A failure makes it begin another file."""

    more_files = 100
    main = "log"

    def start(self) -> None:
        self.log = AsyncLog(self.folder / "log", window=0.05)
        self.expected: list[bytes] = []  # in ``flush``, which says when they are durable

    def do(self, version: int) -> None:
        self.log.flush()  # what failed before is tried again
        record = bytes([version % 256]) * 300_000
        self.log.append(record)
        self.expected.append(record)
        self.log.flush()

    def check(self) -> None:
        self.log.flush()
        records = list(AsyncLog.read(self.folder / "log"))
        require(records == self.expected, f"{len(records)} records of {len(self.expected)}")

    def leave(self) -> None:
        self.log.append(b"left" * 100_000)

    def left(self) -> bool:
        return b"left" * 100_000 in list(AsyncLog.read(self.folder / "log"))


class Samples(Capability):
    """``SampleWriter``, read by ``SampleStore``. The files of a store whose index could not be read stay."""

    more_files = 2
    kept = verified = True

    def start(self) -> None:
        self.do(0)

    def do(self, version: int) -> None:
        with self.ending(SampleWriter(self.folder, bytes, shard_bytes="500K", overwrite=True)) as writer:
            writer.extend(_samples(version))

    def check(self) -> None:
        with SampleStore(self.folder, verify=True, handle=self.handle) as store:
            samples = [sample.numpy().tobytes() for sample in store.read(range(len(store)))]
        require(any(samples == _samples(self.version + more) for more in (0, 1)), "neither the old nor the new store")


class Batches(Samples):
    """``SampleStore`` and ``Loader``."""

    kept = verified = False

    def start(self) -> None:
        super().do(0)

    def do(self, version: int) -> None:
        with self.ending(SampleStore(self.folder, handle=self.handle)) as store:
            read = store.read(range(len(store)))
            batches = [sample for batch in Loader(store, 4, memory_budget="600K") for sample in batch]
        for source in (read, batches):
            same_samples = [sample.numpy().tobytes() for sample in source] == _samples(0)
            require(same_samples, "other samples than were written")

    def check(self) -> None:
        pass


def _samples(version: int) -> list[bytes]:
    return [bytes([(version + number) % 256]) * 100_000 for number in range(10)]
