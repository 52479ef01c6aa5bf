"""The scaling benchmark: its arithmetic; devices of a fixed rate, gone afterwards whatever happened; cgroups."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import cgroups, scaling
from benchmarks.cgroups import Group, hand_down, hierarchy, join
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


@pytest.fixture
def usable() -> None:
    if reason := why_not():
        pytest.skip(reason)


def left_over() -> list[str]:
    """What is there of throttled devices: images, loop devices, mounts, cgroups."""
    images = [str(path) for path in Path(scaling.MEMORY).glob(f"{PREFIX}*")]
    mounts = [line for line in Path("/proc/self/mounts").read_text().splitlines() if PREFIX in line]
    loops = [
        str(path) for path in Path("/sys/block").glob("loop*/loop/backing_file") if PREFIX in _text_or_nothing(path)
    ]
    with contextlib.suppress(NotUsable):
        root, _ = hierarchy("io", Path("/proc/self/mounts").read_text())
        return [*images, *mounts, *loops, *map(str, root.glob(f"{cgroups.PREFIX}*"))]
    return [*images, *mounts, *loops]


def _text_or_nothing(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


@pytest.fixture
def nothing_left() -> Callable[[], None]:
    """Fails where more is left than there was before; the kernel lets go of a loop device a little later."""
    before = set(left_over())

    def check() -> None:
        end = time.monotonic() + 10
        while (more := set(left_over()) - before) and time.monotonic() < end:
            time.sleep(0.05)
        assert not more

    return check


def test_devices_are_mounted_and_gone_afterwards(usable: None, nothing_left: Callable[[], None]) -> None:
    with scaling.throttled(2, 64 * MIB, SIZE) as devices:
        assert len(devices.folders) == len(set(devices.folders.values())) == 2
        for folder in devices.folders.values():
            assert os.path.ismount(folder)
            (Path(folder) / "data").write_bytes(bytes(MIB))
    assert not any(os.path.exists(folder) for folder in devices.folders.values())
    nothing_left()


def test_direct_io_of_the_op_is_counted_in_the_group(usable: None) -> None:
    with scaling.throttled(1, 256 * MIB, SIZE) as devices:
        path, size = Path(next(iter(devices.folders.values()))) / "data", 8 * MIB

        def write_and_read() -> None:
            join(devices.group.processes)
            handle = aio_handle()
            data = handle.new_cpu_locked_tensor(size, torch.empty(0, dtype=torch.uint8))
            handle.sync_pwrite(data, path)
            handle.async_pread(data, path)
            handle.wait()

        in_child(write_and_read)
        assert all(count >= size for count in _counted(devices))


def _counted(devices: scaling.Devices) -> tuple[int, int]:
    """Bytes that the group has read and written, past the limits."""
    name = "io.stat" if devices.group.version == 2 else "blkio.throttle.io_service_bytes"
    text = (devices.group.path / name).read_text()
    reads = re.findall(rf"^{next(iter(devices.folders))} (?:Read |.*rbytes=)(\d+)", text, re.MULTILINE)
    writes = re.findall(rf"^{next(iter(devices.folders))} (?:Write |.*wbytes=)(\d+)", text, re.MULTILINE)
    return int(reads[0]), int(writes[0])


def test_limits_can_be_lifted(usable: None) -> None:
    with scaling.throttled(1, 32 * MIB, SIZE) as devices:
        with devices.unlimited():
            assert _limits(devices.group) == []
        assert _limits(devices.group) == [next(iter(devices.folders))] * (1 if devices.group.version == 2 else 2)


def _limits(group: Group) -> list[str]:
    names = ["io.max"] if group.version == 2 else [f"blkio.throttle.{way}_bps_device" for way in ("read", "write")]
    return [line.split()[0] for name in names for line in (group.path / name).read_text().splitlines()]


def test_who_joined_leaves_at_the_end(usable: None, nothing_left: Callable[[], None]) -> None:
    def joined() -> None:
        with scaling.throttled(1, 64 * MIB, SIZE) as devices:
            join(devices.group.processes)
            assert str(os.getpid()) in Path(devices.group.processes).read_text().split()

    in_child(joined)
    nothing_left()


@pytest.mark.parametrize("failure", [RuntimeError, KeyboardInterrupt, SystemExit])
def test_all_is_removed_after_a_failure(
    usable: None, nothing_left: Callable[[], None], failure: type[BaseException]
) -> None:
    with pytest.raises(failure), scaling.throttled(1, 64 * MIB, SIZE):
        raise failure
    nothing_left()


@pytest.mark.parametrize("number", range(4), ids=["losetup", "mkfs", "mount", "the second losetup"])
def test_all_is_removed_when_the_making_fails(
    usable: None, nothing_left: Callable[[], None], monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    run, calls = scaling.run_tool, 0

    def failing(*words: str) -> str:
        nonlocal calls
        calls += 1
        if calls == number + 1:
            raise NotUsable("made up")
        return run(*words)

    monkeypatch.setattr(scaling, "run_tool", failing)
    with pytest.raises(NotUsable, match="made up"), scaling.throttled(2, 64 * MIB, SIZE):
        pass
    nothing_left()


@pytest.mark.usefixtures("no_collection")
def test_a_signal_while_they_are_made_acts_afterwards(
    usable: None, nothing_left: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = scaling.run_tool

    def interrupted(*words: str) -> str:
        signal.raise_signal(signal.SIGINT)
        return run(*words)

    monkeypatch.setattr(scaling, "run_tool", interrupted)
    with pytest.raises(KeyboardInterrupt), scaling.throttled(1, 64 * MIB, SIZE):
        pytest.fail("the signal was lost")
    nothing_left()


def test_processes_that_stay_are_ended_and_open_files_do_not_matter(
    usable: None, nothing_left: Callable[[], None]
) -> None:
    with scaling.throttled(1, 64 * MIB, SIZE) as devices:
        kept = (Path(next(iter(devices.folders.values()))) / "data").open("wb")
        process = subprocess.Popen(
            ["sleep", "60"],
            cwd=next(iter(devices.folders.values())),
            preexec_fn=functools.partial(join, devices.group.processes),
        )
    assert process.wait(10) == -signal.SIGKILL
    kept.close()
    nothing_left()


def test_too_little_memory_is_said() -> None:
    if shutil.which("losetup") is None or shutil.which("mkfs.ext4") is None:
        pytest.skip("losetup or mkfs.ext4 is not installed")  # which is said first
    with pytest.raises(NotUsable, match=r"of memory are needed|need root"), scaling.throttled(1, MIB, 1 << 50):
        pass


def test_root_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(NotUsable, match="need root"), scaling.throttled(1, MIB, SIZE):
        pass


def test_a_missing_tool_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setenv("PATH", str(tmp_path))
    missing = pytest.raises(NotUsable, match="losetup is not installed: apt-get install")
    with missing, scaling.throttled(1, MIB, SIZE):
        pass


# The cgroup's versions


def _version_2(folder: Path, controllers: str) -> str:
    folder.mkdir()
    (folder / "cgroup.controllers").write_text(controllers)
    return f"cgroup2 {folder} cgroup2 rw 0 0\n"


def test_version_2_is_taken_where_it_has_the_controller(tmp_path: Path) -> None:
    mounts = "cgroup /v1 cgroup rw,blkio 0 0\n" + _version_2(tmp_path / "v2", "cpu io memory\n")
    assert hierarchy("io", mounts) == (tmp_path / "v2", 2)


def test_version_1_is_taken_otherwise(tmp_path: Path) -> None:
    mounts = "cgroup /cpu cgroup rw,cpu 0 0\ncgroup /v1 cgroup rw,blkio 0 0\n" + _version_2(
        tmp_path / "v2", "hugetlb\n"
    )
    assert hierarchy("io", mounts) == (Path("/v1"), 1)


def test_a_machine_without_either_is_told() -> None:
    with pytest.raises(NotUsable, match="no cgroup can limit"):
        hierarchy("io", "tmpfs /tmp tmpfs rw 0 0\n")


def test_the_words_of_version_2(tmp_path: Path) -> None:
    (tmp_path / "io.max").touch()
    group = Group(tmp_path, 2)
    group.limit_device("7:0", 1000)
    assert (tmp_path / "io.max").read_text() == "7:0 rbps=1000 wbps=1000"
    group.limit_device("7:0", None)
    assert (tmp_path / "io.max").read_text() == "7:0 rbps=max wbps=max"


def test_the_words_of_version_1(tmp_path: Path) -> None:
    Group(tmp_path, 1).limit_device("7:0", 1000)
    assert (tmp_path / "blkio.throttle.read_bps_device").read_text() == "7:0 1000"
    Group(tmp_path, 1).limit_device("7:0", None)
    assert (tmp_path / "blkio.throttle.write_bps_device").read_text() == "7:0 0"


def test_a_kernel_that_takes_no_limit_is_told(tmp_path: Path) -> None:
    with pytest.raises(NotUsable, match=r"the limit cannot be set: .*io\.max: No such file"):
        Group(tmp_path / "none", 2).limit_device("7:0", 1000)


def test_the_controller_is_handed_down_and_taken_back(tmp_path: Path) -> None:
    control = tmp_path / "cgroup.subtree_control"
    control.write_text("cpu")
    with contextlib.ExitStack() as stack:
        hand_down(stack, control, "io")
        assert control.read_text() == "+io"
    assert control.read_text() == "-io"
    control.write_text("cpu io")
    with contextlib.ExitStack() as stack:
        hand_down(stack, control, "io")
    assert control.read_text() == "cpu io"


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
    alone[1].samples[0] = None
    assert scaling.sums(alone, [2])[2].samples[0] is None


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

    row = scaling.shared_row("lazy", tasks, [Lazy(), Lazy()])  # type: ignore[list-item]
    row.before()
    with pytest.raises(WrongData, match="tensor and file differ"):
        row.check()
