"""``TensorStore``: what was put comes back, from however many threads, or is told; full disks, damage, its end."""

from __future__ import annotations

import contextlib
import errno
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from nvme_ops.base.errors import ChecksumError
from nvme_ops.io.engine import Priority
from nvme_ops.io.future import IoFuture
from nvme_ops.io.handle import aio_handle
from nvme_ops.memory.pool import Pool
from nvme_ops.storage import Session, TensorStore
from nvme_ops.storage.store import Claims
from nvme_ops.storage.striped import StripedSlabs
from tests.conftest import MIB, in_child, in_threads, pattern
from tests.contract.faulty import Faulty, WrappedEngine, flip
from tests.crashing_save import interrupted_by
from tests.doubles import PrivateDevice
from tests.storage.conftest import got, kept, same

NO_BYTES = "torch.q", "torch.bits", "torch.uint", "torch.int"
DTYPES = {dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}


@pytest.fixture
def store(session: Session) -> TensorStore:
    return TensorStore(session, checksums=True)


def test_any_dtype(store: TensorStore) -> None:
    whole = {dtype for dtype in DTYPES if not str(dtype).startswith(NO_BYTES)}
    for dtype in whole | {torch.uint8, torch.int64, torch.uint16}:
        size = 3000 * dtype.itemsize
        tensor = (pattern(size) if dtype != torch.bool else pattern(size) % 2).view(dtype).view(30, 100)
        for key, value in (("a", tensor), ("t", tensor.t()[::2])):
            store.put(key, value).result()
            assert same(got(store, key), value), dtype


BASE = torch.arange(2 * 3 * 40 * 50, dtype=torch.float32).view(2, 3, 40, 50)
COMPLEX = torch.randn(20, 30, dtype=torch.complex64)
DENSE = {
    "plain": BASE,
    "channels last": BASE.contiguous(memory_format=torch.channels_last),
    "transposed": BASE.transpose(1, 3),
    "scalar": torch.tensor(3.5),
    "empty": torch.empty(3, 0, 5),
}
LAYOUTS = DENSE | {
    "expanded": BASE[0, 0, 0].expand(7, 50),
    "sliced": BASE[:, 1:, ::3, 5:-1],
    "empty and strided": torch.empty(0, 7).t(),
    "conj": COMPLEX.conj(),
    "neg": COMPLEX.conj().imag,
    "requires gradients": torch.nn.Parameter(torch.randn(30, 40)),
    "large": pattern(9 * MIB + 3),
}


def test_any_layout(store: TensorStore) -> None:
    for layout, tensor in LAYOUTS.items():
        store.put("a", tensor).result()
        back = got(store, "a")
        assert torch.equal(back, tensor), layout
        assert not back.requires_grad
        assert layout not in DENSE or back.stride() == tensor.stride(), layout
        plain = torch.zeros_like(tensor.detach().resolve_conj().resolve_neg())
        spread = torch.zeros(*tensor.shape, 2, dtype=tensor.dtype)[..., 0]
        for out in (plain.contiguous().requires_grad_(tensor.requires_grad), spread):
            assert torch.equal(got(store, "a", out), tensor), layout
    store.put("a", COMPLEX).result()
    out = torch.zeros_like(COMPLEX)
    got(store, "a", out.conj())
    assert torch.equal(out, COMPLEX.conj())


def test_tensors_on_an_accelerator(store: TensorStore, the_device: PrivateDevice) -> None:
    device, data = the_device, torch.randn(300, 400)
    for tensor, expected in ((device.tensor(data), data), (device.tensor(data).t(), data.t())):
        store.put("a", tensor).result()
        assert torch.equal(got(store, "a"), expected)
        out = device.empty(*expected.shape, dtype=torch.float32)
        assert got(store, "a", out) is out
        assert torch.equal(out.cpu(), expected)


def test_wrong_tensors_and_keys(store: TensorStore) -> None:
    for wrong in (torch.zeros(3).to_sparse(), torch.zeros(3, device="meta"), "text", None):
        with pytest.raises(TypeError, match="dense"):
            store.put("a", wrong)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="key must be a str"):
        store.put(1, torch.zeros(3))  # type: ignore[arg-type]
    store.put("a", torch.zeros(3))
    for out in (torch.zeros(4), torch.zeros(3, 1), torch.zeros(3, dtype=torch.int32)):
        with pytest.raises(ValueError, match=r"'a' is torch\.float32 of shape"):
            store.get("a", out)
    with pytest.raises(TypeError, match="dense"):
        store.get("a", torch.zeros(3).to_sparse())
    with pytest.raises(ValueError, match="share memory"):
        store.get("a", torch.zeros(1).expand(3))


