"""Checkpoints in several files: those that transformers writes and reads, damage, and what a crash leaves."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch as their
import torch

import nvme_ops
from nvme_ops.base.errors import ChecksumError, FormatError
from nvme_ops.checkpoint import safetensors_file, sharded
from nvme_ops.checkpoint.contents import contents, damaged
from nvme_ops.formats import safetensors_format, sharded_index
from tests.conftest import pattern
from tests.contract.faulty import flip
from tests.dcp.states import equal

load: Any = nvme_ops.load  # takes its options as dictionaries here
Tensors = dict[str, torch.Tensor]
INDEX = "model.safetensors.index.json"
STATE = {
    "embedding": pattern(3000).view(30, 100),
    "norm": torch.arange(100.0),
    "large": pattern(9000, 1).view(torch.int16),
    "none": torch.zeros(0, 3),
    "head": pattern(3000, 2).view(100, 30).t(),
}


@pytest.fixture(autouse=True)
def small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three of STATE."""
    monkeypatch.setattr(sharded, "MAX_SHARD_SIZE", 4000)


@pytest.fixture
def saved(folder: Path) -> Path:
    """STATE in three shards, by us."""
    nvme_ops.save(STATE, folder / INDEX)
    return folder


def changed(by: int = 1) -> Tensors:
    return {name: tensor + by for name, tensor in STATE.items()}


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def by_transformers(folder: Path, stem: str, ending: str, save: Callable[[Tensors, Path], object]) -> Path:
    """As save_pretrained writes."""
    places = {}
    for number, names in enumerate((["embedding", "norm"], ["large", "none", "head"])):
        shard = f"{stem}-{number + 1:05d}-of-00002{ending}"
        save({name: STATE[name].contiguous() for name in names}, folder / shard)
        places.update(dict.fromkeys(names, shard))
    index = folder / f"{stem}{ending}.index.json"
    index.write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": places}))
    return index


def by_torch(folder: Path) -> Path:
    return by_transformers(folder, "pytorch_model", ".bin", torch.save)


def by_safetensors(folder: Path) -> Path:
    return by_transformers(folder, "model", ".safetensors", their.save_file)


def by_us(folder: Path) -> Path:
    nvme_ops.save(STATE, folder / INDEX)
    return folder / INDEX


# What is written


def test_shards_and_an_index_as_transformers_writes_them(saved: Path) -> None:
    shards = [f"model-{number:05d}-of-00003.safetensors" for number in (1, 2, 3)]
    assert files(saved) == [*shards, INDEX]
    document = json.loads((saved / INDEX).read_text())
    assert len(document["metadata"].pop("nvme_ops.crc32c")) == 8
    assert len(document["metadata"].pop("nvme_ops.save")) == 16
    assert document["metadata"].pop("nvme_ops.shards").keys() == set(shards)
    places = {"embedding": shards[0], "norm": shards[0], "large": shards[1], "none": shards[2], "head": shards[2]}
    total = sum(tensor.nbytes for tensor in STATE.values())
    assert document == {"metadata": {"total_size": total}, "weight_map": places}
    merged: Tensors = {}
    for shard in shards:
        merged.update(their.load_file(saved / shard))
    assert equal(merged, STATE)


def test_other_names_sizes_and_files(folder: Path) -> None:
    nvme_ops.save(STATE, folder / "new" / "model", format="sharded", max_shard_size=1)
    assert len(files(folder / "new" / "model")) == 1 + len(STATE)
    sizes: list[tuple[int | str, int]] = [("8KiB", 3), (12_000, 2), ("15K", 2), ("20KB", 1)]
    for size, shards in sizes:
        nvme_ops.save(STATE, folder / str(size), max_shard_size=size)
        assert len(files(folder / str(size))) == 1 + shards
    nvme_ops.save(STATE, folder / "new" / "model" / "model.safetensors")
    nvme_ops.save(changed(), folder / "new" / "model", durable=False)
    assert "model.safetensors" not in files(folder / "new" / "model")  # which would be read first
    assert equal(load(folder / "new" / "model"), changed())
    one, two = folder / "ema.safetensors.index.json", folder / "ema-2.safetensors.index.json"
    for path, state in ((one, {}), (two, changed()), (one, STATE)):
        nvme_ops.save(state, path, metadata={"step": "7"})
        assert equal(load(path), state)
        assert contents(path).metadata["step"] == "7"
    assert equal(load(two), changed())


