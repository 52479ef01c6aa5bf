"""``TensorStore``: what was put comes back, whatever it is, from however many threads."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import gc
import os
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from nvme_ops.memory.pool import Pool
from nvme_ops.storage import Session, TensorStore
from tests.conftest import MIB, in_threads, pattern
from tests.crashing_save import interrupted_by
from tests.private_device import private_device
from tests.storage.slow_store import Slow, got, same

DTYPES = [
    dtype
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype)
    and not str(dtype).startswith(("torch.q", "torch.bits", "torch.uint", "torch.int"))
] + [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.uint64]


@pytest.fixture
def session(folder: Path) -> Iterator[Session]:
    with Session(folder, name="job") as opened:
        yield opened


@pytest.fixture
def store(session: Session) -> TensorStore:
    return TensorStore(session, checksums=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_any_dtype(store: TensorStore, dtype: torch.dtype) -> None:
    size = 3000 * dtype.itemsize
    tensor = (pattern(size) if dtype != torch.bool else pattern(size) % 2).view(dtype).view(30, 100)
    store.put("a", tensor).result()
    assert same(got(store, "a"), tensor)
    out = torch.zeros(100 * 30 * dtype.itemsize, dtype=torch.uint8).view(dtype).view(100, 30).t()
    assert same(got(store, "a", out), tensor)
    assert out.stride() == (1, 30)
    store.put("t", tensor.t()[::2]).result()
    assert same(got(store, "t"), tensor.t()[::2])


BASE = torch.arange(2 * 3 * 40 * 50, dtype=torch.float32).view(2, 3, 40, 50)
LAYOUTS: dict[str, torch.Tensor] = {
    "plain": BASE,
    "channels last": BASE.contiguous(memory_format=torch.channels_last),
    "transposed": BASE.transpose(1, 3),
    "expanded": BASE[0, 0, 0].expand(7, 50),
    "sliced": BASE[:, 1:, ::3, 5:-1],
    "a row of one": BASE.view(-1, 50)[3:4],
    "scalar": torch.tensor(3.5),
    "empty": torch.empty(3, 0, 5),
    "empty and strided": torch.empty(0, 7).t(),
    "one of many dimensions": torch.ones(1, 1, 1).expand(1, 1, 1),
    "conj": torch.randn(20, 30, dtype=torch.complex64).conj(),
    "neg": torch.randn(20, 30, dtype=torch.complex64).conj().imag,
    "large": pattern(9 * MIB + 3),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_layout(store: TensorStore, layout: str) -> None:
    tensor = LAYOUTS[layout]
    store.put("a", tensor).result()
    back = got(store, "a")
    assert torch.equal(back, tensor)
    if layout in ("plain", "channels last", "transposed", "empty", "scalar"):
        assert back.stride() == tensor.stride()
    for out in (
        torch.zeros_like(tensor.resolve_conj().resolve_neg()).contiguous(),
        torch.zeros(*tensor.shape, 2, dtype=tensor.dtype)[..., 0],
    ):
        assert torch.equal(got(store, "a", out), tensor)


def test_into_a_conjugated_view(store: TensorStore) -> None:
    tensor = LAYOUTS["conj"].resolve_conj()
    store.put("a", tensor).result()
    out = torch.zeros_like(tensor)
    got(store, "a", out.conj())
    assert torch.equal(out, tensor.conj())


def test_tensors_that_require_gradients(store: TensorStore) -> None:
    tensor = torch.nn.Parameter(torch.randn(30, 40))
    store.put("a", tensor).result()
    assert not got(store, "a").requires_grad
    for out in (torch.nn.Parameter(torch.zeros(30, 40)), torch.zeros(40, 30, requires_grad=True).t()):
        assert torch.equal(got(store, "a", out), tensor)
        assert out.requires_grad


@pytest.mark.parametrize("strided", [False, True])
def test_tensors_on_an_accelerator(store: TensorStore, strided: bool) -> None:
    device, data = private_device(), torch.randn(300, 400)
    tensor = device.tensor(data)
    store.put("a", tensor.t() if strided else tensor).result()
    assert torch.equal(got(store, "a"), data.t() if strided else data)
    out = device.empty(400, 300, dtype=torch.float32) if strided else device.empty(300, 400, dtype=torch.float32)
    assert got(store, "a", out) is out
    assert torch.equal(out.cpu(), data.t() if strided else data)


def test_wrong_tensors_and_keys(store: TensorStore) -> None:
    for wrong in (torch.zeros(3).to_sparse(), torch.zeros(3, device="meta"), "text", None):
        with pytest.raises(TypeError, match=r"dense torch.Tensor"):
            store.put("a", wrong)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="key must be a str"):
        store.put(1, torch.zeros(3))  # type: ignore[arg-type]
    for call in (store.get, store.drop):
        with pytest.raises(KeyError, match="a"):
            call("a")
    store.put("a", torch.zeros(3))
    for out in (torch.zeros(4), torch.zeros(3, 1), torch.zeros(3, dtype=torch.int32)):
        with pytest.raises(ValueError, match=r"'a' is torch\.float32 of shape"):
            store.get("a", out)
    with pytest.raises(TypeError, match="dense"):
        store.get("a", torch.zeros(3).to_sparse())
    with pytest.raises(ValueError, match="share memory"):
        store.get("a", torch.zeros(1).expand(3))
    assert torch.equal(got(store, "a"), torch.zeros(3))


def test_the_same_size_is_written_in_place(store: TensorStore) -> None:
    store.put("a", pattern(MIB)).result()
    store.put("a", pattern(MIB, 1)).result()
    assert store.bytes_in_use == MIB
    store.trim()
    assert os.stat(store._slabs.paths[0]).st_size == MIB


def test_what_is_read_is_not_written_over(session: Session) -> None:
    """Dropped and replaced while it is being read, and the space asked for by others."""
    handle = Slow("pread")
    store = TensorStore(session, handle=handle)
    store.put("a", pattern(MIB)).result()
    store.put("b", pattern(MIB, 1)).result()
    reads = [store.get("a"), store.get("b"), store.get("a")]
    store.drop("a")
    store.put("b", pattern(MIB, 2)).result()
    for number in range(5):
        store.put(str(number), pattern(MIB, 10 + number)).result()
    assert store.bytes_in_use == 8 * MIB
    handle.go.set()
    for read, seed in zip(reads, (0, 1, 0), strict=True):
        read.result()
        assert torch.equal(read.tensor, pattern(MIB, seed))
    assert store.bytes_in_use == 6 * MIB


def test_get_waits_for_the_put_that_is_under_way(session: Session) -> None:
    handle = Slow("pwrite")
    store = TensorStore(session, handle=handle)
    put = store.put("a", pattern(MIB))
    assert "a" in store
    assert not put.done()
    timer = threading.Timer(0.05, handle.go.set)
    timer.start()
    assert torch.equal(got(store, "a"), pattern(MIB))
    assert put.done()
    timer.join()


@pytest.mark.parametrize("drops", [False, True])
def test_threads_at_one_key_see_whole_values(store: TensorStore, eager_switches: None, drops: bool) -> None:
    store.put("a", torch.zeros(50_000))

    def work(number: int) -> None:
        for turn in range(40):
            with contextlib.suppress(KeyError):
                if number < 2:
                    store.put("a", torch.full((50_000,), float(number * 100 + turn)), atomic=bool(turn % 2))
                elif drops and number == 2:
                    store.drop("a")
                else:
                    found = got(store, "a")
                    assert bool((found == found[0]).all())

    in_threads(work, 4)
    if "a" in store:
        store.drop("a")
    assert store.bytes_in_use == 0


# Memory


def test_a_tensor_that_is_freed_on_its_way_is_stored(store: TensorStore) -> None:
    for number in range(20):
        store.put(str(number), pattern(MIB, number))
    gc.collect()
    for number in range(20):
        assert torch.equal(got(store, str(number)), pattern(MIB, number))


def test_nothing_keeps_what_was_put_or_read(store: TensorStore) -> None:
    tensor = torch.randn(1000)
    put = store.put("a", tensor)
    put.result()
    read = store.get("a")
    read.result()
    dropped = store.put("b", tensor)  # nobody asks this one
    gone = [weakref.ref(each) for each in (tensor, put, read, read.tensor, dropped)]
    while not dropped.done():
        time.sleep(0.001)
    del tensor, put, read, dropped
    assert [each() for each in gone] == [None] * 5


def test_memory_of_a_pool_goes_back_with_what_was_read(session: Session) -> None:
    pool = Pool(4 * MIB)
    store = TensorStore(session, pool)
    for number in range(3):
        memory = pool.lease(4 * MIB, timeout=20).tensor
        memory.copy_(pattern(4 * MIB, number))
        store.put(str(number), memory)  # nobody asks
        del memory
    for number in range(3):
        assert torch.equal(got(store, str(number)), pattern(4 * MIB, number))
    store.get("0")  # nobody asks
    assert torch.equal(got(store, "1"), pattern(4 * MIB, 1))
    store.close()
    assert pool.bytes_in_use == 0


def test_get_waits_for_memory_of_the_pool(session: Session) -> None:
    pool = Pool(4 * MIB)
    store = TensorStore(session, pool)
    store.put("a", pattern(3 * MIB))
    lease = pool.lease(2 * MIB)
    found: list[torch.Tensor] = []
    thread = threading.Thread(target=lambda: found.append(got(store, "a")))
    thread.start()
    time.sleep(0.05)
    assert not found
    store.put("a", pattern(2 * MIB, 1)).result()  # meanwhile, of another size
    lease.release()
    thread.join()
    assert torch.equal(found[0], pattern(2 * MIB, 1))


def test_more_than_the_pool_has(session: Session) -> None:
    store = TensorStore(session, Pool(MIB))
    store.put("a", pattern(3 * MIB))
    with pytest.raises(MemoryError, match="do not fit the pool"):
        store.get("a")
    assert torch.equal(got(store, "a", torch.zeros(3 * MIB, dtype=torch.uint8)), pattern(3 * MIB))
    store.drop("a")
    assert store.bytes_in_use == 0


# Futures


def test_futures_in_asyncio_and_concurrent_futures(store: TensorStore) -> None:
    async def both() -> int:
        await store.put("a", pattern(MIB))
        return sum(await asyncio.gather(store.get("a"), store.put("b", pattern(0))))

    assert asyncio.run(both()) == MIB
    futures = [store.get("a"), store.get("b"), store.put("c", pattern(MIB))]
    assert concurrent.futures.wait(futures, timeout=60).done == set(futures)


def test_a_callback_is_called_once(session: Session) -> None:
    handle = Slow("pread")
    store = TensorStore(session, handle=handle)
    store.put("a", pattern(MIB)).result()
    future, calls, called = store.get("a"), list[Any](), threading.Event()
    future.add_done_callback(calls.append)
    future.add_done_callback(lambda _: called.set())
    assert not future.done()
    with pytest.raises(TimeoutError):
        future.result(0.01)
    handle.go.set()
    assert future.result(60) == MIB
    assert called.wait(60)
    called.clear()
    future.add_done_callback(calls.append)
    future.add_done_callback(lambda _: called.set())
    assert called.wait(60)
    assert calls == [future, future]


def test_ctrl_c_in_result_leaves_the_transfer_to_go_on(session: Session) -> None:
    handle = Slow("pwrite")
    store = TensorStore(session, handle=handle)
    future = store.put("a", pattern(MIB))
    with interrupted_by(14), pytest.raises(KeyboardInterrupt):
        future.result()
    handle.go.set()
    assert future.result() == MIB
    assert torch.equal(got(store, "a"), pattern(MIB))
