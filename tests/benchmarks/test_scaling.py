"""The scaling benchmark: its arithmetic; devices of a fixed rate, gone afterwards whatever happened; cgroups."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import cgroups, scaling
from benchmarks.cgroups import Group, hierarchy, join
from nvme_ops import aio_handle
from nvme_ops.measure.engines import Task
from nvme_ops.measure.files import NotUsable
from nvme_ops.measure.rows import Row, Sample, WrongData
from nvme_ops.text import MIB
from tests.conftest import in_child

PREFIX = scaling.PREFIX
SIZE = 16 * MIB


@functools.cache
def why_not() -> str:
    """Why there are no throttled devices here; empty where there are."""
    try:
        with scaling.throttled(1, 64 * MIB, SIZE):
            return ""
    except NotUsable as reason:
        return str(reason)


def left_over() -> set[str]:
    """What is there of throttled devices: images, loop devices, mounts, cgroups."""
    found = {str(path) for path in Path(scaling.MEMORY).glob(f"{PREFIX}*")}
    found |= {line for line in Path("/proc/self/mounts").read_text().splitlines() if PREFIX in line}
    for path in Path("/sys/block").glob("loop*/loop/backing_file"):
        with contextlib.suppress(OSError):
            found |= {str(path)} if PREFIX in path.read_text() else set()
    with contextlib.suppress(NotUsable):
        root, _ = hierarchy("io", Path("/proc/self/mounts").read_text())
        found |= set(map(str, root.glob(f"{cgroups.PREFIX}*")))
    return found


@pytest.fixture
def nothing_left() -> Callable[[], None]:
    """Skips without devices; fails where more is left than was there. The kernel is late to let go of a loop device."""
    if reason := why_not():
        pytest.skip(reason)
    before = left_over()

    def check() -> None:
        end = time.monotonic() + 10
        while (more := left_over() - before) and time.monotonic() < end:
            time.sleep(0.05)
        assert not more

    return check


def _limits(group: Group) -> list[str]:
    names = ["io.max"] if group.version == 2 else [f"blkio.throttle.{way}_bps_device" for way in ("read", "write")]
    return [line.split()[0] for name in names for line in (group.path / name).read_text().splitlines()]


def test_devices_are_limited_count_direct_io_and_are_gone_afterwards(nothing_left: Callable[[], None]) -> None:
    size = 8 * MIB
    with scaling.throttled(2, 256 * MIB, SIZE) as devices:
        assert len(set(devices.folders.values())) == 2
        assert all(map(os.path.ismount, devices.folders.values()))
        device, folder = next(iter(devices.folders.items()))
        with devices.unlimited():
            assert _limits(devices.group) == []
        assert set(_limits(devices.group)) == set(devices.folders)

        def write_and_read() -> None:
            join(devices.group.processes)
            handle = aio_handle()
            data = handle.new_cpu_locked_tensor(size, torch.empty(0, dtype=torch.uint8))
            handle.sync_pwrite(data, f"{folder}/data")
            handle.async_pread(data, f"{folder}/data")
            handle.wait()

        in_child(write_and_read)
        name = "io.stat" if devices.group.version == 2 else "blkio.throttle.io_service_bytes"
        text = (devices.group.path / name).read_text()
        for pattern in (r"(?:Read |.*rbytes=)(\d+)", r"(?:Write |.*wbytes=)(\d+)"):
            (count,) = re.findall(rf"^{device} {pattern}", text, re.MULTILINE)
            assert int(count) >= size
    assert not any(map(os.path.exists, devices.folders.values()))
    nothing_left()


@pytest.mark.parametrize("failure", [RuntimeError, KeyboardInterrupt])
def test_processes_and_open_files_do_not_matter_to_the_end(
    nothing_left: Callable[[], None], failure: type[BaseException]
) -> None:
    def joined() -> None:
        with contextlib.suppress(failure), scaling.throttled(1, 64 * MIB, SIZE) as devices:
            (folder,) = devices.folders.values()
            kept = open(f"{folder}/data", "wb")  # noqa: SIM115  (until after the end)
            enter = functools.partial(join, devices.group.processes)
            process = subprocess.Popen(["sleep", "60"], cwd=folder, preexec_fn=enter)
            join(devices.group.processes)
            raise failure
        assert process.wait(10) == -signal.SIGKILL
        kept.close()

    in_child(joined)
    nothing_left()


@pytest.mark.usefixtures("no_collection")
@pytest.mark.parametrize("number", range(5), ids=["losetup", "mkfs", "mount", "the second losetup", "a signal"])
def test_all_is_removed_when_the_making_fails_or_is_interrupted(
    nothing_left: Callable[[], None], monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    run, calls = scaling.run_tool, 0

    def failing(*words: str) -> str:
        nonlocal calls
        calls += 1
        if number == 4:
            signal.raise_signal(signal.SIGINT)  # acts afterwards
        elif calls == number + 1:
            raise NotUsable("made up")
        return run(*words)

    monkeypatch.setattr(scaling, "run_tool", failing)
    with pytest.raises(KeyboardInterrupt if number == 4 else NotUsable), scaling.throttled(2, 64 * MIB, SIZE):
        pytest.fail("the failure was lost")
    nothing_left()


# The cgroup's versions


def test_version_2_is_taken_where_it_has_the_controller(tmp_path: Path) -> None:
    (tmp_path / "cgroup.controllers").write_text("cpu io memory\n")
    two, one = f"cgroup2 {tmp_path} cgroup2 rw 0 0\n", "cgroup /v1 cgroup rw,blkio 0 0\ncgroup /cpu cgroup rw,cpu 0 0\n"
    assert hierarchy("io", one + two) == (tmp_path, 2)
    (tmp_path / "cgroup.controllers").write_text("hugetlb\n")
    assert hierarchy("io", one + two) == (Path("/v1"), 1)
    with pytest.raises(NotUsable, match="no cgroup can limit"):
        hierarchy("io", two)


def test_limits_are_written_in_the_words_of_the_version(tmp_path: Path) -> None:
    for version, name, words in (
        (2, "io.max", ["7:0 rbps=1000 wbps=1000", "7:0 rbps=max wbps=max"]),
        (1, "blkio.throttle.read_bps_device", ["7:0 1000", "7:0 0"]),
        (1, "blkio.throttle.write_bps_device", ["7:0 1000", "7:0 0"]),
    ):
        for limit, expected in zip((1000, None), words, strict=True):
            Group(tmp_path, version).limit_device("7:0", limit)
            assert (tmp_path / name).read_text() == expected
    with pytest.raises(NotUsable, match=r"the limit cannot be set: .*io\.max: No such file"):
        Group(tmp_path / "none", 2).limit_device("7:0", 1000)


# What is measured over them


def test_the_rate_is_divided_by_the_sum_of_each_alone_round_by_round() -> None:
    def measured(name: str, *seconds: float, amount: int = 10**9) -> Row:
        return Row(name, samples=[Sample(value, amount) for value in seconds])

    alone = [measured("a", 1, 2), measured("b", 1, 2)]
    together = {
        (scaling.FIO, 2): measured("fio", 1, 4, amount=2 * 10**9),
        (scaling.HANDLE, 2): measured("ours", 1, 2, amount=2 * 10**9),
        (scaling.HANDLES, 2): measured("slow", 2, 4, amount=2 * 10**9),
    }
    table = scaling.compared("read", "", alone, together)
    added, fio, ours, slow = table.rows
    assert [table.values(row) for row in (added, fio)] == [[2.0, 1.0], [2.0, 0.5]]
    assert table.against(fio, fio.peer) == [1.0, 0.5]
    assert [row.note for row in (fio, ours, slow)] == ["", "aim 0.95: reached", "aim 0.95: missed"]


def test_a_row_that_moves_nothing_is_found_out(tmp_path: Path) -> None:
    tasks = []
    for name in ("a", "b"):
        (tmp_path / name).write_bytes(os.urandom(4 * MIB))
        tasks.append(Task(str(tmp_path / name), 4 * MIB, write=False, pageable_memory=True))

    class Lazy:
        def async_pread(self, buffer: Any, path: str) -> None:
            pass

        def wait(self) -> None:
            pass

    row = scaling.shared_row(tasks, [Lazy(), Lazy()])  # type: ignore[list-item]
    row.before()
    with pytest.raises(WrongData, match="tensor and file differ"):
        row.check()
