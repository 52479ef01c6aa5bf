"""Memory registered with CUDA: as much as is asked for, as long as it is used, whatever comes between."""

from __future__ import annotations

import contextlib
import gc
import os
import re
import signal
import sys
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch

from nvme_ops.io.tensors import pool_buffer
from nvme_ops.memory import page_locked
from nvme_ops.memory.pool import Pool
from nvme_ops.memory.ring import Ring
from nvme_ops.offload import NvmeOptimizer
from tests.conftest import MIB, in_child, in_threads, run_python
from tests.device.kinds import on_a_gpu
from tests.doubles import PrivateDevice
from tests.doubles.cuda import Cuda, FakeCuda, RealCuda
from tests.moments import Interrupt

UNKNOWN_FLAG = 1 << 20  # CUDA refuses it


@pytest.fixture
def fake() -> Iterator[FakeCuda]:
    """A double of CUDA; in the end, nothing is registered with it."""
    with FakeCuda().there() as cuda:
        yield cuda
        gc.collect()
        page_locked._settle()
        assert cuda.registered == {}
        assert cuda.violations == []


@pytest.fixture(params=["fake", pytest.param("real", marks=on_a_gpu)])
def cuda(request: pytest.FixtureRequest) -> Iterator[Cuda]:
    """The double, and CUDA itself."""
    if request.param == "fake":
        yield request.getfixturevalue("fake")
    else:
        with RealCuda().there() as real:
            yield real


def resident(address: int) -> int:
    """Bytes that the system has given to the mapping at an address."""
    within = False
    with open("/proc/self/smaps") as file:
        for line in file:
            if place := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
                within = int(place[1], 16) <= address < int(place[2], 16)
            elif within and line.startswith("Rss:"):
                return int(line.split()[1]) << 10
    raise AssertionError("nothing is mapped there")


# What is registered


def test_what_is_asked_for_is_registered_charged_and_taken(cuda: Cuda) -> None:
    pool = Pool("64M", pinned=True)
    lease = pool.lease("33M")
    assert lease.tensor.shape == (33 * MIB,)
    assert cuda.has(lease.tensor)
    assert pool.bytes_in_use == 34 * MIB  # in whole huge pages
    if isinstance(cuda, FakeCuda):
        assert list(cuda.registered.values()) == [34 * MIB]
    else:
        assert 33 * MIB <= resident(lease.tensor.data_ptr()) <= 34 * MIB
    small = pool.lease(5000)
    assert cuda.has(small.tensor)


def test_memory_is_registered_once_and_unregistered_with_the_pool(cuda: Cuda) -> None:
    pool, places = Pool("8M", pinned=True), set()
    for number in range(1, 5):
        with pool.lease(3 * MIB + number) as memory:
            places.add(memory.data_ptr())
            assert cuda.has(memory)
            del memory
    assert len(places) == 1
    del pool
    again = torch.frombuffer(pool_buffer(4 * MIB), dtype=torch.uint8)
    assert again.data_ptr() in places, "what is freed is kept for reuse"
    assert not cuda.has(again)


def test_a_tensor_outlives_lease_and_pool(cuda: Cuda) -> None:
    lease = Pool("8M", pinned=True).lease("4M")
    part = lease.tensor[5:7]
    lease.release()
    del lease
    gc.collect()
    assert cuda.has(part)


def test_never_more_is_registered_than_the_budget(fake: FakeCuda) -> None:
    pool = Pool("8M", pinned=True)

    def work(number: int) -> None:
        for step in range(8):
            with pool.lease((number * 31 + step * 17) % 8 * MIB + 1) as memory:
                assert fake.has(memory)
                memory[-1] = 1
                del memory

    in_threads(work, 4)
    assert pool.bytes_in_use == 0
    assert 0 < fake.most <= 8 * MIB


def test_no_gpu_is_called_that_the_program_does_not_use(fake: FakeCuda) -> None:
    """The double's first one: a context there would take memory of it."""
    with Pool("8M", pinned=True).lease("2M"):
        assert fake.calls == 1
    assert fake.violations == []


@pytest.mark.parametrize("kind", ["simulated", pytest.param("cuda", marks=on_a_gpu)])
def test_an_optimizer_moves_its_states_through_such_memory(
    kind: str, request: pytest.FixtureRequest, folder: Path
) -> None:
    """And computes what torch's optimizer does."""
    simulated = request.getfixturevalue("the_device") if kind == "simulated" else None
    device = simulated.device() if simulated else torch.device("cuda")
    with simulated.computing() if simulated else contextlib.nullcontext():
        ours, wanted = (torch.linspace(-1, 1, 1 << 20).to(device).requires_grad_() for _ in range(2))
        cuda = request.getfixturevalue("fake") if simulated else RealCuda()
        optimizer, plain = (
            NvmeOptimizer([ours], torch.optim.Adam, folder, memory_budget="16M"),
            torch.optim.Adam([wanted]),
        )
        ours.grad, wanted.grad = torch.ones_like(ours), torch.ones_like(wanted)
        optimizer.step()
        plain.step()
        assert torch.equal(ours.cpu(), wanted.cpu())
        buffers = optimizer._states._ring._buffers
        assert len(buffers) == 4
        assert all(cuda.has(buffer) for buffer in buffers)
        if isinstance(cuda, FakeCuda):
            assert (cuda.calls, cuda.most) == (4, 16 * MIB)
        optimizer.close()


