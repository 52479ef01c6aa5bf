"""Saves of one path: in the order of the calls within a process, one at a time among processes, none lost."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path

import pytest
import torch

import nvme_ops
from nvme_ops.checkpoint import background
from nvme_ops.storage import locks
from tests.conftest import forked, give_up_root, in_child, in_threads, open_to_all
from tests.crashing_save import Gated, interrupted_by, number_in, numbered


@pytest.fixture
def gate() -> Iterator[Gated]:
    """Closed, and opened at the end of the test, whatever happens."""
    gate = Gated()
    yield gate
    gate.open()


# Within a process


def assert_one_after_the_other(first: Path, second: Path, gate: Gated) -> None:
    """Where a save to ``first`` is under way, one to ``second`` waits for it."""
    future = nvme_ops.save_async(numbered(1), first, handle=gate)
    saver = threading.Thread(target=nvme_ops.save, args=[numbered(2), second])
    saver.start()
    time.sleep(0.1)
    assert saver.is_alive()
    gate.open()
    saver.join()
    future.result()
    assert number_in(second) == 2


@pytest.mark.parametrize("name", ["model.safetensors", "model.pt", "folder"])
def test_a_save_waits_for_the_one_in_the_background(tmp_path: Path, gate: Gated, name: str) -> None:
    assert_one_after_the_other(tmp_path / name, tmp_path / name, gate)


def test_a_folder_and_its_index_are_one_path(tmp_path: Path, gate: Gated) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    assert_one_after_the_other(tmp_path / "model.safetensors.index.json", tmp_path / "link", gate)


def test_a_save_that_fails_lets_the_next_one_begin(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.mkdir()
    for _ in range(2):
        with pytest.raises(IsADirectoryError):
            nvme_ops.save(numbered(1), path, format="safetensors")


def test_a_save_that_is_interrupted_while_it_waits_gives_its_place_away(tmp_path: Path, gate: Gated) -> None:
    path = tmp_path / "model.safetensors"
    first = nvme_ops.save_async(numbered(1), path, handle=gate)
    with pytest.raises(KeyboardInterrupt), interrupted_by(signal.SIGALRM):
        nvme_ops.save(numbered(2), path)
    gate.open()
    first.result()
    nvme_ops.save(numbered(3), path)
    assert number_in(path) == 3


def test_an_interruption_after_the_thread_has_begun_leaves_the_save_to_it(
    tmp_path: Path, gate: Gated, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Interrupted(threading.Thread):
        def start(self) -> None:
            super().start()
            raise KeyboardInterrupt

    path = tmp_path / "model.safetensors"
    background.release_memory()
    with monkeypatch.context() as patch:
        patch.setattr(threading, "Thread", Interrupted)
        with pytest.raises(KeyboardInterrupt):
            nvme_ops.save_async(numbered(1), path, handle=gate)
    assert background._kept == []  # its memory is still in use
    threading.Timer(0.2, gate.open).start()
    nvme_ops.save_async({"b": torch.zeros(3)}, tmp_path / "other.safetensors").result()
    nvme_ops.save(numbered(2), tmp_path / "model.safetensors")
    assert number_in(path) == 2


def preempted(begin: Callable[[Gated], object], handler: Callable[[], Future[None] | None]) -> None:
    """``handler`` runs as a signal's while ``begin`` waits at a closed gate, which opens soon after that."""
    gate = Gated()
    futures: list[Future[None] | None] = []

    def handle(*_: object) -> None:
        threading.Timer(0.3, gate.open).start()
        futures.append(handler())

    signal.signal(signal.SIGUSR1, handle)
    threading.Timer(0.3, os.kill, [os.getpid(), signal.SIGUSR1]).start()
    begin(gate)
    for future in futures:
        if future is not None:
            future.result()


@pytest.mark.parametrize("name", ["model.safetensors", "model.pt", "folder"])
def test_a_signal_handler_may_save_the_path_that_it_interrupts_the_save_of(tmp_path: Path, name: str) -> None:
    path = tmp_path / name

    def body() -> None:
        preempted(
            lambda gate: nvme_ops.save(numbered(1), path, handle=gate), lambda: nvme_ops.save_async(numbered(2), path)
        )
        assert number_in(path) == 2

    in_child(body)


