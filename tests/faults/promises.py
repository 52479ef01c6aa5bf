"""What the package promises to be durable, each as a small program and a check; see ``power``."""

from __future__ import annotations

import contextlib
import functools
import io
import os
import shutil
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import torch
import torch.distributed as dist

import nvme_ops
from nvme_ops import dcp
from nvme_ops.data import AsyncLog, SampleStore
from nvme_ops.data.cli import main as nvme_data
from nvme_ops.offload import NvmeOptimizer
from nvme_ops.op_builder import finished, jit
from nvme_ops.op_builder.recipe import Recipe
from nvme_ops.settings import Settings
from nvme_ops.storage import Session, TensorStore
from nvme_ops.storage.device import Identity
from nvme_ops.tuning import dictionary
from nvme_ops.tuning import store as tuning_store
from tests.contract import adapters
from tests.contract.adapters import SHAPE, Capability, require, same, tensors
from tests.faults import promises_keep
from tests.faults.power import SCRATCH, Promise

VERSIONS = range(1, 9)
Tell = Callable[[int], None]


class LostError(AssertionError):
    """What was promised is not there."""


def numbered(program: Callable[[str, Tell], None], check: Callable[[str, int], None], held: bool = True) -> Promise:
    """Makes a promise of a program that tells rising numbers, and a check of the last of them; 0: none.

    Whatever else than LostError the check raises says that what is there is neither old nor new.
    """

    def judged(folder: str, lines: list[str]) -> str:
        try:
            check(folder, int(lines[-1]) if lines else 0)
        except LostError as error:
            return f"lost: {error}"
        return "fine"

    return Promise(lambda folder, tell: program(folder, lambda number: tell(str(number))), judged, held)


def newest(write: Callable[[str, int], object], found: Callable[[str], int], held: bool = True) -> Promise:
    """Makes a promise of what writes one version over the other; ``found`` is 0 where none is there."""

    return numbered(_every(write), lambda folder, last: at_least(found(folder), last), held)


def _every(write: Callable[[str, int], object]) -> Callable[[str, Tell], None]:
    def program(folder: str, tell: Tell) -> None:
        for version in VERSIONS:
            write(folder, version)
            tell(version)

    return program


def at_least(found: int, last: int) -> None:
    """Raises LostError if what is there is older than promised."""
    require(found <= VERSIONS[-1], f"{found} is there")
    if found < last:
        raise LostError(f"{found or 'nothing'} is there")


def each(write: Callable[[str, int], object], right: Callable[[str, int], bool]) -> Promise:
    """Makes a promise of what writes each version to a place of its own, where it is looked for by ``right``."""

    def check(folder: str, last: int) -> None:
        for version in range(1, last + 1):
            require(right(folder, version), f"{version} is something else")

    return numbered(_every(write), check)


# What the contract's adapters do

COMMITTED = "checkpoint.*", "*.index.json", ".metadata", "index.nvmedata"


def kept(kind: type[Capability], **options: Any) -> Promise:
    """Makes a promise of what a capability keeps: what is found is what was completed last, or what came after it."""
    made: Any = type(kind.__name__, (kind,), {"options": options}) if options else kind

    def program(folder: str, tell: Tell) -> None:
        one = made(Path(folder))
        tell(1)
        for version in VERSIONS:
            one.work()
            tell(1 + version)

    def check(folder: str, last: int) -> None:
        if last or any(path for name in COMMITTED for path in Path(folder).rglob(name)):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # that there is one process
                made.found(Path(folder), last - 1).check()

    return numbered(program, check)


class SaveAsyncSharded(adapters.SaveSharded):
    """``save_async``, in several files."""

    def do(self, version: int) -> None:
        nvme_ops.save_async(tensors(version), self.path, **self.options).result()


# Checkpoints


def _deep(folder: str, version: int) -> str:
    return os.path.join(folder, f"step {version}", "deep", "model")


def _of_ranks(version: int) -> dict[str, torch.Tensor]:
    return {f"{name} {rank}": tensor for rank in range(2) for name, tensor in tensors(version).items()}


def _two_ranks(folder: str, tell: Tell) -> None:
    meeting = os.path.join(os.environ[SCRATCH], "ranks")
    os.makedirs(os.path.dirname(meeting), exist_ok=True)
    with contextlib.suppress(FileNotFoundError):
        os.unlink(meeting)
    other = os.fork()
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=int(not other), world_size=2)
    for version in VERSIONS:
        dcp.save(_of_ranks(version), os.path.join(folder, "new", "dcp"))
        if other:
            tell(version)
    dist.barrier()
    if not other:
        os._exit(0)
    os.waitpid(other, 0)


