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
        for found in SampleStore(store, verify=True).read(range(30)):
            number = int(found["name"][-7:-4])
            assert found["name"] == f"{CLASSES[number % 3]}/{number:03d}.bin"
            assert int(found["label"]) == number % 3
            assert torch.equal(found["data"], pattern(number * 1000, number))
    assert run("convert", source, store) == 2
    assert "has a sample store already" in capsys.readouterr().err


def test_many_small_files_without_classes(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(convert, "_AT_ONCE", 1000)
    asked = watched(monkeypatch, convert, "empty", lambda nbytes, **_: nbytes)
    (folder / "source").mkdir()
    for number in range(2000):
        (folder / "source" / f"{number:05d}").write_bytes(number.to_bytes(4, "little") * (number % 9))
    store = converted(folder / "source", folder / "two", "--json", "--shard-bytes", "20K")
    assert json.loads(capsys.readouterr().out) == {
        "samples": 2000, "bytes": store.nbytes, "folders": [str(folder / "source store"), str(folder / "two")]
    }  # fmt: skip
    assert data_files(folder / "two")
    assert 900 < max(asked) <= 1000
    for number, found in enumerate(store.read(range(2000))):
        assert set(found) == {"data", "name"}
        assert found["name"] == f"{number:05d}"
        assert bytes(found["data"].tolist()) == number.to_bytes(4, "little") * (number % 9)


def test_a_numpy_array_is_read_in_part(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = numpy.arange(5000 * 6, dtype=numpy.float32).reshape(5000, 2, 3)
    numpy.save(folder / "rows.npy", rows)
    asked = watched(monkeypatch, numpy, "array", len)
    monkeypatch.setattr("nvme_ops.data.convert._AT_ONCE", 2400)
    assert torch.equal(converted(folder / "rows.npy").submit(range(5000)).batch(), torch.from_numpy(rows))
    assert max(asked) == 100


@pytest.mark.parametrize("shape", [(), (4,), (2, 3)])
def test_values_without_a_head(folder: Path, shape: tuple[int, ...]) -> None:
    rows = numpy.arange(2400, dtype=numpy.uint16).reshape(-1, *shape)
    rows.tofile(folder / "t.bin")
    store = converted(folder / "t.bin", "--dtype", "uint16", *(["--shape", *shape] if shape else []))
    assert torch.equal(store.submit(range(len(rows))).batch(), torch.from_numpy(rows))


def test_parquet(folder: Path) -> None:
    count = 3000
    table = pyarrow.table({
        "n": list(range(count)), "s": [f"s{k}" for k in range(count)],
        "x": list(itertools.islice(itertools.cycle(DOUBLES), count)),
        "b": [bytes([k % 256]) * (k % 5) for k in range(count)], "t": [DOUBLES[: k % 5] for k in range(count)],
        "u": pyarrow.array([[2**64 - 1, k] for k in range(count)], pyarrow.list_(pyarrow.uint64())),
    })  # fmt: skip
    parquet_of(folder / "parts" / "0.parquet", table.slice(0, 1000))
    parquet_of(folder / "parts" / "1.parquet", table.slice(1000))
    store = converted(folder / "parts")
    assert len(store) == count
    for found, wanted in zip(store.read(range(count)), table.to_pylist(), strict=True):
        found["b"] = bytes(found["b"].tolist())
        assert {key: value.tolist() if hasattr(value, "tolist") else value for key, value in found.items()} == wanted


def test_tars_shards_and_stores(folder: Path) -> None:
    (folder / "tars").mkdir()
    write_tar(folder / "tars" / "x.tar", range(20))
    found = converted(folder / "tars")[7]
    assert found["__key__"] == "000007"
    assert bytes(found["jpg"].tolist()) == tar_sample(7)["jpg"]
    write_mds(folder / "mds", 20)
    for source in ("mds", "mds store"):
        back: dict[str, Any] = converted(folder / source)[7]
        numbers = {name: back[name].item() for name in ("label", "x", "n", "t")}
        back = {**back, **numbers, "meta": json.loads(back["meta"])}
        assert same_mds(back, 7)
    (folder / "doubles").mkdir()
    samples = [struct.pack("<d", each) for each in DOUBLES]
    write_index(folder / "doubles", [shard(folder / "doubles", "one.mds", samples, ["float64"], [8])])
    assert [each["image"].item() for each in converted(folder / "doubles").read(range(len(DOUBLES)))] == DOUBLES


@pytest.mark.parametrize("kind", ["tar", "parquet"])
def test_what_else_is_in_a_folder_is_named(folder: Path, kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "source" / "class a").mkdir(parents=True)
    if kind == "tar":
        write_tar(folder / "source" / "x.tar", range(5))
    else:
        parquet_of(folder / "source" / "x.parquet", n=list(range(5)))
    for name in ("b.jpg", "c.txt", "d", ".hidden"):
        (folder / "source" / name).touch()
    assert len(converted(folder / "source")) == 5
    assert f"not converted, 4 in {folder / 'source'}: b.jpg, c.txt, class a, ..." in capsys.readouterr().err


# Sources that cannot be

HUNDRED: Callable[[Path], object] = lambda path: path.write_bytes(bytes(100))  # noqa: E731


def parts(path: Path) -> None:
    parquet_of(path / "0.parquet", t=[[1, 2], [3]])
    parquet_of(path / "1.parquet", t=[[4], [5, None]])


@pytest.mark.parametrize(
    ("name", "make", "words", "told"),
    [
        ("nothing", lambda _: None, [], "No such file"),
        ("file.txt", HUNDRED, [], "a file without a header needs a dtype"),
        ("empty", Path.mkdir, [], "has no files"),
        ("t.bin", HUNDRED, ["--dtype", "int64"], "t.bin: 100 bytes are not samples of 8 bytes"),
        ("t.bin", HUNDRED, ["--dtype", "int16", "--shape", "7"], "t.bin: 100 bytes are not samples of 14 bytes"),
        ("t.bin", HUNDRED, ["--dtype", "int16", "--shape", "0"], "has no bytes"),
        ("t.bin", HUNDRED, ["--dtype", "int16", "--shape", "-5", "-2"], "has no bytes"),
        ("t.bin", HUNDRED, ["--dtype", "int17"], "'int17' is not a NumPy dtype"),
        ("t.bin", HUNDRED, ["--dtype", "O"], "t.bin: "),
        ("t.bin", HUNDRED, ["--dtype", ">i4"], "t.bin: "),
        ("t.bin", HUNDRED, ["--shape", "2"], "--shape is for --dtype"),
        ("t.bin", Path.touch, ["--dtype", "int8"], "t.bin: 0 bytes"),
        ("rows.npy", Path.touch, [], "rows.npy: "),
        ("rows.npy", HUNDRED, [], "rows.npy: "),
        ("rows.npy", lambda path: numpy.save(path, numpy.zeros(9, ">f4")), [], "rows.npy: "),
        ("rows.npy", lambda path: numpy.save(path, numpy.zeros((2147483648, 0))), [], "rows.npy: "),
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
    assert "reading it needs numpy: pip install 'nvme-ops[data]'" in capsys.readouterr().err


def test_a_folder_or_a_link_that_cannot_be_read(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "source" / "ant").mkdir(parents=True)
    (folder / "source" / "ant" / "0.jpg").symlink_to("nothing")
    assert run("convert", folder / "source", folder / "store") == 2
    assert "No such file" in capsys.readouterr().err
    (folder / "source" / "ant" / "0.jpg").unlink()
    open_to_all(folder)
    (folder / "source" / "ant").chmod(0)

    def body() -> None:
        give_up_root()
        assert run("convert", folder / "source", folder / "store") == 2

    in_child(body)


# What a store holds


def test_info(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(folder / "store")
    write_mds(folder / "mds")
    (folder / "empty").mkdir()
    for name, start, column in (("store", "native: 100 samples, ", "label: int64 []"), ("mds", "mds: 100", "image")):
        assert run("info", folder / name) == 0
        told = capsys.readouterr().out
        assert told.startswith(start)
        assert f"column {column}" in told
        assert run("info", folder / name, "--json") == 0
        found = json.loads(capsys.readouterr().out)
        assert found["samples"] == sum(each["samples"] for each in found["files"]) == 100
    assert run("info", folder / "empty") == 2
    assert "has no samples" in capsys.readouterr().err


def test_verify(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(folder / "store")
    assert run("verify", folder / "store") == 0
    assert capsys.readouterr().out.startswith("[OKAY] 100 samples")
    flip(data_files(folder / "store")[0], 1000)
    assert run("verify", folder / "store") == 1
    told = capsys.readouterr().out
    assert "[DAMAGED] 1 of 100 samples" in told
    assert "DAMAGED sample" in told
    assert run("verify", folder / "store", "--json") == 1
    assert len(json.loads(capsys.readouterr().out)["damaged"]) == 1
    write_tar(folder / "x.tar", range(3))
    assert run("verify", folder / "x.tar") == 0
    assert "there are no checksums" in capsys.readouterr().out
