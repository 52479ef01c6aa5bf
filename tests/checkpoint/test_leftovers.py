"""Files that are none: what killed saves leave, and targets that are devices or pipes."""

from __future__ import annotations

import json
import os
import signal
import stat
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import nvme_ops
from nvme_ops.inspection.cli import main
from nvme_ops.storage import locks
from tests.crashing_save import Gated, numbered


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


def test_the_next_save_in_the_folder_removes_what_a_killed_one_left(tmp_path: Path) -> None:
    killed(lambda gate: nvme_ops.save(numbered(1), tmp_path / "one.safetensors", handle=gate))
    assert len(names(tmp_path)) == 1
    nvme_ops.save(numbered(1), tmp_path / "other.pt")
    assert names(tmp_path) == {"other.pt"}


def test_clean_lists_and_removes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    nvme_ops.save(numbered(1), tmp_path)
    nvme_ops.save(numbered(2), tmp_path)
    kept = names(tmp_path)
    old = tmp_path / "old"
    nvme_ops.save(numbered(3), old)
    os.rename(old / "model-00001-of-00001.safetensors", tmp_path / "model-g7-00001-of-00001.safetensors")
    os.unlink(old / "model.safetensors.index.json")
    old.rmdir()
    killed(lambda gate: nvme_ops.save(numbered(1), tmp_path, handle=gate))
    assert main(["clean", str(tmp_path), "--dry-run"]) == 0
    said = capsys.readouterr().out
    assert "model-g7-00001-of-00001.safetensors" in said
    assert ".nvme_ops-tmp" in said
    assert "2 files" in said  # the lock of the killed one has gone already
    assert main(["clean", str(tmp_path), "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["files"]) == 2
    assert names(tmp_path) == kept
    assert main(["clean", str(tmp_path)]) == 0
    assert "nothing was left here" in capsys.readouterr().out
    assert nvme_ops.load(tmp_path, verify=True)["a"][0] == 2


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


def test_verify_takes_several(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = [str(tmp_path / f"{number}.safetensors") for number in range(2)]
    for path in paths:
        nvme_ops.save(numbered(1), path)
    assert main(["verify", *paths]) == 0
    assert [line.split(": ")[0] for line in capsys.readouterr().out.splitlines()] == paths
    with open(paths[1], "r+b") as file:
        file.seek(-1, 2)
        file.write(b"x")
    assert main(["verify", *paths]) == 1


# Devices and pipes


def test_a_device_is_written_to(tmp_path: Path) -> None:
    nvme_ops.save(numbered(1), "/dev/null", format="safetensors")
    nvme_ops.save(numbered(1), "/dev/null", format="pt")
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)
    with pytest.raises(OSError, match="No space left"):
        nvme_ops.save(numbered(1), "/dev/full", format="safetensors")


@pytest.mark.parametrize("format", ["safetensors", "pt"])
def test_a_pipe_is_written_to(tmp_path: Path, format: str) -> None:
    pipe, found = tmp_path / "pipe", []
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: found.append(pipe.read_bytes()))
    reader.start()
    nvme_ops.save(numbered(1), pipe, format=format)  # type: ignore[arg-type]
    reader.join()
    assert stat.S_ISFIFO(pipe.stat().st_mode)
    (tmp_path / "copy").write_bytes(found[0])
    assert nvme_ops.load(tmp_path / "copy", format=format, verify=True)["a"][0] == 1  # type: ignore[arg-type]


def test_a_link_to_an_index_stays_one(tmp_path: Path) -> None:
    real, link = tmp_path / "real", tmp_path / "link"
    real.mkdir()
    link.mkdir()
    (link / "latest.safetensors.index.json").symlink_to(real / "model.safetensors.index.json")
    nvme_ops.save(numbered(1), link / "latest.safetensors.index.json")
    assert names(link) == {"latest.safetensors.index.json"}
    assert names(real) == {"model.safetensors.index.json", "model-00001-of-00001.safetensors"}


# What can be filled


@pytest.mark.parametrize("name", ["model.safetensors", "model.pt", "folder"])
@pytest.mark.parametrize("wrong", [torch.zeros(1).expand(3), torch.empty(3, device="meta")], ids=["expanded", "meta"])
def test_nothing_is_filled_before_all_is_known_to_fit(tmp_path: Path, name: str, wrong: torch.Tensor) -> None:
    nvme_ops.save({"a": torch.ones(3), "b": torch.ones(3)}, tmp_path / name)
    into = {"a": torch.zeros(3), "b": wrong}
    with pytest.raises(ValueError, match="'b'"):
        nvme_ops.load(tmp_path / name, into=into)
    assert into["a"].sum() == 0


def test_tensors_on_meta(tmp_path: Path) -> None:
    for name in ("model.safetensors", "folder", "model.pt"):
        nvme_ops.save({"a": torch.ones(3, 4).half(), "b": torch.zeros(0)}, tmp_path / name)
        found = nvme_ops.load(tmp_path / name, map_location="meta", verify=True)
        assert {name: (each.device.type, each.dtype, tuple(each.shape)) for name, each in found.items()} == {
            "a": ("meta", torch.float16, (3, 4)),
            "b": ("meta", torch.float32, (0,)),
        }
