"""``nvme-tune`` as its users run it: a process of its own, with little data and little time."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from nvme_ops import aio_handle
from nvme_ops.measuring.page_cache import cached_share
from nvme_ops.op_builder.cache import default_root
from nvme_ops.settings import Settings
from nvme_ops.storage.identity import Identity
from nvme_ops.tune import cli, devices, options, report
from nvme_ops.tune.devices import Tuned, TuneResult
from nvme_ops.tune.search import Outcome
from nvme_ops.tuning import store
from tests import prepared
from tests.conftest import round_trip

ROOT = Path(__file__).parents[2]
QUICK = ("--io_size", "32M", "--seconds", "1")
KEYS = ["single_submit", "overlap_events", "intra_op_parallelism", "queue_depth", "block_size"]


def places(folder: Path, cache: Path | None) -> dict[str, str]:
    return {
        "TORCH_EXTENSIONS_DIR": str(default_root().parent),  # not with the cache: the op would be compiled anew
        "XDG_CACHE_HOME": str(cache or folder.parent / "cache"),
    }


def start(folder: Path, *words: str, cache: Path | None = None, command: tuple[str, ...] = ()) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*command, sys.executable, "-m", "nvme_ops.tune.cli", "--nvme_dir", str(folder), *words],
        cwd=ROOT,
        env={**os.environ, **places(folder, cache)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def tune(folder: Path, *words: str, cache: Path | None = None) -> tuple[int, str, str]:
    command = ["-m", "nvme_ops.tune.cli", "--nvme_dir", str(folder), *words]
    done = prepared.run(*command, environment=places(folder, cache))
    return done.returncode, done.stdout, done.stderr


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder of its own; its parent holds the cache."""
    (tmp_path / "place").mkdir()
    return tmp_path / "place"


@dataclass(frozen=True)
class Run:
    """One that asked for everything."""

    folder: Path
    output: str
    errors: str

    @property
    def parent(self) -> Path:
        return self.folder.parent

    @property
    def document(self) -> dict[str, Any]:
        document: dict[str, Any] = json.loads((self.parent / "aio.json").read_text())
        return document


