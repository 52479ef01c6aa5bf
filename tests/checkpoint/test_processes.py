"""One path used by several processes: what reads a checkpoint, and what clears up, while others save and are killed."""

from __future__ import annotations

import fcntl
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

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


def test_clean_takes_a_file_that_a_save_has_not_locked_yet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save = saver(tmp_path / "model.safetensors")
    save(1)
    once_before(monkeypatch, publication, "try_lock", lambda *_: main(["clean", str(tmp_path)]))
    save(2)  # into another one
    assert number_in(tmp_path / "model.safetensors") == 2


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
