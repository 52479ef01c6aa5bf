"""Every flag of ``nvme-tune`` and of its sweep configuration, right and wrong."""

from __future__ import annotations

import json
import os
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch

from nvme_ops.text import KIB, MIB
from nvme_ops.tune import options


def parsed(folder: Path, *words: str) -> Namespace:
    return options.parse(["--nvme_dir", str(folder), *words])


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The message of status 2."""
    with pytest.raises(SystemExit) as ended:
        options.parse(words)
    assert ended.value.code == 2
    message = capsys.readouterr().err.splitlines()[-1]
    assert message.startswith("nvme-tune: error: ")
    return message


def values(found: Namespace, name: str) -> list[Any]:
    return list(next(axis.values for axis in found.axes if axis.name == name))


def sweep(folder: Path, document: object) -> str:
    path = folder / "sweep.json"
    path.write_text(document if isinstance(document, str) else json.dumps(document))
    return str(path)


def test_the_defaults_are_those_of_ds_nvme_tune(tmp_path: Path) -> None:
    found = parsed(tmp_path)
    assert found.nvme_dir == [str(tmp_path)]
    assert found.io_size == 400 * MIB
    assert found.directions == ["write", "read"]
    assert (found.loops, found.way, found.flush_page_cache, found.log_dir, found.verbose) == (
        1,
        "cpu",
        False,
        None,
        False,
    )
    assert (found.seconds, found.explain, found.json, found.no_store) == (16.0, False, None, False)


def test_several_folders_come_in_one_flag_or_in_several(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in "abc"]
    for folder in folders:
        folder.mkdir()
    a, b, c = map(str, folders)
    assert options.parse(["--nvme_dir", a, b, "--nvme_dir", c, a]).nvme_dir == [a, b, c]


@pytest.mark.parametrize(("flag", "left"), [("--no_read", ["write"]), ("--no_write", ["read"])])
def test_one_direction_may_be_left_out(tmp_path: Path, flag: str, left: list[str]) -> None:
    assert parsed(tmp_path, flag).directions == left


def test_the_rest_is_taken_as_given(tmp_path: Path) -> None:
    found = parsed(tmp_path, "--io_size", "64M", "--loops", "3", "--seconds", "2.5", "--log_dir", "logs", "--verbose",
                   "--explain", "--json", "-", "--no_store")  # fmt: skip
    assert (found.io_size, found.loops, found.seconds, found.log_dir) == (64 * MIB, 3, 2.5, "logs")
    assert (found.verbose, found.explain, found.json, found.no_store) == (True, True, "-", True)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--io_size", "0"], "--io_size: '0' is not a size"),
        (["--io_size", "much"], "--io_size: 'much' is not a size"),
        (["--io_size", "31M"], "--io_size 31 MiB: a pass of less than 32 MiB mostly measures how it begins and ends"),
        (["--no_store", "--replace"], "--replace with --no_store"),
        (["--loops", "0"], "--loops: '0' is not a number of at least 1"),
        (["--loops", "x"], "--loops: 'x' is not"),
        (["--seconds", "0"], "--seconds: 0 is not a number of seconds above 0"),
        (["--seconds", "-1"], "--seconds"),
        (["--seconds", "nan"], "--seconds: nan is not"),
        (["--seconds", "inf"], "--seconds: inf is not"),
        (["--seconds", "x"], "--seconds: invalid float value: 'x'"),
        (["--no_read", "--no_write"], "leave nothing to measure"),
        (["--json", "/no/such/folder/file"], "--json /no/such/folder/file: its folder does not exist"),
        (["--sweep_config", "/no/such/file"], "--sweep_config /no/such/file: No such file or directory"),
        (["--verb"], "--verb"),  # no abbreviations: they break when a flag is added
        (["--no_such_flag"], "--no_such_flag"),
    ],
)
def test_a_wrong_flag_ends_with_status_2_and_its_name(
    tmp_path: Path, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert message in refused(capsys, "--nvme_dir", str(tmp_path), *words)


def test_a_folder_is_needed_and_must_exist(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "--nvme_dir" in refused(capsys)
    assert "--nvme_dir" in refused(capsys, "--nvme_dir")
    assert "/no/such: no such folder" in refused(capsys, "--nvme_dir", str(tmp_path), "/no/such")
    (tmp_path / "file").touch()
    assert "file: no such folder" in refused(capsys, "--nvme_dir", str(tmp_path / "file"))


@pytest.mark.parametrize("flags", [["--gpu"], ["--gds"], ["--gpu", "--gds"]])
def test_a_gpu_that_is_not_there_is_said(
    tmp_path: Path, flags: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    message = refused(capsys, "--nvme_dir", str(tmp_path), *flags)
    assert f"{flags[-1]}: torch.cuda is not available: no GPU, or torch without CUDA" in message


def test_gds_needs_cufile(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def no_cufile() -> None:
        raise RuntimeError("cuFile cannot work here")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr("nvme_ops.gds.gds_handle", no_cufile)
    assert "--gds: cuFile cannot work here" in refused(capsys, "--nvme_dir", str(tmp_path), "--gds")


@pytest.mark.parametrize(("flags", "way"), [(["--gpu"], "gpu"), (["--gds"], "gds"), (["--gpu", "--gds"], "gds")])
def test_gds_implies_the_gpu(tmp_path: Path, flags: list[str], way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr("nvme_ops.gds.gds_handle", lambda: None)
    assert parsed(tmp_path, *flags).way == way


def test_the_page_cache_may_be_flushed_by_root_only(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert "may be written by root only" in refused(capsys, "--nvme_dir", str(tmp_path), "--flush_page_cache")
    monkeypatch.setattr(os, "access", lambda *_: True)
    assert parsed(tmp_path, "--flush_page_cache").flush_page_cache


def test_a_sweep_configuration_of_ds_nvme_tune_restricts_the_search(tmp_path: Path) -> None:
    document = {
        "block_size": ["1M", "8M"],
        "queue_depth": [32, 128],
        "sequential_requests": [True, False],
        "single_submit": [False, True],
        "io_parallel": [1, 2, 4, 8],
    }
    found = parsed(tmp_path, "--sweep_config", sweep(tmp_path, document))
    assert values(found, "block_size") == [MIB, 8 * MIB]
    assert values(found, "queue_depth") == [32, 128]
    assert values(found, "overlap_events") == [False, True]
    assert values(found, "single_submit") == [False, True]
    assert values(found, "intra_op_parallelism") == [1, 2, 4, 8]


def test_sizes_may_be_numbers_and_come_in_any_order_and_twice(tmp_path: Path) -> None:
    found = parsed(tmp_path, "--sweep_config", sweep(tmp_path, {"block_size": ["1M", 65536, 1048576]}))
    assert values(found, "block_size") == [64 * KIB, MIB]


def test_what_the_configuration_leaves_out_keeps_its_default(tmp_path: Path) -> None:
    found = parsed(tmp_path, "--sweep_config", sweep(tmp_path, {"queue_depth": [8]}))
    assert [axis.name for axis in found.axes] == ["queue_depth"]


def test_sequential_requests_are_the_contrary_of_overlapped_events(tmp_path: Path) -> None:
    found = parsed(tmp_path, "--sweep_config", sweep(tmp_path, {"sequential_requests": [True]}))
    assert values(found, "overlap_events") == [False]


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ("{", "not JSON"),
        ([], "not an object with lists of values"),
        ({"blocksize": [1]}, "'blocksize' is none of block_size, queue_depth"),
        ({"overlap_events": [True]}, "'overlap_events' is none of"),
        ({"queue_depth": 32}, "queue_depth must be a list of values"),
        ({"queue_depth": []}, "queue_depth must be a list of values"),
        ({"queue_depth": [0]}, "queue_depth: 0 is not a whole number of at least 1"),
        ({"queue_depth": ["32"]}, "queue_depth: '32' is not a whole number"),
        ({"queue_depth": [True]}, "queue_depth: True is not a whole number"),
        ({"io_parallel": [1.5]}, "io_parallel: 1.5 is not a whole number"),
        ({"block_size": ["1X"]}, "block_size: '1X' is not a size"),
        ({"block_size": [-1]}, "block_size: -1 is not"),
        ({"single_submit": ["true"]}, "single_submit: 'true' is neither true nor false"),
        ({"sequential_requests": [1]}, "sequential_requests: 1 is neither true nor false"),
    ],
)
def test_a_wrong_configuration_ends_with_status_2_and_what_is_wrong(
    tmp_path: Path, document: object, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = sweep(tmp_path, document)
    said = refused(capsys, "--nvme_dir", str(tmp_path), "--sweep_config", path)
    assert path in said
    assert message in said


def test_a_configuration_that_is_no_text_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "sweep.json").write_bytes(b"\xff\xfe")
    said = refused(capsys, "--nvme_dir", str(tmp_path), "--sweep_config", str(tmp_path / "sweep.json"))
    assert "not JSON" in said


def test_help_names_every_flag_and_version_answers(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        options.parse(["--help"])
    text = capsys.readouterr().out
    for flag in ("nvme_dir", "sweep_config", "no_read", "no_write", "io_size", "gpu", "gds", "flush_page_cache",
                 "replace", "log_dir", "loops", "verbose", "seconds", "explain", "json", "no_store"):  # fmt: skip
        assert f"--{flag}" in text
    with pytest.raises(SystemExit):
        options.parse(["--version"])
    assert capsys.readouterr().out.startswith("nvme-tune ")


def test_the_page_explains_every_flag() -> None:
    page = (Path(__file__).parents[2] / "docs" / "tune.md").read_text(encoding="utf-8")
    flags = [word for action in options.parser()._actions for word in action.option_strings if word.startswith("--")]
    assert [flag for flag in flags if flag not in ("--help", "--version") and f"`{flag}" not in page] == []
