"""Memory that processes share: who finds what, who fills it, when it is freed. Two openings of it are as two processes.

That they do so when one of them is killed is seen in ``tests/device/test_shared_copies.py``.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import resource
import signal
import socket
import sys
import textwrap
import time
import warnings
from pathlib import Path

import pytest
import torch

from nvme_ops.memory import shared_memory as module
from nvme_ops.memory.shared_memory import SharedMemory, SharedTier, key_of, shared_memory
from tests.conftest import KIB, MIB, give_up_root, in_child, limited, with_mounts
from tests.device.kinds import on_a_gpu
from tests.doubles.cuda import REFUSED, FakeCuda
from tests.moments import Interrupt, numbers

ONE, TWO = key_of("one"), key_of("two")
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")


@pytest.fixture
def what(tmp_path: Path) -> str:
    return str(tmp_path)  # of this test alone


def opened(what: str) -> SharedMemory:
    memory = shared_memory(what, 64 * MIB)
    assert memory is not None
    return memory


class Process:
    """As much as a process has of it."""

    def __init__(self, what: str, nbytes: int = 8 * MIB) -> None:
        self.tier = SharedTier(nbytes, opened(what))
        self.memory, self.share = self.tier.memory, self.tier.share()

    def get(self, key: tuple[int, int], nbytes: int = MIB) -> torch.Tensor:
        memory = self.tier.allocate_for(key, nbytes, self.share)
        assert memory is not None
        assert memory.nbytes == nbytes
        return memory

    def piece(self, memory: torch.Tensor) -> int:
        piece = self.tier.piece_of(memory)
        assert piece is not None
        return piece

    def fill(self, key: tuple[int, int], value: int, nbytes: int = MIB) -> torch.Tensor:
        memory = self.get(key, nbytes)
        assert self.memory.begin_to_fill(self.piece(memory))
        memory.fill_(value)
        self.memory.end_to_fill(self.piece(memory), complete=True)
        return memory

    def is_complete(self, memory: torch.Tensor) -> bool:
        return self.memory.is_complete(self.piece(memory))


def memfds(what: str) -> list[str]:
    """The descriptors that this process has of the memory for ``what``."""
    links = []
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # of the folder itself
            links.append(os.readlink(f"/proc/self/fd/{number}"))
    return [link for link in links if module._name(what, 64 * MIB) in link]


def taken(process: Process) -> int:
    """Bytes that the system has supplied for pieces."""
    return os.fstat(process.memory._fd).st_blocks * 512 // MIB * MIB


def test_one_finds_what_another_has_read(what: str) -> None:
    one, other = Process(what), Process(what)
    first = one.fill(ONE, 1)
    second = other.get(ONE)
    assert other.is_complete(second)
    assert int(second.min()) == 1
    assert taken(one) == MIB
    assert other.memory.bytes_complete() == MIB
    assert other.memory.piece_of(TWO) is None
    assert not other.is_complete(other.get(TWO))
    first.fill_(3)
    assert int(second.max()) == 3, "it is the same memory"


@pytest.mark.parametrize("first", [0, 1])
def test_it_is_freed_when_the_last_one_gives_it_up(what: str, first: int) -> None:
    processes = [Process(what), Process(what)]
    memory = [processes[0].fill(ONE, 1), processes[1].get(ONE)]
    last = processes[1 - first]
    memory[first] = torch.empty(0)
    processes[first].tier.close()
    assert taken(last) == MIB
    assert int(memory[1 - first].min()) == 1
    memory.clear()
    last.tier.close()
    assert taken(last) == 0
    del processes, last
    assert memfds(what) == []


def test_what_a_process_leaves_that_has_ended_is_freed(what: str) -> None:
    one, other = Process(what), Process(what)
    memory = one.fill(ONE, 1)
    del memory, one  # without close
    assert taken(other) == MIB
    other.tier._looked = 0.0
    other.tier.collect()
    assert taken(other) == 0
    assert not other.is_complete(other.get(ONE))


def test_one_fills_a_piece_and_another_one_if_that_ends(what: str) -> None:
    one, other = Process(what), Process(what)
    filling, waiting = one.get(ONE), other.get(ONE)
    assert one.memory.begin_to_fill(one.piece(filling))
    piece = other.piece(waiting)
    assert not other.memory.begin_to_fill(piece)
    assert other.memory.begin_to_fill(piece, anyhow=True), "who waits in vain does it all the same"
    other.memory.end_to_fill(piece, complete=False)
    del filling, one
    assert not other.memory.is_complete(piece)
    assert other.memory.begin_to_fill(piece)
    other.memory.end_to_fill(piece, complete=True)
    del waiting
    assert other.piece(other.get(TWO)) != piece, "a device may still write to it what has been asked for"


def test_a_read_that_failed_leaves_nothing(what: str) -> None:
    one, other = Process(what), Process(what)
    memory = one.get(ONE)
    assert one.memory.begin_to_fill(one.piece(memory))
    one.memory.end_to_fill(one.piece(memory), complete=False)
    assert not other.is_complete(other.get(ONE))
    assert int(other.fill(ONE, 2).min()) == 2


def test_memory_is_used_again_and_never_more_than_the_budget(what: str) -> None:
    process = Process(what, 2 * MIB)
    for number in range(20):
        process.fill(key_of(number), number)
    assert taken(process) == MIB, "it is one piece"
    for number in range(20):
        process.fill(key_of(number), number, 64 * KIB * (1 + number))
        assert sum(kept.nbytes for kept in process.tier._kept.values()) <= 2 * MIB
    assert taken(process) <= 2 * MIB
    memory = process.get(ONE, 2 * MIB)
    assert process.tier.allocate_for(TWO, 1, process.share) is None
    del memory
    assert process.get(TWO, 1).nbytes == 1


def test_a_piece_that_others_keep_gets_no_other_bytes(what: str) -> None:
    one, other = Process(what), Process(what)
    one.fill(ONE, 1)
    kept = other.get(ONE)
    one.fill(TWO, 2)
    assert int(kept.max()) == 1


def test_the_machine_has_no_memory(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = Process(what), Process(what)
    memory = one.fill(ONE, 1)
    monkeypatch.setattr(module, "free_memory", lambda: 0)
    assert other.tier.allocate_for(TWO, MIB, other.share) is None
    assert int(other.get(ONE).min()) == 1, "what is there takes none"
    del memory


def test_processes_that_stand_still_are_no_reason_to_wait(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = Process(what), Process(what)
    monkeypatch.setattr(module, "_PATIENCE", 0.1)
    assert one.memory.locked(other.tier.allocate_for, ONE, MIB, other.share) is None
    other.get(ONE)


@pytest.mark.parametrize("end", [signal.SIGCONT, signal.SIGKILL])
def test_a_process_is_stopped_while_it_has_the_lock(what: str, end: int, monkeypatch: pytest.MonkeyPatch) -> None:
    process = Process(what)
    child = os.fork()
    if child == 0:
        try:
            other = Process(what)
            held = other.get(TWO)
            other.memory.locked(os.kill, os.getpid(), signal.SIGSTOP)
            del held
            signal.pause()
        finally:
            os._exit(1)
    try:
        assert os.WIFSTOPPED(os.waitpid(child, os.WUNTRACED)[1])
        monkeypatch.setattr(module, "_PATIENCE", 60.0)
        begin, process.tier._looked = time.monotonic(), 0.0
        process.tier.collect()
        assert time.monotonic() - begin < 30, "what may be left of others is no reason to wait"
        monkeypatch.setattr(module, "_PATIENCE", 0.2)
        assert process.tier.allocate_for(ONE, MIB, process.share) is None
        monkeypatch.setattr(module, "_PATIENCE", 60.0)
        assert process.tier.allocate_for(ONE, MIB, process.share) is None
        assert time.monotonic() - begin < 30, "it waits no longer than that, and once"
        os.kill(child, end)
        while process.tier.is_held_up and time.monotonic() - begin < 60:
            process.tier.allocate_for(ONE, MIB, process.share)
        process.get(ONE)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_ctrl_c_at_any_moment_keeps_nothing_and_holds_nobody_up(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of what takes memory, from a piece of other bytes or anew, and gives it up."""
    monkeypatch.setattr(module, "free_memory", lambda: 64 * MIB)  # in whose generators it would be ignored

    def use(process: Process) -> None:
        process.fill(ONE, 1)
        process.fill(TWO, 2)
        process.get(ONE, 2 * MIB)
        process.tier.close()

    with Interrupt() as moments:
        use(Process(what, 2 * MIB))
    last = Process(what)
    for number in numbers("shared memory", moments.count, 100):
        process = Process(what, 2 * MIB)
        with contextlib.suppress(KeyboardInterrupt), Interrupt(number) as moment:
            use(process)
        assert last.tier.allocate_for(TWO, MIB, last.share) is not None, moment.where
        assert process.share.bytes_in_use == 0, moment.where
        process.tier._looked = 0.0
        process.tier.close()
        last.tier._looked = 0.0
        last.tier.close()
        assert taken(last) == 0, moment.where


