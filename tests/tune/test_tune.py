"""``nvme-tune``: its passes, what it says and keeps of a result, and small runs in a process of their own."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from nvme_ops import aio_handle
from nvme_ops.base.settings import Settings
from nvme_ops.base.text import KIB, MIB
from nvme_ops.filesystem.device import Identity
from nvme_ops.io import gds
from nvme_ops.io.tuning import store
from nvme_ops.measure import search, stop, tune
from nvme_ops.measure.files import cached_share, filled
from nvme_ops.measure.search import DEFAULT, Axis, Duel, Outcome, Passes
from nvme_ops.measure.tune import Tuned, TuneResult
from nvme_ops.op_builder.trust import default_root
from tests import prepared
from tests.conftest import contents, round_trip
from tests.tune.test_search import MadeUpDevice

QUICK = ("--io_size", "32M", "--seconds", "1")
KEYS = ["single_submit", "overlap_events", "intra_op_parallelism", "queue_depth", "block_size"]
SIZE = MIB + 5 * KIB


@pytest.fixture
def passes(tmp_path: Path) -> Passes:
    (tmp_path / "data").touch()
    return Passes(str(tmp_path / "data"), filled(torch.empty(SIZE, dtype=torch.uint8)), aio_handle)


@pytest.mark.parametrize(("seconds", "least", "size"), [(1000, 32 * MIB, SIZE), (1e-9, 64 * KIB, 64 * KIB)])
def test_calibrating_fills_the_file_and_chooses_the_size_of_passes(
    passes: Passes, monkeypatch: pytest.MonkeyPatch, seconds: float, least: int, size: int
) -> None:
    monkeypatch.setattr(search, "MIN_PASS", least)
    passes.calibrate(seconds)
    assert torch.equal(contents(Path(passes.path))[:size], passes.tensor[:size])
    assert (passes.short, passes.full) == (size, size)


@pytest.mark.parametrize("directions", [["write", "read"], ["read"]])
def test_a_pass_tells_the_rate_of_each_direction_and_keeps_the_file(passes: Passes, directions: list[str]) -> None:
    file, expected = Path(passes.path), passes.tensor.clone()
    passes.directions, passes.loops = directions, 2
    passes.calibrate(1000)
    before = file.stat().st_mtime_ns
    for settings in (Settings(), Settings(64 * KIB, 4, True, True, 2)):
        rates = passes.measure(settings, True)
        assert list(rates) == directions
        assert min(rates.values()) > 0
    assert passes.cached in ([0] * 4 * ("read" in directions), []), "each read is of a cold file"
    assert torch.equal(contents(file), expected)
    assert torch.equal(passes.tensor, expected)
    assert (file.stat().st_mtime_ns > before) == ("write" in directions)


def test_what_only_reaches_the_page_cache_is_synchronised_within_the_pass(
    passes: Passes, monkeypatch: pytest.MonkeyPatch
) -> None:
    synchronised: list[str] = []
    monkeypatch.setattr(search, "_direct", lambda _: False)
    monkeypatch.setattr(search, "sync", synchronised.append)
    subject = replace(passes)
    subject.calibrate(1000)
    synchronised.clear()
    subject.measure(Settings(), True)
    assert synchronised == [passes.path]
    Path(passes.path).write_bytes(b"")
    with pytest.raises(EOFError):  # an error of the device comes through
        subject.measure(Settings(), True)


DEVICE = Identity(("nvme made up 1 TiB",), "ext4", "1234", "6.1", 8, "cpu", "io_uring")
FAST, NEAREST = replace(DEFAULT, block_size=8 * MIB, queue_depth=16), replace(DEFAULT, queue_depth=16)
FEW = [Axis("block_size", [MIB, 8 * MIB]), Axis("queue_depth", [16, 128])]
RATES = {DEFAULT: {"write": 1e9, "read": 2e9}, FAST: {"write": 1.2e9, "read": 2.4e9}}


@pytest.fixture
def given(tmp_path: Path) -> Namespace:
    return tune.parse(["--folder", str(tmp_path), "--explain"])


def outcome(best: Settings, *ratios: float, challenger: Settings = FAST, baseline: Settings = DEFAULT) -> Outcome:
    final = Duel(challenger, ratios, 0.02) if ratios else None
    rates = {FAST: RATES[FAST], baseline: RATES[DEFAULT]}
    return Outcome(best, baseline, challenger, final, FEW, rates, {DEFAULT: 5, FAST: 7}, {}, True)


def result(given: Namespace, *outcomes: Outcome, seconds: float = 41.2) -> TuneResult:
    names = (["/mnt/a"], ["/mnt/b"])
    return TuneResult(
        given, [Tuned(*each, seconds, 400 * MIB) for each in zip(names, [DEVICE] * 2, outcomes, strict=False)]
    )


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (
            outcome(FAST, 1.2, 1.21, 1.19),
            ["/mnt/a: ext4 on nvme made up 1 TiB\n", " best 8 MiB x 16, 1 lane write 1.20 GB/s read 2.40 GB/s\n",
             " default 1 MiB x 128, 1 lane write 1.00 GB/s read 2.00 GB/s\n",
             " 8 MiB x 16, 1 lane: 1.200 of the default's rate, +- 0.020, in 3 rounds\n", " 12 passes in 41 s\n"],
        ),
        (outcome(DEFAULT, 1.1, 0.9, 1.05), [" best (default) ", " challenger 8 MiB x 16, 1 lane ", "inside the noise"]),
        (outcome(DEFAULT, 0.9, 0.9, 0.9), [": not faster, so the default stays\n"]),
        (outcome(DEFAULT, challenger=DEFAULT), [" nothing is faster than the default by more than 1 %"]),
        (outcome(FAST), [" not confirmed: no time was left", "why: too little was measured"]),
        (outcome(FAST, 1.2, 1.2, 1.2, baseline=NEAREST), [" nearest to the default 1 MiB x 16, 1 lane "]),
    ],
)  # fmt: skip
def test_the_result_says_what_is_best_and_why(given: Namespace, found: Outcome, words: list[str]) -> None:
    text = re.sub(" +", " ", tune.text(result(given, found)))
    assert [each for each in words if each not in text] == []
    section = text.rpartition("\n\n")[2]
    assert json.loads(section) == {"aio": found.best.as_json()}
    assert list(json.loads(section)["aio"]) == KEYS


def test_explain_shows_how_flat_the_optimum_is(given: Namespace) -> None:
    for kind, words in (("flat", "a flat optimum"), ("cliffs", "a narrow optimum")):
        found = MadeUpDevice(kind, 1, noise=0.01).search().find()
        text = tune.text(result(given, found))
        assert words in text
        assert [axis.name for axis in found.axes if axis.name not in text] == []
        assert text.count("the best ") >= len(found.axes)
        assert "+- 0.0" in text


def test_the_document_has_each_device_and_what_is_best_for_all(given: Namespace) -> None:
    document = json.loads(json.dumps(tune.as_document(result(given, outcome(FAST, 1.2, 1.21, 1.19), outcome(FAST)))))
    assert document["aio"] == FAST.as_json()
    device = document["devices"][0]
    assert (device["rounds"], device["ratio"], device["challenger"]) == ([1.2, 1.21, 1.19], 1.2, FAST.as_json())
    assert device["bytes_per_second"] == {"best": RATES[FAST], "default": RATES[DEFAULT]}
    assert result(given, outcome(FAST), outcome(NEAREST)).best == DEFAULT, "they differ"


THOROUGH: dict[str, Any] = {
    "bytes_per_second": {"best": {"read": 2e9, "write": 1e9}}, "from_page_cache": 0.0, "complete": True,
    "seconds": 45.0,
}  # fmt: skip


def test_a_worse_founded_result_is_no_reason_to_give_up_a_better_one() -> None:
    changes: dict[str, dict[str, Any]] = {
        "this run took 1 s, that one 45 s": {"seconds": 1.0},
        "the final of this run was cut short": {"complete": False},
        "this run read from the page cache": {"from_page_cache": 1.0},
        "this run left out writes": {"bytes_per_second": {"best": {"read": 3e9}}},
    }
    for words, change in changes.items():
        worse = {**THOROUGH, **change}
        assert words in tune.why_keep(THOROUGH, worse)
        assert tune.why_keep(worse, THOROUGH) == tune.why_keep(worse, worse) == ""
    assert tune.why_keep(THOROUGH, {**THOROUGH, "seconds": 16.0}) == ""


def test_the_better_founded_result_is_kept(
    given: Namespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def kept() -> dict[str, Any]:
        return store.load(DEVICE)["aio"]

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    tune._keep(result(given, outcome(DEFAULT), seconds=45))
    tune._keep(result(given, outcome(FAST), seconds=1))
    assert kept() == DEFAULT.as_json()
    assert "this run took 1 s, that one 45 s; --replace keeps this one" in capsys.readouterr().err
    given.replace = True
    tune._keep(result(given, outcome(FAST), seconds=1))
    assert kept() == FAST.as_json()


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder of its own; its parent holds the cache."""
    (tmp_path / "place").mkdir()
    return tmp_path / "place"


