"""Checkpoints saved and loaded by this package and its peers, in one run. docs/benchmarks.md explains the method."""

from __future__ import annotations

import importlib
import mmap
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch

import nvme_ops
from benchmarks import command, fio
from benchmarks.peers import needed
from benchmarks.raw_io import load_through_us, save_through_us
from nvme_ops.base.text import MIB, size_words
from nvme_ops.filesystem.files import wait_until_free
from nvme_ops.measure.files import make_cold, make_file, make_warm, sync
from nvme_ops.measure.rows import Row, Sample, WrongData, timed
from nvme_ops.measure.tables import Table

GROUPS = {
    "save": "save, durably",
    "load": "load of a file that is not in the page cache",
    "cached": "load of a file in the page cache, every byte then looked at",
    "async": "until save_async returns, against a copy of the tensors in memory",
    "fresh": "load by a new process, until every tensor is summed",
}
STATE_DICTS = ("large", "llama", "small")
SAFETENSORS = "safetensors"
COPY = "copy_ into tensors that exist"
_SMALL = 64 << 10  # bytes
_REST = 3.0  # seconds: a virtual machine's host takes back memory that was free for two
# Modules are imported before the clock starts.
_PROGRAM = """
import json, resource, sys, time
import torch
path = sys.argv[1]
{imports}
def cpu():
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime
before, start = cpu(), time.perf_counter()
loaded = {load}
total = sum(float(tensor.sum()) for tensor in loaded.values())
print(json.dumps([time.perf_counter() - start, cpu() - before]))
"""
_OURS = "import nvme_ops; from nvme_ops.checkpoint import api, safetensors_file, torch_file; nvme_ops.aio_handle()"
_FRESH = {  # rows: imports, load, the suffix of the file
    "nvme_ops .safetensors": (_OURS, "nvme_ops.load(path)", ".safetensors"),
    "nvme_ops .pt": (_OURS, "nvme_ops.load(path)", ".torch.pt"),
    "nvme_ops .safetensors, mmap=True": (_OURS, "nvme_ops.load(path, mmap=True)", ".safetensors"),
    SAFETENSORS: ("import safetensors.torch", "safetensors.torch.load_file(path)", ".safetensors"),
    "torch.save, torch.load": ("", "torch.load(path)", ".torch.pt"),
    "torch.load(mmap=True)": ("", "torch.load(path, mmap=True)", ".torch.pt"),
}

Tensors = Mapping[str, torch.Tensor]
Save = Callable[[Tensors, str], object]
Load = Callable[[str], Tensors]


