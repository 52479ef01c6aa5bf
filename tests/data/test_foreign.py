"""MDS shards and WebDataset tars, read in place: as their own packages read them, and damaged."""

from __future__ import annotations

import io
import json
import os
import struct
import tarfile
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from nvme_ops.data import Loader, SampleStore, webdataset
from nvme_ops.errors import FormatError, UnsafeError
from tests.conftest import give_up_root, in_child, open_to_all, pattern

ENCODINGS = {"image": "jpeg", "label": "int", "name": "str", "meta": "json", "x": "float32", "a": "ndarray:int16:2,3",
             "b": "ndarray"}  # fmt: skip
SIZES = [None, 8, None, None, 4, 12, None]


def mds_sample(number: int) -> dict[str, Any]:
    return {
        "image": bytes(pattern(number * 91 % 3000, number).tolist()),
        "label": number - 50,
        "name": f"sample {number}",
        "meta": {"number": number},
        "x": number / 2,
        "a": torch.full((2, 3), number, dtype=torch.int16),
        "b": torch.arange(number % 4 * 2, dtype=torch.float32).view(-1, 2),
    }


def mds_bytes(sample: dict[str, Any]) -> bytes:
    values = sample["b"]
    array = bytes([34, len(values.shape) << 2, *values.shape]) + values.numpy().tobytes()  # float32; uint8 for lengths
    parts = [
        sample["image"], struct.pack("<q", sample["label"]), sample["name"].encode(),
        json.dumps(sample["meta"]).encode(), struct.pack("<f", sample["x"]), sample["a"].numpy().tobytes(), array,
    ]  # fmt: skip
    sizes = [len(part) for part, size in zip(parts, SIZES, strict=True) if size is None]
    return struct.pack(f"<{len(sizes)}I", *sizes) + b"".join(parts)


def shard(
    folder: Path, name: str, samples: list[bytes], encodings: list[str], sizes: list[int | None]
) -> dict[str, Any]:
    head, places = 4 * (len(samples) + 2) + 5, [0]  # and 5 bytes of something that the format allows in between
    for each in samples:
        places.append(places[-1] + len(each))
    content = struct.pack("<I", len(samples)) + struct.pack(f"<{len(places)}I", *(head + place for place in places))
    (folder / name).write_bytes(content + b"extra" + b"".join(samples))
    return {
        "column_encodings": encodings, "column_names": list(ENCODINGS)[: len(encodings)], "column_sizes": sizes,
        "compression": None, "format": "mds", "hashes": [], "samples": len(samples), "version": 2,
        "raw_data": {"basename": name, "bytes": (folder / name).stat().st_size, "hashes": {}}, "zip_data": None,
    }  # fmt: skip


def write_mds(folder: Path, count: int = 100, each: int = 30) -> None:
    shards = []
    for start in range(0, count, each):
        samples = [mds_bytes(mds_sample(number)) for number in range(start, min(count, start + each))]
        shards.append(shard(folder, f"shard.{start:05d}.mds", samples, list(ENCODINGS.values()), SIZES))
    (folder / "index.json").write_text(json.dumps({"shards": shards, "version": 2}))


def same_mds(found: dict[str, Any], number: int) -> bool:
    wanted = mds_sample(number)
    return (
        list(found) == list(wanted)
        and bytes(found["image"].tolist()) == wanted["image"]
        and all(torch.equal(found[name], wanted[name]) for name in ("a", "b"))
        and all(found[name] == wanted[name] for name in ("label", "name", "meta", "x"))
    )


def test_mds_shards(folder: Path) -> None:
    write_mds(folder)
    store = SampleStore(folder)
    assert len(store) == 100
    assert all(same_mds(found, number) for number, found in enumerate(store.read(range(100))))
    assert same_mds(store[-1], 99)
    batches = list(Loader(store, 32, shuffle=True))
    assert sorted(label for batch in batches for label in batch["label"]) == list(range(-50, 50))


