"""Each operation and attribute of a tensor whose values are elsewhere: as with usual ones, or refused in a sentence.

Operations are called with torch's own samples. What it has none for is found by ``dir``, and how that is called by
trying arguments: what usual tensors accept has to give the same here and to change the same. None may crash.
"""

from __future__ import annotations

import contextlib
import copy
import pickle
import random
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from nvme_ops.offload import save_on_nvme
from tests.offload.elsewhere import KINDS, alone, apart, elsewhere, same, saved_by_torch, values

POLICIES = ("nvme", "auto")  # of save_on_nvme
OPERATIONS = {f"{op.name}.{op.variant_test_name}".strip("."): op for op in op_db}
SAMPLED = {getattr(variant, "__name__", "") for op in op_db for variant in (op.method_variant, op.inplace_variant)}
SAMPLED |= {f"{alias.name}{mark}" for op in op_db for alias in op.aliases for mark in ("", "_")}
SAMPLED |= {f"__{mark}{getattr(op.operator_variant, '__name__', '')}__" for op in op_db for mark in ("", "i", "r")}
#: What is another in each process, or for each tensor, or words for people; or whatever is in memory.
OWN = re.compile(
    r"__(repr|str|format|hash|dir|sizeof|class|dict|doc|module|weakref|new|init|init_subclass|subclasshook|del|delattr|"
    r"getattribute|getattr|setattr|torch_function|torch_dispatch|subclasscheck|annotations|getstate|setstate|reduce|"
    r"cuda_array_interface|abstractmethods)__|_backward_hooks|_cdata|_use_count|_post_accumulate_grad_hooks|"
    r"_make_.*|_is_view|_base|_typed_storage|_version|storage_type|__orig_bases__|__torch_.*|.*data_ptr|new|.*empty.*|"
    r"resize_|_python_dispatch"
)
ATTRIBUTES = [name for name in dir(torch.Tensor) if name not in {*SAMPLED, *OPERATIONS} and not OWN.fullmatch(name)]


OTHERS: dict[str, Callable[[Any], Any]] = {
    "copy.copy": copy.copy,
    "copy.deepcopy": copy.deepcopy,
    "pickle": lambda p: pickle.loads(pickle.dumps(p)),
    "torch.save": saved_by_torch,
    "torch.from_dlpack": torch.from_dlpack,
    "numpy.asarray": lambda p: torch.from_numpy(np.asarray(p)),
    "torch.as_tensor": torch.as_tensor,
    "torch.asarray": lambda p: torch.asarray(p, copy=True),
    "p.data[0] = 1": lambda p: p.data[0].fill_(1),
    "p.data.t()[0] = 1": lambda p: p.data.t()[0].fill_(1),
    "batch_norm": lambda p: torch.nn.functional.batch_norm(torch.eye(4), p.data[0], p.data[1], training=True),
    "a copy, then a write": lambda p: (p.double(), p.view(-1)[:3].zero_())[0],
    "autocast, then a write": lambda p: (p.to(torch.bfloat16), torch._foreach_add_([p.data], 1.0))[0],
}
NAMES = [*OPERATIONS, *ATTRIBUTES, *OTHERS]

