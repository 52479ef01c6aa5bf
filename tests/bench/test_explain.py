"""``nvme-bench explain``: what it concludes from made-up rates, what it refuses, and small real runs."""

from __future__ import annotations

import contextlib
import io
import os
from pathlib import Path
from typing import Any

import pytest

from nvme_ops.base.text import MIB
from nvme_ops.filesystem import device
from nvme_ops.measure import bench, explain, files
from nvme_ops.measure.explain import GDS, GPU, KEPT, LOCKED, NEW, Case, two_lanes
from nvme_ops.measure.rows import Row, Sample
from nvme_ops.op_builder.machine import Host
from nvme_ops.report import kernel
from nvme_ops.report.result import judged as result
from tests.conftest import watched

# Judgements: rates in GB/s, 2 unless said

LOCKED_2, NEW_2 = two_lanes(LOCKED), two_lanes(NEW)
STEADY, QUIET, NOISY = (1.0, 1.0, 1.0), (1.0, 1.004, 0.997), (1.0, 1.25, 0.8, 1.15, 0.85)


def judged(
    gigabytes: dict[str, float], wobble: tuple[float, ...] = QUIET, reached: str = NEW, busy: float = 0.1, **more: bool
) -> Case:
    """Rates by row; each row wobbles in another order."""
    rows = []
    for number, name in enumerate(dict.fromkeys([LOCKED, KEPT, NEW, LOCKED_2, NEW_2, *gigabytes])):
        turn = number % len(wobble)
        seconds = [1 / gigabytes.get(name, 2.0) / factor for factor in wobble[turn:] + wobble[:turn]]
        share = busy if name in (reached, LOCKED) else 0.1
        rows.append(Row(name, samples=[Sample(elapsed, 10**9, share * elapsed) for elapsed in seconds]))
    return Case(more.get("write", False), reached, rows)


@pytest.mark.parametrize(
    ("gigabytes", "more", "names"),
    [
        ({}, {}, []),
        ({NEW: 0.8, NEW_2: 0.8}, {}, ["page faults"]),
        ({KEPT: 1.2, NEW: 1.2, NEW_2: 1.2}, {}, ["memory copies"]),
        # seconds for each GB: 1 - 0.77 - 0.5 - 0.33
        ({NEW: 1, KEPT: 1.3, NEW_2: 1, LOCKED_2: 3}, {}, ["memory copies", "page faults", "one lane"]),
        ({LOCKED_2: 3.5}, {}, ["one lane"]),
        ({KEPT: 1, NEW: 1, NEW_2: 1.6}, {"busy": 0.99}, ["memory copies", "CPU", "CPU"]),
        ({}, {"busy": 0.99}, ["CPU"]),  # as fast as can be, by a processor that has no time left
        ({NEW: 1.8, KEPT: 1.9}, {"wobble": NOISY}, []),
        ({LOCKED_2: 2.04}, {"wobble": STEADY}, []),  # sure, and of no use
        ({NEW: 1.4, NEW_2: 1.4, KEPT: 1.75}, {"wobble": (1.0, 1.08, 0.92)}, ["several small parts"]),
        ({GPU: 1}, {"reached": GPU}, ["copy to the GPU"]),
        ({GPU: 1}, {"reached": GPU, "write": True}, ["copy from the GPU"]),
        ({KEPT: 1, NEW: 0.5}, {"reached": KEPT, "write": True}, ["memory copies"]),  # writes know no page faults
    ],
)
def test_what_is_lost_to_what(gigabytes: dict[str, float], more: dict[str, Any], names: list[str]) -> None:
    case = judged(gigabytes, **more)
    assert [finding.name for finding in case.findings] == names
    assert all(0 <= finding.share <= 1 for finding in case.findings)
    assert ("the device is the limit" in case.lines()[0]) == (not names)


