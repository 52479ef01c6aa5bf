"""Every call that DeepSpeed's bindings take is taken here: names of methods, of arguments, and defaults.

The table was read by a program from ``csrc/aio/py_lib/py_ds_aio.cpp``, ``csrc/gds/py_lib/py_ds_gds.cpp`` and
``csrc/pin_memory/py_ds_pin_memory.cpp`` of DeepSpeed 0.19.8: what follows ``.def(`` and ``"name"_a``.
"""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch

from nvme_ops import aio_handle, gds_handle
from nvme_ops.pin_memory import pin_handle

# Method, its arguments in order; behind a colon the default. One method may have several forms.
BOTH = """
__init__ block_size:1048576 queue_depth:128 single_submit:False overlap_events:False intra_op_parallelism:1
get_block_size
get_queue_depth
get_single_submit
get_overlap_events
get_intra_op_parallelism
get_alignment
read buffer filename validate file_offset:0
write buffer filename validate file_offset:0
pread buffer filename validate async file_offset:0
pwrite buffer filename validate async file_offset:0
sync_pread buffer filename file_offset:0
sync_pwrite buffer filename file_offset:0
async_pread buffer filename file_offset:0
async_pwrite buffer filename file_offset:0
async_pwrite buffer fd file_offset:0
new_cpu_locked_tensor num_elem example_tenosr
free_cpu_locked_tensor tensor
is_pinned buffer
wait
"""
GDS = """
new_pinned_device_tensor num_elem example_tenosr
free_pinned_device_tensor tensor
pin_device_tensor tensor
unpin_device_tensor tensor
"""
PIN = """
__init__
new_cpu_locked_tensor num_elem example_tensor
free_cpu_locked_tensor locked_tensor
free_cpu_locked_tensor_by_ptr address
is_pinned buffer
"""
# Arguments that DeepSpeed's callers also give by position, where the name is another one here.
OTHER_NAMES = {"async": "async_op", "example_tenosr": "example_tensor", "fd": "filename"}
# Of these a write without an offset makes the tensor the whole file; DeepSpeed's 0 leaves an old tail in place.
# The number of lanes has two names here, neither of which is given by default.
OTHER_DEFAULTS = {"file_offset": None, "intra_op_parallelism": None}
FORMS = [
    pytest.param(kind, line.split()[0], line.split()[1:], id=f"{kind.__name__} {line}")
    for kind, table in ((aio_handle, BOTH), (gds_handle, BOTH + GDS), (pin_handle, PIN))
    for line in table.split("\n")
    if line
]


def value_of(argument: str) -> Any:
    return torch.zeros(1) if argument in ("buffer", "tensor", "locked_tensor") else 1


@pytest.mark.parametrize(("kind", "method", "arguments"), FORMS)
def test_deepspeeds_keywords_and_positions(kind: type, method: str, arguments: list[str]) -> None:
    signature = inspect.signature(getattr(kind, method) if method != "__init__" else kind)
    names = [argument.partition(":")[0] for argument in arguments]
    own = [] if method == "__init__" else [None]
    required = [argument for argument in arguments if ":" not in argument]
    signature.bind(*own, **{name: value_of(name) for name in names})
    signature.bind(*own, **{name: value_of(name) for name in required})
    bound = signature.bind(*own, *map(value_of, names)).arguments
    assert [name for name in bound if name != "self"] == [OTHER_NAMES.get(name, name) for name in names]
    for argument in arguments:
        name, colon, default = argument.partition(":")
        if colon:
            expected = OTHER_DEFAULTS[name] if name in OTHER_DEFAULTS else {"True": True, "False": False}.get(default)
            found = signature.parameters[name].default
            assert found is expected if expected is not None or name in OTHER_DEFAULTS else found == int(default)


def test_what_has_two_names_has_one_default() -> None:
    assert aio_handle().get_intra_op_parallelism() == 1
