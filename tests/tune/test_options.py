"""Every flag of ``nvme-tune`` and of its sweep configuration, right and wrong."""

from __future__ import annotations

import json
import os
import re
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch

from nvme_ops.measure import tune as options
from nvme_ops.text import KIB, MIB


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


def sweep(folder: Path, document: object) -> str:
    path = folder / "sweep.json"
    text = document if isinstance(document, str | bytes) else json.dumps(document)
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return str(path)


DEFAULTS = {
    "io_size": 400 * MIB, "directions": ["write", "read"], "loops": 1, "way": "cpu", "flush_page_cache": False,
    "log_dir": None, "verbose": False, "seconds": 16.0, "explain": False, "json": False, "no_store": False,
}  # fmt: skip


@pytest.mark.parametrize(
    ("words", "changes"),
    [
        ([], {}),
        (["--no_read"], {"directions": ["write"]}),
        (["--no_write"], {"directions": ["read"]}),
        (["--io_size", "64M", "--loops", "3", "--seconds", "2.5"], {"io_size": 64 * MIB, "loops": 3, "seconds": 2.5}),
        (["--log_dir", "logs", "--json"], {"log_dir": "logs", "json": True}),
        (["--verbose", "--explain", "--no_store"], {"verbose": True, "explain": True, "no_store": True}),
        (["--gpu"], {"way": "gpu"}),
        (["--gds"], {"way": "gds"}),
        (["--gpu", "--gds"], {"way": "gds"}),
        (["--flush_page_cache"], {"flush_page_cache": True}),
    ],
)
def test_flags_change_the_defaults_of_ds_nvme_tune(
    tmp_path: Path, words: list[str], changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr("nvme_ops.measure.tune.gds_handle", lambda: None)
    monkeypatch.setattr(os, "access", lambda *_: True)
    found = vars(parsed(tmp_path, *words))
    assert {name: found[name] for name in DEFAULTS} == {**DEFAULTS, **changes}


def test_several_folders_come_in_one_flag_or_in_several(tmp_path: Path) -> None:
    a, b, c = (str(tmp_path / name) for name in "abc")
    for folder in (a, b, c):
        os.mkdir(folder)
    assert options.parse(["--nvme_dir", a, b, "--nvme_dir", c, a]).folder == [a, b, c]


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
        (["--output", "/no/such/folder/file.json"], "--output /no/such/folder/file.json: its folder does not exist"),
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
    assert "--folder" in refused(capsys)
    assert "--folder" in refused(capsys, "--nvme_dir")
    assert "/no/such: no such folder" in refused(capsys, "--nvme_dir", str(tmp_path), "/no/such")
    (tmp_path / "file").touch()
    assert "file: no such folder" in refused(capsys, "--nvme_dir", str(tmp_path / "file"))


def test_what_the_machine_lacks_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_cufile() -> None:
        raise RuntimeError("cuFile cannot work here")

    monkeypatch.setattr("nvme_ops.measure.tune.gds_handle", no_cufile)
    monkeypatch.setattr(os, "access", lambda *_: False)
    for gpu, flags, message in [
        (False, ["--gpu"], "--device cuda: torch.cuda is not available: no GPU, or torch without CUDA"),
        (False, ["--gpu", "--gds"], "--gds: torch.cuda is not available: no GPU, or torch without CUDA"),
        (True, ["--gds"], "--gds: cuFile cannot work here"),
        (True, ["--flush_page_cache"], "may be written by root only"),
    ]:
        monkeypatch.setattr(torch.cuda, "is_available", lambda gpu=gpu: gpu)
        assert message in refused(capsys, "--nvme_dir", str(tmp_path), *flags)


@pytest.mark.parametrize(
    ("document", "axes"),
    [
        ({"block_size": ["1M", 65536, 1048576]}, {"block_size": [64 * KIB, MIB]}),  # in any order, and twice
        ({"queue_depth": [32, 128]}, {"queue_depth": [32, 128]}),
        ({"sequential_requests": [True, False]}, {"overlap_events": [False, True]}),
        ({"sequential_requests": [True]}, {"overlap_events": [False]}),  # the contrary
        (
            {"single_submit": [False, True], "io_parallel": [1, 2, 8]},
            {"single_submit": [False, True], "intra_op_parallelism": [1, 2, 8]},
        ),
    ],
)
def test_a_sweep_configuration_of_ds_nvme_tune_restricts_the_search(
    tmp_path: Path, document: object, axes: dict[str, list[Any]]
) -> None:
    found = parsed(tmp_path, "--sweep_config", sweep(tmp_path, document)).axes
    assert {axis.name: list(axis.values) for axis in found} == axes


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ("{", "not JSON"),
        (b"\xff\xfe", "not JSON"),
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


def test_the_page_and_the_help_explain_every_flag(capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).parents[2] / "docs" / "tune.md").read_text(encoding="utf-8")
    for flag, shown in (("--help", "usage: nvme-tune"), ("--version", "nvme-tune ")):
        with pytest.raises(SystemExit):
            options.parse([flag])
        text = capsys.readouterr().out
        assert text.startswith(shown)
        if flag == "--help":
            flags = {word for word in re.findall(r"--\w+", text) if word not in ("--help", "--version")}
    assert len(flags) > 14
    assert [flag for flag in flags if f"`{flag}" not in page] == []
