"""Broken machines, each made for real: ``nvme-report`` says ready where a handle works, and only there.

One process makes a handle, writes a page and reads it back; another runs the report. Both name the cause of a failure.
"""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
from collections.abc import Mapping
from functools import partial
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import NamedTuple

import pytest

from nvme_ops.base.native import native
from nvme_ops.op_builder import AsyncIOBuilder, finished
from tests import prepared
from tests.conftest import REPOSITORY as ROOT
from tests.restrictions import NOT_HERE

HANDLE = """
import nvme_ops, torch
page = torch.arange(1025, dtype=torch.int32)[1:]  # where no device takes it from: a buffer has to be allocated
back = torch.zeros(1025, dtype=torch.int32)[1:]
try:
    handle = nvme_ops.aio_handle()
    handle.sync_pwrite(page, f"{FOLDER}/page")
    handle.sync_pread(back, f"{FOLDER}/page")
    assert torch.equal(page, back)
except Exception as error:
    sys.exit(f"{type(error).__name__}: {error}")
print(handle.backend)
"""
REPORT = """
from nvme_ops.report.cli import main
sys.exit(main(["--json", "--strict", "async_io", "--folder", FOLDER]))
"""
BREAK = """
import errno, os, resource, shutil, sys, tempfile
tempfile.tempdir = None
from pathlib import Path
from tests.restrictions import *
"""
URING, FOO = {"NVME_OPS_BACKEND": "uring"}, {"NVME_OPS_CACHE": "foo"}
ABC, LIBAIO = {"NVME_OPS_POOL_BYTES": "abc"}, {"NVME_OPS_BACKEND": "libaio"}
NO_COMPILER, DIRECTORY = {"PATH": "NOTHING", "CXX": ""}, "TORCH_EXTENSIONS_DIR"
NO_HOME = "os.environ.pop('HOME', None), os.environ.pop('XDG_CACHE_HOME', None)"
NO_FILE = "resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))"
NO_NINJA = """
from nvme_ops.op_builder.machine import ninja_directory
while place := ninja_directory():
    mount("--bind", "/dev/null", f"{place}/ninja")
"""
ANOTHER_TORCH = """
import json
Path(RECORD).write_text(json.dumps({**json.loads(Path(RECORD).read_text()), "torch": "2.2.0"}))
"""
FROM_HERE = """
for name in [name for name in sys.modules if name.startswith("nvme_ops")]:
    del sys.modules[name]
"""
NO_CXX = "no C.. compiler was found"
LIBRARY = "next(Path(OPS).rglob('async_io.so'))"


class Machine(NamedTuple):
    """How a machine is broken, and what is said of it."""

    words: str = ""  #: a pattern of what both say; empty where everything works
    fix: str = ""  #: a pattern of what the report advises
    broken: str = ""  #: by this program, with all of tests.restrictions; OPS and FOLDER are folders
    environment: Mapping[str, str] = {}
    built: bool = True  #: the op lies in OPS, which TORCH_EXTENSIONS_DIR names
    wheel: bool = False  #: the op lies in the package, at WHEEL, with its RECORD
    slow: bool = False  #: the op is compiled


