"""One path used by several processes: what reads a checkpoint, and what clears up, while others save and are killed."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import io
import os
import random
import signal
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import nvme_ops
from nvme_ops.checkpoint import contents
from nvme_ops.checkpoint import convert as converter
from nvme_ops.checkpoint.cli import main
from nvme_ops.checkpoint.convert import convert
from nvme_ops.filesystem import files, publication
from nvme_ops.filesystem.files import Lock
from nvme_ops.integrations.safetensors import safe_open
from tests.conftest import killed_in
from tests.crashing_save import Hooked, number_in, numbered

NAMES = pytest.mark.parametrize("name", ["model.safetensors", "model.pt", "folder"])


def saver(path: Path) -> Callable[[int], None]:
    """Saves a number; in a folder as two shards, in a file over the one before the last."""
    options: dict[str, Any] = {"recycle": True} if path.suffix else {"max_shard_size": 4000}
    return lambda number: nvme_ops.save(numbered(number), path, **options)


def once_before(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, act: Callable[..., object]) -> None:
    """Has ``act`` called with the arguments of the first call of a function, before that."""
    real = getattr(owner, name)

    def call(*given: Any, **options: Any) -> Any:
        monkeypatch.setattr(owner, name, real)
        act(*given)
        return real(*given, **options)

    monkeypatch.setattr(owner, name, call)


def killed_in_the_middle(begin: Callable[[Callable[[], object]], object]) -> None:
    """Has a process do what ``begin`` does, up to where that calls its argument; there it is killed."""
    reached = threading.Event()

    def stop() -> None:
        reached.set()
        threading.Event().wait()

    def body() -> None:
        threading.Thread(target=begin, args=[stop], daemon=True).start()
        assert reached.wait(30)

    killed_in(body)


# What reads a checkpoint twice reads one save


@NAMES
def test_commands_beside_a_save(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, target = tmp_path / name, tmp_path / "target.safetensors"
    save = saver(path)
    for number in range(3):  # the third would be written over the first
        save(number)
        once_before(monkeypatch, contents, "damaged", lambda *_, number=number: [save(number + k) for k in (1, 2)])
        assert main(["verify", str(path)]) == 0
    once_before(monkeypatch, contents, "compare", lambda *_: [save(5), save(6)])
    words = ["--format", "torch"] if name == "model.pt" else []
    assert main(["diff", str(path), str(path), *words]) == 0
    once_before(monkeypatch, converter, "damaged", lambda *_: [save(7), save(8)])  # which remove its files
    convert(str(path), str(target))
    assert number_in(target) == 6


def test_convert_begins_anew_where_its_source_seems_to_have_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A killed save has left a second name of the file, and the next one replaces that by another."""
    path, spare, target = tmp_path / "model.safetensors", tmp_path / "spare", tmp_path / "target.safetensors"
    saver(path)(1)
    spare.hardlink_to(path)

    def relinked(*_: object) -> None:
        spare.unlink()
        spare.hardlink_to(path)

    once_before(monkeypatch, converter, "plan_for", relinked)
    convert(str(path), str(target))
    assert number_in(target) == 1


def test_convert_finds_the_shards_of_a_save_that_replaced_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save, target = saver(tmp_path / "folder"), tmp_path / "target.safetensors"
    save(1)
    once_before(monkeypatch, publication, "open_to_read", lambda *_: save(2))
    convert(str(tmp_path / "folder"), str(target))
    assert number_in(target) == 2


