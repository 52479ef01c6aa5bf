"""``nvme-data``: stores made of what people have, described, and verified."""

from __future__ import annotations

import itertools
import json
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from nvme_ops.data import SampleStore, cli, convert
from tests.conftest import give_up_root, in_child, open_to_all, pattern, watched
from tests.contract.faulty import flip
from tests.data.samples import data_files, same_mds, shard, tar_sample, write, write_index, write_mds, write_tar

numpy, pyarrow = pytest.importorskip("numpy"), pytest.importorskip("pyarrow")
CLASSES = ("a", "a b", "b")  # labels are in the order of their names, not of the paths
DOUBLES = [0.1, 1e300, -1 / 3, 5e-324, float("inf")]


def run(*words: object) -> int:
    return cli.main([str(word) for word in words])


def converted(source: Path, *more: object) -> SampleStore:
    assert run("convert", source, source.parent / f"{source.name} store", *more) == 0
    return SampleStore(source.parent / f"{source.name} store", verify=True)


def parquet_of(path: Path, table: Any = None, **columns: Any) -> Path:
    from pyarrow import parquet  # type: ignore[import-untyped,import-not-found,unused-ignore]

    path.parent.mkdir(exist_ok=True)
    parquet.write_table(pyarrow.table(columns) if table is None else table, path)
    return path


def files(folder: Path) -> Path:
    for number in range(30):
        path = folder / CLASSES[number % 3] / f"{number:03d}.bin"
        path.parent.mkdir(exist_ok=True, parents=True)
        path.write_bytes(pattern(number * 1000, number).numpy().tobytes())
    return folder


# Sources


