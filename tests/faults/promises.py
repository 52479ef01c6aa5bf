"""What the package promises to be durable, each as a small program and a check of what a power failure has left.

``rig`` cuts the power of a disk at random moments of each program.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import torch
import torch.distributed as dist

import nvme_ops
from nvme_ops import dcp
from nvme_ops.base.settings import Settings
from nvme_ops.data import AsyncLog, SampleStore
from nvme_ops.data.cli import main as nvme_data
from nvme_ops.filesystem.device import Identity
from nvme_ops.io.tuning import store as tuning_store
from nvme_ops.offload import NvmeOptimizer
from nvme_ops.op_builder import finished, jit
from nvme_ops.op_builder.recipe import Recipe
from nvme_ops.storage import Session, TensorStore
from tests.contract import adapters
from tests.contract.adapters import SHAPE, Capability, require, same, tensors
from tests.faults import promises_keep
from tests.faults.disk import ROOT

VERSIONS = range(1, 9)
SCRATCH = ROOT / "scratch"  # a folder for what a program needs beside the disk
Tell = Callable[[Any], object]
Write = Callable[[Path, int], object]


@dataclass(frozen=True)
class Promise:
    """A program that makes promises, and what looks whether they were kept.

    Args:
        program: called with an empty folder on the disk, and with what tells a promise (any JSON), in a process that
            then ends at once.
        check: called with the same folder after a power failure, and what was told by then. Raises unless it is kept.
        held: False for a control: the rig has to find that it is not kept.
    """

    program: Callable[[Path, Tell], object]
    check: Callable[[Path, list[Any]], object]
    held: bool = True


def versions(write: Write, check: Write, held: bool = True) -> Promise:
    """Makes a promise of what writes versions; ``check`` is given the last one that was promised, 0: none."""

    def program(folder: Path, tell: Tell) -> None:
        for version in VERSIONS:
            write(folder, version)
            tell(version)

    return Promise(program, _of_last(check), held)


def _of_last(check: Write) -> Callable[[Path, list[Any]], object]:
    return lambda folder, told: check(folder, told[-1] if told else 0)


def at_least(version: int, last: int) -> None:
    """Raises if what is there is older than promised, or was never written."""
    require(last <= version <= VERSIONS[-1], f"{version or 'nothing'} is there")


def newest(write: Write, version_of: Callable[[Path], int], held: bool = True) -> Promise:
    """Makes a promise of what writes one version over the other; ``version_of`` is 0 where none is there."""
    return versions(write, lambda folder, last: at_least(version_of(folder), last), held)


def side_by_side(write: Write, right: Callable[[Path, int], bool]) -> Promise:
    """Makes a promise of what writes each version to a place of its own, where it is looked for by ``right``."""

    def check(folder: Path, last: int) -> None:
        for version in range(1, last + 1):
            require(right(folder, version), f"{version} is something else")

    return versions(write, check)


# What the contract's adapters do

COMMITTED = "checkpoint.*", "*.index.json", ".metadata", "index.nvmedata"


def kept(kind: type[Capability], **options: Any) -> Promise:
    """Makes a promise of what a capability keeps: what is found is what was completed last, or what came after it."""
    made: Any = type(kind.__name__, (kind,), {"options": options}) if options else kind

    def program(folder: Path, tell: Tell) -> None:
        one = made(folder)
        for version in (0, *VERSIONS):
            if version:
                one.work()
            tell(version)

    def check(folder: Path, told: list[Any]) -> None:
        if told or any(path for name in COMMITTED for path in folder.rglob(name)):
            made.found(folder, told[-1] if told else -1).check()

    return Promise(program, check)


# Checkpoints


def _deep(folder: Path, version: int) -> Path:
    return folder / f"step {version}" / "deep" / "model"


def _of_ranks(version: int) -> dict[str, torch.Tensor]:
    return {f"{name} {rank}": tensor for rank in range(2) for name, tensor in tensors(version).items()}


def _two_ranks(folder: Path, tell: Tell) -> None:
    SCRATCH.mkdir(exist_ok=True)
    meeting = f"file://{SCRATCH}/ranks of {os.getpid()}"
    rank = int(not os.fork())
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=2)
    for version in VERSIONS:
        dcp.save(_of_ranks(version), folder / "new" / "dcp")
        if not rank:
            tell(version)
    dist.barrier()
    if rank:
        os._exit(0)
    os.wait()


def _check_two_ranks(folder: Path, last: int) -> None:
    path, loaded = folder / "new" / "dcp", {name: torch.zeros(SHAPE) for name in _of_ranks(0)}
    if last or (path / ".metadata").exists():
        dcp.load(loaded, path, verify=True)
        require(any(same(loaded, _of_ranks(version)) for version in VERSIONS[max(last, 1) - 1 :]), "another version")


def _states(folder: Path, tell: Tell) -> None:
    torch.manual_seed(0)
    parameter = torch.nn.Parameter(torch.zeros(200_000))
    SCRATCH.mkdir(exist_ok=True)
    with NvmeOptimizer([parameter], torch.optim.AdamW, folder, memory_budget="4M") as optimizer:
        for version in VERSIONS:
            parameter.grad = torch.randn(200_000)
            optimizer.step()
            optimizer.save_states(SCRATCH / f"states {version}")
            optimizer.save_states(folder / "states")
            tell(version)


def _check_states(folder: Path, last: int) -> None:
    if last or (folder / "states").exists():
        content, later = (folder / "states").read_bytes(), VERSIONS[max(last, 1) - 1 :]
        require(any((SCRATCH / f"states {step}").read_bytes() == content for step in later), "states of another step")


# Data and files


def _record(number: int) -> bytes:
    return b"%d " % number * (number * 7 % 1000)


def _log(folder: Path, tell: Tell) -> None:
    with AsyncLog(folder / "log", window=0.02, rotate_bytes=200_000) as log:
        for number in range(1, 400):
            log.append(_record(number))
            if number % 20 == 0:
                log.flush()
                tell(number)


def _check_log(folder: Path, last: int) -> None:
    if last or [*folder.glob("log.*")]:
        records = [bytes(record) for record in AsyncLog.read(folder / "log")]
        require(records == [_record(number + 1) for number in range(len(records))], "other records than were written")
        require(len(records) >= last, f"{len(records)} records")


def _convert(folder: Path, version: int) -> None:
    source = SCRATCH / "source"
    shutil.rmtree(source, ignore_errors=True)
    source.mkdir(parents=True)
    for number in range(20):
        (source / f"{number:03d}").write_bytes(b"%d" % version * 10_000)
    with open(os.devnull, "w") as silence, contextlib.redirect_stdout(silence):
        require(nvme_data(["convert", str(source), str(folder / f"new {version}" / "store")]) == 0, "nvme-data")


def _is_converted(folder: Path, version: int) -> bool:
    with SampleStore(folder / f"new {version}" / "store", verify=True) as store:
        return [bytes(sample["data"].tolist()) for sample in store.read(range(20))] == [b"%d" % version * 10_000] * 20


def _file(folder: Path, version: int) -> None:
    with nvme_ops.open(folder / f"file {version}", "w") as file:
        file.write(b"%d" % version * 300_001)
        file.pwrite(torch.full((70_000,), version), 1 << 19)
        file.sync()
    with nvme_ops.open(folder / "appended", "a") as file:
        file.write(b"%d" % version * 3001)
        file.sync()


def _is_file(folder: Path, version: int) -> bool:
    content, appended = ((folder / name).read_bytes() for name in (f"file {version}", "appended"))
    begin, end = content[:300_001], content[1 << 19 :]
    if (begin, end) != (b"%d" % version * 300_001, version.to_bytes(8, "little") * 70_000):
        return False
    return appended[(version - 1) * 3001 : version * 3001] == b"%d" % version * 3001


# Stores


def _store(folder: Path, tell: Tell) -> None:
    """Puts tensors that stay, some that are replaced, and some that are not promised."""
    with Session(folder, name="kept", reuse=True) as session, TensorStore(session) as store:
        for version in VERSIONS:
            for number in range(20):
                store.put(f"{version} {number}", torch.full((number * 100 + 1,), version))
                store.put(f"{number}", torch.full((number * 100 + 1,), version)).result()
                time.sleep(0.003)
            store.sync()
            tell(version)
            for number in range(50):
                store.put(f"{'not promised' * 9} {number}", torch.full((1000,), 100 + version)).result()


@mock.patch("nvme_ops.storage.journal.boot_id", functools.partial(str, "another start of the machine"))
def _check_store(folder: Path, last: int) -> None:
    if last % 2:  # as another program, which removes what was abandoned
        Session(folder, name="another").close()
    prefixes = ["", *(f"{earlier} " for earlier in range(1, last + 1))]
    with Session(folder, name="kept", reuse=True) as session, TensorStore(session) as store:
        for key in (f"{prefix}{number}" for prefix in prefixes for number in range(20)):
            if not last and key not in store:
                continue
            future = store.get(key)
            future.result()
            version, _, number = key.rpartition(" ")
            value = int(future.tensor[0])
            require(torch.equal(future.tensor, torch.full((int(number) * 100 + 1,), value)), f"{key} has other values")
            require(not version or value == int(version), f"{key} is {value}")
            at_least(value, 0 if version else last)


# Settings


IDENTITY = Identity(("disk",), "ext4", "", "kernel", 1, "cpu", "threads")


def _settings_in(folder: Path) -> None:
    os.environ["XDG_CACHE_HOME"] = str(folder / "new" / "cache")
    warnings.simplefilter("error")  # which is what a damaged file is


def _tuned(folder: Path, version: int) -> None:
    _settings_in(folder)
    tuning_store.keep(IDENTITY, Settings(), {"version": version, "long": [version] * 3000})


def _found_tuned(folder: Path) -> int:
    _settings_in(folder)
    stored: Any = tuning_store.load(IDENTITY)
    require(stored is None or stored["long"] == [stored["version"]] * 3000, f"{stored}")
    return 0 if stored is None else int(stored["version"])


def _built(folder: Path, version: int) -> None:
    """An op that was compiled is promised to be whole, if it is there."""
    entry = finished.CacheEntry(folder / f"op-{version}", "op")
    with jit.building(entry) as workshop:
        if workshop is not None:
            Path(workshop, "op.so").write_bytes(b"%d" % version * 300_000)
            jit.seal(workshop, cast(Recipe, SimpleNamespace(name="op", facts=dict)))


def _is_built(folder: Path, version: int) -> bool:
    entry = finished.CacheEntry(folder / f"op-{version}", "op")
    return entry.record() is None or entry.library.read_bytes() == b"%d" % version * 300_000


# A control


def _renamed(folder: Path, version: int) -> None:
    path = folder / "renamed"
    path.with_suffix(".new").write_bytes(b"%d" % version * 300_000)
    path.with_suffix(".new").rename(path)


def _found_renamed(folder: Path) -> int:
    path = folder / "renamed"
    (byte,) = set(path.read_bytes()) if path.exists() else b"0"
    return byte - ord("0")


class _SaveAsyncSharded(adapters.SaveAsync):
    name = "folder"


PROMISES = {
    "safetensors": kept(adapters.Save),
    "pt": kept(adapters.SaveTorch),
    "sharded": kept(adapters.SaveSharded),
    "sharded in new folders": side_by_side(
        lambda folder, version: nvme_ops.save(tensors(version), _deep(folder, version), max_shard_size="2M"),
        lambda folder, version: same(nvme_ops.load(_deep(folder, version), verify=True), tensors(version)),
    ),
    "recycle safetensors": kept(adapters.Save, recycle=True),
    "recycle pt": kept(adapters.SaveTorch, recycle=True),
    "save_async": kept(adapters.SaveAsync),
    "save_async sharded": kept(_SaveAsyncSharded, max_shard_size=1_200_000),
    "save_states": Promise(_states, _of_last(_check_states)),
    "dcp": kept(adapters.DcpSave),
    "dcp of two ranks": Promise(_two_ranks, _of_last(_check_two_ranks)),
    "AsyncLog.flush": Promise(_log, _of_last(_check_log)),
    "SampleWriter.close": kept(adapters.Samples),
    "nvme-data convert": side_by_side(_convert, _is_converted),
    "File.sync": side_by_side(_file, _is_file),
    "TensorStore.sync": Promise(_store, _of_last(_check_store)),
    "tune": newest(_tuned, _found_tuned),
    "compiled op": side_by_side(_built, _is_built),
    **{
        f"NvmeOptimizer keep, {option}": Promise(
            functools.partial(promises_keep.write, option=option), functools.partial(promises_keep.check, option=option)
        )
        for option in promises_keep.OPTIONS
    },
    "control: a rename without a flush": newest(_renamed, _found_renamed, held=False),
}
