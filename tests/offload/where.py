"""The tests of offload a second time, on the simulated accelerator: in lazy order, or in a random one that is legal.

What a test makes, it makes there, with the CPU's random numbers; what it compares, it compares on the CPU. By hand:

    NVME_OPS_TESTS_ORDER=7 python -m pytest tests/offload/test_swap.py -n 0     # 0: the lazy one

``NVME_OPS_TESTS_HOST`` is the host budget of what gives none, by default 0, so that storage is used.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import threading
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch.utils._device import DeviceContext, _device_constructors
from torch.utils._pytree import tree_map

from nvme_ops.base import limits
from nvme_ops.offload import budgets
from nvme_ops.offload.weights import pretrained
from nvme_ops.offload.weights.stream_weights import device_of
from tests.doubles import private_device
from tests.offload import elsewhere

ORDER = os.environ.get("NVME_OPS_TESTS_ORDER")
HOST = os.environ.get("NVME_OPS_TESTS_HOST", "0")

_COMPARED = {torch.equal, torch.allclose}
_MEMORY = "where host memory lies, or how much of it is used"
_TO_CPU = "has something on the CPU, or an accelerator of its own"
_ONE = "states, keys and values are in host memory, which no Memory of an accelerator is"
_THREAD = "torch has one thread for all gradients of a device, and keeps a graph there for a moment"
_LIMITS = "the double crashes, or differs from a device in what torch does"
#: Tests that say nothing of an accelerator, and why.
LEFT_OUT = {
    "test_it_computes_on_the_gpu_where_there_is_one": _TO_CPU,
    "test_a_part_is_made_without_reading": _TO_CPU,
    "test_conversions_that_change_something_are_refused_as_a_whole": _TO_CPU,
    "test_what_cannot_be_is_refused_and_nothing_changes": _TO_CPU,
    "test_lists_are_taken_one_by_one_and_joined_within_the_budget": _TO_CPU,
    "test_what_would_meet_no_memory_or_change_the_shape_says_what_to_do": _LIMITS,
    "test_nvme_cache.py::test_what_cannot_be_is_refused": "copies on a device are not of its budget",
    "test_exponents_of_4_bits_are_those_of_transformers_in_every_dtype": _LIMITS,
    "test_a_conjugated_gradient_is_one": _LIMITS,
    "test_whatever_a_program_does_it_has_the_bits_of_torch[7]": _LIMITS,  # torch's own ASGD fails there
    "test_a_gradient_that_another_thread_adds_to_stays_where_it_is": _THREAD,
    "test_a_failure_names_the_tensor_and_leaves_nothing": _THREAD,
    "test_what_is_cheap_is_computed_again_once_storage_is_waited_for": _THREAD,
    "test_gradients_leave_memory_once_they_are_written": _MEMORY,
    "test_large_tensors_that_an_update_makes_do_not_fragment_the_heap": _MEMORY,
    "test_shares_are_bounds_that_may_change_and_parts_lie_at_both_ends": _MEMORY,
    "test_parts_of_two_kinds_do_not_lie_among_each_other": _MEMORY,
    "test_what_is_lent_is_given_back_to_the_system": _MEMORY,
    "test_weights_give_way_to_keys_and_values_and_come_back": _ONE,
    "test_a_cache_larger_than_what_weights_leave_is_written": _ONE,
    "test_all_of_training_shares_one_memory": _ONE,
    "test_what_training_uses_is_in_one_piece_beside_what_it_saves": _ONE,
    "test_what_is_wrong_is_said": _ONE,
}


def _on_cpu(value: Any) -> Any:
    return value.cpu() if isinstance(value, torch.Tensor) and not value.is_meta else value


class There(DeviceContext):
    """torch's default device."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _COMPARED:
            args = tree_map(_on_cpu, args)
        elif func is torch.histc:  # torch counts no integers on the CPU, where the double computes
            args = [args[0].float(), *args[1:]]
        elif func in _device_constructors() and kwargs.get("device") is None and not self._of_a_file():
            if kwargs.get("generator") is not None:
                return func(*args, **kwargs).to(self.device)
            kwargs = {**kwargs, "device": self.device}
        try:
            return func(*args, **kwargs)
        except NotImplementedError as error:
            if lacking := re.search(r"aten::\w+|\w+_overrideable", str(error)):
                pytest.skip(f"the simulated device lacks {lacking[0]}")
            raise

    @staticmethod
    def _of_a_file() -> bool:
        """Returns whether these are bytes that a test writes to a file."""
        return bool(sys._getframe(2).f_globals["__name__"] == "tests.conftest")


@contextlib.contextmanager
def _there(patch: pytest.MonkeyPatch) -> Iterator[None]:
    device, run, host_bytes, same = private_device(), threading.Thread.run, limits.host_bytes, elsewhere._same

    def run_there(thread: threading.Thread) -> None:
        with There(device.device()):
            run(thread)

    patch.setattr(threading.Thread, "run", run_there)
    patch.setattr(pretrained, "device_of", lambda given: device_of(given or device.device()))
    patch.setattr(budgets, "host_bytes", lambda given, there=0: host_bytes(HOST if given is None else given, there))
    patch.setattr(torch.testing, "assert_close", partial(torch.testing.assert_close, check_device=False))
    patch.setattr(elsewhere, "_same", lambda *both: same(*map(_on_cpu, both)))
    for module in [module for name, module in sys.modules.items() if name.startswith("tests.offload.")]:
        for name, value in list(vars(module).items()):
            if isinstance(value, torch.Tensor):
                patch.setattr(module, name, device.tensor(value))
            elif isinstance(value, torch.device) and value.type == "cpu":
                patch.setattr(module, name, device.device())
    with device.computing(), device.in_random_order(int(ORDER or 0)), There(device.device()):
        yield


@pytest.fixture(autouse=ORDER is not None)
def on_the_simulated_device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Runs each test there; one that passes leaves no memory, copy or event behind."""
    node = request.node
    for name in (node.name, node.originalname, f"{node.path.name}::{node.originalname}"):
        if name in LEFT_OUT:
            pytest.skip(LEFT_OUT[name])
    failed = request.session.testsfailed
    with contextlib.ExitStack() as checked:
        checked.enter_context(private_device().left_as_found())
        with _there(monkeypatch):
            yield
            torch.ones(1, requires_grad=True).sum().backward()  # after which the thread of gradients has no other graph
        monkeypatch.undo()  # what has patches and arguments has tensors
        node.funcargs.clear()
        for function in vars(request.module).values():
            getattr(function, "cache_clear", str)()  # of models that its tests share
        if request.session.testsfailed > failed:  # so has a traceback
            checked.pop_all()