def test_the_same_size_is_written_in_place(store: TensorStore, session: Session) -> None:
    for seed in range(2):
        store.put("a", pattern(MIB, seed)).result()
    assert store.bytes_in_use == MIB
    store.trim()
    assert os.stat(session.path(0, "slab")).st_size == MIB


def test_what_is_read_is_not_written_over(session: Session) -> None:
    """Dropped and replaced while it is being read, and the space asked for by others."""
    handle = Faulty("read", "hold")
    store = TensorStore(session, handle=handle)
    for number, key in enumerate("ab"):
        store.put(key, pattern(MIB, number)).result()
    reads = [store.get("a"), store.get("b")]
    store.drop("a")
    for number, key in enumerate("bcd", 2):
        store.put(key, pattern(MIB, number)).result()
    assert store.bytes_in_use == 5 * MIB
    handle.go.set()
    for number, read in enumerate(reads):
        read.result()
        assert torch.equal(read.tensor, pattern(MIB, number))
    assert store.bytes_in_use == 3 * MIB


def test_threads_at_one_key_see_whole_values(store: TensorStore, eager_switches: None) -> None:
    store.put("a", torch.zeros(50_000))

    def work(number: int) -> None:
        for turn in range(25):
            with contextlib.suppress(KeyError):
                if number < 2:
                    store.put("a", torch.full((50_000,), float(number * 100 + turn)), atomic=bool(turn % 2))
                elif number == 2 and turn % 5 == 4:
                    store.drop("a")
                else:
                    tensor = got(store, "a")
                    assert bool((tensor == tensor[0]).all())

    in_threads(work, 4)
    if "a" in store:
        store.drop("a")
    assert store.bytes_in_use == 0


# Memory


def test_memory_of_a_pool_goes_back_with_what_was_written_and_read(session: Session) -> None:
    pool = Pool(4 * MIB)
    store = TensorStore(session, pool)
    for number in range(3):  # nobody asks for the futures, and the memory is freed on its way
        store.put(str(number), pool.lease(4 * MIB, timeout=20).tensor.copy_(pattern(4 * MIB, number)))
    for number in range(3):
        store.get(str(number))
        assert torch.equal(got(store, str(number)), pattern(4 * MIB, number))
    store.close()
    assert pool.bytes_in_use == 0


def test_get_waits_for_memory_of_the_pool_and_others_use_the_key_meanwhile(session: Session) -> None:
    pool = Pool(4 * MIB)
    store = TensorStore(session, pool)
    store.put("a", pattern(3 * MIB))
    lease = pool.lease(2 * MIB)
    received: list[torch.Tensor] = []
    thread = threading.Thread(target=lambda: received.append(got(store, "a")))
    thread.start()
    thread.join(0.05)
    assert not received
    store.put("a", pattern(2 * MIB, 1)).result()  # of another size
    lease.release()
    thread.join()
    assert torch.equal(received[0], pattern(2 * MIB, 1))
    store.put("a", pattern(5 * MIB))
    with pytest.raises(MemoryError, match="do not fit the pool"):
        store.get("a")


# Futures


def test_a_get_waits_for_the_put_of_its_key_which_ctrl_c_leaves_to_go_on(session: Session) -> None:
    handle = Faulty("write", "hold")
    store = TensorStore(session, handle=handle)
    future = store.put("a", pattern(MIB))
    assert "a" in store
    with interrupted_by(14), pytest.raises(KeyboardInterrupt):
        future.result()
    assert not future.done()
    timer = threading.Timer(0.05, handle.go.set)
    timer.start()
    assert torch.equal(got(store, "a"), pattern(MIB))
    assert future.result() == MIB
    timer.join()


@pytest.mark.parametrize("again", ["b", "a"])
def test_a_write_that_ctrl_c_has_hidden_writes_over_nothing(session: Session, again: str) -> None:
    """Ctrl-C comes when it was submitted, and before anything knows of it."""

    class Hiding(WrappedEngine):
        def submit(self, *arguments: Any) -> Any:
            operation = self._engine.submit(*arguments)
            if self._handle.met:
                self._handle.met, hidden[:] = 0, [operation]
                raise KeyboardInterrupt
            return operation

    hidden: list[Any] = []
    handle: Any = Faulty()
    handle._engine = Hiding(handle._engine, handle)
    store = TensorStore(session, handle=handle)
    store.put("a", pattern(MIB)).result()
    handle.will("write", "hold", {1})
    with pytest.raises(KeyboardInterrupt):
        store.put("a", pattern(MIB, 1))
    handle.will()
    if again == "a":  # which waits for it
        threading.Timer(0.05, handle.go.set).start()
    store.put(again, pattern(MIB, 2)).result()
    handle.go.set()
    hidden[0].wait(None)
    assert torch.equal(got(store, again), pattern(MIB, 2))


