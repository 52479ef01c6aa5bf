"""Nothing is left behind: no descriptor, thread or memory, after hundreds of operations, good and bad."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from tests.conftest import MIB, HandleFactory, pattern, store
from tests.contract.suite import settled

ROUNDS = 200  # of several operations each
SLACK = 12 * MIB  # what allocators keep; a tensor leaked in each round would be more
MORE_THREADS = 48  # those of the threads backend come as they are needed: at most 16 for a lane, then they stay


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_operations(make_handle: HandleFactory, folder: Path) -> None:
    handle, data, path = make_handle(intra_op_parallelism=2), pattern(100_001), folder / "file"
    back, short = torch.zeros_like(data), store(folder / "short", pattern(1000))

    def work(i: int) -> None:
        handle.sync_pwrite(data, path)
        handle.async_pread(torch.zeros_like(data), path)
        assert handle.wait() == 1
        handle.read(back, path, True)
        handle.submit_preadv([torch.zeros(100), torch.zeros(1000)], [path, path]).result()
        handle.submit_pwrite(data[::2], path, 5).add_done_callback(lambda future: future.result())
        handle.submit_pread(torch.zeros(100_000, dtype=torch.uint8), path)  # at which nobody looks
        locked = handle.new_cpu_locked_tensor(100_000 + i, data)
        handle.async_pwrite(locked[3:], folder / "locked")
        handle.free_cpu_locked_tensor(locked)
        handle.wait()
        for call in (handle.sync_pread, lambda *a: handle.submit_pread(*a).result()):
            for given, wrong in (((data, short), EOFError), ((data, folder / "missing"), FileNotFoundError),
                                 ((data[::2], path), ValueError), ((data, None), TypeError)):  # fmt: skip
                with pytest.raises(wrong):
                    call(*given)
        if i % 4 == 0:  # ending a queue of libaio takes the kernel a while
            make_handle(queue_depth=4, intra_op_parallelism=3).async_pread(torch.zeros_like(data), path)

    for i in range(ROUNDS // 10):
        work(i)
    before = settled()
    for _ in range(3):  # what is under way as others keep the machine busy comes once; what leaks comes each time
        resident = resident_bytes()
        for i in range(ROUNDS):
            work(i)
        after = settled()
        assert after.pop("threads") <= before["threads"] + MORE_THREADS
        assert after.items() <= before.items()
        if (grown := resident_bytes() - resident) < SLACK:
            break
    assert grown < SLACK
    assert torch.equal(back, data)
