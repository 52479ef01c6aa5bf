"""Page-locked tensors: DeepSpeed's ``pin_memory`` op, and one register for all handles of the process."""

from __future__ import annotations

import gc
import inspect
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

import nvme_ops
from nvme_ops import aio_handle
from nvme_ops.op_builder import ALL_OPS, AsyncIOBuilder, PinMemoryBuilder
from nvme_ops.pin_memory import pin_handle
from tests.conftest import in_child, in_threads

BYTE = torch.empty(0, dtype=torch.uint8)
MAKERS: list[Callable[[], Any]] = [pin_handle, aio_handle]


@pytest.fixture(params=["pin", "aio", "gds"])
def handle(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A handle of each kind."""
    monkeypatch.setenv("NVME_OPS_GDS", "off")
    return {"pin": pin_handle, "aio": aio_handle, "gds": nvme_ops.gds_handle}[request.param]()


def locked_kilobytes() -> int:
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("VmLck"))


def test_the_builder_gives_the_handle() -> None:
    module = PinMemoryBuilder().load(verbose=False)
    assert module is PinMemoryBuilder().load() is PinMemoryBuilder().jit_load(verbose=False)
    assert module.pin_handle is pin_handle
    builder = PinMemoryBuilder()
    assert (builder.NAME, builder.name, builder.absolute_name()) == ("pin_memory", "pin_memory", module.__name__)
    assert builder.is_compatible() is AsyncIOBuilder().is_compatible() is True
    assert "pin_memory" not in ALL_OPS  # of what is compiled
    with pytest.raises(TypeError):
        pin_handle(1)  # type: ignore[call-arg]


def test_it_needs_what_async_io_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: AsyncIOBuilder, verbose: bool = False) -> bool:
        self.error_log = "no compiler"
        return False

    monkeypatch.setattr(AsyncIOBuilder, "is_buildable", refuse)
    builder = PinMemoryBuilder()
    assert not builder.is_compatible()
    assert builder.error_log == "no compiler"


def test_the_keywords_are_deepspeeds() -> None:
    names = {
        "new_cpu_locked_tensor": ["num_elem", "example_tensor"],
        "free_cpu_locked_tensor": ["locked_tensor"],
        "free_cpu_locked_tensor_by_ptr": ["address"],
        "is_pinned": ["buffer"],
    }
    for name, parameters in names.items():
        assert list(inspect.signature(getattr(pin_handle(), name)).parameters) == parameters
    handle = pin_handle()
    tensor = handle.new_cpu_locked_tensor(num_elem=10, example_tensor=torch.empty(3, dtype=torch.float16))
    assert (tensor.shape, tensor.dtype, tensor.device.type) == ((10,), torch.float16, "cpu")
    assert handle.is_pinned(buffer=tensor) is True
    assert handle.free_cpu_locked_tensor(locked_tensor=tensor) is True
    assert handle.free_cpu_locked_tensor_by_ptr(address=tensor.data_ptr()) is False


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("other", MAKERS)
def test_one_register_for_all_handles(make: Callable[[], Any], other: Callable[[], Any]) -> None:
    tensor = make().new_cpu_locked_tensor(100_000, torch.empty(0))
    views = [tensor, tensor[5:6], tensor.narrow(0, 3, 999), tensor[::7], tensor[:100].view(10, 10).t(), tensor[-1:]]
    assert [other().is_pinned(view) for view in views] == [True] * len(views)
    assert not other().is_pinned(tensor.clone())
    assert other().free_cpu_locked_tensor(tensor) is True
    for each in (make(), other()):
        assert [each.is_pinned(view) for view in views] == [False] * len(views)
        assert each.free_cpu_locked_tensor(tensor) is False


def test_what_others_pinned_is_pinned(handle: Any) -> None:
    tensor = nvme_ops.empty(1000)
    assert handle.is_pinned(tensor[5:])
    assert handle.free_cpu_locked_tensor(tensor) is False
    assert handle.is_pinned(tensor)
    assert handle.is_pinned(torch.zeros(5)) is False
    if torch.cuda.is_available():
        assert handle.is_pinned(torch.zeros(10).pin_memory())
    with pytest.raises(TypeError):
        handle.is_pinned(5)


def test_a_part_is_not_freed(handle: Any) -> None:
    tensor = handle.new_cpu_locked_tensor(1000, torch.empty(0))
    for part in (tensor[1:], tensor[10:20], tensor[:999], tensor[:0], tensor[::2], tensor.view(torch.uint8)[:-1]):
        assert handle.free_cpu_locked_tensor(part) is False
        assert handle.is_pinned(part)
    assert handle.free_cpu_locked_tensor(tensor.view(10, 100)) is True  # all of it
    assert handle.free_cpu_locked_tensor(tensor) is False


def test_tensors_without_elements(handle: Any) -> None:
    tensor = handle.new_cpu_locked_tensor(0, torch.empty(0))
    assert handle.is_pinned(tensor)
    assert handle.free_cpu_locked_tensor(tensor) is True
    assert handle.free_cpu_locked_tensor(tensor) is False


def test_freeing_by_address() -> None:
    handle = pin_handle()
    tensor = handle.new_cpu_locked_tensor(1000, BYTE)
    assert handle.free_cpu_locked_tensor_by_ptr(tensor.data_ptr() + 1) is False
    assert handle.free_cpu_locked_tensor_by_ptr(0) is False
    assert handle.free_cpu_locked_tensor_by_ptr(-1) is False
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


def test_freed_memory_stays_until_its_last_tensor(handle: Any) -> None:
    tensor = handle.new_cpu_locked_tensor(4096, BYTE)
    tensor.fill_(5)
    assert handle.free_cpu_locked_tensor(tensor) is True
    others = [handle.new_cpu_locked_tensor(4096, BYTE).fill_(9) for _ in range(20)]
    assert bool((tensor == 5).all())
    assert all(handle.is_pinned(other) for other in others)


def test_memory_that_is_used_again_is_pinned_again(handle: Any) -> None:
    """The register forgets a freed tensor with its memory, which the next one may have."""
    for _ in range(50):
        tensor = handle.new_cpu_locked_tensor(4096, BYTE)
        assert handle.is_pinned(tensor)
        assert handle.free_cpu_locked_tensor(tensor) is True
        assert not handle.is_pinned(tensor)
    del tensor
    assert all(handle.is_pinned(nvme_ops.empty(4096, dtype=torch.uint8)) for _ in range(50))


def test_freeing_unlocks_the_pages() -> None:
    handle, before = pin_handle(), locked_kilobytes()
    tensor = handle.new_cpu_locked_tensor(1 << 20, BYTE)
    if locked_kilobytes() < before + 1024:
        pytest.skip("this system locks no memory")
    assert handle.free_cpu_locked_tensor(tensor) is True
    assert locked_kilobytes() == before


def test_of_threads_that_free_one_tensor_one_does() -> None:
    for _ in range(100):
        tensor = pin_handle().new_cpu_locked_tensor(1000, BYTE)
        answers: list[bool] = []

        def free(number: int, tensor: torch.Tensor = tensor, answers: list[bool] = answers) -> None:
            answers.append(MAKERS[number % 2]().free_cpu_locked_tensor(tensor))

        in_threads(free, 4)
        assert sorted(answers) == [False, False, False, True]


def test_a_child_has_a_register_of_its_own() -> None:
    handle = pin_handle()
    tensor = handle.new_cpu_locked_tensor(1000, BYTE)

    def body() -> None:
        assert handle.is_pinned(tensor)
        assert handle.free_cpu_locked_tensor(tensor) is True

    in_child(body)
    assert handle.is_pinned(tensor)
    assert handle.free_cpu_locked_tensor(tensor) is True
