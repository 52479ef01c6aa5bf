"""Those who save and load a state dict, each its own file, kept from the save for the load."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import mmap
import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch

import nvme_ops
from benchmarks.file_rows import FIO_BEST, load_through_us, save_through_us
from nvme_ops.bench import fio
from nvme_ops.bench.engines import deepspeed
from nvme_ops.bench.measure import Row, Sample, Unavailable, WrongData, timed
from nvme_ops.measuring.files import make_cold, make_file, make_warm, sync
from nvme_ops.storage import unlink

SAFETENSORS = "safetensors"
COPY = "copy_ into tensors that exist"

_SMALL = 64 << 10  # bytes

Tensors = Mapping[str, torch.Tensor]
Save = Callable[[Tensors, str], object]
Load = Callable[[str], Tensors]


@dataclass
class Work:
    """A state dict and where its files go: each contender's path begins with ``path``."""

    path: str
    tensors: dict[str, torch.Tensor]
    deepspeed: bool = True
    saved: set[str] = field(default_factory=set)

    @property
    def size(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())


@dataclass(frozen=True)
class Contender:
    """``save`` and ``load`` get a path of their own; ``load`` gives the tensors, in memory or mapped."""

    name: str
    suffix: str
    save: Save | None
    load: Load | None
    package: str = ""  # to be installed by pip, named as it is imported
    saved_by: str = ""  # whose file it loads


def contenders(work: Work) -> list[Contender]:
    """All of them; those of packages that are not installed too."""
    safetensors, dcp, our_dcp = (  # imported when first called: they may be missing
        functools.partial(importlib.import_module, name)
        for name in ("safetensors.torch", "torch.distributed.checkpoint", "nvme_ops.dcp")
    )
    made = [
        Contender("nvme_ops .safetensors", ".safetensors", nvme_ops.save, nvme_ops.load),
        Contender("nvme_ops .safetensors, recycle=True", ".recycled.safetensors",
                  functools.partial(nvme_ops.save, recycle=True), None),
        Contender("nvme_ops, mmap=True", ".safetensors", None, functools.partial(nvme_ops.load, mmap=True),
                  saved_by="nvme_ops .safetensors"),
        Contender("nvme_ops .pt", ".pt", nvme_ops.save, nvme_ops.load),
        Contender("torch with nvme_ops.open", ".through.pt", save_through_us, load_through_us),
        Contender("nvme_ops.dcp", ".nvme_ops.dcp", lambda tensors, path: our_dcp().save(dict(tensors), path),
                  lambda path: _into_new(work, lambda targets: our_dcp().load(targets, path))),
        Contender("torch.save, torch.load", ".torch.pt", _durably(torch.save), torch.load),
        Contender("torch.load(mmap=True)", ".torch.pt", None, functools.partial(torch.load, mmap=True),
                  saved_by="torch.save, torch.load"),
        Contender(SAFETENSORS, ".peer.safetensors",
                  _durably(lambda tensors, path: safetensors().save_file(dict(tensors), path)),
                  lambda path: cast(Tensors, safetensors().load_file(path)), SAFETENSORS),
        Contender("fastsafetensors", ".peer.safetensors", None, _fastsafetensors_load, "fastsafetensors", SAFETENSORS),
        Contender("Run:ai streamer", ".peer.safetensors", None, _runai_load, "runai_model_streamer", SAFETENSORS),
        Contender("DCP", ".dcp",
                  _durably(lambda tensors, path: dcp().save(dict(tensors), checkpoint_id=path, no_dist=True)),
                  lambda path: _into_new(work, lambda targets: dcp().load(targets, checkpoint_id=path, no_dist=True))),
    ]  # fmt: skip
    if work.deepspeed:
        made.append(
            Contender("DeepSpeed FastFileWriter", ".deepspeed.pt", _durably(_deepspeed_save), None, "deepspeed")
        )
    return made