def test_other_accelerators_lock_memory_with_torch(the_device: PrivateDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nvme_ops.memory.pool._has_xpu", lambda: True)
    with the_device.left_as_found():
        pool = Pool("8M", pinned=True)
        before = the_device.now.pinned_blocks
        with pool.lease("4M") as memory:
            assert the_device.now.pinned_blocks == before + 1
            assert memory.is_pinned()
            del memory
        assert pool.bytes_in_use == 0
        assert Ring(pinned=True).take().is_pinned()


# Copies under way, which torch does not wait for


@pytest.mark.parametrize("left", ["lease", "pool"])
def test_memory_stays_until_copies_of_it_have_ended(cuda: Cuda, left: str) -> None:
    pool = Pool("4M", pinned=True)
    lease = pool.lease("4M")
    place = lease.tensor.fill_(1).data_ptr()
    there = cuda.copy(lease.tensor)
    del lease
    if left == "pool":
        del pool
        later = torch.frombuffer(pool_buffer(4 * MIB), dtype=torch.uint8)
    else:
        later = pool.lease("4M").tensor
    assert later.data_ptr() == place
    later.fill_(2)
    cuda.finish()
    assert bool(there.eq(1).all())


def test_memory_that_cannot_be_unregistered_is_not_used_for_anything_else(fake: FakeCuda) -> None:
    fake.refuses_to_unregister = True
    place = Pool("4M", pinned=True).lease("4M").tensor.data_ptr()
    assert list(fake.registered) == [place]
    others = [torch.frombuffer(pool_buffer(4 * MIB), dtype=torch.uint8) for _ in range(3)]
    assert place not in [other.data_ptr() for other in others]
    fake.refuses_to_unregister = False
    with Pool("2M", pinned=True).lease("2M"):
        assert place not in fake.registered, "the next call tries again"


# Where it is refused


@pytest.mark.filterwarnings("ignore:CUDA refused")
@pytest.mark.parametrize(("name", "reason"), [("_PORTABLE", ""), ("_WIPE_ON_FORK", "forked child")])
def test_memory_that_is_refused_is_ordinary_and_said_once(
    cuda: Cuda, name: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page_locked, name, UNKNOWN_FLAG)
    pool = Pool("8M", pinned=True)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("default")
        leases = [pool.lease("2M"), pool.lease("2M")]
    assert len(said) == 1
    assert re.search(f"refused to page-lock .*{reason}.* ulimit -l unlimited", str(said[0].message))
    cuda.launch()  # torch does not find the error
    assert not any(cuda.has(lease.tensor) for lease in leases)
    assert bool(cuda.copy(leases[0].tensor.fill_(3)).shape)
    cuda.finish()
    assert pool.bytes_in_use == 4 * MIB
    del leases
    assert pool.lease("8M").tensor.fill_(1).sum() == 8 * MIB


@pytest.mark.filterwarnings("ignore:CUDA refused")
def test_a_part_may_be_refused(fake: FakeCuda) -> None:
    fake.limit = 4 * MIB
    pool = Pool("8M", pinned=True)
    leases = [pool.lease("2M") for _ in range(4)]
    assert [fake.has(lease.tensor) for lease in leases] == [True, True, False, False]
    for number, lease in enumerate(leases):
        lease.tensor.fill_(number)
    assert [int(lease.tensor[-1]) for lease in leases] == [0, 1, 2, 3]


def test_memory_is_ordinary_where_no_thread_can_be_started(fake: FakeCuda) -> None:
    """As at the end of a program."""
    with (
        mock.patch.object(threading.Thread, "start", side_effect=RuntimeError),
        pytest.warns(RuntimeWarning, match="no thread can be started"),
    ):
        assert Pool("2M", pinned=True).lease("2M").tensor.fill_(1).sum() == 2 * MIB
    assert fake.calls == 0


# Beside others


@pytest.mark.filterwarnings("ignore:CUDA refused")
def test_a_forked_child_leaves_its_parents_memory_alone(cuda: Cuda) -> None:
    pool = Pool("8M", pinned=True)
    leases = [pool.lease("4M"), pool.lease("2M")]
    for number in range(2):
        leases[number].tensor.fill_(7)
    there = cuda.copy(leases[0].tensor)

    def child() -> None:
        assert leases[0].tensor.count_nonzero() == 0
        for _ in range(2):
            assert pool.lease("8M", timeout=1).tensor.fill_(1).sum() == 8 * MIB  # CUDA refuses
        with mock.patch.object(threading.Thread, "start") as start:
            leases.clear()
        start.assert_not_called()
        page_locked._settle()
        if isinstance(cuda, FakeCuda):
            assert len(cuda.registered) == 2
            assert cuda.violations == []

    in_child(child)
    cuda.finish()
    assert bool(there.eq(7).all())
    assert all(cuda.has(lease.tensor) and bool(lease.tensor.eq(7).all()) for lease in leases)


def test_what_was_freed_or_refused_is_inherited_as_any_memory(cuda: Cuda, monkeypatch: pytest.MonkeyPatch) -> None:
    place = Pool("4M", pinned=True).lease("4M").tensor.data_ptr()
    ordinary = torch.frombuffer(pool_buffer(4 * MIB), dtype=torch.uint8).fill_(5)
    assert ordinary.data_ptr() == place
    monkeypatch.setattr(page_locked, "_PORTABLE", UNKNOWN_FLAG)
    with pytest.warns(RuntimeWarning):
        refused = Pool("2M", pinned=True).lease("2M").tensor.fill_(6)

    def child() -> None:
        assert bool(ordinary.eq(5).all())
        assert bool(refused.eq(6).all())

    in_child(child)


@pytest.mark.filterwarnings("ignore:CUDA refused")
def test_a_pool_that_is_collected_while_another_registers(fake: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that frees it holds the lock, for which the one that unregisters has to wait."""
    monkeypatch.setattr(page_locked, "_PATIENCE", None)
    others = [Pool("2M", pinned=True)]
    others[0].lease("2M")

    def collect(_: int) -> str:
        others.clear()
        return "refused"

    monkeypatch.setattr(fake, "cudaGetErrorString", collect)
    fake.limit = 2 * MIB
    Pool("4M", pinned=True).lease("4M")
    assert others == []


@pytest.mark.usefixtures("no_collection")
def test_ctrl_c_at_any_moment_of_a_lease_leaves_nothing_registered(
    fake: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of one whose memory is new, of one that others have to give way to, and of one that is reused."""
    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)  # pytest's would keep the frames, and so the memory

    def use(pool: Pool) -> None:
        for size in ("2M", "4M", "4M"):
            with pool.lease(size, timeout=20) as memory:
                memory[0] = 1
                del memory

    use(Pool("4M", pinned=True))  # what is done only once
    with Interrupt() as moments:
        use(Pool("4M", pinned=True))
    for number in range(1, moments.count + 1):
        pool = Pool("4M", pinned=True)
        with contextlib.suppress(KeyboardInterrupt), Interrupt(number):
            use(pool)
        assert pool.bytes_in_use == 0, number
        with pool.lease("4M", timeout=0) as memory:
            assert fake.has(memory), number
            del memory
        del pool
        page_locked._settle()
        assert fake.registered == {}, number


def test_ctrl_c_while_cuda_registers_ends_the_wait(fake: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """And what is registered later is unregistered."""
    registers, goes_on = threading.Event(), threading.Event()
    register = fake.cudaHostRegister

    def slow(*arguments: int) -> int:
        registers.set()
        goes_on.wait(60)
        return register(*arguments)

    monkeypatch.setattr(fake, "cudaHostRegister", slow)
    pool = Pool("2M", pinned=True)

    def ctrl_c() -> None:
        registers.wait(60)
        os.kill(os.getpid(), signal.SIGINT)

    interrupt = threading.Thread(target=ctrl_c)
    interrupt.start()
    with pytest.raises(KeyboardInterrupt):
        pool.lease("2M")
    goes_on.set()
    interrupt.join()
    assert pool.bytes_in_use == 0
    with pool.lease("2M") as memory:
        assert fake.has(memory)
        del memory


PROGRAM = """
import atexit, sys, torch
from nvme_ops.memory.pool import Pool
from tests.doubles.cuda import FakeCuda, RealCuda
cuda = FakeCuda() if sys.argv[1] == "fake" else RealCuda()
is_there = cuda.there()
is_there.__enter__()
pools = [Pool("8M", pinned=True) for _ in range(2)]
leases = [pool.lease("2M") for pool in pools]
def end():
    pools.clear(), leases.clear()
    if sys.argv[1] == "fake":
        assert not cuda.violations and len(cuda.registered) == 1
        cuda.cudaHostUnregister = lambda _: print("after the end")
there = cuda.copy(leases[0].tensor)
kept = leases[1].tensor
atexit.register(end)
"""


@pytest.mark.parametrize("kind", ["fake", pytest.param("real", marks=on_a_gpu)])
def test_the_end_of_the_program(kind: str) -> None:
    done = run_python(PROGRAM, kind, fresh=True)
    assert (done.stdout, done.stderr) == ("", "")
