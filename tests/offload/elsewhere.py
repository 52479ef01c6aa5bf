"""Tensors whose values are elsewhere, for tests that do the same with these and with usual ones, and compare.

Bodies that may crash run ``apart``: in forked children, where a signal is one result among others.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import io
import json
import math
import os
import pickle
import signal
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from nvme_ops.base.native import native
from nvme_ops.base.settings import PAGE
from nvme_ops.offload import stream_weights, swap_params
from nvme_ops.offload.residency import placement
from tests import prepared

KINDS = ("swapped", "streamed")
FILLER = 1 << 16  # bytes: the budget of a tiny model would not do for whole pages


class Elsewhere(list[torch.Tensor]):
    """Parameters whose values are elsewhere; ``stats`` says what moved, ``forget`` leaves nothing of them in memory."""

    forget: Callable[[], object]
    stats: Callable[[], Any]


@contextlib.contextmanager
def elsewhere(kind: str, tensors: Sequence[torch.Tensor], folder: Path) -> Iterator[Elsewhere]:
    """Parameters with the values of ``tensors``, swapped or streamed, until the end of the block.

    What is empty or not strided stays as it is. Streamed ones take no gradient.
    """
    moved = [tensor for tensor in tensors if tensor.layout == torch.strided and tensor.numel()]
    room = sum(-(-tensor.nbytes // PAGE) * PAGE for tensor in moved) + FILLER
    filler = torch.nn.Parameter(torch.zeros(room, dtype=torch.uint8), False)  # in whose stead there are no others
    parameters = [torch.nn.Parameter(tensor.detach().clone(), tensor.requires_grad) for tensor in moved]
    module: Any = torch.nn.ParameterList([*parameters, filler])
    with contextlib.ExitStack() as ends:
        if kind == "swapped":
            opened: Any = ends.enter_context(swap_params(module, folder, memory_budget=room, min_bytes=1))
        else:
            small, placement._SMALL = placement._SMALL, 0  # else they stay in memory
            try:
                opened = ends.enter_context(stream_weights(module, folder, memory_budget=2 * room))
            finally:
                placement._SMALL = small
        made = iter(list(module)[:-1])
        result = Elsewhere(next(made) if any(tensor is other for other in moved) else tensor for tensor in tensors)
        result.forget, result.stats = list(module)[-1].any, opened.stats
        yield result


def values(tensor: torch.Tensor) -> torch.Tensor:
    """What a tensor has, wherever that is."""
    read: Any = getattr(tensor, "to_memory", None)
    return tensor.detach() if read is None else read()


def same(ours: Any, theirs: Any) -> str:
    """What differs between two results, in a word; nothing where all bits are the same."""
    some, others = tree_leaves(ours), tree_leaves(theirs)
    if len(some) != len(others):
        return f"{len(some)} results, not {len(others)}"
    return next(filter(None, map(_same, some, others)), "")


def _same(ours: Any, theirs: Any) -> str:
    if not isinstance(theirs, torch.Tensor):
        if isinstance(ours, torch.Tensor):
            return f"a tensor, not {theirs!r}"
        nan = isinstance(theirs, float) and math.isnan(theirs) and math.isnan(ours)
        plain = isinstance(theirs, bool | int | float | complex | str | torch.dtype | torch.device | torch.Size)
        return f"{ours!r}, not {theirs!r}" if plain and ours != theirs and not nan else ""
    if not isinstance(ours, torch.Tensor):
        return f"{type(ours).__name__}, not a tensor"
    if ours.shape != theirs.shape or ours.dtype != theirs.dtype or ours.device != theirs.device:
        return f"{ours.dtype} {tuple(ours.shape)} on {ours.device}, not {theirs.dtype} {tuple(theirs.shape)}"
    if ours.layout != theirs.layout or ours.requires_grad != theirs.requires_grad:
        return f"{ours.layout} with requires_grad={ours.requires_grad}, not {theirs.layout} with {theirs.requires_grad}"
    if theirs.is_meta:
        return ""
    ours, theirs = values(ours), values(theirs)
    if theirs.is_quantized:
        ours, theirs = ours.dequantize(), theirs.dequantize()
    if theirs.layout != torch.strided:
        ours, theirs = ours.to_dense(), theirs.to_dense()
    if ours.dtype == torch.complex32:
        ours, theirs = ours.to(torch.complex64), theirs.to(torch.complex64)
    if torch.equal(ours, theirs) or torch.equal(_numbers(ours), _numbers(theirs)):
        return ""
    try:
        torch.testing.assert_close(ours, theirs, equal_nan=True)
    except AssertionError:
        return "other values"
    return "other bits"


def saved_by_torch(value: Any) -> Any:
    """Saves and loads."""
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def _numbers(tensor: torch.Tensor) -> torch.Tensor:
    return torch.nan_to_num(torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor, nan=1.25)


def alone(test: Callable[..., None]) -> Callable[..., None]:
    """Runs a test in a process in which nothing was differentiated: autograd's threads do not outlive a fork.

    Its arguments are strings, paths and the like.
    """

    @functools.wraps(test)
    def run(**given: Any) -> None:
        program = """
import importlib, pickle, sys, warnings
import pytest
warnings.simplefilter("ignore")
module, name, given = sys.argv[1:]
getattr(importlib.import_module(module), name).__wrapped__(**pickle.loads(bytes.fromhex(given)))
"""
        words = (test.__module__, test.__name__, pickle.dumps(given).hex())
        done = prepared.run("-c", program, *words, timeout=900)
        assert done.returncode == 0, done.stdout + done.stderr

    return run


def apart(names: Sequence[str], body: Callable[[str], list[str]], seconds: int = 60) -> dict[str, list[str]]:
    """Runs ``body`` for each name in forked children; where one dies, the signal is what that name returns."""
    native()  # which may have to be compiled: once, not in each of them
    results: dict[str, list[str]] = {}
    while len(results) < len(names):
        begin = len(results)
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(reading)
            _serve(names[begin:], body, writing, seconds)
        os.close(writing)
        with open(reading, encoding="utf-8") as pipe:
            for line in pipe:
                with contextlib.suppress(ValueError):  # half a line of one that died
                    results[names[len(results)]] = json.loads(line)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if len(results) < len(names):
            name = signal.Signals(-status).name if status < 0 else f"status {status}"
            results[names[len(results)]] = [f"{names[len(results)]} died of {name}"]
    return results


def _serve(names: Sequence[str], body: Callable[[str], list[str]], report: int, seconds: int) -> None:
    try:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        faulthandler.register(signal.SIGALRM, chain=True)  # says where it hangs
        torch.set_num_threads(1)  # OpenMP's threads are the parent's
        for name in names:
            signal.alarm(seconds)
            try:
                said = body(name)
            except Exception:
                said = [f"{name}: " + " ".join(traceback.format_exc().split())[-400:]]
            os.write(report, json.dumps(said).encode() + b"\n")
    finally:
        os._exit(0)