@pytest.mark.parametrize("write", [True, False])
def test_transfers_that_ctrl_c_has_hidden_are_known(write: bool, session: Session) -> None:
    class Hiding(WrappedEngine):
        def __getattr__(self, name: str) -> Any:
            def call(*arguments: Any) -> None:
                getattr(self._engine, name)(*arguments)
                raise KeyboardInterrupt

            return call

    handle: Any = aio_handle()
    handle._engine = Hiding(handle._engine, handle)
    with contextlib.closing(StripedSlabs(session, "slab", handle, None)) as slabs:
        pieces, transfers, memory = slabs.allocate(MIB), list[IoFuture](), pattern(MIB)
        with pytest.raises(KeyboardInterrupt):
            slabs.move(pieces, memory, transfers, write, Priority.DEMAND)
        with pytest.raises(KeyboardInterrupt):
            slabs.move_all([(piece, memory) for piece in pieces], transfers, write, Priority.DEMAND)
        assert [transfer.result() for transfer in transfers] == [MIB, MIB]


# Claims: who is waited for


def test_what_ctrl_c_left_claimed_is_not_waited_for() -> None:
    claims = Claims(threading.RLock())

    def interrupted() -> None:
        claim = claims.take("frames")
        raise KeyboardInterrupt
        with claim:
            pass

    with contextlib.suppress(KeyboardInterrupt):
        interrupted()
    in_threads(lambda _: claims.take("frames"), 1)  # it has ended with the frames that held it
    left = claims.take("key")  # and the interrupt came before the block
    with claims.take("key"):
        pass
    other = threading.Thread(target=claims.take, args=["key"], daemon=True)
    other.start()
    other.join(0.05)
    assert other.is_alive(), "the earlier one is in force again"
    del left
    other.join(60)
    with claims.take("key"):
        assert claims.close(), "a thread's own claims are not waited for"


def test_close_waits_for_what_another_thread_is_at() -> None:
    claims, taken, ended = Claims(threading.RLock()), threading.Event(), list[str]()

    def work() -> None:
        with claims.take("key"):
            taken.set()
            time.sleep(0.1)
            ended.append("key")

    thread = threading.Thread(target=work)
    thread.start()
    assert taken.wait(30)
    assert claims.close()
    assert ended == ["key"]
    thread.join()
    with pytest.raises(ValueError, match="closed"):
        claims.take("key")


# Where things go wrong


@pytest.mark.parametrize(("size", "atomic"), [(MIB, True), (MIB, False), (300_000, False)])
def test_a_put_that_failed_leaves_the_old_value_or_none(session: Session, size: int, atomic: bool) -> None:
    handle = Faulty()
    store = TensorStore(session, handle=handle)
    store.put("a", pattern(MIB)).result()
    handle.will("write", "fail", {1})
    with pytest.raises(OSError, match="device 1"):
        store.put("a", pattern(size, 1), atomic=atomic).result()
    if atomic or size != MIB:
        assert torch.equal(got(store, "a"), pattern(MIB))
    else:  # it was overwritten in part
        with pytest.raises(KeyError):
            store.get("a")
    assert store.bytes_in_use == MIB * len(store)
    store.put("a", pattern(size, 1), atomic=atomic).result()
    store.drop("a")
    assert store.bytes_in_use == 0


@pytest.mark.parametrize(("do", "failing"), [("fail", {1, 2, 3}), ("refuse", {3})])
def test_a_folder_of_several_that_fails(folder: Path, failing: set[int], do: str) -> None:
    places = [folder / name for name in "abc"]
    handle = Faulty("write", do, failing)
    with Session(places, name="job") as session, TensorStore(session, handle=handle, weights=[1, 1, 1]) as store:
        with pytest.raises(OSError, match="device") as caught:
            store.put("a", pattern(12 * MIB)).result()
        if do == "fail":
            failures = caught.value.failures  # type: ignore[attr-defined]
            assert [failure.filename for failure in failures] == ["device 1", "device 2", "device 3"]
        store.wait()  # the failure is known already
        assert "a" not in store
        assert store.bytes_in_use == 0
        handle.will()
        store.put("a", pattern(12 * MIB))
        assert torch.equal(got(store, "a"), pattern(12 * MIB))


