"""``recycle=True``: a checkpoint is written over the one before the last, and is as whole as any other."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import nvme_ops
from nvme_ops.inspection.cli import main
from nvme_ops.storage import publication
from tests.crashing_save import (
    NEW,
    OLD,
    NoStraceError,
    Outcome,
    beside,
    content,
    kill_at,
    save_under_strace,
)


@pytest.fixture(params=[".safetensors", ".pt"])
def path(request: pytest.FixtureRequest, folder: Path) -> Path:
    (folder / "models").mkdir()
    return folder / "models" / f"model{request.param}"


def save(path: Path, tensors: dict[str, torch.Tensor] = OLD) -> int:
    """The inode of the new file."""
    nvme_ops.save(tensors, path, recycle=True)
    assert content(path) == ("old" if tensors is OLD else "new")
    return path.stat().st_ino


def spare_of(path: Path) -> Path:
    return path.with_name(f".{path.name}.nvme_ops-spare")


def test_two_files_take_turns(path: Path) -> None:
    first, second, third, fourth = (save(path, tensors) for tensors in (OLD, NEW, NEW, OLD))
    assert first != second
    assert (third, fourth) == (first, second)
    assert beside(path) == [spare_of(path).name]


def test_the_bytes_are_those_of_a_new_file(path: Path) -> None:
    fresh = path.with_name(f"fresh{path.suffix}")
    for length in (1000, 300_000, 5, 70_000, 0, 3):
        tensors = {"a": torch.randn(length), "b": torch.randn(7, 3).t(), "c": torch.arange(length).to(torch.int8)}
        nvme_ops.save(tensors, path, recycle=True)
        nvme_ops.save(tensors, fresh)
        assert path.read_bytes() == fresh.read_bytes()
        assert nvme_ops.load(path, verify=True).keys() == tensors.keys()


def test_a_save_without_it_and_clean_give_the_room_back(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for tensors in (OLD, NEW):
        nvme_ops.save_async(tensors, path, recycle=True).result()
    assert beside(path) == [spare_of(path).name]
    nvme_ops.save(OLD, path)
    assert (content(path), beside(path)) == ("old", [])
    for tensors in (OLD, NEW):
        save(path, tensors)
    assert main(["clean", str(path.parent)]) == 0
    assert spare_of(path).name in capsys.readouterr().out
    assert (content(path), beside(path)) == ("new", [])


def test_what_is_read_is_not_written_over(path: Path) -> None:
    first = save(path)
    with publication.opened(str(path)) as fd:
        save(path, NEW)
        before = os.pread(fd, 1 << 20, 0)
        save(path, NEW)
        assert os.pread(fd, 1 << 20, 0) == before
        assert path.stat().st_ino != first
    assert content(path) == "new"


def test_a_second_name_of_the_file_is_left_alone(path: Path) -> None:
    save(path)
    os.link(path, path.with_name("kept"))
    before = path.read_bytes()
    for tensors in (NEW, OLD, NEW):
        save(path, tensors)
    assert path.with_name("kept").read_bytes() == before


PLANTS: dict[str, Callable[[Path, Path], object]] = {
    "link": lambda precious, spare: spare.symlink_to(precious),
    "hard link": os.link,
    "pipe": lambda _, spare: os.mkfifo(spare),
    "folder": lambda _, spare: spare.mkdir(),
}


@pytest.mark.parametrize("plant", PLANTS)
def test_what_others_put_in_the_place_of_the_spare_is_not_written_to(path: Path, plant: str) -> None:
    precious = path.with_name("precious")
    precious.write_bytes(b"precious")
    save(path)
    PLANTS[plant](precious, spare_of(path))
    for tensors in (NEW, OLD, NEW):
        save(path, tensors)
    assert precious.read_bytes() == b"precious"


@pytest.mark.skipif(os.geteuid() != 0, reason="not root: files of another user cannot be made")
def test_a_file_of_another_user_is_not_written_to(path: Path) -> None:
    save(path)
    spare_of(path).write_bytes(b"theirs")
    os.chown(spare_of(path), 65534, 65534)
    with open(spare_of(path), "rb") as theirs:
        save(path, NEW)
        assert theirs.read() == b"theirs"


def test_whoever_could_read_the_old_file_does_not_read_the_new_one(path: Path) -> None:
    save(path)
    save(path, NEW)
    with spare_of(path).open("rb") as theirs:
        before = theirs.read()
        path.chmod(0o600)
        save(path)
        theirs.seek(0)
        assert theirs.read() == before
    assert path.stat().st_mode & 0o777 == 0o600


def test_what_cannot_be(path: Path) -> None:
    with pytest.raises(ValueError, match="durable=False"):
        nvme_ops.save(OLD, path, recycle=True, durable=False)
    with pytest.raises(ValueError, match="one file"):
        nvme_ops.save(OLD, path.parent, recycle=True)
    assert not path.exists()


CALLS = ("fchmod", "fdatasync", "flock", "fsync", "ftruncate", "linkat", "openat", "rename", "unlink")


def test_killed_at_any_system_call(path: Path, folder: Path) -> None:
    def traced(*injections: str) -> Outcome:
        try:
            return save_under_strace(lambda: nvme_ops.save(NEW, path, recycle=True), folder, *injections)
        except NoStraceError as error:
            pytest.skip(f"strace cannot trace: {error}")

    def prepare() -> None:
        save(path, NEW)
        save(path, OLD)

    prepare()
    points = [point for point in traced().points() if point[0] in CALLS]
    assert {"flock", "linkat", "rename", "ftruncate"} <= {name for name, _ in points}
    found = set()
    for name, number in points:
        prepare()
        outcome = traced(kill_at(name, number))
        assert outcome.status in (0, -signal.SIGKILL), (name, number, outcome)
        found.add(content(path))
        save(path, NEW)
        save(path, OLD)
        save(path, NEW)
        assert [name for name in beside(path) if name != spare_of(path).name] == []
    assert found == {"old", "new"}


def test_a_spare_that_another_process_exchanges_in_the_last_moment(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was renamed is then a second name of what is saved: writing to the file that is open would save nothing."""
    save(path, NEW)
    save(path, NEW)
    rename, exchanged = os.rename, []

    def exchange_and_rename(source: str, target: str) -> None:
        if source == str(spare_of(path)):
            exchanged.append(source)
            os.unlink(source)
            os.link(path, source)
        rename(source, target)

    monkeypatch.setattr(os, "rename", exchange_and_rename)
    save(path, OLD)
    assert exchanged
    assert set(beside(path)) <= {spare_of(path).name}