def test_mds_as_its_own_package_writes_it(folder: Path) -> None:
    streaming = pytest.importorskip("streaming")
    numpy = pytest.importorskip("numpy")
    columns = {"data": "bytes", "n": "int", "t": "str", "u": "uint16", "a": "ndarray", "s": "ndarray:int32",
               "d": "str_float"}  # fmt: skip

    def sample(number: int) -> dict[str, Any]:
        return {"data": bytes(number), "n": number, "t": f"x{number}", "u": numpy.uint16(number),
                "a": numpy.arange(number % 7 + 1, dtype=numpy.float64).reshape(1, -1),
                "s": numpy.ones((2, number % 3 + 1), numpy.int32), "d": number / 4}  # fmt: skip

    with streaming.MDSWriter(out=str(folder / "mds"), columns=columns, size_limit=5000) as writer:
        for number in range(100):
            writer.write(sample(number))
    for number, found in enumerate(SampleStore(folder / "mds").read(range(100))):
        wanted = sample(number)
        assert found["data"].numel() == number
        assert (found["n"], found["t"], found["u"], found["d"]) == (number, f"x{number}", number, number / 4)
        assert found["a"].tolist() == wanted["a"].tolist()
        assert found["s"].tolist() == wanted["s"].tolist()


def test_the_index_is_made_once_and_again_when_files_change(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from nvme_ops.data import foreign, mds

    write_mds(folder)
    SampleStore(folder)
    with monkeypatch.context() as patch:
        patch.setattr(mds, "_places", lambda *_: pytest.fail("looked through again"))
        assert len(SampleStore(folder)) == 100
    write_mds(folder, 40)
    assert all(same_mds(found, number) for number, found in enumerate(SampleStore(folder).read(range(40))))
    (folder / foreign._NAME).write_bytes(b"damaged")
    assert len(SampleStore(folder)) == 40


def test_a_shard_that_changes_under_an_open_store(folder: Path) -> None:
    write_mds(folder)
    store = SampleStore(folder)
    old = store.read(range(100))
    for path in folder.glob("*.mds"):
        os.rename(path, folder / "old")
        path.write_bytes(b"x" * (folder / "old").stat().st_size)
    assert all(same_mds(found, number) for number, found in enumerate(store.read(range(100))))
    assert len(old) == 100
    with pytest.raises(FormatError, match="does not begin with the places of 30 samples"):
        SampleStore(folder)


def test_a_folder_that_cannot_be_written(folder: Path) -> None:
    write_mds(folder)
    open_to_all(folder)
    folder.chmod(0o755)

    def child() -> None:
        give_up_root()
        if os.geteuid() != 0:
            with pytest.warns(RuntimeWarning, match="its index cannot be kept"):
                assert len(SampleStore(folder)) == 100

    in_child(child)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        SampleStore(folder)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"format": "json"}, "only mds is read"),
        ({"zip_data": {"basename": "x"}, "compression": "zstd", "raw_data": {"basename": "gone"}}, "is compressed"),
        ({"raw_data": {"basename": "../x.mds"}}, "not in the folder"),
        ({"samples": 31}, "does not begin with the places of 31"),
        ({"samples": "many"}, "no index of MDS shards"),
        ({"column_sizes": [1]}, "different columns"),
        ({"raw_data": None}, "no index of MDS shards"),
    ],
)
def test_an_index_of_shards_that_cannot_be(folder: Path, change: dict[str, Any], words: str) -> None:
    write_mds(folder)
    listed = json.loads((folder / "index.json").read_text())
    listed["shards"][0].update(change)
    (folder / "index.json").write_text(json.dumps(listed))
    with pytest.raises(FormatError, match=words):
        SampleStore(folder)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"shards": []}', "not json"])
def test_an_index_json_of_something_else(folder: Path, text: str) -> None:
    (folder / "index.json").write_text(text)
    with pytest.raises(FormatError):
        SampleStore(folder)


def test_a_shard_whose_places_are_damaged(folder: Path) -> None:
    write_mds(folder)
    path = folder / "shard.00000.mds"
    content = bytearray(path.read_bytes())
    content[12:16] = struct.pack("<I", 2**31)
    path.write_bytes(content)
    with pytest.raises(FormatError, match="places of its samples are damaged"):
        SampleStore(folder)