def state_dict(kind: str, size: int) -> dict[str, torch.Tensor]:
    """Returns random values, which no device can compress.

    ``large``: tensors of 32 MiB. ``llama``: the shapes of a Llama with as many layers as fit, bfloat16, with its small
    norms. ``small``: tensors of 4 KiB, 20,000 for the default size of 1 GiB, in proportion for others.
    """
    if kind == "large":
        return {f"tensor.{index}": torch.randn(8 * MIB) for index in range(max(1, size // (32 * MIB)))}
    if kind == "small":
        count = max(1, 20_000 * size // (1 << 30))
        return {f"layers.{index}.weight": torch.randn(32, 32) for index in range(count)}
    hidden, inner, heads, vocabulary = 1024, 2816, 16, 32_000
    shapes: dict[str, tuple[int, ...]] = {f"self_attn.{letter}_proj": (hidden, hidden) for letter in "qkvo"}
    shapes |= {"mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden), "mlp.down_proj": (hidden, inner)}
    shapes |= dict.fromkeys(("input_layernorm", "post_attention_layernorm"), (hidden,))
    outer = {"model.embed_tokens.weight": (vocabulary, hidden), "model.norm.weight": (hidden,)}
    made = {name: torch.randn(shape).to(torch.bfloat16) for name, shape in outer.items()}
    layer = 0
    while sum(tensor.nbytes for tensor in made.values()) < size:
        name = f"model.layers.{layer}"
        made |= {f"{name}.{part}.weight": torch.randn(shape).to(torch.bfloat16) for part, shape in shapes.items()}
        made[f"{name}.self_attn.rotary_emb.inv_freq"] = torch.randn(hidden // heads // 2)
        layer += 1
    return made


@dataclass
class Work:
    """A state dict and where its files go: each contender's path begins with ``path``."""

    path: str
    tensors: dict[str, torch.Tensor]

    @property
    def size(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def into_new(self, load: Callable[[dict[str, torch.Tensor]], object]) -> Tensors:
        """Returns new tensors that ``load`` has filled."""
        targets = {name: torch.empty_like(tensor) for name, tensor in self.tensors.items()}
        load(targets)
        return targets


@dataclass(frozen=True)
class Contender:
    """A way to save, to load, or both, to a path with ``suffix``; what only loads gets the file of another.

    ``load`` returns the tensors, in memory or mapped.
    """

    name: str
    suffix: str
    save: Save | None
    load: Load | None
    package: str = ""  # that it needs, under the name to import


def contenders(work: Work) -> list[Contender]:
    """Returns all contenders, including those of packages that are not installed."""
    safetensors, dcp, our_dcp = (  # imported when first called: they may be missing
        partial(importlib.import_module, name)
        for name in ("safetensors.torch", "torch.distributed.checkpoint", "nvme_ops.dcp")
    )
    peer = ".peer.safetensors"
    return [
        Contender("nvme_ops .safetensors", ".safetensors", nvme_ops.save, nvme_ops.load),
        Contender("nvme_ops .safetensors, recycle=True", ".recycled.safetensors",
                  partial(nvme_ops.save, recycle=True), None),
        Contender("nvme_ops, mmap=True", ".safetensors", None, partial(nvme_ops.load, mmap=True)),
        Contender("nvme_ops .pt", ".pt", nvme_ops.save, nvme_ops.load),
        Contender("torch with nvme_ops.open", ".through.pt", _durably(save_through_us), load_through_us),
        Contender("nvme_ops.dcp", ".nvme_ops.dcp", lambda tensors, path: our_dcp().save(dict(tensors), path),
                  lambda path: work.into_new(lambda targets: our_dcp().load(targets, path))),
        Contender("torch.save, torch.load", ".torch.pt", _durably(torch.save), torch.load),
        Contender("torch.load(mmap=True)", ".torch.pt", None, partial(torch.load, mmap=True)),
        Contender(SAFETENSORS, peer, _durably(lambda tensors, path: safetensors().save_file(dict(tensors), path)),
                  lambda path: cast(Tensors, safetensors().load_file(path)), SAFETENSORS),
        Contender("fastsafetensors", peer, None, _fastsafetensors_load, "fastsafetensors"),
        Contender("Run:ai streamer", peer, None, _runai_load, "runai_model_streamer"),
        Contender("DCP", ".dcp",
                  _durably(lambda tensors, path: dcp().save(dict(tensors), checkpoint_id=path, no_dist=True)),
                  lambda path: work.into_new(lambda those: dcp().load(those, checkpoint_id=path, no_dist=True))),
    ]  # fmt: skip


def _files(path: str) -> list[str]:
    """Returns a file, or those of a folder."""
    return [os.path.join(path, name) for name in os.listdir(path)] if os.path.isdir(path) else [path]


def _durably(save: Save) -> Save:
    """Returns a ``save`` that returns when everything is on the device."""

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
    lent = _Lent({name: buffer.get_tensor(name) for name in buffer.key_to_rank_lidx})
    lent.owners = [buffer, loader]
    return lent


def _runai_load(path: str) -> Tensors:
    from runai_model_streamer import SafetensorsStreamer  # type: ignore[import-not-found,import-untyped,unused-ignore]

    with SafetensorsStreamer() as streamer:
        streamer.stream_file(path)
        return {name: tensor.clone() for name, tensor in streamer.get_tensors()}  # it reuses its memory


def save_rows(work: Work) -> list[Row]:
    """Returns fio's best write of as many bytes, in place and to a new file, and every save, made durable."""
    saves = [_row(work, method, partial(method.save, work.tensors, work.path + method.suffix))
             for method in contenders(work) if method.save is not None]  # fmt: skip
    return [*_fio_rows(work, "write"), *saves]


def load_rows(work: Work, prepare: Callable[[str], None] = make_cold) -> list[Row]:
    """Returns every load, after which mapped pages are read; and fio's best read, unless the file is cached."""
    loads = [_row(work, method, partial(method.load, work.path + method.suffix), prepare)
             for method in contenders(work) if method.load is not None]  # fmt: skip
    return [*(_fio_rows(work, "read") if prepare is make_cold else []), *loads]


def async_rows(work: Work) -> list[Row]:
    """Returns rows timed until the call returns; the write that goes on is waited for outside the clock."""
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

    saving = Row("nvme_ops.save_async", save, check=lambda: _compare(work.tensors, nvme_ops.load(path, verify=True)))
    return [Row(COPY, lambda: timed(copy, work.size)), saving]


def fresh_rows(work: Work) -> list[Row]:
    """Returns loads by new processes, each into memory that was never touched."""

    def row(name: str, imports: str, load: str, suffix: str) -> Row:
        def before() -> None:
            make_cold(_saved(work, suffix))
            time.sleep(_REST)

        def run() -> Sample:
            program = _PROGRAM.format(imports=imports, load=load)
            seconds, cpu = command.in_new_process(program, work.path + suffix, folder=os.path.dirname(work.path))
            return Sample(seconds, work.size, cpu)

        return Row(name, run, before)

    return [row(name, *words) for name, words in _FRESH.items()]


def _saved(work: Work, suffix: str) -> str:
    """Returns the path of a file, or folder, with all tensors; makes it if it does not exist."""
    path, save = work.path + suffix, next(method.save for method in contenders(work) if method.suffix == suffix)
    if save is not None and not os.path.exists(path):
        save(work.tensors, path)
    return path


def _row(work: Work, method: Contender, call: Callable[[], Any], prepare: Callable[[str], None] | None = None) -> Row:
    """Returns the row of a load, whose files ``prepare`` gets before each pass; without ``prepare``, of a save."""
    path = work.path + method.suffix

    def before() -> None:
        if method.package:
            needed(method.package, method.package.replace("_", "-"))
        if prepare is None:
            command.let_the_device_rest(work.size)
        else:
            for name in _files(_saved(work, method.suffix)):
                prepare(name)
        _warm_free_memory(work.size)

    def run() -> Sample:
        sample = timed((lambda: _look_at(call())) if prepare is not None else call, work.size)
        wait_until_free()  # the next row has the device, and the memory, for itself
        for name in _files(path):
            make_cold(name)
        return sample

    def check() -> None:
        if prepare is not None:
            _compare(work.tensors, call())
        elif method.load is not None:
            _compare(work.tensors, method.load(path))

    return Row(method.name, run, before, check)


def _look_at(tensors: Tensors) -> None:
    """Reads a byte of every page, so that mapped files are in memory. The tensors are freed at the end of the pass."""
    small = [tensor for tensor in tensors.values() if tensor.nbytes <= _SMALL and tensor.is_floating_point()]
    if small:  # all of their bytes, in one call: 20,000 would take longer than to load them
        torch.nn.utils.get_total_norm(small)
    for tensor in tensors.values():
        if tensor.nbytes > _SMALL or not tensor.is_floating_point():
            tensor.reshape(-1).view(torch.uint8)[::4096].sum()


def _warm_free_memory(size: int) -> None:
    """Touches free memory, which a virtual machine may have given back, so that it is warm for every row.

    Huge pages are used, so that the next allocation finds some, or splits them.
    """
    with mmap.mmap(-1, size + size // 4, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        memory.madvise(mmap.MADV_HUGEPAGE)
        torch.frombuffer(memory, dtype=torch.uint8)[::4096].fill_(1)


def _compare(tensors: Tensors, loaded: Tensors) -> None:
    if loaded.keys() != tensors.keys():
        raise WrongData("the names differ")
    for name, tensor in tensors.items():
        if not torch.equal(loaded[name], tensor):
            raise WrongData(f"{name} differs")


def _fio_rows(work: Work, pattern: str) -> list[Row]:
    """Returns fio's rows over a file that has its blocks; a write also to a new file, as every save."""
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
        command.let_the_device_rest(work.size)

    rows = [fio.row(fio.NAME, pattern, lambda: path, size, before)]
    if pattern == "write":
        rows.append(fio.row(f"{fio.NAME}, new file", pattern, lambda: f"{path}.new", size, before_new))
    return rows


_ROWS: dict[str, tuple[Callable[[Work], list[Row]], str]] = {  # and the row by which the others are divided
    "save": (save_rows, fio.NAME),
    "load": (load_rows, fio.NAME),
    "cached": (partial(load_rows, prepare=make_warm), SAFETENSORS),
    "async": (async_rows, COPY),
    "fresh": (fresh_rows, SAFETENSORS),
}


def tables(run: command.Run, scratch: str, _: dict[str, Any]) -> Iterator[Table]:
    """Yields the table of each group for each state dict, whose files are removed before the next."""
    for kind in run.args.state_dict:
        command.show_progress(f"making the state dict {kind}")
        tensors = state_dict(kind, run.args.size)
        with tempfile.TemporaryDirectory(dir=scratch) as folder:
            work = Work(os.path.join(folder, kind), tensors)
            words = f"{kind}: {len(tensors)} tensors, {size_words(work.size)}"
            for group in run.args.groups:
                if group == "fresh" and kind != "large":
                    continue
                rows, reference = _ROWS[group]
                title, columns = f"{GROUPS[group]}; {words}", ("CPU s/GiB", "peak memory")
                table = Table(group, title, "GB/s", rows(work), reference, columns)
                if group == "fresh":  # each pass is a new process
                    run.measure(table.rows, warmups=0)
                yield table


_FLAGS = {"--state-dict": ("kinds of them; fresh takes large only", list(STATE_DICTS), STATE_DICTS)}
PROGRAM = command.Program(GROUPS, tables, 10, _FLAGS)
