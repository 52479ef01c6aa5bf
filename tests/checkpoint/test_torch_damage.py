"""Damaged and hostile files in torch.save's format: found out, named, and nothing allocated or executed for them."""

from __future__ import annotations

import errno
import os
import pickle
import struct
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import nvme_ops
from nvme_ops.base.errors import ChecksumError, FormatError
from nvme_ops.checkpoint.contents import contents, damaged
from nvme_ops.checkpoint.torch_file import UnsafeError
from tests.checkpoint.torch_files import (
    CRC,
    HEADER,
    METHOD,
    SIZE,
    STORED,
    Evil,
    saved_by_torch,
    saved_here,
    set_entry,
    tensor_pickle,
    torch_save_content,
    trained,
    write_zip,
)
from tests.conftest import MIB, pattern
from tests.contract.faulty import flip

load: Any = nvme_ops.load  # takes its options as dictionaries here
IN_A_FOLDER = settings(max_examples=10, suppress_health_check=[HealthCheck.function_scoped_fixture])

pytestmark = pytest.mark.filterwarnings("ignore")  # of torch: other protocols, TorchScript


# What verify finds


@pytest.fixture(params=[saved_by_torch, saved_here], ids=["by torch", "here"])
def saved(request: pytest.FixtureRequest, folder: Path) -> Path:
    """A file of either writer."""
    model, optimizer = trained()
    obj = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "big": pattern(3 * MIB + 1)}
    return Path(request.param(folder / "a.pt", obj))