def test_a_sample_whose_sizes_are_damaged(folder: Path) -> None:
    write_mds(folder)
    path = folder / "shard.00000.mds"
    content = bytearray(path.read_bytes())
    begin = struct.unpack("<I", content[4:8])[0]
    content[begin : begin + 4] = struct.pack("<I", 2**31)
    with path.open("r+b") as file:
        file.write(content)
    store = SampleStore(folder)
    with pytest.raises(FormatError, match="column 'image' does not fit its sample"):
        store[0]
    assert same_mds(store[1], 1)


@pytest.mark.parametrize("encoding", ["pkl", "pil"])
def test_what_is_not_decoded(folder: Path, encoding: str) -> None:
    listed = [shard(folder, "one.mds", [struct.pack("<I", 3) + b"abc"], [encoding], [None])]
    (folder / "index.json").write_text(json.dumps({"shards": listed}))
    if encoding == "pkl":
        with pytest.raises(UnsafeError, match="pickled"):
            SampleStore(folder)
    else:
        with pytest.raises((ImportError, FormatError)):
            SampleStore(folder)[0]


# WebDataset


def write_tar(path: Path, numbers: range, prefix: str = "", form: int = tarfile.USTAR_FORMAT, **more: Any) -> None:
    with tarfile.open(path, "w", format=form) as tar:
        for number in numbers:
            for extension, content in tar_sample(number).items():
                member = tarfile.TarInfo(f"{prefix}{number:06d}.{extension}")
                member.size = len(content)
                for name, value in more.items():
                    setattr(member, name, value)
                tar.addfile(member, io.BytesIO(content))


def tar_sample(number: int) -> dict[str, bytes]:
    image = bytes(pattern(number * 77 % 4000, number).tolist())
    return {"jpg": image, "cls": str(number).encode(), "seg.png": b"p" * 10}


def same_tar(found: dict[str, Any], number: int, prefix: str = "") -> bool:
    wanted = tar_sample(number)
    key = found.pop("__key__")
    return key == f"{prefix}{number:06d}" and {name: bytes(value.tolist()) for name, value in found.items()} == wanted


@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
@pytest.mark.parametrize("prefix", ["", "a/b.c/", "long" * 20 + "/", "long" * 40 + "/", "grün/"])
def test_tars(folder: Path, form: int, prefix: str) -> None:
    if form == tarfile.USTAR_FORMAT and len(prefix) > 90:
        pytest.skip("this format has no such names")
    for shard_number in range(3):
        numbers = range(shard_number * 20, shard_number * 20 + 20)
        write_tar(folder / f"train-{shard_number:04d}.tar", numbers, prefix, form)
    store = SampleStore(folder)
    assert len(store) == 60
    assert all(same_tar(found, number, prefix) for number, found in enumerate(store.read(range(60))))
    assert same_tar(store[17], 17, prefix)


def test_one_tar_alone(folder: Path) -> None:
    write_tar(folder / "one.tar", range(5))
    write_tar(folder / "two.tar", range(5, 10))
    store = SampleStore(folder / "two.tar")
    assert [int(bytes(found["cls"].tolist())) for found in store.read(range(5))] == list(range(5, 10))


def test_tars_as_webdataset_reads_them(folder: Path) -> None:
    webdataset = pytest.importorskip("webdataset")
    with webdataset.TarWriter(str(folder / "x.tar"), encoder=False) as writer:
        for number in range(50):
            writer.write({"__key__": f"{number:06d}", **tar_sample(number)})
    store = SampleStore(folder / "x.tar")
    theirs = list(webdataset.WebDataset(str(folder / "x.tar"), shardshuffle=False))
    assert len(theirs) == len(store) == 50
    for found, wanted in zip(store.read(range(50)), theirs, strict=True):
        assert found["__key__"] == wanted["__key__"]
        assert all(bytes(found[name].tolist()) == wanted[name] for name in tar_sample(0))


