"""benchmarks/inference.py: its model, its arguments, a run of a small model, and what it says of other tokens."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import inference, inference_rows
from benchmarks.inference_rows import MEMORY, Contender, Work
from nvme_ops.bench.measure import Row, Sample, Unavailable, WrongData
from nvme_ops.measuring.files import NotUsable
from nvme_ops.text import GIB, MIB
from tests.conftest import refusal

SMALL = ["--size", "8M", "--budget", "4M", "--batch", "2", "--steps", "2", "--rounds", "1"]


@pytest.mark.parametrize("size", [8 * MIB, 1200 * MIB, 6 * GIB])
def test_a_model_has_about_the_size_asked_for(size: int) -> None:
    shape = inference.config(size)
    matrices = 4 * shape["hidden_size"] ** 2 + 3 * shape["hidden_size"] * shape["intermediate_size"]
    found = 2 * (shape["num_hidden_layers"] * matrices + 2 * shape["vocab_size"] * shape["hidden_size"])
    assert abs(found - size) < 0.1 * size
    if size == 1200 * MIB:
        assert shape["num_hidden_layers"] == 12


def small_run(folder: Path, *words: str) -> tuple[int, list[dict[str, Any]], dict[str, Any]]:
    status = inference.main(["--path", str(folder), *SMALL, "--json", str(folder / "found.json"), *words])
    found = json.loads((folder / "found.json").read_text())["folders"][str(folder)]
    (table,) = found["tables"]
    return status, table["rows"], found


@pytest.mark.slow
def test_a_small_run(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    picture = folder / "found.png"
    with_plot = ["--plot", str(picture)] if importlib.util.find_spec("matplotlib") else []
    status, rows, found = small_run(folder, "--only", "memory", "nvme_ops", *with_plot)
    assert status == 0
    (model,) = [path for path in folder.iterdir() if path.is_dir()]
    assert sorted(path.name for path in model.iterdir()) == ["config.json", "model.safetensors"]
    decoded = [row for row in rows if not row["name"].startswith("fio ")]
    assert [row["name"] for row in decoded] == [
        MEMORY,
        "nvme_ops from_pretrained, 4 MiB",
        "nvme_ops stream_weights, 4 MiB",
    ]
    for row in decoded:
        assert (row["wrong"], row["note"], len(row["values"])) == (False, "", 1)
        assert {"step", "first token", "load"} < set(row["columns"])
        processes = found["processes"]["2"][row["name"]]
        assert [len(each["steps"]) for each in processes] == [2]
        assert len(processes[0]["tokens"]) == 4  # of the prompt, of the step that is not timed, and of those that are
    assert found["processes"]["2"][decoded[1]["name"]][0]["stats"]["peak_bytes"] <= 4 * MIB
    text = capsys.readouterr().out
    assert "8 MiB of weights, batch 2" in text.replace(".0", "")
    if with_plot:
        assert 0 < picture.stat().st_size < 200 << 10


def test_a_model_is_made_once(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    model = Path(inference.model_folder(str(tmp_path), 8 * MIB))
    made = (model / "model.safetensors").stat().st_mtime_ns
    assert inference.model_folder(str(tmp_path), 8 * MIB) == str(model)
    assert (model / "model.safetensors").stat().st_mtime_ns == made
    (model / "config.json").write_text("{}")
    assert inference.model_folder(str(tmp_path), 8 * MIB) == str(model)
    assert (model / "model.safetensors").stat().st_mtime_ns != made


@pytest.mark.slow
@pytest.mark.parametrize(
    ("group", "package"), [("mapped", "transformers"), ("accelerate", "accelerate"), ("deepspeed", "deepspeed")]
)
def test_peers_find_the_same_tokens(group: str, package: str, folder: Path) -> None:
    pytest.importorskip("transformers")
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    status, rows, _ = small_run(folder, "--only", group)
    assert status == 0
    assert not any(row["wrong"] for row in rows)
    assert [row["note"] for row in rows if not row["name"].startswith("fio ")] == [""] * (len(rows) - 1)


def decoded(monkeypatch: pytest.MonkeyPatch, folder: Path, tokens: list[list[int]]) -> Sample:
    said = {"tokens": tokens, "steps": [0.5], "first_token": 2.0, "load": 1.0, "bytes_read": 8, "peak_bytes": 9,
            "decoding_bytes": 7}  # fmt: skip
    monkeypatch.setattr(inference_rows.command, "in_new_process", lambda *_, **__: json.dumps(said))
    work = Work("none", str(folder), 1, 1, 8, warm=False, expected=[[1], [2]])
    return work.decode(Contender("it", "accelerate", "dispatch"))


def test_other_tokens_are_wrong_data(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    assert decoded(monkeypatch, tmp_path, [[1], [2]]).peak_bytes == 9
    with pytest.raises(WrongData, match="first in step 1"):
        decoded(monkeypatch, tmp_path, [[1], [3]])


def test_what_is_not_installed_is_said(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    work = Work("none", str(tmp_path), 1, 1, 8, warm=False)
    with pytest.raises(Unavailable, match=r"^not installed: pip install none_such$"):
        work.decode(Contender("it", "accelerate", "dispatch", 0, "none_such"))


def test_the_bound_is_the_longer_of_computing_and_reading() -> None:
    def row(name: str, seconds: float, read: float) -> Row:
        sample = Sample(seconds, 1, figures={"read per step": read})
        return Row(name, lambda: sample, samples=[sample, None])

    reads, computes = row("it", 4.0, 300.0), row("other", 4.0, 30.0)
    inference_rows.add_bounds([row(MEMORY, 1.0, 0), reads, computes, row("fio best", 1.0, 100)])
    found = [each.samples[0].figures["of the bound"] for each in (reads, computes) if each.samples[0]]
    assert found == [0.75, 0.25]


@pytest.mark.parametrize("words", [["--batch", "0"], ["--budget", "much"], ["--steps", "x"], ["--only", "none"]])
def test_wrong_arguments_are_refused(words: list[str]) -> None:
    status, _ = refusal(inference.main, words)
    assert status == 2


def test_a_folder_without_room_for_the_model_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    with pytest.raises(NotUsable, match="free space are needed"):
        inference.model_folder(str(tmp_path), 1 << 60)
    assert list(tmp_path.iterdir()) == []