def test_a_file_that_is_open_is_not_written_over(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save = saver(path)
    for number in range(1, 4):
        save(number)
    with safe_open(path) as file:
        first = file.get_tensor("a")
        save(4)
        save(5)  # over the file that was open, had it no lease
        assert (first == 3).all()
        assert (file.get_tensor("b") == 3).all()
    assert number_in(path) == 5


def test_a_file_that_is_written_over_before_it_is_locked_is_opened_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "model.safetensors"
    save = saver(path)
    save(1)

    def begin(stop: Callable[[], object]) -> None:
        nvme_ops.save(numbered(3), path, recycle=True, handle=Hooked(stop))

    def replace(*_: object) -> None:
        save(2)
        killed_in_the_middle(begin)  # half of it is in the file that was opened

    once_before(monkeypatch, publication, "try_lock", replace)
    with publication.opened(str(path)) as fd:
        content = os.pread(fd, 1 << 20, 0)
    assert content == path.read_bytes()
    assert number_in(path) == 2


# What clears up removes nothing that a save has put there meanwhile


def test_clean_beside_a_save_of_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save = saver(tmp_path)
    save(1)

    def begin(stop: Callable[[], object]) -> None:
        once_before(pytest.MonkeyPatch(), publication.Publication, "publish", lambda *_: stop())
        save(2)

    killed_in_the_middle(begin)
    stray = [path for path in tmp_path.iterdir() if "-g2-" in path.name]
    assert len(stray) == 2
    other = threading.Thread(target=save, args=[3])

    def meanwhile(path: Any, **options: Any) -> None:
        if str(path).endswith(".safetensors") and other.ident is None:
            other.start()
            other.join(0.5)
        unlink(path, **options)

    unlink = os.unlink
    monkeypatch.setattr(os, "unlink", meanwhile)
    assert main(["clean", str(tmp_path)]) == 0
    other.join()
    assert number_in(tmp_path) == 3


def test_clean_removes_no_lock_that_somebody_has_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = str(tmp_path / "model")
    killed_in(lambda: Lock(path))
    assert len(os.listdir(tmp_path)) == 1
    taken: list[Lock] = []
    other = threading.Thread(target=lambda: taken.append(Lock(path)))

    def begin(*_: object) -> None:
        other.start()
        other.join(0.5)

    once_before(monkeypatch, os, "unlink", begin)
    assert main(["clean", str(tmp_path)]) == 0
    other.join()
    assert taken[0].excludes()
    fd = os.open(files.lock_files(str(tmp_path))[0], os.O_RDWR)
    assert not files.try_lock(fd)  # whoever comes next waits for the one that has it
    os.close(fd)
    taken[0].close()
    assert os.listdir(tmp_path) == []


def test_clean_where_there_are_no_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save = saver(tmp_path)
    save(1)
    stray = tmp_path / "model-g7-00001-of-00001.safetensors"
    save(2)
    nvme_ops.save(numbered(5), tmp_path / "old")
    next((tmp_path / "old").glob("*.safetensors")).rename(stray)

    def refuse(*_: object) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", refuse)
    assert main(["clean", str(tmp_path)]) == 0
    assert stray.exists()  # it may be a save's that is under way
    monkeypatch.undo()
    assert main(["clean", str(tmp_path)]) == 0
    assert not stray.exists()


# At random: saves, cleans, verifies, converts and loads, some of which are killed


def command(*words: object) -> None:
    text = io.StringIO()
    with contextlib.redirect_stdout(text), contextlib.redirect_stderr(text):
        assert main([str(word) for word in words]) == 0, text.getvalue()


class Program:
    """Processes that use one checkpoint at once, a few at a time; each that is not killed must find it whole."""

    def __init__(self, folder: Path, name: str, seed: int) -> None:
        self.path, self.random = folder / name, random.Random(f"{seed} {name}")
        self.number = self.rounds = 0
        self.report = folder / "report"
        self.values = {0}  # of saves of which each may be there
        self._save(0, False)

    def _save(self, number: int, recycle: bool) -> None:
        options: dict[str, Any] = {"recycle": recycle} if self.path.suffix else {"max_shard_size": 4000}
        nvme_ops.save(numbered(number), self.path, durable=recycle, **options)

    def _verify(self) -> None:
        command("verify", self.path)

    def _clean(self) -> None:
        command("clean", self.path if self.path.is_dir() else self.path.parent)

    def _convert(self, number: int) -> None:
        target = self.path.parent / f"converted {number}.safetensors"
        convert(str(self.path), str(target))
        number_in(target)
        target.unlink()

    def _open(self) -> None:
        with safe_open(self.path) as file:
            first, other = file.get_tensor("a"), file.get_tensor("b")
        assert (other == first[0]).all()

    def _step(self) -> tuple[Callable[[], object], int | None]:
        """Returns what a process does, and the number that it saves."""
        self.number += 1
        steps: list[tuple[Callable[[], object], int | None]] = [
            (functools.partial(self._save, self.number, self.random.random() < 0.5), self.number),
            (functools.partial(self._save, self.number, self.random.random() < 0.5), self.number),
            (self._verify, None), (self._clean, None), (lambda: number_in(self.path), None),
            (functools.partial(self._convert, self.number), None),
        ]  # fmt: skip
        if self.path.suffix == ".safetensors":
            steps.append((self._open, None))
        return self.random.choice(steps)

    def play(self) -> None:
        """Starts two to four processes, kills some, and looks at what they leave."""
        running: dict[int, int | None] = {}
        for _ in range(self.random.randint(2, 4)):
            step, number = self._step()
            child = os.fork()
            if child == 0:
                self._in_child(step)
            running[child] = number
            time.sleep(self.random.random() * 0.004)
        killed = [child for child in running if self.random.random() < 0.4]
        for child in killed:
            time.sleep(self.random.random() * 0.01)
            os.kill(child, signal.SIGKILL)
        ended = {child: os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in running}
        self.rounds += len(running)
        assert set(ended.values()) <= {0, -signal.SIGKILL}, self.report.read_text()
        saved = {number for number in running.values() if number is not None}
        if any(ended[child] == 0 and number is not None for child, number in running.items()):
            self.values = saved  # one of these was the last
        else:
            self.values |= saved
        last = number_in(self.path)
        assert last in self.values
        self.values = {last}

    def _in_child(self, step: Callable[[], object]) -> None:
        try:
            signal.alarm(60)
            step()
            os._exit(0)
        except BaseException:
            with open(self.report, "a") as report:
                traceback.print_exc(file=report)
        finally:
            os._exit(1)

    def finish(self) -> None:
        """Requires that the next save and ``clean`` leave nothing else."""
        self._save(self.number + 1, False)
        self._clean()
        folder = self.path if self.path.is_dir() else self.path.parent
        left = sorted(name for name in os.listdir(folder) if name != "report" and not name.startswith("converted"))
        assert len(left) == (3 if self.path.is_dir() else 1), left
        command("clean", self.path.parent)  # a conversion may have been killed as it named its file
        assert not any(name.startswith(".") for name in os.listdir(self.path.parent))


@pytest.mark.parametrize("rounds", [60, pytest.param(1700, marks=[pytest.mark.nightly, pytest.mark.timeout(1200)])])
@NAMES
def test_processes_at_random(quick_folder: Path, name: str, rounds: int) -> None:
    seed = 1 if rounds == 60 else random.SystemRandom().randrange(1 << 32)
    print(f"seed {seed}")
    torch.set_num_threads(1)
    (quick_folder / "of one").mkdir()
    program = Program(quick_folder / "of one", name, seed)
    program._convert(0)  # what commands import when they run, processes would import anew
    program._verify()
    while program.rounds < rounds:
        program.play()
    program.finish()
