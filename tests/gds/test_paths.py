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

from nvme_ops import aio_handle
from nvme_ops.io.gds import gds_handle
from nvme_ops.io.tuning import adaptive
from tests.conftest import MIB, contents, store
from tests.device.kinds import Doubles, round_trip, sample
from tests.doubles import OLD, PEER_TO_PEER, FakeCuFile, Function, held

ODD = 2 * MIB + 5
TELLING = 16 * MIB  # kTelling of gds_path.cpp: what is smaller is not measured
TRY_AGAIN = 64  # kTryAgain of gds_path.cpp
SLOW = 1.0  # seconds that nothing else here takes

both = pytest.mark.parametrize("write", [True, False], ids=["write", "read"])


def mode(name: str | None) -> None:
    os.environ.pop("NVME_OPS_GDS", None)
    os.environ.update({} if name is None else {"NVME_OPS_GDS": name})


def uses(handle: gds_handle) -> dict[str, int]:
    return {way: use["transfers"] for way, use in handle.path_statistics()["uses"].items()}


def why(device: Doubles, handle: gds_handle, path: Path, size: int = 0, offset: int = 0) -> str:
    """Why a tensor, written and read, took its way."""
    round_trip(device, handle, path, size, offset)
    return str(handle.path_statistics()["why"])


def moved_by_cufile(cufile: FakeCuFile) -> int:
    return cufile.calls(Function.READ) + cufile.calls(Function.WRITE)


# Straight to the device


@pytest.mark.parametrize(("name", "peer_to_peer"), [(None, False), ("require", True)])
def test_straight_to_the_device(
    cufile: FakeCuFile, device: Doubles, folder: Path, name: str | None, peer_to_peer: bool
) -> None:
    mode(name)
    if peer_to_peer:
        cufile.offer(features=PEER_TO_PEER)
    handle, other = gds_handle(), gds_handle()
    assert handle.path_statistics() == {"last": None, "why": "", "uses": {}}
    round_trip(device, handle, folder / "file")
    use = {"transfers": 2, "bytes": 2 * ODD}
    assert handle.path_statistics() == {"last": "gds", "why": "cuFile can reach the GPU directly", "uses": {"gds": use}}
    assert other.last_path is None  # handles count for themselves
    calls = moved_by_cufile(cufile)
    assert why(device, other, folder / "small", 4095) == "less than a page"
    assert uses(other) == {"bounce": 2}
    assert moved_by_cufile(cufile) == calls
    cufile.fail(Function.READ, 5044)
    with pytest.raises(OSError, match="5044"):
        handle.read(device.empty(ODD), folder / "file")
    assert uses(handle) == {"gds": 2}  # a failed transfer is no use


# Refused files


@pytest.mark.parametrize("code", [5030, 5034])
def test_a_refused_file_takes_the_bounce_path(cufile: FakeCuFile, device: Doubles, folder: Path, code: int) -> None:
    """Not for ever."""
    handle = gds_handle()
    cufile.fail(Function.REGISTER_FILE, code, count=2)
    said = why(device, handle, folder / "file")
    assert (uses(handle), moved_by_cufile(cufile)) == ({"bounce": 2}, 0)
    assert f"registering the file with cuFile: cuFile error {code}" in said
    assert ("CUFILE_EXPERIMENTAL_FS=1" in said) is (code == 5030)
    round_trip(device, handle, folder / "file")
    assert uses(handle) == {"bounce": 2, "gds": 2}


def test_a_refused_file_raises_where_gds_is_required(cufile: FakeCuFile, device: Doubles, folder: Path) -> None:
    mode("require")
    handle, path = gds_handle(), store(folder / "file", sample(ODD))
    for move in (handle.write, handle.read):
        cufile.fail(Function.REGISTER_FILE, 5030)
        with pytest.raises(RuntimeError, match=r"NVME_OPS_GDS=require, but .*cuFile error 5030") as caught:
            move(device.tensor(sample(ODD)), path)
        assert str(path) in str(caught.value)
    del caught
    round_trip(device, handle, path)
    assert uses(handle) == {"gds": 2}
    with pytest.raises(RuntimeError, match=r"NVME_OPS_GDS=require, but .* 'buffered'"):
        gds_handle(cache="buffered").write(device.tensor(sample(ODD)), path)


# NVME_OPS_GDS


@pytest.mark.parametrize(
    ("what", "match"),
    [
        ("no nvidia-fs", "nvidia-fs driver is not loaded"),
        ("no properties", "cuFile error 5002"),
        ("an old library", "nvidia-fs is not loaded .*modprobe nvidia-fs"),
    ],
)
def test_required_and_not_there(cufile: FakeCuFile, device: Doubles, folder: Path, what: str, match: str) -> None:
    if what == "no nvidia-fs":
        cufile.offer()
    elif what == "no properties":
        cufile.fail(Function.SET_FLAG, 5022, count=-1)  # or the way it opens would tell
        cufile.fail(Function.PROPERTIES, 5002)
        assert "does not tell its properties: cuFile error 5002" in why(device, gds_handle(), folder / "file")
    else:  # which cannot be told to do without compatibility mode, but tells what it found
        os.environ["NVME_OPS_CUFILE_LIBRARY"] = str(cufile.without(OLD, folder).path)
    mode("require")
    for _ in range(2):
        with pytest.raises(RuntimeError, match=f"NVME_OPS_GDS=require, but .*{match}"):
            gds_handle()
    mode("maybe")
    with pytest.raises(ValueError, match="NVME_OPS_GDS='maybe' is not one of auto, require, off"):
        gds_handle()


