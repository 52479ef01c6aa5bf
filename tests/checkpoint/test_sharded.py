"""Checkpoints in several files: those that transformers writes, those that it reads, and what a crash leaves."""

from __future__ import annotations

import errno
import json
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import nvme_ops
from nvme_ops import aio_handle
from nvme_ops.checkpoint import safetensors_file, sharded
from nvme_ops.errors import ChecksumError
from nvme_ops.inspection.contents import contents, damaged
from tests.checkpoint.sharded_files import INDEX, SHARD, STATE, Tensors, assert_same, by_safetensors, by_torch, by_us

their = pytest.importorskip("safetensors.torch", reason="safetensors is not installed: pip install safetensors")

load: Any = nvme_ops.load  # takes its options as dictionaries here


@pytest.fixture(autouse=True)
def small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a few tensors."""
    monkeypatch.setattr(sharded, "MAX_SHARD_SIZE", SHARD)


def changed(state: Tensors, by: int = 1) -> Tensors:
    return {name: tensor + by for name, tensor in state.items()}


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def read_by_others(index: Path) -> Tensors:
    """Shard by shard, with safetensors' own library."""
    document = json.loads(index.read_text())
    found: Tensors = {}
    for shard in sorted(set(document["weight_map"].values())):
        found.update(their.load_file(index.parent / shard))
    assert document["weight_map"].keys() == found.keys()
    return found


@pytest.fixture
def saved(folder: Path) -> Path:
    """STATE in three shards, by us."""
    nvme_ops.save(STATE, folder / INDEX)
    return folder


# What is written


def test_shards_of_the_size_asked_for_and_an_index_as_transformers_writes_it(saved: Path) -> None:
    shards = [f"model-{number:05d}-of-00003.safetensors" for number in (1, 2, 3)]
    assert files(saved) == [*shards, INDEX]
    document = json.loads((saved / INDEX).read_text())
    assert len(document["metadata"].pop("nvme_ops.crc32c")) == 8
    assert len(document["metadata"].pop("nvme_ops.save")) == 16
    assert document["metadata"].pop("nvme_ops.shards").keys() == set(shards)
    assert document == {
        "metadata": {"total_size": sum(tensor.nbytes for tensor in STATE.values())},
        "weight_map": {
            "embedding": shards[0],
            "norm": shards[0],
            "large": shards[1],
            "none": shards[2],
            "head": shards[2],
        },
    }


def test_others_read_the_shards(saved: Path) -> None:
    assert_same(read_by_others(saved / INDEX), STATE)


def test_a_folder_that_is_not_there_yet(folder: Path) -> None:
    nvme_ops.save(STATE, folder / "new" / "model", format="sharded")
    assert_same(load(folder / "new" / "model"), STATE)
    nvme_ops.save(changed(STATE), folder / "new" / "model")  # and one that is
    assert_same(load(folder / "new" / "model"), changed(STATE))


def test_another_name(folder: Path) -> None:
    nvme_ops.save(STATE, folder / "ema.safetensors.index.json")
    nvme_ops.save(changed(STATE), folder / "ema-2.safetensors.index.json")
    nvme_ops.save(STATE, folder / "ema.safetensors.index.json")
    assert_same(load(folder / "ema.safetensors.index.json"), STATE)
    assert_same(load(folder / "ema-2.safetensors.index.json"), changed(STATE))


def test_a_tensor_in_each_shard_when_all_are_large(folder: Path) -> None:
    sharded.plan(STATE, checksums=True, metadata=None, max_shard_size=1).write(
        str(folder / INDEX), durable=False, handle=aio_handle()
    )
    assert len(files(folder)) == 1 + len(STATE)
    assert_same(load(folder / INDEX), STATE)


def test_no_tensors(folder: Path) -> None:
    nvme_ops.save({}, folder / INDEX)
    assert load(folder / INDEX) == {}


def test_metadata_is_in_the_index(folder: Path) -> None:
    nvme_ops.save(STATE, folder / INDEX, metadata={"step": "7"})
    assert json.loads((folder / INDEX).read_text())["metadata"]["step"] == "7"
    assert contents(folder).metadata["step"] == "7"


def test_in_the_background(folder: Path) -> None:
    for strategy, memory in (("copy", None), ("copy", 4000), ("copy_free", None)):
        nvme_ops.save_async(STATE, folder / INDEX, strategy=strategy, memory=memory).result()  # type: ignore[arg-type]
        assert_same(load(folder), STATE)


@pytest.mark.parametrize(
    ("obj", "options", "error", "words"),
    [
        ([1], {}, TypeError, "dict of tensors"),
        ({"a": STATE["head"], "b": STATE["head"][1:]}, {}, ValueError, "share memory"),
        (STATE, {"metadata": {"step": 3}}, TypeError, "strings"),
    ],
)
def test_what_cannot_be_saved(obj: Any, options: Any, error: Any, words: str, saved: Path) -> None:
    before = files(saved)
    with pytest.raises(error, match=words):
        nvme_ops.save(obj, saved / INDEX, **options)
    assert files(saved) == before


