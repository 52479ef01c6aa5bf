"""``nvme-tune``, what it keeps about a device (``faults/promises.py`` kills its writers), and handles that use it."""

from __future__ import annotations

import errno
import importlib.util
import json
import os
import pickle
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch

import nvme_ops
from nvme_ops import aio_handle
from nvme_ops.base import progress
from nvme_ops.base.settings import Settings
from nvme_ops.base.text import MIB
from nvme_ops.filesystem.device import Identity, identify
from nvme_ops.io import gds
from nvme_ops.io.tuning import store
from nvme_ops.measure import stop, tune
from nvme_ops.measure.engines import Contender, Task
from nvme_ops.measure.rows import Row, Sample
from tests import prepared
from tests.conftest import in_child, refusal, round_trip

DEFAULT = Settings()
FAST = replace(DEFAULT, queue_depth=32)
FAILURE = OSError(5, "the device failed")

#: The rate of ``FAST`` over all others', in a direction at the n-th of its passes.
Device = Callable[[str, int], float]
Run = Callable[..., tuple[Counter[tuple[Settings, str]], list[int]]]


def fail(error: BaseException = FAILURE) -> NoReturn:
    raise error


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of its own; its parent holds the cache and the result."""
    monkeypatch.setattr(stop, "leave_on_signals", lambda: None)
    (tmp_path / "place").mkdir()
    return tmp_path / "place"


@pytest.fixture
def run(place: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs ``nvme-tune`` on a device that is made up; returns the passes, and the sizes of those of each table."""

    def started(device: Device, *words: str, rate: float = 1e9, status: int = 0) -> Any:
        passes, sizes = Counter[tuple[Settings, str]](), list[int]()

        def one_pass(settings: Settings, direction: str, size: int) -> Sample:
            passes[settings, direction] += 1
            relative = device(direction, passes[settings, direction]) if settings == FAST else 1.0
            return Sample(size / (rate or fail()) / relative, size)

        def make_rows(task: Task, contenders: Sequence[Contender]) -> list[Row]:
            sizes.append(task.size)
            direction = "write" if task.write else "read"
            runs = [partial(one_pass, contender.settings, direction, task.size) for contender in contenders]
            return [Row(contender.name, run) for contender, run in zip(contenders, runs, strict=True)]

        monkeypatch.setattr(tune, "make_rows", make_rows)
        monkeypatch.setattr(tune, "make_file", lambda path, _: Path(path).touch())
        assert tune.main(["--folder", str(place), "--log_dir", str(place.parent / "log"), *words]) == status
        assert list(place.iterdir()) == [], "nothing is left"
        return passes, sizes

    return started


def document(place: Path) -> Any:
    return json.loads((place.parent / "log" / "tune.json").read_text())


def settings_of(handle: aio_handle) -> Settings:
    return Settings(**{name: getattr(handle, f"get_{name}")() for name in DEFAULT.as_json()})


DEVICES: dict[str, tuple[Device, Settings]] = {  # the sweep has the passes 1 to 4, what follows the passes 5 to 14
    "hardly faster": (lambda direction, number: 1.015, DEFAULT),
    "fast by chance": (lambda direction, number: 1.2 if number <= 4 else 1.0, DEFAULT),
    "slower in two rounds": (lambda direction, number: 0.95 if number in (8, 9) else 1.1, DEFAULT),
    "slower in one round": (lambda direction, number: 0.2 if number == 9 else 1.1, FAST),
    "reads for writes": (lambda direction, number: {"read": 1.3, "write": 0.75}[direction], DEFAULT),
    "more reads for writes": (lambda direction, number: {"read": 1.5, "write": 0.75}[direction], FAST),
    "failing": (lambda direction, number: fail(), DEFAULT),
    "failing later": (lambda direction, number: 1.1 if number <= 8 else fail(), DEFAULT),
}


@pytest.mark.parametrize("name", DEVICES)
def test_the_default_stays_unless_another_is_surely_faster(run: Run, place: Path, name: str) -> None:
    device, best = DEVICES[name]
    run(device)
    assert settings_of(aio_handle.tuned(place)) == best
    assert document(place)["aio"] == document(place)["devices"][0]["aio"] == best.as_json()