def test_the_verdict_has_the_rates_and_what_was_faster_is_advised() -> None:
    assert judged({}).lines()[0] == "read: 2 GB/s reached, 100% of the ceiling of 2 GB/s; the device is the limit"
    verdict, first, measured, *_ = judged({NEW: 1, KEPT: 1.3, NEW_2: 1, LOCKED_2: 3}).lines()
    assert verdict.endswith("33% of the ceiling of 3 GB/s; most is lost to: memory copies")
    assert first == "1. memory copies: 40% of the gap"
    assert measured == f"   measured: {KEPT} 1.3 GB/s, {LOCKED} 2 GB/s"
    assert "GPU tensor, gds_handle: 1.9 GB/s" in judged({GPU: 1.0, GDS: 1.9}, reached=GPU).findings[0].fix
    assert "nvme-report" in judged({GPU: 1.0}, reached=GPU).findings[0].fix


def test_rounds_that_disagree_or_failed_are_minded() -> None:
    rows = [Row(name, samples=[Sample(0.5, 10**9)] * 3) for name in (LOCKED, KEPT, NEW)]
    rows.append(Row(LOCKED_2, samples=[Sample(elapsed, 10**9) for elapsed in (0.25, 0.55, 0.25)]))
    assert Case(False, NEW, rows).findings == [], "one of three rounds is against a difference"
    rows[2].samples, rows[3].samples = [Sample(1.25, 10**9), None, Sample(1.25, 10**9)], []
    assert [finding.name for finding in Case(False, NEW, rows).findings] == ["page faults"]


@pytest.fixture
def file(folder: Path) -> Path:
    path = folder / "a file"
    files.make_file(str(path), 2 * MIB + 5)
    return path


def explained(*words: object) -> tuple[int, str]:
    """The status, and what is printed."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        status = bench.main(["explain", *map(str, words)])
    return status, said.getvalue().rstrip("\n")


def test_what_cannot_be_explained_is_refused(folder: Path, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(words: str, *given: object) -> None:
        status, text = explained(*given)
        assert (status, text[:12]) == (2, "nvme-bench: ")
        assert words in text

    (folder / "small").write_bytes(b"x" * 5000)
    refused("No such file or directory", folder / "none")
    os.mkfifo(folder / "pipe")  # opening it would wait
    for path in (folder / "small", folder / "pipe"):
        refused("is no regular file of 1 MiB", path)
    if (mount := device.mount_of(Host(), "/dev/shm")) is not None and mount.kind in device.MEMORY:
        refused("lives in memory", "/dev/shm")
    monkeypatch.setattr(explain, "free_memory", lambda: 4 * MIB)
    for place in (file, folder):
        refused("takes 6 MiB of memory and 4 MiB are free", place, "--io_size", "2M")
    assert {path.name for path in folder.iterdir()} == {file.name, "small", "pipe"}


def test_a_file_is_explained_cold_and_left_as_it_was(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if files.cached_bytes(str(file)) is None:
        pytest.skip("the kernel does not say what lies in the page cache")
    said = result("memlock limit", "8 MiB", "ulimit -l 65536", {})
    monkeypatch.setattr(kernel, "memlock", lambda _: said)
    before, about = file.read_bytes(), file.stat()
    cached = watched(monkeypatch, explain, "interleave", lambda *_: files.cached_share(str(file)))
    status, text = explained(file, "--rounds", "2")
    lines = text.splitlines()
    assert (status, cached, len(lines) <= 30) == (0, [0], True)
    assert lines[0].startswith("read: ")
    for name in (LOCKED, KEPT, NEW, LOCKED_2, NEW_2):
        assert any(line.startswith(f"{name}  ") for line in lines), name
    assert "100% of it in the page cache before" in text
    assert "refused: memlock limit: 8 MiB; fix: ulimit -l 65536" in text
    assert (file.read_bytes(), file.stat().st_mtime_ns) == (before, about.st_mtime_ns)
    assert list(file.parent.iterdir()) == [file]


def test_a_folder_is_explained_in_both_directions_and_left_empty(folder: Path) -> None:
    status, text = explained(folder, "--rounds", "2", "--io_size", "4M", "--write")
    assert status == 0
    assert [line.split(":")[0] for line in text.splitlines() if " reached, " in line] == ["read", "write"]
    assert list(folder.iterdir()) == []
