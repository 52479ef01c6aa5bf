"""``tuned_handle``: the settings stored for a device are used, and stay."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from nvme_ops import aio_handle
from nvme_ops.settings import Settings
from nvme_ops.storage.identity import identify
from nvme_ops.tune import store as kept
from nvme_ops.tune.handle import stored_settings, tuned_handle
from tests.conftest import round_trip

FOUND = Settings(block_size=256 << 10, queue_depth=16, overlap_events=True, intra_op_parallelism=2)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def settings_of(handle: aio_handle) -> Settings:
    return Settings(
        handle.get_block_size(), handle.get_queue_depth(), handle.get_single_submit(), handle.get_overlap_events(),
        handle.get_intra_op_parallelism(),
    )  # fmt: skip


def keep(path: Path, settings: Settings = FOUND, backend: str = "") -> None:
    kept.save(identify(path, "cpu", backend or aio_handle().backend), settings, {})


def test_without_any_they_are_the_defaults(tmp_path: Path) -> None:
    assert settings_of(tuned_handle(tmp_path)) == Settings()


def test_stored_settings_are_used(tmp_path: Path) -> None:
    keep(tmp_path)
    handle = tuned_handle(tmp_path / "not there yet")
    assert isinstance(handle, aio_handle)
    assert settings_of(handle) == FOUND
    assert handle.get_alignment() == 2 * 512
    round_trip(handle, tmp_path / "file")


def test_what_is_stored_can_be_asked_for(tmp_path: Path) -> None:
    assert stored_settings(tmp_path) is None
    keep(tmp_path)
    assert stored_settings(tmp_path) == FOUND
    assert stored_settings(tmp_path, "gpu") is None
    assert stored_settings(tmp_path, backend="another") is None


def test_arguments_stay_as_they_are_given(tmp_path: Path) -> None:
    keep(tmp_path)
    handle = tuned_handle(tmp_path, queue_depth=7, overlap_events=False)
    assert (handle.get_queue_depth(), handle.get_overlap_events()) == (7, False)
    assert handle.get_block_size() == FOUND.block_size
    assert tuned_handle(tmp_path, num_threads=3).get_intra_op_parallelism() == 3
    assert tuned_handle(tmp_path, intra_op_parallelism=None).get_intra_op_parallelism() == 2


def test_settings_belong_to_a_backend(tmp_path: Path) -> None:
    keep(tmp_path, backend="threads")
    assert settings_of(tuned_handle(tmp_path, backend="threads")) == FOUND
    if aio_handle().backend != "threads":
        assert settings_of(tuned_handle(tmp_path)) == Settings()


def test_wrong_arguments_are_refused_as_by_aio_handle(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="block_size must lie between"):
        tuned_handle(tmp_path, block_size=0)
    with pytest.raises(TypeError, match="no_such_argument"):
        tuned_handle(tmp_path, no_such_argument=1)
    with pytest.raises(ValueError, match="two names for one number"):
        tuned_handle(tmp_path, num_threads=1, intra_op_parallelism=2)


def test_it_is_pickled_as_path_and_arguments(tmp_path: Path) -> None:
    handle = pickle.loads(pickle.dumps(tuned_handle(tmp_path, queue_depth=7)))
    assert (type(handle), handle.get_queue_depth()) == (tuned_handle, 7)
