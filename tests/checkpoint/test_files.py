"""Files of any format: modules in them, mappings of them, what they are mistaken for, and what killed saves leave."""

from __future__ import annotations

import gzip
import json
import os
import resource
import signal
import stat
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

import nvme_ops
from nvme_ops.errors import FormatError
from nvme_ops.inspection.cli import main
from nvme_ops.storage import locks
from tests.conftest import in_child, run_python
from tests.crashing_save import Gated, number_in, numbered

NAMES = pytest.mark.parametrize("name", ["model.safetensors", "model.pt", "folder"])
FILES = pytest.mark.parametrize("name", ["model.safetensors", "model.pt"])


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
    found = Tied(2)
    weight = found.head.weight
    nvme_ops.load(path, into=found, verify=verify)
    assert found.head.weight is weight
    assert weight.requires_grad
    assert all(torch.equal(found.state_dict()[name], each) for name, each in saved.state_dict().items())
    assert found.head.weight is found.embedding.weight


@NAMES
def test_tied_weights_come_back_tied(tmp_path: Path, name: str) -> None:
    nvme_ops.save(Tied(1), tmp_path / name)
    assert_loads(tmp_path / name, Tied(1))
    nvme_ops.save_async(Tied(3), tmp_path / name).result()
    assert_loads(tmp_path / name, Tied(3))
    state = {name: each for name, each in Tied(1).state_dict().items() if "weight" not in name or "middle" in name}
    nvme_ops.save(state, tmp_path / name)
    with pytest.raises(KeyError, match=r"embedding\.weight"):
        nvme_ops.load(tmp_path / name, into=Tied(2))


def test_tied_weights_are_left_out_as_by_safetensors(tmp_path: Path) -> None:
    saved, found = Tied(1), Tied(2)
    nvme_ops.save(saved, tmp_path / "ours.safetensors")
    safetensors.torch.save_model(saved, str(tmp_path / "theirs.safetensors"))
    ours = safetensors.safe_open(tmp_path / "ours.safetensors", "pt")
    theirs = safetensors.safe_open(tmp_path / "theirs.safetensors", "pt")
    with ours, theirs:
        assert set(ours.keys()) == set(theirs.keys())
        assert theirs.metadata().items() <= ours.metadata().items()
    assert not any(safetensors.torch.load_model(found, str(tmp_path / "ours.safetensors")))  # missing, unexpected
    assert_loads(tmp_path / "theirs.safetensors", saved, verify=False)
    state = {name: each for name, each in saved.state_dict().items() if name != "head.weight"}  # as transformers does
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


# Mappings and copies


def cached(path: Path) -> Path:
    nvme_ops.save({"a": torch.ones(100_000)}, path)
    path.read_bytes()
    return path


def written_over(path: Path) -> None:
    with path.open("r+b") as file:
        file.write(b"\0" * path.stat().st_size)


@FILES
def test_a_mapping_follows_the_file_and_a_copy_does_not(tmp_path: Path, name: str) -> None:
    path = cached(tmp_path / name)
    nvme_ops.load(path, mmap=True)["a"].zero_()  # stays in this process
    copied, mapped = nvme_ops.load(path), nvme_ops.load(path, mmap=True)
    assert bool((mapped["a"] == 1).all())
    mapped = nvme_ops.load(path, mmap=True)
    written_over(path)
    assert bool((mapped["a"] == 0).all())
    os.truncate(path, 0)
    assert bool((copied["a"] == 1).all())


@FILES
def test_a_mapping_keeps_no_descriptor(tmp_path: Path, name: str) -> None:
    path = cached(tmp_path / name)

    def body() -> None:
        nvme_ops.load(path, mmap=True)
        used = len(os.listdir("/proc/self/fd"))
        resource.setrlimit(resource.RLIMIT_NOFILE, (used + 20, used + 20))
        kept = [nvme_ops.load(path, mmap=True) for _ in range(100)]
        assert all(bool((each["a"] == 1).all()) for each in kept)

    in_child(body)


# Who may open them


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o440])
def test_what_replaces_a_file_is_open_to_as_many_users_from_its_first_moment_on(
    tmp_path: Path, mode: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "model.safetensors"
    nvme_ops.save(numbered(1), path)
    path.chmod(mode)
    created: list[int] = []
    really_open = os.open

    def watched(name: str, flags: int, *arguments: int, **others: int) -> int:
        fd = really_open(name, flags, *arguments, **others)
        if flags & os.O_EXCL:
            created.append(stat.S_IMODE(os.fstat(fd).st_mode))
        return fd

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", watched)
        before = os.umask(0)
        try:
            nvme_ops.save(numbered(2), path)
        finally:
            os.umask(before)
    assert created == [mode]
    assert stat.S_IMODE(path.stat().st_mode) == mode


def test_a_new_file_has_the_mode_of_all_new_files(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        nvme_ops.save(numbered(1), tmp_path / "model.safetensors")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "model.safetensors").stat().st_mode) == 0o640