NotBuilt, Slow = partial(Machine, built=False), partial(Machine, built=False, slow=True)
Wheel = partial(Machine, built=False, wheel=True)
NOEXEC, UNWRITABLE, HERE = "mounted noexec", "TORCH_EXTENSIONS_DIR cannot be written: .*", {DIRECTORY: "FOLDER"}
NOWHERE = {DIRECTORY: "", "XDG_CACHE_HOME": "OPS", "TMPDIR": "FOLDER"}
FOREIGN = "Path(FOLDER).chmod(0o777); resource.setrlimit(resource.RLIMIT_%s, (0, 0)); become_nobody()"
MACHINES = {
    "nothing": Machine(),
    # Variables
    "no such backend": Machine("NVME_OPS_BACKEND='uring' is not one of auto, io_uring", "unset NVME_OPS_B", "", URING),
    "no such cache mode": Machine("NVME_OPS_CACHE='foo' is not one of auto, direct", "unset NVME_OPS_CACHE", "", FOO),
    "no such size": Machine("NVME_OPS_POOL_BYTES='abc' is not a number of bytes", "unset NVME_OPS_POOL_B", "", ABC),
    "no such backend, not built": NotBuilt(
        "NVME_OPS_BACKEND='uring' is not", "unset NVME_OPS_B", "", {**URING, **NO_COMPILER}),
    "an open quotation": Machine("CFLAGS='\"' cannot be split into words", "unset CFLAGS", "", {"CFLAGS": '"'}),
    # System calls that a container's filter refuses
    "no io_uring": Machine("", "", "refuse(IO_URING_SETUP, errno.EPERM)"),
    "neither io_uring nor AIO": Machine("", "", "refuse(IO_URING_SETUP, errno.ENOSYS); refuse(IO_SETUP, errno.EPERM)"),
    "no io_uring, but wanted": Machine("io_uring", "unset NVME_OPS_BACKEND", "refuse(IO_URING_SETUP, errno.EPERM)",
        {"NVME_OPS_BACKEND": "io_uring"}),
    "no AIO, but wanted": Machine("io_setup", "unset NVME_OPS_BACKEND", "refuse(IO_SETUP, errno.EPERM)", LIBAIO),
    "no io_uring_enter": Machine("", "", "refuse(IO_URING_ENTER, errno.EPERM)"),
    "no io_submit": Machine("", "", "refuse(IO_SUBMIT, errno.EPERM)", LIBAIO),
    # The cache of ops
    "a read-only cache": NotBuilt(f"{UNWRITABLE}Read-only file system", DIRECTORY, "read_only(OPS)"),
    "another user": NotBuilt(f"{UNWRITABLE}Permission denied|Python.h is not in", "", "become_nobody()"),
    "another user, built": Machine("", "", "Path(FOLDER).chmod(0o777); become_nobody()"),
    "noexec": Machine(f"no op can be loaded from TORCH_EXTENSIONS_DIR: .* is {NOEXEC}", "with exec",
        "shutil.copytree(f'{OPS}/nvme_ops', memory(FOLDER, 'noexec,mode=755') / 'nvme_ops')", HERE),
    "noexec, not built": NotBuilt(f"no op can be loaded from TORCH_EXTENSIONS_DIR: .* is {NOEXEC}", "with exec",
        "memory(OPS, 'noexec,mode=755')"),
    "a read-only root and /tmp noexec": NotBuilt(
        "no folder for compiled ops: .*Read-only file system.*noexec", "export TORCH_EXTENSIONS_DIR=.*exec",
        "read_only(OPS); memory(FOLDER, 'noexec,mode=1777')", NOWHERE),
    "a full cache": NotBuilt(f"{UNWRITABLE}No space left", DIRECTORY, "memory(OPS, 'size=64k,mode=755')"),
    "a cache that everybody can write to": Machine("can be written by everybody", DIRECTORY, "os.chmod(OPS, 0o777)"),
    "no home, built": Machine("", "", NO_HOME),
    "no home": Slow("", "", NO_HOME, {DIRECTORY: ""}),
    "a damaged op": Machine(NO_CXX, "", f"{LIBRARY}.write_bytes(bytes({LIBRARY}.stat().st_size))", NO_COMPILER),
    # What compiles
    "no compiler": NotBuilt(NO_CXX, "g..", "", NO_COMPILER),
    "no compiler, built": Machine(environment=NO_COMPILER),
    "a compiler that fails": Slow("false does not work", "unset CXX", "", {"CXX": "false"}),
    "wrong flags": Slow("no-such-flag", "unset CPPFLAGS", "", {"CXXFLAGS": "--no-such-flag"}),
    "no temporary file": NotBuilt("File too large|temporary", "ulimit -f", NO_FILE),
    "no ninja": NotBuilt("ninja is not installed", "install.* ninja", NO_NINJA),
    "an old torch": NotBuilt("torch 2.3.1 is older than 2.4", "install --upgrade torch",
        "import torch; torch.__version__ = '2.3.1'"),
    # Ahead of time
    "a wheel": Wheel("", "", "", NO_COMPILER),
    "a wheel for another torch": Wheel(NO_CXX, "g..", ANOTHER_TORCH, NO_COMPILER),
    "a wheel cut short": Wheel("SIGBUS", "--force-reinstall", "os.truncate(WHEEL, 1 << 16)", NO_COMPILER),
    "a wheel, noexec": Wheel(NOEXEC, "with exec", "noexec(HERE)", NO_COMPILER),
    # Limits
    "no memory may be locked": Machine("", "", FOREIGN % "MEMLOCK"),
    "no descriptor left": Machine("Too many open files", "ulimit -n", "descriptors(1)"),
    "no file may grow": Machine("File too large", "ulimit -f", NO_FILE),
    "no other process": Machine("", "", FOREIGN % "NPROC"),
    "no address space": Machine("Cannot allocate memory", "ulimit -v", "address_space(2 << 20)"),
    "no /proc": Machine("", "", "memory('/proc')"),
    "no temporary folder": Machine(
        "", "", "read_only('/tmp'); read_only('/var/tmp'); memory(FOLDER); os.chdir('/proc')"),
    # The folder
    "a folder in memory": Machine("", "", "memory(FOLDER)"),
    "a full folder": Machine("No space left on device", "df -h",
        "(memory(FOLDER, 'size=64k') / 'full').write_bytes(bytes(1 << 16))"),
    "a read-only folder": Machine("Read-only file system", "remount,rw", "read_only(FOLDER)"),
    "another user's folder": Machine("Permission denied", "chown", "become_nobody()"),
    "no folder": Machine("No such file|does not exist", "mkdir -p", "os.rmdir(FOLDER)"),
}  # fmt: skip


