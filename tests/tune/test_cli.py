"""``nvme-tune`` as its users run it: a process of its own, with little data and little time."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from nvme_ops import aio_handle
from nvme_ops.measure import tune as cli
from nvme_ops.measure.files import cached_share
from nvme_ops.measure.search import Outcome
from nvme_ops.measure.tune import Tuned, TuneResult
from nvme_ops.op_builder.cache import default_root
from nvme_ops.settings import Settings
from nvme_ops.storage.device import Identity
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
        [*command, sys.executable, "-m", "nvme_ops.measure.tune", "--folder", str(folder), *words],
        cwd=ROOT,
        env={**os.environ, **places(folder, cache)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def tune(folder: Path, *words: str, cache: Path | None = None) -> tuple[int, str, str]:
    command = ["-m", "nvme_ops.measure.tune", "--folder", str(folder), *words]
    done = prepared.run(*command, environment=places(folder, cache))
    return done.returncode, done.stdout, done.stderr


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder of its own; its parent holds the cache."""
    (tmp_path / "place").mkdir()
    return tmp_path / "place"


def test_a_run_keeps_tells_and_logs_what_it_found(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With all flags that only add to what is said."""
    parent = place.parent
    flags = ("--explain", "--verbose", "--output", str(parent / "aio.json"), "--log_dir", str(parent / "a" / "b"))
    status, output, errors = tune(place, *QUICK, *flags)
    assert status == 0, errors
    assert list(place.iterdir()) == []

    document = json.loads((parent / "aio.json").read_text())
    (device,), section = document["devices"], document["aio"]
    assert device["nvme_dir"] == [str(place)]
    assert device["aio"] == section
    assert set(device["bytes_per_second"]["default"]) == {"read", "write"}

    text, brace, printed = output.partition("{\n")
    assert text.startswith(str(place))
    for words in ("read", "GB/s", "why: ", *KEYS, "128 KiB", "the best", "+-", "that raced reach 0.97 of it"):
        assert words in text
    assert json.loads(brace + printed) == {"aio": section}
    assert list(section) == KEYS

    log = (parent / "a" / "b" / "passes.jsonl").read_text().splitlines()
    assert len(log) == len([line for line in errors.splitlines() if "GB/s" in line]) == device["passes"] > 0
    for line in map(json.loads, log):
        assert (line["nvme_dir"], set(line["aio"]), line["bytes"]) == (str(place), set(KEYS), 32 << 20)
        assert min(line["read"], line["write"]) > 0

    assert f"kept for aio_handle.tuned in {parent}/cache/nvme_ops/tune/" in errors
    monkeypatch.setenv("XDG_CACHE_HOME", str(parent / "cache"))
    for handle in (aio_handle(**section), aio_handle.tuned(place)):
        assert [getattr(handle, f"get_{name}")() for name in KEYS] == list(section.values())
    round_trip(handle, parent / "file", 100_000)
    aio_config = pytest.importorskip(
        "deepspeed.runtime.swap_tensor.aio_config", reason="DeepSpeed is not installed: pip install deepspeed"
    )
    taken = aio_config.get_aio_config(document)
    assert {name: taken[name] for name in KEYS} == section


@pytest.mark.parametrize(
    ("words", "measured"),
    [(["--no_store"], ["write", "read"]), (["--no_read"], ["write"]), (["--no_write"], ["read"])],
)
def test_json_on_standard_output_is_alone_there(place: Path, words: list[str], measured: list[str]) -> None:
    status, output, errors = tune(place, *QUICK, "--json", *words)
    assert status == 0, errors
    document = json.loads(output)
    assert list(document["aio"]) == KEYS
    assert list(document["devices"][0]["bytes_per_second"]["best"]) == measured
    assert (place.parent / "cache").exists() == ("--no_store" not in words)


def test_a_sweep_configuration_is_kept_to(place: Path) -> None:
    config = place.parent / "sweep.json"
    config.write_text(json.dumps({"block_size": ["64K", "256K"], "queue_depth": [2], "io_parallel": [2]}))
    logs = place.parent / "logs"
    status, output, errors = tune(
        place, *QUICK, "--seconds", "4", "--sweep_config", str(config), "--log_dir", str(logs), "--loops", "2"
    )
    assert status == 0, errors
    assert '"queue_depth": 2' in output
    tried = [json.loads(line)["aio"] for line in (logs / "passes.jsonl").read_text().splitlines()]
    assert {each["block_size"] for each in tried} == {65536, 262144}
    assert {each["intra_op_parallelism"] for each in tried} == {2}


@pytest.mark.alone
def test_devices_are_tuned_each_by_itself_and_once(place: Path) -> None:
    if os.stat(place).st_dev == os.stat("/dev/shm").st_dev or not os.access("/dev/shm", os.W_OK):
        pytest.skip("there is no second file system here")
    other = place.parent / "other"
    other.mkdir()
    before = sorted(os.listdir("/dev/shm"))
    status, output, errors = tune(place, "/dev/shm", str(other), *QUICK, "--json")
    assert status == 0, errors
    document = json.loads(output)
    assert [device["nvme_dir"] for device in document["devices"]] == [[str(place), str(other)], ["/dev/shm"]]
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


@pytest.mark.parametrize(
    ("folder", "words", "messages"),
    [
        (
            None,
            ["--io_size", "4000000G"],
            ["of free space are needed and there are", "another --io_size or --folder"],
        ),
        ("/proc", QUICK, ["nvme-tune: /proc: "]),
        (None, [*QUICK, "--log_dir", "/proc/nothing"], ["--log_dir /proc/nothing: "]),
        (None, ["--io_size", "0"], ["nvme-tune: error: argument --io_size: '0' is not a size"]),
    ],
)
def test_what_cannot_be_used_ends_with_status_2_before_anything_is_written(
    place: Path, folder: str | None, words: Sequence[str], messages: list[str]
) -> None:
    status, output, errors = tune(Path(folder or place), *words, cache=place.parent / "cache")
    assert (status, output) == (2, "")
    assert all(message in errors for message in messages), errors
    assert list(place.iterdir()) == []


def test_a_folder_that_fills_up_is_an_error_that_names_it(
    make_file_system: Callable[..., Path], tmp_path: Path
) -> None:
    mounted = make_file_system(16 << 20)
    status, _, errors = tune(mounted, "--io_size", "64M", cache=tmp_path / "cache")
    assert status == 2
    assert f"{mounted}: " in errors
    assert "free space are needed" in errors


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


@pytest.mark.gpu
@pytest.mark.parametrize("flag", ["--gpu", "--gds"])
def test_memory_of_a_gpu_is_tuned(place: Path, flag: str) -> None:
    if not torch.cuda.is_available():
        pytest.skip("torch.cuda is not available: no GPU, or torch without CUDA")
    status, output, errors = tune(place, *QUICK, flag, "--json")
    if flag == "--gds" and status == 2 and "cuFile" in errors:
        pytest.skip(errors.strip().splitlines()[-1])
    assert status == 0, errors
    device: dict[str, Any] = json.loads(output)["devices"][0]
    assert device["identity"]["way"] == flag[2:]
    assert device["identity"]["gpu"]


def test_flushing_drops_the_whole_page_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Into a file that stands for the kernel's: others on this machine use the real cache."""
    synchronised: list[int] = []
    monkeypatch.setattr(cli, "DROP_CACHES", str(tmp_path / "drop_caches"))
    monkeypatch.setattr(os, "sync", lambda: synchronised.append(1))
    cli._flush()
    assert (tmp_path / "drop_caches").read_text() == "1"
    assert synchronised


def made_up_result(folder: Path, seconds: float, best: Settings, *words: str) -> TuneResult:
    rates = {best: {"read": 2e9, "write": 1e9}}
    outcome = Outcome(best, best, best, None, [], rates, {best: 3}, {}, True)
    device = Identity(("made up",), "ext4", "1", "6", 2, "cpu", "threads")
    given = cli.parse(["--folder", str(folder), *words])
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
    monkeypatch.setattr(cli, "make_cold", lambda path: Path(path).read_bytes())
    words = ["--nvme_dir", str(place), "--io_size", "32M", "--seconds", "0.5", "--no_write", "--verbose"]
    said: list[str] = []
    result = cli.tune(cli.parse([*words, "--log_dir", str(place / "log")]), said.append)
    lines = (place / "log" / "passes.jsonl").read_text().splitlines()
    assert {json.loads(line)["from_page_cache"] for line in lines} == {share}
    assert cli.as_document(result)["devices"][0]["from_page_cache"] == share
    words_of_text = "  100 % of what was read lay in the page cache: so far memory was measured"
    assert (words_of_text in cli.text(result)) == (share == 1)
    assert any("(100 % from the page cache)" in line for line in said) == (share == 1)
