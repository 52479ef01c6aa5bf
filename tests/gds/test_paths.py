"""Which way a tensor on an accelerator takes, why, and that ``path_statistics`` tells the truth about it.

cuFile and the accelerator are doubles made of host memory: which way is faster here says nothing of real ones.
"""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

import pytest
import torch

from nvme_ops.gds import gds_handle
from tests.conftest import MIB, contents, pattern, store
from tests.fake_cufile import OLD, PEER_TO_PEER, FakeCuFile, Function, build
from tests.private_device import PrivateDevice

pytest_plugins = ("tests.fake_cufile.fixtures",)

ODD = 2 * MIB + 5
TELLING = 16 * MIB  # kTelling of gds_path.cpp: what is smaller is not measured
TRY_AGAIN = 64  # kTryAgain of gds_path.cpp
SLOW = 1.0  # seconds that nothing else here takes

both = pytest.mark.parametrize("write", [True, False], ids=["write", "read"])


def uses(handle: gds_handle) -> dict[str, int]:
    return {way: use["transfers"] for way, use in handle.path_statistics()["uses"].items()}


def round_trip(device: PrivateDevice, handle: gds_handle, path: Path, size: int = ODD) -> None:
    back = device.empty(size)
    handle.write(device.tensor(pattern(size)), path)
    handle.read(back, path)
    assert torch.equal(contents(path), pattern(size))
    assert torch.equal(device.peek(back), pattern(size))


def forbid_cufile(cufile: FakeCuFile) -> None:
    assert cufile.calls(Function.READ) + cufile.calls(Function.WRITE) == 0


# Straight to the device


def test_before_the_first_transfer(cufile: FakeCuFile) -> None:
    handle = gds_handle()
    assert handle.last_path is None
    assert handle.path_statistics() == {"last": None, "why": "", "uses": {}}


def test_nvidia_fs(cufile: FakeCuFile, device: PrivateDevice, folder: Path) -> None:
    handle = gds_handle()
    round_trip(device, handle, folder / "file")
    assert handle.path_statistics() == {
        "last": "gds",
        "why": "cuFile can reach the GPU directly",
        "uses": {"gds": {"transfers": 2, "bytes": 2 * ODD}},
    }


def test_peer_to_peer_without_nvidia_fs(cufile: FakeCuFile, device: PrivateDevice, folder: Path) -> None:
    cufile.offer(features=PEER_TO_PEER)
    handle = gds_handle()
    round_trip(device, handle, folder / "file")
    assert uses(handle) == {"gds": 2}


