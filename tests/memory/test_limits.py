"""What a process can still have: the machine's memory, and what the limits of its cgroups leave."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from nvme_ops.base.limits import _cgroups, free_memory
from nvme_ops.base.native import native
from tests.conftest import GIB, MIB, run_python


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """A machine with 8 GiB and no cgroup."""
    return files(tmp_path, {"proc/meminfo": f"MemTotal: 9999999 kB\nMemAvailable:   {8 * GIB // 1024} kB\n"})


def files(root: Path, texts: dict[str, str], folder: str = ".") -> Path:
    for name, text in texts.items():
        (root / folder / name).parent.mkdir(parents=True, exist_ok=True)
        (root / folder / name).write_text(text, encoding="utf-8")
    return root


def version_2(root: Path, own: str, shown: str = "/") -> Path:
    mount = f"31 24 0:27 {shown} /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n"
    return files(root, {"proc/self/cgroup": f"0::{own}\n", "proc/self/mountinfo": mount})


def group(limit: object, used: int, inactive: int = 0, **more: str) -> dict[str, str]:
    stat = f"anon 5\ninactive_file {inactive}\n"
    return {"memory.max": f"{limit}\n", "memory.current": f"{used}\n", "memory.stat": stat, **more}


def test_a_limit_leaves_what_is_not_in_use(machine: Path) -> None:
    assert free_memory(machine) == free_memory(version_2(machine, "/job")) == 8 * GIB
    for limits, free in (
        (group("max", 5), 8 * GIB),
        (group(3 * GIB, GIB, GIB // 2), 5 * GIB // 2),  # the kernel gives up inactive pages of files first
        (group(GIB, 2 * GIB), 0),
        ({**group("max", 0), "memory.high": f"{GIB}\n"}, GIB),  # from which on a group is held up
    ):
        files(machine, limits, "sys/fs/cgroup/job")
        assert free_memory(machine) == free
    version_2(machine, "/slice/job/step")  # every group above counts
    files(machine, group("max", GIB), "sys/fs/cgroup/slice/job/step")
    files(machine, group(6 * GIB, GIB), "sys/fs/cgroup/slice/job")
    files(machine, group(4 * GIB, 3 * GIB), "sys/fs/cgroup/slice")
    assert free_memory(machine) == GIB
    files(machine, group(2 * GIB, GIB // 2), "sys/fs/cgroup")
    for own in ("/docker/1f", "/../elsewhere"):  # a container sees its part of the hierarchy
        assert free_memory(version_2(machine, own, "/docker/1f")) == 3 * GIB // 2
    assert 0 < free_memory() < 1 << 60


def test_version_1(machine: Path) -> None:
    mount = (
        "32 24 0:28 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n"
        "33 24 0:29 / /sys/fs/cgroup/memory rw,nosuid - cgroup cgroup rw,memory\n"
    )
    files(machine, {"proc/self/cgroup": "5:cpu:/\n4:memory:/job\n0::/\n", "proc/self/mountinfo": mount})
    for folder, limit, used, free in (("", 9223372036854771712, 5, 8), ("job", 2 * GIB, GIB, 1.25)):
        stat = f"total_inactive_file {GIB // 4}\n"
        texts = {"memory.limit_in_bytes": f"{limit}\n", "memory.usage_in_bytes": f"{used}\n", "memory.stat": stat}
        files(machine, texts, f"sys/fs/cgroup/memory/{folder}")
        assert free_memory(machine) == free * GIB


# A real group, as of a container


@pytest.fixture
def limited() -> Iterator[Path]:
    """The file that takes a process into a group which may have 1 GiB."""
    if os.geteuid() != 0:
        pytest.skip("only root makes groups of processes")
    native()  # compiled outside the group, whose limit a compiler exceeds
    for kind, _, folder in _cgroups(Path("/")):
        made = folder / f"nvme_ops-test-{os.getpid()}"
        with contextlib.suppress(OSError):
            made.mkdir()
            (made / ("memory.max" if kind == "cgroup2" else "memory.limit_in_bytes")).write_text(str(GIB))
            yield made / "cgroup.procs"
            for _ in range(500):  # until its last process has quite ended
                with contextlib.suppress(OSError):
                    return made.rmdir()
                time.sleep(0.02)
            raise AssertionError(f"{made} cannot be removed")
        if made.exists():  # the group above hands the controller of memory down to nobody
            made.rmdir()
    pytest.skip("no group of processes with a limit on memory can be made here")


def test_a_save_in_the_background_keeps_to_the_limit(limited: Path, folder: Path) -> None:
    """Nobody is killed for copies that could be done without."""
    program = """
    import os, sys
    open(sys.argv[1], "w").write("0")
    import torch, nvme_ops
    from nvme_ops.base.limits import free_memory
    assert free_memory() < 1024 << 20
    state = {str(i): torch.full((64 << 20,), i, dtype=torch.uint8) for i in range(9)}
    nvme_ops.save_async(state, sys.argv[2]).result()
    """
    done = run_python(program, limited, folder / "state.safetensors", check=False)
    assert done.returncode != -signal.SIGKILL, "killed for want of memory"
    assert done.returncode == 0, done.stderr
    assert (folder / "state.safetensors").stat().st_size // MIB == 9 * 64


def test_processes_that_share_memory_keep_to_the_limit_together(limited: Path) -> None:
    """All take as much as they get, at the same time: nobody is killed, and an eighth is left to others."""
    program = """
    import multiprocessing, os, sys
    open(sys.argv[1], "w").write("0")
    import torch
    from nvme_ops.base.limits import free_memory
    from nvme_ops.memory.shared_memory import SharedTier, key_of, shared_memory
    before, children, both = free_memory(), [], multiprocessing.get_context("fork").Barrier(2)
    for number in range(2):
        children.append(os.fork())
        if children[-1] == 0:
            torch.set_num_threads(1)
            tier, held = SharedTier(4 << 30, shared_memory(sys.argv[1], 4 << 30)), []
            share = tier.share()
            while (memory := tier.allocate_for(key_of(number, len(held)), 16 << 20, share)) is not None:
                held.append(memory.fill_(number + 1))
            assert all(int(memory.min()) == int(memory.max()) == number + 1 for memory in held)
            both.wait(60)  # what the first one has would be the other's once it ends
            os._exit(len(held))
    counts = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    print(*counts, before)
    """
    done = run_python(program, limited, check=False)
    assert done.returncode == 0, done.stderr
    *counts, before = map(int, done.stdout.split())
    assert min(counts) > 0, "killed for want of memory"
    assert sum(counts) * 16 * MIB <= before * 7 // 8


def test_another_process_takes_all_memory_while_weights_come_into_it(limited: Path, folder: Path) -> None:
    """Nobody is killed: what is there by then stays and is used, and all else is streamed."""
    program = """
    import ctypes, os, sys, warnings
    open(sys.argv[1], "w").write("0")
    import torch
    from nvme_ops.base.limits import free_memory
    from nvme_ops.offload import stream_weights
    from tests.doubles import private_device
    from tests.offload.models import layers
    torch.set_num_threads(1)
    ctypes.CDLL(None).mallopt(-3, 1 << 20)  # M_MMAP_THRESHOLD: what is freed of larger blocks goes back to the system
    begins, ends, held = os.pipe(), os.pipe(), []
    if (other := os.fork()) == 0:
        os.close(begins[1])
        os.read(begins[0], 1)
        while free_memory() > 48 << 20:  # those of the accelerator, which are the host's here, and as many again
            held.append(b"1" * (4 << 20))
        os.write(ends[1], b"1")
        os._exit(len(os.read(begins[0], 1)))  # once this process ends
    os.close(ends[1])
    device, model, given = private_device(), layers(100, 1024).requires_grad_(False), torch.ones(1, 1024)
    wanted, where = model(given), {"device": device.device(), "device_budget": "24M"}
    with device.computing(), stream_weights(model, sys.argv[2], host_budget="auto", **where) as streamed:
        hooks = [streamed[0].register_forward_hook(lambda *_: os.write(begins[1], b"1") and None)]
        hooks.append(streamed[2].register_forward_hook(lambda *_: os.read(ends[0], 1) and None))
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            assert torch.equal(streamed(device.tensor(given)).cpu(), wanted)
        assert os.waitpid(other, os.WNOHANG) == (0, 0), "killed for want of memory"
        assert "others use the host's memory" in str(said[0].message)
        [hook.remove() for hook in hooks]
        before = streamed.stats()
        for _ in range(3):
            assert torch.equal(streamed(device.tensor(given)).cpu(), wanted)
        after = streamed.stats()
    assert after.bytes_from_host > before.bytes_from_host
    assert after.bytes_read > before.bytes_read
    """
    done = run_python(program, limited, folder, check=False)
    assert done.returncode != -signal.SIGKILL, "killed for want of memory"
    assert done.returncode == 0, done.stderr
