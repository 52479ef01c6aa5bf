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
from tests.conftest import MIB, contents, in_threads, pattern, store
from tests.fake_cufile import FakeCuFile, Function
from tests.private_device import PrivateDevice

pytest_plugins = ("tests.fake_cufile.fixtures",)

PAGE = 4096
ODD = 2 * MIB + 5
BIG = 33 * MIB  # freed, memory of this size is no longer mapped, and the library looks


def registered(cufile: FakeCuFile) -> tuple[int, int]:
    now = cufile.statistics()
    return now.memories, now.memory_bytes


def test_its_memory_is_freed_with_the_last_reference(cufile: FakeCuFile, device: PrivateDevice) -> None:
    handle, before = gds_handle(), device.statistics().device_blocks
    tensor = handle.new_pinned_device_tensor(BIG, device.empty(1))
    kept = tensor[5:]
    handle.free_pinned_device_tensor(tensor)
    del tensor
    assert device.statistics().device_blocks == before + 1
    del kept
    assert device.statistics().device_blocks == before


@pytest.mark.parametrize("start", [0, PAGE])
def test_a_tensor_around_a_pinned_view(cufile: FakeCuFile, device: PrivateDevice, start: int) -> None:
    """cuFile takes no memory twice: its refusal is told, and leaves everything as it was."""
    handle, tensor = gds_handle(), device.empty(ODD)
    view = tensor[start : start + PAGE]
    handle.pin_device_tensor(view)
    with pytest.raises(OSError, match="the memory is registered already") as caught:
        handle.pin_device_tensor(tensor)
    assert caught.value.errno == 5023
    assert handle.is_pinned(view)
    assert not handle.is_pinned(tensor)
    assert handle.unpin_device_tensor(tensor) is False
    assert handle.unpin_device_tensor(view) is True


def test_neighbours(cufile: FakeCuFile, device: PrivateDevice) -> None:
    handle, tensor = gds_handle(), device.empty(4 * PAGE)
    left, right = tensor[: 2 * PAGE], tensor[2 * PAGE :]
    handle.pin_device_tensor(left)
    handle.pin_device_tensor(right)
    assert handle.is_pinned(left)
    assert handle.is_pinned(right)
    assert not handle.is_pinned(tensor[PAGE : 3 * PAGE])  # of two registrations
    assert handle.unpin_device_tensor(left) is True
    assert handle.is_pinned(right)
    assert handle.unpin_device_tensor(right) is True


def test_more_than_may_be_pinned(cufile: FakeCuFile, device: PrivateDevice) -> None:
    cufile.offer(nvidia_fs=2, memory=3 * MIB)
    handle, tensors = gds_handle(), [device.empty(ODD) for _ in range(2)]
    handle.pin_device_tensor(tensors[0])
    for refused in (
        lambda: handle.pin_device_tensor(tensors[1]),
        lambda: handle.new_pinned_device_tensor(ODD, tensors[0]),
    ):
        with pytest.raises(OSError, match=f"registering {ODD} bytes of memory .* than may be pinned") as caught:
            refused()
        assert caught.value.errno == 5016
    del caught
    assert not handle.is_pinned(tensors[1])
    assert handle.unpin_device_tensor(tensors[1]) is False
    handle.unpin_device_tensor(tensors[0])
    assert handle.pin_device_tensor(tensors[1]) is True  # there is room now
    handle.unpin_device_tensor(tensors[1])


@pytest.mark.parametrize("code", [5011, 5013, 5036])
def test_another_refusal(cufile: FakeCuFile, device: PrivateDevice, code: int) -> None:
    handle, tensor, before = gds_handle(), device.empty(BIG), device.statistics().device_blocks
    cufile.fail(Function.REGISTER_MEMORY, code, count=2)
    with pytest.raises(OSError, match=f"cuFile error {code}") as caught:
        handle.pin_device_tensor(tensor)
    assert caught.value.errno == code
    with pytest.raises(OSError, match=f"cuFile error {code}") as caught:
        handle.new_pinned_device_tensor(BIG, tensor)
    del caught
    gc.collect()
    assert device.statistics().device_blocks == before
    assert not handle.is_pinned(tensor)


