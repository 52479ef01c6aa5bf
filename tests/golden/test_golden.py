"""Every later version reads the files of earlier ones. A folder here is a version: what its package wrote.

    python -m tests.golden.test_golden tests/golden/2     # once, when a format has changed; what is there stays

Each class writes one kind of file, which says nothing of the machine it was made on, and reads it.
"""

from __future__ import annotations

import shutil
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import nvme_ops
from nvme_ops import dcp
from nvme_ops.base.errors import FormatError
from nvme_ops.base.settings import PAGE, Settings
from nvme_ops.data import AsyncLog, SampleStore, SampleWriter
from nvme_ops.filesystem.device import Identity
from nvme_ops.io.tuning import store as tuning_store
from nvme_ops.offload import NvmeOptimizer
from nvme_ops.storage import Session, TensorStore
from nvme_ops.storage.slab import Slab
from tests.dcp.states import equal

HERE = Path(__file__).parent
VERSIONS = sorted(path.name for path in HERE.iterdir() if path.name.isdigit())
IDENTITY = Identity(("nvme made up 0001 1 GB",), "ext4", "f00d", "6.1", 4, "cpu", "io_uring")
SETTINGS = Settings(queue_depth=48)
TENSORS = {
    "weight": torch.arange(600, dtype=torch.float32).view(20, 30),
    "half": torch.arange(7, dtype=torch.bfloat16),
    "scalar": torch.tensor(3, dtype=torch.int64),
    "empty": torch.zeros(0, 5),
}
STORED = {**TENSORS, "weight": TENSORS["weight"].t()}
STEPS, RATE = 2, 0.5
RECORDS = [b"", b"first", bytes(range(256))]
SAMPLES = [{"image": bytes([number]) * number, "label": number} for number in range(2)]


# Each kind: how it is written, and read


def write_session(folder: Path) -> None:
    with (
        Session(folder, name="golden", reuse=True, fingerprint="1") as opened,
        TensorStore(opened, checksums=True) as store,
    ):
        for name, tensor in STORED.items():
            store.put(name, tensor).result()
        store.put("dropped", torch.zeros(5)).result()
        store.drop("dropped")
        store.sync()


def read_session(folder: Path) -> None:
    with Session(folder, name="golden", reuse=True, fingerprint="1") as opened, TensorStore(opened) as store:
        assert opened.found
        futures = {name: store.get(name) for name in store}
        for future in futures.values():
            future.result()
        assert equal({name: future.tensor for name, future in futures.items()}, STORED)


def stepped(parameter: torch.nn.Parameter, optimizer: torch.optim.Optimizer) -> None:
    """One step, with gradients that depend on nothing but the parameter."""
    parameter.grad = parameter.detach() / 2 + 1
    optimizer.step()


def optimizer_of(param: torch.nn.Parameter, folder: Path) -> NvmeOptimizer:
    options: Any = {"memory_budget": "1M", "reuse": True, "checksums": True}
    return NvmeOptimizer([param], torch.optim.Adam, folder, lr=RATE, **options)


def parameter() -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.arange(24, dtype=torch.float32).view(4, 6))


def write_optimizer(folder: Path) -> None:
    param = parameter()
    with optimizer_of(param, folder) as optimizer:
        for _ in range(STEPS):
            stepped(param, optimizer)
        optimizer.save_states(folder / "states.safetensors")


def read_optimizer(folder: Path) -> None:
    for from_file in (False, True):
        expected, param = parameter(), parameter()
        adam = torch.optim.Adam([expected], lr=RATE)
        for _ in range(STEPS):
            stepped(expected, adam)
        param.data.copy_(expected)
        stepped(expected, adam)
        place = folder / "another" if from_file else folder
        place.mkdir(exist_ok=True)
        with optimizer_of(param, place) as optimizer:
            assert optimizer.steps == (0 if from_file else STEPS)
            if from_file:
                optimizer.load_states(folder / "states.safetensors")
            stepped(param, optimizer)
        assert torch.equal(param, expected)


def write_samples(folder: Path) -> None:
    with SampleWriter(folder, {"image": bytes, "label": torch.int64}, shard_bytes=8) as writer:
        writer.extend(SAMPLES)


def read_samples(folder: Path) -> None:
    with SampleStore(folder, verify=True) as store:
        loaded = [store[number] for number in range(len(store))]
        assert [{"image": bytes(it["image"].numpy()), "label": int(it["label"])} for it in loaded] == SAMPLES


