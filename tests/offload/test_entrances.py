"""Every way to a tensor that torch has, on tensors whose values are elsewhere: as with usual ones, or refused.

What takes a tensor is found by ``dir``, and how it is called by trying arguments on usual tensors: what torch accepts
has to give the same here, to change the same, or to raise a sentence of ours. None may crash, or differ in silence.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import io
import multiprocessing.reduction
import pickle
import random
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils import _pytree as pytree

from tests.offload.elsewhere import apart, elsewhere, same, values

#: Each of the many names of a tensor is walked by one kind of a list.
KINDS = {"swapped": ("swapped", "swapped, trained"), "streamed": ("streamed",)}

_MEMORY = "has no memory to share or to point to"
_SHAPE = "a parameter on storage keeps its shape and its memory"
_CONVERTED = "a converted weight that is streamed is read anew each time: clone() makes it one that can be written to"

#: What differs or is refused, by patterns of kind and name, and why. What changes a streamed weight needs no row.
DIFFERENT = {
    r".* (__array__|numpy|__dlpack__|apply_|map_|share_memory_?|storage|untyped_storage|_lazy_clone)": _MEMORY,
    r".* (numpy.asarray|(torch|numpy).from_dlpack|torch.jit)": _MEMORY,
    r".* (as_strided_|resize_|resize_as_|set_|(un)?squeeze_|swapaxes_|swapdims_|t_|transpose_)": _SHAPE,
    r".* (__reduce_ex__|_reduce_ex_internal|pickle to another process)": "a copy, where torch shares memory",
    r"streamed (bfloat16|bool|byte|cdouble|cfloat|chalf|char|double|half|int|long|short)": _CONVERTED,
    r".* dequantize": "returns another tensor, as if it were quantized",
    r".* _python_dispatch": "has a dispatch of its own",
    r".* new(_empty)?": "whatever is in memory",
    r".* register_\w*hook": "another class in the words of an error",
    r"swapped.* type": "a wider dtype than the budget of this test has room for",
    r".* is_shared": "open: torch's is_shared ends the process where a storage has no memory",
    r".* (tensor_split|vsplit)": "open: more parts than there are rows divide by zero",
    r".* _neg_view": "open: writes to this view are lost",
}

#: What is another in each process, or for each tensor, or is words for people.
OWN = re.compile(
    r"__(repr|str|format|hash|dir|sizeof|class|dict|doc|module|weakref|new|init|init_subclass|subclasshook|del|delattr|"
    r"getattribute|getattr|setattr|torch_function|torch_dispatch|subclasscheck|annotations|getstate|setstate|reduce|"
    r"cuda_array_interface|abstractmethods)__|_backward_hooks|_cdata|_use_count|_post_accumulate_grad_hooks|"
    r"_make_.*|_is_view|_base|_typed_storage|_version|storage_type|__orig_bases__|__torch_.*"
)
OURS = re.compile(r"on storage|swapped|streamed")  # in a sentence of ours


@contextlib.contextmanager
def rigs(kind: str, count: int, folder: Path) -> Iterator[tuple[list[torch.nn.Linear], Callable[[], object]]]:
    """Modules with a weight that is in memory or elsewhere, and what makes all of these leave memory."""
    torch.default_generator.manual_seed(0)
    made = [torch.nn.Linear(4, 4, bias=False).requires_grad_(kind.endswith("trained")) for _ in range(count)]
    if kind.startswith("usual"):
        yield made, int
        return
    weights = [each.weight for each in made]
    with elsewhere("streamed" if kind == "streamed" else "swapped", weights, folder) as moved:
        for module, weight in zip(made, moved, strict=True):
            module.weight = weight
        yield made, moved.forget


def arguments() -> list[tuple[Any, ...]]:
    """Returns arguments that methods of a matrix may take."""
    torch.default_generator.manual_seed(1)
    t, other, row = torch.rand(4, 4), torch.rand(2, 3), torch.rand(4)
    index, indices, mask = torch.tensor([2, 0]), torch.randint(4, (4, 4)), torch.rand(4, 4) > 0.5
    return [
        (), (t,), (t, t), (row,), (other,), (0,), (1,), (0, 1), (1, 0), (4, 4), (2, 8), (2.0,), (0.1, 0.9), (t, 0.5),
        (torch.float64,), (torch.int32,), ("cpu",), ("meta",), (torch.Tensor,), ("torch.DoubleTensor",), (None,),
        (True,), ((16,),), ((0, 1),), ((2, 2), (1, 1)), (index,), (mask,), (0, index), (0, index, t[:2]),
        (0, index, 1.0),
        (0, indices), (0, indices, t), (0, indices, 1.0), (0, indices, t, "sum"), (0, index, t[:2], "mean"), (2,),
        (mask, 1.0), (mask, t), (index, t[0, :2]), ((index,), t[:2]), (0, 1.0), (0, row), (0, 0, 1), (0, 1, 2), (-1,),
        (0, 0, 2, 1), ("A", "B"), (lambda x: x,), (t, lambda x, y: x + y), ([1.0, 2.0],), ((4, 4), 2.0), (t.shape,),
    ]  # fmt: skip


def settle(result: Any, p: Any) -> Any:
    """A result in a form that can be compared: values instead of what leads to them."""
    if inspect.isgenerator(result) or isinstance(result, map | zip | type(iter([])) | type(iter({}.items()))):
        result = list(result)
    if isinstance(result, torch.UntypedStorage | torch.TypedStorage):
        return torch.tensor(result.tolist())
    if isinstance(result, np.ndarray | np.generic):
        return torch.from_numpy(np.array(result))
    if type(result).__name__ == "PyCapsule":
        return torch.utils.dlpack.from_dlpack(result).clone()
    if isinstance(result, torch.nn.Module):
        return {name: values(each) for name, each in result.state_dict().items()}
    if isinstance(result, torch.Tensor):
        if result.device.type == "privateuseone":  # which tests have made in this process: to(0) means it then
            raise NotImplementedError("the simulated device has few operations")
        return (result is p, isinstance(result, torch.nn.Parameter)), result
    if isinstance(result, torch.utils.data.Dataset):
        return [settle(result[0], p)]
    if isinstance(result, dict):
        return {str(key): settle(each, p) for key, each in result.items()}
    if isinstance(result, list | tuple):
        return [settle(each, p) for each in result]
    return result if isinstance(result, bool | int | float | complex | str | torch.dtype | torch.device) else None


class Outcome:
    """What a call returns, what becomes of the parameter when that is written to, and the errors that come."""

    result: Any = None
    after: Any = None
    error: str = ""

    def __init__(self, call: Call, module: torch.nn.Linear) -> None:
        self._module, self._p = module, module.weight
        torch.default_generator.manual_seed(2)
        try:
            made = call(self._p, module)
            self.result = copied(settle(made, self._p))
            for each in pytree.tree_leaves(made):  # which may be views
                if isinstance(each, torch.Tensor) and each is not self._p and each.numel() and not each.is_inference():
                    each[(slice(1),) * each.dim()].fill_(1)
        except Exception as error:
            self.error = f"{type(error).__name__}: {' '.join(str(error).split())}"

    def look(self) -> Outcome:
        """Looks at what became of the parameter and the module."""
        p = self._p
        try:
            self.after = copied([p.requires_grad, p.dtype, str(p.device), [*p.shape], [*p.stride()], p.grad, values(p)])
            self.after += copied(settle(self._module, p))
            with contextlib.suppress(RuntimeError, AttributeError):  # of another dtype, or the weight is gone
                if not self._module.weight.is_meta:  # with which torch returns whatever is in memory
                    self.after += [self._module(torch.ones(1, 4))]
        except Exception as error:  # whatever a hook is
            self.after = [f"{type(error).__name__}: {error}"]
        return self


def outcomes(kind: str, calls: Sequence[Call], folder: Path) -> list[Outcome]:
    """Makes each call on a parameter of its own."""
    with torch.no_grad(), rigs(kind, len(calls), folder) as (modules, forget):
        made = [Outcome(call, module) for call, module in zip(calls, modules, strict=True)]
        forget()
        return [each.look() for each in made]


def copied(shown: Any) -> list[Any]:
    """Returns the leaves, which what happens later does not change."""
    leaves = pytree.tree_leaves(shown)
    return [values(each).clone() if isinstance(each, torch.Tensor) else each for each in leaves]


def differences(name: str, calls: Sequence[Call], kind: str, folder: Path) -> list[str]:
    """Returns what differs from torch, of the calls that it does."""
    usual = "usual, trained" if kind.endswith("trained") else "usual"
    untouched = outcomes(usual, [NOTHING], folder)[0].after
    done = [each for each in calls if outcomes(usual, [each], folder)[0].result is not None]
    said = []
    if done:
        rows = zip(done, *(outcomes(each, done, folder) for each in (usual, usual, kind)), strict=True)
        for call, theirs, again, ours in rows:
            word = _word(theirs, ours, kind == "streamed" and (name[-1] == "_" or bool(same(theirs.after, untouched))))
            if same([theirs.result, theirs.after], [again.result, again.after]):  # an address, or random
                word = "result: 0" if ours.result == [0] != theirs.result else ""
            if word:
                said.append(f"{call}: {word}")
    return said


def _word(theirs: Outcome, ours: Outcome, refusable: bool) -> str:
    """Returns what differs; a sentence of ours is no difference where it is about a change that cannot be."""
    if ours.result is not None and (word := same(ours.result, theirs.result)):
        return f"result: {word}"
    if ours.error and not theirs.error:
        return "" if refusable and OURS.search(ours.error) else ours.error[:250]
    if len(ours.after) == 1 < len(theirs.after):
        return f"after: {ours.after[0][:250]}"
    word = same(ours.after, theirs.after)
    return word and f"after: {word}"


class Call:
    """A call with the arguments of a number.

    Args:
        number: of the arguments.
        of: returns what is called, from a parameter and its module; what is not called is returned itself.
        put: name of an attribute that is set instead.
    """

    def __init__(self, number: int, of: Callable[[Any, Any], Any], put: str = "") -> None:
        self.number, self._of, self._put = number, of, put

    def __repr__(self) -> str:
        return f"#{self.number}{' put' if self._put else ''}"

    def __call__(self, p: Any, module: Any) -> Any:
        """Calls it, with new arguments."""
        of, args = self._of(p, module), arguments()[self.number]
        if self._put:
            return setattr(of, self._put, *args)
        return of(*args) if callable(of) else of


NOTHING = Call(0, lambda p, _: p.dim)


def walk_tensor(name: str, kind: str, folder: Path) -> list[str]:
    """Walks an attribute of a tensor."""
    every = list(enumerate(arguments()))
    if callable(getattr(torch.Tensor, name, None)):
        calls = [Call(number, lambda p, _: getattr(p, name)) for number, _ in every]
    else:
        calls = [Call(0, lambda p, _: getattr(p, name))]
        calls += [Call(number, lambda p, _: p, put=name) for number, args in every if len(args) == 1]
    return differences(name, calls, kind, folder)


def _saved(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def _traced(module: Any) -> Any:
    file = io.BytesIO()
    torch.jit.save(torch.jit.trace(module, torch.ones(1, 4)), file)
    file.seek(0)
    return torch.jit.load(file)(torch.ones(1, 4))


OTHERS: dict[str, Callable[[Any, Any], Any]] = {
    "copy.copy": lambda p, _: copy.copy(p),
    "copy.deepcopy": lambda p, _: copy.deepcopy(p),
    "copy.deepcopy of a module": lambda _, module: copy.deepcopy(module),
    "pickle": lambda p, _: pickle.loads(pickle.dumps(p)),
    "pickle to another process": lambda p, _: pickle.loads(multiprocessing.reduction.ForkingPickler.dumps(p)),
    "torch.save": lambda p, _: _saved(p),
    "torch.save of a module": lambda _, module: _saved(module.state_dict()),
    "torch.jit": lambda _, module: _traced(module),
    "torch.from_dlpack": lambda p, _: torch.from_dlpack(p.detach()),
    "numpy.asarray": lambda p, _: np.asarray(p.detach()),
    "numpy.from_dlpack": lambda p, _: np.from_dlpack(p.detach()),
    "torch.as_tensor": lambda p, _: torch.as_tensor(p),
    "torch.asarray": lambda p, _: torch.asarray(p.detach(), copy=True),
    "torch.tensor": lambda p, _: torch.tensor(p.detach().clone()),
    "torch.utils.swap_tensors": lambda p, _: torch.utils.swap_tensors(p, torch.nn.Parameter(torch.ones(4, 4))),
    "p.data[0] = 1": lambda p, _: p.data[0].fill_(1),
    "p.data.t()[0] = 1": lambda p, _: p.data.t()[0].fill_(1),
    "foreach": lambda p, _: torch._foreach_mul_([p], 2.0),
    "a copy, then a write": lambda p, _: (p.double(), p.view(-1)[:3].zero_())[0],
    "autocast, then a write": lambda p, _: (p.to(torch.bfloat16), torch._foreach_add_([p.data], 1.0))[0],
}


def walk_other(name: str, kind: str, folder: Path) -> list[str]:
    """Walks what no ``dir`` finds."""
    return differences(name, [Call(0, lambda p, module: partial(OTHERS[name], p, module))], kind, folder)


WALKS: dict[str, tuple[Callable[..., list[str]], list[str]]] = {
    "tensor": (walk_tensor, [name for name in dir(torch.Tensor) if not OWN.fullmatch(name)]),
    "other": (walk_other, list(OTHERS)),
}


def walk(which: str, kind: str, folder: Path, names: Sequence[str] = ()) -> dict[str, list[str]]:
    """Walks many names in processes of their own, and returns what differs."""
    warnings.simplefilter("ignore")
    body, every = WALKS[which]
    found = apart(names or every, partial(body, kind=kind, folder=folder))
    return {name: lines for name, lines in found.items() if lines and not _reason(f"{kind} {name}")}


def _reason(name: str) -> str:
    return next((why for pattern, why in DIFFERENT.items() if re.fullmatch(pattern, name)), "")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["swapped", "streamed"])
@pytest.mark.parametrize("which", WALKS)
def test_some_entrances(which: str, kind: str, folder: Path) -> None:
    _, names = WALKS[which]
    assert walk(which, kind, folder, names if which == "other" else random.Random(0).sample(names, 8)) == {}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kinds", KINDS)
@pytest.mark.parametrize("which", WALKS)
def test_every_entrance(which: str, kinds: str, folder: Path) -> None:
    _, names = WALKS[which]
    share = len(KINDS[kinds]) if which == "tensor" else 1
    for number, kind in enumerate(KINDS[kinds]):
        assert walk(which, kind, folder, names[number % share :: share]) == {}
