"""``nvme-checkpoint`` across formats, and on DCP's folders."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

import nvme_ops
from nvme_ops.dcp import NvmeStorageWriter
from nvme_ops.inspection.cli import main
from nvme_ops.inspection.contents import contents

pytestmark = pytest.mark.filterwarnings("ignore:.*(torch.distributed is disabled|Detected an existing checkpoint)")

STATE = {"a": torch.arange(12.0).view(3, 4), "b": torch.ones(5).bfloat16(), "c": torch.arange(3)}
NAMES = ("model.safetensors", "model.pt", "folder")


@pytest.mark.parametrize("first", NAMES)
@pytest.mark.parametrize("second", NAMES)
def test_the_same_in_two_formats_is_the_same(
    tmp_path: Path, first: str, second: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in {first, second}:
        nvme_ops.save(STATE, tmp_path / name)
    assert main(["diff", str(tmp_path / first), str(tmp_path / second)]) == 0
    assert capsys.readouterr().out == "the same 3 tensors\n"


def test_a_difference_is_found_across_formats(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    nvme_ops.save(STATE, tmp_path / "model.safetensors")
    nvme_ops.save({**STATE, "a": STATE["a"] + 1, "b": STATE["b"].half(), "d": torch.ones(1)}, tmp_path / "model.pt")
    assert main(["diff", str(tmp_path / "model.safetensors"), str(tmp_path / "model.pt")]) == 1
    said = capsys.readouterr().out
    assert "values differ: a" in said
    assert "only in the second: d" in said
    assert "dtype or shape differs: b" in said


@pytest.mark.parametrize("name", NAMES)
def test_pickles_are_no_tensors(tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    nvme_ops.save(STATE, tmp_path / name)
    assert main(["info", str(tmp_path / name)]) == 0
    assert " 3 tensors, " in capsys.readouterr().out.splitlines()[0]


def test_a_dcp_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    state = {**STATE, "step": 7}
    for name in ("one", "other"):
        dcp.save(state, storage_writer=NvmeStorageWriter(tmp_path / name))
    assert main(["info", str(tmp_path / "one")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("dcp: 3 tensors, ")
    assert any(line.split()[:2] == ["b", "bfloat16"] for line in lines)
    assert main(["verify", str(tmp_path / "one")]) == 0
    assert main(["diff", str(tmp_path / "one"), str(tmp_path / "other")]) == 0
    item = next(each for each in contents(tmp_path / "one").items if each.name == "a")
    with open(item.path, "r+b") as file:
        file.seek(item.end - 1)
        byte = file.read(1)[0]
        file.seek(item.end - 1)
        file.write(bytes([byte ^ 1]))
    capsys.readouterr()
    assert main(["verify", str(tmp_path / "one")]) == 1
    assert "DAMAGED a" in capsys.readouterr().out
    assert main(["diff", str(tmp_path / "one"), str(tmp_path / "other")]) == 1
    nvme_ops.save(STATE, tmp_path / "model.pt")
    assert main(["diff", str(tmp_path / "other"), str(tmp_path / "model.pt")]) == 2
    assert "dcp_to_torch_save" in capsys.readouterr().err


def test_a_dcp_folder_without_checksums(tmp_path: Path) -> None:
    dcp.save(STATE, storage_writer=NvmeStorageWriter(tmp_path, checksums=False))
    assert main(["info", str(tmp_path)]) == 0
    assert main(["verify", str(tmp_path)]) == 1


class Harm:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, ("harm",)


HARM = {"call": Harm(), "function": os.path.join, "class": torch.nn.Linear, "dict": {"a": 1}}


@pytest.mark.parametrize("harm", HARM.values(), ids=HARM.keys())
def test_nothing_in_a_hostile_folder_is_run(
    tmp_path: Path, harm: object, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".metadata").write_bytes(pickle.dumps(harm))
    assert main(["info", str(tmp_path)]) == 2
    assert ".metadata" in capsys.readouterr().err
    assert not (tmp_path / "harm").exists()
