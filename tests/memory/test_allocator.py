"""torch's allocator of CPU memory, while large tensors get theirs from the pool."""

from __future__ import annotations

import copy
import gc
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from nvme_ops import aio_handle
from nvme_ops._native import native
from tests.conftest import MIB, REPOSITORY, in_child

SIZE = 8 * MIB


@pytest.fixture
def pooled() -> Iterator[None]:
    gc.collect()  # what earlier tests left must not be freed while this one counts
    assert native().allocate_from_pool(True)
    yield
    native().allocate_from_pool(False)


def live() -> int:
    return native().pool_statistics()["live_bytes"]


def cached() -> int:
    return native().pool_statistics()["cached_bytes"]


def made(size: int = SIZE) -> torch.Tensor:
    return torch.full((size,), 7, dtype=torch.uint8)


def test_large_tensors_and_what_they_lose_to_rounding(pooled: None) -> None:
    for size in (MIB // 2, MIB // 2 + 1, MIB, MIB + 1, 2 * MIB, 5 * MIB, SIZE, SIZE + 1, 49 * MIB + 3):
        before = live()
        kept = made(size)
        assert native().in_pool(kept)
        assert size <= live() - before <= 1.25 * size
        del kept
        assert live() == before
    assert not native().in_pool(made(MIB // 2 - 1))


def test_memory_of_what_is_freed_between_smaller_tensors_is_used_again(pooled: None) -> None:
    """torch's usual allocator asks glibc for aligned memory, for which a gap of just that size is too small."""
    native().trim_pool()
    before, peak, small = live(), 0, []
    for _ in range(200):
        large = [made(2 * MIB + 4096) for _ in range(4)]
        small.append(torch.empty(1000))
        peak = max(peak, live() + native().pool_statistics()["cached_bytes"])
        del large
    assert peak - before < 64 * MIB


def test_what_was_made_before_and_after_is_freed_as_usual() -> None:
    """In a fresh process: elsewhere a graph that somebody still has may have activations on storage."""
    program = """
from nvme_ops._native import native
from tests.memory.test_allocator import live, made

earlier, before = made(), live()
assert native().allocate_from_pool(True)
assert native().allocate_from_pool(True)
native().allocate_from_pool(False)
kept = made()
native().allocate_from_pool(False)
later = made()
assert [native().in_pool(each) for each in (earlier, kept, later)] == [False, True, False]
del earlier, later
assert int(kept[-1]) == 7
del kept
assert live() == before
"""
    subprocess.run([sys.executable, "-c", program], check=True, cwd=REPOSITORY)


def test_whatever_torch_does_with_memory(pooled: None) -> None:
    before = live()
    tensor = made()
    copied = copy.deepcopy(tensor)
    tensor.resize_(2 * SIZE)
    assert int(tensor[SIZE - 1]) == 7
    tensor.untyped_storage().resize_(0)
    copied.share_memory_()
    lazy = torch._lazy_clone(other := made())
    lazy[0] = 1
    assert int(other[0]) == 7
    assert int(copied[3]) == 7
    del tensor, copied, lazy, other
    assert live() == before


def test_transfers_and_a_storage_that_is_freed_meanwhile(pooled: None, folder: Path) -> None:
    handle, before = aio_handle(), live()
    tensor = made()
    assert handle.submit_pwrite(tensor, folder / "file").result() == SIZE
    assert handle.statistics().staged_bytes == 0, "it goes as it is"
    write = handle.submit_pwrite(tensor, folder / "file")
    tensor.untyped_storage().resize_(0)
    assert write.result() == SIZE
    assert (folder / "file").read_bytes() == b"\7" * SIZE
    back = torch.empty(SIZE, dtype=torch.uint8)
    assert handle.submit_pread(back, folder / "file").result() == SIZE
    assert int(back.min()) == int(back.max()) == 7
    del write, back, tensor
    handle.close()
    assert live() == before


def test_threads_and_a_forked_child(pooled: None) -> None:
    def work() -> None:
        for _ in range(50):
            assert int(made()[-1]) == 7

    threads = [threading.Thread(target=work) for _ in range(3)]
    for each in threads:
        each.start()
    in_child(lambda: made().sum())
    for each in threads:
        each.join()


def test_memory_that_is_kept_is_given_back(pooled: None) -> None:
    def body() -> None:
        native().trim_pool()
        rest = cached()  # of huge pages of which an earlier test has a part
        several = [made() for _ in range(4)]
        del several
        assert cached() == rest + 4 * SIZE
        native().trim_pool(2 * SIZE)
        assert cached() == rest + 2 * SIZE
        native().trim_pool()
        assert cached() == rest

    in_child(body)  # where no thread that an earlier test left frees memory meanwhile
