"""What only a real GPU has room, operators or cuFile for: for every kind of handle, then of gds_handle which way it
takes, what it says of it, and what using cuFile does to a process.

Where cuFile cannot work, the tests that need it are skipped with gds_handle's own words. Programs run in processes of
their own under a limit of time.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from nvme_ops import gds_handle
from tests.conftest import MIB, contents, pattern, run_python, store
from tests.device.kinds import GPUS, TELLING, Gpu, on_a_gpu, on_gpus, on_kinds, sample

with_cufile = on_kinds(GPUS[1])


def round_trip(device: Gpu, path: Path, size: int, offset: int = 0, lanes: int = 1) -> None:
    handle, sent = device.handle(lanes), torch.randint(0, 256, (size,), dtype=torch.uint8, device=device.device())
    handle.sync_pwrite(sent, path, offset)
    assert path.stat().st_size == offset + size
    back = device.empty(size)
    handle.sync_pread(back, path, offset)
    assert torch.equal(sent, back)


@on_gpus
@pytest.mark.parametrize("offset", [0, 4095, 12345])
def test_513_mib(device: Gpu, folder: Path, offset: int) -> None:
    size, before = 513 * MIB + 7, sample(offset)
    path = store(folder / "file", before)
    round_trip(device, path, size, offset)
    with path.open("rb") as file:
        assert file.read(offset) == before.numpy().tobytes()


@on_gpus
@pytest.mark.slow
def test_more_than_4_gib(device: Gpu, folder: Path) -> None:
    size = (4 << 30) + 12345
    free, _ = torch.cuda.mem_get_info()
    if free < 2 * size + (1 << 30) or os.statvfs(folder).f_bavail * os.statvfs(folder).f_frsize < size + (1 << 30):
        pytest.skip("needs 9 GiB of the GPU's memory and 5 GiB of disk")
    round_trip(device, folder / "file", size, lanes=2)


@on_gpus
def test_conjugated_and_negated_views(device: Gpu, folder: Path) -> None:
    handle, path, data = device.handle(), folder / "file", torch.randn(1000, dtype=torch.complex64)
    for view in (lambda t: t.conj(), lambda t: t.conj().imag):
        handle.write(view(device.tensor(data)), path)
        expected = view(data).resolve_conj().resolve_neg().contiguous()
        assert torch.equal(contents(path), expected.view(-1).view(torch.uint8))


def way_of_cufile(device: Gpu, folder: Path) -> str:
    """``gds`` or ``compat``; skips where cuFile takes no file in the folder."""
    handle = gds_handle()
    for _ in range(2):
        handle.write(device.empty(TELLING), folder / "probe")
    statistics = handle.path_statistics()
    ways = set(statistics["uses"]) - {"bounce"}
    if not ways:
        pytest.skip(f"cuFile takes no file here: {statistics['why']}")
    return str(ways.pop())


# Which way, and what is said of it


@with_cufile
@pytest.mark.parametrize("write", [True, False], ids=["write", "read"])
def test_large_transfers_take_cufile_where_it_takes_the_file(device: Gpu, folder: Path, write: bool) -> None:
    """Always where it reaches the GPU directly; otherwise both ways are tried, one after the other."""
    path, there = store(folder / "file", pattern(device.odd)), device.empty(device.odd)
    way, handle, ways = way_of_cufile(device, folder), gds_handle(), []
    for _ in range(2):
        (handle.write if write else handle.read)(there, path)
        ways.append(handle.last_path)
    assert ways == (["gds", "gds"] if way == "gds" else ["bounce", "compat"])


@with_cufile
def test_require_takes_gpudirect_storage_or_says_why_not(device: Gpu, folder: Path) -> None:
    program = """
        import sys, torch, nvme_ops
        handle = nvme_ops.gds_handle()
        handle.write(torch.ones(1 << 24, dtype=torch.uint8, device="cuda"), sys.argv[1])
        print(handle.last_path)
    """
    done = run_python(program, folder / "file", check=False, NVME_OPS_GDS="require")
    if done.returncode == 0:
        assert done.stdout.strip() == "gds"
        assert contents(folder / "file").eq(1).all()
    else:
        assert "RuntimeError: NVME_OPS_GDS=require, but " in done.stderr


@with_cufile
def test_expandable_segments(device: Gpu, folder: Path) -> None:
    """Memory mapped piece by piece, which older cuFiles do not know: bounced if need be, pinned or refused."""
    run_python(
        """
        import sys, torch, nvme_ops
        from tests.conftest import pattern
        handle = nvme_ops.gds_handle(intra_op_parallelism=2)
        for seed in range(3):
            data = pattern(100_000_005, seed)
            there = data.to("cuda")
            handle.sync_pwrite(there, sys.argv[1])
            back = torch.zeros_like(there)
            handle.sync_pread(back, sys.argv[1])
            assert torch.equal(back, there)
            try:
                handle.pin_device_tensor(there)
            except OSError as error:
                assert error.errno > 5000, error
            handle.sync_pread(there.zero_(), sys.argv[1])
            assert torch.equal(back, there)
            handle.unpin_device_tensor(there)
        """,
        folder / "file",
        fresh=True,
        PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True",
        PYTORCH_ALLOC_CONF="expandable_segments:True",
    )


# What it does to a process: it never hangs, leaves nothing, closes cleanly

# Opens cuFile, and moves 100 MB both ways, several times so that every way has its turn.
USE = """
import os, sys, torch, nvme_ops
from nvme_ops.op_builder import GDSBuilder, machine
def use(path):
    handle = nvme_ops.gds_handle(intra_op_parallelism=2)
    there = torch.randint(0, 256, (100_000_005,), dtype=torch.uint8, device="cuda")
    back = torch.zeros_like(there)
    for _ in range(2):
        handle.sync_pwrite(there, path)
        handle.sync_pread(back, path)
        assert torch.equal(back, there)
        back.zero_()
    return handle