def test_there_is_none(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with limited(resource.RLIMIT_FSIZE, MIB):
        assert shared_memory(what, 64 * MIB) is None
    address_space = int(Path("/proc/self/statm").read_text().split()[0]) * 4096
    with limited(resource.RLIMIT_AS, address_space + 32 * MIB):
        assert shared_memory(what, 64 * MIB) is None
    monkeypatch.setattr(module, "_PATIENCE", 0.1)
    with socket.socket(socket.AF_UNIX) as squatter:
        squatter.bind("\0" + module._name(what, 64 * MIB))
        assert shared_memory(what, 64 * MIB) is None
    assert memfds(what) == []
    assert shared_memory(what, 64 * MIB) is not None


@pytest.mark.parametrize("left", range(8))
def test_there_are_few_descriptors(what: str, left: int) -> None:
    """Then there is no shared memory, but never a second one."""
    one = opened(what)
    highest = max(map(int, os.listdir("/proc/self/fd")))
    with limited(resource.RLIMIT_NOFILE, highest + left):
        other = shared_memory(what, 64 * MIB)
    if other is None:
        assert left < 7
        assert len(memfds(what)) == 1
    else:
        assert os.path.sameopenfile(one._fd, other._fd)


def test_dev_shm_is_not_used() -> None:
    program = """
        import os
        from nvme_ops.memory.shared_memory import SharedTier, key_of, shared_memory
        tier = SharedTier(8 << 20, shared_memory(os.getpid(), 8 << 20))
        memory = tier.allocate_for(key_of("one"), 8 << 20, tier.share())
        print(int(memory.fill_(1).sum()), os.statvfs("/dev/shm").f_blocks)
    """
    mounts = "mount -t tmpfs -o size=4k none /dev/shm"
    assert with_mounts(mounts, sys.executable, "-c", textwrap.dedent(program)).split() == [str(8 * MIB), "1"]


def test_other_bytes_have_other_memory(what: str) -> None:
    process, other = Process(what), Process(what + "changed")
    memory = process.fill(ONE, 1)
    assert not other.is_complete(other.get(ONE))
    del memory


@pytest.mark.parametrize("trouble", ["owner", "size", "seals"])
@as_root
def test_a_memfd_that_cannot_be_trusted_is_not_taken(what: str, trouble: str) -> None:
    """A process of ours can have it from another user, as one that receives descriptors."""
    made = opened(what)
    right = os.fstat(made._fd).st_size
    del made
    fd = os.memfd_create(module._name(what, 64 * MIB), os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, right - 4096 * (trouble == "size"))
    if trouble != "seals":
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, module._SEALS)
    if trouble == "owner":
        os.fchown(fd, 65534, 65534)
    with open(fd) as file:
        memory = opened(what)
        assert os.fstat(memory._fd).st_ino != os.fstat(file.fileno()).st_ino


