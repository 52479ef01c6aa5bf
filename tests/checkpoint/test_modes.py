"""Who may open what a save writes: as many as the file that it replaces, from its first moment on."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

import nvme_ops
from tests.crashing_save import NEW, OLD


@pytest.fixture
def path(folder: Path) -> Path:
    """A file that holds OLD."""
    path = folder / "model.safetensors"
    nvme_ops.save(OLD, path)
    return path


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o440])
def test_what_replaces_a_file_is_never_open_to_more_users(
    path: Path, mode: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    path.chmod(mode)
    created: list[int] = []
    really_open = os.open

    def watched(name: str, flags: int, *arguments: int, **others: int) -> int:
        fd = really_open(name, flags, *arguments, **others)
        if flags & os.O_EXCL:
            created.append(stat.S_IMODE(os.fstat(fd).st_mode))
        return fd

    monkeypatch.setattr(os, "open", watched)
    before = os.umask(0)
    try:
        nvme_ops.save(NEW, path)
    finally:
        os.umask(before)
    assert created == [mode]
    assert stat.S_IMODE(path.stat().st_mode) == mode


@pytest.mark.parametrize("mode", [0o600, 0o664, 0o440])
def test_the_mode_is_kept(path: Path, mode: int) -> None:
    path.chmod(mode)
    nvme_ops.save(NEW, path)
    assert stat.S_IMODE(path.stat().st_mode) == mode


def test_a_new_file_has_the_mode_of_all_new_files(path: Path) -> None:
    before = os.umask(0o027)
    try:
        path.unlink()
        nvme_ops.save(NEW, path)
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