@pytest.fixture(scope="module")
def op() -> Path:
    """The folder of the cache with the op, and what else is beside it."""
    native()
    entry = finished.find_cached(AsyncIOBuilder().recipe())
    if entry is None:
        pytest.skip("the op is built ahead of time here")
    return entry.folder


def made(folder: Path, machine: Machine, op: Path) -> dict[str, str]:
    """Makes the machine in ``folder``; returns what programs know by a name."""
    shutil.rmtree(folder, ignore_errors=True)
    names = {name.upper(): str(folder / name) for name in ("folder", "ops", "nothing")}
    for path in names.values():
        Path(path).mkdir(parents=True)
    if machine.built:
        shutil.copytree(op, folder / "ops" / "nvme_ops" / op.name)
        for note in op.parent.glob("compiler-*.json"):
            shutil.copy(note, folder / "ops" / "nvme_ops")
    if machine.wheel:
        sources = shutil.ignore_patterns("*.so", "__pycache__")
        package = shutil.copytree(ROOT / "nvme_ops", folder / "nvme_ops", ignore=sources)
        wheel = package / "ops" / f"async_io{EXTENSION_SUFFIXES[0]}"
        shutil.copy(op / "async_io.so", wheel)
        shutil.copy(op / finished.RECORD, finished.record_path(wheel))
        names |= {"HERE": str(folder), "WHEEL": str(wheel), "RECORD": str(finished.record_path(wheel))}
    return names


def run(machine: Machine, names: dict[str, str], program: str, folder: Path) -> subprocess.CompletedProcess[str]:
    begin = "".join(f"{name} = {path!r}\n" for name, path in names.items())
    program = f"{BREAK}{begin}{machine.broken}\n{FROM_HERE if machine.wheel else ''}{program}"
    variables = {"TORCH_EXTENSIONS_DIR": "OPS", "NVME_OPS_BACKEND": "", "NVME_OPS_CACHE": "", **machine.environment}
    variables = {name: names.get(value, value) for name, value in variables.items()}
    place, imported = folder if machine.wheel else ROOT, ("nvme_ops.io.handle", "nvme_ops.report.cli")
    return prepared.run("-c", program, environment=variables, folder=place, imported=imported)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * broken.slow) for name, broken in MACHINES.items()]
)
def test_the_report_says_ready_where_a_handle_works(name: str, tmp_path: Path, op: Path) -> None:
    machine = MACHINES[name]
    if machine.environment == LIBAIO and "headers" in (reason := native().backends()["libaio"] or ""):
        pytest.skip(f"libaio: {reason}")
    for parent in (tmp_path, *tmp_path.parents):
        if parent.stat().st_mode & 0o011 != 0o011:
            parent.chmod(parent.stat().st_mode | 0o011)  # for another user
    done = {}
    for program in (HANDLE, REPORT):
        done[program] = run(machine, made(tmp_path / "machine", machine, op), program, tmp_path / "machine")
        if done[program].returncode == NOT_HERE:
            pytest.skip("this machine cannot be broken so here")
    handle, report = done[HANDLE], done[REPORT]
    works = handle.returncode == 0
    assert works == (not machine.words), handle.stderr
    document = json.loads(report.stdout)
    assert document["verdict"]["ready"] == works, document["verdict"]
    assert report.returncode == (0 if works else 1)
    end = handle.stderr if handle.returncode >= 0 else signal.Signals(-handle.returncode).name
    assert re.search(machine.words, end), end
    assert re.search(machine.words, document["verdict"]["text"]), document["verdict"]
    assert re.search(f"fix: .*{machine.fix}" if machine.words else "", report.stderr), report.stderr
