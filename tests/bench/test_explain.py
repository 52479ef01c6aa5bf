"""``nvme-bench explain``: what it concludes from made-up rates, what it refuses, and small real runs."""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import resource
from pathlib import Path
from typing import Any

import pytest

from nvme_ops.base.text import MIB
from nvme_ops.filesystem import device
from nvme_ops.measure import bench, explain, files
from nvme_ops.measure.judge import EMPTY, FIO, GDS, GPU, KEPT, LOCKED, NEW, Judgement, Measured, judge, two_lanes
from nvme_ops.op_builder.machine import Host
from tests.conftest import give_up_root, in_child, open_to_all, watched

# Judgements: rates in GB/s, 2 unless said

LOCKED_2, NEW_2 = two_lanes(LOCKED), two_lanes(NEW)
HOST_ROWS = (FIO, LOCKED, EMPTY, KEPT, NEW, LOCKED_2, NEW_2)
STEADY, QUIET, NOISY = (1.0, 1.0, 1.0), (1.0, 1.004, 0.997), (1.0, 1.25, 0.8, 1.15, 0.85)


def rows(gigabytes: dict[str, float], wobble: tuple[float, ...] = QUIET) -> dict[str, list[float | None]]:
    """Rates by row; each row wobbles in another order."""
    made: dict[str, list[float | None]] = {}
    for number, name in enumerate(dict.fromkeys([*HOST_ROWS, *gigabytes])):
        turn = number % len(wobble)
        made[name] = [1e9 * gigabytes.get(name, 2.0) * factor for factor in wobble[turn:] + wobble[:turn]]
    return made


def judged(
    gigabytes: dict[str, float], wobble: tuple[float, ...] = QUIET, reached: str = NEW, **more: Any
) -> Judgement:
    return judge(Measured(False, reached, rows(gigabytes, wobble), **more))


def names(judgement: Judgement) -> list[str]:
    return [finding.name for finding in judgement.findings]


@pytest.mark.parametrize(
    ("gigabytes", "more", "found"),
    [
        ({}, {}, []),
        ({NEW: 0.8, NEW_2: 0.8, EMPTY: 0.8}, {}, ["page faults"]),
        ({KEPT: 1.2, NEW: 1.2, NEW_2: 1.2}, {}, ["memory copies"]),
        # seconds for each GB: 1 - 0.77 - 0.5 - 0.33
        ({FIO: 3, NEW: 1, KEPT: 1.3, NEW_2: 1, LOCKED_2: 3}, {}, ["memory copies", "page faults", "one lane"]),
        ({FIO: 3.5, LOCKED_2: 3.5}, {"busy": {LOCKED: 0.84}}, ["one lane"]),
        ({FIO: 3.5}, {"busy": {LOCKED: 0.84}}, ["settings"]),
        ({KEPT: 1, NEW: 1, NEW_2: 1.6}, {"busy": {NEW: 0.99}}, ["memory copies", "CPU"]),
        ({FIO: 4, LOCKED_2: 4, NEW_2: 3}, {"busy": {LOCKED: 0.97, NEW: 0.97}}, ["CPU"]),  # each is named once
        ({FIO: 4}, {"hindrances": [("no io_uring", "allow it")]}, ["what the system refuses"]),
        ({}, {"hindrances": [("no io_uring", "allow it")]}, []),
        ({NEW: 1.8, KEPT: 1.9}, {"wobble": NOISY}, []),
        ({FIO: 2.04}, {"wobble": STEADY}, []),  # sure, and of no use
        ({NEW: 1.4, NEW_2: 1.4, KEPT: 1.75}, {"wobble": (1.0, 1.08, 0.92)}, ["page faults and memory copies"]),
        ({NEW: 1.7, NEW_2: 1.7, KEPT: 1.85, FIO: 2.3}, {"wobble": (1.0, 1.06, 0.94)}, ["several small parts"]),
        ({GPU: 1}, {"reached": GPU}, ["copy to the GPU"]),
    ],
)
def test_what_is_lost_to_what(gigabytes: dict[str, float], more: dict[str, Any], found: list[str]) -> None:
    judgement = judged(gigabytes, **more)
    assert names(judgement) == found
    assert all(0 <= finding.share <= 1 for finding in judgement.findings)
    assert ("the device is the limit" in judgement.verdict) == (not found)


