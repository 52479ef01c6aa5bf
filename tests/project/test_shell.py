"""What a Python shell shows of the objects that users hold: one line, at any time, without a lock or a system call."""

from __future__ import annotations

import gc
import importlib
import inspect
import re
import sys
import threading
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import nvme_ops
from nvme_ops import data, dcp, offload, op_builder, storage
from nvme_ops.base.text import Counts
from nvme_ops.integrations.safetensors import safe_open
from nvme_ops.io.pin_memory import pin_handle
from nvme_ops.storage.joined import joined
from tests.conftest import in_child
from tests.project.test_surface import PACKAGES


def module() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(300, 300), torch.nn.ReLU(), torch.nn.Linear(300, 300))


def transferred(folder: Path, name: str = "ok") -> nvme_ops.IoFuture:
    (folder / "ok").write_bytes(b"x" * 4096)
    future = nvme_ops.aio_handle(backend="threads").submit_pread(torch.zeros(1024), folder / name)
    future.exception()
    return future


def stored(folder: Path) -> storage.TensorStore:
    store = storage.TensorStore(storage.Session(folder, name="states"))
    store.put("exp_avg", torch.zeros(1024)).result()
    return store


def samples(folder: Path) -> data.SampleStore:
    with data.SampleWriter(folder / "train") as writer:
        writer.extend([b"one", b"two"])
    return data.SampleStore(folder / "train")


def saved(folder: Path) -> str:
    nvme_ops.save({"a": torch.zeros(2, 3)}, folder / "a.safetensors")
    return str(folder / "a.safetensors")


def gradients(folder: Path) -> offload.SwappedGradients:
    model = module()
    swapped = offload.swap_gradients(model.parameters(), folder, memory_budget="2M", min_bytes="100K")
    model(torch.ones(300)).sum().backward()
    swapped.owner = model  # type: ignore[attr-defined]  # it goes with its parameters
    return swapped


def activations(folder: Path) -> offload.save_on_nvme:
    saving = offload.save_on_nvme(folder, min_bytes="100K", memory_budget="1M")
    with saving:
        module()(torch.ones(100, 300)).sum()
    return saving


def cache(folder: Path) -> Any:
    pytest.importorskip("transformers")
    return offload.NvmeCache(folder, "4M")


def trained(folder: Path) -> offload.NvmeOptimizer:
    return offload.NvmeOptimizer(module().parameters(), torch.optim.AdamW, folder, lr=1e-3)


#: What makes an object, and what is shown of it; ``DIR`` is the folder, and ``*`` stands for anything.
SHOWN: dict[str, tuple[Callable[[Path], Any], str]] = {
    "aio_handle": (lambda _: nvme_ops.aio_handle(4096, 8, backend="threads"),
        "aio_handle(block_size=4096, queue_depth=8, *, intra_op_parallelism=None, backend='threads', cache='auto')"),
    "IoFuture": (transferred, "<IoFuture: done, 4 KiB moved>"),
    "IoFuture, joined": (lambda path: joined([transferred(path)] * 2), "<IoFuture: done>"),
    "IoFuture, failed": (lambda path: transferred(path, "no"), "<IoFuture: failed, FileNotFoundError>"),
    "StoreFuture": (lambda path: stored(path).get("exp_avg"), "<StoreFuture: *>"),
    "File": (lambda path: nvme_ops.open(str(path / "x"), "w"), "<nvme_ops.File name='DIR/x' mode='w'>"),
    "SaveFuture": (lambda path: nvme_ops.save_async({"a": torch.ones(3)}, path / "a.pt"), "<SaveFuture 'DIR/a.pt': *>"),
    "Pool": (lambda _: storage.Pool("64M"), "<Pool of 64 MiB: 0 B in use>"),
    "Lease": (lambda _: storage.Pool("64M").lease(5000), "<Lease of 8 KiB>"),
    "Session": (lambda path: storage.Session(path, name="states"), "<Session 'states' in ['DIR/*']>"),
    "TensorStore": (stored, "<TensorStore 'states': 1 tensor, 4 KiB on storage>"),
    "pin_handle": (lambda _: pin_handle(), "<pin_handle: * page-locked tensor* in this process>"),
    "SampleWriter": (lambda path: data.SampleWriter(path / "train"),
        "<SampleWriter 'DIR/train/index.nvmedata': 0 samples>"),
    "SampleStore": (samples, "<SampleStore 'DIR/train': 2 samples, native>"),
    "Read": (lambda path: samples(path).submit([0]), "<Read of 1 sample, 64 B: *>"),
    "Loader": (lambda path: data.Loader(samples(path), 2), "<Loader 'DIR/train': 1 batches of 2, rank 0 of 1>"),
    "AsyncLog": (lambda path: data.AsyncLog(path / "log"), "<AsyncLog 'DIR/log': nothing to be written>"),
    "NvmeStorageWriter": (dcp.NvmeStorageWriter, "NvmeStorageWriter('DIR', durable=True, checksums=True, *)"),
    "NvmeStorageReader": (dcp.NvmeStorageReader, "NvmeStorageReader('DIR', verify=False)"),
    "SwappedParams": (lambda path: offload.swap_params(module(), path, memory_budget="1M", min_bytes="100K"),
        "<SwappedParams: 2 tensors of 704 KiB on storage, at most 1 MiB in memory>"),
    "SwappedGradients": (gradients, "<SwappedGradients: 2 tensors of 704 KiB on storage, at most 1.5 MiB in memory>"),
    "save_on_nvme": (activations, "<save_on_nvme: 234.4 KiB saved, 0 B written, at most 1 MiB in memory>"),
    "NvmeCache": (cache, "<NvmeCache: 0 layers, 0 tokens>"),
    "NvmeOptimizer": (trained, "NvmeOptimizer of AdamW (*"),
    "safe_open": (lambda path: safe_open(saved(path)), "<safe_open 'DIR/a.safetensors': 1 tensor>"),
    "TensorSlice": (lambda path: safe_open(saved(path)).get_slice("a"), "<TensorSlice: F32, [2, 3]>"),
    "GDSBuilder": (lambda _: op_builder.GDSBuilder(), "<GDSBuilder of gds*>"),
}  # fmt: skip


