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
from nvme_ops.measure.rows import Unavailable, WrongData
from nvme_ops.measure.workload import cli, readers
from nvme_ops.measure.workload.feed import Fed, feed, search
from nvme_ops.measure.workload.readers import OURS, READERS, DataSet, Reader, checked, made
from nvme_ops.measure.workload.table import JOBS


@pytest.mark.parametrize(
    ("reads", "count", "compute", "least", "most"),
    [
        (0.018, 1, 0.02, 0.6, 1.0),  # with two buffers reading is hidden behind computing: else 0.53
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

    fed = feed(Reader("scripted", DataSet(tmp_path, [100], 10), [], batches), count, compute, 0.3)
    assert least <= fed.utilization <= most
    assert fed.samples / fed.seconds <= count * 10 / compute * 1.001, "no more than can be computed on"
    with pytest.raises(WrongData, match="other bytes than were written"):
        list(checked(Reader("scripted", DataSet(tmp_path, [100] * 10, 10), [], batches)))


def test_the_search_finds_how_many_are_fed() -> None:
    for capacity in (0, 1, 7, 30):
        busy = search(lambda count: Fed(count, 1.0 if count <= capacity else 0.5, 1, 1, 1.0, []))  # noqa: B023
        assert capacity * 0.85 <= busy <= capacity


@pytest.mark.parametrize("name", READERS)
def test_each_reader_reads_what_it_wrote(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readers, "_MAX_FILES", 45)
    sizes = [100 + 37 * number for number in range(93)]
    reader = made(READERS[name], DataSet(folder, sizes, 10, workers=1))
    seen = [int.from_bytes(bytes(sample[:8].tolist()), "little") for batch in checked(reader) for sample in batch]
    assert sorted(seen) == list(range(80 if name == "plain" else len(sizes))) != seen
    with pytest.raises(Unavailable, match=r"in /dev/shm and .* free: docker run --shm-size=\d+m, or"):
        made(READERS["plain"], DataSet(folder, [1 << 50] * 10, 10))  # they would be waited for without end


def run(folder: Path, *words: str) -> tuple[int, Any]:
    """A run with little data in a folder of its own: its status and document."""
    file = folder / "found.json"
    given = ["workload", *words, "--folder", str(folder), "--size", "1M", "--seconds", "0.1", "--output", str(file)]
    status = bench.main(given)
    assert list(folder.iterdir()) == [file]
    return status, json.loads(file.read_text())


def test_jobs_are_measured_and_wrong_bytes_are_told(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stop, "leave_on_signals", lambda: None)
    read = readers._content
    monkeypatch.setattr(readers, "_content", lambda path: read(path)[:-1] + b"?")
    words = ["cosmoflow", "llm-checkpoint", "--reader", "plain", OURS, "--accelerators", "1", "--slower", "0.01"]
    status, document = run(folder, *words)
    out, errors = capsys.readouterr()
    assert (status, document["interrupted"]) == (1, False)
    assert "nvme-bench: wrong data: plain" in errors
    assert re.search(r"^plain +.*WRONG DATA: plain: a sample has other bytes than were written$", out, re.MULTILINE)
    reads, writes = document["jobs"]["cosmoflow"], document["jobs"]["llm-checkpoint"]
    assert (reads["wrong"], set(reads["curves"])) == (["plain"], {OURS})
    assert list(writes["curves"]) == ["nvme_ops.save_async", "nvme_ops.save", "torch.save + fsync"]
    for job in (reads, writes):
        for (point,) in job["curves"].values():
            assert 0 < point["utilization"] <= 1
            assert point["wait_p99"] >= point["wait_p50"] >= 0
    assert sum(len(cli._sizes(job, 10_000_000)) % job.batch for job in JOBS.values()) == 0, "batches are whole"


def test_what_was_measured_until_it_is_interrupted_is_kept(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counts = []

    def measure(reader: Reader, count: int, *_: object) -> Fed:
        counts.append(count)
        if len(counts) == 5:
            raise KeyboardInterrupt
        return Fed(count, 1.0 if len(counts) < 4 else 0.5, 1, 1, 1.0, [0.001])

    monkeypatch.setattr(stop, "leave_on_signals", lambda: None)
    monkeypatch.setattr(cli, "feed", measure)
    status, document = run(folder, "cosmoflow", "--reader", "all")
    assert (status, counts, document["interrupted"]) == (130, [1, 2, 4, 8, 6], True)
    assert [point["accelerators"] for point in document["jobs"]["cosmoflow"]["curves"][OURS]] == [1, 2, 4, 8]
    assert document["jobs"]["cosmoflow"]["fed"] == {OURS: 4}