def _files(path: str) -> list[str]:
    """A file, or those of a folder."""
    return [os.path.join(path, name) for name in os.listdir(path)] if os.path.isdir(path) else [path]


def _durably(save: Save) -> Save:
    """What was written is on the device when it returns."""

    def save_and_sync(tensors: Tensors, path: str) -> None:
        save(tensors, path)
        for name in _files(path):
            sync(name)

    return save_and_sync


class _Lent(dict[str, torch.Tensor]):
    """Tensors in memory that their owners keep until they are closed."""

    owners: Sequence[Any] = ()

    def __del__(self) -> None:
        self.clear()
        for owner in self.owners:
            owner.close()


def _fastsafetensors_load(path: str) -> Tensors:
    import fastsafetensors  # type: ignore[import-not-found,import-untyped,unused-ignore]

    loader = fastsafetensors.SafeTensorsFileLoader(fastsafetensors.SingleGroup(), torch.device("cpu"), nogds=True)
    loader.add_filenames({0: [path]})
    buffer = loader.copy_files_to_device()
    found = _Lent({name: buffer.get_tensor(name) for name in buffer.key_to_rank_lidx})
    found.owners = [buffer, loader]
    return found


def _runai_load(path: str) -> Tensors:
    from runai_model_streamer import SafetensorsStreamer  # type: ignore[import-not-found,import-untyped,unused-ignore]

    with SafetensorsStreamer() as streamer:
        streamer.stream_file(path)
        return {name: tensor.clone() for name, tensor in streamer.get_tensors()}  # it reuses its memory


def _into_new(work: Work, load: Callable[[dict[str, torch.Tensor]], object]) -> Tensors:
    targets = {name: torch.empty_like(tensor) for name, tensor in work.tensors.items()}
    load(targets)
    return targets


def _deepspeed_save(tensors: Tensors, path: str) -> None:
    op = deepspeed.load()
    if isinstance(op, Unavailable):
        raise op
    from deepspeed import io  # type: ignore[import-not-found,import-untyped,unused-ignore]

    handle = op.aio_handle()
    pinned = handle.new_cpu_locked_tensor(64 << 20, torch.empty(0, dtype=torch.uint8))
    config = io.FastFileWriterConfig(
        dnvme_handle=handle, pinned_tensor=pinned, double_buffer=True, num_parallel_writers=1, writer_rank=0,
        global_rank=0,
    )  # fmt: skip
    writer = io.FastFileWriter(file_path=path, config=config)
    torch.save(tensors, writer)
    writer.close()
    handle.free_cpu_locked_tensor(pinned)


def save_rows(work: Work) -> list[Row]:
    """Fio's best write of as many bytes, in place and to a new file, and every save, made durable."""
    saves = [
        _row(work, each, functools.partial(each.save, work.tensors, work.path + each.suffix))
        for each in contenders(work)
        if each.save is not None
    ]
    return [*_fio_rows(work, "write"), *saves]


def load_rows(work: Work) -> list[Row]:
    """Fio's best read, and every load; what is only mapped is looked at."""
    return [*_fio_rows(work, "read"), *_loads(work, make_cold)]


def cached_rows(work: Work) -> list[Row]:
    """Every load of what lies in the page cache."""
    return _loads(work, make_warm)


def async_rows(work: Work) -> list[Row]:
    """Until the call returns; the write, which goes on meanwhile, is waited for behind the clock."""
    targets = {name: torch.zeros_like(tensor) for name, tensor in work.tensors.items()}
    path = work.path + ".async.safetensors"
    futures: list[Future[None]] = []

    def copy() -> None:
        for name, tensor in work.tensors.items():
            targets[name].copy_(tensor)

    def save() -> Sample:
        sample = timed(lambda: futures.append(nvme_ops.save_async(work.tensors, path)), work.size)
        futures.pop().result()
        return sample

    def check() -> None:
        _compare(work.tensors, nvme_ops.load(path, verify=True))

    return [Row(COPY, lambda: timed(copy, work.size)), Row("nvme_ops.save_async", save, check=check)]


