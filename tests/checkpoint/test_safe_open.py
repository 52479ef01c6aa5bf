"""``safe_open`` beside safetensors' own: the same answers, and no more is read than asked for."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors
import safetensors.torch
import torch

import nvme_ops
from nvme_ops.integrations import transformers as hook
from nvme_ops.integrations.safetensors import safe_open
from tests.conftest import MIB, run_python, watched
from tests.dcp.states import equal

STATE = {
    "matrix": torch.arange(24.0).view(4, 6),
    "half": torch.arange(24).view(2, 3, 4).bfloat16(),
    "scalar": torch.tensor(7),
    "none": torch.zeros(0, 3),
}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    safetensors.torch.save_file(STATE, tmp_path / "model.safetensors", metadata={"format": "pt", "a": "b"})
    return tmp_path / "model.safetensors"


def test_it_answers_as_safetensors_does(path: Path) -> None:
    with safe_open(path, framework="pt") as ours, safetensors.safe_open(path, "pt") as theirs:
        assert ours.keys() == list(theirs.keys())
        assert sorted(ours.offset_keys()) == sorted(theirs.offset_keys())
        assert ours.metadata() == theirs.metadata()
        assert equal(ours.get_tensors(), STATE)
        for name in STATE:
            assert ours.get_slice(name).get_shape() == theirs.get_slice(name).get_shape()
            assert ours.get_slice(name).get_dtype() == theirs.get_slice(name).get_dtype()
    with safe_open(path, framework="np") as ours, safetensors.safe_open(path, "np") as theirs:
        for name in ("matrix", "scalar", "none"):
            assert (ours.get_tensor(name) == theirs.get_tensor(name)).all()
            assert ours.get_tensor(name).dtype == theirs.get_tensor(name).dtype
        assert (ours.get_slice("matrix")[1:3, 2] == theirs.get_slice("matrix")[1:3, 2]).all()
        with pytest.raises(TypeError, match="BFloat16"):
            ours.get_tensor("half")


INDICES: list[Any] = [
    ..., slice(None), slice(1, 3), slice(-2, None), slice(3, 1), slice(0, 100), slice(None, None, 2), 0, -1, 3,
    (slice(1, 3), slice(2, 4)), (slice(None), slice(2, 4)), (2, slice(1, 3)), (slice(1, 3), ...), (..., 1),
    (slice(None), [0, 2]), None, (slice(1, 2), 5), (),
]  # fmt: skip


def test_parts_are_those_of_the_tensor(path: Path) -> None:
    with safe_open(path) as file:
        for index in INDICES:
            part = file.get_slice("matrix")[index]
            assert torch.equal(part, STATE["matrix"][index]), index
            assert part.is_contiguous()


def test_what_is_not_there(path: Path, tmp_path: Path) -> None:
    with safe_open(path) as file:
        for index in (4, -5):
            with pytest.raises(IndexError, match="out of bounds"):
                file.get_slice("matrix")[index]
        for get in (file.get_tensor, file.get_slice):
            with pytest.raises(KeyError, match="nosuch"):
                get("nosuch")
        part = file.get_slice("matrix")
    with pytest.raises(ValueError, match="closed"):
        part[0]
    with pytest.raises(FileNotFoundError):
        safe_open(tmp_path / "nosuch")
    with pytest.raises(ValueError, match="framework must be 'pt' or 'np', not 'jax'"):
        safe_open(path, framework="jax")
    path.write_bytes(b"nonsense")
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(nvme_ops.FormatError):
        safe_open(path)
    assert len(os.listdir("/proc/self/fd")) == before


def test_one_that_is_open_when_python_ends_says_nothing(path: Path) -> None:
    program = "import sys\nfrom nvme_ops.integrations.safetensors import safe_open\nsys.kept = safe_open(sys.argv[1])"
    assert run_python(program, path, fresh=True).stderr == ""


def test_no_more_is_read_than_the_rows_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    nvme_ops.save({"a": torch.arange(4.0 * MIB).view(4096, 1024)}, path, metadata={"a": "b"})
    handle = nvme_ops.aio_handle()
    with safe_open(path, handle=handle) as file:
        assert file.metadata() == {"a": "b", "format": "pt"}  # not what is kept for verify
        before = handle.statistics().read_bytes
        rows = file.get_slice("a")[1000:1100]
        assert rows[0, 0] == 1000 * 1024
        assert handle.statistics().read_bytes - before == 100 * 4096
        assert file.get_slice("a")[1000:1100, :10].untyped_storage().nbytes() <= 100 * 10 * 4 + 64


# transformers


@pytest.fixture
def installed() -> Iterator[Any]:
    module = pytest.importorskip("transformers", reason="transformers is not installed")
    hook.install()
    yield module
    hook.uninstall()


def test_transformers_loads_and_saves_through_it(
    installed: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = watched(monkeypatch, safe_open, "__init__", lambda _, name, *__, **___: os.path.basename(name))
    config = installed.GPT2Config(n_layer=2, n_embd=32, n_head=2, vocab_size=100, n_positions=32)
    model = installed.GPT2LMHeadModel(config)
    for size in ("50GB", "40KB"):
        model.save_pretrained(tmp_path / size, max_shard_size=size)
        loaded = installed.GPT2LMHeadModel.from_pretrained(tmp_path / size)
        assert equal(loaded.state_dict(), model.state_dict())
        shards = sorted(shard.name for shard in (tmp_path / size).glob("*.safetensors"))
        assert sorted(set(opened)) == shards
        assert all(b"nvme_ops.crc32c" in (tmp_path / size / name).read_bytes()[:8192] for name in shards)
        into = installed.GPT2LMHeadModel(config)
        nvme_ops.load(tmp_path / size, into=into, verify=True)  # whose head is tied
        assert equal(into.state_dict(), model.state_dict())
        opened.clear()


def test_it_is_taken_away_again_and_a_version_that_is_not_known_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    module = pytest.importorskip("transformers.modeling_utils", reason="transformers is not installed")
    before = module.safe_open, module.safe_save_file
    for act in (hook.install, hook.install, hook.uninstall, hook.uninstall):
        act()
    assert (module.safe_open, module.safe_save_file) == before
    monkeypatch.delattr(module, "safe_save_file")
    with pytest.raises(RuntimeError, match="safe_save_file"):
        hook.install()
    assert module.safe_open is before[0]