def test_what_else_is_in_a_tar(folder: Path) -> None:
    """Folders, links and files without an extension are parts of no sample."""
    with tarfile.open(folder / "x.tar", "w") as tar:
        for name, kind in (("d", tarfile.DIRTYPE), ("README", tarfile.REGTYPE), ("link.jpg", tarfile.SYMTYPE)):
            member = tarfile.TarInfo(name)
            member.type = kind
            tar.addfile(member)
        for number in range(3):
            for extension, content in tar_sample(number).items():
                member = tarfile.TarInfo(f"d/{number:06d}.{extension}")
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
            tar.addfile(tarfile.TarInfo(".hidden"))
    store = SampleStore(folder)
    assert len(store) == 3
    assert all(same_tar(found, number, "d/") for number, found in enumerate(store.read(range(3))))


def test_tars_that_cannot_be_read_in_place(folder: Path) -> None:
    with tarfile.open(folder / "x.tar", "w:gz") as tar:
        tar.addfile(tarfile.TarInfo("a.txt"))
    with pytest.raises(FormatError, match="not a tar that can be read in place"):
        SampleStore(folder)
    (folder / "x.tar").write_bytes(pattern(5000).numpy().tobytes())
    with pytest.raises(FormatError):
        SampleStore(folder)
    write_tar(folder / "x.tar", range(30))
    os.truncate(folder / "x.tar", 1 << 15)
    with pytest.raises(FormatError):
        SampleStore(folder)


@pytest.mark.parametrize("damage", ["header", "cut", "cut in a header", "no end"])
def test_a_damaged_tar(folder: Path, damage: str) -> None:
    tar = folder / "a.tar"
    with tarfile.open(tar, "w") as made:
        for number in range(10):
            member = tarfile.TarInfo(f"{number}.bin")
            member.size = 700
            made.addfile(member, io.BytesIO(bytes(700)))
    each, content = 3 * 512, tar.read_bytes()
    assert len(SampleStore(folder)) == 10
    damaged = {
        "header": content[: 5 * each + 1] + b"X" + content[5 * each + 2 :],
        "cut": content[: 5 * each],
        "cut in a header": content[: 5 * each + 100],
        "no end": content[: 10 * each] + b"X" * 512,
    }
    tar.write_bytes(damaged[damage])
    place = 10 * each if damage == "no end" else 5 * each
    with pytest.raises(FormatError, match=f"damaged or cut off at byte {place}"):
        SampleStore(folder)


def test_a_link_to_a_tar_that_is_not_there(folder: Path) -> None:
    with tarfile.open(folder / "a.tar", "w"):
        pass
    (folder / "b.tar").symlink_to("nothing")
    with pytest.raises(FileNotFoundError):
        SampleStore(folder)


def test_an_index_json_beside_tars(folder: Path) -> None:
    """As the package wids writes."""
    with tarfile.open(folder / "a.tar", "w") as made:
        made.addfile(tarfile.TarInfo("0.bin"))
    (folder / "index.json").write_text('{"wids_version": 1, "shardlist": []}')
    assert len(SampleStore(folder)) == 1


def test_single_tars_of_a_folder_have_an_index_each(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a", "b"):
        with tarfile.open(folder / f"{name}.tar", "w") as made:
            made.addfile(tarfile.TarInfo(f"{name}.bin"))
    for path in (folder / "a.tar", folder / "b.tar", folder):
        SampleStore(path)
    monkeypatch.setattr(webdataset, "_places", None)
    for path, count in ((folder / "a.tar", 1), (folder / "b.tar", 1), (folder, 2)):
        assert len(SampleStore(path)) == count


def test_a_tar_that_changes_under_an_open_store(folder: Path) -> None:
    write_tar(folder / "x.tar", range(10))
    store = SampleStore(folder)
    with (folder / "x.tar").open("r+b") as file:
        file.write(bytes(20_000))
    with pytest.raises(FormatError, match="was changed after"):
        store[0]
    assert len(list((folder).glob(".foreign*"))) == 1


def test_an_empty_tar(folder: Path) -> None:
    write_tar(folder / "x.tar", range(0))
    assert len(SampleStore(folder)) == 0
    write_tar(folder / "y.tar", range(4))
    assert len(SampleStore(folder)) == 4
    assert same_tar(SampleStore(folder)[0], 0)