def test_off_never_loads_cufile(cufile: FakeCuFile, device: Doubles, folder: Path) -> None:
    unloaded = Path(shutil.copy(cufile.path, folder / "libcufile.so.0"))
    os.environ["NVME_OPS_CUFILE_LIBRARY"] = str(unloaded)
    mode("off")
    handle = gds_handle()
    assert why(device, handle, folder / "file", 17 * MIB) == "NVME_OPS_GDS=off"
    assert uses(handle) == {"bounce": 2}
    mode("require")  # the handle is what it was made to be
    round_trip(device, handle, folder / "other")
    assert uses(handle) == {"bounce": 4}
    pinned = handle.new_pinned_device_tensor(ODD, device.empty(1))
    assert handle.pin_device_tensor(pinned[5:]) is handle.is_pinned(pinned) is True
    assert handle.unpin_device_tensor(pinned) is True
    assert handle.is_pinned(pinned) is handle.unpin_device_tensor(pinned) is False
    assert str(unloaded) not in Path("/proc/self/maps").read_text()


# Compatibility mode or the bounce path


class Contest:
    """Large transfers of one direction over a machine without a direct path."""

    def __init__(self, cufile: FakeCuFile, device: Doubles, path: Path, write: bool) -> None:
        cufile.offer()
        self.cufile, self.device, self.path, self.write = cufile, device, path, write
        self.handle, self.there = gds_handle(), device.tensor(sample(TELLING))
        store(path, sample(TELLING))

    def run(self, slow: str = "") -> str:
        """Moves the tensor, slowly where it takes this way; the way it took."""
        submit = self.handle.submit_pwrite if self.write else self.handle.submit_pread
        if slow == "compat":
            self.cufile.fail(Function.WRITE if self.write else Function.READ, delay=SLOW)
        if slow != "bounce":
            submit(self.there, self.path).result()
            return str(self.handle.last_path)
        with held(self.device.now.copies):
            future = submit(self.there, self.path)
            self.device.now.copies.wait_for_held_up()
            time.sleep(SLOW)
        assert future.result() == TELLING
        return str(self.handle.last_path)


@both
def test_the_faster_way_wins(cufile: FakeCuFile, device: Doubles, folder: Path, write: bool) -> None:
    contest = Contest(cufile, device, folder / "file", write)
    ways = [contest.run("bounce"), contest.run(), contest.run(), contest.run()]
    assert ways == ["bounce", "compat", "compat", "compat"]
    small, back = sample(TELLING)[:ODD], device.empty(ODD)
    (contest.handle.write if write else contest.handle.read)(device.tensor(small) if write else back, contest.path)
    assert contest.handle.last_path == "compat"  # from now on small ones follow
    assert torch.equal(contents(contest.path)[:ODD], small)
    assert write or torch.equal(device.peek(back), small)
    store(contest.path, sample(TELLING))
    contest.write = not write
    assert [contest.run(), contest.run()] == ["bounce", "compat"]  # reads and writes are measured apart


def test_the_slower_way_gets_another_chance(cufile: FakeCuFile, device: Doubles, folder: Path) -> None:
    contest = Contest(cufile, device, folder / "file", False)
    assert [contest.run(), contest.run("compat")] == ["bounce", "compat"]
    assert "nvidia-fs driver is not loaded" in contest.handle.path_statistics()["why"]
    assert [contest.run() for _ in range(TRY_AGAIN)] == ["bounce"] * (TRY_AGAIN - 1) + ["compat"]
    assert "GB/s" in contest.handle.path_statistics()["why"]


@pytest.mark.parametrize("kind", [gds_handle, aio_handle])
def test_an_adaptive_handle_tries_both_ways_and_keeps_the_better_one(
    cufile: FakeCuFile, device: Doubles, folder: Path, kind: type[aio_handle]
) -> None:
    adaptive.forget()
    data = sample(20 * MIB)
    path = store(folder / "file", data)
    with kind.adaptive(folder) as handle:
        for _ in range(24):
            tensor = device.empty(len(data))
            handle.sync_pread(tensor, path)
            assert device.peek(tensor).equal(data)
        (learned,) = [one for one in handle.learned() if one.place == "device"]
        assert [tried.bounce for tried in learned.tools].count(True) == (kind is gds_handle)
        if isinstance(handle, gds_handle):
            assert uses(handle).keys() == {"gds", "bounce"}
            assert sum(uses(handle).values()) == 24
            assert not learned.exploring
    assert "device" in {one.place for one in kind.adaptive(folder).learned()}
    aio_handle.adaptive(folder, queue_depth=7).freeze()  # what moves memory of a device may not be loaded yet
    handle = kind.adaptive(folder, way="cpu", queue_depth=7)
    handle.sync_pread(device.empty(len(data)), path)
    assert handle.learned() == []