@pytest.fixture(scope="module")
def everything(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run of all flags that only add to what is said."""
    parent = tmp_path_factory.mktemp("everything")
    folder = parent / "place"
    folder.mkdir()
    status, output, errors = tune(
        folder,
        *QUICK,
        "--explain",
        "--verbose",
        "--json",
        str(parent / "aio.json"),
        "--log_dir",
        str(parent / "a" / "b"),
    )
    assert status == 0, errors
    return Run(folder, output, errors)


def test_nothing_is_left_in_the_folder(everything: Run) -> None:
    assert list(everything.folder.iterdir()) == []


def test_the_best_settings_and_rates_are_printed(everything: Run) -> None:
    text, brace, section = everything.output.partition("{\n")
    assert text.startswith(str(everything.folder))
    assert "read" in text
    assert "GB/s" in text
    found = json.loads(brace + section)
    assert list(found) == ["aio"]
    assert list(found["aio"]) == KEYS


def test_the_result_is_kept_for_tuned_handles(everything: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    assert f"kept for aio_handle.tuned in {everything.parent}/cache/nvme_ops/tune/" in everything.errors
    monkeypatch.setenv("XDG_CACHE_HOME", str(everything.parent / "cache"))
    handle, section = aio_handle.tuned(everything.folder), everything.document["aio"]
    assert (handle.get_block_size(), handle.get_queue_depth()) == (section["block_size"], section["queue_depth"])


def test_the_json_tells_of_the_device(everything: Run) -> None:
    device = everything.document["devices"][0]
    assert device["nvme_dir"] == [str(everything.folder)]
    assert device["aio"] == everything.document["aio"]
    assert set(device["bytes_per_second"]["default"]) == {"read", "write"}
    assert device["passes"] > 0


def test_the_json_is_what_the_handle_takes(everything: Run, tmp_path: Path) -> None:
    section = everything.document["aio"]
    handle = aio_handle(**section)
    assert handle.get_block_size() == section["block_size"]
    assert handle.get_intra_op_parallelism() == section["intra_op_parallelism"]
    round_trip(handle, tmp_path / "file", 100_000)


def test_the_json_is_what_deepspeed_takes(everything: Run) -> None:
    aio_config = pytest.importorskip(
        "deepspeed.runtime.swap_tensor.aio_config", reason="DeepSpeed is not installed: pip install deepspeed"
    )
    taken = aio_config.get_aio_config(everything.document)
    assert {name: taken[name] for name in KEYS} == everything.document["aio"]


def test_explain_tells_of_every_value(everything: Run) -> None:
    for words in ("why: ", *KEYS, "128 KiB", "the best", "+-", "that raced reach 0.97 of it"):
        assert words in everything.output


def test_the_log_has_a_line_for_every_pass(everything: Run) -> None:
    lines = [json.loads(line) for line in (everything.parent / "a" / "b" / "passes.jsonl").read_text().splitlines()]
    assert len(lines) == everything.document["devices"][0]["passes"]
    for line in lines:
        assert line["nvme_dir"] == str(everything.folder)
        assert set(line["aio"]) == set(KEYS)
        assert line["read"] > 0
        assert line["write"] > 0
        assert line["bytes"] == 32 << 20


def test_verbose_shows_every_pass(everything: Run) -> None:
    shown = [line for line in everything.errors.splitlines() if "GB/s" in line]
    assert len(shown) == everything.document["devices"][0]["passes"]


def test_json_on_standard_output_is_alone_there_and_nothing_need_be_kept(place: Path) -> None:
    status, output, errors = tune(place, *QUICK, "--json", "-", "--no_store")
    assert status == 0, errors
    assert list(json.loads(output)["aio"]) == KEYS
    assert not (place.parent / "cache").exists()


@pytest.mark.parametrize(("flag", "left"), [("--no_read", "write"), ("--no_write", "read")])
def test_a_direction_may_be_left_out(place: Path, flag: str, left: str) -> None:
    status, output, errors = tune(place, *QUICK, flag, "--json", "-")
    assert status == 0, errors
    assert list(json.loads(output)["devices"][0]["bytes_per_second"]["best"]) == [left]


def test_a_sweep_configuration_is_kept_to(place: Path) -> None:
    config = place.parent / "sweep.json"
    config.write_text(json.dumps({"block_size": ["64K", "256K"], "queue_depth": [2], "io_parallel": [2]}))
    logs = place.parent / "logs"
    status, output, errors = tune(place, *QUICK, "--sweep_config", str(config), "--log_dir", str(logs), "--loops", "2")
    assert status == 0, errors
    assert '"queue_depth": 2' in output
    tried = [json.loads(line)["aio"] for line in (logs / "passes.jsonl").read_text().splitlines()]
    assert {each["block_size"] for each in tried} == {65536, 262144}
    assert {each["intra_op_parallelism"] for each in tried} == {2}


def test_folders_of_one_device_are_tuned_once(place: Path) -> None:
    other = place.parent / "other"
    other.mkdir()
    status, output, errors = tune(place, str(other), *QUICK, "--json", "-")
    assert status == 0, errors
    assert [device["nvme_dir"] for device in json.loads(output)["devices"]] == [[str(place), str(other)]]


@pytest.mark.alone
def test_several_devices_are_tuned_each_by_itself(place: Path) -> None:
    if os.stat(place).st_dev == os.stat("/dev/shm").st_dev or not os.access("/dev/shm", os.W_OK):
        pytest.skip("there is no second file system here")
    before = sorted(os.listdir("/dev/shm"))
    status, output, errors = tune(place, "/dev/shm", *QUICK, "--json", "-")
    assert status == 0, errors
    document = json.loads(output)
    assert [device["nvme_dir"] for device in document["devices"]] == [[str(place)], ["/dev/shm"]]
    assert list(document["aio"]) == KEYS
    assert len(list((place.parent / "cache" / "nvme_ops" / "tune").iterdir())) == 2
    assert [name for name in os.listdir("/dev/shm") if name.startswith("nvme_ops-") and name not in before] == []


def endless(folder: Path) -> subprocess.Popen[str]:
    """In the midst of it when this returns."""
    process = start(folder, "--io_size", "32M", "--seconds", "600", "--verbose")
    assert process.stderr is not None
    for line in process.stderr:
        if "GB/s" in line:
            break
    return process


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (signal.SIGINT, 130),
        pytest.param(signal.SIGHUP, 129, marks=pytest.mark.slow),
        (signal.SIGTERM, 143),
        pytest.param(signal.SIGQUIT, 131, marks=pytest.mark.slow),
    ],
)
def test_a_run_that_is_stopped_removes_its_files(place: Path, kind: signal.Signals, expected: int) -> None:
    process = endless(place)
    time.sleep(0.3)
    process.send_signal(kind)
    output, errors = process.communicate(timeout=60)
    assert process.returncode == expected, errors
    assert "Traceback" not in errors
    assert list(place.iterdir()) == []
    assert not (place.parent / "cache").exists()  # what was not finished is not kept
    if kind == signal.SIGINT:
        assert "interrupted; the files are removed" in errors
        assert '"aio": {' in output  # the best so far


def test_what_a_killed_run_leaves_the_next_one_removes_beside_one_that_is_alive(place: Path) -> None:
    killed = endless(place)
    killed.kill()
    killed.communicate()
    (left,) = place.iterdir()
    alive = endless(place)
    assert not left.exists()
    before = list(place.iterdir())
    status, _, errors = tune(place, *QUICK, "--no_store")
    assert status == 0, errors
    assert list(place.iterdir()) == before
    alive.send_signal(signal.SIGHUP)
    alive.communicate(timeout=60)
    assert list(place.iterdir()) == []


def test_too_little_space_is_said_before_anything_is_written(place: Path) -> None:
    status, output, errors = tune(place, "--io_size", "4000000G")
    assert (status, output) == (2, "")
    assert "of free space are needed and there are" in errors
    assert "choose another --io_size or --nvme_dir" in errors
    assert list(place.iterdir()) == []


def test_a_folder_that_fills_up_is_an_error_that_names_it(
    make_file_system: Callable[..., Path], tmp_path: Path
) -> None:
    mounted = make_file_system(16 << 20)
    status, _, errors = tune(mounted, "--io_size", "64M", cache=tmp_path / "cache")
    assert status == 2
    assert f"{mounted}: " in errors
    assert "free space are needed" in errors


def test_a_read_only_folder_is_an_error_that_names_it(tmp_path: Path) -> None:
    status, _, errors = tune(Path("/proc"), *QUICK, cache=tmp_path)
    assert status == 2
    assert "nvme-tune: /proc: " in errors


def test_more_memory_than_there_is_is_said(place: Path) -> None:
    free = os.statvfs(place).f_bavail * os.statvfs(place).f_frsize
    process = start(place, "--io_size", str(min(free // 2, 1 << 32)), command=("prlimit", "--as=3000000000"))
    output, errors = process.communicate(timeout=120)
    if free // 2 < 1 << 32:
        pytest.skip("there is too little space to ask for more than the memory limit")
    assert (process.returncode, output) == (2, "")
    assert "no memory for --io_size" in errors
    assert list(place.iterdir()) == []


def test_a_cache_that_cannot_be_written_is_a_warning(place: Path) -> None:
    status, output, errors = tune(place, *QUICK, cache=Path("/proc/nothing"))
    assert status == 0
    assert "warning: not kept for aio_handle.tuned" in errors
    assert '"aio": {' in output


def test_a_log_that_cannot_be_written_ends_with_status_2(place: Path) -> None:
    status, _, errors = tune(place, *QUICK, "--log_dir", "/proc/nothing")
    assert status == 2
    assert "--log_dir /proc/nothing: " in errors


def test_wrong_arguments_end_with_status_2(place: Path) -> None:
    status, output, errors = tune(place, "--io_size", "0")
    assert (status, output) == (2, "")
    assert "nvme-tune: error: argument --io_size: '0' is not a size" in errors


@pytest.mark.gpu
@pytest.mark.parametrize("flag", ["--gpu", "--gds"])
def test_memory_of_a_gpu_is_tuned(place: Path, flag: str) -> None:
    if not torch.cuda.is_available():
        pytest.skip("torch.cuda is not available: no GPU, or torch without CUDA")
    status, output, errors = tune(place, *QUICK, flag, "--json", "-")
    if flag == "--gds" and status == 2 and "cuFile" in errors:
        pytest.skip(errors.strip().splitlines()[-1])
    assert status == 0, errors
    device: dict[str, Any] = json.loads(output)["devices"][0]
    assert device["identity"]["way"] == flag[2:]
    assert device["identity"]["gpu"]


def test_flushing_drops_the_whole_page_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Into a file that stands for the kernel's: others on this machine use the real cache."""
    synchronised: list[int] = []
    monkeypatch.setattr(devices, "DROP_CACHES", str(tmp_path / "drop_caches"))
    monkeypatch.setattr(os, "sync", lambda: synchronised.append(1))
    devices._flush()
    assert (tmp_path / "drop_caches").read_text() == "1"
    assert synchronised


def made_up_result(folder: Path, seconds: float, best: Settings, *words: str) -> TuneResult:
    rates = {best: {"read": 2e9, "write": 1e9}}
    outcome = Outcome(best, best, best, None, [], rates, {best: 3}, {}, True)
    device = Identity(("made up",), "ext4", "1", "6", 2, "cpu", "threads")
    given = options.parse(["--nvme_dir", str(folder), *words])
    return TuneResult(given, [Tuned([str(folder)], device, outcome, seconds, 1 << 25)])


def test_the_better_founded_result_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    other, first = Settings(queue_depth=7), made_up_result(tmp_path, 45, Settings())
    identity = first.devices[0].identity
    cli._keep(first)
    cli._keep(made_up_result(tmp_path, 1, other))
    assert store.load(identity, "tuned", store.settings_of)["aio"] == Settings().as_json()
    assert "this run took 1 s, that one 45 s; --replace keeps this one" in capsys.readouterr().err
    cli._keep(made_up_result(tmp_path, 1, other, "--replace"))
    assert store.load(identity, "tuned", store.settings_of)["aio"] == other.as_json()


@pytest.mark.parametrize(("mode", "share"), [("auto", 1), ("direct", None)])
def test_what_was_read_from_the_page_cache_is_said(
    place: Path, monkeypatch: pytest.MonkeyPatch, mode: str, share: float | None
) -> None:
    """A short tuning during which others keep reading the file."""
    probe = place / "probe"
    probe.write_bytes(bytes(4096))
    if cached_share(str(probe)) is None:
        pytest.skip("the kernel does not say what lies in the page cache")
    monkeypatch.setenv("NVME_OPS_CACHE", mode)
    monkeypatch.setattr(devices, "make_cold", lambda path: Path(path).read_bytes())
    words = ["--nvme_dir", str(place), "--io_size", "32M", "--seconds", "0.5", "--no_write", "--verbose"]
    said: list[str] = []
    result = devices.tune(options.parse([*words, "--log_dir", str(place / "log")]), said.append)
    lines = (place / "log" / "passes.jsonl").read_text().splitlines()
    assert {json.loads(line)["from_page_cache"] for line in lines} == {share}
    assert report.as_document(result)["devices"][0]["from_page_cache"] == share
    words_of_text = "  100 % of what was read lay in the page cache: so far memory was measured"
    assert (words_of_text in report.text(result)) == (share == 1)
    assert any("(100 % from the page cache)" in line for line in said) == (share == 1)
