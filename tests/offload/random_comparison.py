"""Runs a program with a capability and on plain torch, and says in what they differ."""

from __future__ import annotations

import contextlib
import gc
import linecache
import os
import random
import threading
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

import nvme_ops
from nvme_ops.offload import Memory, save_on_nvme, stream_weights, swap_gradients, swap_params
from nvme_ops.offload.parameters import residents
from nvme_ops.offload.weights import window
from nvme_ops.offload.weights.stored import StoredTensor
from tests.offload.elsewhere import same
from tests.offload.random_model import Statement, namespace

PAGE = 4096
REFUSALS = (RuntimeError, ValueError, TypeError, NotImplementedError, MemoryError)
PRODUCT = str(Path(nvme_ops.__file__).parent) + os.sep


@contextlib.contextmanager
def opened(capability: str, model: nn.Module, folder: str, rng: random.Random) -> Iterator[tuple[Any, Any]]:
    """Yields what saves tensors, if anything, and what was opened: with room for all, or for a few."""
    sizes = [max(1, -(-tensor.nbytes // PAGE)) for tensor in [*model.parameters(), *model.buffers()]]
    pages = rng.choice([max(sizes), max(sizes) + 2, 2 * max(sizes), sum(sizes) // 2, sum(sizes), 2 * sum(sizes)])
    budget, checksum = PAGE * max(pages, *sizes), rng.random() < 0.3
    if capability == "swap_params":
        with swap_params(model, folder, memory_budget=budget, min_bytes=1, checksums=checksum) as swapped:
            yield contextlib.nullcontext(), swapped
    elif capability == "swap_gradients":
        room = 8 * max(PAGE, *(param.nbytes for param in model.parameters()))
        with swap_gradients(model.parameters(), folder, memory_budget=room, min_bytes=1, checksums=checksum) as swapped:
            yield contextlib.nullcontext(), swapped
    elif capability.startswith("stream_"):
        while True:
            with contextlib.suppress(ValueError):  # too small
                stream_weights(model, folder, memory_budget=budget)
                break
            budget += 4 * PAGE
        with model:  # type: ignore[attr-defined]
            yield contextlib.nullcontext(), model
    elif capability == "one_memory":
        options: Any = {"memory": Memory(budget + 8 * PAGE * max(sizes)), "min_bytes": 1, "checksums": checksum}
        with (
            swap_params(model, folder, **options) as swapped,
            swap_gradients(model.parameters(), folder, **options),
            contextlib.closing(save_on_nvme(folder, **options)) as saving,
        ):
            yield saving, swapped
    else:
        saving = save_on_nvme(
            folder, min_bytes=1, memory_budget=rng.choice([0, 0, PAGE, 6 * PAGE]), checksums=checksum,
            policy=rng.choice(["nvme", "auto"]),
        )  # fmt: skip
        with contextlib.closing(saving):
            yield saving, saving


def snapshot(value: Any) -> Any:
    """Returns what a tensor is now, and its strides, ``requires_grad`` and ``is_leaf``."""
    if not isinstance(value, torch.Tensor):
        return value
    try:
        leaf = value.is_leaf
    except RuntimeError:  # a view that was changed and may not be
        leaf = False
    kept = value.detach().clone().resolve_conj().resolve_neg()
    strides = tuple(stride for stride, size in zip(value.stride(), value.shape, strict=True) if size > 1)
    conjugated = value.is_conj() or value.is_neg()  # which is computed for a tensor on storage
    # Of what was frozen after it was made, torch asks anew for a view that it has to replay.
    frozen = value._is_view() and value._base is not None and not value._base.requires_grad
    of_grad = (None, None) if frozen else (value.requires_grad, leaf)
    return kept.contiguous(), None if conjugated else strides * bool(value.numel()), *of_grad


def difference(ours: Any, plain: Any) -> str:
    """Says in what two snapshots differ; nothing if they do not."""
    if isinstance(ours, tuple) and isinstance(plain, tuple) and isinstance(plain[0], torch.Tensor):
        for name, mine, its in zip(("strides", "requires_grad", "is_leaf"), ours[1:], plain[1:], strict=True):
            if mine != its and None not in (mine, its):
                return f"{name}: {mine} is not {its}"
        ours, plain = ours[0], plain[0]
    word = same(ours, plain)
    if word == "other bits" and plain.is_complex() and torch.allclose(ours, plain, rtol=1e-6, equal_nan=True):
        return ""  # torch multiplies by a conjugated view without conjugating its values
    return word


@dataclass
class Outcome:
    """What became of a program: what failed, if anything, and how many statements were the same on both sides."""

    failure: str = ""
    equal: int = 0


def is_refusal(error: BaseException) -> bool:
    """Whether the product's own code raised it, in a sentence."""
    if "modified by an inplace operation" in str(error):
        return False  # torch has to say the same
    if str(error).startswith("new_fn INTERNAL ASSERT FAILED"):
        return True  # torch's replay of a view of a wrapper that has been frozen since
    if str(error).startswith("Calling remove_parametrizations()") and error.__cause__ is not None:
        return is_refusal(error.__cause__)
    if str(error).startswith("Error(s) in loading state_dict"):
        return "storage" in str(error) or "no memory" in str(error)
    last = error.__traceback__
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    if last is None or not isinstance(error, REFUSALS):
        return False
    file = last.tb_frame.f_code.co_filename
    return file.startswith(PRODUCT) and linecache.getline(file, last.tb_lineno).strip().startswith("raise")


class Side:
    """A program's names, and what it has seen."""

    def __init__(self, model: nn.Module, saving: Any) -> None:
        self.model, self.log = model, list[Any]()
        self.names = namespace(model, self.see, saving)

    def see(self, *observed: Any) -> None:
        if threading.current_thread() is not threading.main_thread():
            return  # whose turn it is is nobody's choice
        if torch._C._functorch.maybe_current_level() is not None:
            return  # tensors of torch.func end with it
        with torch.no_grad():
            self.log += map(snapshot, tree_leaves(observed))

    def run(self, statement: Statement, number: int) -> BaseException | None:
        """Returns what was raised."""
        self.log.clear()
        before = dict(self.names)
        torch.default_generator.manual_seed(number)
        code = compile(statement.code, f"<statement {number}>", "exec")
        try:
            exec(code, self.names)
        except Exception as error:
            self.names.clear()
            self.names.update(before)
            return error
        return None

    def state(self) -> dict[str, Any]:
        """Values of all parameters and variables."""
        with torch.no_grad():
            named = dict([*self.model.named_parameters(), *self.model.named_buffers(), *self.names.items()])
            return {name: snapshot(value) for name, value in named.items() if isinstance(value, torch.Tensor)}

    def forget_graphs(self) -> None:
        for param in self.model.parameters():
            param.grad = None
        for name, value in list(self.names.items()):
            if isinstance(value, torch.Tensor) and value.requires_grad:  # is_leaf raises of some views
                del self.names[name]

    def forget_all(self) -> None:
        self.log.clear()
        self.names.clear()
        for param in self.model.parameters():
            param.grad = None


def differences(ours: dict[Any, Any], plain: dict[Any, Any]) -> str:
    """Says what differs."""
    if ours.keys() != plain.keys():
        return f"{list(ours)} is not {list(plain)}"
    return next((f"{differs} ({name})" for name in ours if (differs := difference(ours[name], plain[name]))), "")


class Comparison:
    """Runs a program on both sides."""

    def __init__(self, ours: Side, plain: Side) -> None:
        self.ours, self.plain, self.outcome = ours, plain, Outcome()

    def run(self, program: Sequence[Statement]) -> bool:
        """Returns whether all is known at the end."""
        return all(self._statement(statement, number) for number, statement in enumerate(program))

    def _fail(self, *words: object) -> bool:
        self.outcome.failure = ": ".join(map(str, words))
        return False

    def _statement(self, statement: Statement, number: int) -> bool:
        raised = self.ours.run(statement, number)
        if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
            return self._fail(statement, "tensors are saved on storage for ever", raised)
        if isinstance(raised, NameError):
            return True  # of a statement that was refused
        if raised is not None and is_refusal(raised):
            out_of_memory = isinstance(raised, MemoryError) and statement.kind == "lists"
            del raised
            return not out_of_memory and self._refused(statement, number)
        error = self.plain.run(statement, number)
        if raised is None and error is None:
            self.outcome.equal += 1
            if (differs := differences(dict(enumerate(self.ours.log)), dict(enumerate(self.plain.log)))) != "":
                return self._fail(statement, differs)
        elif raised is None or error is None:
            where = "" if raised is None else "".join(traceback.format_tb(raised.__traceback__)[-3:])
            return self._fail(statement, f"ours raises {raised}, torch {error}", where)
        elif statement.kind == "many":
            return False
        elif statement.kind == "backward":
            self._forget_graphs()
        return True

    def _refused(self, statement: Statement, number: int) -> bool:
        if statement.kind == "backward":
            self._forget_graphs()
        if statement.kind in ("write", "lists"):
            try:
                now = self.ours.state()
            except MemoryError:
                return False
            if (old := differences(now, self.plain.state())) != "":
                self.plain.run(statement, number)
                if (new := differences(now, self.plain.state())) != "":
                    return self._fail(statement, f"refused, neither old nor new: {old}; {new}")
        return statement.kind not in ("many", "call")

    def _forget_graphs(self) -> None:
        self.ours.forget_graphs()
        self.plain.forget_graphs()

    def end(self, known: bool) -> None:
        """Looks at all, and at whether all can still be used."""
        if known:
            looks = [f"see({name})" for name in sorted(self.ours.names) if name.startswith("v")]
            looks += [f"see(m.get_parameter({name!r}).grad)" for name, _ in self.ours.model.named_parameters()]
            for look in looks:
                shown = isinstance(self.plain.names.get(look[4:-1]), torch.Tensor | None)
                if shown and not self._statement(Statement(look), 0):
                    return
        self.ours.forget_all()
        self.plain.forget_all()
        gc.collect()
        with contextlib.ExitStack() as patches:  # of a device that is slow, and of nobody else
            for owner in (residents.Residents, window.Window):
                patches.enter_context(mock.patch.object(owner, "patience", 3.0))
            named = self.ours.model.named_parameters()
            for (name, mine), its in zip(named, self.plain.model.parameters(), strict=True):
                with torch.no_grad():  # there may be no room for it as a whole
                    now = mine.to_memory() if isinstance(mine, StoredTensor) else mine
                    if (differs := difference(snapshot(now), snapshot(its))) and known:
                        self._fail(f"m.{name} at the end", differs)
                        return