def _loads(work: Work, prepare: Callable[[str], None]) -> list[Row]:
    return [
        _row(work, each, functools.partial(each.load, work.path + each.suffix), prepare)
        for each in contenders(work)
        if each.load is not None
    ]


def _row(work: Work, each: Contender, call: Callable[[], Any], prepare: Callable[[str], None] | None = None) -> Row:
    """A load of files that ``prepare`` is called with before; without it, a save."""
    path = work.path + each.suffix
    made_by = next(other for other in contenders(work) if other.name == (each.saved_by or each.name))

    def before() -> None:
        if each.package and importlib.util.find_spec(each.package) is None:
            raise Unavailable(f"not installed: pip install {each.package.replace('_', '-')}")
        if prepare is None:
            _let_the_device_rest(work.size)
        else:
            if path not in work.saved:
                if made_by.save is None:
                    raise Unavailable(f"{made_by.name} saves nothing")
                made_by.save(work.tensors, path)
                work.saved.add(path)
            for name in _files(path):
                prepare(name)
        _warm_free_memory(work.size)

    def run() -> Sample:
        sample = timed((lambda: _look_at(call())) if prepare is not None else call, work.size)
        unlink.wait()  # the next row has the device, and the memory, for itself
        for name in _files(path):
            make_cold(name)
        return sample

    def check() -> None:
        if prepare is not None:
            _compare(work.tensors, call())
        elif made_by.load is not None:
            _compare(work.tensors, made_by.load(path))

    return Row(each.name, run, before, check)


def _look_at(tensors: Tensors) -> None:
    """One byte of every page, so that what is only mapped is there. The tensors go with the end of the pass."""
    small = [tensor for tensor in tensors.values() if tensor.nbytes <= _SMALL and tensor.is_floating_point()]
    if small:  # all of their bytes, in one call: 20,000 would take longer than to load them
        torch.nn.utils.get_total_norm(small)
    for tensor in tensors.values():
        if tensor.nbytes > _SMALL or not tensor.is_floating_point():
            tensor.reshape(-1).view(torch.uint8)[::4096].sum()


def _let_the_device_rest(size: int) -> None:
    """What a row freed the file system tells its device some time after, which must not slow the next."""
    os.sync()
    time.sleep(1.5 * min(1, size / (1 << 30)))


def _warm_free_memory(size: int) -> None:
    """A virtual machine may have given back what is free: who takes it next would pay. All find it as warm.

    In huge pages, which are easy to find for the next one then, and easy to split.
    """
    with mmap.mmap(-1, size + size // 4, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        memory.madvise(mmap.MADV_HUGEPAGE)
        torch.frombuffer(memory, dtype=torch.uint8)[::4096].fill_(1)


def _compare(tensors: Tensors, loaded: Tensors) -> None:
    if loaded.keys() != tensors.keys():
        raise WrongData("other names")
    for name, tensor in tensors.items():
        if not torch.equal(loaded[name], tensor):
            raise WrongData(f"{name} differs")


def _fio_rows(work: Work, pattern: str) -> list[Row]:
    """Over a file that has its blocks; a write also where they have to be found, as for every save."""
    path, size = f"{work.path}.fio", -(-work.size // fio.BLOCK) * fio.BLOCK

    def before() -> None:
        fio.require()
        if not os.path.exists(path):
            make_file(path, size)
        make_cold(path)

    def before_new() -> None:
        fio.require()
        new = Path(f"{path}.new")
        new.unlink(missing_ok=True)
        new.touch()
        os.truncate(new, size)
        _let_the_device_rest(work.size)

    rows = [fio.row(FIO_BEST, pattern, lambda: path, size, before)]
    if pattern == "write":
        rows.append(fio.row("fio best, new file", pattern, lambda: f"{path}.new", size, before_new))
    return rows
