"""Files of any format: modules in them, mappings of them, what they are mistaken for, and what killed saves leave."""

from __future__ import annotations

import json
import os
import resource
import shutil
import stat
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

import nvme_ops
from nvme_ops.base.errors import FormatError
from nvme_ops.checkpoint.cli import main
from nvme_ops.checkpoint.contents import contents
from nvme_ops.checkpoint.convert import convert
from nvme_ops.data import AsyncLog, SampleStore, SampleWriter
from nvme_ops.dcp import NvmeStorageWriter
from nvme_ops.filesystem import files
from nvme_ops.filesystem.files import Lock
from tests.conftest import give_up_root, in_child, killed_in, open_to_all, watched
from tests.contract.adapters import Capability, DcpSave, SaveAsync, SaveSharded, SaveTorch
from tests.crashing_save import (
    NEW,
    OLD,
    Gated,
    beside,
    content,
    killed_at_each_step,
    number_in,
    numbered,
)  # fmt: skip
from tests.dcp.states import equal, needs_fork

pytestmark = pytest.mark.filterwarnings("ignore:.*(torch.distributed is disabled|Detected an existing checkpoint)")
NAMES = pytest.mark.parametrize("name", ["model.safetensors", "model.pt", "folder"])
# Modules: tied weights come back tied, and strict means what it means in torch


