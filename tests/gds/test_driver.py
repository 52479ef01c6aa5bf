"""The life of cuFile's driver: opened once and late, refused with a reason, closed at the end, lost in a fork.

The library is a double made for these tests; each of them meets it in a process of its own.
"""

from __future__ import annotations

import ctypes
import os
import signal
from pathlib import Path

import pytest
import torch

from nvme_ops.io.gds import gds_handle
from nvme_ops.op_builder import GDSBuilder
from tests.conftest import MIB, contents, in_child, pattern, run_python, store
from tests.device.kinds import Doubles, round_trip, sample
from tests.doubles import INCOMPLETE, NVIDIA_FS, OLD, WITHOUT_MARKER, FakeCuFile, Function, PrivateDevice, build

ODD = 2 * MIB + 5
OPEN, CLOSE = Function.DRIVER_OPEN, Function.DRIVER_CLOSE


def instead(library: object) -> None:
    os.environ["NVME_OPS_CUFILE_LIBRARY"] = str(library)


def moves(device: Doubles, handle: gds_handle, path: Path) -> str | None:
    """The way that a tensor took, written and read."""
    round_trip(device, handle, path)
    return handle.last_path


def refusal() -> str:
    """Why no handle can be made: the same at every try."""
    said = []
    for _ in range(3):
        with pytest.raises(RuntimeError) as caught:
            gds_handle()
        said.append(str(caught.value))
    assert len(set(said)) == 1
    return said[0]


# Opened


def test_it_is_opened_by_the_first_handle_and_once(cufile: FakeCuFile, device: Doubles, folder: Path) -> None:
    assert cufile.calls(OPEN) == 0  # the op is loaded already
    os.chdir(folder)
    handles = [gds_handle(intra_op_parallelism=2) for _ in range(3)]
    assert {moves(device, handle, folder / "file") for handle in handles} == {"gds"}
    opened = GDSBuilder().load().open_driver([])
    assert Path(opened.pop("path")).name == cufile.path.name  # the process that has compiled it knows another folder
    assert opened == {"version": 1150, "why_not_direct": "", "fake": True}
    del handles
    gds_handle()
    assert (cufile.calls(OPEN), cufile.calls(CLOSE), cufile.now.compatible) == (1, 0, 0)
    assert os.listdir(folder) == ["file"]  # and no log


def test_an_old_library(cufile: FakeCuFile, device: Doubles, folder: Path) -> None:
    """Before cuFile 1.14: no parameters, no version, and another name for closing."""
    old = cufile.without(OLD, folder)
    old.offer(nvidia_fs=NVIDIA_FS)
    instead(old.path)
    os.chdir(folder)
    assert moves(device, gds_handle(), folder / "file") == "gds"
    module = GDSBuilder().load()
    assert module.open_driver([])["version"] == 0
    assert sorted(os.listdir(folder)) == ["file", "libcufile.so.0"]
    module.shut_down()
    assert old.calls(CLOSE) == 1
    old.check_idle(0)


# Refused


def test_a_driver_that_cannot_be_opened(cufile: FakeCuFile, device: Doubles, folder: Path) -> None:
    cufile.fail(OPEN, 5033, count=-1)
    said = refusal()
    assert "cuFile cannot work here: cuFileDriverOpen: cuFile error 5033" in said
    assert "no CUDA driver, or no GPU" in said
    assert "NVME_OPS_GDS=off" in said
    assert cufile.calls(OPEN) == 2  # with and without compatibility mode, and not once more by the later handles
    os.environ["NVME_OPS_GDS"] = "off"
    assert moves(device, gds_handle(), folder / "file") == "bounce"


@pytest.mark.skipif(Path("/proc/modules").exists(), reason="the kernel has modules, so there is nothing to refuse")
def test_a_kernel_without_modules(cufile: FakeCuFile, folder: Path) -> None:
    """There the real library would wait for ever; this one does not say that it is a double."""
    real = cufile.without(WITHOUT_MARKER, folder)
    instead(real.path)
    assert "/proc/modules is missing" in refusal()
    assert real.calls(OPEN) == 0


@pytest.mark.parametrize(
    ("library", "reason"),
    [
        ("/nowhere/libcufile.so.0", "/nowhere/libcufile.so.0"),
        ("libcufile.so.0", "NVME_OPS_CUFILE_LIBRARY='libcufile.so.0' is not an absolute path"),
        (__file__, "invalid ELF header"),
        ("", "lacks cuFileRead"),
    ],
)
def test_a_library_that_cannot_be_used(cufile: FakeCuFile, folder: Path, library: str, reason: str) -> None:
    instead(library or cufile.without(INCOMPLETE, folder).path)
    said = refusal()
    assert "cuFile is not usable: " in said
    assert reason in said


# The user's settings


def test_the_users_configuration(cufile: FakeCuFile, folder: Path) -> None:
    """It may say where the log goes, so nothing is set beside it."""
    os.chdir(folder)
    os.environ["CUFILE_ENV_PATH_JSON"] = str(folder / "cufile.json")
    gds_handle()
    getenv = ctypes.CDLL(None).getenv
    getenv.restype = ctypes.c_char_p
    assert getenv(b"CUFILE_ENV_PATH_JSON") == bytes(folder / "cufile.json")
    assert getenv(b"CUFILE_LOGFILE_PATH") is None
    assert os.listdir(folder) == ["cufile.log"]  # what the library does when nobody tells it otherwise