def _check_two_ranks(folder: str, last: int) -> None:
    path, versions = os.path.join(folder, "new", "dcp"), [0]
    if os.path.exists(os.path.join(path, ".metadata")):
        found = {name: torch.zeros(SHAPE) for name in _of_ranks(0)}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that there is one process
            dcp.load(found, path, verify=True)
        versions = [version for version in VERSIONS if same(found, _of_ranks(version))]
    require(bool(versions), "tensors of no version")
    at_least(versions[0], last)


def _states(folder: str, tell: Tell) -> None:
    torch.manual_seed(0)
    parameter, scratch = torch.nn.Parameter(torch.zeros(200_000)), os.environ[SCRATCH]
    os.makedirs(scratch, exist_ok=True)
    with contextlib.closing(NvmeOptimizer([parameter], torch.optim.AdamW, folder, memory_budget="4M")) as optimizer:
        for version in VERSIONS:
            parameter.grad = torch.randn(200_000)
            optimizer.step()
            optimizer.save_states(os.path.join(scratch, f"states {version}"))
            optimizer.save_states(os.path.join(folder, "states"))
            tell(version)


def _check_states(folder: str, last: int) -> None:
    path, found = Path(folder, "states"), [0]
    if path.exists():
        content = path.read_bytes()
        found = [each for each in VERSIONS if Path(os.environ[SCRATCH], f"states {each}").read_bytes() == content]
    require(bool(found), "states of no step")
    at_least(found[0], last)


# Data and files


def _record(number: int) -> bytes:
    return b"%d " % number * (number * 7 % 1000)


def _log(folder: str, tell: Tell) -> None:
    with AsyncLog(os.path.join(folder, "log"), window=0.02, rotate_bytes=200_000) as log:
        for number in range(1, 400):
            log.append(_record(number))
            if number % 20 == 0:
                log.flush()
                tell(number)


def _check_log(folder: str, last: int) -> None:
    found: list[bytes] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about the end, which was being written
        if any(name.startswith("log.") for name in os.listdir(folder)):
            found = [bytes(record) for record in AsyncLog.read(os.path.join(folder, "log"))]
    require(found == [_record(number + 1) for number in range(len(found))], "other records than were written")
    if len(found) < last:
        raise LostError(f"{len(found)} records")


def _convert(folder: str, version: int) -> None:
    source = os.path.join(os.environ[SCRATCH], "source")
    shutil.rmtree(source, ignore_errors=True)
    os.makedirs(source)
    for number in range(20):
        Path(source, f"{number:03d}").write_bytes(b"%d" % version * 10_000)
    with contextlib.redirect_stdout(io.StringIO()):
        require(nvme_data(["convert", source, os.path.join(folder, f"new {version}", "store")]) == 0, "nvme-data")


def _is_converted(folder: str, version: int) -> bool:
    with SampleStore(os.path.join(folder, f"new {version}", "store"), verify=True) as store:
        return [bytes(sample["data"].tolist()) for sample in store.read(range(20))] == [b"%d" % version * 10_000] * 20


def _file(folder: str, version: int) -> None:
    with nvme_ops.open(os.path.join(folder, f"file {version}"), "w") as file:
        file.write(b"%d" % version * 300_001)
        file.pwrite(torch.full((70_000,), version), 1 << 19)
        file.sync()
    with nvme_ops.open(os.path.join(folder, "appended"), "a") as file:
        file.write(b"%d" % version * 3001)
        file.sync()


def _is_file(folder: str, version: int) -> bool:
    content, appended = (Path(folder, name).read_bytes() for name in (f"file {version}", "appended"))
    begin, end = content[:300_001], content[1 << 19 :]
    if (begin, end) != (b"%d" % version * 300_001, version.to_bytes(8, "little") * 70_000):
        return False
    return appended[(version - 1) * 3001 : version * 3001] == b"%d" % version * 3001


# Stores


@contextlib.contextmanager
def _kept(folder: str) -> Iterator[TensorStore]:
    with Session(folder, name="kept", reuse=True) as session, TensorStore(session) as store:
        yield store


_started_again = mock.patch("nvme_ops.storage.journal.boot_id", functools.partial(str, "another start of the machine"))


def _store(folder: str, tell: Tell) -> None:
    """Puts tensors that stay, some that are replaced, and some that are not promised."""
    with _kept(folder) as store:
        for version in VERSIONS:
            for number in range(20):
                store.put(f"{version} {number}", torch.full((number * 100 + 1,), version))
                store.put(f"{number}", torch.full((number * 100 + 1,), version)).result()
                time.sleep(0.003)
            store.sync()
            tell(version)
            for number in range(50):
                store.put(f"{'not promised' * 9} {number}", torch.full((1000,), 100 + version)).result()


@_started_again
def _check_store(folder: str, last: int) -> None:
    if last % 2:  # as another program, which removes what was abandoned
        Session(folder, name="another").close()
    with _kept(folder) as store:
        for key in (f"{version}{number}" for version in ("", *(f"{each} " for each in range(1, last + 1)))
                    for number in range(20)):  # fmt: skip
            if key not in store:
                if last:
                    raise LostError(key)
                continue
            future = store.get(key)
            future.result()
            version, _, number = key.rpartition(" ")
            found = int(future.tensor[0])
            require(torch.equal(future.tensor, torch.full((int(number) * 100 + 1,), found)), f"{key} has other values")
            require(not version or found == int(version), f"{key} is {found}")
            at_least(found, 0 if version else last)


