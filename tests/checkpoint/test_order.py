"""Among processes: locks, saves of one path that do not mix, and which save a shard is of."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import nvme_ops
from nvme_ops.inspection.contents import contents
from nvme_ops.storage import locks
from tests.conftest import forked, give_up_root, in_child, in_threads, killed_in, open_to_all
from tests.dcp.states import needs_fork


def test_a_lock_is_held_by_one_and_leaves_nothing(tmp_path: Path) -> None:
    inside, most = [0], [0]

    def work(_: int) -> None:
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
    held: list[locks.Lock] = []
    killed_in(lambda: held.append(locks.Lock(str(tmp_path / "model"))))
    assert len(list(tmp_path.iterdir())) == 1
    locks.Lock(str(tmp_path / "model")).release()
    assert list(tmp_path.iterdir()) == []


def test_who_waits_long_is_told_for_what(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locks, "_PATIENCE", 0.05)
    held = locks.Lock(str(tmp_path / "model"))
    timer = threading.Timer(0.3, held.release)
    timer.start()
    with pytest.warns(RuntimeWarning, match=r"waiting for another process.*model"):
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
        signal.pause()
    held.release()
    locks.Lock(str(tmp_path / "model")).release()
    os.kill(child, signal.SIGKILL)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL


# Saves of one path


def dcp_load(path: Path) -> dict[str, torch.Tensor]:
    found = {f"t{number}": torch.zeros(1000) for number in range(6)}
    nvme_ops.dcp.load(found, path, verify=True)
    return found


def recycled(tensors: dict[str, torch.Tensor], path: Path) -> None:
    nvme_ops.save(tensors, path, recycle=True)


def in_shards(tensors: dict[str, torch.Tensor], path: Path) -> None:
    nvme_ops.save(tensors, path, max_shard_size=4000, durable=False)


#: How to save, to load, and how many files there are after a save.
SAVERS: dict[str, tuple[Callable[..., object], Callable[[Path], dict[str, torch.Tensor]], int]] = {
    "folder": (in_shards, lambda path: nvme_ops.load(path, verify=True), 7),
    "dcp": (nvme_ops.dcp.save, dcp_load, 2),
    "model.safetensors": (recycled, lambda path: nvme_ops.load(path, verify=True), 2),
    "model.pt": (recycled, lambda path: nvme_ops.load(path, verify=True), 2),
}


class Saver:
    """Saves tensors that all have one value, and finds which one."""

    def __init__(self, folder: Path, name: str) -> None:
        self.path = folder / "of one" / name if name.startswith("model") else folder / name
        self.path.parent.mkdir(exist_ok=True)
        self._save, self._load, self._most = SAVERS[name]

    def save(self, value: float) -> None:
        self._save({f"t{number}": torch.full((1000,), value) for number in range(6)}, self.path)

    def value(self) -> float:
        (value,) = {float(value) for tensor in self._load(self.path).values() for value in tensor}
        return value

    def require_no_litter(self) -> None:
        self.save(1)
        assert len(list((self.path if self.path.is_dir() else self.path.parent).iterdir())) == self._most


@pytest.mark.filterwarnings("ignore:.*(torch.distributed is disabled|Detected an existing checkpoint)")
@pytest.mark.parametrize(
    ("count", "rounds"), [(4, 8), *(pytest.param(n, 500 // n + 1, marks=pytest.mark.slow) for n in (4, 8, 16))]
)
@pytest.mark.parametrize("name", [pytest.param(name, marks=needs_fork if name == "dcp" else ()) for name in SAVERS])
def test_processes_that_save_one_path_do_not_mix(tmp_path: Path, name: str, count: int, rounds: int) -> None:
    saver = Saver(tmp_path, name)

    def body(number: int) -> None:
        for each in range(rounds):
            saver.save(float(number * rounds + each))

    saver.save(0)
    seen: set[float] = set()
    with forked(count, body) as running:
        while running() or not seen:
            seen.add(saver.value())
    assert saver.value() % rounds == rounds - 1
    assert len(seen) > 1
    saver.require_no_litter()


@pytest.mark.filterwarnings("ignore:.*(torch.distributed is disabled|Detected an existing checkpoint)")
@pytest.mark.parametrize("name", SAVERS)
def test_threads_that_save_one_path_do_not_mix(tmp_path: Path, name: str) -> None:
    saver = Saver(tmp_path, name)
    saver.save(0)

    def work(number: int) -> None:
        for each in range(5):
            saver.save(10.0 * number + each) if number else saver.value()

    in_threads(work, 4)
    assert saver.value() in {14.0, 24.0, 34.0}
    saver.require_no_litter()


# Which save a shard is of


SHARD = "model-00002-of-00002.safetensors"


@pytest.fixture
def saves(tmp_path: Path) -> tuple[Path, Path]:
    """Two, in folders of their own."""
    for number in (1, 2):
        tensors = {"a": torch.full((3,), number), "b": torch.full((3,), number)}
        nvme_ops.save(tensors, tmp_path / str(number), max_shard_size=1)
    return tmp_path / "1", tmp_path / "2"


def test_a_shard_of_another_save_is_an_error(saves: tuple[Path, Path]) -> None:
    one, other = saves
    (other / SHARD).rename(one / SHARD)
    for into in (None, {"a": torch.zeros(3).long(), "b": torch.zeros(3).long()}):
        with pytest.raises(ValueError, match=rf"{SHARD}: is of another save"):
            nvme_ops.load(one, into=into)


def test_a_shard_that_another_program_has_replaced_is_loaded_and_not_verified(saves: tuple[Path, Path]) -> None:
    one, _ = saves
    nvme_ops.save({"b": torch.full((3,), 7)}, one / SHARD)
    assert nvme_ops.load(one)["b"][0] == 7
    with pytest.raises(OSError, match="header"):
        nvme_ops.load(one, verify=True)


def test_metadata_of_a_file_make_no_other_a_part_of_its_save(saves: tuple[Path, Path], tmp_path: Path) -> None:
    nvme_ops.save({"c": torch.zeros(3)}, tmp_path / "c.safetensors", metadata=contents(saves[0]).metadata)
    assert contents(tmp_path / "c.safetensors").damaged == []
