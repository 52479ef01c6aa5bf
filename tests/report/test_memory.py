"""The lines about memory: what may be locked, huge pages, /dev/shm."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from nvme_ops.op_builder.machine import Host
from nvme_ops.report import kernel
from nvme_ops.report.result import Status

ROOT = Path(__file__).parents[2]
# Mounts of a process of its own; one who is not root becomes it in a user namespace, where the kernel allows that.
UNSHARE = ["unshare", "-m" if os.geteuid() == 0 else "-rm"]
THP = "sys/kernel/mm/transparent_hugepage/enabled"
HUGE = "sys/kernel/mm/hugepages/hugepages-2048kB"


def host_with(folder: Path, **files: str) -> Host:
    for name, text in files.items():
        file = folder / {"thp": THP, "nr": f"{HUGE}/nr_hugepages", "free": f"{HUGE}/free_hugepages"}.get(name, name)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text + "\n")
    return Host(folder)


@pytest.fixture
def nothing_may_be_locked() -> Iterator[int]:
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (0, hard))
    yield hard
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (soft, hard))


@pytest.mark.usefixtures("nothing_may_be_locked")
def test_a_memlock_limit_of_nothing_is_a_warning(tmp_path: Path) -> None:
    result = kernel.memlock(Host(tmp_path))  # no /proc/self/status: no privilege is known
    assert result.status is Status.WARNING
    assert result.detail.startswith("0 B")
    assert "memlock" in result.fix or result.fix.startswith("ulimit -l")


@pytest.mark.parametrize(
    ("hard", "fix"), [(resource.RLIM_INFINITY, "ulimit -l 65536"), (8 << 20, "docker run --ulimit")]
)
def test_the_fix_for_memlock_depends_on_who_may_raise_it(
    hard: int, fix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (1 << 20, hard))
    assert kernel.memlock(Host(tmp_path)).fix.startswith(fix)


@pytest.mark.parametrize(
    ("capabilities", "status"),
    [("000001ffffffffff", Status.OKAY), ("0000000000004000", Status.OKAY), ("0", Status.WARNING)],
)
@pytest.mark.usefixtures("nothing_may_be_locked")
def test_who_may_lock_anything_is_not_bound_by_the_limit(capabilities: str, status: Status, tmp_path: Path) -> None:
    host = host_with(tmp_path, **{"proc/self/status": f"Name:\tx\nCapEff:\t{capabilities}"})
    assert kernel.memlock(host).status is status


def test_no_limit_is_okay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    result = kernel.memlock(Host(tmp_path))
    assert (result.status, result.detail) == (Status.OKAY, "unlimited")


@pytest.mark.parametrize("mode", ["always", "madvise"])
def test_transparent_huge_pages_that_can_be_asked_for_are_okay(mode: str, tmp_path: Path) -> None:
    result = kernel.transparent(host_with(tmp_path, thp=f"never x [{mode}]"))
    assert (result.status, result.detail) == (Status.OKAY, mode)


def test_no_huge_pages_of_either_kind_are_a_warning(tmp_path: Path) -> None:
    result = kernel.transparent(host_with(tmp_path, thp="always madvise [never]", nr="0"))
    assert result.status is Status.WARNING
    assert result.fix == f"echo madvise > /{THP}"


def test_a_kernel_without_transparent_huge_pages_is_told_to_reserve_some(tmp_path: Path) -> None:
    result = kernel.transparent(Host(tmp_path))
    assert result.status is Status.WARNING
    assert result.fix.startswith("sysctl -w vm.nr_hugepages=")


def test_reserved_huge_pages_make_up_for_transparent_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    host = host_with(tmp_path, thp="always madvise [never]", nr="64", free="60")
    assert kernel.transparent(host).status is Status.WARNING
    monkeypatch.setenv("NVME_OPS_HUGETLB", "1")
    assert kernel.transparent(host).status is Status.INFO
    assert kernel.reserved(host).detail == "60 of 64 free, 2 MiB each"


def test_shared_memory_that_is_missing_is_a_warning(tmp_path: Path) -> None:
    result = kernel.shared(Host(tmp_path))
    assert result.status is Status.WARNING
    assert result.fix.startswith("mount -t tmpfs")


def test_small_shared_memory_is_a_warning() -> None:
    if shutil.which("unshare") is None:
        pytest.skip("unshare is not installed")
    script = "from nvme_ops.report.kernel import Host, shared; print(shared(Host()))"
    mount = f"mount -t tmpfs -o size=64m none /dev/shm && {sys.executable} -c '{script}'"
    done = subprocess.run([*UNSHARE, "sh", "-c", mount], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"needs a mount namespace: {done.stderr.strip()}")
    assert "WARNING" in done.stdout
    assert "64 MiB, too small" in done.stdout
    assert "--shm-size=1g" in done.stdout


@pytest.mark.parametrize(
    ("count", "words"), [(0, "0 B"), (1023, "1023 B"), (1 << 20, "1 MiB"), (3 << 29, "1.5 GiB"), (1 << 50, "1024 TiB")]
)
def test_sizes_read_well(count: int, words: str) -> None:
    assert kernel.size(count) == words
