"""Shards in folders of an index, encodings, and tars whose samples cannot be."""

from __future__ import annotations

import io
import json
import os
import struct
import tarfile
from pathlib import Path
from typing import Any

import pytest

from nvme_ops.data import SampleStore
from nvme_ops.errors import FormatError
from nvme_ops.storage.publication import FileState
from tests.data.test_foreign import ENCODINGS, SIZES, mds_bytes, mds_sample, same_mds, shard, write_mds


def test_shards_in_folders_of_a_merged_index(folder: Path) -> None:
    """As ``streaming.base.util.merge_index`` makes one."""
    listed: list[dict[str, Any]] = []
    for number in range(3):
        (folder / str(number)).mkdir()
        samples = [mds_bytes(mds_sample(each)) for each in range(number * 10, number * 10 + 10)]
        listed.append(shard(folder, f"{number}/shard.00000.mds", samples, list(ENCODINGS.values()), SIZES))
    (folder / "index.json").write_text(json.dumps({"shards": listed, "version": 2}))
    store = SampleStore(folder)
    assert len(store) == 30
    assert all(same_mds(found, number) for number, found in enumerate(store.read(range(30))))
    assert same_mds(store[17], 17)


@pytest.mark.parametrize("name", ["../x", "0/../../x", "absolute"])
def test_shards_outside_of_the_folder(folder: Path, name: str) -> None:
    (folder / "mds" / "0").mkdir(parents=True)
    write_mds(folder / "mds", 20)
    outside = (folder / "mds" / "shard.00000.mds").rename(folder / "x")
    listed = json.loads((folder / "mds" / "index.json").read_text())
    listed["shards"][0]["raw_data"]["basename"] = str(outside) if name == "absolute" else name
    (folder / "mds" / "index.json").write_text(json.dumps(listed))
    with pytest.raises(FormatError, match="is not in the folder"):
        SampleStore(folder / "mds")


@pytest.mark.parametrize("sizes", [["8"], [-8], [8.0]])
def test_sizes_of_columns_that_cannot_be(folder: Path, sizes: Any) -> None:
    listed = shard(folder, "one.mds", [struct.pack("<q", 5)], ["int"], sizes)
    (folder / "index.json").write_text(json.dumps({"shards": [listed]}))
    with pytest.raises(FormatError, match="the columns are damaged"):
        SampleStore(folder)


@pytest.mark.parametrize("names", [("a.jpg", "a.jpg"), ("a.jpg", "a.JPG")])
def test_two_files_of_one_extension_in_a_sample(folder: Path, names: tuple[str, str]) -> None:
    with tarfile.open(folder / "x.tar", "w") as tar:
        for name in (*names, "b.jpg"):
            member = tarfile.TarInfo(name)
            member.size = 5
            tar.addfile(member, io.BytesIO(name.encode()))
    store = SampleStore(folder)
    assert bytes(store[1]["jpg"].tolist()) == b"b.jpg"
    with pytest.raises(FormatError, match="sample 0: 'a' has two files 'jpg'"):
        store[0]


def test_pipes_beside_tars_are_not_waited_for(folder: Path) -> None:
    with tarfile.open(folder / "a.tar", "w") as made:
        made.addfile(tarfile.TarInfo("0.bin"))
    os.mkfifo(folder / "b.tar")
    os.mkfifo(folder / "index.json")
    assert len(SampleStore(folder)) == 1


def test_a_header_of_a_tar_whose_checksum_is_no_number(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tar = folder / "a.tar"
    with tarfile.open(tar, "w") as made:
        member = tarfile.TarInfo("0.bin")
        member.size = 3
        made.addfile(member, io.BytesIO(b"abc"))
    store = SampleStore(folder)
    times = os.stat(tar)
    with open(tar, "r+b") as file:
        file.seek(148)
        file.write(b"9")  # no octal digit
    os.utime(tar, ns=(times.st_atime_ns, times.st_mtime_ns))
    monkeypatch.setattr(FileState, "holds", lambda *_: True)  # as where the device did it: nothing else tells
    with pytest.raises(FormatError, match="not part of a tar"):
        store[0]
    store.close()
