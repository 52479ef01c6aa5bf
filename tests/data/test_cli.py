"""``nvme-data``: stores made of what people have, described, and verified."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from nvme_ops.data import SampleStore, cli
from nvme_ops.data.convert import open_source
from tests.conftest import REPOSITORY, give_up_root, in_child, open_to_all, pattern, refusal
from tests.data.samples import data_files, write
from tests.data.test_foreign import same_mds, tar_sample, write_mds, write_tar


def run(*words: object) -> int:
    return cli.main([str(word) for word in words])


def files(folder: Path) -> Path:
    for number in range(30):
        path = folder / f"class {number % 3}" / f"{number:03d}.bin"
        path.parent.mkdir(exist_ok=True, parents=True)
        path.write_bytes(bytes(pattern(number * 1000, number).tolist()))
    return folder


def test_a_folder_of_files(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("convert", files(folder / "source"), folder / "store") == 0
    assert capsys.readouterr().out.startswith("30 samples, ")
    store = SampleStore(folder / "store", verify=True)
    for found in store.read(range(30)):
        number = int(found["name"][-7:-4])
        assert found["name"] == f"class {number % 3}/{number:03d}.bin"
        assert int(found["label"]) == number % 3
        assert torch.equal(found["data"], pattern(number * 1000, number))


def test_a_folder_without_classes(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "source").mkdir()
    (folder / "source" / "a.txt").write_text("abc")
    (folder / "source" / "empty").touch()
    assert run("convert", folder / "source", folder / "store", "--json") == 0
    found = SampleStore(folder / "store").read([0, 1])
    assert json.loads(capsys.readouterr().out) == {
        "samples": 2, "bytes": SampleStore(folder / "store").nbytes, "folders": [str(folder / "store")]
    }  # fmt: skip
    assert [each["name"] for each in found] == ["a.txt", "empty"]
    assert set(found[0]) == {"data", "name"}


def test_a_numpy_array(folder: Path) -> None:
    numpy = pytest.importorskip("numpy")
    rows = numpy.arange(5000 * 6, dtype=numpy.float32).reshape(5000, 2, 3)
    numpy.save(folder / "rows.npy", rows)
    assert run("convert", folder / "rows.npy", folder / "store") == 0
    store = SampleStore(folder / "store", verify=True)
    assert torch.equal(store.submit(range(5000)).batch(), torch.from_numpy(rows))
    numpy.save(folder / "objects.npy", numpy.array([object()]), allow_pickle=True)
    assert run("convert", folder / "objects.npy", folder / "other") == 2


def test_parquet(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet  # type: ignore[import-untyped,import-not-found,unused-ignore]

    table = pyarrow.table(
        {
            "n": list(range(3000)), "x": [number / 2 for number in range(3000)], "s": [f"s{k}" for k in range(3000)],
            "b": [bytes([k % 256]) * (k % 5) for k in range(3000)], "t": [list(range(k % 4)) for k in range(3000)],
        }
    )  # fmt: skip
    (folder / "parts").mkdir()
    parquet.write_table(table.slice(0, 1000), folder / "parts" / "0.parquet")
    parquet.write_table(table.slice(1000), folder / "parts" / "1.parquet")
    assert run("convert", folder / "parts", folder / "store") == 0
    store = SampleStore(folder / "store", verify=True)
    assert len(store) == 3000
    for number in (0, 999, 1000, 2999):
        found = store[number]
        assert (int(found["n"]), float(found["x"]), found["s"]) == (number, number / 2, f"s{number}")
        assert bytes(found["b"].tolist()) == bytes([number % 256]) * (number % 5)
        assert found["t"].tolist() == list(range(number % 4))
    parquet.write_table(pyarrow.table({"n": [1, None]}), folder / "null.parquet")
    assert run("convert", folder / "null.parquet", folder / "other") == 2
    assert "column 'n' has no value" in capsys.readouterr().err


def test_tars_and_shards(folder: Path) -> None:
    (folder / "tars").mkdir()
    write_tar(folder / "tars" / "x.tar", range(20))
    assert run("convert", folder / "tars", folder / "store") == 0
    found = SampleStore(folder / "store", verify=True)[7]
    assert found["__key__"] == "000007"
    assert bytes(found["jpg"].tolist()) == tar_sample(7)["jpg"]
    (folder / "mds").mkdir()
    write_mds(folder / "mds", 20)
    assert run("convert", folder / "mds", folder / "from mds") == 0
    back: dict[str, Any] = SampleStore(folder / "from mds")[7]
    back = {**back, "label": int(back["label"]), "x": float(back["x"]), "meta": json.loads(back["meta"])}
    assert same_mds(back, 7)


def test_over_several_folders_and_again(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = files(folder / "source")
    words = ("convert", source, folder / "one", folder / "two", "--shard-bytes", "20K", "--alignment", 8)
    assert run(*words) == 0
    assert data_files(folder / "one")
    assert data_files(folder / "two")
    assert run(*words) == 2
    assert "has a sample store already" in capsys.readouterr().err
    assert run(*words, "--overwrite") == 0
    assert run("convert", folder / "one", folder / "copy") == 0
    assert len(SampleStore(folder / "copy", verify=True)) == 30


def test_what_a_store_holds(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(folder / "store")
    assert run("info", folder / "store") == 0
    told = capsys.readouterr().out
    assert told.startswith("native: 100 samples, ")
    assert "column label: int64 []" in told
    assert run("info", folder / "store", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["samples"] == 100
    assert sum(each["samples"] for each in found["files"]) == 100
    (folder / "mds").mkdir()
    write_mds(folder / "mds")
    assert run("info", folder / "mds") == 0
    assert "column image" in capsys.readouterr().out


def test_verifying(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(folder / "store")
    assert run("verify", folder / "store") == 0
    assert capsys.readouterr().out.startswith("[OKAY] 100 samples")
    victim = data_files(folder / "store")[0]
    content = bytearray(victim.read_bytes())
    content[1000] ^= 1
    victim.write_bytes(content)
    assert run("verify", folder / "store") == 1
    told = capsys.readouterr().out
    assert "[DAMAGED] 1 of 100 samples" in told
    assert "DAMAGED sample" in told
    assert run("verify", folder / "store", "--json") == 1
    assert len(json.loads(capsys.readouterr().out)["damaged"]) == 1
    write_tar(folder / "x.tar", range(3))
    assert run("verify", folder / "x.tar") == 0
    assert "there are no checksums" in capsys.readouterr().out


@pytest.mark.parametrize("words", [[], ["convert"], ["convert", "one"], ["verify", "a", "b"], ["make"], ["info", "-a"]])
def test_wrong_words(words: list[str]) -> None:
    status, told = refusal(cli.main, words)
    assert status == 2
    assert "usage: nvme-data" in told


def test_what_is_not_there(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "file.txt").touch()
    (folder / "empty").mkdir()
    for source, words in (("nothing", "No such file"), ("file.txt", "not a .npy"), ("empty", "has no files")):
        assert run("convert", folder / source, folder / "store") == 2
        assert words in capsys.readouterr().err
    assert run("info", folder / "empty") == 2
    assert "has no samples" in capsys.readouterr().err


def test_what_a_package_is_needed_for(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setitem(sys.modules, "numpy", None)
    (folder / "rows.npy").touch()
    assert run("convert", folder / "rows.npy", folder / "store") == 2
    assert "reading it needs numpy: pip install 'nvme-ops[data]'" in capsys.readouterr().err


def test_a_full_disk(make_file_system: Callable[..., Path], folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    device = make_file_system(16 << 20)
    (folder / "source").mkdir()
    for number in range(5):
        (folder / "source" / str(number)).write_bytes(bytes(8 << 20))
    assert run("convert", folder / "source", device / "store") == 2
    assert "No space left on device" in capsys.readouterr().err
    assert list((device / "store").iterdir()) == []


def test_many_small_files(folder: Path) -> None:
    (folder / "source").mkdir()
    for number in range(3000):
        (folder / "source" / f"{number:05d}").write_bytes(number.to_bytes(4, "little") * (number % 9))
    assert run("convert", folder / "source", folder / "store") == 0
    for number, found in enumerate(SampleStore(folder / "store", verify=True).read(range(3000))):
        assert bytes(found["data"].tolist()) == number.to_bytes(4, "little") * (number % 9)


def test_links_to_folders_are_followed(folder: Path) -> None:
    for name in ("source/ant", "source/cat", "elsewhere/bee"):
        (folder / name).mkdir(parents=True)
        (folder / name / "0.jpg").write_bytes(b"x")
    (folder / "source" / "bee").symlink_to(folder / "elsewhere" / "bee")
    (folder / "source" / "ant" / "round").symlink_to(folder / "source")
    assert run("convert", folder / "source", folder / "store") == 0
    found = SampleStore(folder / "store").read(range(3))
    assert {each["name"]: int(each["label"]) for each in found} == {"ant/0.jpg": 0, "bee/0.jpg": 1, "cat/0.jpg": 2}


def test_a_folder_or_a_link_that_cannot_be_read(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "source" / "ant").mkdir(parents=True)
    (folder / "source" / "ant" / "0.jpg").symlink_to("nothing")
    assert run("convert", folder / "source", folder / "store") == 2
    assert "No such file" in capsys.readouterr().err
    (folder / "source" / "ant" / "0.jpg").unlink()
    (folder / "source" / "ant").chmod(0)

    def body() -> None:
        open_to_all(folder)
        (folder / "source" / "ant").chmod(0)
        give_up_root()
        with pytest.raises(PermissionError):
            open_source(str(folder / "source"))

    in_child(body)


def test_a_store_within_its_source_is_not_converted_too(folder: Path) -> None:
    (folder / "source").mkdir()
    (folder / "source" / "one").write_bytes(b"x")
    for more in ((), ("--overwrite",)):
        assert run("convert", folder / "source", folder / "source" / "store", *more) == 0
        assert len(SampleStore(folder / "source" / "store")) == 1


def test_an_array_of_large_rows_is_read_in_part(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    numpy = pytest.importorskip("numpy")
    numpy.save(folder / "rows.npy", numpy.arange(40, dtype=numpy.int64).repeat(1000).reshape(40, 1000))
    monkeypatch.setattr("nvme_ops.data.convert._AT_ONCE", 24_000)
    asked: list[int] = []
    array = numpy.array

    def noted(rows: Any) -> Any:
        asked.append(len(rows))
        return array(rows)

    monkeypatch.setattr(numpy, "array", noted)
    assert run("convert", folder / "rows.npy", folder / "store") == 0
    assert max(asked) == 3
    assert [int(each[0]) for each in SampleStore(folder / "store").read(range(40))] == list(range(40))


def test_an_empty_array_file(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("numpy")
    (folder / "empty.npy").touch()
    assert run("convert", folder / "empty.npy", folder / "store") == 2
    assert "empty.npy: " in capsys.readouterr().err


def test_interrupted_it_leaves_nothing(folder: Path) -> None:
    (folder / "source").mkdir()
    for number in range(100):
        (folder / "source" / str(number)).write_bytes(bytes(4 << 20))
    words = [sys.executable, "-m", "nvme_ops.data.cli", "convert", str(folder / "source"), str(folder / "store")]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    restored = lambda: signal.signal(signal.SIGINT, signal.default_int_handler)  # noqa: E731
    with subprocess.Popen(words, env=environment, stderr=subprocess.PIPE, text=True, preexec_fn=restored) as process:
        deadline = time.monotonic() + 60
        while not list((folder / "store").glob("samples*")) and process.poll() is None:
            assert time.monotonic() < deadline
            time.sleep(0.005)
        process.send_signal(signal.SIGINT)
        assert process.stderr is not None
        told = process.stderr.read()
    if process.returncode != 0:  # else it was done before
        assert process.returncode == 130
        assert "interrupted" in told
        assert list((folder / "store").iterdir()) == []
