"""``nvme-bench workload``: the emulation's arithmetic, its readers and writers, and small real runs."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from nvme_ops.measure import bench, stop
from nvme_ops.measure.files import cached_share
from nvme_ops.measure.rows import Unavailable, WrongData
from nvme_ops.measure.workload import cli, readers, saving
from nvme_ops.measure.workload.feed import Fed, feed, search
from nvme_ops.measure.workload.readers import OURS, READERS, DataSet, Reader, checked, made
from nvme_ops.measure.workload.table import JOBS, WRITING


@pytest.fixture(autouse=True)
def _signals_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stop, "leave_on_signals", lambda: None)


def data_set(folder: Path, sizes: list[int], batch: int = 10, **more: Any) -> DataSet:
    return DataSet(folder, sizes, batch, workers=1, **more)


def numbers(batches: Any) -> list[int]:
    """Of the samples."""
    return [int.from_bytes(bytes(each[:8].tolist()), "little") for batch in batches for each in batch]


@pytest.mark.parametrize(
    ("reads", "count", "compute", "least", "most"),
    [
        (0.016, 1, 0.02, 0.8, 1.0),  # with two buffers reading is hidden behind computing
        (0.005, 4, 0.005, 0.0, 0.4),  # four want a batch each 5 ms, and get one each 5 ms in all
    ],
)
def test_accelerators_are_as_busy_as_they_are_fed(
    tmp_path: Path, reads: float, count: int, compute: float, least: float, most: float
) -> None:
    def batches() -> Iterator[Any]:
        for _ in range(1000):
            time.sleep(reads)
            yield torch.zeros(10, 100, dtype=torch.uint8)

    found = feed(Reader("scripted", data_set(tmp_path, [100]), [], batches), count, compute, 0.3)
    assert least <= found.utilization <= most
    assert (found.accelerators, found.nbytes) == (count, found.samples * 100)
    assert found.samples / found.seconds <= count * 10 / compute * 1.001, "no more than can be computed on"
    assert found.latency(0.5) >= found.wait(0.5) >= (0.005 if most < 0.5 else 0)
    with pytest.raises(WrongData, match="other bytes than were written"):
        list(checked(Reader("scripted", data_set(tmp_path, [100] * 10), [], batches)))


@pytest.mark.parametrize("capacity", [0, 1, 7, 30])
def test_the_search_finds_how_many_are_fed(capacity: int) -> None:
    calls = []

    def measure(count: int) -> Fed:
        calls.append(count)
        return Fed(count, 1.0 if count <= capacity else capacity / count * 0.8, 1, 1, 1.0, [])

    fed, results = search(measure)
    assert capacity * 0.85 <= fed <= capacity
    assert [each.accelerators for each in results] == sorted(calls)
    assert search(lambda count: Fed(count, 1.0, 1, 1, 1.0, []), most=64)[0] >= 57


def test_batches_are_whole(tmp_path: Path) -> None:
    for job in JOBS.values():
        for total in (1, 10_000_000):
            assert len(cli._sizes(job, total)) % job.batch == 0
    assert len(data_set(tmp_path, [100] * 45).part(44).sizes) == 40


@pytest.mark.parametrize("name", READERS)
def test_each_reader_reads_what_it_wrote(name: str, folder: Path) -> None:
    package = {"memmap": "numpy", "safetensors": "safetensors", "webdataset": "webdataset", "streaming": "streaming"}
    if name in package:
        pytest.importorskip(package[name])
    reader = READERS[name](data_set(folder, [100 + 37 * number for number in range(45)]))
    seen = numbers(checked(reader))
    assert sorted(seen) == list(range(45))
    assert all(path.exists() for path in reader.files)
    if name not in ("webdataset", "streaming"):
        assert seen != sorted(seen)


def test_layers_are_read_in_order(folder: Path) -> None:
    assert not JOBS["zero-inference"].shuffled
    data = DataSet(folder, [1000] * 8, 1, shuffled=False)
    assert numbers(READERS[OURS](data).batches()) == list(range(8))


def test_batches_without_room_in_shared_memory_are_refused(folder: Path) -> None:
    """They would be waited for without end: torch only prints that it cannot send them."""
    data = data_set(folder, [1 << 50] * 10)
    for name in sorted(READERS.keys() - {OURS}):
        with pytest.raises(Unavailable, match=r"in /dev/shm and .* free: docker run --shm-size=\d+m, or"):
            made(name, data)
    assert list(folder.iterdir()) == [], "before the data set is written"
    readers._require_shared_memory(DataSet(folder, data.sizes, 10, workers=0))


def test_the_last_checkpoint_is_waited_for_and_a_layer_read_from_the_device(folder: Path) -> None:
    with saving.ways(WRITING["llm-checkpoint"], folder, 64 << 20)["nvme_ops.save_async"]() as way:
        way.write()
    assert sum(each.numel() for each in torch.load(folder / "checkpoint.pt").values()) == 16 << 20
    with saving.ways(WRITING["zero-infinity"], folder, 8 << 20)["torch.save and torch.load, cold files"]() as way:
        for turn in range(4):
            way.before()
            assert cached_share(str(folder / str((turn + 1) % 3))) in (0, None), "torch.save has left it in the cache"
            way.write()


def run(folder: Path, capsys: pytest.CaptureFixture[str], *words: str, status: int = 0) -> tuple[str, str, Any]:
    """A run with little data in a folder of its own: output, errors and document."""
    file = folder / "found.json"
    given = ["workload", *words, "--folder", str(folder), "--size", "1M", "--seconds", "0.1"]
    assert bench.main([*given, "--output", str(file)]) == status
    assert list(folder.iterdir()) == [file]
    return *capsys.readouterr(), json.loads(file.read_text())


def test_how_many_are_fed_and_by_data_sets_of_which_size_is_told(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readers, "_MAX_FILES", 100)
    words = ["--reader", OURS, "plain", "--accelerators", "2", "--slower", "0.001"]
    out, _, found = run(folder, capsys, "bert", "cosmoflow", *words)
    assert found.keys() == {"command", "machine", "folders", "jobs", "interrupted"}
    assert found["interrupted"] is False
    for job in found["jobs"].values():
        assert job.keys() == {"wrong", "notes", "source", "compute", "nbytes", "data_sets", "fed", "curves"}
        for name, (point,) in job["curves"].items():
            assert 0 < point["utilization"] <= 1
            assert job["fed"][name] == (2 if point["utilization"] >= 0.9 else 0)
    bert = found["jobs"]["bert"]
    assert bert["nbytes"] == bert["data_sets"][OURS] >= bert["data_sets"]["plain"] == 8 * 48 * 2500
    assert re.search(r"^plain +937.5 KiB +(2|fewer) ", out, re.MULTILINE)
    assert "bert: language model, pretraining; batches of 48 x " in out


@pytest.mark.parametrize("name", WRITING)
def test_jobs_that_write(folder: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    (job,) = run(folder, capsys, name, "--slower", "0.1")[2]["jobs"].values()
    assert len(job["ways"]) == len(saving.ways(WRITING[name], folder, 1 << 20))
    for way in job["ways"]:
        assert 0 < way["utilization"] <= 1
        assert way["wait_p99"] >= way["wait_p50"] >= 0


def test_what_was_measured_until_it_is_interrupted_is_kept(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = []

    def measure(reader: Reader, count: int, *_: object) -> Fed:
        counts.append(count)
        if len(counts) == 5:
            raise KeyboardInterrupt
        return Fed(count, 1.0 if len(counts) < 4 else 0.5, 1, 1, 1.0, [0.001])

    monkeypatch.setattr(cli, "feed", measure)
    out, _, found = run(folder, capsys, "bert", "--reader", OURS, "plain", status=130)
    assert re.search(rf"^{OURS} +\S+ \w+ +4 +100 % of 4 ", out, re.MULTILINE)
    assert counts == [1, 2, 4, 8, 6]
    assert found["interrupted"] is True
    assert [each["accelerators"] for each in found["jobs"]["bert"]["curves"][OURS]] == [1, 2, 4, 8]
    assert found["jobs"]["bert"]["fed"] == {OURS: 4}


def test_wrong_bytes_are_told_and_the_others_are_measured(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    read = readers._content
    monkeypatch.setattr(readers, "_content", lambda path: read(path)[:-1] + b"?")
    words = ["bert", "--reader", "plain", OURS, "--accelerators", "1", "--slower", "0.001"]
    out, errors, found = run(folder, capsys, *words, status=1)
    assert "WRONG DATA: plain: a sample has other bytes than were written" in out
    assert "nvme-bench: wrong data: plain" in errors
    assert found["jobs"]["bert"]["wrong"] == ["plain"]
    assert set(found["jobs"]["bert"]["curves"]) == {OURS}