"""


@pytest.mark.parametrize("mode", [pytest.param(mode, marks=on_a_gpu) for mode in ("auto", "require", "off")])
def test_it_never_hangs(folder: Path, mode: str) -> None:
    """It works, or says why not. CUFILE_EXPERIMENTAL_FS=1 lets cuFile take file systems of which udev tells nothing."""
    program = f"{USE}\ntry:\n    use(sys.argv[1])\nexcept RuntimeError as reason:\n    print('refused:', reason)\n"
    others = "1" if mode == "require" else "0"
    done = run_python(program, folder / "file", NVME_OPS_GDS=mode, CUFILE_EXPERIMENTAL_FS=others)
    printed = done.stdout.strip()
    if mode == "off":
        assert printed == ""
    elif printed:
        assert len(printed) > len("refused: ")


@with_cufile
def test_the_driver_is_opened_once_from_one_copy_and_leaves_nothing(device: Gpu, folder: Path) -> None:
    """In the working folder; and the settings variable is not invented."""
    (folder / "working").mkdir()
    program = """
first, second = use(sys.argv[1]), use(sys.argv[1])
gds = GDSBuilder().load()
assert gds.open_driver(machine.cufile_libraries()) == gds.open_driver([])
del first
assert use(sys.argv[1]).last_path
copies = {line.split()[-1] for line in open("/proc/self/maps") if "/libcufile.so" in line}
print(len(copies), os.environ.get("CUFILE_ENV_PATH_JSON", "unset"))
"""
    begin = f"{USE}\nos.environ.pop('CUFILE_ENV_PATH_JSON', None)\nos.chdir(sys.argv[2])\n"
    printed = run_python(begin + program, folder / "file", folder / "working", CUFILE_LOGFILE_PATH="").stdout
    assert printed.strip() == "1 unset"
    assert list((folder / "working").iterdir()) == []