@pytest.mark.parametrize(("rate", "size"), [(1e9, 95 * MIB), (1e7, 32 * MIB), (1e11, 400 * MIB)])
def test_a_sweep_has_all_combinations_in_passes_of_a_tenth_of_a_second(
    run: Run, place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], rate: float, size: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(6))
    monkeypatch.setattr(progress, "_LINE_INTERVAL", 0)
    passes, sizes = run(lambda direction, number: 1.1, "--no_read", "--loops", "2", rate=rate)
    tried = {settings for settings, _ in passes}
    assert {settings.block_size for settings in tried} == {MIB // 4, MIB, 4 * MIB}
    assert {settings.queue_depth for settings in tried} == {8, 32, 128}
    assert {settings.intra_op_parallelism for settings in tried} == {1, 2, 4}
    assert (len(tried), sizes) == (3 * 3 * 3, [32 * MIB, size, size])
    assert (passes[DEFAULT, "write"], passes[FAST, "write"]) == (2 + 7 + 19, 7 + 19)
    (device,) = document(place)["devices"]
    assert [table["group"] for table in device["tables"]] == ["write", "write"]
    assert device["rounds"] == pytest.approx([1.1] * 18)
    *_, last, kept = capsys.readouterr().err.splitlines()
    assert last.startswith("229 of 229: write, round 18 of 18: 1 MiB x ")
    assert kept.startswith(f"kept for aio_handle.tuned in {place.parent}/cache/")


def test_a_sweep_configuration_names_the_values_and_nothing_need_be_stored(run: Run, place: Path) -> None:
    config = place.parent / "sweep.json"
    config.write_text(json.dumps({"block_size": ["64K", 1048576], "sequential_requests": [False], "io_parallel": [2]}))
    passes, _ = run(lambda direction, number: 1.0, "--sweep_config", str(config), "--no_store")
    mine = [Settings(block_size=size, overlap_events=True, intra_op_parallelism=2) for size in (MIB // 16, MIB)]
    assert {settings for settings, _ in passes} == {DEFAULT, *mine}
    assert not (place.parent / "cache").exists()


def test_devices_are_tuned_each_by_itself(
    run: Run, place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/nothing")
    other = place.parent / "other"
    other.mkdir()
    run(lambda direction, number: 1.1 if number <= 14 else 1.0, "--folder", str(other), str(place))
    written = document(place)
    assert [device["nvme_dir"] for device in written["devices"]] == [str(place), str(other)]
    assert [device["aio"] for device in written["devices"]] == [FAST.as_json(), DEFAULT.as_json()]
    assert written["aio"] == DEFAULT.as_json(), "there are none for both"
    text, errors = capsys.readouterr()
    text = " ".join(text.split())  # a long path wraps the line
    first = text.index("best: 1 MiB x 32, 1 lane: 1.100 of the default's rate")
    second = text.index("best: 1 MiB x 128, 1 lane, the default")
    assert text.index(f"{place}: ") < first < text.index(f"{other}: ") < second
    assert json.loads(text[text.index("{") :]) == {"aio": DEFAULT.as_json()}
    assert errors.count("nvme-tune: warning: not kept for aio_handle.tuned: ") == 2


@pytest.mark.parametrize(
    ("rate", "status", "told"), [(1e9, 130, "interrupted"), (0, 2, f"write: failed: OSError: {FAILURE}")]
)
def test_what_is_interrupted_or_fails_leaves_nothing_behind(
    run: Run, place: Path, capsys: pytest.CaptureFixture[str], rate: float, status: int, told: str
) -> None:
    run(lambda direction, number: fail(KeyboardInterrupt()), rate=rate, status=status)
    assert capsys.readouterr() == ("", f"nvme-tune: {told}\n")
    assert sorted(path.name for path in place.parent.iterdir()) == ["log", "place"]


@pytest.mark.parametrize(("call", "error", "at"), [("fsync", errno.ENOSPC, "/.*/data'"), ("mkdir", errno.EROFS, ": ")])
def test_a_full_or_read_only_folder_is_named(
    place: Path, monkeypatch: pytest.MonkeyPatch, call: str, error: int, at: str
) -> None:
    monkeypatch.setattr(os, call, lambda *_: fail(OSError(error, os.strerror(error))))
    status, errors = refusal(tune.main, ["--folder", str(place), "--io_size", "1M"])
    assert (status, errors.count("\n"), list(place.iterdir())) == (2, 1, [])
    assert os.strerror(error) in errors
    assert re.search(f"{place}{at}", errors)


@pytest.mark.parametrize("flag", ["--device cuda", "--gds"])
def test_what_needs_a_gpu_or_cufile_says_so(place: Path, monkeypatch: pytest.MonkeyPatch, flag: str) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(nvme_ops, "gds_handle", lambda: fail(RuntimeError("cuFile cannot work here")))
    assert (
        f"error: {flag}: torch.cuda is not available" in refusal(tune.main, ["--folder", str(place), *flag.split()])[1]
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert "error: cuFile cannot work here" in refusal(tune.main, ["--folder", str(place), "--gds"])[1]


@pytest.mark.parametrize("flag", ["", *(pytest.param(flag, marks=pytest.mark.gpu) for flag in ("--gpu", "--gds"))])
def test_handles_and_deepspeed_take_what_a_run_on_the_device_finds(place: Path, flag: str) -> None:
    if flag and not (torch.cuda.is_available() and (flag == "--gpu" or gds.is_ready())):
        pytest.skip("torch.cuda is not available, or cuFile cannot work here")
    config = place.parent / "sweep.json"
    config.write_text('{"queue_depth": [8, 16]}')
    words = ["--folder", str(place), "--io_size", "2M", "--sweep_config", str(config), "--json", *flag.split()]
    done = prepared.run("-m", "nvme_ops.measure.tune", *words)
    assert (done.returncode, list(place.iterdir())) == (0, []), done.stderr
    printed = json.loads(done.stdout)
    (device,) = printed["devices"]
    assert (device["identity"]["way"], bool(device["identity"]["gpu"])) == (flag[2:] or "cpu", bool(flag))
    assert [(table["group"], len(table["rows"])) for table in device["tables"][:2]] == [("write", 3), ("read", 3)]
    assert min(rate for table in device["tables"] for row in table["rows"] for rate in row["values"]) > 0
    assert flag or settings_of(aio_handle.tuned(place)).as_json() == printed["aio"]
    round_trip(aio_handle(**printed["aio"]), place / "file", 100_000)
    if importlib.util.find_spec("deepspeed"):
        taken = importlib.import_module("deepspeed.runtime.swap_tensor.aio_config").get_aio_config(printed)
        assert {name: taken[name] for name in printed["aio"]} == printed["aio"]


# What is kept


DEVICE = Identity(("nvme made up",), "ext4", "1234", "6.1", 8, "cpu", "io_uring")
FOUND = Settings(block_size=256 << 10, queue_depth=16, overlap_events=True, intra_op_parallelism=2)


def loaded(device: Identity = DEVICE) -> Settings | None:
    kept = store.load(device)
    return None if kept is None else store.settings_of(kept)


def test_what_is_kept_is_loaded_and_a_later_result_replaces_it(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    for value in ("", "relative/folder"):
        monkeypatch.setenv("XDG_CACHE_HOME", value)
        assert store.folder() == Path.home() / ".cache" / "nvme_ops" / "tune"
    monkeypatch.setenv("HOME", "relative")
    assert loaded() is None
    with pytest.raises(RuntimeError, match="HOME='relative' is not an absolute path"):
        store.keep(DEVICE, FOUND, {})


def test_a_damaged_file_or_one_of_another_format_is_ignored_with_a_warning() -> None:
    wrong: list[Any] = [[], {}, {"format": 1, "tuned": {}}, {"format": 2, "tuned": {"aio": []}}]
    wrong += [{"format": 2, "tuned": {"aio": {**FOUND.as_json(), name: 0}}} for name in ("block_size", "single_submit")]
    for text in (b"{", b"[" * 200_000, b"\xff\xfe\x00", *(json.dumps(document).encode() for document in wrong)):
        path = store.keep(DEVICE, FOUND, {})  # in its place
        path.write_bytes(text)
        with pytest.warns(RuntimeWarning) as caught:
            assert loaded() is None
        assert f"{path} is ignored: " in str(caught[0].message)


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


def test_stored_settings_are_used_else_the_defaults_and_arguments_stay(tmp_path: Path) -> None:
    def keep(settings: Settings, way: str = "cpu", backend: str = "") -> None:
        store.keep(identify(tmp_path, way, backend or aio_handle().backend), settings, {})

    assert repr(aio_handle.tuned(tmp_path)) == repr(aio_handle())
    keep(Settings(queue_depth=3), way="gpu")
    assert repr(aio_handle.tuned(tmp_path)) == repr(aio_handle())
    assert aio_handle.tuned(tmp_path, way="gpu").get_queue_depth() == 3
    keep(FOUND)
    handle = aio_handle.tuned(tmp_path / "not there yet")
    assert settings_of(handle) == FOUND
    assert handle.get_alignment() == 2 * 512
    assert repr(pickle.loads(pickle.dumps(handle))) == repr(handle)
    round_trip(handle, tmp_path / "file")
    handle = aio_handle.tuned(tmp_path, queue_depth=7, overlap_events=False)
    assert settings_of(handle) == replace(FOUND, queue_depth=7, overlap_events=False)
    assert aio_handle.tuned(tmp_path, num_threads=3).get_intra_op_parallelism() == 3
    assert aio_handle.tuned(tmp_path, intra_op_parallelism=None).get_intra_op_parallelism() == 2
    keep(Settings(queue_depth=8), backend="threads")
    handle = aio_handle.tuned(tmp_path, backend="threads")
    assert handle.get_queue_depth() == 8
    assert "intra_op_parallelism=None" in repr(handle)  # one lane that was found is automatic
    assert "intra_op_parallelism=1" in repr(aio_handle.tuned(tmp_path, backend="threads", intra_op_parallelism=1))
