"""Memory of an accelerator pinned for cuFile: what counts as pinned, and that no order of calls does harm."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from nvme_ops.io.gds import gds_handle
from tests.conftest import MIB, contents, store
from tests.device.kinds import GPUS, PAGE, Device, code_of_refusal, on_kinds, sample, still_works

pytestmark = on_kinds("fake-cufile", *GPUS[1:])


def handle_of(device: Device) -> gds_handle:
    handle = device.handle(2)
    assert isinstance(handle, gds_handle)
    return handle


def move_both_ways(device: Device, handle: gds_handle, tensor: torch.Tensor, folder: Path) -> None:
    """Several times, so that every way has its turn."""
    path, zeros = folder / "file", torch.zeros(tensor.shape, dtype=tensor.dtype)
    for seed in range(3):
        data = sample(tensor.nbytes, seed)
        tensor.copy_(data.view(tensor.dtype).view(tensor.shape))
        handle.sync_pwrite(tensor, path)
        assert torch.equal(contents(path), data)
        tensor.copy_(zeros)
        handle.sync_pread(tensor, path)
        assert torch.equal(device.peek(tensor), data)


def test_a_new_tensor(device: Device, folder: Path) -> None:
    for count, dtype in ((1, torch.uint8), (MIB + 1, torch.complex128)):
        handle, last = handle_of(device), device.count - 1
        tensor = handle.new_pinned_device_tensor(count, device.empty(3, 3, dtype=dtype, index=last))
        assert (tensor.shape, tensor.dtype, tensor.device) == ((count,), dtype, device.device(last))
        assert tensor.is_contiguous()
        assert tensor.data_ptr() % PAGE == 0
        assert handle.is_pinned(tensor)
        device.require_registered(1, tensor.nbytes)
        move_both_ways(device, handle, tensor, folder)
        assert handle.free_pinned_device_tensor(tensor) is True
        assert handle.free_pinned_device_tensor(tensor) is False
        assert not handle.is_pinned(tensor)
        device.require_registered(0, 0)
        move_both_ways(device, handle, tensor, folder)  # it is an ordinary tensor from then on


def test_pinning_twice_counts_once_for_all_handles(device: Device, folder: Path) -> None:
    handle, other, tensor = handle_of(device), handle_of(device), device.empty(device.odd)
    assert not handle.is_pinned(tensor)
    for pinning in (handle, handle, other):
        assert pinning.pin_device_tensor(tensor) is True
        device.require_registered(1, device.odd)
    assert other.is_pinned(tensor)
    move_both_ways(device, other, tensor, folder)
    assert handle.unpin_device_tensor(tensor) is True
    assert not other.is_pinned(tensor)
    assert other.unpin_device_tensor(tensor) is False
    device.require_registered(0, 0)


def test_a_tensor_around_a_pinned_view(device: Device, folder: Path) -> None:
    """Pinned, or refused with cuFile's code; what is said of it afterwards is true."""
    handle, whole = handle_of(device), device.empty(2 * device.odd)
    view = whole[PAGE : PAGE + device.odd]
    handle.pin_device_tensor(view)
    assert handle.is_pinned(view[5:100])
    assert handle.unpin_device_tensor(view[5:100]) is False
    for beyond in (whole, whole[PAGE + device.odd - 1 : PAGE + device.odd + 1]):
        assert not handle.is_pinned(beyond)
        assert handle.unpin_device_tensor(beyond) is False
    code = code_of_refusal(handle.pin_device_tensor, whole)
    device.require_code_for_pinned_twice(code)
    pinned = code is None
    assert handle.is_pinned(whole) is pinned
    assert handle.is_pinned(view)
    move_both_ways(device, handle, whole, folder)
    assert handle.unpin_device_tensor(whole) is pinned
    assert handle.unpin_device_tensor(view) is True
    assert not handle.is_pinned(view)


def test_what_is_not_pinned_or_cannot_be(device: Device, folder: Path) -> None:
    handle, tensor, on_host = handle_of(device), device.empty(600, 500), torch.zeros(10)
    strangers = [device.empty(device.odd), device.empty(device.odd, index=device.count - 1), device.empty(0)]
    for pinned in (False, True):
        for stranger in strangers:
            assert handle.is_pinned(stranger) is False
            assert handle.unpin_device_tensor(stranger) is False
            assert handle.free_pinned_device_tensor(stranger) is False
        assert handle.is_pinned(tensor) is pinned
        handle.pin_device_tensor(tensor)
    assert handle.unpin_device_tensor(tensor) is True
    for call in (handle.pin_device_tensor, handle.unpin_device_tensor, handle.is_pinned):
        for thing in (None, 5, b"bytes", bytearray(4096), [1, 2, 3]):
            with pytest.raises(TypeError, match=rf"must be a torch\.Tensor, not {type(thing).__name__}"):
                call(thing)  # type: ignore[arg-type]
    for call in (handle.pin_device_tensor, handle.unpin_device_tensor, handle.free_pinned_device_tensor):
        with pytest.raises(ValueError, match="must be a tensor on an accelerator, not on the CPU"):
            call(on_host)
    for wrong, match in (
        *((view, "must be contiguous") for view in (tensor.t(), tensor[:, 1:-1], tensor[::2])),
        (device.empty(0), "no elements"),
        (torch.empty(10, device="meta"), "memory of its own"),
    ):
        with pytest.raises(ValueError, match=match):
            handle.pin_device_tensor(wrong)
    for number in (0, -1):
        with pytest.raises(ValueError, match="num_elem must be at least 1"):
            handle.new_pinned_device_tensor(number, device.empty(1))
    with pytest.raises(ValueError, match=r"example_tensor must be on an accelerator.*new_cpu_locked_tensor"):
        handle.new_pinned_device_tensor(10, on_host)
    with pytest.raises(TypeError, match=r"torch\.Tensor"):
        handle.new_pinned_device_tensor(10, "cuda")  # type: ignore[arg-type]
    assert handle.is_pinned(on_host) is False
    device.require_registered(0, 0)
    still_works(device, handle, folder)


@pytest.mark.parametrize("write", [True, False], ids=["write", "read"])
def test_a_tensor_freed_while_transfers_use_it(device: Device, folder: Path, write: bool) -> None:
    """Unpinned and dropped at once: the transfers end as if it had been kept; until then nobody gets its memory."""
    handle, size, futures = handle_of(device), device.odd, []
    for number in range(8):
        path = store(folder / f"file{number}", sample(size, 100 + number))
        tensor = handle.new_pinned_device_tensor(size, device.empty(1))
        tensor.copy_(sample(size, number))
        futures.append((handle.submit_pwrite if write else handle.submit_pread)(tensor, path))
        assert handle.free_pinned_device_tensor(tensor)
        if write:
            del tensor
            device.empty(size)
        else:
            futures[-1].result()
            assert torch.equal(device.peek(tensor), sample(size, 100 + number))
    for number, future in enumerate(futures):
        assert future.result() == size
        assert not write or torch.equal(contents(folder / f"file{number}"), sample(size, number))
    still_works(device, handle, folder)
