"""Each operation that torch has samples for, with its tensors elsewhere: as with usual ones, or refused."""

from __future__ import annotations

import contextlib
import random
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from nvme_ops.offload import save_on_nvme
from tests.offload.elsewhere import KINDS, alone, apart, elsewhere, same, values

OPERATIONS = {f"{each.name}.{each.variant_test_name}".strip("."): each for each in op_db}
POLICIES = ("nvme", "auto")  # of save_on_nvme
ANY_VALUES = re.compile(r"empty|resize_")  # whatever is in memory
MAX_SAMPLES = 2  # samples of each operation

#: What differs, as a pattern, and why.
DIFFERENT = {
    r"weights? that (are|is) streamed|streamed from storage": "a streamed weight cannot be changed",
    r"keeps shape and memory|cannot be resized|no memory of its own": "not in place of what it is",
    r"(linalg\.(cond|eigvalsh)|norm\.nuc).*other bits": "torch computes vectors, too, where a tensor is of a subclass",
}

Tensors = Sequence[torch.Tensor]


class Case(NamedTuple):
    """A call, and which of its tensors are elsewhere.

    ``then`` says what is written to afterwards: ``"result"``, which may be a view, ``"tensors"``, or nothing.
    """

    name: str
    call: Callable[[Tensors], Any]
    tensors: Tensors
    mask: Sequence[int]
    then: str = ""

    def copies(self) -> list[torch.Tensor]:
        """Returns copies of the tensors."""
        return [each.detach().clone().requires_grad_(each.requires_grad) for each in self.tensors]

    def outcome(self, tensors: Tensors) -> tuple[Any, Any]:
        """Returns the results with other tensors, and gradients unless something is written to afterwards."""
        torch.default_generator.manual_seed(1)
        random.seed(1)
        result = self.call(tensors)
        outs = [each for each in tree_leaves(result) if isinstance(each, torch.Tensor)]
        with torch.no_grad():
            for each in outs if self.then == "result" else tensors if self.then else []:
                each[(slice(1),) * each.dim()].fill_(1)
        outs = [each for each in outs if each.requires_grad and not self.then]
        inputs = [each for each in tensors if each.requires_grad]
        given = [torch.full_like(values(each), 0.5 + number) for number, each in enumerate(outs)]
        return result, torch.autograd.grad(outs, inputs, given, allow_unused=True) if outs and inputs else ()


def cases(op: Any, sample: Any, way: str) -> Iterator[Case]:
    """Yields how an operation is called with a sample."""
    leaves, shape = tree_flatten((sample.input, sample.args, sample.kwargs))
    tensors = list({id(each): each for each in leaves if isinstance(each, torch.Tensor)}.values())

    def call(function: Any, given: Tensors) -> Any:
        others = {id(each): other for each, other in zip(tensors, given)}  # noqa: B905  (the last may be for out=)
        first, args, kwargs = tree_unflatten([others.get(id(each), each) for each in leaves], shape)
        return function(first, *args, **kwargs, **({"out": given[-1]} if len(given) > len(tensors) else {}))

    if way in POLICIES:
        yield Case("", partial(call, op.op), tensors, [])
        return
    every = list(range(len(tensors)))
    for name, function in {"": op.op, "method": op.method_variant, "operator": op.operator_variant}.items():
        for mask in [[each] for each in every] + [every] * (len(every) > 1) if function is not None else []:
            untrained = mask if way == "streamed" else ()
            given = [each.detach() if index in untrained else each for index, each in enumerate(tensors)]
            yield Case(name, partial(call, function), given, mask)
    without = [each.detach() for each in tensors]
    for index in every:
        yield Case("", partial(call, op.op), without, [index], "result")
        if way == "swapped":
            yield Case("", partial(call, op.op), without, [index], "tensors")
        if op.inplace_variant is not None:
            yield Case("in place", partial(call, op.inplace_variant), without, [index])
    if op.supports_out:
        try:
            out = torch.zeros_like(call(op.op, without))
        except Exception:
            return
        yield Case("out=", partial(call, op.op), [*without, out], [len(without)])


def word(compare: Callable[[], str]) -> str:
    """Returns what differs, or the error that there was."""
    try:
        return compare()
    except Exception as error:
        return f"{type(error).__name__}: {[*str(error).strip().splitlines(), ''][0][:300]}"


def differences(tried: Sequence[tuple[Case, list[torch.Tensor], Any, Tensors]], way: Any, folder: Path) -> list[str]:
    """Returns what differs in each case, given its tensors, the outcome in memory, and the tensors afterwards."""
    if way in POLICIES:
        with save_on_nvme(folder, min_bytes=1, memory_budget=0, policy=way):
            return [word(lambda: same(case.outcome(given), theirs)) for case, given, theirs, _ in tried]  # noqa: B023
    places = [(given, index) for case, given, *_ in tried for index in case.mask]
    with elsewhere(way, [given[index] for given, index in places], folder) as moved:
        for (given, index), each in zip(places, moved, strict=True):
            given[index] = each
        found = [word(lambda: same(case.outcome(given), theirs)) for case, given, theirs, _ in tried]  # noqa: B023
        moved.forget()
        for number, (_, given, _, usual) in enumerate(tried):
            found[number] = found[number] or word(lambda: same([*map(values, given)], usual))  # noqa: B023
        return found


def operate(name: str, dtype: torch.dtype, way: str, folder: Path) -> list[str]:
    """Returns what differs, one line each."""
    warnings.simplefilter("ignore")
    op, said = OPERATIONS[name], list[str]()
    if dtype not in op.dtypes or ANY_VALUES.search(name):
        return said
    torch.default_generator.manual_seed(0)
    random.seed(0)
    samples = list(op.sample_inputs("cpu", dtype, requires_grad=op.supports_autograd and dtype in op.backward_dtypes))
    for number in sorted(random.Random(0).sample(range(len(samples)), min(MAX_SAMPLES, len(samples)))):
        tried = list[tuple[Case, list[torch.Tensor], Any, Tensors]]()
        for case in cases(op, samples[number], way):
            given, usual = case.copies(), case.copies()
            with contextlib.suppress(Exception):  # what torch does not do, either
                tried.append((case, given, case.outcome(usual), [each.detach() for each in usual]))
        for (case, *_), found in zip(tried, differences(tried, way, folder), strict=True):
            line = f"{name} {case.name} {case.then} sample {number}, {case.mask} of {len(case.tensors)}: {found}"
            if found and not any(re.search(pattern, line) for pattern in DIFFERENT):
                said.append(line)
    return said


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("way", [*KINDS, *POLICIES])
@alone
def test_operations(way: str, dtype: torch.dtype, folder: Path) -> None:
    names = random.Random(str(dtype)).sample(list(OPERATIONS), len(OPERATIONS) // 2)
    found = apart(names, partial(operate, dtype=dtype, way=way, folder=folder))
    assert [line for lines in found.values() for line in lines] == []