# Forks


def test_no_handle_after_a_fork(cufile: FakeCuFile, device: Doubles, folder: Path) -> None:
    in_child(lambda: moves(device, gds_handle(), folder / "child"))  # before cuFile is used
    assert cufile.calls(OPEN) == 0
    handle, path = gds_handle(65536, intra_op_parallelism=2), folder / "file"
    moves(device, handle, path)
    tensor = device.tensor(sample(ODD))
    handle.pin_device_tensor(tensor)

    def child() -> None:
        before, back = [cufile.calls(function) for function in Function], torch.zeros(ODD, dtype=torch.uint8)
        assert "forked after cuFile was used; fix: start processes with spawn" in refusal()
        handle.read(back, path)  # host memory needs no cuFile
        assert torch.equal(back, sample(ODD))
        handle.unpin_device_tensor(tensor)
        GDSBuilder().load().shut_down()
        assert [cufile.calls(function) for function in Function] == before

    in_child(child)
    assert moves(device, handle, path) == moves(device, gds_handle(), path) == "gds"
    assert cufile.calls(OPEN) == 1
    handle.unpin_device_tensor(tensor)


def test_a_fork_with_work_pending(cufile: FakeCuFile, device: Doubles, folder: Path) -> None:
    handle, path, back = gds_handle(65536), store(folder / "file", sample(ODD)), device.empty(ODD)
    handle.pin_device_tensor(back)
    with cufile.held(Function.READ):
        future = handle.submit_pread(back, path)
        cufile.wait_for_held_up(Function.READ)

        def child() -> None:
            signal.alarm(10)
            assert handle.is_pinned(back)
            handle.unpin_device_tensor(back)  # the transfer is the parent's: nobody here would end it
            with pytest.raises(RuntimeError, match="only the parent can wait"):
                future.result()

        in_child(child)
    assert future.result() == ODD
    assert torch.equal(device.peek(back), sample(ODD))
    assert handle.unpin_device_tensor(back) is True


# The end


def test_after_it_was_closed(cufile: FakeCuFile, device: Doubles, folder: Path) -> None:
    handle, tensor = gds_handle(), device.empty(ODD)
    handle.pin_device_tensor(tensor)
    moves(device, handle, folder / "file")
    for _ in range(2):
        GDSBuilder().load().shut_down()
    assert cufile.calls(CLOSE) == cufile.calls(Function.DEREGISTER_MEMORY) == 1
    assert handle.unpin_device_tensor(tensor) is False
    assert moves(device, handle, folder / "file") == "bounce"
    assert "its driver has been closed" in refusal()


PROGRAM = """
import atexit, os, sys, torch
from pathlib import Path
from tests.conftest import pattern
from tests.doubles import NVIDIA_FS, FakeCuFile, Function
from tests.doubles import private_device
cufile = FakeCuFile(Path(os.environ["NVME_OPS_CUFILE_LIBRARY"]))
cufile.offer(nvidia_fs=NVIDIA_FS)
def look():
    cufile.check_idle(0)
    print("closed", cufile.calls(Function.DRIVER_CLOSE), os.listdir())
atexit.register(look)  # before the op is loaded: runs after the op's own
from nvme_ops import aio_handle
from nvme_ops.io.gds import gds_handle
device = private_device()
"""


def ends(folder: Path, program: str) -> str:
    (folder / "empty").mkdir()
    begin = f"import os; os.chdir({str(folder / 'empty')!r})\n"
    result = run_python(begin + PROGRAM + program, folder, check=False, NVME_OPS_CUFILE_LIBRARY=str(build("cufile")))
    assert (result.returncode, result.stderr) == (3, "")
    return result.stdout


def test_the_interpreter_ends_with_work_pending(the_device: PrivateDevice, folder: Path) -> None:
    """And with memory pinned."""
    program = """
handle, kept = gds_handle(65536, intra_op_parallelism=2), []
for i in range(3):
    handle.async_pwrite(device.tensor(pattern(5 << 20, i)), f"{sys.argv[1]}/file{i}")
    kept.append(handle.submit_pwrite(device.tensor(pattern(5 << 20, i)), f"{sys.argv[1]}/future{i}"))
kept.append(handle.new_pinned_device_tensor(5 << 20, device.empty(1)))
handle.pin_device_tensor(device.empty(33 << 20, index=1))
assert cufile.now.memories == 2
sys.exit(3)
"""
    assert ends(folder, program) == "closed 1 []\n"
    for i in range(3):
        assert torch.equal(contents(folder / f"file{i}"), pattern(5 * MIB, i))
        assert torch.equal(contents(folder / f"future{i}"), pattern(5 * MIB, i))


def test_a_driver_that_hangs(the_device: PrivateDevice, folder: Path) -> None:
    """It holds up neither the handle, the second one least of all, nor the end of the program."""
    program = """
cufile.fail(Function.DRIVER_OPEN, delay=100_000)
for _ in range(3):
    try:
        gds_handle()
    except RuntimeError as error:
        print(error)
sys.exit(3)
"""
    *said, end = ends(folder, program).splitlines()
    assert (len(said), len(set(said))) == (3, 1)
    assert f"cuFileDriverOpen of {build('cufile')} has not returned after" in said[0]
    assert end == "closed 0 []"
