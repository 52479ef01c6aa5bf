"""What is found for a device is kept in one small file: whole or not at all, and never in the way."""

from __future__ import annotations

import errno
import json
import os
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nvme_ops.settings import Settings
from nvme_ops.storage.identity import Identity
from nvme_ops.tune import store
from tests.conftest import NOBODY, give_up_root, in_child, in_threads, open_to_all, run_python

DEVICE = Identity(("nvme made up",), "ext4", "1234", "6.1", 8, "cpu", "io_uring")
FOUND = Settings(block_size=4 << 20, queue_depth=16, overlap_events=True, intra_op_parallelism=2)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "nvme_ops" / "tune"


def test_what_is_saved_is_loaded(cache: Path) -> None:
    assert store.load(DEVICE) is None
    path = store.save(DEVICE, FOUND, {"ratio": 1.2})
    assert store.load(DEVICE) == FOUND
    assert path.parent == cache
    document = json.loads(path.read_text())
    assert document["aio"] == FOUND.as_json()
    assert (document["format"], document["ratio"]) == (store.FORMAT, 1.2)
    assert document["identity"]["file_system_id"] == "1234"


def test_each_device_and_way_has_a_file_of_its_own() -> None:
    store.save(DEVICE, FOUND, {})
    for other in (replace(DEVICE, way="gpu"), replace(DEVICE, kernel="6.2"), replace(DEVICE, file_system_id="5")):
        assert store.load(other) is None
        assert store.path_of(other) != store.path_of(DEVICE)


THOROUGH: dict[str, Any] = {
    "bytes_per_second": {"best": {"read": 2e9, "write": 1e9}},
    "from_page_cache": 0.0,
    "complete": True,
    "seconds": 45.0,
}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"seconds": 1.0}, "this run took 1 s, that one 45 s"),
        ({"complete": False}, "the final of this run was cut short"),
        ({"from_page_cache": 1.0}, "this run read from the page cache"),
        ({"bytes_per_second": {"best": {"read": 3e9}}}, "this run left out writes"),
    ],
)
def test_a_worse_founded_result_is_no_reason_to_give_up_a_better_one(change: dict[str, Any], words: str) -> None:
    worse = {**THOROUGH, **change}
    assert words in store.why_keep(THOROUGH, worse)
    assert store.why_keep(worse, THOROUGH) == ""
    assert store.why_keep(worse, worse) == ""


def test_anything_is_better_than_what_says_nothing_of_itself() -> None:
    assert store.why_keep({"in_background": True}, {**THOROUGH, "seconds": 1.0}) == ""


def test_a_run_of_today_replaces_one_of_the_time_when_all_took_45_seconds() -> None:
    assert store.why_keep(THOROUGH, {**THOROUGH, "seconds": 16.0}) == ""


def test_a_later_result_replaces_an_earlier_one(cache: Path) -> None:
    store.save(DEVICE, FOUND, {})
    store.save(DEVICE, Settings(), {})
    assert store.load(DEVICE) == Settings()
    assert len(list(cache.iterdir())) == 1


def test_what_a_killed_writer_left_is_removed_by_the_next(cache: Path) -> None:
    run_python(
        """
        import os, signal
        from tests.tune.test_store import DEVICE, FOUND, store
        os.fdatasync = lambda _: os.kill(os.getpid(), signal.SIGKILL)
        store.save(DEVICE, FOUND, {})
        """,
        check=False,
        XDG_CACHE_HOME=str(cache.parent.parent),
    )
    assert len(list(cache.iterdir())) == 1
    assert store.load(DEVICE) is None
    path = store.save(DEVICE, FOUND, {})
    assert list(cache.iterdir()) == [path]


def test_a_file_is_nobody_elses_whatever_the_umask() -> None:
    def body() -> None:
        os.umask(0)
        store.save(DEVICE, FOUND, {})
        assert store.load(DEVICE) == FOUND

    in_child(body)


