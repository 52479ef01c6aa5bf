"""What is known about a device is kept in one small file, never in the way. `faults/promises.py` kills its writers."""

from __future__ import annotations

import json
import os
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nvme_ops import aio_handle
from nvme_ops.base.settings import Settings
from nvme_ops.filesystem.device import Identity, identify
from nvme_ops.io.tuning import store
from tests.conftest import in_child, round_trip

DEVICE = Identity(("nvme made up",), "ext4", "1234", "6.1", 8, "cpu", "io_uring")
FOUND = Settings(block_size=256 << 10, queue_depth=16, overlap_events=True, intra_op_parallelism=2)


def loaded(device: Identity = DEVICE) -> Settings | None:
    stored = store.load(device)
    return None if stored is None else store.settings_of(stored)


def test_what_is_kept_is_loaded_and_a_later_result_replaces_it(cache: Path) -> None:
    assert loaded() is None
    path = store.keep(DEVICE, FOUND, {"ratio": 1.2})
    assert loaded() == FOUND
    document = json.loads(path.read_text())
    assert document["tuned"] == {"aio": FOUND.as_json(), "ratio": 1.2}
    assert (document["format"], document["identity"]["file_system_id"]) == (store.FORMAT, "1234")
    store.keep(DEVICE, Settings(), {})
    assert loaded() == Settings()
    assert list(cache.iterdir()) == [path]
    for other in (replace(DEVICE, way="gpu"), replace(DEVICE, kernel="6.2"), replace(DEVICE, file_system_id="5")):
        assert loaded(other) is None
    path.unlink()
    os.mkfifo(path)
    assert loaded() is None, "a pipe is not waited for"
    with pytest.raises(OSError, match="is not a regular file"):
        store.keep(DEVICE, FOUND, {})


def test_without_the_variable_the_files_lie_below_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for value in ("", "relative/folder"):
        monkeypatch.setenv("XDG_CACHE_HOME", value)
        assert store.folder() == tmp_path / ".cache" / "nvme_ops" / "tune"
    monkeypatch.setenv("HOME", "relative")
    assert loaded() is None
    with pytest.raises(RuntimeError, match="HOME='relative' is not an absolute path"):
        store.keep(DEVICE, FOUND, {})


def test_a_damaged_file_or_one_of_another_format_is_ignored_with_a_warning() -> None:
    wrong: list[Any] = [[], {}, {"format": 1, "tuned": {}}, {"format": 2, "tuned": {"aio": []}}]
    for name in ("block_size", "single_submit"):
        wrong.append({"format": 2, "tuned": {"aio": {**FOUND.as_json(), name: 0}}})
    for text in (b"{", b"[" * 200_000, b"\xff\xfe\x00", *(json.dumps(document).encode() for document in wrong)):
        path = store.keep(DEVICE, FOUND, {})
        path.write_bytes(text)
        with pytest.warns(RuntimeWarning) as caught:
            assert loaded() is None
        assert f"{path} is ignored: " in str(caught[0].message)
    store.keep(DEVICE, FOUND, {})
    assert loaded() == FOUND


@pytest.mark.parametrize("place", ["file", "folder"])
def test_what_others_can_write_to_is_neither_read_nor_written(cache: Path, place: str) -> None:
    """Itself it opens nothing to others."""

    def with_any_umask() -> None:
        os.umask(0)
        store.keep(DEVICE, FOUND, {})
        assert loaded() == FOUND

    in_child(with_any_umask)
    path = store.path_of(DEVICE) if place == "file" else cache
    path.chmod(0o777)
    with pytest.warns(RuntimeWarning, match=rf"is ignored: others could change it: {path} can be written by"):
        assert loaded() is None
    if place == "file":  # it is replaced
        store.keep(DEVICE, FOUND, {})
        assert loaded() == FOUND
    else:
        with pytest.raises(PermissionError, match=rf"others could change .*chmod go-w '{path}'"):
            store.keep(DEVICE, FOUND, {})


# ``aio_handle.tuned``: the settings stored for a device are used, and stay


def settings_of(handle: aio_handle) -> Settings:
    return Settings(**{name: getattr(handle, f"get_{name}")() for name in Settings().as_json()})


def keep(path: Path, settings: Settings = FOUND, backend: str = "", way: str = "cpu") -> None:
    store.keep(identify(path, way, backend or aio_handle().backend), settings, {})


def test_stored_settings_are_used_else_the_defaults_and_arguments_stay(tmp_path: Path) -> None:
    assert repr(aio_handle.tuned(tmp_path)) == repr(aio_handle())
    keep(tmp_path)
    handle = aio_handle.tuned(tmp_path / "not there yet")
    assert settings_of(handle) == FOUND
    assert handle.get_alignment() == 2 * 512
    assert repr(pickle.loads(pickle.dumps(handle))) == repr(handle)
    round_trip(handle, tmp_path / "file")
    handle = aio_handle.tuned(tmp_path, queue_depth=7, overlap_events=False)
    assert settings_of(handle) == replace(FOUND, queue_depth=7, overlap_events=False)
    assert aio_handle.tuned(tmp_path, num_threads=3).get_intra_op_parallelism() == 3
    assert aio_handle.tuned(tmp_path, intra_op_parallelism=None).get_intra_op_parallelism() == 2
    keep(tmp_path, Settings(queue_depth=8))
    assert "intra_op_parallelism=None" in repr(aio_handle.tuned(tmp_path))  # one lane that was found is automatic
    assert "intra_op_parallelism=1" in repr(aio_handle.tuned(tmp_path, intra_op_parallelism=1))


def test_settings_belong_to_a_backend_and_a_way(tmp_path: Path) -> None:
    keep(tmp_path, backend="threads")
    keep(tmp_path, Settings(queue_depth=3), way="gpu")
    assert settings_of(aio_handle.tuned(tmp_path, backend="threads")) == FOUND
    assert aio_handle.tuned(tmp_path, way="gpu").get_queue_depth() == 3
    if aio_handle().backend != "threads":
        assert settings_of(aio_handle.tuned(tmp_path)) == Settings()
