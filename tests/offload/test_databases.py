"""torch's own lists of optimizers and modules, with their inputs: the same bits with tensors on storage."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.testing._internal.common_modules import module_db
from torch.testing._internal.common_optimizers import optim_db
from torch.utils._pytree import tree_leaves, tree_map

from nvme_ops.offload import NvmeOptimizer, stream_weights, swap_params
from nvme_ops.offload.weights import streamed
from nvme_ops.settings import PAGE
from tests.offload.elsewhere import alone, apart, same, values

MODULES = {f"{each.module_cls.__module__}.{each.module_cls.__name__}": each for each in module_db}
_optimizers: list[Any] = optim_db
OPTIMIZERS = {each.optim_cls.__name__: each for each in _optimizers}

#: Why an optimizer is refused.
REFUSED = {
    "LBFGS": "its steps need all parameters at once",
    "SparseAdam": "is for sparse gradients alone",
    "Adafactor": "its states are not of each element",
    "Muon": "its states are not of each element",
}


def optimize(name: str, folder: Path) -> list[str]:
    """What differs between torch's optimizer and ours, with each of the inputs that torch tests it with."""
    info, said = OPTIMIZERS[name], []
    for number, given in enumerate(info.optim_inputs_func(device="cpu")):
        results = list[Any]()
        for ours in (False, True):
            torch.manual_seed(0)
            params = [torch.nn.Parameter(torch.randn(size)) for size in ((10, 5), (10,), (3, 4, 5))]
            try:
                optimizer = (
                    NvmeOptimizer(params, info.optim_cls, folder, **given.kwargs)
                    if ours
                    else info.optim_cls(params, **given.kwargs)
                )
                for step in range(4):
                    for index, each in enumerate(params):
                        each.grad = torch.randn(each.shape) if step != index else None
                    optimizer.step()
                state = optimizer.state_dict()["state"]
                results.append([[each.detach() for each in params], [state[key] for key in sorted(state)]])
            except Exception as error:
                results.append(error)
        if isinstance(results[0], Exception) and isinstance(results[1], Exception):
            continue
        if isinstance(results[1], Exception):
            said.append(f"{number} {given.kwargs}: {type(results[1]).__name__}: {results[1]}")
        elif word := same(results[1], results[0]):
            said.append(f"{number} {given.kwargs}: {word}")
    return said


@pytest.mark.slow
@alone
def test_optimizers(folder: Path) -> None:
    found = apart(list(OPTIMIZERS), partial(optimize, folder=folder))
    assert {name: lines for name, lines in found.items() if lines and name not in REFUSED} == {}


def inputs(info: Any, training: bool) -> Iterator[tuple[Any, Any]]:
    """What modules are made with, and called with."""
    torch.manual_seed(0)
    for each in info.module_inputs_func(
        info, device="cpu", dtype=torch.float32, requires_grad=training, training=training
    ):
        if each.forward_input is not None:
            yield each.constructor_input, each.forward_input


def outcome(module: Any, given: Any, training: bool) -> list[Any]:
    """The result, gradients of parameters and inputs, and the state."""
    args, kwargs = tree_map(
        lambda each: (
            each.detach().clone().requires_grad_(each.requires_grad) if isinstance(each, torch.Tensor) else each
        ),
        (given.args, given.kwargs),
    )
    torch.manual_seed(1)
    result = module(*args, **kwargs)
    outs = [each for each in tree_leaves(result) if isinstance(each, torch.Tensor) and each.requires_grad]
    if outs:
        torch.autograd.backward(outs, [torch.full_like(each, 0.5) for each in outs])
    leaves = [each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor) and each.requires_grad]
    gradients = [each.grad for each in [*leaves, *(module.parameters() if training else ())]]
    shown = tree_map(lambda each: each.detach() if isinstance(each, torch.Tensor) else each, result)
    return [shown, gradients, {name: values(each) for name, each in module.state_dict().items()}]


def compute(name: str, kind: str, folder: Path) -> list[str]:
    """What differs between a module in memory and one with parameters elsewhere."""
    torch.backends.mha.set_fastpath_enabled(False)  # which torch does not take with tensors of a subclass
    info, said, training = MODULES[name], list[str](), kind == "swapped"
    for number, (made, given) in enumerate(inputs(info, training)):
        modules = []
        for _ in range(2):
            torch.manual_seed(2)
            module: Any = info.module_cls(*made.args, **made.kwargs).train(training)
            module.filler = torch.nn.Parameter(torch.zeros(16 * PAGE, dtype=torch.uint8), False)
            modules.append(module)
        plain, ours = modules
        if any(isinstance(each, torch.nn.UninitializedParameter) for each in plain.parameters()):
            continue
        try:
            theirs = outcome(plain, given, training)
        except Exception:
            continue
        try:
            if kind == "swapped":
                with swap_params(ours, folder, memory_budget="64M", min_bytes=1):
                    found = same(outcome(ours, given, training), theirs)
            else:
                with stream_weights(ours, folder, memory_budget="64M"):
                    found = same(outcome(ours, given, training), theirs)
        except Exception as error:
            found = f"{type(error).__name__}: {str(error)[:200]}"
        said += [f"{number}: {found}"] if found else []
    return said


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["swapped", "streamed"])
@alone
def test_modules(kind: str, folder: Path) -> None:
    streamed._SMALL = 0  # else they stay in memory
    found = apart(list(MODULES), partial(compute, kind=kind, folder=folder))
    differ = {name: lines for name, lines in found.items() if lines}
    assert differ == {}, differ