# Taken for others: the error says what they are and what to do

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a214614ab2935c943f9e0ff69d22e\nsize 12345\n"
TENSORS = {"a": torch.arange(3.0)}
MISTAKEN: dict[str, tuple[str, bytes | Callable[[Path], object], str]] = {
    "pointer of Git LFS": ("a.safetensors", POINTER, "git lfs pull"),
    "pointer for torch": ("a.pt", POINTER, "git lfs pull"),
    "pointer for an index": ("a.safetensors.index.json", POINTER, "git lfs pull"),
    "torch": ("a.safetensors", lambda path: torch.save(TENSORS, path), r"ends in \.pt"),
    "old torch": (
        "a.safetensors",
        lambda path: torch.save(TENSORS, path, _use_new_zipfile_serialization=False),
        r"written by torch\.save.* ends in \.pt",
    ),
    "safetensors": ("a.pt", lambda path: safetensors.torch.save_file(TENSORS, path), r"ends in \.safetensors"),
    "web page": ("a.safetensors", b"<!DOCTYPE html><html>404</html>", "a web page"),
    "gzip": ("a.pt", gzip.compress(bytes(100), mtime=0), "compressed by gzip"),
    "HDF5": ("a.bin", b"\x89HDF\r\n\x1a\n" + bytes(100), "HDF5"),
    "GGUF": ("a.safetensors", b"GGUF" + bytes(range(1, 100)), "GGUF"),
}


@pytest.mark.parametrize(("name", "make", "words"), MISTAKEN.values(), ids=MISTAKEN)
def test_the_error_says_what_it_is(name: str, make: Any, words: str, folder: Path) -> None:
    make(folder / name) if callable(make) else (folder / name).write_bytes(make)
    with pytest.raises(FormatError, match=words) as caught:
        nvme_ops.load(folder / name)
    assert str(caught.value).startswith(f"{folder / name}: ")


def test_a_folder_of_dcp(folder: Path) -> None:
    nvme_ops.dcp.save({"a": torch.ones(3)}, folder / "saved")
    with pytest.raises(FormatError, match=r"nvme_ops\.dcp\.load\(state_dict, path\)"):
        nvme_ops.load(folder / "saved")


def test_release_memory_before_the_first_save() -> None:
    run_python("import nvme_ops; nvme_ops.checkpoint.background.release_memory()")


# What killed saves leave


def killed(work: Callable[[Gated], object]) -> None:
    """Begins a save in a child that is killed when its data go to the file."""
    child = os.fork()
    if child == 0:
        gate = Gated()
        threading.Thread(target=work, args=[gate], daemon=True).start()
        gate.reached.wait(60)
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)


def names(folder: Path) -> set[str]:
    return {each.name for each in folder.iterdir()}


def test_clean_lists_and_removes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number in (1, 2):
        nvme_ops.save(numbered(number), tmp_path)
    kept = names(tmp_path)
    nvme_ops.save(numbered(3), tmp_path / "old")
    stray = tmp_path / "model-g7-00001-of-00001.safetensors"
    (tmp_path / "old" / "model-00001-of-00001.safetensors").rename(stray)
    (tmp_path / "old" / "model.safetensors.index.json").unlink()
    (tmp_path / "old").rmdir()
    killed(lambda gate: nvme_ops.save(numbered(1), tmp_path, handle=gate))
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
    held = locks.Lock(str(tmp_path / "model"))
    assert main(["clean", str(tmp_path)]) == 0
    assert len(names(tmp_path)) == 2
    held.release()
    gate.open()
    future.result()
    assert names(tmp_path) == {"one.safetensors"}


# Devices, pipes and links


@pytest.mark.parametrize("format", ["safetensors", "pt"])
def test_devices_and_pipes_are_written_to(tmp_path: Path, format: Any) -> None:
    nvme_ops.save(numbered(1), "/dev/null", format=format)
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)
    with pytest.raises(OSError, match="No space left"):
        nvme_ops.save(numbered(1), "/dev/full", format=format)
    pipe, found = tmp_path / "pipe", []
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: found.append(pipe.read_bytes()))
    reader.start()
    nvme_ops.save(numbered(1), pipe, format=format)
    reader.join()
    assert stat.S_ISFIFO(pipe.stat().st_mode)
    (tmp_path / "copy").write_bytes(found[0])
    assert nvme_ops.load(tmp_path / "copy", format=format, verify=True)["a"][0] == 1


def test_a_link_to_an_index_stays_one(tmp_path: Path) -> None:
    real, link = tmp_path / "real", tmp_path / "link"
    real.mkdir()
    link.mkdir()
    (link / "latest.safetensors.index.json").symlink_to(real / "model.safetensors.index.json")
    nvme_ops.save(numbered(1), link / "latest.safetensors.index.json")
    assert names(link) == {"latest.safetensors.index.json"}
    assert names(real) == {"model.safetensors.index.json", "model-00001-of-00001.safetensors"}
