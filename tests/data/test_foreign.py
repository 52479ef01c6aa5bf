"""MDS shards and WebDataset tars, read in place: as their own packages read them, and damaged."""

from __future__ import annotations

import io
import json
import os
import struct
import subprocess
import tarfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nvme_ops.base.errors import FormatError, UnsafeError
from nvme_ops.data import Loader, SampleStore, mds, webdataset
from nvme_ops.data.cli import main
from nvme_ops.filesystem.publication import FileState
from nvme_ops.io.tensors import bytes_of
from tests.conftest import give_up_root, in_child, open_to_all, pattern
from tests.data.samples import add, same_mds, same_tar, shard, tar_sample, write_index, write_mds, write_tar

# MosaicML's shards


@pytest.mark.parametrize("name", ["shard.{:05d}.mds", "{}/shard.00000.mds"])  # as streaming.base.util.merge_index
def test_mds_shards(folder: Path, name: str) -> None:
    for number in range(0, 100, 30):
        (folder / str(number)).mkdir()
    write_mds(folder, name=name)
    store = SampleStore(folder)
    assert len(store) == 100
    assert all(same_mds(sample, number) for number, sample in enumerate(store.read(range(100))))
    assert same_mds(store[-1], 99)
    batches = list(Loader(store, 32, shuffle=True))
    assert sorted(label for batch in batches for label in batch["label"]) == list(range(-50, 50))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"zip_data": {"basename": "x"}, "compression": "zstd", "raw_data": {"basename": "gone"}}, "is compressed"),
        ({"raw_data": {"basename": "../x.mds"}}, "not in the folder"),
        ({"raw_data": {"basename": "/x.mds"}}, "not in the folder"),
        ({"samples": 31}, "does not begin with the places of 31"),
        ({"samples": "many"}, "no index of MDS shards"),
    ],
)
def test_an_index_of_shards_that_cannot_be(folder: Path, change: dict[str, Any], words: str) -> None:
    write_mds(folder)
    listed = json.loads((folder / "index.json").read_text())["shards"]
    listed[0].update(change)
    write_index(folder, listed)
    with pytest.raises(FormatError, match=words):
        SampleStore(folder)


@pytest.mark.parametrize(
    ("encoding", "size", "error", "words"),
    [
        ("pkl", None, UnsafeError, "pickled"),
        ("pil", None, FormatError, "mosaicml-streaming|damaged"),
        ("int", "8", FormatError, "the columns are damaged"),
    ],
)
def test_columns_that_are_not_decoded(folder: Path, encoding: str, size: Any, error: Any, words: str) -> None:
    write_index(folder, [shard(folder, "one.mds", [struct.pack("<q", 4)], [encoding], [size])])
    with pytest.raises(error, match=words):
        SampleStore(folder)[0]


def test_a_damaged_shard(folder: Path) -> None:
    write_mds(folder)
    path = folder / "shard.00000.mds"
    content = path.read_bytes()
    begin = struct.unpack("<I", content[4:8])[0]
    path.write_bytes(content[:begin] + struct.pack("<I", 2**31) + content[begin + 4 :])
    store = SampleStore(folder)
    with pytest.raises(FormatError, match="sample 0: column 'image' does not fit"):
        store[0]
    assert same_mds(store[1], 1)
    path.write_bytes(content[:12] + struct.pack("<I", 2**31) + content[16:])
    with pytest.raises(FormatError, match="places of its samples are damaged"):
        SampleStore(folder)


# The index that is kept


