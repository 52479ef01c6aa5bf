"""``aio_handle.tuned``: the settings stored for a device are used, and stay."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from nvme_ops import aio_handle
from nvme_ops.settings import Settings
from nvme_ops.storage.device import identify
from nvme_ops.tuning import store
from tests.conftest import round_trip

FOUND = Settings(block_size=256 << 10, queue_depth=16, overlap_events=True, intra_op_parallelism=2)


def settings_of(handle: aio_handle) -> Settings:
    return Settings(
        handle.get_block_size(), handle.get_queue_depth(), handle.get_single_submit(), handle.get_overlap_events(),
        handle.get_intra_op_parallelism(),
    )  # fmt: skip


def keep(path: Path, settings: Settings = FOUND, backend: str = "", way: str = "cpu") -> None:
    store.keep(identify(path, way, backend or aio_handle().backend), settings, {})


def test_stored_settings_are_used_else_the_defaults(tmp_path: Path) -> None:
    assert repr(aio_handle.tuned(tmp_path)) == repr(aio_handle())
    keep(tmp_path)
    handle = aio_handle.tuned(tmp_path / "not there yet")
    assert settings_of(handle) == FOUND
    assert handle.get_alignment() == 2 * 512
    assert repr(pickle.loads(pickle.dumps(handle))) == repr(handle)
    round_trip(handle, tmp_path / "file")


def test_one_lane_that_was_found_is_automatic(tmp_path: Path) -> None:
    keep(tmp_path, Settings(queue_depth=8))
    assert "intra_op_parallelism=None" in repr(aio_handle.tuned(tmp_path))
    assert "intra_op_parallelism=1" in repr(aio_handle.tuned(tmp_path, intra_op_parallelism=1))


def test_arguments_stay_as_they_are_given(tmp_path: Path) -> None:
    keep(tmp_path)
    handle = aio_handle.tuned(tmp_path, queue_depth=7, overlap_events=False)
    assert settings_of(handle) == Settings(FOUND.block_size, 7, False, False, 2)
    assert aio_handle.tuned(tmp_path, num_threads=3).get_intra_op_parallelism() == 3
    assert aio_handle.tuned(tmp_path, intra_op_parallelism=None).get_intra_op_parallelism() == 2


def test_settings_belong_to_a_backend_and_a_way(tmp_path: Path) -> None:
    keep(tmp_path, backend="threads")
    keep(tmp_path, Settings(queue_depth=3), way="gpu")
    assert settings_of(aio_handle.tuned(tmp_path, backend="threads")) == FOUND
    assert aio_handle.tuned(tmp_path, way="gpu").get_queue_depth() == 3
    if aio_handle().backend != "threads":
        assert settings_of(aio_handle.tuned(tmp_path)) == Settings()


def test_wrong_arguments_are_refused_as_by_aio_handle(tmp_path: Path) -> None:
    for make in (aio_handle.tuned, aio_handle.adaptive):
        with pytest.raises(ValueError, match="block_size must lie between"):
            make(tmp_path, block_size=0)
        with pytest.raises(TypeError, match="no_such_argument"):
            make(tmp_path, no_such_argument=1)
        with pytest.raises(ValueError, match="two names for one number"):
            make(tmp_path, num_threads=1, intra_op_parallelism=2)
