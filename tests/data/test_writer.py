"""A store appears whole or not at all, and nothing of a writer stays that failed, was dropped, killed or replaced."""

from __future__ import annotations

import errno
import itertools
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from nvme_ops.data import SampleStore, SampleWriter, writer
from nvme_ops.data.columns import Columns
from nvme_ops.data.index import NAME, DataFile, SampleIndex, read_index, write_index
from nvme_ops.errors import FormatError
from nvme_ops.storage.files import LOCK_SUFFIX
from tests.conftest import MIB, in_child, in_threads, run_python
from tests.data.samples import data_files

THREADS, EACH = 4, 300


def names(folder: Path) -> list[str]:
    """All files but the lock of the index, which whoever holds it next removes."""
    return sorted(path.name for path in folder.rglob("*") if path.is_file() and not path.name.endswith(LOCK_SUFFIX))


def make(folders: Path | list[Path], count: int = 5, **more: Any) -> None:
    for folder in folders if isinstance(folders, list) else [folders]:
        folder.mkdir(exist_ok=True)
    with SampleWriter(folders, shard_bytes=1000, **more) as made:
        made.extend([b"x" * 999] * count)


def has(folder: Path, count: int) -> bool:
    """Whether the store has so many samples, and all can be read."""
    with SampleStore(folder, verify=True) as store:
        return len(store.read(range(len(store)))) == count


# What is added


def test_threads_that_share_a_writer(folder: Path) -> None:
    numbers: list[list[int]] = [[] for _ in range(THREADS)]
    with SampleWriter(folder, {"value": torch.int64, "text": bytes}, shard_bytes="64K") as made:

        def work(thread: int) -> None:
            for k in range(EACH):
                numbers[thread].append(made.add({"value": thread * EACH + k, "text": bytes([thread]) * (1 + k)}))

        in_threads(work, THREADS)
    assert sorted(itertools.chain(*numbers)) == list(range(THREADS * EACH))
    store = SampleStore(folder, verify=True)
    for thread, mine in enumerate(numbers):
        for k, found in enumerate(store.read(mine)):
            assert int(found["value"]) == thread * EACH + k
            assert found["text"].tolist() == [thread] * (1 + k)


@pytest.mark.parametrize(
    ("columns", "sizes", "alignment"),
    [((torch.uint8, (size,)), [size], alignment)
     for size, alignment in ((4096, 4096), (4000, 4096), (100, 8), (0, 8), (65536 + 100, 4096))]
    + [(None, [first] + [100] * 1000, 8) for first in (0, 1, 4000, 70000)]
    + [(None, [100_000 + 1000 * (number % 50) for number in range(40)], 4096)],
)  # fmt: skip
def test_records_begin_on_pages_where_that_costs_little(
    folder: Path, columns: Any, sizes: list[int], alignment: int
) -> None:
    with SampleWriter(folder, columns) as made:
        for number, size in enumerate(sizes):
            buffer = bytearray([number % 256]) * size
            assert made.add(buffer) == number
            assert len(made) == number + 1
            buffer[:] = bytes(size)  # what was added is not changed any more
    store = SampleStore(folder, verify=True)
    assert store.index.alignment == alignment
    assert store.nbytes < sum(sizes) * 17 / 16 + 8 * len(sizes) + 3 * 4096
    for number, found in enumerate(store.read(range(len(sizes)))):
        assert found.tolist() == [number % 256] * sizes[number]


def test_a_sample_that_does_not_fit_its_columns_adds_nothing(folder: Path) -> None:
    with SampleWriter(folder, {"x": torch.int8, "y": bytes}) as made:
        assert made.add({"x": 1, "y": b"a"}) == 0
        with pytest.raises(ValueError, match="does not fit"):
            made.add({"x": 1000, "y": b"a"})
        assert made.add({"x": 2, "y": b"b"}) == 1
    assert [int(each["x"]) for each in SampleStore(folder, verify=True).read([0, 1])] == [1, 2]


@pytest.mark.parametrize(
    ("folders", "more", "error"),
    [
        ("", {"alignment": 3}, ValueError), ("", {"alignment": 8192}, ValueError), ("", {"shard_bytes": 0}, ValueError),
        ("", {"shard_bytes": "-1"}, ValueError), ("", {"columns": {}}, ValueError), (["", ""], {}, ValueError),
        ([], {}, ValueError), ("file", {}, NotADirectoryError), (["", "nothing/below"], {}, FileNotFoundError),
    ],
)  # fmt: skip
def test_wrong_arguments(folder: Path, folders: Any, more: dict[str, Any], error: type[Exception]) -> None:
    (folder / "file").touch()
    with pytest.raises(error):
        SampleWriter([folder / each for each in folders] if isinstance(folders, list) else folder / folders, **more)
    assert names(folder) == ["file"]


# The end


@pytest.mark.parametrize("end", ["an exception", "an index that cannot be written", "dropped"])
def test_what_is_not_completed_leaves_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch, end: str) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    (folder / "two").mkdir()
    made: Any = SampleWriter([folder, folder / "two"], shard_bytes=100)
    made.extend([b"x" * 90] * 5)
    assert data_files(folder / "two")
    with pytest.raises(FormatError, match="has no samples"):
        SampleStore(folder)
    if end == "dropped":
        with pytest.warns(RuntimeWarning, match=r"without close\(\): its 5 samples are not kept"):
            del made
    elif end == "an exception":
        with pytest.raises(RuntimeError, match="of the program"), made:
            raise RuntimeError("of the program")
    else:
        monkeypatch.setattr(writer, "write_index", fail)
        with pytest.raises(OSError, match="No space left"):
            made.close()
    assert names(folder) == []


