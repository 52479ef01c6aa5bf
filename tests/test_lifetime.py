"""``nvme_ops.base.lifetime``: hooks for forks and for the end of the program, and locks."""

from __future__ import annotations

import threading

import pytest

from nvme_ops.base import lifetime
from tests.conftest import in_child, run_python


class Kept(lifetime.Owned, lifetime.Tracked):
    _forked_error = "{self.path}: the parent's"

    def __init__(self, path: str, failure: Exception | None = None) -> None:
        super().__init__()
        self.path, self.failure, self.forked = path, failure, False
        lifetime.track(self)

    def _after_fork(self) -> None:
        self.forked = True
        if self.failure is not None:
            raise self.failure


def test_what_is_owned_is_refused_to_a_forked_child() -> None:
    kept = Kept("{brace}")
    kept._require_ours()

    def refused() -> None:
        with pytest.raises(RuntimeError, match=r"^{brace}: the parent's$"):
            kept._require_ours()
        assert not kept._is_ours()

    in_child(refused)
    assert not kept.forked


def test_all_that_is_tracked_hears_of_a_fork_although_one_fails() -> None:
    tracked = [Kept(str(number), OSError(number) if number % 2 else None) for number in range(6)]
    lifetime.untrack(tracked[-1])
    before = lifetime.forks()

    def child() -> None:
        assert [item.forked for item in tracked] == [True] * 5 + [False]
        assert lifetime.forks() == before + 1

    in_child(child)
    assert lifetime.forks() == before + 1, "they are counted on both sides"


def test_a_lock_is_free_in_the_child_of_a_thread_that_does_not_hold_it() -> None:
    lock, held, over = lifetime.forkable_lock(), threading.Event(), threading.Event()

    def hold() -> None:
        with lock:
            held.set()
            over.wait()

    def free() -> None:
        assert lock.acquire(blocking=False)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    try:
        in_child(free)
        assert not lock.acquire(blocking=False)
    finally:
        over.set()
        thread.join()


def test_a_lock_stays_that_of_the_thread_that_forks() -> None:
    lock = lifetime.forkable_lock()
    with lock:
        in_child(lock.release)  # as the end of a ``with`` block does; RuntimeError if it is not held


END = """
import multiprocessing, os
from nvme_ops.base import lifetime

class Kept(lifetime.Tracked):
    def _at_exit(self):
        words, self.words = self.words, ""
        if words:
            lifetime.tell(f"{words} in the {'child' if multiprocessing.parent_process() else 'parent'}")
        raise OSError("one that fails keeps none from being called")

kept = [Kept(), Kept()]
for each in kept:
    each.words = "ended"
    lifetime.track(each)
child = multiprocessing.get_context("fork").Process(target=int)
child.start()
child.join()
"""


def test_the_end_is_told_to_all_also_in_a_child_of_multiprocessing() -> None:
    said = run_python(END, fresh=True).stderr
    assert said.count("nvme_ops: ended in the child") == 2
    assert said.count("nvme_ops: ended in the parent") == 2
