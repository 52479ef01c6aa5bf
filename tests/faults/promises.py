"""What the package promises to be durable, each as a small program and a check; see ``power``."""

from __future__ import annotations

import contextlib
import functools
import io
import os
import shutil
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import FileSystemReader

import nvme_ops
from nvme_ops import dcp
from nvme_ops.data import AsyncLog, SampleStore, SampleWriter
from nvme_ops.data.cli import main as nvme_data
from nvme_ops.offload import NvmeOptimizer
from nvme_ops.op_builder import cache
from nvme_ops.op_builder.recipe import Recipe
from nvme_ops.settings import Settings
from nvme_ops.storage import Session, TensorStore
from nvme_ops.storage.device import Identity
from nvme_ops.tuning import dictionary
from nvme_ops.tuning import store as tuning_store
from tests.faults import promises_keep
from tests.faults.power import SCRATCH, Promise

VERSIONS, _LARGE = range(1, 9), 200_000  # elements
Tell = Callable[[int], None]


class LostError(AssertionError):
    """What was promised is not there."""


class MixedError(AssertionError):
    """What is there is neither old nor new, or cannot be read."""


def numbered(program: Callable[[str, Tell], None], check: Callable[[str, int], None], held: bool = True) -> Promise:
    """Makes a promise of a program that tells rising numbers, and a check of the last of them; 0: none."""

    def judged(folder: str, lines: list[str]) -> str:
        try:
            check(folder, int(lines[-1]) if lines else 0)
        except LostError as error:
            return f"lost: {error}"
        except MixedError as error:
            return f"mixed: {error}"
        return "fine"

    return Promise(lambda folder, tell: program(folder, lambda number: tell(str(number))), judged, held)


def state(version: int) -> dict[str, torch.Tensor]:
    """Tensors, small and large, that say which version they are."""
    return {
        "large": torch.full((_LARGE,), version),
        "small": torch.full((5,), version),
        "odd": torch.full((1, 7), version),
    }


def version_of(tensors: dict[str, torch.Tensor]) -> int:
    """Returns the version that all the tensors are; raises MixedError."""
    found = {int(value) for tensor in tensors.values() for value in tensor.unique()}
    if len(found) != 1 or set(tensors) != set(state(1)):
        raise MixedError(f"versions {sorted(found)[:9]} of {sorted(tensors)}")
    return found.pop()


def require(found: int, last: int) -> None:
    """Raises LostError if what is there is older than promised, MixedError if it was never written."""
    if found < last:
        raise LostError(f"{found or 'nothing'} is there")
    if found > VERSIONS[-1]:
        raise MixedError(f"{found} is there")


# Checkpoints


def saves(name: str, background: bool = False, held: bool = True, **options: Any) -> Promise:
    """Saves versions of a state, one over the other."""

    def program(folder: str, tell: Tell) -> None:
        for version in VERSIONS:
            path = os.path.join(folder, name)
            if background:
                nvme_ops.save_async(state(version), path, **options).result()
            else:
                nvme_ops.save(state(version), path, **options)
            tell(version)

    return numbered(program, functools.partial(_check_save, name), held)


def _check_save(name: str, folder: str, last: int) -> None:
    path = os.path.join(folder, name)
    there = os.path.exists(path) and (
        not os.path.isdir(path) or any(each.endswith(".json") for each in os.listdir(path))
    )
    require(version_of(nvme_ops.load(path, verify=True)) if there else 0, last)


def _new_folders(folder: str, tell: Tell) -> None:
    for version in VERSIONS:
        nvme_ops.save(state(version), os.path.join(folder, f"step {version}", "deep", "model"), max_shard_size=300_000)
        tell(version)


def _check_new_folders(folder: str, last: int) -> None:
    for version in range(1, last + 1):
        path = os.path.join(folder, f"step {version}", "deep", "model")
        if not os.path.isdir(path):
            raise LostError(f"version {version} has no folder")
        require(version_of(nvme_ops.load(path, verify=True)), version)


def _dcp(ranks: int) -> Promise:
    def program(folder: str, tell: Tell) -> None:
        meeting = os.path.join(os.environ[SCRATCH], "ranks")
        os.makedirs(os.path.dirname(meeting), exist_ok=True)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(meeting)
        others = []
        for rank in range(1, ranks):
            others.append(os.fork())
            if not others[-1]:
                _save_as_rank(folder, lambda _: None, rank, ranks, meeting)
                os._exit(0)
        _save_as_rank(folder, tell, 0, ranks, meeting)
        for each in others:
            os.waitpid(each, 0)

    return numbered(program, _check_dcp)