@as_root
def test_another_user_has_another_and_comes_by_no_bytes(what: str) -> None:
    one = Process(what)
    memory, there = one.fill(ONE, 1), f"/proc/{os.getpid()}"
    places = [f"{there}/fd/{one.memory._fd}", f"{there}/mem", f"{there}/map_files"]

    def use() -> None:
        give_up_root()
        process = Process(what)
        assert not process.is_complete(process.get(ONE))
        process.fill(ONE, 2)
        for place in places:
            with pytest.raises(PermissionError):
                os.open(place, os.O_RDONLY)

    in_child(use)
    assert int(memory.max()) == 1
    assert one.memory.bytes_complete() == MIB


def test_it_cannot_be_truncated_by_others(what: str) -> None:
    memory = opened(what)
    with pytest.raises(PermissionError):
        os.ftruncate(memory._fd, 4096)


def test_a_forked_child_has_no_part_in_it(what: str) -> None:
    process = Process(what)
    memory = process.fill(ONE, 1)

    def use() -> None:
        assert memfds(what) == [], "or the locks would last as long as the child"
        assert int(memory.max()) == 0
        assert process.tier.allocate_for(TWO, MIB, process.share) is None
        process.tier.close()

    in_child(use)
    assert int(memory.min()) == 1


def test_a_gpu_uses_no_memory_that_was_given_up(what: str) -> None:
    with FakeCuda().there() as cuda:
        process = Process(what, 2 * MIB)
        memory = process.fill(ONE, 1)
        assert cuda.has(memory)
        del memory
        process.fill(TWO, 2)
        assert cuda.calls == 2, "the first page, to see whether it can be; and one piece"
        process.get(ONE, 2 * MIB)
        assert list(cuda.registered.values()) == [2 * MIB]
        cuda.refuses_to_unregister = True
        assert process.tier.allocate_for(TWO, MIB, process.share) is None
        assert taken(process) == 2 * MIB, "it is kept as long as a GPU can use it"
        cuda.refuses_to_unregister = False
        process.get(TWO)
        process.tier.close()
        assert cuda.registered == {}
        assert taken(process) == 0
        assert cuda.violations == []