@pytest.mark.parametrize("mode", ["auto", "require"])
def test_less_than_a_page_takes_the_bounce_path(
    cufile: FakeCuFile, device: PrivateDevice, folder: Path, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    monkeypatch.setenv("NVME_OPS_GDS", mode)
    handle = gds_handle()
    round_trip(device, handle, folder / "file", 4095)
    assert handle.path_statistics()["why"] == "less than a page"
    assert uses(handle) == {"bounce": 2}
    forbid_cufile(cufile)


def test_handles_count_for_themselves(cufile: FakeCuFile, device: PrivateDevice, folder: Path) -> None:
    one, other = gds_handle(), gds_handle()
    round_trip(device, one, folder / "file")
    assert other.last_path is None


def test_a_failed_transfer_is_no_use(cufile: FakeCuFile, device: PrivateDevice, folder: Path) -> None:
    handle, path = gds_handle(), store(folder / "file", pattern(ODD))
    cufile.fail(Function.READ, 5044)
    with pytest.raises(OSError, match="5044"):
        handle.read(device.empty(ODD), path)
    assert handle.last_path is None


# Refused files


@pytest.mark.parametrize("code", [5027, 5030, 5008, 5018, 5031, 5034])
def test_a_refused_file_takes_the_bounce_path(
    cufile: FakeCuFile, device: PrivateDevice, folder: Path, code: int
) -> None:
    handle = gds_handle()
    cufile.fail(Function.REGISTER_FILE, code, count=-1)
    round_trip(device, handle, folder / "file")
    statistics = handle.path_statistics()
    assert uses(handle) == {"bounce": 2}
    assert f"registering the file with cuFile: cuFile error {code}" in statistics["why"]
    if code in (5027, 5030):
        assert "CUFILE_EXPERIMENTAL_FS=1" in statistics["why"]
    forbid_cufile(cufile)


def test_a_refusal_is_not_for_ever(cufile: FakeCuFile, device: PrivateDevice, folder: Path) -> None:
    handle = gds_handle()
    cufile.fail(Function.REGISTER_FILE, 5027)
    round_trip(device, handle, folder / "file")
    assert uses(handle) == {"bounce": 1, "gds": 1}
    assert handle.last_path == "gds"


@pytest.mark.parametrize("code", [5027, 5030])
@both
def test_a_refused_file_raises_where_gds_is_required(
    cufile: FakeCuFile, device: PrivateDevice, folder: Path, monkeypatch: pytest.MonkeyPatch, write: bool, code: int
) -> None:
    monkeypatch.setenv("NVME_OPS_GDS", "require")
    handle, path = gds_handle(), store(folder / "file", pattern(ODD))
    cufile.fail(Function.REGISTER_FILE, code)
    with pytest.raises(RuntimeError, match=f"NVME_OPS_GDS=require, but .*cuFile error {code}") as caught:
        (handle.write if write else handle.read)(device.tensor(pattern(ODD)), path)
    assert str(path) in str(caught.value)
    del caught
    round_trip(device, handle, path)
    assert uses(handle) == {"gds": 2}


def test_one_refused_file_of_a_list(cufile: FakeCuFile, device: PrivateDevice, folder: Path) -> None:
    handle, names = gds_handle(), [folder / f"file{i}" for i in range(3)]
    sent = [device.tensor(pattern(ODD, i)) for i in range(3)]
    cufile.fail(Function.REGISTER_FILE, 5030, first=2)
    assert handle.submit_pwritev(sent, names).result() == 3 * ODD
    for i in range(3):
        assert torch.equal(contents(names[i]), pattern(ODD, i))
    assert uses(handle) == {"gds": 2, "bounce": 1}


def test_a_file_without_a_name(cufile: FakeCuFile, device: PrivateDevice, folder: Path) -> None:
    """cuFile does not take one that was unlinked."""
    path, back = store(folder / "file", pattern(ODD)), device.empty(ODD)
    fd = os.open(path, os.O_RDWR)
    path.unlink()
    handle = gds_handle()
    handle.read(back, fd)
    os.close(fd)
    assert torch.equal(device.peek(back), pattern(ODD))
    assert "cuFile error 5031" in handle.path_statistics()["why"]


def test_a_buffered_handle(cufile: FakeCuFile, device: PrivateDevice, folder: Path) -> None:
    handle = gds_handle(cache="buffered")
    round_trip(device, handle, folder / "file")
    assert "cache mode is 'buffered'" in handle.path_statistics()["why"]
    assert cufile.calls(Function.REGISTER_FILE) == 0


def test_a_buffered_handle_where_gds_is_required(
    cufile: FakeCuFile, device: PrivateDevice, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NVME_OPS_GDS", "require")
    with pytest.raises(RuntimeError, match=r"NVME_OPS_GDS=require, but .* 'buffered'"):
        gds_handle(cache="buffered").write(device.tensor(pattern(ODD)), folder / "file")


# NVME_OPS_GDS


def test_required_and_there(
    cufile: FakeCuFile, device: PrivateDevice, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NVME_OPS_GDS", "require")
    handle = gds_handle()
    round_trip(device, handle, folder / "file")
    assert uses(handle) == {"gds": 2}


def test_required_and_not_there(cufile: FakeCuFile, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NVME_OPS_GDS", "require")
    cufile.offer()
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"NVME_OPS_GDS=require, but .*nvidia-fs driver is not loaded"):
            gds_handle()


def test_properties_that_cannot_be_had(
    cufile: FakeCuFile, device: PrivateDevice, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cufile.fail(Function.SET_FLAG, 5022, count=-1)  # or the way it opens would tell
    cufile.fail(Function.PROPERTIES, 5002)
    handle = gds_handle()
    round_trip(device, handle, folder / "file")
    assert "cuFile does not tell its properties: cuFile error 5002" in handle.path_statistics()["why"]
    monkeypatch.setenv("NVME_OPS_GDS", "require")
    with pytest.raises(RuntimeError, match="cuFile error 5002"):
        gds_handle()


def test_an_old_library_without_nvidia_fs(cufile: FakeCuFile, libraries: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It cannot be told to do without compatibility mode, but tells what it found."""
    monkeypatch.setenv("NVME_OPS_CUFILE_LIBRARY", str(build(libraries, OLD)))
    monkeypatch.setenv("NVME_OPS_GDS", "require")
    with pytest.raises(RuntimeError, match=r"nvidia-fs is not loaded .*modprobe nvidia-fs"):
        gds_handle()


def test_off_never_loads_cufile(
    cufile: FakeCuFile, device: PrivateDevice, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unloaded = Path(shutil.copy(cufile.path, folder / "libcufile.so.0"))
    monkeypatch.setenv("NVME_OPS_CUFILE_LIBRARY", str(unloaded))
    monkeypatch.setenv("NVME_OPS_GDS", "off")
    handle = gds_handle()
    round_trip(device, handle, folder / "file", 17 * MIB)
    assert handle.path_statistics()["why"] == "NVME_OPS_GDS=off"
    assert uses(handle) == {"bounce": 2}
    assert str(unloaded) not in Path("/proc/self/maps").read_text()


def test_off_beside_a_handle_that_uses_cufile(
    cufile: FakeCuFile, device: PrivateDevice, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    using = gds_handle()
    monkeypatch.setenv("NVME_OPS_GDS", "off")
    off = gds_handle()
    round_trip(device, off, folder / "off")
    round_trip(device, using, folder / "using")
    assert (uses(off), uses(using)) == ({"bounce": 2}, {"gds": 2})


def test_the_mode_is_read_when_the_handle_is_made(
    cufile: FakeCuFile, device: PrivateDevice, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NVME_OPS_GDS", "off")
    off = gds_handle()
    monkeypatch.setenv("NVME_OPS_GDS", "require")
    require = gds_handle()
    monkeypatch.delenv("NVME_OPS_GDS")
    round_trip(device, off, folder / "file")
    assert off.path_statistics()["why"] == "NVME_OPS_GDS=off"
    cufile.fail(Function.REGISTER_FILE, 5027)
    with pytest.raises(RuntimeError, match="NVME_OPS_GDS=require"):
        require.write(device.tensor(pattern(ODD)), folder / "file")


def test_an_empty_mode_is_auto(
    cufile: FakeCuFile, device: PrivateDevice, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NVME_OPS_GDS", "")
    handle = gds_handle()
    round_trip(device, handle, folder / "file")
    assert uses(handle) == {"gds": 2}


def test_an_unknown_mode(cufile: FakeCuFile, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NVME_OPS_GDS", "maybe")
    with pytest.raises(ValueError, match="NVME_OPS_GDS='maybe' is not one of auto, require, off"):
        gds_handle()


# Compatibility mode or the bounce path


def test_small_transfers_bounce_until_the_ways_are_measured(
    cufile: FakeCuFile, device: PrivateDevice, folder: Path
) -> None:
    cufile.offer()
    handle = gds_handle()
    round_trip(device, handle, folder / "file")
    assert uses(handle) == {"bounce": 2}
    assert "nvidia-fs driver is not loaded" in handle.path_statistics()["why"]
    assert "not measured yet" in handle.path_statistics()["why"]
    forbid_cufile(cufile)


class Contest:
    """Large transfers of one direction over a machine without a direct path."""

    def __init__(self, cufile: FakeCuFile, device: PrivateDevice, path: Path, write: bool) -> None:
        cufile.offer()
        self.cufile, self.device, self.path, self.write = cufile, device, path, write
        self.handle = gds_handle()
        self.data = pattern(TELLING)
        self.there = device.tensor(self.data)
        store(path, self.data)

    def run(self) -> str:
        """Moves the tensor; the way it took."""
        (self.handle.sync_pwrite if self.write else self.handle.sync_pread)(self.there, self.path)
        return str(self.handle.last_path)

    def run_slow_bounce(self) -> str:
        with self.device.held():
            submit = self.handle.submit_pwrite if self.write else self.handle.submit_pread
            future = submit(self.there, self.path)
            self.device.wait_for_held_up()
            time.sleep(SLOW)
        assert future.result() == TELLING
        return str(self.handle.last_path)

    def run_slow_compat(self) -> str:
        self.cufile.fail(Function.WRITE if self.write else Function.READ, delay=SLOW)
        return self.run()


@both
def test_the_bounce_path_wins(cufile: FakeCuFile, device: PrivateDevice, folder: Path, write: bool) -> None:
    contest = Contest(cufile, device, folder / "file", write)
    assert [contest.run(), contest.run_slow_compat(), contest.run(), contest.run()] == [
        "bounce",
        "compat",
        "bounce",
        "bounce",
    ]
    why = contest.handle.path_statistics()["why"]
    assert "nvidia-fs driver is not loaded" in why
    assert "GB/s" in why


@both
def test_compatibility_mode_wins(cufile: FakeCuFile, device: PrivateDevice, folder: Path, write: bool) -> None:
    contest = Contest(cufile, device, folder / "file", write)
    assert [contest.run_slow_bounce(), contest.run(), contest.run(), contest.run()] == [
        "bounce",
        "compat",
        "compat",
        "compat",
    ]
    small, back = contest.data[:ODD], device.empty(ODD)
    move = contest.handle.write if write else contest.handle.read
    move(device.tensor(small) if write else back, contest.path)
    assert contest.handle.last_path == "compat"  # from now on small ones follow
    assert torch.equal(contents(contest.path)[:ODD], small)
    assert write or torch.equal(device.peek(back), small)


def test_reads_and_writes_are_measured_apart(cufile: FakeCuFile, device: PrivateDevice, folder: Path) -> None:
    contest = Contest(cufile, device, folder / "file", False)
    assert [contest.run(), contest.run()] == ["bounce", "compat"]
    contest.write = True
    assert [contest.run(), contest.run()] == ["bounce", "compat"]


def test_the_slower_way_gets_another_chance(cufile: FakeCuFile, device: PrivateDevice, folder: Path) -> None:
    contest = Contest(cufile, device, folder / "file", False)
    contest.run()
    contest.run_slow_compat()
    ways = [contest.run() for _ in range(TRY_AGAIN)]
    assert ways == ["bounce"] * (TRY_AGAIN - 1) + ["compat"]


def test_a_refused_file_is_no_measurement(cufile: FakeCuFile, device: PrivateDevice, folder: Path) -> None:
    contest = Contest(cufile, device, folder / "file", False)
    cufile.fail(Function.REGISTER_FILE, 5027, count=2)
    assert [contest.run() for _ in range(4)] == ["bounce", "bounce", "bounce", "compat"]


def test_the_data_are_right_whatever_the_way(cufile: FakeCuFile, device: PrivateDevice, folder: Path) -> None:
    cufile.offer()
    handle, size = gds_handle(intra_op_parallelism=2), TELLING + 4095
    for seed in range(3):
        data, back = pattern(size, seed), device.empty(size)
        handle.sync_pwrite(device.tensor(data), folder / "file", 777)
        handle.sync_pread(back, folder / "file", 777)
        assert torch.equal(contents(folder / "file")[777:], data)
        assert torch.equal(device.peek(back), data)
    assert set(uses(handle)) == {"bounce", "compat"}
