"""``tuned_handle``: stored settings are used; without, the device is tuned behind the program's back, unnoticed."""

from __future__ import annotations

import contextlib
import gc
import os
import shutil
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import nvme_ops
from nvme_ops import aio_handle
from nvme_ops.op_builder.cache import default_root
from nvme_ops.settings import Settings
from nvme_ops.storage.identity import identify
from nvme_ops.tune import background
from nvme_ops.tune import store as kept
from nvme_ops.tune.background import Watched
from nvme_ops.tune.handle import stored_settings, tuned_handle
from nvme_ops.tune.passes import Passes
from tests.conftest import MIB, LoopDevice, in_threads, pattern, round_trip, run_python, store

FOUND = Settings(block_size=256 << 10, queue_depth=16, overlap_events=True, intra_op_parallelism=2)
OPS = str(default_root().parent)  # with another cache folder the op would be compiled anew
PATIENCE = 60.0  # seconds for what takes a fraction of one


@pytest.fixture(autouse=True)
def quick(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty cache, and little data for those who tune."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", OPS)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("NVME_OPS_TUNE", raising=False)
    for name, value in (("FILE", MIB), ("LARGE", MIB), ("QUIET", 0.01), ("SECONDS", 0.5), ("_LEAVING", PATIENCE)):
        monkeypatch.setattr(background, name, value)


class MadeUpSearch:
    """Stands for a search: measures FOUND once and finds it best."""

    runs: list[MadeUpSearch]

    def __init__(self, measure: Callable[[Settings, bool], object], axes: object, spent: object) -> None:
        self.measure = measure

    def find(self) -> SimpleNamespace:
        type(self).runs.append(self)
        self.measure(FOUND, False)
        return SimpleNamespace(best=FOUND)


@pytest.fixture
def made_up(monkeypatch: pytest.MonkeyPatch) -> list[MadeUpSearch]:
    """The searches that ran."""
    MadeUpSearch.runs = []
    monkeypatch.setattr(background, "Search", MadeUpSearch)
    return MadeUpSearch.runs


def settings_of(handle: aio_handle) -> Settings:
    return Settings(
        handle.get_block_size(), handle.get_queue_depth(), handle.get_single_submit(), handle.get_overlap_events(),
        handle.get_intra_op_parallelism(),
    )  # fmt: skip


def keep(path: Path, settings: Settings = FOUND, backend: str = "") -> None:
    kept.save(identify(path, "cpu", backend or aio_handle().backend), settings, {})


def watched(handle: aio_handle) -> bool:
    return isinstance(handle._engine, Watched)


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, "nothing happened"
        time.sleep(0.005)


def use(handle: aio_handle, folder: Path, size: int = MIB) -> None:
    handle.sync_pwrite(torch.zeros(size, dtype=torch.uint8), folder / "used")


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    yield
    until(lambda: not any(thread.name == "nvme_ops-tune" for thread in threading.enumerate()))


def test_the_handle_needs_nothing_of_the_benchmarks() -> None:
    run_python("""
        import sys
        import nvme_ops
        assert nvme_ops.tuned_handle
        from nvme_ops.tune import background, handle
        assert [name for name in sys.modules if name.startswith("nvme_ops.bench")] == []
    """)


# What is stored


def test_stored_settings_are_used(tmp_path: Path) -> None:
    keep(tmp_path)
    handle = tuned_handle(tmp_path / "not there yet")
    assert isinstance(handle, aio_handle)
    assert settings_of(handle) == FOUND
    assert handle.get_alignment() == 2 * 512
    assert not watched(handle)
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
    assert settings_of(tuned_handle(tmp_path, tune=False, backend="threads")) == FOUND
    if aio_handle().backend != "threads":
        assert settings_of(tuned_handle(tmp_path, tune=False)) == Settings()


def test_wrong_arguments_are_refused_as_by_aio_handle(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="block_size must lie between"):
        tuned_handle(tmp_path, block_size=0)
    with pytest.raises(TypeError, match="no_such_argument"):
        tuned_handle(tmp_path, no_such_argument=1)


# Tuning in the background


def test_the_first_large_transfer_has_the_device_tuned(tmp_path: Path, made_up: list[MadeUpSearch]) -> None:
    handle = tuned_handle(tmp_path)
    assert settings_of(handle) == Settings()
    use(handle, tmp_path)
    until(lambda: not watched(handle))
    assert settings_of(handle) == FOUND
    assert len(made_up) == 1
    round_trip(handle, tmp_path / "file")
    assert settings_of(tuned_handle(tmp_path)) == FOUND  # kept
    assert sorted(os.listdir(tmp_path)) == ["cache", "file", "used"]


