"""Every flag of nvme-bench: its default, what it changes, and what is refused, with status 2 and words that help."""

from __future__ import annotations

import contextlib
import io
import itertools
import re
import sys
import tempfile
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nvme_ops.measure import bench
from nvme_ops.measure.bench import Workplace
from nvme_ops.measure.engines import ENGINES
from nvme_ops.settings import Settings
from nvme_ops.text import GIB, KIB, MIB
from tests import prepared

ANYWHERE = tempfile.gettempdir()
DEFAULT = Settings(MIB, 128, single_submit=False, overlap_events=True, intra_op_parallelism=1)


def parse(*words: str, folder: str = ANYWHERE) -> Namespace:
    return bench.parse(["--folder", folder, *words])


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """A made-up machine: torch says that there are two."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)


def changed(found: Namespace) -> dict[str, Any]:
    """What differs from the defaults, of all that follows from the flags."""
    usual = vars(parse())
    return {name: value for name, value in vars(found).items() if usual[name] != value and name != "words"}


def test_the_defaults_are_ds_io_s_but_for_the_depth() -> None:
    expected = {
        "places": [Workplace(ANYWHERE, 0)], "size": GIB, "write": True, "engines": ["aio_handle"],
        "settings": [DEFAULT], "swept": [], "loops": 3, "warmup_loops": 1, "validate": False, "gpu": False,
        "use_gds": False, "slow_bounce_buffer": False, "cached": False, "pageable": False, "different_files": False,
        "reference": True, "scaling": False, "json": False, "output": [], "files": 1, "words": ["--folder", ANYWHERE],
    }  # fmt: skip
    assert expected.items() <= vars(parse()).items()


@pytest.mark.parametrize(
    ("words", "changes"),
    [
        (["--engine", "torch", "fio", "torch"], {"engines": ["torch", "fio"]}),
        (["--io_size", "400M"], {"size": 400 * MIB}),
        (["--read"], {"write": False}),
        (
            ["--multi_process", "3"],
            {"multi_process": 3, "places": [Workplace(ANYWHERE, number) for number in range(3)]},
        ),
        (["--loops", "7"], {"loops": 7}),
        (["--warmup_loops", "0"], {"warmup_loops": 0}),
        (["--validate"], {"validate": True}),
        (["--different_file_each_iteration"], {"files": 4, "different_files": True}),
        (["--read", "--cached"], {"write": False, "cached": True}),
        (["--block_size", "64K"], {"block_size": 64 * KIB, "settings": [replace(DEFAULT, block_size=64 * KIB)]}),
        (["--queue_depth", "4"], {"queue_depth": 4, "settings": [replace(DEFAULT, queue_depth=4)]}),
        (["--single_submit"], {"single_submit": True, "settings": [replace(DEFAULT, single_submit=True)]}),
        (
            ["--sequential_requests"],
            {"sequential_requests": True, "settings": [replace(DEFAULT, overlap_events=False)]},
        ),
        (["--io_parallel", "8"], {"io_parallel": 8, "settings": [replace(DEFAULT, intra_op_parallelism=8)]}),
        (["--pageable"], {"pageable": True}),
        (["--no_reference"], {"reference": False}),
        (["--json", "--output", "a.json", "--output", "b.csv"], {"json": True, "output": ["a.json", "b.csv"]}),
    ],
    ids=" ".join,
)
def test_a_flag_changes_this_and_nothing_else(words: list[str], changes: dict[str, Any]) -> None:
    assert changed(parse(*words)) == changes


@pytest.mark.parametrize("flags", [["--gpu"], ["--gpu", "--use_gds"], ["--gpu", "--slow_bounce_buffer"]], ids=" ".join)
@pytest.mark.usefixtures("two_gpus")
def test_the_flags_about_gpus(flags: list[str]) -> None:
    more = {flag.strip("-"): True for flag in flags}
    assert changed(parse(*flags)) == {"device": "cuda", **more}


def test_plot_names_a_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    assert parse("--output", str(tmp_path / "a.png")).output == [str(tmp_path / "a.png")]


def test_engine_all_leaves_out_those_for_gpus_where_none_is_asked_for() -> None:
    assert parse("--engine", "all").engines == [name for name, engine in ENGINES.items() if not engine.gpu_only]
    assert {"gds_handle", "gdsio"}.isdisjoint(parse("--engine", "all").engines)
    assert parse("--engine", "gds_handle").engines == ["gds_handle"]  # by its name it is taken, and says why it cannot


@pytest.mark.usefixtures("two_gpus")
def test_engine_all_with_gpu_is_all() -> None:
    assert parse("--engine", "all", "--gpu").engines == list(ENGINES)


@pytest.mark.usefixtures("two_gpus")
def test_processes_take_the_gpus_in_turn() -> None:
    assert [place.device for place in parse("--multi_process", "3", "--gpu").places] == [0, 1, 0]


def test_every_iteration_has_a_file_of_its_own_when_asked_for() -> None:
    assert parse("--loops", "4", "--warmup_loops", "2").files == 1
    assert parse("--loops", "4", "--warmup_loops", "2", "--different_file_each_iteration").files == 6


def test_folders_are_mapped_to_devices(tmp_path: Path) -> None:
    folders = [tmp_path / "a", tmp_path / "b:c"]  # only the last colon separates
    for folder in folders:
        folder.mkdir()
    first, second = f"{folders[0]}:0", f"{folders[1]}:15"
    expected = [Workplace(str(folders[0]), 0), Workplace(str(folders[1]), 15)]
    assert bench.parse(["--folder_to_device_mapping", first, second]).places == expected
    twice = ["--folder_to_device_mapping", first, "--folder_to_device_mapping", second, "--multi_process", "2"]
    assert bench.parse(twice).places == expected


SWEEPABLE: dict[str, tuple[str, dict[str, object]]] = {
    "block_size": ("block_size", {"64K": 64 * KIB, "1M": MIB, "8M": 8 * MIB}),
    "queue_depth": ("queue_depth", {"1": 1, "32": 32, "128": 128}),
    "io_parallel": ("intra_op_parallelism", {"1": 1, "2": 2}),
    "single_submit": ("single_submit", {"0": False, "1": True, "true": True, "False": False}),
    "sequential_requests": ("overlap_events", {"0": True, "TRUE": False}),
}


@given(st.fixed_dictionaries({}, optional={
    name: st.lists(st.sampled_from(list(values)), min_size=1, max_size=3) for name, (_, values) in SWEEPABLE.items()
}))  # fmt: skip
def test_a_sweep_is_all_combinations(axes: dict[str, list[str]]) -> None:
    entries = [f"{name}={','.join(values)}" for name, values in axes.items()]
    fields = [SWEEPABLE[name][0] for name in axes]
    combinations = itertools.product(*([SWEEPABLE[name][1][text] for text in texts] for name, texts in axes.items()))
    changes: list[dict[str, Any]] = [dict(zip(fields, each, strict=True)) for each in combinations]
    expected = [replace(DEFAULT, **each) for each in changes]
    found = parse("--sweep", *entries) if entries else parse()
    assert found.settings == list(dict.fromkeys(expected))
    assert found.swept == fields


def test_a_sweep_starts_from_the_other_flags() -> None:
    found = parse("--sweep", "queue_depth=1,2", "--block_size", "8K", "--single_submit")
    assert found.settings == [replace(DEFAULT, block_size=8192, single_submit=True, queue_depth=n) for n in (1, 2)]


def outcome(words: Sequence[str]) -> tuple[object, str]:
    """The status that ``words`` end with, 0 where they are taken, and what is said."""
    errors = io.StringIO()
    with contextlib.redirect_stderr(errors):
        try:
            bench.parse(words)
        except SystemExit as stopped:
            return stopped.code, " ".join(errors.getvalue().partition("nvme-bench: error: ")[2].split())
    return 0, ""


def refusal(*words: str) -> str:
    """What is said of wrong arguments."""
    status, said = outcome(words)
    assert status == 2
    return said


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--engine", "posix"], "--engine posix: there are aio_handle, gds_handle, torch, .*fio, gdsio, and all"),
        (["--io_size", "0"], "--io_size: '0' is not a size; examples: 512M, 2GiB"),
        (["--io_size", "-1"], "--io_size"),
        (["--io_size", "big"], "--io_size: 'big' is not a size"),
        (["--block_size", "0"], "--block_size: '0' is not a size"),
        (["--queue_depth", "0"], "--queue_depth: '0' is not a number of at least 1"),
        (["--io_parallel", "0"], "--io_parallel: '0' is not a number of at least 1"),
        (["--multi_process", "0"], "--multi_process: '0' is not a number of at least 1"),
        (["--loops", "0"], "--loops: '0' is not a number of at least 1"),
        (["--warmup_loops", "-1"], "--warmup_loops: '-1' is not a number of at least 0"),
        (["--cached"], "--cached goes with --read"),
        (["--use_gds"], "--use_gds goes with --device cuda"),
        (["--slow_bounce_buffer"], "--slow_bounce_buffer goes with --device cuda"),
        (["--gpu"], "--device cuda: torch.cuda is not available"),
        (["--scaling"], "--scaling needs several folders: --folder_to_device_mapping"),
        (["--sweep"], "--sweep: expected at least one argument"),
        (["--sweep", "block_size"], "--sweep block_size: not NAME=VALUE,...; names are block_size, queue_depth"),
        (["--sweep", "blocks=1M"], "--sweep blocks=1M: not NAME=VALUE,...; names are block_size"),
        (["--sweep", "block_size=1M,0"], "--sweep block_size: '0' is not a size"),
        (["--sweep", "queue_depth=1,,2"], "--sweep queue_depth: '' is not a number of at least 1"),
        (["--sweep", "single_submit=maybe"], "--sweep single_submit: 'maybe' is neither true nor false"),
        (["--output", "none/such.json"], "--output none/such.json: its folder does not exist"),
        (["--output", ANYWHERE], "--output .*: a folder"),
        (["--folder_to_device_mapping", "/:0"], "not allowed with argument --folder"),
        (["--bloc", "1M"], "unrecognized arguments: --bloc 1M"),
        (["explain"], "unrecognized arguments: explain"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
@pytest.mark.usefixtures("no_gpu")
def test_wrong_flags_are_refused(words: list[str], said: str) -> None:
    assert re.search(said, refusal("--folder", ANYWHERE, *words))


def test_a_folder_is_needed() -> None:
    assert "one of the arguments --folder --folder_to_device_mapping is required" in refusal()


def test_a_folder_that_is_missing_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path / "none", tmp_path / "file"):
        assert f"{path}: no such folder" in refusal("--folder", str(path))
        assert f"{path}: no such folder" in refusal("--folder_to_device_mapping", f"{tmp_path}:0", f"{path}:1")


@pytest.mark.parametrize("entry", [ANYWHERE, f"{ANYWHERE}:", f"{ANYWHERE}:first", f"{ANYWHERE}:-1"])
def test_a_mapping_without_a_number_is_refused(entry: str) -> None:
    assert f"--folder_to_device_mapping {entry}: not FOLDER:NUMBER" in refusal("--folder_to_device_mapping", entry)


def test_a_mapping_has_one_process_for_each_folder() -> None:
    said = refusal("--folder_to_device_mapping", f"{ANYWHERE}:0", "--multi_process", "2")
    assert "--folder_to_device_mapping has one process for each folder" in said


def test_sweep_and_scaling_exclude_each_other(tmp_path: Path) -> None:
    words = ["--folder_to_device_mapping", f"{tmp_path}:0", f"{ANYWHERE}:1", "--scaling", "--sweep", "queue_depth=1,2"]
    assert "--sweep and --scaling are two runs" in refusal(*words)


@pytest.mark.usefixtures("two_gpus")
def test_a_gpu_that_is_not_there_is_said() -> None:
    said = refusal("--folder_to_device_mapping", f"{ANYWHERE}:2", "--gpu")
    assert said == f"GPU 2 of {ANYWHERE}: there are 2, from 0 on"
    assert "--pageable is about CPU memory" in refusal("--folder", ANYWHERE, "--gpu", "--pageable")


def test_plot_without_matplotlib_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.backend_bases", None)
    said = refusal("--folder", ANYWHERE, "--output", "a.png")
    assert said == "--output a.png: a picture needs matplotlib: pip install matplotlib"


@pytest.mark.parametrize("file", ["a.foo", "-", ANYWHERE])
def test_what_cannot_be_a_picture_is_said_before_anything_is_measured(file: str) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    assert "--output" in refusal("--folder", ANYWHERE, "--output", file)


def test_a_setting_is_swept_only_once() -> None:
    assert "block_size" in refusal("--folder", ANYWHERE, "--sweep", "block_size=1M", "block_size=2M")


@given(st.sampled_from(["--sweep", "--io_size", "--queue_depth", "--folder_to_device_mapping", "--engine"]), st.text())
def test_whatever_is_written_is_understood_or_refused(flag: str, text: str) -> None:
    place = [] if flag == "--folder_to_device_mapping" else ["--folder", ANYWHERE]
    assert outcome([*place, f"{flag}={text}"])[0] in (0, 2)


def test_help_names_every_engine_flag_and_setting(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        bench.parse(["--help"])
    assert stopped.value.code == 0
    said = " ".join(capsys.readouterr().out.split())
    assert [name for name, engine in ENGINES.items() if f"{name} {engine.words}" not in said] == []
    assert [name for name in SWEEPABLE if name not in said] == []
    assert [flag for action in bench.parser()._actions for flag in action.option_strings if flag not in said] == []


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--folder", ANYWHERE, "--engine", "posix"], "--engine posix: there are aio_handle"),
        (["--folder", "none/such", "--read"], "none/such: no such folder"),
        (["--folder", ANYWHERE, "--gpu"], "--device cuda: torch.cuda is not available"),
    ],
    ids=["engine", "folder", "gpu"],
)
def test_the_command_ends_with_status_2(words: list[str], said: str) -> None:
    if "--gpu" in words and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    done = prepared.run("-m", "nvme_ops.bench", *words)
    assert (done.returncode, done.stdout) == (2, "")
    assert said in done.stderr
    assert "Traceback" not in done.stderr
