"""What adaptive handles keep for the next program, and what they make of a file that they did not write."""

from __future__ import annotations

import gc
import json
import re
import time
import warnings
from pathlib import Path
from typing import Any

import pytest

from nvme_ops import aio_handle
from nvme_ops.io.tuning import dictionary
from nvme_ops.io.tuning.dictionary import SECTION, forget
from tests.conftest import MIB, forked, round_trip, run_python
from tests.tuning.conftest import MANY, kept, only, write


def test_what_is_learned_is_kept_for_the_next_program(folder: Path, cache: Path) -> None:
    with aio_handle.adaptive(folder) as handle:
        write(handle, folder, 2)
    assert not cache.exists(), "nothing is learned yet"
    for times in (15, 15):  # settled; with a usual cost, and before a changed one counts
        with aio_handle.adaptive(folder) as handle:
            write(handle, folder, times)
    before = only(handle)  # also of one that is closed
    assert not before.exploring
    (entry,) = kept(cache)[SECTION]
    assert 0 < entry["usual"] < 100 * max(entry["costs"])
    forget()
    again = aio_handle.adaptive(folder)
    known = only(again)
    assert (known.chosen, known.transfers) == (before.chosen, before.transfers)
    assert [tried.cost is None for tried in known.tools] == [tried.cost is None for tried in before.tools]
    write(again, folder, 1)
    assert not only(again).exploring


@pytest.mark.parametrize("process", ["this", "child that inherits the handle"])
def test_the_end_of_a_program_keeps_it_too(folder: Path, cache: Path, process: str) -> None:
    run_python(f"""
        import multiprocessing, torch, nvme_ops
        def learn():
            global handle
            handle = handle or nvme_ops.aio_handle.adaptive({str(folder)!r})
            for _ in range({MANY}):
                handle.sync_pwrite(torch.zeros({2 * MIB}, dtype=torch.uint8), {str(folder / "file")!r}, 0)
        handle = nvme_ops.aio_handle.adaptive({str(folder)!r}) if {process.endswith("handle")} else None
        if {process == "this"}:
            learn()
        else:
            child = multiprocessing.get_context("fork").Process(target=learn)
            child.start()
            child.join()
            assert child.exitcode == 0
    """)
    assert kept(cache)[SECTION]


def test_of_what_is_tried_again_when_the_program_ends_the_kept_costs_stay(folder: Path) -> None:
    with aio_handle.adaptive(folder) as handle:
        write(handle, folder)
        known = only(handle)
    with aio_handle.adaptive(folder) as handle:
        while only(handle).explorations == known.explorations:
            write(handle, folder, 1)
        write(handle, folder, 1, size=8 * MIB)  # of which nothing is kept
    forget()
    again = only(aio_handle.adaptive(folder))
    assert not again.exploring
    assert [tried.cost for tried in again.tools] == [tried.cost for tried in known.tools]


def test_what_other_programs_have_learned_stays(folder: Path, tmp_path: Path) -> None:
    sizes = [MIB, 4 * MIB, 16 * MIB]
    ready = tmp_path / "ready"
    ready.mkdir()

    def learn(number: int) -> None:
        with aio_handle.adaptive(folder) as handle:
            while not [one for one in handle.learned() if one.most_bytes == sizes[number] and not one.exploring]:
                write(handle, folder, 1, size=sizes[number])
            (ready / str(number)).touch()
            for _ in range(60_000):  # they are saved together
                if len(list(ready.iterdir())) < len(sizes):
                    time.sleep(0.001)

    with forked(len(sizes), learn):
        pass
    forget()
    assert {one.most_bytes for one in aio_handle.adaptive(folder).learned()} == set(sizes)


def test_a_damaged_file_warns_once_and_is_replaced(folder: Path, cache: Path) -> None:
    with aio_handle.adaptive(folder) as handle:
        write(handle, folder)
    (path,) = cache.glob("*.json")
    content = path.read_text()
    for old, new in (
        ('"format": 2', '"format": 99'), ('"chosen": ', '"chosen": 1000'), ('"transfers": .*', '"transfers": -1'),
        ('"costs": [^]]*]', f'"costs": {[1e-320] * 4}'), ('"costs": [^]]*]', '"costs": [Infinity, 0, 0, 0]'),
        ('"usual": .*', '"usual": NaN,'), ('"async_io"', "[]"), ('"class": \\[\n        1', '"class": [\n        9'),
    ):  # fmt: skip
        damaged = re.sub(old, new, content)
        assert damaged != content, old
        path.write_text(damaged)
        forget()
        with pytest.warns(RuntimeWarning, match="is ignored") as caught:
            again = aio_handle.adaptive(folder)
        assert (len({str(one.message) for one in caught}), again.learned()) == (1, []), old
    write(again, folder)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again.close()
    assert len(kept(cache)[SECTION]) == 1


def test_what_has_other_tools_or_numbers_is_ignored_and_stays(folder: Path, cache: Path) -> None:
    with aio_handle.adaptive(folder) as handle:
        write(handle, folder)
    (path,) = cache.glob("*.json")
    document = kept(cache)
    document[SECTION][0]["tools"][0][0] = 1 << 80
    path.write_text(json.dumps(document))
    forget()
    with aio_handle.adaptive(folder) as again:
        assert again.learned() == []
        round_trip(again, folder / "file")
        write(again, folder)
    assert [entry["tools"][0][0] for entry in kept(cache)[SECTION]][:1] == [1 << 80]
    assert len(kept(cache)[SECTION]) > 1
    path.write_text(json.dumps({**document, SECTION: {}}))  # which is no list
    forget()
    with aio_handle.adaptive(folder) as again:
        write(again, folder)
    assert len(kept(cache)[SECTION]) == 1


def test_what_could_not_be_kept_is_told_and_kept_later(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cache").write_text("no folder")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with aio_handle.adaptive(folder) as handle:
            write(handle, folder)
    assert "not kept for the next program: " in handle.explain()
    (tmp_path / "cache").unlink()
    handle.close()
    assert "kept in " in handle.explain()
    forget()
    assert aio_handle.adaptive(folder).learned()
    monkeypatch.setenv("HOME", "relative")
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    assert "not kept for the next program: HOME='relative'" in aio_handle.adaptive(folder).explain()


def test_a_handle_that_is_freed_while_another_is_saved(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The collector may free handles at any moment."""
    made = []
    for size in (MIB, 4 * MIB):
        monkeypatch.setattr(dictionary, "_dictionaries", {})
        made.append(aio_handle.adaptive(folder))
        write(made[-1], folder, size=size)
    dump = json.dumps

    def freeing(*given: Any, **more: Any) -> str:
        made.clear()
        gc.collect()
        return dump(*given, **more)

    monkeypatch.setattr(json, "dumps", freeing)
    made.pop().close()
    monkeypatch.setattr(dictionary, "_dictionaries", {})
    assert {one.most_bytes for one in aio_handle.adaptive(folder).learned()} == {MIB, 4 * MIB}