@pytest.mark.parametrize("call", ["submit_pwrite", "async_pwrite", "submit_pwritev", "rows", "write"])
def test_every_way_to_move_data_counts(tmp_path: Path, call: str, made_up: list[MadeUpSearch]) -> None:
    handle, data = tuned_handle(tmp_path), torch.zeros(MIB, dtype=torch.uint8)
    if call == "submit_pwritev":
        assert (
            handle.submit_pwritev([data[: MIB // 2], data[MIB // 2 :]], tmp_path / "file", [0, MIB // 2]).result()
            == MIB
        )
    elif call == "rows":
        assert handle.submit_pwritev(data.view(2, -1), tmp_path / "file", [0, MIB // 2]).result() == MIB
    elif call == "submit_pwrite":
        assert handle.submit_pwrite(data, tmp_path / "file").result() == MIB
    elif call == "async_pwrite":
        handle.async_pwrite(data, tmp_path / "file")
        assert handle.wait() == 1
    else:
        handle.write(data, tmp_path / "file")
    until(lambda: not watched(handle))
    assert settings_of(handle) == FOUND


def test_small_transfers_have_nothing_tuned(tmp_path: Path, made_up: list[MadeUpSearch]) -> None:
    handle = tuned_handle(tmp_path)
    use(handle, tmp_path, MIB - 1)
    handle.submit_pwrite(bytes(1000), tmp_path / "file").result()
    assert not any(thread.name == "nvme_ops-tune" for thread in threading.enumerate())
    assert made_up == []


def test_it_can_be_switched_off(tmp_path: Path, made_up: list[MadeUpSearch], monkeypatch: pytest.MonkeyPatch) -> None:
    assert not watched(tuned_handle(tmp_path, tune=False))
    assert not watched(tuned_handle(tmp_path, cache="buffered"))  # the device has no part in its rates
    assert watched(tuned_handle(tmp_path))
    monkeypatch.setenv("NVME_OPS_TUNE", "off")
    handle = tuned_handle(tmp_path)
    assert not watched(handle)
    use(handle, tmp_path)
    assert made_up == []
    keep(tmp_path)
    assert settings_of(tuned_handle(tmp_path)) == FOUND  # what is known is used all the same


def test_a_device_without_a_file_system_is_left_alone(make_device: Callable[..., LoopDevice]) -> None:
    assert not watched(tuned_handle(make_device(MIB).path))


def test_another_value_of_the_switch_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NVME_OPS_TUNE", "no")
    with pytest.raises(ValueError, match="NVME_OPS_TUNE='no' is not one of auto, off"):
        tuned_handle(tmp_path)


def test_arguments_stay_when_the_rest_is_found(tmp_path: Path, made_up: list[MadeUpSearch]) -> None:
    handle = tuned_handle(tmp_path, queue_depth=5, num_threads=1)
    use(handle, tmp_path)
    until(lambda: not watched(handle))
    assert (handle.get_queue_depth(), handle.get_intra_op_parallelism()) == (5, 1)
    assert handle.get_block_size() == FOUND.block_size


def test_the_folder_of_an_earlier_handle_is_gone(tmp_path: Path, made_up: list[MadeUpSearch]) -> None:
    (tmp_path / "gone").mkdir()
    idle = tuned_handle(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    handle = tuned_handle(tmp_path)
    use(handle, tmp_path)
    until(lambda: not watched(handle) and not watched(idle))
    assert settings_of(handle) == settings_of(idle) == FOUND


def test_several_handles_of_a_device_have_it_tuned_once(tmp_path: Path, made_up: list[MadeUpSearch]) -> None:
    handles = [tuned_handle(tmp_path / name) for name in "abcd"]
    in_threads(lambda number: use(handles[number], tmp_path), 4)
    until(lambda: not any(map(watched, handles)))
    assert [settings_of(handle) for handle in handles] == [FOUND] * 4
    assert len(made_up) == 1


def test_a_handle_that_is_dropped_is_not_kept_for_the_tuner(tmp_path: Path, made_up: list[MadeUpSearch]) -> None:
    handle = tuned_handle(tmp_path)
    watcher = weakref.ref(handle)
    use(handle, tmp_path)
    del handle
    gc.collect()
    assert watcher() is None
    until(lambda: stored_settings(tmp_path) == FOUND)


def test_nothing_is_measured_while_a_transfer_goes_on(
    tmp_path: Path, made_up: list[MadeUpSearch], monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = threading.Event()
    monkeypatch.setattr(Passes, "calibrate", lambda *_: None)
    monkeypatch.setattr(Passes, "measure", lambda *_: measured.set())
    handle = tuned_handle(tmp_path)
    tuner: Any = handle._engine._tuner  # type: ignore[attr-defined]
    tuner._busy.add("a transfer")
    use(handle, tmp_path)
    assert not measured.wait(0.3)
    tuner._busy.clear()
    assert measured.wait(PATIENCE)
    until(lambda: not watched(handle))


def test_a_pass_that_a_transfer_disturbed_is_done_again(
    tmp_path: Path, made_up: list[MadeUpSearch], monkeypatch: pytest.MonkeyPatch
) -> None:
    passes = []
    handle = tuned_handle(tmp_path)

    def measure(*_: object) -> None:
        passes.append(1)
        if len(passes) < 3:
            use(handle, tmp_path, 4096)

    monkeypatch.setattr(Passes, "calibrate", lambda *_: None)
    monkeypatch.setattr(Passes, "measure", measure)
    use(handle, tmp_path)
    until(lambda: not watched(handle))
    assert len(passes) == 3
    assert settings_of(handle) == FOUND


def test_a_program_that_never_rests_keeps_the_default(
    tmp_path: Path, made_up: list[MadeUpSearch], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background, "PATIENCE", 0.3)
    handle = tuned_handle(tmp_path)
    tuner: Any = handle._engine._tuner  # type: ignore[attr-defined]
    tuner._busy.add("a transfer")
    use(handle, tmp_path)
    until(lambda: not watched(handle))
    assert settings_of(handle) == Settings()
    assert stored_settings(tmp_path) is None


def test_what_is_pending_ends_as_it_began(tmp_path: Path) -> None:
    data = pattern(8 * MIB)
    path, back, other = store(tmp_path / "file", data), torch.zeros_like(data), torch.zeros_like(data)
    handle = tuned_handle(tmp_path, cache="direct")
    handle.async_pread(back, path)
    future = handle.submit_pread(other, path)
    handle.adopt(FOUND)
    third = torch.zeros_like(data)
    handle.async_pread(third, path)
    assert handle.wait() == 2
    assert future.result() == len(data)
    assert torch.equal(back, data)
    assert torch.equal(other, data)
    assert torch.equal(third, data)


def test_a_file_object_goes_on(tmp_path: Path, made_up: list[MadeUpSearch]) -> None:
    data = pattern(MIB)
    path, back = store(tmp_path / "file", data), torch.zeros_like(data)
    handle = tuned_handle(tmp_path)
    with nvme_ops.open(path, "r", handle=handle) as file:
        file.pread(back, 0)
        until(lambda: not watched(handle))
        back.zero_()
        file.pread(back, 0)
    assert torch.equal(back, data)


def test_a_tuning_that_fails_is_one_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("made up")

    monkeypatch.setattr(Passes, "calibrate", fail)
    handles = [tuned_handle(tmp_path) for _ in range(2)]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for handle in handles:
            use(handle, tmp_path)
        until(lambda: not any(map(watched, handles)))
    assert [str(warning.message) for warning in caught] == [f"{tmp_path} was not tuned: RuntimeError: made up"]
    assert caught[0].category is RuntimeWarning
    assert settings_of(handles[0]) == Settings()
    round_trip(handles[0], tmp_path / "file")


def test_a_warning_that_is_made_an_error_reaches_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Passes, "calibrate", lambda *_: 1 / 0)
    monkeypatch.setattr(threading, "excepthook", lambda _: pytest.fail("it was not caught"))
    handle = tuned_handle(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        use(handle, tmp_path)
        until(lambda: not watched(handle))


def test_a_cache_that_cannot_be_written_is_one_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/nothing")
    handle = tuned_handle(tmp_path)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        use(handle, tmp_path)
        until(lambda: not watched(handle))
    assert len(caught) == 1
    assert "was not tuned: " in str(caught[0].message)


def test_without_room_nothing_is_tuned_and_nothing_said(
    tmp_path: Path, made_up: list[MadeUpSearch], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=MIB))
    handle = tuned_handle(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        use(handle, tmp_path)
        until(lambda: not watched(handle))
    assert made_up == []
    assert settings_of(handle) == Settings()


def test_where_nothing_may_be_written_nothing_is_tuned_and_nothing_said(
    tmp_path: Path, made_up: list[MadeUpSearch], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1 << 40))
    handle = tuned_handle("/proc/self/status")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        use(handle, tmp_path)
        until(lambda: not watched(handle))
    assert made_up == []


def test_what_another_process_finds_is_taken_over(
    tmp_path: Path, made_up: list[MadeUpSearch], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    @contextlib.contextmanager
    def sole(_: object) -> Iterator[bool]:
        asked.append(1)
        if len(asked) == 2:
            keep(tmp_path)
        yield False

    monkeypatch.setattr(kept, "sole", sole)
    handle = tuned_handle(tmp_path)
    use(handle, tmp_path)
    until(lambda: not watched(handle))
    assert settings_of(handle) == FOUND
    assert (made_up, len(asked)) == ([], 2)


def test_a_real_search_ends_and_is_kept(tmp_path: Path) -> None:
    handle = tuned_handle(tmp_path)
    use(handle, tmp_path)
    until(lambda: not watched(handle))
    assert stored_settings(tmp_path) == settings_of(handle)
    round_trip(handle, tmp_path / "file")