def test_the_index_is_made_once_and_again_when_files_change(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_mds(folder / "mds")
    (folder / "tars").mkdir()
    for number, name in enumerate(("a", "b")):
        write_tar(folder / "tars" / f"{name}.tar", range(number, number + 1))
    places = {"mds": 100, "tars": 2, "tars/a.tar": 1, "tars/b.tar": 1}
    stores = {name: SampleStore(folder / name) for name in places}
    assert same_tar(stores["tars/b.tar"][0], 1)
    with monkeypatch.context() as patch:
        for module in (mds, webdataset):
            patch.setattr(module, "_places", lambda *_: pytest.fail("looked through again"))
        assert {name: len(SampleStore(folder / name)) for name in places} == places
    write_mds(folder / "mds", 40)
    assert all(same_mds(sample, number) for number, sample in enumerate(SampleStore(folder / "mds").read(range(40))))
    (kept,) = (folder / "mds").glob(".*")
    kept.write_bytes(b"damaged")
    assert len(SampleStore(folder / "mds")) == 40


def test_a_folder_that_cannot_be_written(folder: Path) -> None:
    write_mds(folder)
    open_to_all(folder)
    folder.chmod(0o755)

    def child() -> None:
        give_up_root()
        if os.geteuid() != 0:
            with pytest.warns(RuntimeWarning, match="its index cannot be stored"):
                assert len(SampleStore(folder)) == 100

    in_child(child)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        SampleStore(folder)


# WebDataset's tars


@pytest.mark.parametrize(
    ("prefix", "form"),
    [
        ("", tarfile.USTAR_FORMAT), ("a/b.c/", tarfile.GNU_FORMAT), ("long" * 20 + "/", tarfile.USTAR_FORMAT),
        ("long" * 40 + "/", tarfile.GNU_FORMAT), ("long" * 40 + "/", tarfile.PAX_FORMAT), ("grün/", tarfile.PAX_FORMAT),
    ],
)  # fmt: skip
def test_tars(folder: Path, form: int, prefix: str) -> None:
    for number in range(2):
        write_tar(folder / f"{number}.tar", range(number * 10, number * 10 + 10), prefix, form)
    assert all(same_tar(sample, number, prefix) for number, sample in enumerate(SampleStore(folder).read(range(20))))


def test_what_else_is_in_a_tar_or_beside_it(folder: Path) -> None:
    """Folders, links and files without an extension are parts of no sample; nobody waits for a pipe."""
    with tarfile.open(folder / "x.tar", "w") as tar:
        add(tar, "d", kind=tarfile.DIRTYPE)
        add(tar, "README")
        add(tar, "link.jpg", kind=tarfile.SYMTYPE)
        for number in range(3):
            for extension, content in tar_sample(number).items():
                add(tar, f"d/{number:06d}.{extension}", content)
            add(tar, ".hidden")
    os.mkfifo(folder / "y.tar")
    os.mkfifo(folder / "index.json")
    assert len(SampleStore(folder)) == 3
    (folder / "index.json").unlink()
    (folder / "index.json").write_text('{"wids_version": 1, "shardlist": []}')  # of the package wids
    assert all(same_tar(sample, number, "d/") for number, sample in enumerate(SampleStore(folder).read(range(3))))
    for text in ("", "[]", "not json"):
        (folder / "alone").mkdir(exist_ok=True)
        (folder / "alone" / "index.json").write_text(text)
        with pytest.raises(FormatError):
            SampleStore(folder / "alone")


def with_holes(path: Path) -> bytes:
    """Writes a file mostly of holes; returns what it holds."""
    content = bytearray(1 << 20)
    for start in range(0, 12 * 65536, 2 * 65536):  # more parts than a header has room for
        content[start : start + 4096] = bytes(pattern(4096, start).tolist())
    with open(path, "wb") as file:
        for start in range(0, 12 * 65536, 2 * 65536):
            file.seek(start)
            file.write(content[start : start + 4096])
        file.truncate(len(content))
    return bytes(content)


@pytest.mark.skipif("GNU" not in subprocess.getoutput("tar --version"), reason="needs GNU tar")
@pytest.mark.parametrize("form", ["gnu", "pax", "pax --sparse-version=0.1", "pax --sparse-version=0.0"])
def test_files_that_a_tar_holds_without_their_holes(folder: Path, form: str) -> None:
    (folder / "source").mkdir()
    content = with_holes(folder / "source" / "0.npy")
    (folder / "source" / "0.cls").write_text("7")
    (folder / "source" / "1.cls").write_text("8")
    words = f"tar -S --sort=name --format={form} -cf {folder / 'x.tar'} -C {folder / 'source'} .".split()
    subprocess.run(words, check=True)
    assert (folder / "x.tar").stat().st_size < len(content) // 4
    store = SampleStore(folder / "x.tar")
    assert [sorted(sample) for sample in store.read(range(2))] == [["__key__", "cls", "npy"], ["__key__", "cls"]]
    assert bytes_of(store[0]["npy"]) == content
    assert main(["convert", str(folder / "x.tar"), str(folder / "other")]) == 2  # the second has no npy
    (folder / "source" / "1.cls").unlink()
    subprocess.run(words, check=True)
    assert main(["convert", str(folder / "x.tar"), str(folder / "store")]) == 0
    assert bytes_of(SampleStore(folder / "store")[0]["npy"]) == content


@pytest.mark.parametrize("sparse", ["0,9", "-1,2", "5,100", "0,5,3,900"])
def test_a_map_of_holes_that_is_damaged(folder: Path, sparse: str) -> None:
    with tarfile.open(folder / "x.tar", "w", format=tarfile.PAX_FORMAT) as tar:
        member = tarfile.TarInfo("a.bin")
        member.size = 5
        member.pax_headers = {"GNU.sparse.map": sparse, "GNU.sparse.size": "8"}
        tar.addfile(member, io.BytesIO(b"12345"))
    with pytest.raises(FormatError, match=r"map of holes is damaged|not part of a tar"):
        SampleStore(folder / "x.tar")[0]
    (folder / "x.tar").unlink()
    with tarfile.open(folder / "x.tar", "w", format=tarfile.PAX_FORMAT) as tar:
        member.pax_headers = {"GNU.sparse.map": "0,5", "GNU.sparse.size": str(1 << 60)}
        tar.addfile(member, io.BytesIO(b"12345"))
    with pytest.raises(FormatError, match=r"'a\.bin': 1152921504606846976 bytes with its holes"):
        SampleStore(folder / "x.tar")[0]


def test_a_tar_without_its_end_and_one_with_hard_links_say_so(folder: Path) -> None:
    write_tar(folder / "x.tar", range(4))
    content = (folder / "x.tar").read_bytes().rstrip(b"\0")
    (folder / "x.tar").write_bytes(content + bytes(-len(content) % 512))
    with pytest.warns(RuntimeWarning, match=r"x\.tar: was perhaps cut off after its last file"):
        store = SampleStore(folder)
    assert all(same_tar(sample, number) for number, sample in enumerate(store.read(range(4))))
    with tarfile.open(folder / "x.tar", "w") as tar:
        add(tar, "a.jpg", b"bytes")
        member = tarfile.TarInfo("b.jpg")
        member.type, member.linkname = tarfile.LNKTYPE, "a.jpg"
        tar.addfile(member)
        add(tar, "b.cls", b"1")
        add(tar, "c.", b"no extension")
    with pytest.warns(RuntimeWarning, match=r"1 hard links, which are left out .* b\.jpg -> a\.jpg"):
        store = SampleStore(folder)
    assert [sorted(keys) for keys in store.read(range(3))] == [["__key__", "jpg"], ["__key__", "cls"], ["", "__key__"]]


@pytest.mark.parametrize("suffix", ["gz", "bz2", "xz"])
def test_compressed_tars(folder: Path, suffix: str, capsys: pytest.CaptureFixture[str]) -> None:
    for number in range(2):
        write_tar(folder / "plain.tar", range(number * 10, number * 10 + 10))
        mode: Any = f"w:{suffix}"
        with tarfile.open(folder / f"{number}.tar.{suffix}", mode) as tar, tarfile.open(folder / "plain.tar") as plain:
            for member in plain:
                tar.addfile(member, plain.extractfile(member))
    (folder / "plain.tar").unlink()
    (folder / "README").touch()
    for path in (folder, folder / f"0.tar.{suffix}"):
        with pytest.raises(FormatError, match=r"its tars are compressed: nvme-data convert"):
            SampleStore(path)
    assert main(["convert", str(folder), str(folder / "store")]) == 0
    assert "not converted, 1 in" in capsys.readouterr().err
    assert all(same_tar(sample, number) for number, sample in enumerate(SampleStore(folder / "store").read(range(20))))
    assert main(["convert", str(folder / f"1.tar.{suffix}"), str(folder / "one")]) == 0
    assert same_tar(SampleStore(folder / "one")[0], 10)
    content = (folder / f"1.tar.{suffix}").read_bytes()
    (folder / f"1.tar.{suffix}").write_bytes(content[: len(content) // 2])
    assert main(["convert", str(folder), str(folder / "two")]) == 2
    assert "is damaged" in capsys.readouterr().err
    (folder / "x.tar.zst").write_bytes(b"\x28\xb5\x2f\xfd" + bytes(100))
    assert main(["convert", str(folder / "x.tar.zst"), str(folder / "two")]) == 2
    assert "x.tar.zst: cannot be decompressed here" in capsys.readouterr().err


@pytest.mark.parametrize("second", ["a.jpg", "a.JPG"])
def test_two_files_of_one_extension_in_a_sample(folder: Path, second: str) -> None:
    with tarfile.open(folder / "x.tar", "w") as tar:
        for name in ("a.jpg", second, "b.jpg"):
            add(tar, name, name.encode())
    store = SampleStore(folder)
    assert bytes(store[1]["jpg"].tolist()) == b"b.jpg"
    with pytest.raises(FormatError, match="sample 0: 'a' has two files 'jpg'"):
        store[0]


EACH = 3 * 512  # bytes of a member of 700 in a tar


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda tar: tar[: 5 * EACH + 1] + b"X" + tar[5 * EACH + 2 :], f"damaged or cut off at byte {5 * EACH}"),
        (lambda tar: tar[: 10 * EACH] + b"X" * 512, f"damaged or cut off at byte {10 * EACH}"),
        (lambda tar: tar[: 5 * EACH + 100], f"damaged or cut off at byte {5 * EACH}"),
        (lambda tar: tar[: 5 * EACH + 1000], "cannot end at byte"),
        (lambda _: b"\x1f\x8b" + bytes(600), "not a tar that can be read in place"),
    ],
)
def test_a_damaged_tar(folder: Path, damage: Callable[[bytes], bytes], words: str) -> None:
    with tarfile.open(folder / "x.tar", "w") as tar:
        for number in range(10):
            add(tar, f"{number}.bin", bytes(700))
    assert len(SampleStore(folder)) == 10
    (folder / "x.tar").write_bytes(damage((folder / "x.tar").read_bytes()))
    with pytest.raises(FormatError, match=words):
        SampleStore(folder)


def test_empty_and_missing_tars(folder: Path) -> None:
    for name, numbers, count in (("x.tar", range(0), 0), ("y.tar", range(4), 4)):
        write_tar(folder / name, numbers)
        assert len(SampleStore(folder)) == count
    assert same_tar(SampleStore(folder)[0], 0)
    (folder / "z.tar").symlink_to("nothing")
    with pytest.raises(FileNotFoundError):
        SampleStore(folder)


def test_a_header_of_a_tar_whose_checksum_is_no_number(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_tar(folder / "x.tar", range(3))
    store = SampleStore(folder)
    times = os.stat(folder / "x.tar")
    with open(folder / "x.tar", "r+b") as file:
        file.seek(148)
        file.write(b"9")  # no octal digit
    os.utime(folder / "x.tar", ns=(times.st_atime_ns, times.st_mtime_ns))
    monkeypatch.setattr(FileState, "holds", lambda *_: True)  # as where the device did it: nothing else tells
    with pytest.raises(FormatError, match="not part of a tar"):
        store[0]