def is_like(shown: str, pattern: str, folder: Path) -> bool:
    words = map(re.escape, pattern.replace("DIR", str(folder)).split("*"))
    return re.fullmatch(".*".join(words), shown, re.DOTALL) is not None


@pytest.fixture(params=SHOWN)
def made(request: pytest.FixtureRequest, folder: Path) -> Iterator[tuple[Any, str]]:
    make, pattern = SHOWN[request.param]
    obj = make(folder)
    yield obj, pattern
    if isinstance(obj, nvme_ops.IoFuture | nvme_ops.checkpoint.background.SaveFuture):
        obj.exception()
    if hasattr(obj, "close"):
        obj.close()


@pytest.mark.filterwarnings("ignore:the samples of a writer")
def test_an_object_says_what_it_is_also_in_a_fork_and_closed(made: tuple[Any, str], folder: Path) -> None:
    obj, pattern = made

    def shown() -> None:
        assert is_like(repr(obj), pattern, folder), repr(obj)

    shown()
    in_child(shown)
    assert "\n" not in repr(obj) or isinstance(obj, torch.optim.Optimizer)
    if hasattr(obj, "close") and not isinstance(obj, dcp.NvmeStorageWriter):  # torch's ``close`` does nothing
        obj.close()
        assert "closed" in repr(obj)


LOCKS = (type(threading.Lock()), type(threading.RLock()), threading.Condition)
HARMLESS = {"getpid", "fspath", "done", "bytes"}  # functions of C modules that no lock or device makes wait


def locks_of(obj: object) -> list[Any]:
    """Returns the locks that it has, or that what it has has."""
    seen, left, locks = set[int](), [obj], []
    while left:
        item = left.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, LOCKS):
            locks.append(item)
        elif type(item).__module__.startswith("nvme_ops") or isinstance(item, dict | list | tuple | set):
            left += [one for one in gc.get_referents(item) if not isinstance(one, type | types.FunctionType)]
    return locks


def test_showing_an_object_waits_for_no_lock_and_asks_no_system(made: tuple[Any, str]) -> None:
    obj, locks, shown, asked = made[0], locks_of(made[0]), list[str](), list[str]()
    have, go = threading.Event(), threading.Event()

    def hold() -> None:
        taken = [lock for lock in locks if lock.acquire(timeout=0.1)]
        have.set()
        go.wait(60)
        for lock in taken:
            lock.release()

    def note(_: object, event: str, function: Any) -> None:
        if event == "c_call" and function.__name__ not in HARMLESS:
            place = str(getattr(function, "__module__", None) or type(function.__self__).__module__)
            if re.match("posix|_io|fcntl|_thread|async_io|gds|nvme_ops", place):
                asked.append(f"{place}.{function.__name__}")

    def show() -> None:
        have.wait()
        sys.setprofile(note)
        shown.append(repr(obj))
        sys.setprofile(None)

    threads = [threading.Thread(target=target, daemon=True) for target in (hold, show)]
    for thread in threads:
        thread.start()
    threads[1].join(20)
    go.set()
    assert shown, "it waits for a lock"
    assert asked == []
    threads[0].join()


def kinds() -> Iterator[Any]:
    for package in PACKAGES:
        place = importlib.import_module(f"nvme_ops{package}")
        for name in place.__all__:
            if not (name == "NvmeCache" and importlib.util.find_spec("transformers") is None):
                kind = getattr(place, name)
                if inspect.isclass(kind) and not issubclass(kind, BaseException | nvme_ops.Priority):
                    yield kind
    yield from (storage.store.StoreFuture, data.store.Read, nvme_ops.checkpoint.background.SaveFuture, safe_open)


def test_an_object_whose_making_failed_is_shown_and_ends_quietly(monkeypatch: pytest.MonkeyPatch) -> None:
    """As by a debugger at an exception of ``__init__``."""
    lost: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", lost.append)
    for kind in kinds():
        made = kind.__new__(kind)
        expected = {Counts: "{}()", op_builder.OpBuilder: "<{} of *>"}
        pattern = next((words for base, words in expected.items() if issubclass(kind, base)), "<{}, incomplete>")
        assert is_like(repr(made), pattern.format(kind.__name__), Path())
        del made
    gc.collect()
    assert lost == []