def test_pickled_shards_are_not_written(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"let the name end with \.safetensors\.index\.json"):
        nvme_ops.save(STATE, folder / "pytorch_model.bin.index.json")


# Old and new


def test_a_save_takes_other_names_than_the_one_before(saved: Path) -> None:
    for generation in (2, 3, 4):
        nvme_ops.save(changed(STATE, generation), saved / INDEX)
        shards = [f"model-g{generation}-{number:05d}-of-00003.safetensors" for number in (1, 2, 3)]
        assert files(saved) == [*shards, INDEX]
        assert_same(load(saved), changed(STATE, generation))


def test_other_files_in_the_folder_stay(saved: Path) -> None:
    others = [
        "config.json",
        "model.safetensors",
        "model-00001-of-00003.safetensors.bak",
        "other-00001-of-00003.safetensors",
    ]
    for name in others:
        (saved / name).write_text("mine")
    nvme_ops.save(STATE, saved / INDEX)
    assert all((saved / name).read_text() == "mine" for name in others)


def test_a_folder_saved_to_gives_up_its_single_file(folder: Path) -> None:
    nvme_ops.save(STATE, folder / "model.safetensors")
    nvme_ops.save(changed(STATE), folder)
    assert "model.safetensors" not in files(folder)
    assert_same(load(folder), changed(STATE))


def test_a_damaged_index_is_replaced_and_nothing_it_may_have_named_is_written_over(saved: Path) -> None:
    (saved / INDEX).write_text("{")
    nvme_ops.save(changed(STATE), saved / INDEX)
    assert files(saved)[0].startswith("model-g2-")
    assert_same(load(saved), changed(STATE))


#: What a save does to the folder.
STEPS = ("open", "mkdir", "rename", "unlink", "fsync", "fdatasync", "write")