def test_a_directory_that_cannot_be_read_is_not_called_damaged(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pread, reads = os.pread, list[int]()

    def failing(fd: int, count: int, place: int) -> bytes:
        reads.append(place)
        if len(reads) > 1:  # the first looks which format it is
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return pread(fd, count, place)

    monkeypatch.setattr(os, "pread", failing)
    with pytest.raises(OSError, match="Input/output error") as caught:
        nvme_ops.load(saved)
    assert (caught.value.errno, caught.value.filename) == (errno.EIO, str(saved))


@IN_A_FOLDER
@given(data=st.data())
def test_a_flipped_bit_anywhere_in_the_data_is_found_and_named(data: st.DataObject, saved: Path) -> None:
    items = [item for item in contents(saved).items if item.bytes]
    item = data.draw(st.sampled_from(items))
    place, bit = data.draw(st.integers(item.start, item.end - 1)), data.draw(st.integers(0, 7))
    flip(saved, place, bit)
    try:
        names = item.name.split(" = ")
        with pytest.raises(ChecksumError) as caught:
            load(saved, verify=True)
        assert caught.value.tensors == names
        assert caught.value.filename == str(saved)
        assert item.name == "data.pkl" or damaged(contents(saved)) == [item.name]
    finally:
        flip(saved, place, bit)


def test_parts_and_the_pickle_are_verified_too(saved: Path) -> None:
    big = next(item for item in contents(saved).items if item.name == "big")
    flip(saved, big.end - 1)
    for options in (
        {"keys": ["big"]},
        {"keys": ["big"], "into": {"big": torch.zeros(3 * MIB + 1, 2, dtype=torch.uint8)[:, 0]}},
        {"map_location": lambda storage, _: storage},
    ):
        with pytest.raises(ChecksumError, match="'big'"):
            load(saved, verify=True, **options)
    assert len(load(saved, keys=["model.0.bias"], verify=True)) == 1
    flip(saved, contents(saved).items[0].start + 30)
    for options in ({}, {"keys": ["model.0.bias"]}):
        with pytest.raises(ChecksumError, match=r"'data\.pkl'"):
            load(saved, verify=True, **options)
    nvme_ops.save({"row": torch.zeros(4, 4)[1]}, saved)
    flip(saved, contents(saved).items[1].start)
    with pytest.raises(ChecksumError, match="'row'"):  # a part of a storage, with all of it
        load(saved, keys=["row"], verify=True)


def test_nothing_to_verify(folder: Path) -> None:
    nvme_ops.save([torch.ones(3)], folder / "a.pt", checksums=False)
    torch.save([torch.ones(3)], folder / "b.pt", _use_new_zipfile_serialization=False)
    for name in ("a.pt", "b.pt"):
        with pytest.raises(ValueError, match=f"{name} has no checksums"):
            load(folder / name, verify=True)


@pytest.mark.parametrize("zipped", [True, False])
def test_an_unsafe_pickle_is_not_executed_unless_torch_was_told_it_is_safe(zipped: bool, folder: Path) -> None:
    path = folder / "a.pt"
    torch.save({"a": torch.ones(2), "evil": Evil(folder / "done")}, path, _use_new_zipfile_serialization=zipped)
    with pytest.raises(UnsafeError, match=r"(?s)a\.pt.*open was not an allowed global") as caught:
        load(path)
    assert isinstance(caught.value, pickle.UnpicklingError)
    assert isinstance(caught.value, FormatError)
    if zipped:
        assert torch.equal(load(path, keys=["a"])["a"], torch.ones(2))
    assert not (folder / "done").exists()
    with torch.serialization.safe_globals([open]):
        load(path)
    assert (folder / "done").exists()


# Pickles


PICKLES = {
    "nothing": b"",
    "no such code": b"\x80\x02\xff.",
    "a string that lies": b"\x80\x02X\xff\xff\xff\xff.",
    "the state of a list": b"\x80\x02]}K\x01K\x02sb.",
    "no storage": b"\x80\x02(K\x01K\x02tQ.",
    "no such type of storage": tensor_pickle((2, 2), (2, 1), kind="MuchStorage"),
    "no record": tensor_pickle((2, 2), (2, 1), key="7"),
    "more elements than the record": tensor_pickle((2, 2), (2, 1), count=5),
    "fewer elements than the record": tensor_pickle((1, 2), (2, 1), count=3),
    "a negative count": tensor_pickle((2, 2), (2, 1), count=-4),
    "an offset beyond the storage": tensor_pickle((2, 2), (2, 1), offset=1),
    "a negative offset": tensor_pickle((2, 2), (2, 1), offset=-1),
    "a negative stride": tensor_pickle((2, 2), (2, -1)),
    "a stride beyond 63 bits": tensor_pickle((1, 2), (2**63, 1)),
    "a size that is no list": tensor_pickle(4, (1,)),
    "sizes without strides": tensor_pickle((2, 2), (1,)),
    "more than there are numbers": tensor_pickle((2**62, 2**62), (1, 1)),
}


@pytest.mark.parametrize("name", PICKLES)
def test_a_pickle_that_lies(name: str, folder: Path) -> None:
    path = write_zip(folder / "a.pt", PICKLES[name], {"data/0": bytes(16)})
    for options in ({}, {"keys": ["t"]}, {"into": {"t": torch.zeros(2, 2)}}, {"map_location": {"cpu": "cpu"}}):
        with pytest.raises(FormatError, match=r"a\.pt: data\.pkl"):
            load(path, **options)


def test_deep_nesting_and_a_container_in_itself_are_no_crash(folder: Path) -> None:
    deep = b"\x80\x02" + b"]" * 30_000 + b"a" * 29_999 + b"."
    path = write_zip(folder / "a.pt", deep, {})
    assert load(path, keys=[]) == {}
    assert len(contents(path).items) == 1
    loop: list[Any] = [torch.ones(1)]
    loop.append(loop)
    torch.save(loop, folder / "b.pt")
    assert list(load(folder / "b.pt", keys=["0"])) == ["0"]


# Containers


@pytest.fixture
def small(folder: Path) -> Path:
    """A file of another writer: no padding, nothing but what is needed."""
    content, storages = torch_save_content({"a": pattern(100), "b": pattern(50)})
    return write_zip(folder / "a.pt", content, storages)


def end_of(path: Path, field: int, code: str, value: int) -> None:
    data = bytearray(path.read_bytes())
    struct.pack_into(code, data, data.rfind(b"PK\5\6") + field, value)
    path.write_bytes(data)


LIES: dict[str, tuple[Callable[[Path], None], str]] = {
    "the directory's length": (lambda path: end_of(path, 12, "<I", 10**6), "cut short"),
    "the directory's place": (lambda path: end_of(path, 16, "<I", 2**32 - 2), "overlap"),
    "a directory in the data": (lambda path: end_of(path, 16, "<I", 3), "overlap"),
    "an entry's size": (lambda path: set_entry(path, "archive/data/0", SIZE, 99), "says that 99 bytes are stored"),
    "an entry's place": (lambda path: set_entry(path, "archive/data/0", HEADER, 5), "overlap"),
    "a place beyond the file": (lambda path: set_entry(path, "archive/data/0", HEADER, 10**6), "the zip directory"),
    "two entries in one place": (lambda path: set_entry(path, "archive/data/1", HEADER, 0), "overlap"),
    "an encrypted entry": (lambda path: set_entry(path, "archive/data/0", (8, "<H"), 1), "encrypted"),
    "an entry that is the directory": (lambda path: set_entry(path, "archive/data/0", STORED, 10**6), "10"),
}  # fmt: skip


@pytest.mark.parametrize("name", LIES)
def test_a_directory_that_lies(name: str, small: Path) -> None:
    break_it, words = LIES[name]
    break_it(small)
    for options in ({}, {"keys": ["a"]}):
        with pytest.raises(FormatError, match=rf"a\.pt: .*{words}"):
            load(small, **options)
    with pytest.raises(FormatError):
        contents(small)


def test_headers_that_are_others_and_names_that_come_twice(small: Path) -> None:
    data = small.read_bytes()
    small.write_bytes(data.replace(b"archive/data/1", b"archive/data/9", 1))
    with pytest.raises(FormatError, match="'data/1': its header is not at byte"):
        load(small)
    moved = bytearray(data)
    struct.pack_into("<H", moved, moved.index(b"archive/data/1") - 2, 60_000)
    small.write_bytes(moved)
    with pytest.raises(FormatError, match="'data/1': its bytes reach beyond"):
        load(small)
    small.write_bytes(data.replace(b"archive/data/1", b"archive/data/0"))
    with pytest.raises(FormatError, match=r"names 'data/0' twice"):
        load(small)


def test_bombs_and_unknown_or_damaged_compression_are_refused(folder: Path) -> None:
    content, storages = torch_save_content({"a": pattern(100)})

    def zipped(storages: dict[str, bytes]) -> Path:
        return write_zip(folder / "a.pt", content, storages, compression=zipfile.ZIP_DEFLATED)

    with pytest.raises(FormatError, match="would expand to"):
        load(zipped({"data/0": bytes(30 * MIB)}))
    set_entry(zipped(storages), "archive/data/0", METHOD, 99)
    for verify in (False, True):
        with pytest.raises(FormatError, match=r"a\.pt"):
            load(folder / "a.pt", verify=verify)
    set_entry(zipped(storages), "archive/data/0", CRC, 1)
    with pytest.raises(ChecksumError, match="data/0"):
        load(folder / "a.pt", verify=True)


@pytest.mark.parametrize(
    ("content", "words"),
    [(b"", "empty file"), (b"PK\3\4", "cut short"), (bytes(5000), r"a\.pt"), (None, r"no record 'data\.pkl'")],
    ids=["empty", "short", "zeros", "zip"],
)
def test_no_checkpoint_at_all(content: bytes | None, words: str, folder: Path) -> None:
    if content is None:
        with zipfile.ZipFile(folder / "a.pt", "w") as archive:
            archive.writestr("word/document.xml", b"<xml/>")
    else:
        (folder / "a.pt").write_bytes(content)
    for options in ({}, {"keys": ["a"]}):
        with pytest.raises(FormatError, match=words):
            load(folder / "a.pt", **options)
    with pytest.raises(FormatError, match="is a folder"):
        load(folder, format="torch")
    with pytest.raises(FileNotFoundError):
        load(folder / "b.pt")


def test_archives_of_tar_and_torchscript_are_refused_as_by_torch(folder: Path) -> None:
    with tarfile.open(folder / "a.pt", "w") as archive:
        archive.add(__file__, "storages")
    torch.jit.trace(torch.nn.Linear(2, 2), torch.ones(1, 2)).save(folder / "b.pt")
    for name, words in (("a.pt", "tar"), ("b.pt", "TorchScript")):
        with pytest.raises(FormatError, match=rf"{name}.*weights_only=True.*{words}"):
            load(folder / name)