def test_a_folder_of_files(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Links are followed, and a store within the source is not converted too."""
    source, store = files(folder / "source"), folder / "source" / "store"
    (source / "b").rename(folder / "elsewhere")
    (source / "b").symlink_to(folder / "elsewhere")
    (source / "a" / "round").symlink_to(source)
    (source / "a" / ".hidden").touch()
    for more in ((), ("--overwrite", "--alignment", 8)):
        assert run("convert", source, store, *more) == 0
        assert capsys.readouterr().out.startswith("30 samples, ")
        for sample in SampleStore(store, verify=True).read(range(30)):
            number = int(sample["name"][-7:-4])
            assert sample["name"] == f"{CLASSES[number % 3]}/{number:03d}.bin"
            assert int(sample["label"]) == number % 3
            assert torch.equal(sample["data"], pattern(number * 1000, number))
        assert SampleStore(store).class_names == list(CLASSES)
    assert run("convert", store, folder / "again") == 0
    assert SampleStore(folder / "again").class_names == list(CLASSES)
    assert run("info", store) == run("info", store, "--json") == 0
    assert "  3 classes: a, a b, b\n" in capsys.readouterr().out
    assert run("convert", source, store) == 2
    assert "has a sample store already: --overwrite replaces it" in capsys.readouterr().err
    assert run("convert", source, store, "--overwrite", "--alignment", 3) == 2
    assert "nvme-data: --alignment must be a power of two" in capsys.readouterr().err


def test_many_small_files_without_classes(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(convert, "_AT_ONCE", 1000)
    asked = watched(monkeypatch, convert, "empty", lambda nbytes, **_: nbytes)
    contents = {f"{number:05d}": number.to_bytes(4, "little") * (number % 9) for number in range(300)}
    (folder / "source").mkdir()
    for name, content in contents.items():
        (folder / "source" / name).write_bytes(content)
    store = converted(folder / "source", folder / "two", "--json", "--shard-bytes", "3K")
    assert json.loads(capsys.readouterr().out) == {
        "samples": 300, "bytes": store.nbytes, "folders": [str(folder / "source store"), str(folder / "two")]
    }  # fmt: skip
    assert data_files(folder / "two")
    assert 900 < max(asked) <= 1000
    assert [set(sample) for sample in store.read([0])] == [{"data", "name"}]
    assert {sample["name"]: bytes(sample["data"].tolist()) for sample in store.read(range(300))} == contents


def test_arrays_with_and_without_a_head_are_read_in_part(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = numpy.arange(500 * 6, dtype=numpy.float32).reshape(500, 2, 3)
    numpy.save(folder / "rows.npy", rows)
    rows.tofile(folder / "rows.bin")
    asked = watched(monkeypatch, numpy, "array", len)
    monkeypatch.setattr(convert, "_AT_ONCE", 2400)
    for name, words in (("rows.npy", []), ("rows.bin", ["--dtype", "float32", "--shape", "2", "3"])):
        store = converted(folder / name, *words)
        assert torch.equal(store.submit(range(500)).batch(), torch.from_numpy(rows))
    assert max(asked) == 100
    assert converted(folder / "rows.bin", "--dtype", "float32", "--overwrite")[7].item() == 7


def test_parquet(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    count = 1300
    table = pyarrow.table({
        "n": list(range(count)), "s": [f"s{k}" for k in range(count)],
        "x": list(itertools.islice(itertools.cycle(DOUBLES), count)),
        "b": [bytes([k % 256]) * (k % 5) for k in range(count)], "t": [DOUBLES[: k % 5] for k in range(count)],
        "u": pyarrow.array([[2**64 - 1, k] for k in range(count)], pyarrow.list_(pyarrow.uint64())),
    })  # fmt: skip
    parquet_of(folder / "parts" / "0.parquet", table.slice(0, 100))
    parquet_of(folder / "parts" / "1.parquet", table.slice(100))
    (folder / "parts" / "other").touch()
    store = converted(folder / "parts")
    assert f"not converted, 1 in {folder / 'parts'}: other" in capsys.readouterr().err
    for sample, wanted in zip(store.read(range(len(store))), table.to_pylist(), strict=True):
        sample["b"] = bytes(sample["b"].tolist())
        assert {key: value.tolist() if hasattr(value, "tolist") else value for key, value in sample.items()} == wanted


def test_tars_shards_and_stores(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "tars" / "class a").mkdir(parents=True)
    for name in ("b.jpg", "c.txt", "d", ".hidden"):
        (folder / "tars" / name).touch()
    write_tar(folder / "tars" / "x.tar", range(20))
    sample = converted(folder / "tars")[7]
    assert f"not converted, 4 in {folder / 'tars'}: b.jpg, c.txt, class a, ..." in capsys.readouterr().err
    assert sample["__key__"] == "000007"
    assert bytes(sample["jpg"].tolist()) == tar_sample(7)["jpg"]
    write_mds(folder / "mds", 20)
    for source in ("mds", "mds store"):
        back: dict[str, Any] = converted(folder / source)[7]
        assert same_mds({**back, "meta": json.loads(back["meta"])}, 7)
        assert [type(back[name]) for name in ("label", "x", "n")] == [int, float, int]
    (folder / "doubles").mkdir()
    samples = [struct.pack("<d", value) for value in DOUBLES]
    write_index(folder / "doubles", [shard(folder / "doubles", "one.mds", samples, ["float64"], [8])])
    assert [sample["image"] for sample in converted(folder / "doubles").read(range(len(DOUBLES)))] == DOUBLES


# Sources that cannot be


def hundred(path: Path) -> None:
    path.write_bytes(bytes(100))


def parts(path: Path) -> None:
    parquet_of(path / "0.parquet", t=[[1, 2], [3]])
    parquet_of(path / "1.parquet", t=[[4], [5, None]])


@pytest.mark.parametrize(
    ("name", "make", "words", "told"),
    [
        ("nothing", lambda _: None, [], "No such file"),
        ("file.txt", hundred, [], "a file without a header needs --dtype"),
        ("empty", Path.mkdir, [], "has no files"),
        ("t.bin", hundred, ["--dtype", "int64"], "t.bin: 100 bytes are not samples of 8 bytes"),
        ("t.bin", hundred, ["--dtype", "int16", "--shape", "-5", "-2"], "has no bytes"),
        ("t.bin", hundred, ["--dtype", "int17"], "'int17' is not a NumPy dtype"),
        ("t.bin", hundred, ["--dtype", ">i4"], "t.bin: "),
        ("t.bin", hundred, ["--shape", "2"], "--shape is for --dtype"),
        ("rows.npy", Path.touch, [], "rows.npy: "),
        ("rows.npy", lambda path: numpy.save(path, numpy.array([None]), allow_pickle=True), [], "rows.npy: "),
        ("x.parquet", lambda path: parquet_of(path, n=[1, None]), [], "column 'n' has no value"),
        ("parts", parts, [], "parts: sample 3: column 't' cannot hold list"),
        ("two.parquet", lambda path: parquet_of(path, pyarrow.table([[1], [3]], names="aa")), [], "the same name"),
        ("source", lambda path: parquet_of(path.parent / "source" / "x" / "0.parquet"), [], "Parquet files in folders"),
    ],
)  # fmt: skip
def test_what_cannot_be_converted_is_named(
    folder: Path, name: str, make: Callable[[Path], object], words: list[str], told: str,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    (folder / "source").mkdir()
    make(folder / name)
    assert run("convert", folder / name, folder / "store", *words) == 2
    assert told in capsys.readouterr().err
    assert not list(folder.glob("store/*"))


def test_what_a_package_is_needed_for(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setitem(sys.modules, "numpy", None)
    (folder / "rows.npy").touch()
    assert run("convert", folder / "rows.npy", folder / "store") == 2
    assert "reading it needs numpy: pip install numpy\n" in capsys.readouterr().err


def test_a_folder_or_a_link_that_cannot_be_read(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    link = folder / "source" / "ant" / "0.jpg"
    link.parent.mkdir(parents=True)
    link.symlink_to("nothing")
    assert run("convert", folder / "source", folder / "store") == 2
    assert "No such file" in capsys.readouterr().err
    link.unlink()
    open_to_all(folder)
    link.parent.chmod(0)

    def body() -> None:
        give_up_root()
        assert run("convert", folder / "source", folder / "store") == 2

    in_child(body)


# What a store holds


def test_info_and_verify(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def told(status: int, *words: object) -> str:
        assert run(*words) == status
        output = capsys.readouterr()
        return output.out + output.err

    write(folder / "store", 30)
    write_mds(folder / "mds", 30)
    (folder / "empty").mkdir()
    for name, start, column in (("store", "native: 30 samples, ", "label: int64 []"), ("mds", "mds: 30", "image")):
        text = told(0, "info", folder / name)
        assert text.startswith(start)
        assert f"column {column}" in text
        document = json.loads(told(0, "info", folder / name, "--json"))
        label = {"name": "label", "dtype": "int64", "shape": []}
        assert label in document["columns"] or document["columns"][0].keys() == {"name"}
        assert document["samples"] == sum(entry["samples"] for entry in document["files"]) == 30
    assert "has no samples" in told(2, "info", folder / "empty")
    assert told(0, "verify", folder / "store").startswith("[OKAY] 30 samples")
    flip(data_files(folder / "store")[0], 1000)
    text = told(1, "verify", folder / "store")
    assert "[DAMAGED] 1 of 30 samples" in text
    assert "DAMAGED sample" in text
    assert len(json.loads(told(1, "verify", folder / "store", "--json"))["damaged"]) == 1
    assert "there are no checksums" in told(0, "verify", folder / "mds")
