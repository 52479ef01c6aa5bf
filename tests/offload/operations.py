"""Each operation that torch has samples for, with its tensors elsewhere, and what differs from usual ones."""

from __future__ import annotations

import random
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from nvme_ops.offload import save_on_nvme
from tests.offload.elsewhere import elsewhere, same, values

OPERATIONS = {f"{each.name}.{each.variant_test_name}".strip("."): each for each in op_db}
POLICIES = ("nvme", "auto")
ANY_VALUES = re.compile(r"empty|resize_")  # whatever is in memory


class Sample:
    """A sample whose tensors can be replaced, each of them once."""

    def __init__(self, sample: Any) -> None:
        self._leaves, self._shape = tree_flatten((sample.input, sample.args, sample.kwargs))
        self.tensors = list({id(each): each for each in self._leaves if isinstance(each, torch.Tensor)}.values())

    def call(self, function: Any, tensors: Sequence[torch.Tensor]) -> Any:
        """Calls the function with other tensors. One more than there are is for ``out``."""
        others = {id(each): other for each, other in zip(self.tensors, tensors)}  # noqa: B905
        first, args, kwargs = tree_unflatten([others.get(id(each), each) for each in self._leaves], self._shape)
        if len(tensors) > len(self.tensors):
            kwargs["out"] = tensors[-1]
        return function(first, *args, **kwargs)


class Case(NamedTuple):
    """A call, and which of its tensors are elsewhere.

    ``then`` says what is written to afterwards: ``"result"``, which may be a view, ``"tensors"``, or nothing.
    """

    name: str
    call: Callable[[Sequence[torch.Tensor]], Any]
    tensors: Sequence[torch.Tensor]
    mask: Sequence[int]
    then: str = ""


class Outcome:
    """Results, and gradients unless something is written to afterwards."""

    def __init__(self, case: Case, tensors: Sequence[torch.Tensor]) -> None:
        torch.manual_seed(1)
        random.seed(1)
        self.result = case.call(tensors)
        outs = [each for each in tree_leaves(self.result) if isinstance(each, torch.Tensor)]
        with torch.no_grad():
            for each in outs if case.then == "result" else tensors if case.then else []:
                each[(slice(1),) * each.dim()].fill_(1)
        outs = [each for each in outs if each.requires_grad and not case.then]
        inputs = [each for each in tensors if each.requires_grad]
        given = [torch.full_like(values(each), 0.5 + number) for number, each in enumerate(outs)]
        self.gradients = torch.autograd.grad(outs, inputs, given, allow_unused=True) if outs and inputs else ()


def check(name: str, dtype: torch.dtype, way: str, most: int, folder: Path) -> list[str]:
    """Returns the number of calls compared, and what differs, one line each.

    Args:
        name: of an operation.
        dtype: of the samples.
        way: where tensors are elsewhere, or a policy of ``save_on_nvme``.
        most: samples of each operation.
        folder: where the tensors go.
    """
    warnings.simplefilter("ignore")
    op, said, count = OPERATIONS[name], list[str](), 0
    if dtype not in op.dtypes:
        return ["0 calls"]
    torch.manual_seed(0)
    random.seed(0)
    samples = list(op.sample_inputs("cpu", dtype, requires_grad=op.supports_autograd and dtype in op.backward_dtypes))
    for number in sorted(random.Random(0).sample(range(len(samples)), min(most, len(samples)))):
        for case in _cases(op, Sample(samples[number]), way):
            usual = _copies(case)
            try:
                theirs = Outcome(case, usual)
            except Exception:
                continue  # torch does not do that, either
            count += 1
            try:
                found = _differences(case, way, folder, theirs, usual) if not ANY_VALUES.search(name) else []
            except Exception as error:
                found = [f"{type(error).__name__}: {[*str(error).strip().splitlines(), ''][0][:300]}"]
            what = f"{case.name}{f', then {case.then} written,' if case.then else ''}"
            said += [f"{name} {what} sample {number}, {case.mask} of {len(case.tensors)}: {each}" for each in found]
    return [f"{count} calls", *said]


def _cases(op: Any, sample: Sample, way: str) -> Iterator[Case]:
    """Yields how an operation is called with a sample."""
    tensors, every = sample.tensors, list(range(len(sample.tensors)))
    if way in POLICIES:
        yield Case("", partial(sample.call, op.op), tensors, [])
        return
    for name, function in {"": op.op, "method": op.method_variant, "operator": op.operator_variant}.items():
        for mask in [[each] for each in every] + [every] * (len(every) > 1) if function is not None else []:
            untrained = mask if way == "streamed" else ()
            given = [each.detach() if index in untrained else each for index, each in enumerate(tensors)]
            yield Case(name, partial(sample.call, function), given, mask)
    without = [each.detach() for each in tensors]
    for mask in [[each] for each in every]:
        yield Case("", partial(sample.call, op.op), without, mask, "result")
        if way == "swapped":
            yield Case("", partial(sample.call, op.op), without, mask, "tensors")
        if op.inplace_variant is not None:
            yield Case("in place", partial(sample.call, op.inplace_variant), without, mask)
    if op.supports_out:
        try:
            out = torch.zeros_like(sample.call(op.op, without))
        except Exception:
            return
        yield Case("out=", partial(sample.call, op.op), [*without, out], [len(without)])


def _copies(case: Case) -> list[torch.Tensor]:
    return [each.detach().clone().requires_grad_(each.requires_grad) for each in case.tensors]


def _differences(case: Case, way: Any, folder: Path, theirs: Outcome, usual: Sequence[torch.Tensor]) -> list[str]:
    tensors = _copies(case)
    if way in POLICIES:
        with save_on_nvme(folder, min_bytes=1, memory_budget=0, policy=way):
            ours = Outcome(case, tensors)
        return _words(result=same(ours.result, theirs.result), gradients=same(ours.gradients, theirs.gradients))
    with elsewhere(way, [tensors[index] for index in case.mask], folder) as moved:
        for index, each in zip(case.mask, moved, strict=True):
            tensors[index] = each
        ours = Outcome(case, tensors)
        found = _words(result=same(ours.result, theirs.result), gradients=same(ours.gradients, theirs.gradients))
        del ours  # whose views would stay in memory
        moved.forget()
        return found + _words(after=same([*map(values, tensors)], [each.detach() for each in usual]))


def _words(**words: str) -> list[str]:
    return [f"{what}: {word}" for what, word in words.items() if word]
