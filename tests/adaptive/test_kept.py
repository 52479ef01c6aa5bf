"""What ``adaptive_handle`` keeps for the next program, and what it makes of a file that it did not write."""

from __future__ import annotations

import gc
import json
import re
import warnings
from pathlib import Path
from typing import Any

import pytest

from nvme_ops import adaptive_handle
from nvme_ops.adaptive import dictionary
from nvme_ops.adaptive.dictionary import SECTION
from tests.adaptive.conftest import MANY, only, write
from tests.conftest import MIB, round_trip, run_python


def test_what_is_learned_is_kept_for_the_next_program(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with adaptive_handle(folder) as handle:
        write(handle, folder)
        before = only(handle)
        assert not before.exploring
    assert handle.learned() == [before]  # also of one that is closed
    dictionary.forget()
    again = adaptive_handle(folder)
    known = only(again)
    assert (known.chosen, known.transfers) == (before.chosen, before.transfers)
    assert [tried.cost is None for tried in known.tools] == [tried.cost is None for tried in before.tools]
    write(again, folder, 1)
    assert not only(again).exploring


def test_the_usual_cost_is_kept_too(folder: Path, cache: Path) -> None:
    """It is known some uses after the class has settled, and kept by then."""
    for times in (17, 15):  # settled; with a usual cost, and before a changed one counts
        with adaptive_handle(folder) as handle:
            write(handle, folder, times)
    (path,) = cache.glob("*.json")
    document = json.loads(path.read_text())
    (entry,) = document["classes"]
    assert 0 < entry["usual"] < 100 * max(entry["costs"])
    del entry["usual"]  # as an earlier version wrote it
    path.write_text(json.dumps(document))
    dictionary.forget()
    assert only(adaptive_handle(folder)).transfers == entry["transfers"]


def test_a_handle_that_is_dropped_keeps_it_too(folder: Path, cache: Path) -> None:
    handle = adaptive_handle(folder)
    write(handle, folder)
    assert list(cache.glob("*")) == []
    del handle
    gc.collect()
    assert [path.name.endswith(f"-{SECTION}.json") for path in cache.iterdir()] == [True]


def test_the_end_of_the_program_keeps_it_too(folder: Path, cache: Path) -> None:
    run_python(f"""
        import torch, nvme_ops
        handle = nvme_ops.adaptive_handle({str(folder)!r})
        for _ in range({MANY}):
            handle.sync_pwrite(torch.zeros({2 * MIB}, dtype=torch.uint8), {str(folder / "file")!r}, 0)
    """)
    assert len(list(cache.glob(f"*-{SECTION}.json"))) == 1


@pytest.mark.parametrize("inherited", [False, True])
def test_the_end_of_a_process_of_multiprocessing_keeps_it_too(folder: Path, cache: Path, inherited: bool) -> None:
    run_python(f"""
        import multiprocessing, torch, nvme_ops
        def learn():
            global handle
            handle = handle or nvme_ops.adaptive_handle({str(folder)!r})
            for _ in range({MANY}):
                handle.sync_pwrite(torch.zeros({2 * MIB}, dtype=torch.uint8), {str(folder / "file")!r}, 0)
        handle = nvme_ops.adaptive_handle({str(folder)!r}) if {inherited} else None
        child = multiprocessing.get_context("fork").Process(target=learn)
        child.start()
        child.join()
        assert child.exitcode == 0
    """)
    assert len(list(cache.glob(f"*-{SECTION}.json"))) == 1


def test_nothing_is_kept_before_something_is_learned(folder: Path, cache: Path) -> None:
    with adaptive_handle(folder) as handle:
        write(handle, folder, 2)
    assert not cache.exists()


def test_what_is_tried_again_when_the_program_ends_stays_known(folder: Path, cache: Path) -> None:
    with adaptive_handle(folder) as handle:
        write(handle, folder)
        while not only(handle).exploring:
            write(handle, folder, 1)
        chosen = only(handle).chosen
    assert only(handle).explorations > 1
    dictionary.forget()
    known = only(adaptive_handle(folder))
    assert (known.chosen, known.exploring) == (chosen, False)
    assert all(tried.cost is None for tried in known.tools)


def test_of_what_is_tried_again_the_costs_that_are_kept_stay(folder: Path, cache: Path) -> None:
    with adaptive_handle(folder) as handle:
        write(handle, folder)
        known = only(handle)
    with adaptive_handle(folder) as handle:
        while only(handle).explorations == known.explorations:
            write(handle, folder, 1)
        write(handle, folder, 1, size=8 * MIB)  # of which nothing is kept
    dictionary.forget()
    assert [tried.cost for tried in only(adaptive_handle(folder)).tools] == [tried.cost for tried in known.tools]


def test_what_others_have_learned_stays(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for size in (2 * MIB, 8 * MIB):
        dictionary.forget()
        handle = adaptive_handle(folder)
        write(handle, folder, size=size)
        handle.close()
    dictionary.forget()
    assert {one.most_bytes for one in adaptive_handle(folder).learned()} >= {4 * MIB, 16 * MIB}


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[: len(text) // 2],
        lambda _: "[" * 200_000,
        lambda text: text.replace('"format": 1', '"format": 99'),
        lambda text: text.replace('"chosen": ', '"chosen": 1000'),
        lambda text: text.replace('"costs": [', '"costs": [-1, '),
        lambda text: re.sub('"costs": .*?]', f'"costs": {[1e-320] * 4}', text, flags=re.DOTALL),
        lambda text: re.sub('"costs": .*?]', '"costs": [Infinity, 0, 0, 0]', text, flags=re.DOTALL),
        lambda text: re.sub('"usual": .*', '"usual": NaN,', text),
        lambda text: text.replace('"classes": [', '"classes": [7, '),
        lambda text: text.replace('"async_io"', "[]"),
        lambda text: text.replace('"class": [\n        1', '"class": [\n        9'),
    ],
)
def test_a_damaged_file_is_one_warning_and_ignored(
    folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, damage: Any
) -> None:
    with adaptive_handle(folder) as handle:
        write(handle, folder)
    (path,) = cache.glob("*.json")
    damaged = damage(path.read_text())
    assert damaged != path.read_text()
    path.write_text(damaged)
    dictionary.forget()
    with pytest.warns(RuntimeWarning, match="is ignored"):
        again = adaptive_handle(folder)
    assert again.learned() == []
    write(again, folder)
    with warnings.catch_warnings(record=True):
        again.close()
    json.loads(path.read_text())


def test_numbers_too_large_for_any_version_are_ignored(
    folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with adaptive_handle(folder) as handle:
        write(handle, folder)
    (path,) = cache.glob("*.json")
    document = json.loads(path.read_text())
    for entry in document["classes"]:
        entry["tools"][0][0] = 1 << 80
    path.write_text(json.dumps(document))
    dictionary.forget()
    again = adaptive_handle(folder)
    assert again.learned() == []
    round_trip(again, folder / "file")


def test_a_cache_that_cannot_be_written_is_told_and_no_more(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/nothing")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with adaptive_handle(folder) as handle:
            write(handle, folder)
    assert "not kept for the next program: " in handle.explain()