def run(place: Path, *words: str, cache: str = "") -> subprocess.CompletedProcess[str]:
    """A short run; nothing is left of it."""
    variables = {
        "TORCH_EXTENSIONS_DIR": str(default_root().parent),  # not with the cache: the op would be compiled anew
        "XDG_CACHE_HOME": cache or str(place.parent / "cache"),
    }
    done = prepared.run("-m", "nvme_ops.measure.tune", "--folder", str(place), *QUICK, *words, environment=variables)
    assert list(place.iterdir()) == []
    assert done.returncode == 0, done.stderr
    return done


def test_a_run_keeps_tells_and_logs_what_it_found(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With all flags that only add to what is said."""
    parent = place.parent
    flags = ("--explain", "--verbose", "--output", str(parent / "aio.json"), "--log_dir", str(parent / "a" / "b"))
    done = run(place, *flags)
    document = json.loads((parent / "aio.json").read_text())
    (device,), section = document["devices"], document["aio"]
    assert (device["nvme_dir"], device["aio"]) == ([str(place)], section)
    assert set(device["bytes_per_second"]["default"]) == {"read", "write"}
    text, brace, printed = done.stdout.partition("{\n")
    assert text.startswith(str(place))
    assert "GB/s" in text
    assert "why: " in text  # on a busy machine a second is too short to say more
    assert json.loads(brace + printed) == {"aio": section}

    log = (parent / "a" / "b" / "passes.jsonl").read_text().splitlines()
    assert len(log) == len([line for line in done.stderr.splitlines() if "GB/s" in line]) == device["passes"] > 0
    for line in map(json.loads, log):
        assert (line["nvme_dir"], set(line["aio"]), line["bytes"]) == (str(place), set(KEYS), 32 << 20)
        assert min(line["read"], line["write"]) > 0

    assert f"kept for aio_handle.tuned in {parent}/cache/nvme_ops/tune/" in done.stderr
    monkeypatch.setenv("XDG_CACHE_HOME", str(parent / "cache"))
    for handle in (aio_handle(**section), aio_handle.tuned(place)):
        assert [getattr(handle, f"get_{name}")() for name in KEYS] == list(section.values())
    round_trip(handle, parent / "file", 100_000)
    if importlib.util.find_spec("deepspeed"):
        taken = importlib.import_module("deepspeed.runtime.swap_tensor.aio_config").get_aio_config(document)
        assert {name: taken[name] for name in KEYS} == section


def test_json_on_standard_output_is_alone_there(place: Path) -> None:
    document = json.loads(run(place, "--json", "--no_store", "--no_read").stdout)
    assert list(document["aio"]) == KEYS
    assert list(document["devices"][0]["bytes_per_second"]["best"]) == ["write"]
    assert not (place.parent / "cache").exists()


def test_ctrl_c_prints_the_best_so_far_and_keeps_nothing(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    passes, measure = [], Passes.measure

    def interrupted(*given: Any) -> dict[str, float]:
        passes.append(given)
        if len(passes) == 3:
            raise KeyboardInterrupt
        return measure(*given)

    monkeypatch.setattr(stop, "leave_on_signals", lambda: None)
    monkeypatch.setattr(Passes, "measure", interrupted)
    monkeypatch.setenv("XDG_CACHE_HOME", str(place.parent / "cache"))
    assert tune.main(["--folder", str(place), *QUICK, "--seconds", "600"]) == 130
    out, errors = capsys.readouterr()
    assert '"aio": {' in out
    assert "interrupted; the files are removed" in errors
    assert list(place.iterdir()) == []
    assert not (place.parent / "cache").exists()


def test_a_sweep_configuration_is_kept_to_and_an_unwritable_cache_warns(place: Path) -> None:
    config, logs = place.parent / "sweep.json", place.parent / "logs"
    config.write_text(json.dumps({"block_size": ["64K", 262144], "queue_depth": [2], "io_parallel": [2]}))
    words = ["--sweep_config", str(config), "--log_dir", str(logs), "--loops", "2"]
    done = run(place, *words, cache="/proc/nothing")
    assert '"queue_depth": 2' in done.stdout
    assert "warning: not kept for aio_handle.tuned" in done.stderr
    tried = [json.loads(line)["aio"] for line in (logs / "passes.jsonl").read_text().splitlines()]
    assert {each["block_size"] for each in tried} <= {65536, 262144}
    assert {each["intra_op_parallelism"] for each in tried} == {2}


@pytest.mark.alone
def test_devices_are_tuned_each_by_itself_and_once(place: Path) -> None:
    if os.stat(place).st_dev == os.stat("/dev/shm").st_dev or not os.access("/dev/shm", os.W_OK):
        pytest.skip("there is no second file system here")
    other = place.parent / "other"
    other.mkdir()
    before = sorted(os.listdir("/dev/shm"))
    document = json.loads(run(place, "--folder", "/dev/shm", str(other), "--json").stdout)
    assert [device["nvme_dir"] for device in document["devices"]] == [[str(place), str(other)], ["/dev/shm"]]
    assert len(list((place.parent / "cache" / "nvme_ops" / "tune").iterdir())) == 2
    assert [name for name in os.listdir("/dev/shm") if name.startswith("nvme_ops-") and name not in before] == []


@pytest.mark.gpu
@pytest.mark.parametrize("flag", ["--gpu", "--gds"])
def test_memory_of_a_gpu_is_tuned(place: Path, flag: str) -> None:
    if not (torch.cuda.is_available() and (flag == "--gpu" or gds.is_ready())):
        pytest.skip("torch.cuda is not available, or cuFile cannot work here")
    identity = json.loads(run(place, flag, "--json").stdout)["devices"][0]["identity"]
    assert (identity["way"], bool(identity["gpu"])) == (flag[2:], True)


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
    monkeypatch.setattr(search, "make_cold", lambda path: Path(path).read_bytes())
    words = ["--nvme_dir", str(place), "--io_size", "32M", "--seconds", "0.5", "--no_write", "--verbose"]
    said: list[str] = []
    found = tune.tune(tune.parse([*words, "--log_dir", str(place / "log")]), said.append)
    lines = (place / "log" / "passes.jsonl").read_text().splitlines()
    shares = [json.loads(line)["from_page_cache"] for line in lines]
    shares.append(tune.as_document(found)["devices"][0]["from_page_cache"])
    assert {each and round(each, 2) for each in shares} == {share}  # the kernel may have dropped a few pages
    assert ("  100 % of what was read lay in the page cache" in tune.text(found)) == (share == 1)
    assert any("(100 % from the page cache)" in line for line in said) == (share == 1)
