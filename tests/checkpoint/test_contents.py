"""``nvme-checkpoint`` info, verify and diff: across formats, and on DCP's folders."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata

import nvme_ops
from nvme_ops.dcp import NvmeStorageWriter
from nvme_ops.inspection.cli import main
from nvme_ops.inspection.contents import contents
from tests.contract.faulty import flip

pytestmark = pytest.mark.filterwarnings("ignore:.*(torch.distributed is disabled|Detected an existing checkpoint)")

STATE = {"a": torch.arange(12.0).view(3, 4), "b": torch.ones(5).bfloat16(), "c": torch.arange(3)}
OTHER = {**STATE, "a": STATE["a"] + 1, "b": STATE["b"].half(), "d": torch.ones(1)}
NAMES = ("model.safetensors", "model.pt", "folder")
Capture = pytest.CaptureFixture[str]


@pytest.mark.parametrize("first", NAMES)
def test_across_formats(tmp_path: Path, first: str, capsys: Capture) -> None:
    nvme_ops.save(STATE, tmp_path / first)
    assert main(["info", str(tmp_path / first)]) == 0
    assert " 3 tensors, " in capsys.readouterr().out.splitlines()[0]  # a pickle is none
    for second in NAMES:
        nvme_ops.save(STATE, tmp_path / f"same-{second}")
        nvme_ops.save(OTHER, tmp_path / f"other-{second}")
        assert main(["diff", str(tmp_path / first), str(tmp_path / f"same-{second}")]) == 0
        assert capsys.readouterr().out == "the same 3 tensors\n"
        assert main(["diff", str(tmp_path / first), str(tmp_path / f"other-{second}")]) == 1
        said = capsys.readouterr().out
        for words in ("values differ: a", "only in the second: d", "dtype or shape differs: b"):
            assert words in said


def test_verify_takes_several(tmp_path: Path, capsys: Capture) -> None:
    paths = [tmp_path / f"{number}.safetensors" for number in range(2)]
    for path in paths:
        nvme_ops.save(STATE, path)
    assert main(["verify", *map(str, paths)]) == 0
    assert [line.split(": ")[0] for line in capsys.readouterr().out.splitlines()] == [str(path) for path in paths]
    flip(paths[1], paths[1].stat().st_size - 1)
    assert main(["verify", *map(str, paths)]) == 1


def test_a_dcp_folder(tmp_path: Path, capsys: Capture) -> None:
    one, other, bare = (tmp_path / name for name in ("one", "other", "bare"))
    for path in (one, other, bare):
        dcp.save({**STATE, "step": 7}, storage_writer=NvmeStorageWriter(path, checksums=path != bare))
    assert main(["info", str(one)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("dcp: 3 tensors, ")
    assert any(line.split()[:2] == ["b", "bfloat16"] for line in lines)
    assert [main(["verify", str(path)]) for path in (one, bare)] == [0, 1]
    assert main(["diff", str(one), str(other)]) == 0
    item = next(each for each in contents(one).items if each.name == "a")
    flip(Path(item.path), item.end - 1)
    assert main(["verify", str(one)]) == 1
    assert "DAMAGED a" in capsys.readouterr().out
    assert main(["diff", str(one), str(other)]) == 1
    nvme_ops.save(STATE, tmp_path / "model.pt")
    assert main(["diff", str(other), str(tmp_path / "model.pt")]) == 2
    assert "dcp_to_torch_save" in capsys.readouterr().err


class Harm:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, ("harm",)


class Gets:
    """Takes something from what may be named."""

    def __reduce__(self) -> tuple[object, tuple[type, str]]:
        return getattr, (Metadata, "__init__")


@pytest.mark.parametrize("harm", [Harm(), Gets(), os.path.join, torch.nn.Linear, {"a": 1}])
def test_nothing_in_a_hostile_folder_is_run(
    tmp_path: Path, harm: object, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".metadata").write_bytes(pickle.dumps(harm))
    assert main(["info", str(tmp_path)]) == 2
    assert ".metadata" in capsys.readouterr().err
    assert not (tmp_path / "harm").exists()