def test_the_limit_of_locked_memory_is_reached(what: str) -> None:
    """What is not registered is used all the same, and that is said once."""

    class Locking(FakeCuda):
        def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:  # noqa: N802
            refused = module._libc.mlock(ctypes.c_void_p(address), ctypes.c_size_t(nbytes))
            return self._returned(REFUSED) if refused else super().cudaHostRegister(address, nbytes, flags)

    def use() -> None:
        give_up_root()
        with limited(resource.RLIMIT_MEMLOCK, 2 * MIB), Locking().there() as cuda:
            process = Process(what)
            with warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("default")
                held = [process.fill(key_of(number), number) for number in range(5)]
            assert [cuda.has(memory) for memory in held] == [True, *[False] * 4], "the first page is registered, too"
            assert [int(memory.max()) for memory in held] == list(range(5))
            assert len(said) == 1
            assert "ulimit -l unlimited" in str(said[0].message)

    in_child(use)


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=on_a_gpu)])
def test_a_gpu_copies_from_it_as_from_other_page_locked_memory(what: str, device: str) -> None:
    process = Process(what)
    memory = process.fill(ONE, 1)
    assert memory.is_pinned()
    assert int(memory.to(device, non_blocking=True).min()) == 1


def test_without_cuda_registering_it_or_such_locks_there_is_none(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with FakeCuda(limit=0).there():
        assert shared_memory(what, 64 * MIB) is None
    monkeypatch.setattr(fcntl, "F_OFD_SETLK", 12345)
    assert shared_memory(what, 64 * MIB) is None


def test_a_share_is_charged(what: str) -> None:
    process = Process(what)
    share = process.tier.share(MIB)
    memory = process.tier.allocate_for(ONE, MIB, share)
    assert share.bytes_in_use == MIB
    assert process.tier.allocate_for(TWO, 1, share) is None
    del memory
    assert share.bytes_in_use == 0
