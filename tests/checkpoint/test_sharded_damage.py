"""Indexes and shards that do not fit together, and what is asked of them in vain."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import nvme_ops
from nvme_ops.checkpoint import sharded
from nvme_ops.errors import ChecksumError, FormatError
from nvme_ops.inspection.contents import contents, damaged
from tests.checkpoint.sharded_files import INDEX, SHARD, STATE, assert_same, by_torch, by_us

load: Any = nvme_ops.load  # takes its options as dictionaries here


@pytest.fixture
def saved(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """STATE in three shards."""
    monkeypatch.setattr(sharded, "MAX_SHARD_SIZE", SHARD)
    by_us(folder)
    return folder


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"keys": ["norm", "gone"]}, KeyError, "has no tensor 'gone'"),
        ({"into": {"norm": torch.zeros(100)}}, KeyError, "'embedding' has no counterpart"),
        ({"into": {**STATE, "more": torch.zeros(1)}}, KeyError, "has no tensor 'more'"),
        ({"into": {"norm": torch.zeros(99)}, "keys": ["norm"]}, ValueError, "99"),
        ({"map_location": {"cpu": "cpu"}}, TypeError, "map_location"),
    ],
)
def test_what_is_asked_for_in_vain(options: Any, error: Any, words: str, saved: Path) -> None:
    with pytest.raises(error, match=words):
        load(saved, **options)


def rewrite(folder: Path, **changes: Any) -> None:
    document = json.loads((folder / INDEX).read_text())
    (folder / INDEX).write_text(json.dumps({**document, **changes}))


INDEXES: dict[str, tuple[str | bytes, str]] = {
    "not JSON": ("{", "not JSON"),
    "not text": (b"\xff\xfe", "not JSON"),
    "too deep": ("[" * 100_000, "not JSON"),
    "not an object": ("[]", "not a JSON object"),
    "empty": ("", "not JSON"),
    "no map": ("{}", "weight_map is missing"),
    "a map that is none": ('{"weight_map": ["a"]}', "not an object"),
    "a file that is no name": ('{"weight_map": {"a": 3}}', "the file of 'a' is 3"),
    "a file that is none": ('{"weight_map": {"a": ""}}', "does not lie in the folder"),
    "a file elsewhere": ('{"weight_map": {"a": "../b.safetensors"}}', "does not lie in the folder"),
    "a file in a folder elsewhere": ('{"weight_map": {"a": "x/../../b.safetensors"}}', "does not lie in the folder"),
    "a file at the root": ('{"weight_map": {"a": "/etc/b.safetensors"}}', "does not lie in the folder"),
    "a file with a null": ('{"weight_map": {"a": "b\\u0000.safetensors"}}', "does not lie in the folder"),
    "a file of another kind": ('{"weight_map": {"a": "config.json"}}', "no format that is known"),
    "a missing file": ('{"weight_map": {"a": "gone.safetensors"}}', "'gone.safetensors', which is missing"),
    "a missing pickle": ('{"weight_map": {"a": "gone.bin"}}', "'gone.bin', which is missing"),
    "a name twice": ('{"weight_map": {"a": "b.safetensors", "a": "c.safetensors"}}', "'a' comes twice"),
    "metadata that are none": ('{"weight_map": {}, "metadata": 3}', "metadata is not an object"),
}


@pytest.mark.parametrize("name", INDEXES)
def test_an_index_that_is_none(name: str, folder: Path) -> None:
    content, words = INDEXES[name]
    (folder / INDEX).write_bytes(content if isinstance(content, bytes) else content.encode())
    for path in (folder, folder / INDEX):
        with pytest.raises(FormatError, match=rf"index\.json: .*{words}"):
            load(path)
        with pytest.raises(FormatError, match=rf"index\.json: .*{words}"):
            contents(path)


def test_an_index_without_end(folder: Path) -> None:
    with (folder / INDEX).open("wb") as file:
        file.truncate(10**12)
    with pytest.raises(FormatError, match="at most 100000000 bytes"):
        load(folder)


@pytest.mark.parametrize("write", [by_torch, by_us])
def test_a_name_that_its_shard_lacks(write: Callable[[Path], Path], folder: Path) -> None:
    index = write(folder)
    document = json.loads(index.read_text())
    document["weight_map"]["ghost"] = document["weight_map"]["norm"]
    index.write_text(json.dumps(document))
    for options in ({}, {"keys": ["ghost"]}):
        with pytest.raises(FormatError, match=r"index\.json: weight_map does not fit its shard: .*'ghost'"):
            load(folder, **options)


def test_a_name_in_another_shard(saved: Path) -> None:
    places = json.loads((saved / INDEX).read_text())["weight_map"]
    rewrite(saved, weight_map={**places, "norm": places["head"]})
    with pytest.raises(FormatError, match="'norm'"):
        load(saved)
    with pytest.raises(FormatError, match="'norm'"):
        contents(saved)


def test_tensors_that_the_index_does_not_name_are_left_out(saved: Path) -> None:
    places = json.loads((saved / INDEX).read_text())["weight_map"]
    del places["norm"]
    rewrite(saved, weight_map=places)
    assert "norm" not in load(saved)


def test_a_damaged_shard_is_the_one_named(saved: Path) -> None:
    (saved / "model-00002-of-00003.safetensors").write_bytes(b"\1")
    with pytest.raises(FormatError, match="model-00002-of-00003"):
        load(saved)


def test_a_folder_without_a_model(folder: Path) -> None:
    with pytest.raises(FormatError, match=r"none of model\.safetensors"):
        load(folder)


def test_a_missing_index(folder: Path) -> None:
    with pytest.raises(FileNotFoundError):
        load(folder / INDEX)


def finds_damage(folder: Path) -> bool:
    try:
        return bool(damaged(contents(folder)))
    except FormatError:
        return True


def test_a_flipped_bit_anywhere_in_the_index_is_found(saved: Path) -> None:
    index = saved / INDEX
    content = index.read_bytes()
    nvme_ops.load(saved, verify=True)
    for place in range(len(content)):
        index.write_bytes(content[:place] + bytes([content[place] ^ 1 << place % 8]) + content[place + 1 :])
        assert finds_damage(saved)
        with pytest.raises((OSError, ValueError)) as caught:
            load(saved, verify=True)
        assert str(saved) in str(caught.value)


def test_an_index_that_was_changed_is_named(saved: Path) -> None:
    index = saved / INDEX
    index.write_text(index.read_text().replace('"total_size":1', '"total_size":2'))
    assert contents(saved).damaged == ["index"]
    with pytest.raises(ChecksumError) as caught:
        load(saved, verify=True)
    assert caught.value.tensors == ["index"]
    assert_same(load(saved), STATE)


def test_an_index_without_a_checksum(folder: Path) -> None:
    nvme_ops.save(STATE, folder / INDEX, checksums=False, metadata={"nvme_ops.crc32c": "another file's"})
    assert json.loads((folder / INDEX).read_text())["metadata"].keys() == {"total_size", "nvme_ops.save"}
    assert contents(folder).damaged == []


def test_an_index_that_another_program_wrote_is_not_damaged(folder: Path) -> None:
    """As after transformers' save_pretrained(max_shard_size=...) with safe_save_file = nvme_ops.save."""
    shard = "model-00001-of-00001.safetensors"
    nvme_ops.save(STATE, folder / shard)
    index = {"metadata": {"total_size": 1}, "weight_map": dict.fromkeys(STATE, shard)}
    (folder / INDEX).write_text(json.dumps(index))
    assert_same(load(folder, verify=True), STATE)
    assert contents(folder).damaged == []


@pytest.mark.parametrize("gone", [["nvme_ops.crc32c"], ["nvme_ops.crc32c", "nvme_ops.save", "nvme_ops.shards"]])
def test_an_index_of_ours_that_lost_its_checksum_is_damaged(folder: Path, gone: list[str]) -> None:
    nvme_ops.save(STATE, folder / INDEX)
    document = json.loads((folder / INDEX).read_text())
    for name in gone:
        del document["metadata"][name]
    (folder / INDEX).write_text(json.dumps(document))
    with pytest.raises(ChecksumError, match="index"):
        load(folder, verify=True)
    assert contents(folder).damaged == ["index"]


@pytest.mark.parametrize("write", [by_torch, by_us])
def test_nothing_is_filled_when_a_later_shard_does_not_fit(
    write: Callable[[Path], Path], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sharded, "MAX_SHARD_SIZE", SHARD)
    index = write(folder)
    into = {name: torch.full_like(tensor, 7) for name, tensor in STATE.items()}
    into["head"] = torch.zeros(5)
    with pytest.raises(ValueError, match=r"'head' is .* of shape"):
        load(index, into=into)
    assert all((tensor == 7).all() for name, tensor in into.items() if name != "head")