def test_a_checksum_that_cannot_be_made_undoes_the_put(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bytes are on their way by then."""

    def refuse(*_: object) -> None:
        raise MemoryError("none left")

    handle = Faulty("write", "hold")
    store = TensorStore(session, checksums=True, handle=handle)
    monkeypatch.setattr("nvme_ops.storage.striped.checksums_anywhere", refuse)
    with pytest.raises(MemoryError, match="none left"):
        store.put("a", pattern(MIB))
    assert store.bytes_in_use == MIB  # is still being written to
    handle.go.set()
    while store.keys():  # nobody waits for it
        time.sleep(0.001)
    assert store.bytes_in_use == 0


def test_a_failure_that_nobody_asks_for_is_raised_by_wait_and_by_close(folder: Path) -> None:
    session = Session(folder, name="job")
    store = TensorStore(session, handle=Faulty("write", "fail", {1, 2, 4}))
    for key in "abc":
        store.put(key, pattern(MIB))
    assert torch.equal(got(store, "c"), pattern(MIB))
    with pytest.raises(OSError, match="device 1"):
        store.sync()
    store.wait()
    assert store.keys() == ["c"]
    store.put("d", pattern(MIB))
    with pytest.raises(OSError, match="device 4"):
        session.close()
    assert session.closed
    assert list(folder.iterdir()) == []


def test_a_flipped_bit_is_found_also_by_the_next_session(folder: Path) -> None:
    data = pattern(2 * MIB + 8).view(-1, 8)

    def find(store: TensorStore, out: torch.Tensor | None) -> None:
        with pytest.raises(ChecksumError, match=r"layer\.weight") as caught:
            store.get("layer.weight", out).result()
        assert (caught.value.tensors, caught.value.filename) == (["layer.weight"], str(slab))

    with kept(folder) as session, TensorStore(session, checksums=True) as store:
        slab = Path(session.path(0, "slab"))
        store.put("layer.weight", data)
        store.sync()
        for place, out in ((777_777, torch.zeros_like(data)), (2 * MIB + 4, torch.zeros_like(data.t()).t())):
            flip(slab, place)
            find(store, out)
            flip(slab, place)
        flip(slab, 0)
    with kept(folder) as session, TensorStore(session) as store:
        find(store, None)


def test_a_full_disk_leaves_the_old_value(make_file_system: Callable[..., Path], folder: Path) -> None:
    """One of two: the room on the other is given back."""
    places = [folder / "large", make_file_system(16 * MIB)]
    with Session(places, name="job") as session, TensorStore(session, weights=[1, 1]) as store:
        store.put("a", pattern(3 * MIB)).result()
        for key, atomic in (("a", False), ("a", True), ("b", False)):
            with pytest.raises(OSError, match="No space left") as caught:
                store.put(key, torch.zeros(64 * MIB, dtype=torch.uint8), atomic=atomic)
            assert (caught.value.errno, caught.value.filename) == (errno.ENOSPC, session.path(1, "slab"))
        assert store.keys() == ["a"]
        assert store.bytes_in_use == 3 * MIB
        assert torch.equal(got(store, "a"), pattern(3 * MIB))
        store.put("b", pattern(3 * MIB, 1)).result()


# The end


def test_a_closed_store(folder: Path) -> None:
    session = Session(folder, name="job")
    store, other = TensorStore(session), TensorStore(session, name="other")
    with pytest.raises(ValueError, match="has an open store named 'other'"):
        TensorStore(session, name="other")
    put = store.put("a", pattern(8 * MIB))
    store.close()
    assert put.done()
    with TensorStore(session) as again:
        assert len(again) == 0
    put = other.put("a", pattern(8 * MIB))
    session.close()  # closes its stores
    assert put.done()
    for call in (lambda: store.put("a", torch.zeros(1)), lambda: store.get("a"), lambda: other.drop("a"), other.trim):
        with pytest.raises(ValueError, match="closed"):
            call()
    assert list(folder.iterdir()) == []


def test_a_forked_child_has_no_part_in_it(session: Session) -> None:
    handle = Faulty("write", "hold")
    store, slab = TensorStore(session, handle=handle), session.path(0, "slab")
    future = store.put("a", pattern(MIB))

    def child() -> None:
        calls: list[Callable[[], object]] = [
            store.keys, store.wait, lambda: store.get("a"), lambda: store.put("b", pattern(1)), future.result,
            lambda: session.path(0, "slab"), lambda: TensorStore(session, name="own"),
        ]  # fmt: skip
        for call in calls:
            with pytest.raises(RuntimeError, match="the parent process"):
                call()
        assert not future.done()
        assert slab not in [os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")]
        store.close()
        session.close()

    in_child(child)
    handle.go.set()
    assert torch.equal(got(store, "a"), pattern(MIB))
