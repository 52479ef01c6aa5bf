"""Damaged, missing and replaced files, full disks and killed writers: the right samples or a clear error."""

from __future__ import annotations

import errno
import itertools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from nvme_ops.data import SampleStore, SampleWriter, files
from nvme_ops.data.index import NAME, DataFile, SampleIndex, read_index, write_index
from nvme_ops.errors import ChecksumError, FormatError
from tests.conftest import MIB, give_up_root, in_child, open_to_all
from tests.data.samples import data_files, fixed, is_sample, sample, write, write_fixed


def patch(path: Path, offset: int, content: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(content)


def test_a_data_file_that_was_cut_off(folder: Path) -> None:
    write(folder / "store")
    victim = data_files(folder / "store")[1]
    os.truncate(victim, victim.stat().st_size - 4096)
    with pytest.raises(FormatError, match=f"{victim.name}: has .* it was cut off or replaced"):
        SampleStore(folder / "store")


def test_a_data_file_that_is_cut_off_while_the_store_is_open(folder: Path) -> None:
    write_fixed(folder / "store", 100, 4096, shard_bytes="1M")
    store = SampleStore(folder / "store")
    (victim,) = data_files(folder / "store")
    os.truncate(victim, 40_000)
    with pytest.raises(EOFError, match=victim.name):
        store.read([5, 50])
    with pytest.raises(FormatError, match="was cut off"):
        store[5]


def test_a_missing_data_file(folder: Path) -> None:
    write(folder / "store")
    data_files(folder / "store")[0].unlink()
    with pytest.raises(FileNotFoundError):
        SampleStore(folder / "store")


def test_data_of_another_store(folder: Path) -> None:
    write_fixed(folder / "one", 20)
    write_fixed(folder / "two", 20)
    ours, theirs = data_files(folder / "one")[0], data_files(folder / "two")[0]
    ours.write_bytes(theirs.read_bytes())
    with pytest.raises(FormatError, match="belongs to another store"):
        SampleStore(folder / "one")


def test_a_data_file_that_is_replaced_under_an_open_store(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_fixed(folder / "store", 64)
    store = SampleStore(folder / "store")
    write_fixed(folder / "store", 62, overwrite=True)
    assert all(torch.equal(store[number], fixed(number)) for number in (0, 40, 63)), "what was opened stays"
    monkeypatch.setattr(files, "_MOST", 1)
    monkeypatch.setattr(files, "_LEAST", 1)
    second = SampleStore(folder / "store")
    for path in data_files(folder / "store"):
        content = path.read_bytes()
        path.unlink()
        path.write_bytes(content)
    with pytest.raises(FormatError, match="was replaced or changed while the store was open"):
        second.read(range(62))


def test_a_folder_that_is_emptied_while_it_is_read(folder: Path) -> None:
    write(folder / "store")
    store = SampleStore(folder / "store")
    for path in (folder / "store").iterdir():
        path.unlink()
    assert all(is_sample(found, number) for number, found in enumerate(store.read(range(100))))
    with pytest.raises(FormatError, match=f"has no samples: no {NAME}"):
        SampleStore(folder / "store")
    with pytest.raises(FileNotFoundError):
        SampleStore(folder / "nothing")


def test_a_flipped_bit(folder: Path) -> None:
    write_fixed(folder / "store", 64)
    victim = data_files(folder / "store")[1]
    patch(victim, 4096 * 3 + 17, b"\xff" if victim.read_bytes()[4096 * 3 + 17] != 255 else b"\0")
    number = SampleStore(folder / "store").index.files[1].first + 3
    store = SampleStore(folder / "store", verify=True)
    with pytest.raises(ChecksumError, match=f"'sample {number}'") as caught:
        store.read(range(64))
    assert caught.value.filename == str(victim)
    assert torch.equal(store[number - 1], fixed(number - 1))


@pytest.mark.parametrize(
    ("offset", "words"), [(0, "not the index"), (8, "version"), (30, "damaged"), (16, "damaged"), (-5000, "damaged")]
)
def test_a_damaged_index(folder: Path, offset: int, words: str) -> None:
    write(folder / "store", 2000 if offset < 0 else 10)
    path = folder / "store" / NAME
    place = offset % path.stat().st_size
    patch(path, place, bytes([path.read_bytes()[place] ^ 0x55]))
    with pytest.raises(FormatError, match=words):
        SampleStore(folder / "store", verify=True)


@pytest.mark.parametrize("left", [0, 10, 100, 4096, 5000])
def test_an_index_that_was_cut_off(folder: Path, left: int) -> None:
    write(folder / "store", 2000)
    os.truncate(folder / "store" / NAME, left)
    with pytest.raises(FormatError):
        SampleStore(folder / "store")


Change = Callable[[SampleIndex], Any]


def _lie(index: SampleIndex, place: int, value: int) -> None:
    assert index.ends is not None
    index.ends[place] = value


@pytest.mark.parametrize(
    "change",
    [
        lambda index: _lie(index, 5, 10**15),
        lambda index: _lie(index, 5, -7),
        lambda index: _lie(index, 4, int(index.ends[5]) + 100_000),
        lambda index: _lie(index, 5, 0),
    ],
)
def test_an_index_that_lies(folder: Path, change: Change) -> None:
    """By a defect of whoever wrote it: its own checksum is right."""
    write(folder / "store")
    path = str(folder / "store" / NAME)
    index = read_index(path, ("ends", "checksums"))
    change(index)
    write_index(path, index)
    store = SampleStore(folder / "store")
    with pytest.raises(FormatError, match=r"the index is wrong: record \d+ cannot lie"):
        store.read(range(20))


def test_an_index_with_impossible_files(folder: Path) -> None:
    write(folder / "store")
    path = str(folder / "store" / NAME)
    index = read_index(path)
    index.files.reverse()
    write_index(path, index)
    with pytest.raises(FormatError, match="files in no possible order"):
        SampleStore(folder / "store")
    with pytest.raises(FormatError, match="no possible order"):
        SampleIndex("", "native", 3, [DataFile("x", 1, 5)])


def test_a_plausible_lie_is_found_by_the_checksums(folder: Path) -> None:
    write(folder / "store", 20)
    path = str(folder / "store" / NAME)
    index = read_index(path, ("ends", "checksums"))
    _lie(index, 5, int(index.ends[5]) - 8)  # type: ignore[index]
    write_index(path, index)
    with pytest.raises((ChecksumError, FormatError)):
        SampleStore(folder / "store", verify=True).read(range(20))


# Writing


def test_nothing_is_there_until_the_end(folder: Path) -> None:
    with SampleWriter(folder, shard_bytes=100) as writer:
        writer.extend([b"x" * 90] * 5)
        assert not (folder / NAME).exists()
        with pytest.raises(FormatError, match="has no samples"):
            SampleStore(folder)
    assert len(SampleStore(folder)) == 5


def test_an_exception_leaves_nothing(folder: Path) -> None:
    def fail() -> None:
        with SampleWriter(folder, shard_bytes=100) as writer:
            writer.extend([b"x" * 90] * 5)
            raise RuntimeError("of the program")

    with pytest.raises(RuntimeError, match="of the program"):
        fail()
    assert list(folder.iterdir()) == []


def test_an_index_that_cannot_be_written_leaves_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    (folder / "two").mkdir()
    writer = SampleWriter([folder, folder / "two"], shard_bytes=100)
    writer.extend([b"x" * 90] * 5)
    monkeypatch.setattr("nvme_ops.data.writer.write_index", fail)
    with pytest.raises(OSError, match="No space left"):
        writer.close()
    assert [path.name for path in folder.rglob("*")] == ["two"]


def test_a_writer_that_is_dropped(folder: Path) -> None:
    writer = SampleWriter(folder)
    writer.add(b"abc")
    with pytest.warns(RuntimeWarning, match=r"without close\(\): its 1 samples are not kept"):
        del writer
    assert list(folder.iterdir()) == []


def test_a_store_is_not_replaced_by_mistake(folder: Path) -> None:
    write(folder / "store", 10)
    with pytest.raises(FileExistsError, match="has a sample store already: overwrite=True"):
        SampleWriter(folder / "store")
    before = data_files(folder / "store")
    with SampleWriter(folder / "store", overwrite=True) as writer:
        writer.add(b"new")
    assert bytes(SampleStore(folder / "store")[0].tolist()) == b"new"
    assert not set(before) & set(data_files(folder / "store"))


def test_a_store_over_the_same_folders_the_other_way_round_survives(folder: Path) -> None:
    one, two = folder / "one", folder / "two"
    write([one, two], 50)
    write([two, one], 50)
    write([one, two], 60, overwrite=True)
    assert is_sample(SampleStore(two, verify=True)[49], 49)
    assert is_sample(SampleStore(one, verify=True)[59], 59)
    assert len(SampleStore(two)) == 50


def _fill(folder: Path) -> None:
    with SampleWriter(folder, shard_bytes="4M") as writer:
        writer.extend(itertools.repeat(bytes(1 << 20), 10_000))


def test_after_a_failure_nothing_more_is_taken(make_file_system: Callable[..., Path]) -> None:
    writer = SampleWriter(make_file_system(64 * MIB), shard_bytes="4M")
    with pytest.raises(OSError, match="No space left"):
        writer.extend(itertools.repeat(bytes(1 << 20), 10_000))
    with pytest.raises(ValueError, match="writing failed before"):
        writer.add(b"abc")
    with pytest.raises(ValueError, match="writing failed before"):
        writer.close()
    writer.abort()


def test_a_sample_that_does_not_fit_its_columns_adds_nothing(folder: Path) -> None:
    with SampleWriter(folder, {"x": torch.int8, "y": bytes}) as writer:
        assert writer.add({"x": 1, "y": b"a"}) == 0
        with pytest.raises(ValueError, match="does not fit"):
            writer.add({"x": 1000, "y": b"a"})
        assert writer.add({"x": 2, "y": b"b"}) == 1
    assert [int(each["x"]) for each in SampleStore(folder, verify=True).read([0, 1])] == [1, 2]


@pytest.mark.parametrize(
    "more", [{"alignment": 3}, {"alignment": 8192}, {"shard_bytes": 0}, {"shard_bytes": "-1"}, {"columns": {}}]
)
def test_wrong_arguments(folder: Path, more: dict[str, Any]) -> None:
    with pytest.raises(ValueError):  # noqa: PT011  (several messages)
        SampleWriter(folder, **more)
    assert list(folder.iterdir()) == []


def test_folders_that_cannot_be(folder: Path) -> None:
    (folder / "file").touch()
    with pytest.raises(NotADirectoryError):
        SampleWriter(folder / "file")
    with pytest.raises(FileNotFoundError):
        SampleWriter([folder, folder / "nothing" / "below"])
    with pytest.raises(ValueError, match="none twice"):
        SampleWriter([folder, folder])
    with pytest.raises(ValueError, match="at least one"):
        SampleWriter([])


def test_a_forked_child_does_not_write_to_its_parents_store(folder: Path) -> None:
    writer = SampleWriter(folder)
    writer.add(b"abc")

    def child() -> None:
        with pytest.raises(RuntimeError, match="the parent's"):
            writer.add(b"x")
        writer.abort()

    in_child(child)
    writer.add(b"def")
    writer.close()
    assert len(SampleStore(folder, verify=True)) == 2
    with pytest.raises(ValueError, match="the writer is closed"):
        writer.add(b"x")


def test_two_writers_in_one_folder(folder: Path) -> None:
    """The last one to be closed has its way, whole."""
    first, second = SampleWriter(folder), SampleWriter(folder, overwrite=True)
    first.extend([b"first"] * 10)
    second.extend([b"second"] * 5)
    first.close()
    second.close()
    store = SampleStore(folder, verify=True)
    assert [bytes(found.tolist()) for found in store.read(range(5))] == [b"second"] * 5
    assert len(store) == 5
    assert len(data_files(folder)) == 1


def test_another_user(folder: Path) -> None:
    write(folder / "store", 10)
    store = folder / "store"
    open_to_all(store)
    store.chmod(0o755)

    def child() -> None:
        give_up_root()
        if os.geteuid() == 0:
            return
        assert is_sample(SampleStore(store)[3], 3), "may read"
        with pytest.raises(PermissionError):
            _one(store)

    in_child(child)
    for path in data_files(store):
        path.chmod(0o600)

    def shut_out() -> None:
        give_up_root()
        if os.geteuid() != 0:
            with pytest.raises(PermissionError):
                SampleStore(store)

    in_child(shut_out)
    assert is_sample(SampleStore(store)[3], 3)


def _one(folder: Path) -> None:
    with SampleWriter(folder, overwrite=True) as writer:
        writer.add(b"abc")


def test_a_link_in_place_of_a_data_file(folder: Path) -> None:
    write(folder / "store", 10)
    (victim,) = data_files(folder / "store")
    os.mkfifo(folder / "pipe")
    victim.unlink()
    victim.symlink_to(folder / "pipe")
    with pytest.raises((OSError, FormatError)):
        SampleStore(folder / "store")


def test_reading_fails(folder: Path) -> None:
    """A record's number, file and errno are in the message."""
    write(folder / "store", 30)
    store = SampleStore(folder / "store")
    for path in data_files(folder / "store"):
        os.truncate(path, 0)
    with pytest.raises(EOFError, match="samples-"):
        store.read([29])
    assert sample(0)["label"] == 0