def _save_as_rank(folder: str, tell: Tell, rank: int, ranks: int, meeting: str) -> None:
    if ranks > 1:
        dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=ranks)
    for version in VERSIONS:
        mine = {f"{name} {each}": tensor for each in range(ranks) for name, tensor in state(version).items()}
        dcp.save(mine, os.path.join(folder, "new", "dcp"))
        tell(version)
    if ranks > 1:
        dist.barrier()


def _check_dcp(folder: str, last: int) -> None:
    path = os.path.join(folder, "new", "dcp")
    if not os.path.exists(os.path.join(path, ".metadata")):
        return require(0, last)
    known = FileSystemReader(path).read_metadata().state_dict_metadata
    sizes = {name: cast(Any, entry).size for name, entry in known.items()}
    found = {name: torch.zeros(size, dtype=torch.int64) for name, size in sizes.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is one process
        dcp.load(found, path, verify=True)
    parts = {name.rpartition(" ")[2] for name in found}
    versions = {
        version_of({name.rpartition(" ")[0]: tensor for name, tensor in found.items() if name.endswith(part)})
        for part in parts
    }
    if len(versions) > 1:
        raise MixedError(f"versions {versions} of ranks")
    return require(versions.pop(), last)


def _states(folder: str, tell: Tell) -> None:
    torch.manual_seed(0)
    parameter, scratch = torch.nn.Parameter(torch.zeros(_LARGE)), os.environ[SCRATCH]
    os.makedirs(scratch, exist_ok=True)
    with contextlib.closing(NvmeOptimizer([parameter], torch.optim.AdamW, folder, memory_budget="4M")) as optimizer:
        for version in VERSIONS:
            parameter.grad = torch.randn(_LARGE)
            optimizer.step()
            optimizer.save_states(os.path.join(scratch, f"states {version}"))
            optimizer.save_states(os.path.join(folder, "states"))
            tell(version)


def _check_states(folder: str, last: int) -> None:
    path = os.path.join(folder, "states")
    if not os.path.exists(path):
        return require(0, last)
    content = Path(path).read_bytes()
    same = [version for version in VERSIONS if Path(os.environ[SCRATCH], f"states {version}").read_bytes() == content]
    if not same:
        raise MixedError("states of no step")
    return require(same[0], last)


# Data


def _log(folder: str, tell: Tell) -> None:
    with AsyncLog(os.path.join(folder, "log"), window=0.02, rotate_bytes=200_000) as log:
        for number in range(1, 400):
            log.append(_record(number))
            if number % 20 == 0:
                log.flush()
                tell(number)


def _record(number: int) -> bytes:
    return b"%d " % number * (number * 7 % 1000)


def _check_log(folder: str, last: int) -> None:
    found: list[bytes] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about the end, which was being written
        if any(name.startswith("log.") for name in os.listdir(folder)):
            found = [bytes(record) for record in AsyncLog.read(os.path.join(folder, "log"))]
    if len(found) < last:
        raise LostError(f"{len(found)} records")
    if found != [_record(number + 1) for number in range(len(found))]:
        raise MixedError("other records than were written")


def _samples(folder: str, tell: Tell) -> None:
    for version in VERSIONS:
        with SampleWriter(folder, {"x": (torch.int64, (-1,))}, shard_bytes=100_000, overwrite=True) as writer:
            writer.extend({"x": torch.full((number,), version)} for number in range(300))
        tell(version)


def _check_samples(folder: str, last: int) -> None:
    if not os.path.exists(os.path.join(folder, "index.nvmedata")):
        return require(0, last)
    with SampleStore(folder, verify=True) as store:
        found = [sample["x"] for sample in store.read(range(len(store)))]
    values = {int(value) for each in found for value in each.unique()}
    if len(found) != 300 or len(values) != 1 or [len(each) for each in found] != list(range(300)):
        raise MixedError(f"{len(found)} samples of versions {values}")
    return require(values.pop(), last)


def _convert(folder: str, tell: Tell) -> None:
    source = os.path.join(os.environ[SCRATCH], "source")
    for version in VERSIONS:
        shutil.rmtree(source, ignore_errors=True)
        os.makedirs(source)
        for number in range(20):
            Path(source, f"{number:03d}").write_bytes(b"%d" % version * 10_000)
        with contextlib.redirect_stdout(io.StringIO()):
            if nvme_data(["convert", source, os.path.join(folder, f"new {version}", "store")]):
                raise RuntimeError("nvme-data convert failed")
        tell(version)


def _check_convert(folder: str, last: int) -> None:
    for version in range(1, last + 1):
        path = os.path.join(folder, f"new {version}", "store")
        if not os.path.isdir(path):
            raise LostError(f"store {version} has no folder")
        with SampleStore(path, verify=True) as store:
            found = [bytes(store[number]["data"].tolist()) for number in range(len(store))]
        if found != [b"%d" % version * 10_000] * 20:
            raise MixedError(f"store {version} has other samples")


# Files


def _file(folder: str, tell: Tell) -> None:
    for version in VERSIONS:
        with nvme_ops.open(os.path.join(folder, f"file {version}"), "w") as file:
            file.write(b"%d" % version * 300_001)
            file.pwrite(torch.full((70_000,), version), 1 << 19)
            file.sync()
            tell(version)
    with nvme_ops.open(os.path.join(folder, "appended"), "a") as file:
        for version in VERSIONS:
            file.write(b"%d" % version * 3001)
            file.sync()
            tell(len(VERSIONS) + version)


def _check_file(folder: str, last: int) -> None:
    for version in VERSIONS[: min(last, len(VERSIONS))]:
        path = Path(folder, f"file {version}")
        if not path.exists():
            raise LostError(f"{path.name} is not there")
        content = path.read_bytes()
        end = content[1 << 19 :]
        if content[:300_001] != b"%d" % version * 300_001 or end != version.to_bytes(8, "little") * 70_000:
            raise LostError(f"{path.name} has other bytes")
    expected = b"".join(b"%d" % version * 3001 for version in VERSIONS[: max(0, last - len(VERSIONS))])
    path = Path(folder, "appended")
    if expected and (not path.exists() or path.read_bytes()[: len(expected)] != expected):
        raise LostError("what was appended")


# Stores


def _kept(folder: str) -> tuple[Session, TensorStore]:
    session = Session(folder, name="kept", reuse=True)
    return session, TensorStore(session)


_started_again = mock.patch("nvme_ops.storage.journal.boot_id", functools.partial(str, "another start of the machine"))


def _store(folder: str, tell: Tell) -> None:
    """Puts tensors that stay, one that changes, and some that are not promised."""
    session, store = _kept(folder)
    for version in VERSIONS:
        for number in range(20):
            store.put(f"{version} {number}", torch.full((number * 100 + 1,), version))
        store.sync()
        tell(version)
        for number in range(50):
            store.put(f"{'not promised' * 9} {number}", torch.full((1000,), 100 + version)).result()
    store.close()
    session.close()


@_started_again
def _check_store(folder: str, last: int) -> None:
    if last % 2:  # as another program, which removes what was abandoned
        Session(folder, name="another").close()
    session, store = _kept(folder)
    for version in range(1, last + 1):
        for number in range(20):
            if f"{version} {number}" not in store:
                raise LostError(f"{version} {number}")
            if not torch.equal(_got(store, f"{version} {number}"), torch.full((number * 100 + 1,), version)):
                raise MixedError(f"{version} {number} has other values")
    store.close()
    session.close()


def _replaced(folder: str, tell: Tell) -> None:
    """Replaces tensors, and syncs now and then."""
    session, store = _kept(folder)
    for version in VERSIONS:
        for number in range(20):
            store.put(f"{number}", torch.full((number * 100 + 1,), version)).result()
            time.sleep(0.005)
        store.sync()
        tell(version)
    store.close()
    session.close()


@_started_again
def _check_replaced(folder: str, last: int) -> None:
    session, store = _kept(folder)
    for number in range(20):
        if f"{number}" in store:
            values = _got(store, f"{number}")
            found = {int(value) for value in values.unique()}
            if len(found) > 1 or len(values) != number * 100 + 1:
                raise MixedError(f"{number} has values of {found}")
            require(found.pop(), last)
        elif last:
            raise LostError(f"{number}")
    store.close()
    session.close()


def _got(store: TensorStore, key: str) -> torch.Tensor:
    future = store.get(key)
    future.result()
    return future.tensor


IDENTITY = Identity(("disk",), "ext4", "", "kernel", 1, "cpu", "threads")


def _tuned(folder: str, tell: Tell) -> None:
    os.environ["XDG_CACHE_HOME"] = os.path.join(folder, "new", "cache")
    for version in VERSIONS:
        tuning_store.keep(IDENTITY, Settings(), {"version": version, "long": [version] * 3000})
        tell(version)


def _check_tuned(folder: str, last: int) -> None:
    os.environ["XDG_CACHE_HOME"] = os.path.join(folder, "new", "cache")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = tuning_store.load(IDENTITY, "tuned", tuning_store.settings_of)
    if found is not None and found["long"] != [found["version"]] * 3000:
        raise MixedError(f"{found}")
    require(0 if found is None else found["version"], last)


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


def _learned(folder: str, tell: Tell) -> None:
    os.environ["XDG_CACHE_HOME"] = os.path.join(folder, "new", "cache")
    known = dictionary.Dictionary(IDENTITY, None, 1, (), False)
    for version in VERSIONS:
        known._experiences["async_io"] = _Known(version)
        known.save()
        tell(version)


def _check_learned(folder: str, last: int) -> None:
    os.environ["XDG_CACHE_HOME"] = os.path.join(folder, "new", "cache")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = [entry["transfers"] for entry in tuning_store.load(IDENTITY, dictionary.SECTION, list) or []]
    if found and (len(found) != 40 or len(set(found)) != 1):
        raise MixedError(f"{found}")
    require(found[0] if found else 0, last)


def _built(folder: str, tell: Tell) -> None:
    """An op that was compiled is promised to be whole, if it is there."""
    for version in VERSIONS:
        entry = cache.CacheEntry(Path(folder, f"op-{version}"), "op")
        with cache.building(entry) as workshop:
            if workshop is not None:
                Path(workshop, "op.so").write_bytes(b"%d" % version * 300_000)
                cache.seal(workshop, cast(Recipe, SimpleNamespace(name="op", facts=dict)))
        tell(version)


def _check_built(folder: str, last: int) -> None:
    for version in range(1, last + 1):
        entry = cache.CacheEntry(Path(folder, f"op-{version}"), "op")
        if entry.record() is not None and entry.library.read_bytes() != b"%d" % version * 300_000:
            raise MixedError(f"op {version}")


# Controls


def _renamed(folder: str, tell: Tell) -> None:
    for version in VERSIONS:
        path = Path(folder, "renamed")
        path.with_suffix(".new").write_bytes(b"%d" % version * 300_000)
        path.with_suffix(".new").rename(path)
        tell(version)


def _check_renamed(folder: str, last: int) -> None:
    path = Path(folder, "renamed")
    found = set(path.read_bytes()) if path.exists() else {b"0"[0]}
    if len(found) != 1:
        raise MixedError(f"bytes {found}")
    require(int(bytes(found)), last)


PROMISES = {
    "safetensors": saves("x.safetensors"),
    "pt": saves("x.pt"),
    "bin": saves("x.bin"),
    "sharded": saves("model", max_shard_size=300_000),
    "sharded in new folders": numbered(_new_folders, _check_new_folders),
    "recycle safetensors": saves("x.safetensors", recycle=True),
    "recycle pt": saves("x.pt", recycle=True),
    "save_async": saves("x.safetensors", background=True),
    "save_async sharded": saves("model", background=True, max_shard_size=300_000),
    "save_states": numbered(_states, _check_states),
    "dcp": _dcp(1),
    "dcp of two ranks": _dcp(2),
    "AsyncLog.flush": numbered(_log, _check_log),
    "SampleWriter.close": numbered(_samples, _check_samples),
    "nvme-data convert": numbered(_convert, _check_convert),
    "File.sync": numbered(_file, _check_file),
    "TensorStore.sync": numbered(_store, _check_store),
    "TensorStore.sync replaced": numbered(_replaced, _check_replaced),
    "tune": numbered(_tuned, _check_tuned),
    "adaptive": numbered(_learned, _check_learned),
    "compiled op": numbered(_built, _check_built),
    **{
        f"NvmeOptimizer keep, {option}": Promise(
            functools.partial(promises_keep.write, option=option), functools.partial(promises_keep.check, option=option)
        )
        for option in promises_keep.OPTIONS
    },
    "control: durable=False": saves("x.safetensors", held=False, durable=False),
    "control: a rename without a flush": numbered(_renamed, _check_renamed, held=False),
}
