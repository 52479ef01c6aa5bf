"""What using cuFile does to a process on a machine with a real GPU: it never hangs, leaves nothing, closes cleanly.

Each test runs a process of its own under a limit of time.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY
from tests.gpu.fixtures import cufile
from tests.gpu.support import PATIENCE, on_a_gpu, run_limited, run_well

pytestmark = on_a_gpu

# Opens cuFile, and moves 100 MB both ways, several times so that every way has its turn.
USE = """
import os, sys, torch, nvme_ops
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


@pytest.mark.parametrize(("mode", "experimental"), [("auto", "0"), ("require", "1"), ("off", "0")])
def test_it_never_hangs(folder: Path, mode: str, experimental: str) -> None:
    """It works, or says why not. CUFILE_EXPERIMENTAL_FS=1 lets cuFile take file systems of which udev tells nothing."""
    program = f"{USE}\ntry:\n    use(sys.argv[1])\nexcept RuntimeError as reason:\n    print('refused:', reason)\n"
    printed = run_well(program, folder / "file", NVME_OPS_GDS=mode, CUFILE_EXPERIMENTAL_FS=experimental).strip()
    if mode == "off":
        assert printed == ""
    elif printed:
        assert len(printed) > len("refused: ")


def test_nothing_is_written_to_the_working_folder(cufile: None, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the settings variable is not invented."""
    monkeypatch.delenv("CUFILE_ENV_PATH_JSON", raising=False)
    place = folder / "working"
    place.mkdir()
    program = f"{USE}\nos.chdir(sys.argv[2])\nuse(sys.argv[1])\nprint(os.environ.get('CUFILE_ENV_PATH_JSON', 'unset'))"
    assert run_well(program, folder / "file", place, CUFILE_LOGFILE_PATH="").strip() == "unset"
    assert list(place.iterdir()) == []


def test_the_driver_is_opened_once_from_one_copy_of_the_library(cufile: None, folder: Path) -> None:
    printed = run_well(
        f"""{USE}
from nvme_ops.op_builder import GDSBuilder, machine
first = use(sys.argv[1])
second = use(sys.argv[1])
gds = GDSBuilder().load()
assert gds.open_driver(machine.cufile_libraries()) == gds.open_driver([])
del first
assert use(sys.argv[1]).last_path
copies = {{line.split()[-1] for line in open("/proc/self/maps") if "/libcufile.so" in line}}
print(len(copies))
""",
        folder / "file",
    )
    assert printed.strip() == "1"


def test_cufile_closed_under_a_handle(cufile: None, folder: Path) -> None:
    """As at the end of the interpreter: from then on a transfer fails or is bounced, and never crashes."""
    run_well(
        f"""{USE}
from nvme_ops.op_builder import GDSBuilder
handle = use(sys.argv[1])
GDSBuilder().load().shut_down()
there = torch.ones(1 << 24, dtype=torch.uint8, device="cuda")
try:
    handle.write(there, sys.argv[1])
    assert handle.last_path == "bounce", handle.path_statistics()
    assert open(sys.argv[1], "rb").read() == bytes([1]) * (1 << 24)
except RuntimeError as reason:
    assert str(reason)
try:
    nvme_ops.gds_handle()
except RuntimeError as reason:
    assert "closed" in str(reason)
else:
    raise AssertionError("a closed driver was opened again")
""",
        folder / "file",
    )