# Settings


IDENTITY = Identity(("disk",), "ext4", "", "kernel", 1, "cpu", "threads")


def _settings_of(folder: str, section: str, of: Callable[[Any], Any]) -> Any:
    os.environ["XDG_CACHE_HOME"] = os.path.join(folder, "new", "cache")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return tuning_store.load(IDENTITY, section, of)


def _tuned(folder: str, version: int) -> None:
    os.environ["XDG_CACHE_HOME"] = os.path.join(folder, "new", "cache")
    tuning_store.keep(IDENTITY, Settings(), {"version": version, "long": [version] * 3000})


def _found_tuned(folder: str) -> int:
    found = _settings_of(folder, "tuned", tuning_store.settings_of)
    require(found is None or found["long"] == [found["version"]] * 3000, f"{found}")
    return 0 if found is None else int(found["version"])


class _Known:
    """What a handle has learned, as the native module gives it."""

    def __init__(self, version: int) -> None:
        self._version = version

    def entries(self) -> list[tuple[Any, ...]]:
        tools = [(4096 * number, 1, 1, False, False, 0) for number in (1, 2)]
        return [
            ((0, size, place, 0, 0), tools, [1e-9, 2e-9], 0, 1e-9, 0, self._version, self._version)
            for size in range(10)
            for place in range(4)
        ]


def _learned(folder: str, version: int) -> None:
    os.environ["XDG_CACHE_HOME"] = os.path.join(folder, "new", "cache")
    known = dictionary.Dictionary(IDENTITY, None, 1, (), False)
    known._experiences["async_io"] = _Known(version)
    known.save()


def _found_learned(folder: str) -> int:
    found = [entry["transfers"] for entry in _settings_of(folder, dictionary.SECTION, list) or []]
    require(not found or found == [found[0]] * 40, f"{found}")
    return int(found[0]) if found else 0


def _built(folder: str, version: int) -> None:
    """An op that was compiled is promised to be whole, if it is there."""
    entry = finished.CacheEntry(Path(folder, f"op-{version}"), "op")
    with jit.building(entry) as workshop:
        if workshop is not None:
            Path(workshop, "op.so").write_bytes(b"%d" % version * 300_000)
            jit.seal(workshop, cast(Recipe, SimpleNamespace(name="op", facts=dict)))


def _is_built(folder: str, version: int) -> bool:
    entry = finished.CacheEntry(Path(folder, f"op-{version}"), "op")
    return entry.record() is None or entry.library.read_bytes() == b"%d" % version * 300_000


# A control


def _renamed(folder: str, version: int) -> None:
    path = Path(folder, "renamed")
    path.with_suffix(".new").write_bytes(b"%d" % version * 300_000)
    path.with_suffix(".new").rename(path)


def _found_renamed(folder: str) -> int:
    path = Path(folder, "renamed")
    (found,) = set(path.read_bytes()) if path.exists() else b"0"
    return found - ord("0")


PROMISES = {
    "safetensors": kept(adapters.Save),
    "pt": kept(adapters.SaveTorch),
    "sharded": kept(adapters.SaveSharded),
    "sharded in new folders": each(
        lambda folder, version: nvme_ops.save(tensors(version), _deep(folder, version), max_shard_size="2M"),
        lambda folder, version: same(nvme_ops.load(_deep(folder, version), verify=True), tensors(version)),
    ),
    "recycle safetensors": kept(adapters.Save, recycle=True),
    "recycle pt": kept(adapters.SaveTorch, recycle=True),
    "save_async": kept(adapters.SaveAsync),
    "save_async sharded": kept(SaveAsyncSharded),
    "save_states": numbered(_states, _check_states),
    "dcp": kept(adapters.DcpSave),
    "dcp of two ranks": numbered(_two_ranks, _check_two_ranks),
    "AsyncLog.flush": numbered(_log, _check_log),
    "SampleWriter.close": kept(adapters.Samples),
    "nvme-data convert": each(_convert, _is_converted),
    "File.sync": each(_file, _is_file),
    "TensorStore.sync": numbered(_store, _check_store),
    "tune": newest(_tuned, _found_tuned),
    "adaptive": newest(_learned, _found_learned),
    "compiled op": each(_built, _is_built),
    **{
        f"NvmeOptimizer keep, {option}": Promise(
            functools.partial(promises_keep.write, option=option), functools.partial(promises_keep.check, option=option)
        )
        for option in promises_keep.OPTIONS
    },
    "control: a rename without a flush": newest(_renamed, _found_renamed, held=False),
}
