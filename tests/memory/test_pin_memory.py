"""Page-locked tensors: of every handle and of DeepSpeed's ``pin_memory`` op, with one register for the process."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch

import nvme_ops
from nvme_ops import aio_handle
from nvme_ops.io.pin_memory import pin_handle
from nvme_ops.op_builder import AsyncIOBuilder, PinMemoryBuilder

BYTE = torch.empty(0, dtype=torch.uint8)
MAKERS: dict[str, Any] = {"pin": pin_handle, "aio": aio_handle, "gds": nvme_ops.gds_handle}

pytestmark = pytest.mark.filterwarnings("ignore:the system refused to lock:RuntimeWarning")


@pytest.fixture(params=MAKERS)
def handle(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A handle of each kind."""
    monkeypatch.setenv("NVME_OPS_GDS", "off")
    return MAKERS[request.param]()


def locked_kilobytes() -> int:
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("VmLck"))


def test_the_builder_gives_the_handle_and_needs_what_async_io_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    builder = PinMemoryBuilder()
    assert builder.load(verbose=False).pin_handle is pin_handle
    assert builder.is_compatible()
    monkeypatch.setattr(AsyncIOBuilder, "is_buildable", lambda *_, **__: False)
    assert not builder.is_compatible()


def test_one_register_for_all_handles(handle: Any) -> None:
    for other, pooled in zip(MAKERS.values(), (False, True, False), strict=True):
        another = other()
        tensor = nvme_ops.empty(100_000) if pooled else handle.new_cpu_locked_tensor(100_000, torch.empty(0))
        views = [tensor, tensor[5:6], tensor.narrow(0, 3, 999), tensor[::7], tensor[:100].view(10, 10).t(), tensor[-1:]]
        assert [another.is_pinned(view) for view in views] == [True] * len(views)
        assert not another.is_pinned(tensor.clone())
        for part in (tensor[1:], tensor[:999], tensor[:0], tensor[::2], tensor.view(torch.uint8)[:-1]):
            assert another.free_cpu_locked_tensor(part) is False
        assert another.free_cpu_locked_tensor(tensor.view(10, -1)) is not pooled  # all of it
        for any_handle in (handle, another):
            assert [any_handle.is_pinned(view) for view in views] == [pooled] * len(views)
            assert any_handle.free_cpu_locked_tensor(tensor) is False


def test_what_is_locked_and_what_is_not(handle: Any) -> None:
    for elements in (0, 1 << 20):
        tensor = handle.new_cpu_locked_tensor(elements, torch.empty(3, 3, dtype=torch.float16))
        assert (tensor.shape, tensor.dtype, tensor.device.type) == ((elements,), torch.float16, "cpu")
        assert handle.is_pinned(tensor) is True
        assert handle.free_cpu_locked_tensor(tensor) is True
    for other in (tensor, torch.zeros(10), torch.zeros(0), torch.eye(3).to_sparse(), torch.empty(3, device="meta")):
        assert handle.is_pinned(other) is False
        assert handle.free_cpu_locked_tensor(other) is False
    if torch.cuda.is_available():
        assert handle.is_pinned(torch.zeros(10).pin_memory())
    for call, *arguments in (
        (handle.is_pinned, None),
        (handle.free_cpu_locked_tensor, b"bytes"),
        (handle.new_cpu_locked_tensor, 5.5, BYTE),
        (handle.new_cpu_locked_tensor, 5, [1]),
    ):
        with pytest.raises(TypeError):
            call(*arguments)
    with pytest.raises(ValueError, match="num_elem must not be negative"):
        handle.new_cpu_locked_tensor(-1, BYTE)


def test_freeing_by_address() -> None:
    handle = pin_handle()
    tensor = handle.new_cpu_locked_tensor(1000, BYTE)
    for address in (tensor.data_ptr() + 1, 0, -1):
        assert handle.free_cpu_locked_tensor_by_ptr(address) is False
    address = tensor.data_ptr()
    tensor.data = torch.zeros(3, dtype=torch.uint8)  # as DeepSpeed's offloading does
    assert handle.free_cpu_locked_tensor(tensor) is False
    del tensor
    gc.collect()
    assert handle.free_cpu_locked_tensor_by_ptr(address) is False  # it went with its last tensor
    others: list[Any] = ["1", 1.5, None, True]
    for other in others:
        with pytest.raises(TypeError, match="address must be an int"):
            handle.free_cpu_locked_tensor_by_ptr(other)


def test_a_finalizer_may_free() -> None:
    """As DeepSpeed's NativePinnedMemory does, by address. Views must keep the tensor, not only its memory."""
    handle, freed = pin_handle(), []
    base = handle.new_cpu_locked_tensor(1000, BYTE)
    view = base[:10]
    address = base.data_ptr()
    weakref.finalize(base, lambda: freed.append(handle.free_cpu_locked_tensor_by_ptr(address)))
    assert view._base is base
    del base
    gc.collect()
    assert freed == []
    assert handle.is_pinned(view)
    del view
    gc.collect()
    assert len(freed) == 1


def test_freed_memory_stays_until_its_last_tensor_and_is_pinned_again() -> None:
    """The register forgets a freed tensor with its memory, which the next one may have."""
    handle, before = pin_handle(), locked_kilobytes()
    tensor = handle.new_cpu_locked_tensor(4096, BYTE).fill_(5)
    locks = locked_kilobytes() > before
    del handle
    handle = pin_handle()  # any handle will do
    assert handle.free_cpu_locked_tensor(tensor) is True
    assert locked_kilobytes() == before or not locks
    others = [handle.new_cpu_locked_tensor(4096, BYTE).fill_(9) for _ in range(20)]
    assert bool((tensor == 5).all())
    assert all(handle.is_pinned(other) for other in others)
    for _ in range(50):
        tensor = handle.new_cpu_locked_tensor(4096, BYTE)
        assert handle.free_cpu_locked_tensor(tensor) is True
        assert not handle.is_pinned(tensor)
    del tensor
    assert all(handle.is_pinned(nvme_ops.empty(4096, dtype=torch.uint8)) for _ in range(50))