#: Refusals of what torch has samples for: of writes to a streamed weight, and of what is not in place. Of others any.
REFUSED = re.compile(
    r"weights? that (are|is) streamed|streamed from storage|keeps shape and memory|cannot be resized|"
    r"no memory of its own"
)
ANY_REFUSED = re.compile(rf"on storage|swapped|streamed|{REFUSED.pattern}")
#: What differs, as a pattern, and why.
DIFFERENT = {
    r"(linalg\.(cond|eigvalsh)|norm\.nuc|masked\.prod).*other bits": "torch asks whether a tensor is of a subclass",
    r"_?_reduce_ex_": "a copy, where torch shares memory",
    r"(_lazy_clone|map_) ": "has no memory to share or to point to",
    r"dequantize": "returns another tensor, as if it were quantized",
    r"is_shared": "open: torch's is_shared ends the process where a storage has no memory",
    r"_neg_view": "open: writes to this view are lost",
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
        return [tensor.detach().clone().requires_grad_(tensor.requires_grad) for tensor in self.tensors]

    def outcome(self, tensors: Tensors) -> tuple[Any, Any]:
        """Returns the results with other tensors, and gradients unless something is written to afterwards."""
        torch.default_generator.manual_seed(1)
        random.seed(1)
        result = self.call(tensors)
        outs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        with torch.no_grad():
            for tensor in outs if self.then == "result" else tensors if self.then else []:
                tensor[(slice(1),) * tensor.dim()].fill_(1)
        outs = [out for out in outs if out.requires_grad and not self.then]
        inputs = [tensor for tensor in tensors if tensor.requires_grad]
        given = [torch.full_like(values(out), 0.5 + number) for number, out in enumerate(outs)]
        return result, torch.autograd.grad(outs, inputs, given, allow_unused=True) if outs and inputs else ()


def sampled(op: Any, sample: Any, way: str) -> Iterator[Case]:
    """Yields how an operation is called with a sample."""
    leaves, shape = tree_flatten((sample.input, sample.args, sample.kwargs))
    tensors = list({id(leaf): leaf for leaf in leaves if isinstance(leaf, torch.Tensor)}.values())

    def call(function: Any, given: Tensors) -> Any:
        others = {id(tensor): other for tensor, other in zip(tensors, given)}  # noqa: B905  (the last may be for out=)
        first, args, kwargs = tree_unflatten([others.get(id(leaf), leaf) for leaf in leaves], shape)
        return function(first, *args, **kwargs, **({"out": given[-1]} if len(given) > len(tensors) else {}))

    if way in POLICIES:
        yield Case("", partial(call, op.op), tensors, [])
        return
    every = list(range(len(tensors)))
    for name, function in {"": op.op, "method": op.method_variant, "operator": op.operator_variant}.items():
        for mask in [[at] for at in every] + [every] * (len(every) > 1) if function is not None else []:
            untrained = mask if way == "streamed" else ()
            given = [tensor.detach() if index in untrained else tensor for index, tensor in enumerate(tensors)]
            yield Case(name, partial(call, function), given, mask)
    without = [tensor.detach() for tensor in tensors]
    for index in every:
        yield Case("", partial(call, op.op), without, [index], "result")
        if way == "swapped":
            yield Case("", partial(call, op.op), without, [index], "tensors")
        if op.inplace_variant is not None:
            yield Case("in place", partial(call, op.inplace_variant), without, [index])
    if op.supports_out:
        try:
            out = torch.zeros_like(call(op.op, [tensor.clone() for tensor in without]))
        except Exception:
            return
        yield Case("out=", partial(call, op.op), [*without, out], [len(without)])


def arguments() -> list[tuple[Any, ...]]:
    """Returns arguments that methods of a matrix may take."""
    torch.default_generator.manual_seed(1)
    t, row, index, mask = torch.rand(4, 4), torch.rand(4), torch.tensor([2, 0]), torch.rand(4, 4) > 0.5
    return [
        (), (t,), (t, t), (row,), (0,), (1,), (0, 1), (4, 4), (2.0,), (0.1, 0.9), (t, 0.5), (torch.float64,), ("cpu",),
        ("meta",), (torch.Tensor,), (None,), (True,), ((16,),), ((2, 2), (1, 1)), (index,), (mask,), (0, row), (0, 1.0),
        (mask, 1.0), (mask, t), (index, t[0, :2]), (lambda x: x,), (t, lambda x, y: x + y), ([1.0, 2.0],), (t.shape,),
    ]  # fmt: skip


def tried(name: str, way: str) -> Iterator[Case]:
    """Yields how an attribute, or one of the others, may be called or set."""
    torch.default_generator.manual_seed(0)
    matrix = torch.rand(4, 4)
    if name in OTHERS:
        yield Case("", lambda given: OTHERS[name](given[0]), [matrix], [0], "result")
        return

    def call(number: int, given: Tensors) -> Any:
        of = getattr(given[0], name)
        return of(*arguments()[number]) if callable(of) else of

    def put(number: int, given: Tensors) -> None:
        setattr(given[0], name, *arguments()[number])

    settable = not callable(getattr(torch.Tensor, name, None))
    for number, args in enumerate(arguments()):
        if not settable or not number:
            yield Case(f"#{number}", partial(call, number), [matrix], [0], "result")
            if way == "swapped":
                yield Case(f"#{number}", partial(call, number), [matrix.clone().requires_grad_()], [0])
        if settable and len(args) == 1:
            yield Case(f"#{number} put", partial(put, number), [matrix], [0])


def word(compare: Callable[[], str]) -> str:
    """Returns what differs, or the error that there was."""
    try:
        return compare()
    except Exception as error:
        return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def differences(
    tried: Sequence[tuple[Case, list[torch.Tensor], Any, Tensors]], way: Any, folder: Path, refusals: re.Pattern[str]
) -> list[str]:
    """Returns what differs in each case, given its tensors, the outcome in memory, and the tensors afterwards."""
    if way in POLICIES:
        with save_on_nvme(folder, min_bytes=1, memory_budget=0, policy=way):
            return [word(lambda: same(case.outcome(given), theirs)) for case, given, theirs, _ in tried]  # noqa: B023
    places = [(given, index) for case, given, *_ in tried for index in case.mask]
    with elsewhere(way, [given[index] for given, index in places], folder) as moved:
        for (given, index), tensor in zip(places, moved, strict=True):
            given[index] = tensor
        words = [word(lambda: same(case.outcome(given), theirs)) for case, given, theirs, _ in tried]  # noqa: B023
        moved.forget()
        for number, (case, given, _, usual) in enumerate(tried):
            refused = refusals.search(words[number])
            wanted, which = (case.tensors, case.mask) if refused else (usual, range(len(usual)))
            after = word(
                lambda: same([values(given[at]) for at in which], [wanted[at].detach() for at in which])  # noqa: B023
            )
            words[number] = after if refused else words[number] or after
        return words


def operate(name: str, folder: Path) -> list[str]:
    """Returns what differs, one line each."""
    warnings.simplefilter("ignore")
    said, op, rng = list[str](), OPERATIONS.get(name), random.Random(name)
    torch.default_generator.manual_seed(0)
    random.seed(0)
    if op is not None:
        dtype = rng.choice([kind for kind in (torch.float32, torch.float64) if kind in op.dtypes] or [None])
        if dtype is None or OWN.fullmatch(name):
            return said
        trained = op.supports_autograd and dtype in op.backward_dtypes
        sample = rng.choice(list(op.sample_inputs("cpu", dtype, requires_grad=trained)))
    for way in (*KINDS, *([rng.choice(POLICIES)] if op is not None else [])):
        rows = list[tuple[Case, list[torch.Tensor], Any, Tensors]]()
        for case in sampled(op, sample, way) if op is not None else tried(name, way):
            given, usual = case.copies(), case.copies()
            with contextlib.suppress(Exception):  # what torch does not do, either
                rows.append((case, given, case.outcome(usual), [tensor.detach() for tensor in usual]))
        refusals = ANY_REFUSED if op is None else REFUSED
        for (case, *_), differs in zip(rows, differences(rows, way, folder, refusals), strict=True):
            line = f"{name} {way} {case.name} {case.then}, {case.mask} of {len(case.tensors)}: {differs}"
            if differs and not any(re.search(pattern, line) for pattern in DIFFERENT):
                said.append(line)
    return said


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("part", ["some", *(pytest.param(part, marks=pytest.mark.nightly) for part in range(3))])
@alone
def test_as_with_usual_tensors_or_refused(part: Any, folder: Path) -> None:
    names = [*OTHERS, *random.Random(0).sample(NAMES, 40)] if part == "some" else NAMES[part::3]
    results = apart(list(dict.fromkeys(names)), partial(operate, folder=folder))
    said = "\n".join(line for lines in results.values() for line in lines)
    assert not said, said