def write_log(folder: Path) -> None:
    with AsyncLog(folder / "events") as opened:
        for record in RECORDS:
            opened.append(record)


def read_log(folder: Path) -> None:
    assert list(AsyncLog.read(folder / "events")) == RECORDS


def write_checkpoints(folder: Path) -> None:
    nvme_ops.save(TENSORS, folder / "model.safetensors")
    nvme_ops.save({"nested": [TENSORS, 5]}, folder / "model.pt")
    nvme_ops.save(TENSORS, folder / "sharded", format="sharded", max_shard_size=2000)


def read_checkpoints(folder: Path) -> None:
    for name in ("model.safetensors", "sharded"):
        assert equal(nvme_ops.load(folder / name, verify=True), TENSORS)
    loaded = nvme_ops.load(folder / "model.pt", verify=True)
    assert loaded["nested"][1] == 5
    assert equal(loaded["nested"][0], TENSORS)


def write_dcp(folder: Path) -> None:
    dcp.save({**TENSORS, "step": 5}, checkpoint_id=folder)


def read_dcp(folder: Path) -> None:
    state: dict[str, Any] = {**{name: torch.zeros_like(tensor) for name, tensor in TENSORS.items()}, "step": 0}
    dcp.load(state, folder, verify=True)
    assert equal(state, {**TENSORS, "step": 5})


def write_tuning(folder: Path) -> None:
    with mock.patch.object(tuning_store, "folder", return_value=folder):
        tuning_store.keep(IDENTITY, SETTINGS, {"found": "by hand"})


def read_tuning(folder: Path) -> None:
    with mock.patch.object(tuning_store, "folder", return_value=folder):
        loaded = tuning_store.load(IDENTITY)
    assert tuning_store.settings_of(loaded) == SETTINGS
    assert loaded["found"] == "by hand"


KINDS: dict[str, tuple[Callable[[Path], None], Callable[[Path], None]]] = {
    "session": (write_session, read_session), "optimizer": (write_optimizer, read_optimizer),
    "samples": (write_samples, read_samples), "log": (write_log, read_log),
    "checkpoints": (write_checkpoints, read_checkpoints), "dcp": (write_dcp, read_dcp),
    "tuning": (write_tuning, read_tuning),
}  # fmt: skip


def make(place: Path) -> None:
    """Writes all of them into a folder."""
    small = mock.patch.object(Slab.__init__, "__defaults__", (PAGE,))
    ids = [
        mock.patch(f"nvme_ops.{module}.boot_id", return_value="a start of the machine")
        for module in ("storage.session", "storage.journal", "offload.optimizer.records")
    ]
    with small, ids[0], ids[1], ids[2], mock.patch("nvme_ops.storage.session.machine_id", return_value="a machine"):
        for name, (write, _) in KINDS.items():
            (place / name).mkdir(parents=True)
            write(place / name)


def copied(version: str, kind: str, folder: Path) -> Path:
    """A copy that only this user can write to; git keeps no such rights."""
    place = folder / kind
    shutil.copytree(HERE / version / kind, place)
    for path in [place, *place.rglob("*")]:
        path.chmod(0o700 if path.is_dir() else 0o600)
    return place


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("version", VERSIONS)
def test_what_an_earlier_version_wrote_is_read(version: str, kind: str, folder: Path) -> None:
    KINDS[kind][1](copied(version, kind, folder))


def test_what_this_version_writes_it_reads(folder: Path) -> None:
    """So that the files of the next version can be made as these were."""
    make(folder / "new")
    for kind, (_, read) in KINDS.items():
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
    kind: str, mark: str, change: Callable[[bytes], bytes], error: str, folder: Path
) -> None:
    place = copied(VERSIONS[-1], kind, folder)
    for path in [entry for entry in place.rglob("*") if entry.is_file() and mark.encode() in entry.read_bytes()]:
        path.write_bytes(change(path.read_bytes()))
    before = {path: path.read_bytes() for path in place.rglob("*") if path.is_file() and path.name != "owner"}
    with pytest.raises((FormatError, FileExistsError), match=error):
        KINDS[kind][1](place)
    assert {path: path.read_bytes() for path in before} == before


if __name__ == "__main__":
    make(Path(sys.argv[1]))