def test_a_version_in_a_name_is_no_suffix(folder: Path) -> None:
    for name in ("Qwen2.5-7B-Instruct", "Llama-3.1", "v1.0_final"):
        nvme_ops.save(STATE, folder / name)
        assert nvme_ops.load(folder / name).keys() == STATE.keys()
    with pytest.raises(ValueError, match="give format="):
        nvme_ops.save(STATE, folder / "model.v1")


def test_headers_of_shards_and_the_index_are_as_long_as_readers_accept(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (sharded, safetensors_file, safetensors_format):
        monkeypatch.setattr(module, "MAX_HEADER", 20_000)
    many = {f"é\n{number}" * 3: torch.full((1, 1, 1), number, dtype=torch.int16) for number in range(500)}
    nvme_ops.save(many, saved / "many")
    assert equal(load(saved / "many"), many)
    assert len(files(saved / "many")) > 3
    assert max(path.stat().st_size for path in (saved / "many").glob("*.safetensors")) < 20_000 + 1000
    monkeypatch.setattr(sharded_index, "MAX_INDEX", 2000)
    before = files(saved)
    with pytest.raises(ValueError, match=r"the index would be \d+ bytes long, and readers accept 2000"):
        nvme_ops.save({**STATE, **many}, saved / INDEX)
    assert files(saved) == before
    assert equal(load(saved / INDEX), STATE)


def test_what_cannot_be_saved(saved: Path) -> None:
    before = files(saved)
    with pytest.raises(ValueError, match="share memory"):
        nvme_ops.save({"a": STATE["head"], "b": STATE["head"][1:]}, saved / INDEX)
    with pytest.raises(ValueError, match="the name must end with"):
        nvme_ops.save(STATE, saved / "pytorch_model.bin.index.json")
    assert files(saved) == before


# Old and new


def test_a_save_takes_other_names_and_leaves_other_files(saved: Path) -> None:
    others = ["config.json", "model.safetensors", "model-00001-of-00003.safetensors.bak"]
    others.append("other-00001-of-00003.safetensors")
    for name in others:
        (saved / name).write_text("mine")
    for generation in (2, 3):
        nvme_ops.save(changed(generation), saved / INDEX)
        shards = [f"model-g{generation}-{number:05d}-of-00003.safetensors" for number in (1, 2, 3)]
        assert files(saved) == sorted([*shards, INDEX, *others])
        assert equal(load(saved / INDEX), changed(generation))
    (saved / INDEX).write_text("{")  # damaged, so nothing it may have named is written over
    nvme_ops.save(STATE, saved / INDEX)
    assert any(name.startswith("model-g4-") for name in files(saved))
    assert equal(load(saved / INDEX), STATE)
    assert all((saved / name).read_text() == "mine" for name in others)


def test_a_reader_whose_shards_a_save_replaces_gets_the_new_ones(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[str] = []
    read = safetensors_file.read

    def replaced_after_the_first(path: str, *others: Any) -> Tensors:
        reads.append(path)
        if len(reads) == 2:
            nvme_ops.save(changed(), saved / INDEX)
        return read(path, *others)

    monkeypatch.setattr(safetensors_file, "read", replaced_after_the_first)
    assert equal(load(saved), changed())
    assert len(reads) == 2 + 3


# What is loaded


@pytest.mark.parametrize("write", [by_torch, by_us])
def test_all_and_parts_of_it_and_into_what_exists(write: Callable[[Path], Path], folder: Path) -> None:
    index = write(folder)
    places = json.loads(index.read_text())["weight_map"]
    (folder / "snapshot").mkdir()
    for name in {index.name, *places.values()}:  # as in huggingface_hub's cache
        (folder / "snapshot" / name).symlink_to(folder / name)
    for path in (index, folder, folder / "snapshot"):
        for options in ({}, {"map_location": "cpu"}, {"mmap": True}):
            assert equal(load(path, **options), STATE)
    assert list(load(index)) == list(places)
    into = {name: torch.full_like(tensor, 7) for name, tensor in STATE.items()}
    with pytest.raises(ValueError, match=r"'head' is .* of shape"):
        load(index, into={**into, "head": torch.zeros(5)})
    assert all((tensor == 7).all() for tensor in into.values())  # though it is the last
    loaded = load(index, into=into)
    assert equal(into, STATE)
    assert all(loaded[name].data_ptr() == tensor.data_ptr() for name, tensor in into.items())
    item = next(item for item in contents(folder).items if item.name == "head")
    flip(Path(item.path), item.end - 1)
    assert damaged(contents(folder)) == ["head"]
    for wanted in ({}, {"keys": ["head"]}, {"keys": ["head"], "into": {"head": torch.zeros_like(STATE["head"])}}):
        with pytest.raises(ChecksumError, match="'head'"):
            load(folder, verify=True, **wanted)
    for shard in set(places.values()) - {places["norm"]}:
        (folder / shard).unlink()  # not opened
    part = {"norm": torch.zeros(100)}
    for loaded in (load(folder, keys="norm", verify=True), load(folder, keys=["norm"], into=part)):
        assert equal(loaded, {"norm": STATE["norm"]})


def test_a_folder_is_read_as_transformers_reads_it(folder: Path) -> None:
    by_torch(folder)
    assert equal(load(folder), STATE)
    for number, name in enumerate(("pytorch_model.bin", INDEX, "model.safetensors"), 1):
        nvme_ops.save(changed(number), folder / name)
        assert equal(load(folder, verify=True), changed(number))
        assert equal(load(folder, keys=["norm"]), {"norm": STATE["norm"] + number})
        assert len(contents(folder).items) >= len(STATE)


# Damage, and what is asked for in vain


INDEXES: list[tuple[str | bytes, str]] = [
    ("{", "not JSON"),
    (b"\xff\xfe", "not JSON"),
    ("[" * 100_000, "not JSON"),
    ("[]", "not a JSON object"),
    ("{}", "weight_map is missing"),
    ('{"weight_map": ["a"]}', "not an object"),
    ('{"weight_map": {"a": 3}}', "the file of 'a' is 3"),
    ('{"weight_map": {"a": ""}}', "is not in the folder"),
    ('{"weight_map": {"a": "x/../../b.safetensors"}}', "is not in the folder"),
    ('{"weight_map": {"a": "/etc/b.safetensors"}}', "is not in the folder"),
    ('{"weight_map": {"a": "b\\u0000.safetensors"}}', "is not in the folder"),
    ('{"weight_map": {"a": "config.json"}}', "is not in a known format"),
    ('{"weight_map": {"a": "gone.bin"}}', "'gone.bin', which is missing"),
    ('{"weight_map": {"a": "b.safetensors", "a": "c.safetensors"}}', "'a' appears twice"),
    ('{"weight_map": {}, "metadata": 3}', "metadata is not an object"),
]


def test_an_index_that_is_none(folder: Path) -> None:
    with pytest.raises(FormatError, match=r"none of model\.safetensors"):
        load(folder)
    with pytest.raises(FileNotFoundError):
        load(folder / INDEX)
    for content, words in INDEXES:
        (folder / INDEX).write_bytes(content if isinstance(content, bytes) else content.encode())
        for path in (folder, folder / INDEX):
            for read in (load, contents):
                with pytest.raises(FormatError, match=rf"index\.json: .*{words}"):
                    read(path)
    os.truncate(folder / INDEX, 10**12)
    with pytest.raises(FormatError, match="at most 1073741824 bytes"):
        load(folder)


def rewrite(index: Path, change: Callable[[Any], object]) -> None:
    document = json.loads(index.read_text())
    change(document)
    index.write_text(json.dumps(document))


@pytest.mark.parametrize("write", [by_torch, by_us])
def test_names_that_are_in_another_shard_or_in_none(write: Callable[[Path], Path], folder: Path) -> None:
    index = write(folder)
    rewrite(index, lambda document: document["weight_map"].update(ghost=document["weight_map"]["norm"]))
    for options in ({}, {"keys": ["ghost"]}):
        with pytest.raises(FormatError, match=r"index\.json: weight_map does not match its shard: .*'ghost'"):
            load(folder, **options)
    rewrite(index, lambda document: document["weight_map"].pop("ghost"))
    rewrite(index, lambda document: document["weight_map"].update(norm=document["weight_map"]["head"]))
    for read in (load, contents) if write is by_us else (load,):
        with pytest.raises(FormatError, match="'norm'"):
            read(folder)
    rewrite(index, lambda document: document["weight_map"].pop("norm"))
    assert "norm" not in load(folder)


def test_a_flipped_bit_anywhere_in_the_index_is_found(saved: Path) -> None:
    index = saved / INDEX
    content = index.read_bytes()
    load(saved, verify=True)
    for place in range(0, len(content), 13):
        index.write_bytes(content[:place] + bytes([content[place] ^ 1 << place % 8]) + content[place + 1 :])
        with suppress(FormatError):
            assert damaged(contents(saved))
        with pytest.raises((OSError, ValueError), match=str(saved)):
            load(saved, verify=True)
    index.write_bytes(content.replace(b'"total_size":1', b'"total_size":2'))
    assert contents(saved).damaged == ["index"]
    assert equal(load(saved), STATE)
    for gone in (["nvme_ops.crc32c"], ["nvme_ops.crc32c", "nvme_ops.save", "nvme_ops.shards"]):
        index.write_bytes(content)
        rewrite(index, lambda document: [document["metadata"].pop(name) for name in gone])  # noqa: B023
        with pytest.raises(ChecksumError, match="index"):
            load(saved, verify=True)
        assert contents(saved).damaged == ["index"]


def test_an_index_that_never_had_a_checksum_is_not_damaged(folder: Path) -> None:
    """Ours, and one of transformers' save_pretrained with safe_save_file = nvme_ops.save."""
    nvme_ops.save(STATE, folder / INDEX, checksums=False, metadata={"nvme_ops.crc32c": "another file's"})
    assert json.loads((folder / INDEX).read_text())["metadata"].keys() == {"total_size", "nvme_ops.save"}
    assert contents(folder).damaged == []
    by_transformers(folder, "model", ".safetensors", nvme_ops.save)
    assert equal(load(folder, verify=True), STATE)
    assert contents(folder).damaged == []
    by_safetensors(folder)
    with pytest.raises(ValueError, match="has no checksums"):
        load(folder, verify=True)


# With transformers itself


def test_with_transformers(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    transformers: Any = pytest.importorskip("transformers", reason="transformers is not installed")
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2, vocab_size=100
    )
    model = transformers.LlamaForCausalLM(config)
    config.save_pretrained(folder)
    for _ in range(2):  # the second time under other names
        nvme_ops.save(model.state_dict(), folder)
        assert equal(type(model).from_pretrained(folder).state_dict(), model.state_dict())
    model.save_pretrained(folder, max_shard_size="20KB")  # which clears up after us
    assert not [name for name in files(folder) if "-g2-" in name]
