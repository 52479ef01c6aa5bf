"""``nvme-data convert``: values without a head, every bit of a float, and sources that it leaves out or refuses."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch

from nvme_ops.data import SampleStore
from tests.data.test_cli import run
from tests.data.test_foreign import shard, write_tar

DOUBLES = [0.1, 1e300, -1 / 3, 5e-324, float("inf")]


def parquet_of(path: Path, **columns: Any) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet  # type: ignore[import-untyped,import-not-found,unused-ignore]

    parquet.write_table(pyarrow.table(columns), path)


def test_doubles_of_parquet_keep_their_bits(folder: Path) -> None:
    parquet_of(folder / "x.parquet", x=DOUBLES, t=[DOUBLES[:count] for count in range(len(DOUBLES))])
    assert run("convert", folder / "x.parquet", folder / "store") == 0
    found = SampleStore(folder / "store", verify=True).read(range(len(DOUBLES)))
    assert [each["x"].item() for each in found] == DOUBLES
    assert [each["t"].tolist() for each in found] == [DOUBLES[:count] for count in range(len(DOUBLES))]


def test_doubles_of_shards_keep_their_bits(folder: Path) -> None:
    (folder / "mds").mkdir()
    listed = shard(folder / "mds", "one.mds", [struct.pack("<d", each) for each in DOUBLES], ["float64"], [8])
    (folder / "mds" / "index.json").write_text(json.dumps({"shards": [listed]}))
    assert run("convert", folder / "mds", folder / "store") == 0
    found = SampleStore(folder / "store", verify=True).read(range(len(DOUBLES)))
    assert [next(iter(each.values())).item() for each in found] == DOUBLES


@pytest.mark.parametrize("shape", [(), (4,), (2, 3)])
def test_values_without_a_head(folder: Path, shape: tuple[int, ...]) -> None:
    numpy = pytest.importorskip("numpy")
    rows = numpy.arange(2400, dtype=numpy.uint16).reshape(-1, *shape)
    rows.tofile(folder / "t.bin")
    shaped = ["--shape", *shape] if shape else []
    assert run("convert", folder / "t.bin", folder / "store", "--dtype", "uint16", *shaped) == 0
    found = SampleStore(folder / "store", verify=True).submit(range(len(rows))).batch()
    assert torch.equal(found, torch.from_numpy(rows))


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--dtype", "int64"], "t.bin: 100 bytes are not samples of 8 bytes"),
        (["--dtype", "int16", "--shape", "7"], "t.bin: 100 bytes are not samples of 14 bytes"),
        (["--dtype", "int16", "--shape", "0"], "has no bytes"),
        (["--dtype", "int16", "--shape", "-5", "-2"], "has no bytes"),
        (["--dtype", "int17"], "'int17' is not a NumPy dtype"),
        (["--dtype", "O"], "t.bin: "),
        (["--dtype", ">i4"], "t.bin: "),
        (["--shape", "2"], "--shape is for --dtype"),
        ([], "a file without a header needs a dtype"),
    ],
)
def test_values_without_a_head_that_cannot_be(
    folder: Path, words: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("numpy")
    (folder / "t.bin").write_bytes(bytes(100))
    assert run("convert", folder / "t.bin", folder / "store", *words) == 2
    assert told in capsys.readouterr().err
    assert not (folder / "store").exists()


def test_an_empty_file_has_no_values(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("numpy")
    (folder / "t.bin").touch()
    assert run("convert", folder / "t.bin", folder / "store", "--dtype", "int8") == 2
    assert "t.bin: 0 bytes" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["tar", "parquet"])
def test_what_else_is_in_a_folder_is_named(folder: Path, kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "source" / "class a").mkdir(parents=True)
    if kind == "tar":
        write_tar(folder / "source" / "x.tar", range(5))
    else:
        parquet_of(folder / "source" / "x.parquet", n=list(range(5)))
    for name in ("b.jpg", "c.txt", "d", ".hidden"):
        (folder / "source" / name).touch()
    assert run("convert", folder / "source", folder / "store") == 0
    told = capsys.readouterr()
    assert f"not converted, 4 in {folder / 'source'}: b.jpg, c.txt, class a, ..." in told.err
    assert told.out.startswith("5 samples")


def test_parquet_in_folders_is_not_taken_for_samples(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "source" / "year=2024").mkdir(parents=True)
    (folder / "source" / "year=2024" / "0.parquet").touch()
    assert run("convert", folder / "source", folder / "store") == 2
    assert "has Parquet files in folders, such as year=2024/0.parquet" in capsys.readouterr().err


@pytest.mark.parametrize("damage", ["cut off", "big-endian", "not an array", "rows without bytes"])
def test_an_array_that_cannot_be_read_is_named(folder: Path, damage: str, capsys: pytest.CaptureFixture[str]) -> None:
    numpy = pytest.importorskip("numpy")
    path = folder / "rows.npy"
    numpy.save(path, numpy.zeros((10, 1000), ">f4" if damage == "big-endian" else "<f4"))
    if damage == "cut off":
        path.write_bytes(path.read_bytes()[:5000])
    elif damage == "rows without bytes":  # any number of them, which would take days
        numpy.save(path, numpy.zeros((21474836480, 0), "<f4"))
    elif damage == "not an array":
        path.write_bytes(b"neither numbers nor anything else" * 10)
    assert run("convert", path, folder / "store") == 2
    assert f"{path}: " in capsys.readouterr().err


@pytest.mark.parametrize("whole", [True, False])
def test_a_null_in_a_list_is_named_with_its_sample(
    folder: Path, whole: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """``whole``: in one of several files, so that the folder is named."""
    (folder / "parts").mkdir()
    parquet_of(folder / "parts" / "0.parquet", t=[[1, 2], [3]])
    parquet_of(folder / "parts" / "1.parquet", t=[[4], [5, None]])
    source, number = (folder / "parts", 3) if whole else (folder / "parts" / "1.parquet", 1)
    assert run("convert", source, folder / "store") == 2
    assert f"{source}: sample {number}: column 't' cannot hold list" in capsys.readouterr().err
    assert list((folder / "store").iterdir()) == []


def test_two_columns_of_one_name(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet  # type: ignore[import-untyped,import-not-found,unused-ignore]

    parquet.write_table(pyarrow.table([[1, 2], [3, 4]], names=["a", "a"]), folder / "two.parquet")
    assert run("convert", folder / "two.parquet", folder / "store") == 2
    assert "two columns have the same name" in capsys.readouterr().err


def test_large_unsigned_numbers_of_parquet(folder: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    numbers = pyarrow.array([[2**64 - 1, 1], [5]], pyarrow.list_(pyarrow.uint64()))
    parquet_of(folder / "large.parquet", a=numbers)
    assert run("convert", folder / "large.parquet", folder / "store") == 0
    assert [each["a"].tolist() for each in SampleStore(folder / "store").read([0, 1])] == [[2**64 - 1, 1], [5]]