class Tied(torch.nn.Module):
    """As GPT-2: the head is the embedding."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = torch.nn.Embedding(50, 8)
        self.middle = torch.nn.BatchNorm1d(8).to(torch.bfloat16)
        self.head = torch.nn.Linear(8, 50, bias=False)
        self.head.weight = self.embedding.weight


def assert_loads(path: Path, saved: Tied, verify: bool = True) -> None:
    model = Tied(2)
    weight = model.head.weight
    nvme_ops.load(path, into=model, verify=verify)
    assert model.head.weight is weight
    assert weight.requires_grad
    assert equal(model.state_dict(), saved.state_dict())
    assert model.head.weight is model.embedding.weight


@NAMES
def test_tied_weights_come_back_tied(tmp_path: Path, name: str) -> None:
    nvme_ops.save(Tied(1), tmp_path / name)
    assert_loads(tmp_path / name, Tied(1))
    nvme_ops.save_async(Tied(3), tmp_path / name).result()
    assert_loads(tmp_path / name, Tied(3))
    state = {name: tensor for name, tensor in Tied(1).state_dict().items() if "weight" not in name or "middle" in name}
    nvme_ops.save(state, tmp_path / name)
    with pytest.raises(KeyError, match=r"embedding\.weight"):
        nvme_ops.load(tmp_path / name, into=Tied(2))


def test_tied_weights_are_left_out_as_by_safetensors(tmp_path: Path) -> None:
    saved, loaded = Tied(1), Tied(2)
    nvme_ops.save(saved, tmp_path / "ours.safetensors")
    safetensors.torch.save_model(saved, str(tmp_path / "theirs.safetensors"))
    ours = safetensors.safe_open(tmp_path / "ours.safetensors", "pt")
    theirs = safetensors.safe_open(tmp_path / "theirs.safetensors", "pt")
    with ours, theirs:
        assert set(ours.keys()) == set(theirs.keys())
        assert theirs.metadata().items() <= ours.metadata().items()
    assert not any(safetensors.torch.load_model(loaded, str(tmp_path / "ours.safetensors")))  # missing, unexpected
    assert_loads(tmp_path / "theirs.safetensors", saved, verify=False)
    state = {name: value for name, value in saved.state_dict().items() if name != "head.weight"}  # as transformers does
    nvme_ops.save(state, tmp_path / "ours.safetensors")
    assert_loads(tmp_path / "ours.safetensors", saved)


@NAMES
def test_strict(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    nvme_ops.save({"a": torch.ones(3), "b": torch.ones(3)}, path)
    into = {"b": torch.zeros(3), "c": torch.zeros(3)}
    with pytest.raises(KeyError, match="strict=False"):
        nvme_ops.load(path, into=into)
    assert set(nvme_ops.load(path, into=into, strict=False)) == {"b"}
    assert (into["b"].tolist(), into["c"].tolist()) == ([1, 1, 1], [0, 0, 0])
    assert set(nvme_ops.load(path, keys=["a", "nosuch"], strict=False)) == {"a"}
    with pytest.raises(ValueError, match="shape"):
        nvme_ops.load(path, into={"a": torch.zeros(4)}, strict=False)


def test_errors_have_the_types_that_users_of_torch_and_safetensors_expect(tmp_path: Path) -> None:
    path, tensor = tmp_path / "file.safetensors", torch.zeros(2)
    with pytest.raises(RuntimeError, match="share memory"):
        nvme_ops.save({"a": tensor, "b": tensor}, path)
    nvme_ops.save({"a": tensor}, path)
    with pytest.raises(RuntimeError, match=r"^[^\"']*has no tensor 'b'"):
        nvme_ops.load(path, keys=["b"])
    with pytest.raises(RuntimeError, match="no counterpart"):
        nvme_ops.load(path, into=torch.nn.Linear(1, 1))
    (tmp_path / "legacy.pt").write_bytes(b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19.\x80\x02M\xe9\x03.")
    for load, kind in ((torch.load, EOFError), (nvme_ops.load, EOFError), (nvme_ops.load, FormatError)):
        with pytest.raises(kind):
            load(tmp_path / "legacy.pt")


@pytest.mark.parametrize("name", ["model.safetensors", "model.pt"])
def test_a_mapping_follows_the_file_without_a_descriptor_a_copy_does_not(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    nvme_ops.save({"a": torch.ones(100_000)}, path)

    def body() -> None:
        nvme_ops.load(path, mmap=True)["a"].zero_()  # stays in this process
        used = len(os.listdir("/proc/self/fd"))
        resource.setrlimit(resource.RLIMIT_NOFILE, (used + 20, used + 20))
        copied, *mapped = nvme_ops.load(path)["a"], *(nvme_ops.load(path, mmap=True)["a"] for _ in range(50))
        assert all(bool((tensor == 1).all()) for tensor in mapped)
        path.open("r+b").write(bytes(path.stat().st_size))
        assert all(bool((tensor == 0).all()) for tensor in mapped)
        os.truncate(path, 0)
        assert bool((copied == 1).all())

    in_child(body)


# Who may open them


@pytest.mark.usefixtures("no_collection")  # it may not come for long; Python 3.11.2's sees no memo of a pickle
@NAMES
def test_what_is_loaded_is_freed_with_its_last_reference(tmp_path: Path, name: str) -> None:
    nvme_ops.save({"a": torch.zeros(1000), "b": torch.zeros(10)}, tmp_path / name)
    options: Any
    for options in ({"verify": True}, {"mmap": True}):
        loaded = nvme_ops.load(tmp_path / name, **options)
        still_there = [weakref.ref(tensor) for tensor in loaded.values()]
        del loaded
        assert [ref() for ref in still_there] == [None, None]


def test_what_replaces_a_file_has_its_permissions_from_the_first_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "model.safetensors"
    before = os.umask(0o027)
    try:
        nvme_ops.save(numbered(1), path)
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o640  # as all new files
    path.chmod(0o440)
    opened = watched(monkeypatch, os, "open", lambda _, flags, *modes: (flags & os.O_EXCL, modes))
    nvme_ops.save(numbered(2), path)
    assert [modes for new, modes in opened if new] == [(0o440,)]
    assert stat.S_IMODE(path.stat().st_mode) == 0o440


# Taken for others: the error says what they are and what to do

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a214614ab2935c943f9e0ff69d22e\nsize 12345\n"
TENSORS = {"a": torch.arange(3.0)}
MISTAKEN: dict[str, tuple[str, bytes | Callable[[Path], object], str]] = {
    "pointer for torch": ("a.pt", POINTER, "git lfs pull"),
    "pointer for an index": ("a.safetensors.index.json", POINTER, "git lfs pull"),
    "old torch": (
        "a.safetensors",
        lambda path: torch.save(TENSORS, path, _use_new_zipfile_serialization=False),
        r"written by torch\.save.* ends in \.pt",
    ),
    "safetensors": ("a.pt", lambda path: safetensors.torch.save_file(TENSORS, path), r"ends in \.safetensors"),
    "GGUF": ("a.safetensors", b"GGUF" + bytes(range(1, 100)), "GGUF"),
    "a folder of DCP": (
        "saved", lambda path: nvme_ops.dcp.save(TENSORS, path), r"nvme_ops\.dcp\.load\(state_dict, path\)"
    ),
}  # fmt: skip


@pytest.mark.parametrize(("name", "make", "words"), MISTAKEN.values(), ids=MISTAKEN)
def test_the_error_says_what_it_is(name: str, make: Any, words: str, folder: Path) -> None:
    make(folder / name) if callable(make) else (folder / name).write_bytes(make)
    with pytest.raises(FormatError, match=words) as caught:
        nvme_ops.load(folder / name)
    assert str(caught.value).startswith(f"{folder / name}: ")


# What killed saves leave


def names(folder: Path) -> set[str]:
    return {entry.name for entry in folder.iterdir()}


def test_a_long_wait_says_for_what_and_a_planted_lock_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "_PATIENCE", 0.05)
    held = Lock(str(tmp_path / "model"))
    timer = threading.Timer(0.3, held.close)
    timer.start()
    with pytest.warns(RuntimeWarning, match=r"waiting for another process.*model"):
        Lock(str(tmp_path / "model")).close()
    timer.join()
    plants: list[Any] = [lambda path: path.symlink_to("/etc/passwd"), os.mkfifo, Path.mkdir]
    for number, plant in enumerate(plants):
        plant(tmp_path / f".{number}.nvme_ops-lock")
        with pytest.raises(OSError, match="nvme_ops-lock"):
            Lock(str(tmp_path / str(number)))


def test_clean_lists_and_removes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number in (1, 2):
        nvme_ops.save(numbered(number), tmp_path)
    kept = names(tmp_path)
    nvme_ops.save(numbered(3), tmp_path / "old")
    stray = tmp_path / "model-g7-00001-of-00001.safetensors"
    (tmp_path / "old" / "model-00001-of-00001.safetensors").rename(stray)
    shutil.rmtree(tmp_path / "old")

    def killed() -> None:
        gate = Gated()
        threading.Thread(target=lambda: nvme_ops.save(numbered(1), tmp_path, handle=gate), daemon=True).start()
        gate.reached.wait(60)

    killed_in(killed)
    assert main(["clean", str(tmp_path), "--dry-run"]) == 0
    said = capsys.readouterr().out
    assert stray.name in said
    assert ".nvme_ops-tmp" in said
    assert main(["clean", str(tmp_path), "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["files"]) == 2  # the lock of the killed one has gone already
    assert names(tmp_path) == kept
    assert main(["clean", str(tmp_path)]) == 0
    assert number_in(tmp_path) == 2


def test_a_save_that_lives_keeps_its_files(tmp_path: Path) -> None:
    gate = Gated()
    future = nvme_ops.save_async(numbered(1), tmp_path / "one.safetensors", handle=gate)
    gate.reached.wait(60)
    held = Lock(str(tmp_path / "model"))
    assert main(["clean", str(tmp_path)]) == 0
    assert len(names(tmp_path)) == 2
    held.close()
    gate.open()
    future.result()
    assert names(tmp_path) == {"one.safetensors"}


# Devices, pipes and links


def test_an_empty_path_is_not_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    safetensors.torch.save_file({"precious": torch.ones(3)}, "model.safetensors")
    calls: list[Callable[[], object]] = [
        lambda: nvme_ops.save({"w": torch.ones(3)}, ""), lambda: nvme_ops.load(""), lambda: NvmeStorageWriter(""),
        lambda: convert("model.safetensors", ""), lambda: SampleWriter(["a", ""]), lambda: SampleStore(""),
        lambda: AsyncLog(""),
    ]  # fmt: skip
    for call in calls:
        with pytest.raises(FileNotFoundError, match="the path is empty"):
            call()
    assert os.listdir() == ["model.safetensors"]


@pytest.mark.parametrize("format", ["safetensors", "pt"])
def test_devices_and_pipes_are_written_to(tmp_path: Path, format: Any) -> None:
    nvme_ops.save(numbered(1), "/dev/null", format=format)
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)
    with pytest.raises(OSError, match="No space left"):
        nvme_ops.save(numbered(1), "/dev/full", format=format)
    pipe, received = tmp_path / "pipe", []
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: received.append(pipe.read_bytes()))
    reader.start()
    nvme_ops.save(numbered(1), pipe, format=format)
    reader.join()
    assert stat.S_ISFIFO(pipe.stat().st_mode)
    (tmp_path / "copy").write_bytes(received[0])
    assert nvme_ops.load(tmp_path / "copy", format=format, verify=True)["a"][0] == 1


def test_a_link_to_an_index_stays_one(tmp_path: Path) -> None:
    real, link = tmp_path / "real", tmp_path / "link"
    real.mkdir()
    link.mkdir()
    (link / "latest.safetensors.index.json").symlink_to(real / "model.safetensors.index.json")
    nvme_ops.save(numbered(1), link / "latest.safetensors.index.json")
    assert names(link) == {"latest.safetensors.index.json"}
    assert names(real) == {"model.safetensors.index.json", "model-00001-of-00001.safetensors"}


def test_users_wait_for_each_other(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("not root: there is no other user to become")
    open_to_all(tmp_path)
    path = str(tmp_path / "model")
    held = Lock(path)

    def body() -> None:
        give_up_root()
        Lock(path).close()

    timer = threading.Timer(0.3, held.close)
    timer.start()
    in_child(body)
    timer.join()
    assert list(tmp_path.iterdir()) == []


# A save that is killed at any step


@pytest.fixture(params=[SaveTorch, SaveSharded, SaveAsync, pytest.param(DcpSave, marks=needs_fork)])
def saver(quick_folder: Path, request: pytest.FixtureRequest) -> Capability:
    """Has saved version 0, and another one before it."""
    saver: Capability = request.param(quick_folder)
    saver.do(0)
    return saver


def test_a_kill_leaves_one_file_whole_and_the_next_save_clears_up(saver: Capability) -> None:
    usual = len(list(saver.folder.rglob("*")))
    for _ in killed_at_each_step(lambda: saver.do(1)):
        saver.check()
        saver.do(0)
        assert len(list(saver.folder.rglob("*"))) <= usual


# Which save a shard is of

SHARD = "model-00002-of-00002.safetensors"


def test_a_shard_of_another_save_is_an_error_of_another_program_unverified(tmp_path: Path) -> None:
    one, other = tmp_path / "1", tmp_path / "2"
    for number, path in enumerate((one, other), 1):
        nvme_ops.save({name: torch.full((3,), float(number)) for name in "ab"}, path, max_shard_size=1)
    nvme_ops.save({"b": torch.full((3,), 7)}, one / SHARD)
    assert nvme_ops.load(one)["b"][0] == 7
    with pytest.raises(OSError, match="header"):
        nvme_ops.load(one, verify=True)
    nvme_ops.save({"c": torch.zeros(3)}, one.with_suffix(".safetensors"), metadata=contents(other).metadata)
    assert contents(one.with_suffix(".safetensors")).damaged == []  # metadata alone make it no part of a save
    (other / SHARD).rename(one / SHARD)
    for into in (None, {"a": torch.zeros(3), "b": torch.zeros(3)}):
        with pytest.raises(ValueError, match=rf"{SHARD}: belongs to another save"):
            nvme_ops.load(one, into=into)


# recycle=True: a checkpoint is written over the one before the last, and is as whole as any other


@pytest.fixture
def path(folder: Path) -> Path:
    (folder / "models").mkdir()
    return folder / "models" / "model.safetensors"


def save(path: Path, tensors: dict[str, torch.Tensor] = OLD) -> int:
    """The inode of the new file."""
    nvme_ops.save(tensors, path, recycle=True)
    assert content(path) == ("old" if tensors is OLD else "new")
    return path.stat().st_ino


def spare_of(path: Path) -> Path:
    return path.with_name(f".{path.name}.nvme_ops-spare")


def test_two_files_take_turns(path: Path) -> None:
    inodes = [save(path, tensors) for tensors in (OLD, NEW, NEW, OLD)]
    assert inodes[0] != inodes[1]
    assert inodes[2:] == inodes[:2]
    assert beside(path) == [spare_of(path).name]


@pytest.mark.parametrize("suffix", [".safetensors", ".pt"])
def test_the_bytes_are_those_of_a_new_file(path: Path, suffix: str) -> None:
    path, fresh = path.with_suffix(suffix), path.with_name(f"fresh{suffix}")
    for length in (1000, 300_000, 5, 70_000, 0, 3):
        tensors = {"a": torch.randn(length), "b": torch.randn(7, 3).t(), "c": torch.arange(length).to(torch.int8)}
        nvme_ops.save(tensors, path, recycle=True)
        nvme_ops.save(tensors, fresh)
        assert path.read_bytes() == fresh.read_bytes()
        assert nvme_ops.load(path, verify=True).keys() == tensors.keys()


def test_a_save_without_it_and_clean_give_the_room_back(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for tensors in (OLD, NEW):
        nvme_ops.save_async(tensors, path, recycle=True).result()
    nvme_ops.save(OLD, path)
    assert (content(path), beside(path)) == ("old", [])
    for tensors in (OLD, NEW):
        save(path, tensors)
    assert main(["clean", str(path.parent)]) == 0
    assert spare_of(path).name in capsys.readouterr().out
    assert (content(path), beside(path)) == ("new", [])


def test_what_has_a_second_name_is_not_written_over(path: Path) -> None:
    save(path)
    os.link(path, path.with_name("kept"))
    before = path.read_bytes()
    for tensors in (NEW, OLD, NEW):
        save(path, tensors)
    assert path.with_name("kept").read_bytes() == before


@pytest.mark.parametrize(
    "plant",
    [Path.symlink_to, Path.hardlink_to, lambda spare, _: os.mkfifo(spare), lambda spare, _: spare.mkdir()],
    ids=["link", "hard link", "pipe", "folder"],
)
def test_what_others_put_in_the_place_of_the_spare_is_not_written_to(path: Path, plant: Any) -> None:
    precious = path.with_name("precious")
    precious.write_bytes(b"precious")
    save(path)
    plant(spare_of(path), precious)
    for tensors in (NEW, OLD, NEW):
        save(path, tensors)
    assert precious.read_bytes() == b"precious"


def test_whoever_could_open_the_old_file_does_not_read_the_new_one(path: Path) -> None:
    save(path)
    save(path, NEW)
    with spare_of(path).open("rb") as theirs:
        before = theirs.read()
        path.chmod(0o600)
        save(path)
        theirs.seek(0)
        assert theirs.read() == before
    assert path.stat().st_mode & 0o777 == 0o600
    if os.geteuid() == 0:
        spare_of(path).write_bytes(b"theirs")
        os.chown(spare_of(path), 65534, 65534)
        with spare_of(path).open("rb") as theirs:
            save(path, NEW)
            assert theirs.read() == b"theirs"


def test_it_is_not_to_be_had_without_durability(path: Path) -> None:
    with pytest.raises(ValueError, match="durable=False"):
        nvme_ops.save(OLD, path, recycle=True, durable=False)