def test_the_verdict_has_the_rates_and_the_greatest_loss() -> None:
    assert judged({}).verdict == "read: the device is the limit: 2 GB/s reached, 100% of its ceiling of 2 GB/s"
    assert judged({NEW: 1.8, KEPT: 1.9}, NOISY).verdict.endswith("as far as this run can tell")
    found = judged({FIO: 3, NEW: 1, KEPT: 1.3, NEW_2: 1, LOCKED_2: 3})
    assert [finding.share for finding in found.findings] == pytest.approx([0.404, 0.346, 0.25], abs=0.02)
    assert found.verdict.endswith("33% of the ceiling of 3 GB/s; most is lost to: memory copies (40% of the gap)")


def test_what_was_faster_is_advised() -> None:
    for gigabytes, reached, fix in (
        ({NEW: 0.8, EMPTY: 0.8}, NEW, "keep the tensor and read into it again"),
        ({NEW: 0.8, EMPTY: 1.9}, NEW, "nvme_ops.empty(...), new each time: 1.9 GB/s"),
        ({FIO: 4.0, LOCKED_2: 4.0}, NEW, "intra_op_parallelism=2"),
        ({FIO: 4.0}, NEW, "nvme-tune"),
        ({GPU: 1.0, GDS: 1.9}, GPU, "nvme_ops.gds_handle(): 1.9 GB/s"),
        ({GPU: 1.0}, GPU, "nvme-report"),
    ):
        assert fix in judged(gigabytes, reached=reached).findings[0].fix


def test_rounds_that_disagree_or_failed_are_minded() -> None:
    rates = rows({}, STEADY)
    for rounds in ([4e9, 1.9e9, 4e9], [3e9, 3e9, 2e9]):  # equal counts against a difference
        assert judge(Measured(False, NEW, {**rates, FIO: rounds})).findings == []
    rates = rows({NEW: 0.8, NEW_2: 0.8})
    rates[NEW][1] = rates[KEPT][0] = rates[FIO][2] = None
    assert names(judge(Measured(False, NEW, rates))) == ["page faults"]


def test_the_ceiling_is_fio_or_what_is_surely_faster_with_page_locked_memory() -> None:
    assert [judged({FIO: rate}).ceiling for rate in (1.0, 1.99)] == [LOCKED, FIO]
    for faster, ceiling in (({LOCKED_2: 3.0}, LOCKED_2), ({NEW_2: 3.0}, LOCKED), ({LOCKED_2: 2.02}, LOCKED)):
        assert judge(Measured(False, NEW, {**rows(faster), FIO: []})).ceiling == ceiling


def test_writes_know_no_page_faults() -> None:
    found = judge(Measured(True, KEPT, rows({KEPT: 1.0, NEW: 0.5})))
    assert names(found) == ["memory copies"]
    assert found.verdict.startswith("write: 1 GB/s reached, 50%")
    rates = {FIO: [2e9] * 3, LOCKED: [2e9] * 3, GPU: [1e9] * 3}
    assert names(judge(Measured(True, GPU, rates))) == ["copy from the GPU"]


@pytest.fixture
def file(folder: Path) -> Path:
    path = folder / "a file"
    files.make_file(str(path), 2 * MIB + 5)
    return path


