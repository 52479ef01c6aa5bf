"""What is flushed, in which order, of what ``nvme_ops.open``, ``save`` and ``convert`` write; and failed flushes."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
import torch

import nvme_ops
from nvme_ops._native import native
from nvme_ops.data.cli import main as nvme_data
from nvme_ops.storage import Session, TensorStore
from tests.conftest import MIB, pattern
from tests.storage.conftest import failing, got


def test_the_last_page_of_a_tensor_does_not_wait_in_the_page_cache(session: Session) -> None:
    with TensorStore(session) as store:
        for key, value in {"small": pattern(100), "large": pattern(MIB + 100), "odd": pattern(5000)[1:]}.items():
            store.put(key, value).result()
            assert torch.equal(got(store, key), value)
        fd = session.open(0, "slab")
        assert native().cached_pages(fd, 0, 0) in (0, None)
        os.close(fd)


def test_a_file_whose_sync_failed_stays_failed_until_it_is_written_anew(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = folder / "file"
    with nvme_ops.open(path, "w") as file:
        file.write(b"abc")
        file.flush()
        failing(monkeypatch, "fsync", str(path))
        with pytest.raises(OSError, match="fsync") as caught:
            file.sync()
        assert (caught.value.errno, caught.value.filename) == (errno.EIO, path)
        with pytest.raises(OSError, match="an earlier sync has failed"):
            file.sync()
        file.seek(0)
        file.truncate(0)
        file.write(b"abc")
        file.sync()
    assert path.read_bytes() == b"abc"


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is flushed from now on."""
    real, found = os.fsync, list[str]()

    def fsync(fd: int) -> None:
        found.append(os.readlink(f"/proc/self/fd/{fd}"))
        real(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    return found


def test_new_names_are_flushed(folder: Path, synced: list[str]) -> None:
    with nvme_ops.open(folder / "file", "w") as file:
        for _ in range(2):
            file.write(b"abc")
            file.sync()
    assert synced == [str(folder / "file"), str(folder), str(folder / "file")]
    (folder / "source").mkdir()
    (folder / "source" / "file").write_bytes(b"abc")
    assert nvme_data(["convert", str(folder / "source"), str(folder / "a" / "b")]) == 0
    nvme_ops.save({"x": torch.ones(5)}, folder / "c" / "d" / "model")
    assert {str(folder), str(folder / "a"), str(folder / "c"), str(folder / "c" / "d")} <= set(synced)


def test_what_is_written_over_is_no_name_s_any_more(
    folder: Path, monkeypatch: pytest.MonkeyPatch, synced: list[str]
) -> None:
    """The program that replaced it may have been killed before it had flushed the new name."""
    path = folder / "a.safetensors"
    for _ in range(3):
        synced.clear()
        nvme_ops.save({"x": torch.ones(5)}, path, recycle=True)
    assert synced == [str(folder), str(folder)]
    failing(monkeypatch, "fsync", str(folder))
    with pytest.raises(OSError, match="Input/output"):
        nvme_ops.save({"x": torch.ones(5)}, path, recycle=True)
    assert nvme_ops.load(path)["x"].tolist() == [1.0] * 5


def test_a_short_read_is_not_the_end_of_a_file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = pattern(20_000).numpy().tobytes()
    (folder / "file").write_bytes(content)
    real = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, parts, offset: real(fd, [parts[0][:3000]], offset))
    with nvme_ops.open(folder / "file") as file:
        assert file.read() == content
