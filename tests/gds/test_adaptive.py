"""``gds_handle.adaptive``: accelerator tensors take either way, and the better one in the end."""

from __future__ import annotations

from pathlib import Path

import pytest

from nvme_ops import aio_handle, gds_handle
from nvme_ops.tuning import dictionary
from tests.conftest import MIB, pattern, store
from tests.fake_cufile import FakeCuFile
from tests.private_device import PrivateDevice

pytest_plugins = ("tests.fake_cufile.fixtures",)


@pytest.fixture(autouse=True)
def nothing_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    dictionary.forget()


def learn(handle: aio_handle, device: PrivateDevice, folder: Path) -> None:
    data = pattern(20 * MIB)
    path = store(folder / "file", data)
    for _ in range(24):
        tensor = device.empty(len(data))
        handle.sync_pread(tensor, path)
        assert device.peek(tensor).equal(data)


def test_both_ways_are_tried_and_kept(cufile: FakeCuFile, device: PrivateDevice, folder: Path) -> None:
    with gds_handle.adaptive(folder) as handle:
        learn(handle, device, folder)
        uses = handle._engine.paths()["uses"]
        assert sum(use["transfers"] for use in uses.values()) == 24
        assert uses.keys() == {"gds", "bounce"}
        (found,) = [one for one in handle.learned() if one.place == "device"]
        assert not found.exploring
        assert [tried.bounce for tried in found.tools].count(True) == 1
        host = pattern(20 * MIB)
        handle.sync_pwrite(host, folder / "host")
    again = gds_handle.adaptive(folder)
    assert {one.place for one in again.learned()} >= {"device"}


def test_without_cufile_there_is_one_way(cufile: FakeCuFile, device: PrivateDevice, folder: Path) -> None:
    handle = aio_handle.adaptive(folder)
    learn(handle, device, folder)
    assert not any(tried.bounce for one in handle.learned() for tried in one.tools)
