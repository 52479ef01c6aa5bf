"""Where a save in the background puts its file, whatever the program does meanwhile."""

from __future__ import annotations

from pathlib import Path

import pytest

import nvme_ops
from tests.crashing_save import Gated, number_in, numbered


def test_a_relative_path_means_the_folder_of_the_call(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate, path = Gated(), folder / "models" / "model.safetensors"
    path.parent.mkdir()
    monkeypatch.chdir(path.parent)
    future = nvme_ops.save_async(numbered(1), path.name, handle=gate)
    monkeypatch.chdir(folder)
    gate.open()
    future.result()
    assert future.path == path.name
    assert number_in(path) == 1
    assert not (folder / path.name).exists()