def test_transfers_of_a_pinned_tensor(cufile: FakeCuFile, device: PrivateDevice, folder: Path) -> None:
    handle, path = gds_handle(65536, intra_op_parallelism=2), folder / "file"
    tensor = handle.new_pinned_device_tensor(ODD, device.empty(1))
    tensor.copy_(pattern(ODD))
    handle.write(tensor, path)
    assert torch.equal(contents(path), pattern(ODD))
    store(path, pattern(ODD, 1))
    handle.sync_pread(tensor[777:], path, 777)  # a view, and ends that are no whole pages
    assert torch.equal(device.peek(tensor), torch.cat([pattern(777), pattern(ODD, 1)[777:]]))
    handle.free_pinned_device_tensor(tensor)


def test_a_pinned_tensor_that_its_owner_drops(cufile: FakeCuFile, device: PrivateDevice) -> None:
    """It stays allocated while cuFile knows it, and is deregistered at the end."""
    handle, tensor, before = gds_handle(), device.empty(BIG), device.statistics().device_blocks
    handle.pin_device_tensor(tensor)
    del tensor, handle
    gc.collect()
    assert device.statistics().device_blocks == before
    assert registered(cufile) == (1, BIG)


def test_what_is_unpinned_is_deregistered_before_it_is_freed(cufile: FakeCuFile, device: PrivateDevice) -> None:
    handle, before = gds_handle(), device.statistics().device_blocks
    for _ in range(3):
        tensor = device.empty(BIG)
        handle.pin_device_tensor(tensor)
        same = tensor.view(3, -1)
        del tensor
        handle.unpin_device_tensor(same)
        del same
        assert device.statistics().device_blocks == before


def test_a_tensor_of_which_only_part_is_pinned_bounces(cufile: FakeCuFile, device: PrivateDevice, folder: Path) -> None:
    """cuFile takes no transfer that leaves a registration."""
    tensor, path = device.empty(BIG), store(folder / "file", pattern(BIG))
    handle = gds_handle()
    handle.pin_device_tensor(tensor[:PAGE])
    handle.sync_pread(tensor, path)
    assert torch.equal(device.peek(tensor), pattern(BIG))
    assert (handle.last_path, handle.path_statistics()["why"]) == ("bounce", "only part of the tensor is pinned")
    handle.sync_pread(tensor[:PAGE], path)
    assert handle.last_path == "gds"
    assert handle.unpin_device_tensor(tensor[:PAGE]) is True


@pytest.mark.parametrize(("pinned", "moved"), [("all", "all"), ("all", "part")])
def test_unpinning_during_a_transfer(
    cufile: FakeCuFile, device: PrivateDevice, folder: Path, pinned: str, moved: str
) -> None:
    """cuFile is not made to forget memory that it is moving."""
    block = 65536
    tensor, path = device.empty(8 * block), store(folder / "file", pattern(8 * block))
    handle, parts = gds_handle(block), {"all": tensor, "part": tensor[: 2 * block]}
    handle.pin_device_tensor(parts[pinned])
    with cufile.held(Function.READ):
        future = handle.submit_pread(parts[moved], path)
        cufile.wait_for_held_up(Function.READ)
        threading.Timer(0.1, cufile.release, [Function.READ]).start()
        assert handle.unpin_device_tensor(parts[pinned]) is True
    assert future.result() == parts[moved].nbytes
    assert torch.equal(device.peek(parts[moved]), pattern(8 * block)[: parts[moved].nbytes])


def test_pins_from_several_threads(cufile: FakeCuFile, device: PrivateDevice) -> None:
    handle, shared, wrong = gds_handle(), device.empty(ODD), list[str]()

    def work(_: int) -> None:
        for _ in range(20):
            own = device.empty(5000)
            handle.pin_device_tensor(shared)
            handle.pin_device_tensor(own)
            if not (handle.is_pinned(own) and handle.unpin_device_tensor(own)):
                wrong.append("lost")

    in_threads(work, 4)
    assert wrong == []
    assert registered(cufile) == (1, ODD)
    handle.unpin_device_tensor(shared)
