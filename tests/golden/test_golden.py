"""Every later version reads the files of earlier ones. ``make`` says how each was made; a folder here is a version."""

from __future__ import annotations

import shutil
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import nvme_ops
from nvme_ops import dcp
from nvme_ops.base.errors import FormatError
from nvme_ops.data import AsyncLog, SampleStore
from nvme_ops.io.tuning import store as tuning_store
from nvme_ops.storage import Session, TensorStore
from tests.dcp.states import equal
from tests.golden import make

HERE = Path(__file__).parent
VERSIONS = sorted(path.name for path in HERE.iterdir() if path.name.isdigit())


def session(folder: Path) -> None:
    with Session(folder, name="golden", reuse=True, fingerprint="1") as opened, TensorStore(opened) as store:
        assert opened.found
        futures = {name: store.get(name) for name in store}
        for future in futures.values():
            future.result()
        assert equal({name: future.tensor for name, future in futures.items()}, stored())


def stored() -> dict[str, torch.Tensor]:
    return {**make.tensors(), "weight": make.tensors()["weight"].t()}


def optimizer(folder: Path) -> None:
    for from_file in (False, True):
        expected, param = make.parameter(), make.parameter()
        adam = torch.optim.Adam([expected], lr=make.RATE)
        for _ in range(make.STEPS):
            make.stepped(expected, adam)
        param.data.copy_(expected)
        make.stepped(expected, adam)
        place = folder / "another" if from_file else folder
        place.mkdir(exist_ok=True)
        with make.opened(param, place) as opened:
            assert opened.steps == (0 if from_file else make.STEPS)
            if from_file:
                opened.load_states(folder / "states.safetensors")
            make.stepped(param, opened)
        assert torch.equal(param, expected)


def samples(folder: Path) -> None:
    with SampleStore(folder, verify=True) as store:
        assert len(store) == len(make.samples())
        for number, sample in enumerate(make.samples()):
            loaded = store[number]
            assert bytes(loaded["image"].numpy()) == sample["image"]
            assert int(loaded["label"]) == sample["label"]


def log(folder: Path) -> None:
    assert list(AsyncLog.read(folder / "events")) == make.records()


def checkpoints(folder: Path) -> None:
    for name in ("model.safetensors", "sharded"):
        assert equal(nvme_ops.load(folder / name, verify=True), make.tensors())
    loaded = nvme_ops.load(folder / "model.pt", verify=True)
    assert loaded["nested"][1] == 5
    assert equal(loaded["nested"][0], make.tensors())


def distributed(folder: Path) -> None:
    state: dict[str, Any] = {**{name: torch.zeros_like(tensor) for name, tensor in make.tensors().items()}, "step": 0}
    dcp.load(state, folder, verify=True)
    assert state.pop("step") == 5
    assert equal(state, make.tensors())


def tuning(folder: Path) -> None:
    loaded = tuning_store.load(make.IDENTITY)
    assert tuning_store.settings_of(loaded) == make.SETTINGS
    assert loaded["found"] == "by hand"


READ: dict[str, Callable[[Path], None]] = {
    "session": session, "optimizer": optimizer, "samples": samples, "log": log, "checkpoints": checkpoints,
    "dcp": distributed, "tuning": tuning,
}  # fmt: skip


def copied(version: str, kind: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy that only this user can write to; git keeps no such rights."""
    place = folder / kind
    shutil.copytree(HERE / version / kind, place)
    for path in [place, *place.rglob("*")]:
        path.chmod(0o700 if path.is_dir() else 0o600)
    monkeypatch.setattr(tuning_store, "folder", lambda: place)
    return place


@pytest.mark.parametrize("kind", READ)
@pytest.mark.parametrize("version", VERSIONS)
def test_what_an_earlier_version_wrote_is_read(
    version: str, kind: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    READ[kind](copied(version, kind, folder, monkeypatch))


def test_what_this_version_writes_it_reads(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the files of the next version can be made as these were."""
    make.made(folder / "new")
    monkeypatch.setattr(tuning_store, "folder", lambda: folder / "new" / "tuning")
    for kind, read in READ.items():
        read(folder / "new" / kind)


def of_version_2(line: bytes) -> bytes:
    """A line of a journal under its right checksum."""
    line = line[9:-1].replace(b'"version": 1', b'"version": 2')
    return b"%08x %s\n" % (zlib.crc32(line), line)


LATER: list[tuple[str, str, Callable[[bytes], bytes], str]] = [
    ("session", '"mark"', lambda text: b"".join(map(of_version_2, text.splitlines(True))), "version 2 of the index"),
    ("session", '"magic"', lambda text: text.replace(b'"version": 1', b'"version": 2'), "of a later version"),
    ("optimizer", "commit 2", lambda text: text.replace(b"commit 2", b"commit 9"), "step is damaged"),
    ("samples", "NVMEDATA\1", lambda text: text.replace(b"NVMEDATA\1", b"NVMEDATA\2"), "version 2 of the format"),
    ("log", "NVLG", lambda text: text.replace(b"NVLG", b"NVLH"), "version NVLH of the format"),
]


@pytest.mark.parametrize(("kind", "mark", "change", "error"), LATER)
def test_what_a_later_version_wrote_is_refused_and_stays(
    kind: str, mark: str, change: Callable[[bytes], bytes], error: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = copied(VERSIONS[-1], kind, folder, monkeypatch)
    for path in [entry for entry in place.rglob("*") if entry.is_file() and mark.encode() in entry.read_bytes()]:
        path.write_bytes(change(path.read_bytes()))
    before = {path: path.read_bytes() for path in place.rglob("*") if path.is_file() and path.name != "owner"}
    with pytest.raises((FormatError, FileExistsError), match=error):
        READ[kind](place)
    assert {path: path.read_bytes() for path in before} == before
