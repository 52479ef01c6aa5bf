"""Data files that no index names: of writers that were killed, raced, forked, or that replace a store."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from nvme_ops.data import SampleStore, SampleWriter, claim, writer
from nvme_ops.data.index import NAME, DataFile, SampleIndex, read_index, write_index
from nvme_ops.storage import locks
from tests.conftest import REPOSITORY, forked, in_child
from tests.data.samples import data_files


def names(folder: Path) -> list[str]:
    """All files but the lock of the index, which whoever holds it next removes."""
    return sorted(path.name for path in folder.rglob("*") if path.is_file() and not path.name.endswith(locks.SUFFIX))


def make(folders: Path | list[Path], count: int = 5, **more: Any) -> None:
    for folder in folders if isinstance(folders, list) else [folders]:
        folder.mkdir(exist_ok=True)
    with SampleWriter(folders, shard_bytes=1000, **more) as made:
        made.extend([b"x" * 999] * count)


@pytest.mark.parametrize("end", ["sys.exit(0)", "del made; gc.collect(); os._exit(0)"])
def test_a_forked_child_that_ends_takes_nothing_along(folder: Path, end: str) -> None:
    program = f"""
import gc, os, sys
from nvme_ops.data import SampleWriter
with SampleWriter({str(folder)!r}) as made:
    made.add(b"a" * 100)
    child = os.fork()
    if child == 0:
        {end}
    assert os.waitpid(child, 0)[1] == 0
"""
    subprocess.run([sys.executable, "-c", program], check=True, cwd=REPOSITORY)
    with SampleStore(folder, verify=True) as store:
        assert len(store) == len(store[0]) // 100 == 1


def test_of_two_writers_the_second_does_not_replace_the_first_unasked(folder: Path) -> None:
    one, other = SampleWriter(folder), SampleWriter(folder)
    one.add(b"one")
    one.close()
    other.add(b"other")
    with pytest.raises(FileExistsError, match="overwrite=True"):
        other.close()
    assert bytes(SampleStore(folder)[0].tolist()) == b"one"
    assert len(names(folder)) == 2


def test_replacing_a_copy_leaves_the_original(folder: Path) -> None:
    make([folder / "one", folder / "two"])
    shutil.copytree(folder / "one", folder / "copy")
    make(folder / "copy", overwrite=True)
    assert len(SampleStore(folder / "one", verify=True).read(range(5))) == 5
    assert len(data_files(folder / "copy")) == 5
    make([folder / "one", folder / "two"], overwrite=True)
    assert len(data_files(folder / "two")) == 2, "its own are replaced in all folders"


def test_replacing_a_store_of_links_leaves_what_they_point_to(folder: Path) -> None:
    make(folder / "one")
    (folder / "links").mkdir()
    for name in names(folder / "one"):
        (folder / "links" / name).symlink_to(folder / "one" / name)
    make(folder / "links", 1, overwrite=True)
    assert len(SampleStore(folder / "one", verify=True).read(range(5))) == 5
    assert len(SampleStore(folder / "links")) == 1
    assert len(names(folder / "links")) == 2


def test_an_index_that_names_other_files_has_none_of_them_removed(folder: Path) -> None:
    (folder / "store").mkdir()
    (folder / "mine.txt").write_text("mine")
    write_index(
        str(folder / "store" / NAME), SampleIndex("ab" * 8, "native", 0, [DataFile("../mine.txt", 4, 0)], columns=[])
    )
    make(folder / "store", overwrite=True)
    assert (folder / "mine.txt").read_text() == "mine"


def _killed_while_closing(folders: list[Path], *, written: bool) -> None:
    def body() -> None:
        def die(path: str, index: SampleIndex, durable: bool = True) -> None:
            if written:
                write_index(path, index, durable)
            os._exit(0)

        writer.write_index = die  # type: ignore[attr-defined]
        make(folders, 7, overwrite=True)

    in_child(body)


def test_what_a_writer_leaves_that_is_killed_before_its_index_is_there(folder: Path) -> None:
    folders = [folder / "one", folder / "two"]
    make(folders)
    before = names(folder)
    _killed_while_closing(folders, written=False)
    assert len(names(folder)) > len(before)
    assert len(SampleStore(folders[0], verify=True).read(range(5))) == 5
    SampleWriter(folders[0], overwrite=True).abort()
    assert names(folder) == before


def test_what_a_writer_leaves_that_is_killed_before_it_has_removed_the_old_store(folder: Path) -> None:
    folders = [folder / "one", folder / "two"]
    make(folders)
    _killed_while_closing(folders, written=True)
    assert len(names(folder)) == 5 + 7 + 1 + 2, "two claims"
    assert len(SampleStore(folders[0], verify=True).read(range(7))) == 7
    SampleWriter(folders[0], overwrite=True).abort()
    assert len(names(folder)) == 7 + 1
    assert len(SampleStore(folders[0], verify=True).read(range(7))) == 7


def test_a_claim_of_another_user_or_with_other_names_removes_nothing(folder: Path) -> None:
    make(folder / "victim")
    (folder / "store").mkdir()
    store = read_index(str(folder / "victim" / NAME)).id
    planted = folder / "store" / f".samples-{store}.nvme_ops-claim"
    planted.write_text(json.dumps({"folders": [str(folder / "victim")]}))
    os.chown(planted, 12345, 12345)
    (folder / "store" / ".samples-..%2f.nvme_ops-claim").write_text("{}")
    make(folder / "store")
    assert len(SampleStore(folder / "victim", verify=True).read(range(5))) == 5
    for damaged in ("", "{", "[]", '{"folders": 3}'):
        planted.write_text(damaged)
        os.chown(planted, 0, 0)
        claim.settle_abandoned(str(folder / "store" / NAME))
        assert not planted.exists()


def test_while_the_index_cannot_be_read_nothing_is_removed(folder: Path) -> None:
    make(folder)
    _killed_while_closing([folder], written=True)
    content = (folder / NAME).read_bytes()
    (folder / NAME).write_bytes(b"damaged")
    before = names(folder)
    claim.settle_abandoned(str(folder / NAME))
    assert names(folder) == before
    (folder / NAME).write_bytes(content)
    claim.settle_abandoned(str(folder / NAME))
    assert len(names(folder)) == 8


def test_more_files_than_a_process_may_have_open(folder: Path) -> None:
    def body() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
        with SampleWriter(folder, shard_bytes=1) as made:
            made.extend([b"x" * 100] * 100)

    in_child(body)
    assert len(data_files(folder)) == 100


def test_a_copy_of_a_folder_that_is_being_written_to_does_not_touch_the_original(folder: Path) -> None:
    (folder / "one").mkdir()
    with SampleWriter(folder / "one", shard_bytes=1000) as made:
        made.extend([b"x" * 999] * 5)
        shutil.copytree(folder / "one", folder / "copy")
    assert len(data_files(folder / "copy")) >= 4
    make(folder / "copy", 2)
    assert len(SampleStore(folder / "one", verify=True).read(range(5))) == 5
    assert len(data_files(folder / "copy")) == 2


def test_writers_that_begin_together(folder: Path) -> None:
    def write_one(number: int) -> None:
        for _ in range(10):
            with contextlib.suppress(FileExistsError):
                make(folder / "store", number + 1, overwrite=True)

    (folder / "store").mkdir()
    with forked(4, write_one):
        pass
    with SampleStore(folder / "store", verify=True) as store:
        assert len(store.read(range(len(store)))) == len(store)
        assert len(names(folder)) == len(store) + 1
