"""A store appears whole or not at all, and nothing of a writer stays that failed, was dropped, killed or replaced."""

from __future__ import annotations

import itertools
import json
import os
import resource
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from nvme_ops.base.errors import FormatError
from nvme_ops.data import SampleStore, SampleWriter, writer
from nvme_ops.data.columns import Columns
from nvme_ops.data.index import NAME, DataFile, SampleIndex, read_index, write_index
from nvme_ops.filesystem.files import LOCK_SUFFIX
from tests.conftest import MIB, in_child, in_threads, limited
from tests.data.samples import data_files


def names(folder: Path) -> list[str]:
    """All files but the lock of the index, which whoever holds it next removes."""
    return sorted(path.name for path in folder.rglob("*") if path.is_file() and not path.name.endswith(LOCK_SUFFIX))


def make(folders: Path | list[Path], count: int = 5, **more: Any) -> None:
    with SampleWriter(folders, shard_bytes=1000, **more) as made:
        made.extend([b"x" * 999] * count)


def has(folder: Path, count: int) -> bool:
    """Whether the store has so many samples, and all can be read."""
    with SampleStore(folder, verify=True) as store:
        return len(store.read(range(len(store)))) == count


# What is added


def test_threads_that_share_a_writer(folder: Path) -> None:
    numbers: list[list[int]] = [[] for _ in range(4)]
    with SampleWriter(folder, {"value": torch.int64, "text": bytes}, shard_bytes="4K") as made:

        def work(thread: int) -> None:
            for k in range(60):
                if k == 30:  # which adds nothing
                    with pytest.raises(TypeError, match="column 'value'"):
                        made.add({"value": 0.5, "text": b"a"})
                numbers[thread].append(made.add({"value": thread * 60 + k, "text": bytes([thread]) * (1 + k)}))

        in_threads(work, 4)
    assert sorted(itertools.chain(*numbers)) == list(range(240))
    for thread, mine in enumerate(numbers):
        for k, sample in enumerate(SampleStore(folder, verify=True).read(mine)):
            assert (int(sample["value"]), sample["text"].tolist()) == (thread * 60 + k, [thread] * (1 + k))


def test_records_begin_on_pages_where_that_costs_little(folder: Path) -> None:
    rows: list[tuple[Any, list[int], int]] = [
        ((torch.uint8, (4000,)), [4000], 4096), ((torch.uint8, (0,)), [0], 8), (None, [0] + [100] * 1000, 8),
        (None, [70000] + [100] * 1000, 8), (None, [100_000 + 1000 * number for number in range(40)], 4096),
    ]  # fmt: skip
    for number, (columns, sizes, alignment) in enumerate(rows):
        with SampleWriter(folder / str(number), columns) as made:
            for place, size in enumerate(sizes):
                buffer = bytearray([place % 256]) * size
                assert made.add(buffer) == place == len(made) - 1
                buffer[:] = bytes(size)  # what was added is not changed any more
        store = SampleStore(folder / str(number), verify=True)
        assert store.index.alignment == alignment
        assert store.nbytes < sum(sizes) * 17 / 16 + 8 * len(sizes) + 3 * 4096
        for place, record in enumerate(store.read(range(len(sizes)))):
            assert record.tolist() == [place % 256] * sizes[place]


def test_wrong_arguments(folder: Path) -> None:
    for wrong in ({"alignment": 3}, {"alignment": 8192}, {"shard_bytes": 0}, {"shard_bytes": "-1"}):
        with pytest.raises(ValueError, match=f"{next(iter(wrong))}|size"):
            SampleWriter(folder, **wrong)
    for folders in ([], [folder, folder / ".." / folder.name]):
        with pytest.raises(ValueError, match="at least one folder, and none twice"):
            SampleWriter(folders)
    assert names(folder) == []


# The end


@pytest.mark.parametrize("end", ["dropped", "a full disk", "an index that cannot be written"])
def test_what_is_not_completed_leaves_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch, end: str) -> None:
    made: Any = SampleWriter([folder, folder / "two"], shard_bytes=100)
    made.extend([b"x" * 90] * 5)
    assert data_files(folder / "two")
    with pytest.raises(FormatError, match="has no samples"):
        SampleStore(folder)
    if end == "dropped":
        with pytest.warns(RuntimeWarning, match=r"without close\(\): its 5 samples are not kept"):
            del made
    elif end == "a full disk":
        with limited(resource.RLIMIT_FSIZE, 8 * MIB), pytest.raises(OSError, match="too large"):
            made.extend([bytes(9 * MIB)] * 2)
        with pytest.raises(ValueError, match="writing failed before"):
            made.close()
        made.abort()
    else:
        monkeypatch.setattr(writer, "write_index", lambda *_: os.stat(folder / "nothing"))
        with pytest.raises(FileNotFoundError):
            made.close()
    assert names(folder) == []