def test_also_where_the_interrupted_one_waits_in_save_async(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"

    def body() -> None:
        preempted(
            lambda gate: nvme_ops.save_async(numbered(1), path, memory=0, handle=gate).result(),
            lambda: nvme_ops.save_async(numbered(2), path, memory=0),
        )
        assert number_in(path) == 2

    in_child(body)


def test_a_signal_handler_that_would_wait_for_ever_is_told(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"

    def handler() -> None:
        with pytest.raises(RuntimeError, match=r"call save_async\(\) there"):
            nvme_ops.save(numbered(2), path)

    def body() -> None:
        preempted(lambda gate: nvme_ops.save(numbered(1), path, handle=gate), handler)
        assert number_in(path) == 1

    in_child(body)


# Among processes


def test_a_lock_is_held_by_one_and_leaves_nothing(tmp_path: Path) -> None:
    inside, most = [0], [0]

    def work(number: int) -> None:
        for _ in range(20):
            with locks.locked(str(tmp_path / "model")):
                inside[0] += 1
                most[0] = max(most[0], inside[0])
                time.sleep(0.0005)
                inside[0] -= 1

    in_threads(work, 8)
    assert most == [1]
    assert list(tmp_path.iterdir()) == []


def test_a_lock_goes_with_its_process(tmp_path: Path) -> None:
    child = os.fork()
    if child == 0:
        held = locks.Lock(str(tmp_path / "model"))
        os.kill(os.getpid(), signal.SIGKILL)
        held.release()
    os.waitpid(child, 0)
    assert len(list(tmp_path.iterdir())) == 1
    locks.Lock(str(tmp_path / "model")).release()
    assert list(tmp_path.iterdir()) == []


def test_who_waits_long_is_told_for_what(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locks, "_PATIENCE", 0.05)
    held = locks.Lock(str(tmp_path / "model"))
    timer = threading.Timer(0.3, held.release)
    timer.start()
    with pytest.warns(RuntimeWarning, match=r"waiting for another process that saves here and holds .*model"):
        locks.Lock(str(tmp_path / "model")).release()
    timer.join()


@pytest.mark.parametrize("plant", [lambda path: path.symlink_to("/etc/passwd"), os.mkfifo, Path.mkdir])
def test_what_was_planted_in_its_place_is_an_error(tmp_path: Path, plant: object) -> None:
    plant(tmp_path / ".model.nvme_ops-lock")  # type: ignore[operator]
    with pytest.raises(OSError, match="nvme_ops-lock"):
        locks.Lock(str(tmp_path / "model"))


def test_users_wait_for_each_other(tmp_path: Path) -> None:
    """As far as their rights go: one who may not even read the lock is told so."""
    if os.geteuid() != 0:
        pytest.skip("not root: there is no other user to become")
    open_to_all(tmp_path)
    path = str(tmp_path / "model")
    held = locks.Lock(path)

    def body() -> None:
        give_up_root()
        locks.Lock(path).release()

    timer = threading.Timer(0.3, held.release)
    timer.start()
    in_child(body)
    timer.join()
    held = locks.Lock(path)
    os.chmod(held.path, 0o600)

    def refused() -> None:
        give_up_root()
        with pytest.raises(PermissionError, match="nvme_ops-lock"):
            locks.Lock(path)

    in_child(refused)
    held.release()
    assert list(tmp_path.iterdir()) == []


def test_a_child_of_a_fork_neither_holds_nor_releases_it(tmp_path: Path) -> None:
    held = locks.Lock(str(tmp_path / "model"))
    in_child(held.release)
    assert len(list(tmp_path.iterdir())) == 1
    child = os.fork()
    if child == 0:
        time.sleep(1)
        os._exit(0)
    held.release()
    start = time.monotonic()
    locks.Lock(str(tmp_path / "model")).release()
    assert os.waitpid(child, os.WNOHANG) == (0, 0), time.monotonic() - start
    os.waitpid(child, 0)


def savers_and_loader(path: Path, count: int, rounds: int) -> tuple[int, int]:
    """Loads beside so many processes that save; how many loads there were, and of how many saves they were."""

    def save(value: float, durable: bool = False) -> None:
        nvme_ops.save(
            {f"t{i}": torch.full((1000,), value) for i in range(6)}, path, max_shard_size=4000, durable=durable
        )

    def body(number: int) -> None:
        for each in range(rounds):
            save(float(number * rounds + each))

    save(0)
    loads, seen = 0, set()
    with forked(count, body) as running:
        while running() or not loads:
            found = nvme_ops.load(path, verify=True)
            values = {float(value) for tensor in found.values() for value in tensor}
            assert len(values) == 1, values
            seen |= values
            loads += 1
    nvme_ops.load(path, verify=True)
    return loads, len(seen)


def test_processes_that_save_one_path_do_not_mix(tmp_path: Path) -> None:
    loads, seen = savers_and_loader(tmp_path / "model", 4, 10)
    assert loads >= seen > 1
    assert len(list((tmp_path / "model").iterdir())) == 7  # the shards of one save and its index


@pytest.mark.slow
@pytest.mark.parametrize("count", [4, 8, 16])
def test_many_processes_that_save_one_path_do_not_mix(tmp_path: Path, count: int) -> None:
    savers_and_loader(tmp_path / "model", count, 500 // count + 1)
    assert len(list((tmp_path / "model").iterdir())) == 7


# Which save a shard is of


def two_saves(folder: Path) -> tuple[Path, Path]:
    for number in (1, 2):
        tensors = {"a": torch.full((3,), number), "b": torch.full((3,), number)}
        nvme_ops.save(tensors, folder / str(number), max_shard_size=1)
    return folder / "1", folder / "2"


def test_a_shard_of_another_save_is_an_error(tmp_path: Path) -> None:
    one, other = two_saves(tmp_path)
    shard = "model-00002-of-00002.safetensors"
    (other / shard).rename(one / shard)
    with pytest.raises(ValueError, match=rf"{shard}: is of another save than its index"):
        nvme_ops.load(one)
    with pytest.raises(ValueError, match="is of another save"):
        nvme_ops.load(one, into={"a": torch.zeros(3).long(), "b": torch.zeros(3).long()})


def test_a_shard_that_another_program_has_replaced_is_loaded_and_not_verified(tmp_path: Path) -> None:
    one, _ = two_saves(tmp_path)
    shard = one / "model-00002-of-00002.safetensors"
    nvme_ops.save({"b": torch.full((3,), 7)}, shard)
    assert nvme_ops.load(one)["b"][0] == 7
    with pytest.raises(OSError, match="header"):
        nvme_ops.load(one, verify=True)


def test_metadata_of_a_file_make_no_other_a_part_of_its_save(tmp_path: Path) -> None:
    one, _ = two_saves(tmp_path)
    from nvme_ops.inspection.contents import contents

    nvme_ops.save({"c": torch.zeros(3)}, tmp_path / "c.safetensors", metadata=contents(one).metadata)
    assert contents(tmp_path / "c.safetensors").damaged == []