def test_without_the_variable_the_files_lie_below_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for value in ("", "relative/folder"):
        monkeypatch.setenv("XDG_CACHE_HOME", value)
        assert store.folder() == tmp_path / ".cache" / "nvme_ops" / "tune"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "Expecting value"),
        ("{", "Expecting"),
        ("[]", "list"),
        ("{}", "'format'"),
        ('{"format": 0, "aio": {}}', "format 0 instead of 1"),
        ('{"format": 2, "aio": {}}', "format 2 instead of 1"),
        ('{"format": 1}', "'aio'"),
        ('{"format": 1, "aio": []}', "items"),
        ('{"format": 1, "aio": {"block_size": 1048576}}', "its settings are"),
        (json.dumps({"format": 1, "aio": {**FOUND.as_json(), "queue_depth": 0}}), "its settings are"),
        (json.dumps({"format": 1, "aio": {**FOUND.as_json(), "queue_depth": "8"}}), "its settings are"),
        (json.dumps({"format": 1, "aio": {**FOUND.as_json(), "queue_depth": True}}), "its settings are"),
        (json.dumps({"format": 1, "aio": {**FOUND.as_json(), "single_submit": 1}}), "its settings are"),
    ],
)
def test_a_damaged_file_or_one_of_another_format_is_ignored_with_a_warning(text: str, reason: str) -> None:
    path = store.save(DEVICE, FOUND, {})
    path.write_text(text)
    with pytest.warns(RuntimeWarning) as caught:
        assert store.load(DEVICE) is None
    assert reason in str(caught[0].message)
    assert str(path) in str(caught[0].message)
    store.save(DEVICE, FOUND, {})
    assert store.load(DEVICE) == FOUND


def test_bytes_that_are_no_text_are_ignored_with_a_warning() -> None:
    store.save(DEVICE, FOUND, {}).write_bytes(b"\xff\xfe\x00")
    with pytest.warns(RuntimeWarning, match="is ignored"):
        assert store.load(DEVICE) is None


def test_a_write_that_fails_leaves_what_was_there(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store.save(DEVICE, FOUND, {})

    def fail(*_: object) -> None:
        raise OSError(errno.EIO, "made up")

    monkeypatch.setattr(os, "rename", fail)
    with pytest.raises(OSError, match="made up"):
        store.save(DEVICE, Settings(), {})
    assert store.load(DEVICE) == FOUND
    assert len(list(cache.iterdir())) == 1


def test_a_folder_that_cannot_be_written_is_an_error_of_saving_only(tmp_path: Path) -> None:
    open_to_all(tmp_path)
    tmp_path.chmod(0o755)

    def body() -> None:
        give_up_root()
        if os.access(tmp_path, os.W_OK):
            os._exit(0)
        assert store.load(DEVICE) is None
        with pytest.raises(PermissionError):
            store.save(DEVICE, FOUND, {})

    in_child(body)


def test_a_relative_home_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "relative")
    assert store.load(DEVICE) is None
    with pytest.raises(RuntimeError, match="HOME='relative' is not an absolute path"):
        store.save(DEVICE, FOUND, {})


@pytest.mark.parametrize("place", ["file", "folder", "above"])
def test_what_others_can_write_to_is_neither_read_nor_written(cache: Path, tmp_path: Path, place: str) -> None:
    """Of mode 0777, and of another user where the test can make it so."""
    path = {"file": store.save(DEVICE, FOUND, {}), "folder": cache, "above": cache.parent}[place]
    path.chmod(0o777)
    with pytest.warns(RuntimeWarning, match=rf"is ignored, because others could change it: {path} can be written by"):
        assert store.load(DEVICE) is None
    if place == "file":  # it is replaced
        store.save(DEVICE, FOUND, {})
        assert store.load(DEVICE) == FOUND
    else:
        with pytest.raises(PermissionError, match=rf"others could change .*chmod go-w '{path}'"):
            store.save(DEVICE, FOUND, {})
    if os.geteuid() == 0:
        path.chmod(0o755)
        os.chown(path, NOBODY, 0)
        with pytest.warns(RuntimeWarning, match="belongs to the user nobody"):
            assert store.load(DEVICE) is None


def test_writers_at_once_leave_one_whole_file(cache: Path) -> None:
    choices = [replace(FOUND, queue_depth=depth) for depth in range(1, 9)]

    def write(number: int) -> None:
        for _ in range(10):
            store.save(DEVICE, choices[number], {})
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                assert store.load(DEVICE) in choices

    in_threads(write, len(choices))
    assert store.load(DEVICE) in choices
    assert len(list(cache.iterdir())) == 1
