"""What a process can still have: the machine's memory, and what the limits of its cgroups leave."""

from __future__ import annotations

from pathlib import Path

import pytest

from nvme_ops.limits import free_memory

GIB = 1 << 30


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """A machine with 8 GiB and no cgroup."""
    return files(tmp_path, {"proc/meminfo": f"MemTotal: 9999999 kB\nMemAvailable:   {8 * GIB // 1024} kB\n"})


def files(root: Path, texts: dict[str, str]) -> Path:
    for name, text in texts.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text, encoding="utf-8")
    return root


def version_2(root: Path, own: str, shown: str = "/") -> Path:
    mount = f"31 24 0:27 {shown} /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n"
    return files(root, {"proc/self/cgroup": f"0::{own}\n", "proc/self/mountinfo": mount})


def group(limit: str, used: int, inactive: int = 0) -> dict[str, str]:
    return {
        "memory.max": f"{limit}\n",
        "memory.current": f"{used}\n",
        "memory.stat": f"anon 5\ninactive_file {inactive}\n",
    }


def under(folder: str, texts: dict[str, str]) -> dict[str, str]:
    return {f"{folder}/{name}": text for name, text in texts.items()}


def test_without_limits_it_is_the_machines(machine: Path) -> None:
    assert free_memory(machine) == 8 * GIB
    assert free_memory(version_2(machine, "/job")) == 8 * GIB
    assert free_memory(files(machine, under("sys/fs/cgroup/job", group("max", 5)))) == 8 * GIB


def test_a_limit_leaves_what_is_not_in_use(machine: Path) -> None:
    files(version_2(machine, "/job"), under("sys/fs/cgroup/job", group(str(3 * GIB), GIB, GIB // 2)))
    assert free_memory(machine) == 2 * GIB + GIB // 2, "the kernel gives up inactive pages of files first"


def test_every_group_above_counts(machine: Path) -> None:
    version_2(machine, "/slice/job/step")
    files(machine, under("sys/fs/cgroup/slice/job/step", group("max", GIB)))
    files(machine, under("sys/fs/cgroup/slice/job", group(str(6 * GIB), GIB)))
    files(machine, under("sys/fs/cgroup/slice", group(str(4 * GIB), 3 * GIB)))
    assert free_memory(machine) == GIB


def test_the_limit_from_which_on_a_group_is_held_up_counts(machine: Path) -> None:
    files(version_2(machine, "/job"), under("sys/fs/cgroup/job", {**group("max", 0), "memory.high": f"{GIB}\n"}))
    assert free_memory(machine) == GIB


def test_a_container_sees_its_part_of_the_hierarchy(machine: Path) -> None:
    """With a namespace of its own, and without one."""
    files(machine, under("sys/fs/cgroup", group(str(2 * GIB), GIB)))
    assert free_memory(version_2(machine, "/")) == GIB
    assert free_memory(version_2(machine, "/docker/1f3c", shown="/docker/1f3c")) == GIB
    assert free_memory(version_2(machine, "/../elsewhere", shown="/docker/1f3c")) == GIB


def test_version_1(machine: Path) -> None:
    mount = (
        "32 24 0:28 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n"
        "33 24 0:29 / /sys/fs/cgroup/memory rw,nosuid - cgroup cgroup rw,memory\n"
    )
    files(machine, {"proc/self/cgroup": "5:cpu:/\n4:memory:/job\n0::/\n", "proc/self/mountinfo": mount})
    unlimited = {"memory.limit_in_bytes": "9223372036854771712\n", "memory.usage_in_bytes": "5\n"}
    files(machine, under("sys/fs/cgroup/memory", unlimited))
    assert free_memory(machine) == 8 * GIB
    limited = {
        "memory.limit_in_bytes": f"{2 * GIB}\n",
        "memory.usage_in_bytes": f"{GIB}\n",
        "memory.stat": f"total_inactive_file {GIB // 4}\n",
    }
    files(machine, under("sys/fs/cgroup/memory/job", limited))
    assert free_memory(machine) == GIB + GIB // 4


def test_nothing_is_left_beyond_a_limit(machine: Path) -> None:
    files(version_2(machine, "/job"), under("sys/fs/cgroup/job", group(str(GIB), 2 * GIB)))
    assert free_memory(machine) == 0


def test_this_machine() -> None:
    assert 0 < free_memory() < 1 << 60