def explained(*words: object) -> tuple[int, str]:
    """The status, and what is printed, on one line."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        status = bench.main(["explain", *map(str, words)])
    return status, said.getvalue().rstrip("\n")


def test_what_cannot_be_explained_is_refused(
    folder: Path, tmp_path: Path, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*words: object) -> str:
        status, text = explained(*words)
        assert (status, text[:12]) == (2, "nvme-bench: ")
        return text

    (folder / "small").write_bytes(b"x" * 5000)
    os.mkfifo(tmp_path / "pipe")
    assert "No such file or directory" in refused(tmp_path / "none")
    assert "less than a block of 1 MiB" in refused(folder / "small")
    assert "is no regular file" in refused("/dev/null")
    assert "is no regular file" in refused(tmp_path / "pipe")
    assert "of free space are needed" in refused(folder, "--io_size", "1000T")
    monkeypatch.setattr(explain, "free_memory", lambda: 4 * MIB)
    for place in (file, folder):
        assert "takes 8 MiB of memory and 4 MiB are free" in refused(place, "--io_size", "2M")
    assert {path.name for path in folder.iterdir()} <= {file.name, "small", "pipe"}
    mount = device.mount_of(Host(), "/dev/shm")
    if mount is not None and mount.kind in device.MEMORY:
        assert "lives in memory" in refused("/dev/shm")
    sysfs = "/sys/kernel/mm/transparent_hugepage/enabled"  # refuses O_DIRECT
    if os.path.isfile(sysfs):
        monkeypatch.setattr(explain, "_MIN_FILE", 1)
        assert "refuses O_DIRECT" in refused(sysfs)


def state(path: Path) -> tuple[str, int, int, int]:
    about = path.stat()
    return hashlib.sha256(path.read_bytes()).hexdigest(), about.st_mtime_ns, about.st_ctime_ns, about.st_mode


def test_a_file_is_explained_as_found_and_cold_and_left_as_it_was(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if files.cached_bytes(str(file)) is None:
        pytest.skip("the kernel does not say what lies in the page cache")
    before = state(file)
    cached = watched(monkeypatch, explain, "interleave", lambda *_: files.cached_share(str(file)))
    files.make_warm(str(file))
    status, text = explained(file, "--rounds", "2")
    lines = text.splitlines()
    assert status == 0
    assert cached == [1, 0]
    assert lines[0].startswith("read: ")
    for name in (LOCKED, EMPTY, KEPT, NEW, LOCKED_2, NEW_2):
        assert any(line.startswith(f"{name}  ") for line in lines), name
    assert "100% of it in the page cache, as found " in " ".join(text.split())
    assert len(lines) <= 40
    assert state(file) == before
    assert list(file.parent.iterdir()) == [file]


def test_what_the_system_refuses_is_told_and_a_file_need_only_be_readable(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))  # without fio
    monkeypatch.setenv("NVME_OPS_BACKEND", "threads")
    open_to_all(file.parent)
    os.truncate(file, 64 * MIB)
    file.chmod(0o444)
    file.parent.chmod(0o555)
    # once as ourselves: another user may not even see our Python
    status, text = explained(file, "--rounds", "2", "--io_size", "1M")
    assert status == 0
    assert "page-locked memory: fio is not installed: apt-get install fio." in " ".join(text.split())
    assert "are not on the device (holes or compression)" in " ".join(text.split())

    def body() -> None:
        give_up_root()
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (0, 0))
        status, text = explained(file, "--rounds", "2", "--io_size", "1M")
        assert status == 0, text
        assert "refused: NVME_OPS_BACKEND=threads; fix: unset NVME_OPS_BACKEND" in text
        assert "refused: memory cannot be locked (RLIMIT_MEMLOCK); fix: " in text

    in_child(body)
    file.parent.chmod(0o755)


def test_a_folder_is_explained_in_both_directions_and_left_empty(folder: Path) -> None:
    status, text = explained(folder, "--rounds", "2", "--io_size", "4M", "--write")
    assert status == 0
    assert [line.split(":")[0] for line in text.splitlines()[:2]] == ["read", "write"]
    assert text.count("what was reached") == 2
    assert list(folder.iterdir()) == []