@contextmanager
def failing(number: int, fail: Callable[[], None]) -> Iterator[list[str]]:
    """Calls ``fail`` instead of the step of this number; the steps so far are listed."""
    taken: list[str] = []

    def watched(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def step(*given: Any, **options: Any) -> Any:
            taken.append(name)
            if len(taken) == number:
                fail()
            return real(*given, **options)

        return step

    with pytest.MonkeyPatch.context() as patch:
        for name in STEPS:
            patch.setattr(os, name, watched(name, getattr(os, name)))
        yield taken


OTHER = {**changed(STATE), "more": torch.ones(1000)}  # has more shards, so other names are left behind


def assert_one_of_two_and_cleared_by_the_next(folder: Path) -> bool:
    found = load(folder, verify=True)
    assert_same(found, OTHER if "more" in found else STATE)
    nvme_ops.save(STATE, folder / INDEX, durable=False)
    assert len(files(folder)) == 3 + 1
    return "more" in found


def test_killed_at_any_step_the_old_or_the_new_one_is_whole_and_the_next_save_clears_up(saved: Path) -> None:
    seen = set()
    status = -1
    for number in range(1, 200):
        child = os.fork()
        if child == 0:
            with failing(number, lambda: os.kill(os.getpid(), signal.SIGKILL)):
                nvme_ops.save(OTHER, saved / INDEX)
                os._exit(0)
        _, status = os.waitpid(child, 0)
        seen.add(assert_one_of_two_and_cleared_by_the_next(saved))
        if status == 0:
            break
    assert status == 0
    assert seen == {False, True}


def test_an_error_at_any_step_leaves_the_old_or_the_new_one_and_no_litter(saved: Path) -> None:
    def fail() -> None:
        raise OSError(errno.EIO, "made up")

    failed = set()
    for number in range(1, 200):
        with failing(number, fail) as taken:
            try:
                nvme_ops.save(OTHER, saved / INDEX)
            except OSError:
                failed.add(taken[number - 1])
                assert len(files(saved)) in (3 + 1, 4 + 1, 3 + 4 + 1)  # the last: new, with the old not yet removed
        assert_one_of_two_and_cleared_by_the_next(saved)
        if len(taken) < number:
            break
    assert failed >= {"open", "rename", "fsync", "fdatasync", "write"}


def test_a_reader_at_work_while_a_save_replaces_its_shards_gets_the_new_ones(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads: list[str] = []
    read = safetensors_file.read

    def replaced_after_the_first(path: str, *others: Any) -> Tensors:
        reads.append(path)
        if len(reads) == 2:
            nvme_ops.save(changed(STATE), saved / INDEX)
        return read(path, *others)

    monkeypatch.setattr(safetensors_file, "read", replaced_after_the_first)
    assert_same(load(saved), changed(STATE))
    assert len(reads) == 2 + 3


# What is loaded


WRITERS = pytest.mark.parametrize("write", [by_torch, by_safetensors, by_us])


@WRITERS
def test_an_index_and_its_folder_load_to_the_same(write: Callable[[Path], Path], folder: Path) -> None:
    index = write(folder)
    for path in (index, folder):
        for options in ({}, {"map_location": "cpu"}, {"mmap": True}, {"mmap": False}):
            assert_same(load(path, **options), STATE)
    assert list(load(index)) == list(json.loads(index.read_text())["weight_map"])


@WRITERS
def test_keys_open_no_other_shards(write: Callable[[Path], Path], folder: Path) -> None:
    index = write(folder)
    places = json.loads(index.read_text())["weight_map"]
    for shard in set(places.values()) - {places["norm"]}:
        (folder / shard).unlink()
    assert_same(load(folder, keys=["norm"]), {"norm": STATE["norm"]})
    assert_same(load(folder, keys="norm"), {"norm": STATE["norm"]})


@WRITERS
def test_into(write: Callable[[Path], Path], folder: Path) -> None:
    index = write(folder)
    into = {name: torch.zeros_like(tensor) for name, tensor in STATE.items()}
    found = load(index, into=into)
    assert_same(into, STATE)
    assert all(found[name].data_ptr() == tensor.data_ptr() for name, tensor in into.items())
    part = {"norm": torch.zeros(100)}
    load(index, into=part, keys=["norm"])
    assert_same(part, {"norm": STATE["norm"]})


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_a_folder_with_one_file(name: str, folder: Path) -> None:
    nvme_ops.save(STATE, folder / name)
    assert_same(load(folder, verify=True), STATE)
    assert_same(load(folder, keys=["norm"]), {"norm": STATE["norm"]})
    assert len(contents(folder).items) >= len(STATE)


def test_a_folder_with_several_is_read_as_transformers_reads_it(folder: Path) -> None:
    by_torch(folder)
    nvme_ops.save(changed(STATE, 1), folder / "pytorch_model.bin")
    assert_same(load(folder), changed(STATE, 1))
    nvme_ops.save(changed(STATE, 2), folder / INDEX)
    assert_same(load(folder), changed(STATE, 2))
    nvme_ops.save(changed(STATE, 3), folder / "model.safetensors")
    assert_same(load(folder), changed(STATE, 3))


def test_shards_that_are_links(folder: Path) -> None:
    (folder / "blobs").mkdir()
    (folder / "snapshot").mkdir()
    by_us(folder / "blobs")
    for name in files(folder / "blobs"):
        (folder / "snapshot" / name).symlink_to(folder / "blobs" / name)
    assert_same(load(folder / "snapshot"), STATE)


@pytest.mark.parametrize("write", [by_torch, by_us])
def test_a_flipped_bit_is_found_and_the_tensor_named(write: Callable[[Path], Path], folder: Path) -> None:
    write(folder)
    item = next(each for each in contents(folder).items if each.name == "head")
    with open(item.path, "r+b") as file:
        file.seek(item.end - 1)
        byte = file.read(1)[0]
        file.seek(item.end - 1)
        file.write(bytes([byte ^ 4]))
    assert damaged(contents(folder)) == ["head"]
    for options in ({}, {"keys": ["head"]}, {"into": {"head": torch.zeros_like(STATE["head"])}, "keys": ["head"]}):
        with pytest.raises(ChecksumError, match="'head'"):
            load(folder, verify=True, **options)
    assert len(load(folder, verify=True, keys=["norm"])) == 1


def test_nothing_to_verify(folder: Path) -> None:
    by_safetensors(folder)
    with pytest.raises(ValueError, match="has no checksums"):
        load(folder, verify=True)


# With transformers itself


@pytest.fixture
def transformers(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The library, without the network."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return pytest.importorskip("transformers", reason="transformers is not installed: pip install transformers")


@pytest.fixture
def model(transformers: Any) -> Any:
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2, vocab_size=100
    )
    return transformers.LlamaForCausalLM(config)


def test_what_save_pretrained_writes_is_loaded(model: Any, folder: Path) -> None:
    for name, size in (("one", "1GB"), ("some", "20KB")):
        model.save_pretrained(folder / name, max_shard_size=size)
        assert_same(load(folder / name), model.state_dict())
        other = type(model)(model.config)
        load(folder / name, into=other)
        assert_same(other.state_dict(), model.state_dict())


def test_from_pretrained_reads_what_is_saved(model: Any, folder: Path) -> None:
    model.config.save_pretrained(folder)
    for _ in range(2):  # the second time under other names
        nvme_ops.save(model.state_dict(), folder)
        assert_same(type(model).from_pretrained(folder).state_dict(), model.state_dict())
    model.save_pretrained(folder, max_shard_size="20KB")  # which clears up after us
    assert not [name for name in files(folder) if "-g2-" in name]