def test_after_a_failure_nothing_more_is_taken(make_file_system: Callable[..., Path]) -> None:
    made = SampleWriter(make_file_system(32 * MIB), shard_bytes="4M")
    with pytest.raises(OSError, match="No space left"):
        made.extend(itertools.repeat(bytes(1 << 20), 10_000))
    for do in (lambda: made.add(b"abc"), made.close):
        with pytest.raises(ValueError, match="writing failed before"):
            do()
    made.abort()


@pytest.mark.parametrize("end", ["made.abort()", "sys.exit(0)", "del made; gc.collect(); os._exit(0)"])
def test_a_forked_child_takes_nothing_along(folder: Path, end: str) -> None:
    program = f"""
        import gc, os, sys
        from nvme_ops.data import SampleWriter
        def refused(kind, words):
            try:
                made.add(b"x")
            except kind as error:
                return words in str(error)
        made = SampleWriter(sys.argv[1], alignment=8)  # which writes at once
        made.add(b"a" * 100)
        child = os.fork()
        if child == 0:
            assert refused(RuntimeError, "the parent's")
            {end}
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        made.add(b"b")
        made.close()
        assert refused(ValueError, "the writer is closed")
    """
    run_python(program, folder)
    assert has(folder, 2)


# Other stores


def test_a_store_is_replaced_only_when_asked(folder: Path) -> None:
    one, other, third = SampleWriter(folder), SampleWriter(folder), SampleWriter(folder, overwrite=True)
    one.add(b"one")
    third.extend([b"third"] * 5)
    one.close()
    with pytest.raises(FileExistsError, match="overwrite=True"):
        other.close()
    with pytest.raises(FileExistsError, match="has a sample store already: overwrite=True"):
        SampleWriter(folder)
    before = SampleStore(folder)
    assert bytes(before[0].tolist()) == b"one"
    third.close()
    store = SampleStore(folder, verify=True)
    assert [bytes(found.tolist()) for found in store.read(range(5))] == [b"third"] * 5
    assert len(names(folder)) == 2
    assert bytes(before[0].tolist()) == b"one"


def test_replacing_a_copy_or_links_leaves_the_original(folder: Path) -> None:
    make([folder / "one", folder / "two"])
    shutil.copytree(folder / "one", folder / "copy")
    (folder / "links").mkdir()
    for name in names(folder / "one"):
        (folder / "links" / name).symlink_to(folder / "one" / name)
    make(folder / "copy", overwrite=True)
    make(folder / "links", 1, overwrite=True)
    assert has(folder / "one", 5)
    assert len(data_files(folder / "copy")) == 5
    assert len(names(folder / "links")) == 2
    make([folder / "one", folder / "two"], overwrite=True)
    assert len(data_files(folder / "two")) == 2, "its own are replaced in all folders"


def test_a_copy_of_a_folder_that_is_being_written_to_does_not_touch_the_original(folder: Path) -> None:
    (folder / "one").mkdir()
    with SampleWriter(folder / "one", shard_bytes=1000) as made:
        made.extend([b"x" * 999] * 5)
        shutil.copytree(folder / "one", folder / "copy")
    assert len(data_files(folder / "copy")) >= 4
    make(folder / "copy", 2)
    assert has(folder / "one", 5)
    assert len(data_files(folder / "copy")) == 2


def test_an_index_that_names_other_files_has_none_of_them_removed(folder: Path) -> None:
    (folder / "store").mkdir()
    (folder / "mine.txt").write_text("mine")
    index = SampleIndex("ab" * 8, "native", 0, [DataFile("../mine.txt", 4, 0)], columns=Columns().as_json())
    write_index(str(folder / "store" / NAME), index)
    make(folder / "store", overwrite=True)
    assert (folder / "mine.txt").read_text() == "mine"


def killed_while_closing(folders: list[Path], written: bool) -> None:
    def die(path: str, index: SampleIndex) -> None:
        if written:
            write_index(path, index)
        os._exit(0)

    def body() -> None:
        writer.write_index = die  # type: ignore[attr-defined]
        make(folders, 7, overwrite=True)

    in_child(body)


@pytest.mark.parametrize("written", [False, True])
def test_what_a_killed_writer_leaves_the_next_one_removes(folder: Path, written: bool) -> None:
    folders = [folder / "one", folder / "two"]
    make(folders)
    killed_while_closing(folders, written)
    assert len(names(folder)) == 5 + 7 + 1 + 2, "the data of both, and claims"
    assert has(folders[0], 7 if written else 5)
    content = (folders[0] / NAME).read_bytes()
    (folders[0] / NAME).write_bytes(b"damaged")
    before = names(folder)
    SampleWriter(folders[0], overwrite=True).abort()
    assert set(before) <= set(names(folder)), "the damaged index may name any of them"
    (folders[0] / NAME).write_bytes(content)
    SampleWriter(folders[0], overwrite=True).abort()
    assert len(names(folder)) == (7 if written else 5) + 1
    assert has(folders[0], 7 if written else 5)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_a_claim_of_another_user_or_with_other_names_removes_nothing(folder: Path) -> None:
    make(folder / "victim")
    (folder / "store").mkdir()
    store = read_index(str(folder / "victim" / NAME)).id
    planted = folder / "store" / f".samples-{store}.nvme_ops-claim"
    words = {"index": str(folder / "store" / NAME), "folders": [str(folder / "victim")]}
    planted.write_text(json.dumps(words))
    os.chown(planted, 12345, 12345)
    (folder / "store" / ".samples-..%2f.nvme_ops-claim").write_text("{}")
    make(folder / "store")
    assert has(folder / "victim", 5)
    for damaged in ("", "{", "[]", '{"folders": 3}'):
        planted.write_text(damaged)
        os.chown(planted, 0, 0)
        SampleWriter(folder / "store", overwrite=True).abort()
        assert not planted.exists()
