"""Accelerator memory registered with cuFile: its refusals, its limit, and its transfers; the rest is in device/.

cuFile and the accelerator are doubles made of host memory, and the limit is one that the test sets.
"""

from __future__ import annotations

import gc
import threading
from pathlib import Path

import pytest
import torch

from nvme_ops.gds import gds_handle
from tests.conftest import MIB, in_threads, pattern, store
from tests.fake_cufile import FakeCuFile, Function
from tests.private_device import PrivateDevice

pytest_plugins = ("tests.fake_cufile.fixtures",)

PAGE = 4096
ODD = 2 * MIB + 5
BIG = 33 * MIB  # freed, memory of this size is no longer mapped, and the library looks


def registered(cufile: FakeCuFile) -> tuple[int, int]:
    now = cufile.statistics()
    return now.memories, now.memory_bytes


def test_memory_is_freed_after_it_was_deregistered_and_with_its_last_tensor(
    cufile: FakeCuFile, device: PrivateDevice
) -> None:
    handle, before = gds_handle(), device.statistics().device_blocks
    for new in (True, False):
        tensor = handle.new_pinned_device_tensor(BIG, device.empty(1)) if new else device.empty(BIG)
        handle.pin_device_tensor(tensor)
        kept, same = tensor[5:], tensor.view(3, -1)
        del tensor
        assert handle.unpin_device_tensor(same) is True
        del same
        assert device.statistics().device_blocks == before + 1
        del kept
        assert device.statistics().device_blocks == before
    tensor = device.empty(BIG)
    handle.pin_device_tensor(tensor)
    del tensor, handle  # it stays allocated while cuFile knows it, and is deregistered at the end
    gc.collect()
    assert device.statistics().device_blocks == before + 1
    assert registered(cufile) == (1, BIG)


def test_neighbours_and_what_lies_around_them(cufile: FakeCuFile, device: PrivateDevice) -> None:
    """cuFile takes no memory twice: its refusal is told, and leaves everything as it was."""
    handle, tensor = gds_handle(), device.empty(4 * PAGE)
    parts = [tensor[: 2 * PAGE], tensor[2 * PAGE :]]
    for part in parts:
        handle.pin_device_tensor(part)
        with pytest.raises(OSError, match="the memory is registered already") as caught:
            handle.pin_device_tensor(tensor)
        assert caught.value.errno == 5023
    assert all(handle.is_pinned(part) for part in parts)
    assert not handle.is_pinned(tensor)
    assert not handle.is_pinned(tensor[PAGE : 3 * PAGE])  # of two registrations
    assert not handle.is_pinned(torch.empty(1, device="meta"))
    assert handle.unpin_device_tensor(tensor) is False
    assert handle.unpin_device_tensor(parts[0]) is True
    assert handle.is_pinned(parts[1])
    assert handle.unpin_device_tensor(parts[1]) is True


@pytest.mark.parametrize("code", [5016, 5011, 5036])
def test_a_refusal_is_told_and_leaves_nothing(cufile: FakeCuFile, device: PrivateDevice, code: int) -> None:
    cufile.offer(nvidia_fs=2, memory=BIG + MIB)
    handle, tensor = gds_handle(), device.empty(BIG)
    limit = device.empty(BIG)
    if code == 5016:  # more than may be pinned
        handle.pin_device_tensor(limit)
    else:
        cufile.fail(Function.REGISTER_MEMORY, code, count=2)
    before = device.statistics().device_blocks
    match = f"registering {BIG} bytes of memory .* than may be pinned" if code == 5016 else f"cuFile error {code}"
    for refused in (
        lambda: handle.pin_device_tensor(tensor),
        lambda: handle.new_pinned_device_tensor(BIG, tensor),
    ):
        with pytest.raises(OSError, match=match) as caught:
            refused()
        assert caught.value.errno == code
    del caught
    gc.collect()
    assert device.statistics().device_blocks == before
    assert not handle.is_pinned(tensor)
    assert handle.unpin_device_tensor(tensor) is False
    assert handle.unpin_device_tensor(limit) is (code == 5016)
    assert handle.pin_device_tensor(tensor) is True  # there is room now
    handle.unpin_device_tensor(tensor)


def test_a_tensor_of_which_only_part_is_pinned_bounces(cufile: FakeCuFile, device: PrivateDevice, folder: Path) -> None:
    """cuFile takes no transfer that leaves a registration."""
    handle, tensor, path = gds_handle(), device.empty(BIG), store(folder / "file", pattern(BIG))
    handle.pin_device_tensor(tensor[:PAGE])
    handle.sync_pread(tensor, path)
    assert torch.equal(device.peek(tensor), pattern(BIG))
    assert (handle.last_path, handle.path_statistics()["why"]) == ("bounce", "only part of the tensor is pinned")
    handle.sync_pread(tensor[:PAGE], path)
    assert handle.last_path == "gds"
    assert handle.unpin_device_tensor(tensor[:PAGE]) is True


@pytest.mark.parametrize("blocks", [8, 2])
def test_unpinning_during_a_transfer(cufile: FakeCuFile, device: PrivateDevice, folder: Path, blocks: int) -> None:
    """cuFile is not made to forget memory that it is moving, or part of."""
    tensor, path = device.empty(8 * 65536), store(folder / "file", pattern(8 * 65536))
    handle, moved = gds_handle(65536), tensor[: blocks * 65536]
    handle.pin_device_tensor(tensor)
    with cufile.held(Function.READ):
        future = handle.submit_pread(moved, path)
        cufile.wait_for_held_up(Function.READ)
        threading.Timer(0.1, cufile.release, [Function.READ]).start()
        assert handle.unpin_device_tensor(tensor) is True
    assert future.result() == moved.nbytes
    assert torch.equal(device.peek(moved), pattern(8 * 65536)[: moved.nbytes])


def test_pins_from_several_threads(cufile: FakeCuFile, device: PrivateDevice) -> None:
    handle, shared = gds_handle(), device.empty(ODD)

    def work(_: int) -> None:
        for _ in range(20):
            own = device.empty(5000)
            handle.pin_device_tensor(shared)
            handle.pin_device_tensor(own)
            assert handle.is_pinned(own)
            assert handle.unpin_device_tensor(own)

    in_threads(work, 4)
    assert registered(cufile) == (1, ODD)
    handle.unpin_device_tensor(shared)