def test_a_forked_child_takes_nothing_along(folder: Path) -> None:
    made = SampleWriter(folder, alignment=8)  # which writes at once
    made.add(b"a" * 100)

    def body() -> None:
        with pytest.raises(RuntimeError, match="the parent's"):
            made.add(b"x")
        for end in (made.abort, made._at_exit, made.__del__):
            end()

    in_child(body)
    made.add(b"b")
    made.close()
    assert has(folder, 2)


# Other stores


def test_a_store_is_replaced_only_when_asked(folder: Path) -> None:
    one, other, third = SampleWriter(folder), SampleWriter(folder), SampleWriter(folder, overwrite=True)
    one.add(b"one")
    third.extend([b"third"] * 5)
    one.close()
    for do in (other.close, lambda: SampleWriter(folder)):
        with pytest.raises(FileExistsError, match="has a sample store already: overwrite=True"):
            do()
    before = SampleStore(folder)
    third.close()
    assert [bytes(sample.tolist()) for sample in SampleStore(folder, verify=True).read(range(5))] == [b"third"] * 5
    assert len(names(folder)) == 2
    assert bytes(before[0].tolist()) == b"one"


def test_replacing_a_copy_or_links_leaves_the_original(folder: Path) -> None:
    with SampleWriter([folder / "one", folder / "two"], shard_bytes=1000) as made:
        made.extend([b"x" * 999] * 5)
        shutil.copytree(folder / "one", folder / "early")  # while it is written
    shutil.copytree(folder / "one", folder / "copy")
    (folder / "links").mkdir()
    for name in names(folder / "one"):
        (folder / "links" / name).symlink_to(folder / "one" / name)
    for name in ("early", "copy", "links"):
        make(folder / name, 2, overwrite=True)
        assert len(data_files(folder / name)) == 2
    assert has(folder / "one", 5)
    make([folder / "one", folder / "two"], overwrite=True)
    assert len(data_files(folder / "two")) == 2, "its own are replaced in all folders"


def test_an_index_that_names_other_files_has_none_of_them_removed(folder: Path) -> None:
    (folder / "store").mkdir()
    (folder / "mine").touch()
    index = SampleIndex("ab" * 8, "native", 0, [DataFile("../mine", 0, 0)], columns=Columns().as_json())
    write_index(str(folder / "store" / NAME), index)
    make(folder / "store", overwrite=True)
    assert (folder / "mine").exists()


@pytest.mark.parametrize("written", [False, True])
def test_what_a_killed_writer_leaves_the_next_one_removes(folder: Path, written: bool) -> None:
    folders = [folder / "one", folder / "two"]

    def die(path: str, index: SampleIndex) -> None:
        if written:
            write_index(path, index)
        os._exit(0)

    def body() -> None:
        writer.write_index = die  # type: ignore[attr-defined]
        make(folders, 7, overwrite=True)

    make(folders)
    in_child(body)
    assert len(names(folder)) == 5 + 7 + 1 + 2, "the data of both, and claims"
    count = 7 if written else 5
    assert has(folders[0], count)
    content = (folders[0] / NAME).read_bytes()
    (folders[0] / NAME).write_bytes(b"damaged")
    before = names(folder)
    SampleWriter(folders[0], overwrite=True).abort()
    assert set(before) <= set(names(folder)), "the damaged index may name any of them"
    (folders[0] / NAME).write_bytes(content)
    SampleWriter(folders[0], overwrite=True).abort()
    assert len(names(folder)) == count + 1
    assert has(folders[0], count)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_a_claim_of_another_user_or_with_other_names_removes_nothing(folder: Path) -> None:
    for name in ("victim", "store"):
        make(folder / name)
    planted = folder / "store" / f".samples-{read_index(str(folder / 'victim' / NAME)).id}.nvme_ops-claim"
    words = {"index": str(folder / "store" / NAME), "folders": [str(folder / "victim")]}
    planted.write_text(json.dumps(words))
    os.chown(planted, 12345, 12345)
    (folder / "store" / ".samples-..%2f.nvme_ops-claim").write_text("{}")
    make(folder / "store", overwrite=True)
    assert has(folder / "victim", 5)
    for damaged in ("{", '{"folders": 3}'):
        planted.write_text(damaged)
        os.chown(planted, 0, 0)
        SampleWriter(folder / "store", overwrite=True).abort()
        assert not planted.exists()
