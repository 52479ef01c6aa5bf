"""``nvme-bench workload``: the emulation's arithmetic, small real runs, and what it refuses."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
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
from nvme_ops.measure.workload.feed import Fed, cool, feed, search
from nvme_ops.measure.workload.readers import OURS, READERS, DataSet, Reader, checked, made
from nvme_ops.measure.workload.table import JOBS, LAYER, MODEL, WRITING
from tests.conftest import REPOSITORY, refusal, run_python


@pytest.fixture(autouse=True)
def _signals_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stop, "leave_on_signals", lambda: None)


def main(words: list[str]) -> int:
    return bench.main(["workload", *words])


def data_set(folder: Path, sizes: list[int], batch: int = 10, **more: Any) -> DataSet:
    return DataSet(folder, sizes, batch, workers=1, **more)


def scripted(data: DataSet, seconds: float) -> Reader:
    """Takes so long for each batch."""

    def batches() -> Iterator[Any]:
        for _ in range(1000):
            time.sleep(seconds)
            yield torch.zeros(data.batch, 100, dtype=torch.uint8)

    return Reader("scripted", data, [], batches)


def test_a_fast_reader_keeps_accelerators_busy(tmp_path: Path) -> None:
    found = feed(scripted(data_set(tmp_path, [100]), 0.0), 3, 0.02, 0.2)
    assert found.utilization > 0.9
    assert found.accelerators == 3
    assert found.nbytes == found.samples * 100
    assert 3 * 0.2 / 0.02 * 0.5 < found.samples / 10 < 3 * 0.2 / 0.02 * 3


def test_a_slow_reader_does_not(tmp_path: Path) -> None:
    """Four accelerators want a batch each 5 ms, and get one each 5 ms in all."""
    found = feed(scripted(data_set(tmp_path, [100]), 0.005), 4, 0.005, 0.3)
    assert found.utilization < 0.4
    assert found.wait(0.5) > 0.005
    assert found.latency(0.5) > found.wait(0.5)
    assert len(found.latencies) == len(found.waits)


def test_reading_is_hidden_behind_computing(tmp_path: Path) -> None:
    """Each batch takes nearly as long to read as to compute on: with two buffers that costs next to nothing."""
    found = feed(scripted(data_set(tmp_path, [100]), 0.016), 1, 0.02, 0.4)
    assert found.utilization > 0.8


@pytest.mark.parametrize("capacity", [0, 1, 2, 7, 30])
def test_the_search_finds_how_many_are_fed(capacity: int) -> None:
    calls = []

    def measure(count: int) -> Fed:
        calls.append(count)
        return Fed(count, 1.0 if count <= capacity else capacity / count * 0.8, 1, 1, 1.0, [])

    fed, results = search(measure)
    assert fed <= capacity
    assert fed >= capacity * 0.85
    assert [each.accelerators for each in results] == sorted(calls)
    assert search(lambda count: Fed(count, 1.0, 1, 1, 1.0, []), most=64)[0] >= 57


@pytest.mark.parametrize("name", READERS)
@pytest.mark.parametrize("sizes", [[5000] * 45, [100 + 37 * number for number in range(45)]], ids=["fixed", "varying"])
def test_each_reader_reads_what_it_wrote(name: str, sizes: list[int], folder: Path) -> None:
    package = {"memmap": "numpy", "safetensors": "safetensors", "webdataset": "webdataset", "streaming": "streaming"}
    if name in package:
        pytest.importorskip(package[name])
    reader = READERS[name](data_set(folder, sizes))
    seen = [int.from_bytes(bytes(each[:8].tolist()), "little") for batch in checked(reader) for each in batch]
    assert sorted(seen) == list(range(45))
    assert all(path.exists() for path in reader.files)
    if name not in ("webdataset", "streaming"):
        assert seen != sorted(seen)


def test_a_reader_that_reads_something_else_is_found(tmp_path: Path) -> None:
    with pytest.raises(WrongData, match="other bytes than were written"):
        list(checked(scripted(data_set(tmp_path, [100] * 10), 0.0)))


@pytest.mark.parametrize("compute", [0.1, 0.3])
def test_no_more_samples_than_can_be_computed_on(tmp_path: Path, compute: float) -> None:
    found = feed(scripted(data_set(tmp_path, [100]), 0.0), 1, compute, 0.4)
    assert found.samples / found.seconds <= 10 / compute * 1.001


def test_epochs_end_with_whole_batches(tmp_path: Path) -> None:
    for name in JOBS:
        for total in (1, 10_000_000, 2_000_000_000):
            assert len(cli._sizes(JOBS[name], total)) % JOBS[name].batch == 0
    assert len(data_set(tmp_path, [100] * 45).part(44).sizes) == 40


def test_the_jobs() -> None:
    assert LAYER == 218_112_000
    assert MODEL == 8_030_261_248, "as Llama 3 8B has"
    assert all(job.source and job.record * job.batch / job.compute > 1e4 for job in JOBS.values())
    assert set(WRITING) == {"llm-checkpoint", "zero-infinity", "inference-log"}


def run(folder: Path, *words: str) -> dict[str, Any]:
    file = folder / "found.json"
    given = ["--folder", str(folder), "--size", "2M", "--seconds", "0.1", "--output", str(file), *words]
    assert main(given) == 0
    found: dict[str, Any] = json.loads(file.read_text())
    assert found["command"] == ["nvme-bench", "workload", *given]
    assert found["machine"]["kernel"] == os.uname().release
    assert set(found["folders"]) == {str(folder)}
    assert found["interrupted"] is False
    file.unlink()
    jobs: dict[str, Any] = found["jobs"]
    return jobs


def test_a_small_run(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = run(folder, "retinanet", "--reader", OURS, "plain", "--slower", "0.2", "--accelerators", "2")
    assert set(found["retinanet"]["curves"]) == {OURS, "plain"}
    for name, (point,) in found["retinanet"]["curves"].items():
        assert 0 < point["utilization"] <= 1
        assert found["retinanet"]["fed"][name] == (2 if point["utilization"] >= 0.9 else 0)
    told = capsys.readouterr().out
    assert "retinanet: object detection; batches of 24 x 315.4 KiB" in told
    assert "reader" in told
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("name", WRITING)
def test_jobs_that_write(folder: Path, name: str) -> None:
    found = run(folder, name, "--slower", "0.1")
    ways = {way["name"]: way["utilization"] for way in found[name]["ways"]}
    assert all(0 < utilization <= 1 for utilization in ways.values())
    assert len(ways) == len(saving.ways(WRITING[name], folder, 1 << 20))
    assert all(way["wait_p99"] >= way["wait_p50"] >= 0 for way in found[name]["ways"])


def test_the_last_checkpoint_is_waited_for(folder: Path) -> None:
    way = saving.ways(WRITING["llm-checkpoint"], folder, 64 << 20)["nvme_ops.save_async"]
    with way() as made:
        made.write()
    assert sum(each.numel() for each in torch.load(folder / "checkpoint.pt").values()) == 16 << 20


def test_accelerators_that_are_not_fed_do_not_count(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = run(folder, "cosmoflow", "--accelerators", "64", "--slower", "0.01")
    assert found["cosmoflow"]["fed"] == {OURS: 0}
    assert re.search(rf"^{OURS} +\S+ \w+ +fewer ", capsys.readouterr().out, re.MULTILINE)


def test_a_file_system_that_is_full(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["retinanet", "--folder", str(folder), "--size", "8M", "--seconds", "0.2", "--accelerators", "1"]
    (folder / "full.json").symlink_to("/dev/full")
    assert main([*words, "--slower", "0.1", "--output", str(folder / "full.json")]) == 2
    assert "nvme-bench: [Errno 28] No space left on device" in capsys.readouterr().err


def test_layers_are_read_in_order(folder: Path) -> None:
    assert not JOBS["zero-inference"].shuffled
    data = DataSet(folder, [1000] * 8, 1, shuffled=False)
    numbers = [int.from_bytes(bytes(batch[0][:8].tolist()), "little") for batch in READERS[OURS](data).batches()]
    assert numbers == list(range(8))


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ([], "usage: nvme-bench workload"),
        (["imagenet", "--folder", "."], "invalid choice: 'imagenet'"),
        (["bert"], "--folder"),
        (["bert", "--folder", "nothing"], "--folder nothing: no such folder"),
        (["bert", "--folder", ".", "--reader", "tar"], "invalid choice: 'tar'"),
        (["bert", "--folder", ".", "--seconds", "0"], "must be numbers greater than 0"),
        (["bert", "--folder", ".", "--seconds", "nan"], "must be numbers greater than 0"),
        (["bert", "--folder", ".", "--slower", "inf"], "must be numbers greater than 0"),
        (["bert", "--folder", ".", "--output", "nothing/x.json"], "its folder does not exist"),
        (["inference-log", "--folder", ".", "--reader", OURS], "--reader is for jobs that read"),
        (["inference-log", "--folder", ".", "--accelerators", "2"], "--accelerators is for jobs that read"),
    ],
)
def test_wrong_words(words: list[str], told: str) -> None:
    status, said = refusal(main, words)
    assert status == 2
    assert told in said


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["llm-checkpoint", "--reader", OURS], "--reader is for jobs that read"),
        (["bert", "--output", "nothing/x.json"], "its folder does not exist"),
    ],
)
def test_it_refuses_before_anything_is_written(
    folder: Path, words: list[str], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setattr(cli, "scratch_folder", lambda *_: pytest.fail("was about to write"))
    status, said = refusal(main, [*words, "--folder", str(folder)])
    assert status == 2
    assert told in said
    assert list(folder.iterdir()) == []


def test_json_to_stdout_is_one_document(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["retinanet", "inference-log", "--folder", str(folder), "--size", "2M", "--seconds", "0.1"]
    assert main([*words, "--slower", "0.2", "--accelerators", "1", "--json"]) == 0
    told = capsys.readouterr()
    assert set(json.loads(told.out)["jobs"]) == {"retinanet", "inference-log"}
    assert "retinanet: object detection" in told.err


@pytest.mark.parametrize("kind", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("group", [False, True])
def test_a_signal_to_end_leaves_nothing(folder: Path, kind: signal.Signals, group: bool) -> None:
    """``group``: torch's workers get it too, and torch raises where it likes; its traceback may be seen."""
    words = [
        "workload",
        "retinanet",
        "--reader",
        *(["plain"] if group else [OURS, "plain"]),
        "--folder",
        str(folder),
        "--size",
        "8M",
        "--seconds",
        "60",
    ]
    process = subprocess.Popen(
        [sys.executable, "-m", "nvme_ops.bench", *words],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    deadline = time.monotonic() + 120
    while not list(folder.rglob("plain/*") if group else folder.rglob("samples-*")) and process.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    if group:
        time.sleep(4)
        os.killpg(process.pid, kind)
    else:
        process.send_signal(kind)
    _, told = process.communicate(timeout=60)
    if not group:
        assert process.returncode == 128 + kind, told
        assert "Traceback" not in told
    assert list(folder.iterdir()) == []


def test_a_folder_without_room(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nvme_ops.measure.workload.cli._sizes", lambda *_: [1 << 60] * 8)
    assert main(["bert", "--folder", str(folder), "--output", str(folder / "x.json")]) == 2
    told = capsys.readouterr()
    assert "nvme-bench: " in told.err
    assert "choose another --size or --folder" in told.err
    assert list(folder.iterdir()) == [], "nothing was measured"


def test_batches_without_room_in_shared_memory_are_refused(folder: Path) -> None:
    """They would be waited for without end: torch only prints that it cannot send them."""
    data = data_set(folder, [1 << 50] * 10)
    for name in sorted(READERS.keys() - {OURS}):
        with pytest.raises(
            Unavailable, match=r"need 3.072e\+04 TiB in /dev/shm and .* free: docker run --shm-size=\d+m, or"
        ):
            made(name, data)
    assert list(folder.iterdir()) == [], "before the data set is written"
    readers._require_shared_memory(DataSet(folder, data.sizes, 10, workers=0))


def test_samples_in_files_are_enough_for_several_batches(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readers, "_MOST_FILES", 16)
    assert len(made("plain", data_set(folder, [100] * 100, 5)).data.sizes) == 40
    monkeypatch.setattr(readers, "_MOST_FILES", 64)
    assert len(made("safetensors", data_set(folder, [100] * 100, 5)).data.sizes) == 60


def test_the_size_of_each_data_set_is_told(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readers, "_MOST_FILES", 100)
    found = run(folder, "bert", "--reader", OURS, "plain", "--accelerators", "1", "--slower", "0.001")
    told = capsys.readouterr().out
    assert "samples/s for an accelerator; a data set of 1.945 MiB\n" in told
    assert found["bert"]["nbytes"] == found["bert"]["data_sets"][OURS] == 816 * 2500
    assert found["bert"]["data_sets"]["plain"] == 8 * 48 * 2500
    assert re.search(rf"^{OURS} +1.945 MiB ", told, re.MULTILINE)
    assert re.search(r"^plain +937.5 KiB ", told, re.MULTILINE)


def test_many_files_that_are_dropped_from_the_page_cache_are_counted(folder: Path) -> None:
    said: list[str] = []
    files = [folder / "file"] * 2001
    files[0].touch()
    cool(Reader("files", data_set(folder, []), files, list), said.append)
    assert said == [f"{count},000 of 2,001 files dropped from the page cache" for count in (1, 2)]


def test_a_layer_is_read_from_the_device(folder: Path) -> None:
    """As by a TensorStore: torch.save has left it in the page cache."""
    way = saving.ways(WRITING["zero-infinity"], folder, 8 << 20)["torch.save and torch.load, cold files"]
    with way() as made:
        for turn in range(4):
            made.before()
            assert cached_share(str(folder / str((turn + 1) % 3))) == 0
            made.write()


@pytest.mark.parametrize("failure", [KeyboardInterrupt, SystemExit])
def test_what_was_measured_until_it_is_interrupted_is_kept(
    folder: Path, failure: type[BaseException], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = []

    def measure(reader: Reader, count: int, *_: object) -> Fed:
        counts.append(count)
        if len(counts) == 5:
            raise failure(143)
        return Fed(count, 1.0 if len(counts) < 4 else 0.5, 1, 1, 1.0, [0.001])

    monkeypatch.setattr(cli, "feed", measure)
    file = folder / "found.json"
    words = ["bert", "--reader", OURS, "plain", "--folder", str(folder), "--size", "1M", "--output", str(file)]
    if failure is KeyboardInterrupt:
        assert main(words) == 130
    else:
        with pytest.raises(SystemExit):
            main(words)
    told = capsys.readouterr()
    assert counts == [1, 2, 4, 8, 6]
    assert re.search(rf"^{OURS} +\S+ \w+ +4 +100 % of 4 ", told.out, re.MULTILINE)
    assert ("interrupted; the files are removed" in told.err) == (failure is KeyboardInterrupt)
    found = json.loads(file.read_text())
    assert found["interrupted"] is True
    assert [each["accelerators"] for each in found["jobs"]["bert"]["curves"][OURS]] == [1, 2, 4, 8]
    assert found["jobs"]["bert"]["fed"] == {OURS: 4}
    assert list(folder.iterdir()) == [file]


def test_wrong_bytes_are_told_and_the_others_are_measured(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    read = readers._content
    monkeypatch.setattr(readers, "_content", lambda path: read(path)[:-1] + b"?")
    file = folder / "found.json"
    words = ["bert", "--reader", "plain", OURS, "--folder", str(folder), "--size", "1M", "--output", str(file)]
    assert main([*words, "--accelerators", "1", "--slower", "0.001", "--seconds", "0.1"]) == 1
    told = capsys.readouterr()
    assert "WRONG DATA: plain: a sample has other bytes than were written" in told.out
    assert "nvme-bench: wrong data: plain" in told.err
    found = json.loads(file.read_text())["jobs"]["bert"]
    assert found["wrong"] == ["plain"]
    assert set(found["curves"]) == {OURS}


def test_memory_that_is_not_there_is_a_line(folder: Path) -> None:
    code = """
        import resource, sys
        from pathlib import Path
        from nvme_ops.measure import bench
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + (192 << 20), resource.RLIM_INFINITY))
        words = ["workload", "llm-checkpoint", "inference-log", "--seconds", "0.1", "--size", "1G", "--folder"]
        sys.exit(bench.main([*words, sys.argv[1]]))
    """
    done = run_python(code, folder)
    assert done.stderr == ""
    assert re.search(r"^nvme_ops.save +- +failed: RuntimeError: .*can't allocate memory", done.stdout, re.MULTILINE)
    assert re.search(r"^nvme_ops.data.AsyncLog +[\d.]+ %", done.stdout, re.MULTILINE)
