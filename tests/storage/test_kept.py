"""Stores in sessions that are kept: after a kill at any point the next one has whole values, old or new."""

from __future__ import annotations

import json
import os
import signal
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from nvme_ops import aio_handle
from nvme_ops.errors import FormatError
from nvme_ops.settings import PAGE
from nvme_ops.storage import Session, TensorStore, journal
from tests.conftest import MIB, pattern, run_python
from tests.crashing_save import NoStraceError, Outcome, fail_at, kill_at, save_under_strace
from tests.storage.slow_store import Slow, got

OLD = {"a": pattern(9000), "b": pattern(5000, 1).view(50, 100).t(), "none": torch.zeros(0)}
NEW = {"a": OLD["a"] + 1, "b": OLD["b"] + 1, "none": torch.zeros(0, 2)}


def opened(folder: Path, fingerprint: str = "") -> Session:
    return Session(folder, name="job", reuse=True, fingerprint=fingerprint)


def fill(folder: Path) -> None:
    with opened(folder) as session, TensorStore(session) as store:
        for key, tensor in OLD.items():
            store.put(key, tensor).result()


def index_of(folder: Path) -> Path:
    with opened(folder) as session:
        return Path(session.path(0, "index"))


def found(folder: Path) -> dict[str, str]:
    """For each key ``"old"`` or ``"new"``; fails for anything else, and for space that nobody has."""
    result = {}
    with opened(folder) as session:
        assert {each.name for each in Path(session.folders[0]).iterdir()} <= {
            "owner",
            *(os.path.basename(session.path(0, name)) for name in ("slab", "index")),
        }, "leftovers"
        with TensorStore(session) as store:
            for key in store:
                tensor = got(store, key)
                result[key] = next(
                    (name for name, tensors in (("old", OLD), ("new", NEW)) if torch.equal(tensor, tensors[key])),
                    "MIXED",
                )
                store.drop(key)
            store.sync()
            assert store.bytes_in_use == 0
    assert "MIXED" not in result.values(), result
    return result


ALL_OLD, ALL_NEW = dict.fromkeys(OLD, "old"), dict.fromkeys(OLD, "new")


def test_checksums_are_compared_in_the_next_session(folder: Path) -> None:
    with opened(folder) as session, TensorStore(session, checksums=True) as store:
        store.put("a", OLD["a"]).result()
        path = session.path(0, "slab")
    with open(path, "r+b") as slab:
        slab.write(b"other")
    with opened(folder) as session, TensorStore(session) as store, pytest.raises(OSError, match="by their checksums"):
        store.get("a").result()


def test_another_fingerprint_finds_nothing(folder: Path) -> None:
    fill(folder)
    with opened(folder, "2") as session, TensorStore(session) as store:
        assert not session.found
        assert len(store) == 0


def test_nothing_is_overwritten_in_place(folder: Path) -> None:
    """A kill in the middle of it would leave a mixture."""
    fill(folder)
    handle = Slow("pwrite")
    with opened(folder) as session, TensorStore(session, handle=handle) as store:
        future = store.put("a", NEW["a"])
        (piece,) = store._values["a"].pieces
        fd = session.open(0, "slab")
        handle.go.set()
        future.result()
        assert os.pread(fd, piece.nbytes, piece.extent.start) == OLD["a"].numpy().tobytes()
        os.close(fd)


def test_the_index_does_not_grow_for_ever(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal, "_LINES", 20)
    with opened(folder) as session, TensorStore(session) as store:
        path = Path(session.path(0, "index"))
        for turn in range(200):
            store.put("a", pattern(100, turn)).result()
            assert path.read_bytes().count(b"\n") <= 23
    assert path.read_bytes().count(b"\n") == 2  # and a mark
    with opened(folder) as session, TensorStore(session) as store:
        assert torch.equal(got(store, "a"), pattern(100, 199))


# Kills


def put(folder: Path, atomic: bool = False) -> None:
    session = opened(folder)
    store = TensorStore(session, handle=aio_handle(backend="threads"))
    for key, tensor in NEW.items():
        store.put(key, tensor, atomic=atomic).result()
    store.close()
    session.close()


def put_previous(folder: Path) -> None:
    put(folder, atomic=True)


def drop(folder: Path) -> None:
    session = opened(folder)
    store = TensorStore(session, handle=aio_handle(backend="threads"))
    for key in OLD:
        store.drop(key)
        store.put("a", NEW["a"]).result()  # perhaps where the dropped one was
    store.sync()
    store.trim()
    session.close()


def traced(work: Callable[[Path], object], folder: Path, log: Path, *injections: str) -> Outcome:
    try:
        return save_under_strace(lambda: work(folder), log, *injections)
    except NoStraceError as error:
        pytest.skip(f"strace: {error}")


WORKS: dict[str, Callable[[Path], object]] = {"put": put, "put keeping previous": put_previous, "drop": drop}

#: Those between which the state on the disk may differ.
CHANGING = {"openat", "pwrite64", "write", "ftruncate", "fallocate", "rename", "unlink", "flock", "fdatasync", "fsync"}


@pytest.fixture
def place(folder: Path) -> Path:
    (folder / "place").mkdir()
    return folder / "place"


def test_an_index_that_another_thread_rewrites_during_a_sync_is_durable(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[bool] = []

    def rewritten_meanwhile(fd: int, path: str) -> None:
        with store._lock:
            store._journal.compact(store._values, store._unsynced.durable)  # type: ignore[union-attr]
        os.fsync(fd)
        synced.append(os.fstat(fd).st_nlink == 0)

    with opened(folder) as session, TensorStore(session) as store:
        for key, tensor in OLD.items():
            store.put(key, tensor).result()
        monkeypatch.setattr(journal, "sync", rewritten_meanwhile)
        store.sync()
        monkeypatch.undo()
    assert synced == [True], "the file that was replaced"
    assert set(found(folder).values()) == {"old"}


@pytest.mark.parametrize("work", ["put", pytest.param("put keeping previous", marks=pytest.mark.slow), "drop"])
@pytest.mark.parametrize("calls", ["that change something", pytest.param("of any kind", marks=pytest.mark.slow)])
def test_killed_at_any_system_call_it_has_whole_values(place: Path, folder: Path, work: str, calls: str) -> None:
    fill(place)
    outcome = traced(WORKS[work], place, folder)
    assert (outcome.status, outcome.error) == (0, None)
    found(place)
    seen = set()
    for name, number in outcome.points():
        if calls == "that change something" and name not in CHANGING:
            continue
        fill(place)
        killed = traced(WORKS[work], place, folder, kill_at(name, number))
        assert killed.status in (0, -signal.SIGKILL), (name, number, killed.error)
        state = found(place)
        if work != "drop":
            assert state.keys() == OLD.keys(), (name, number)
        assert "none" not in state or state["none"] in ("old", "new")
        seen.add(tuple(state.get(key) for key in ("a", "b")))
    assert len(seen) > 1  # it was killed in between too


@pytest.mark.parametrize("fingerprint", ["", pytest.param("2", marks=pytest.mark.slow)])
def test_killed_while_it_is_emptied_it_is_whole_or_empty(place: Path, folder: Path, fingerprint: str) -> None:
    """Of several places all, and never with the new fingerprint."""
    places = [place / "a", place / "b"]
    for each in places:
        each.mkdir()

    def session(mark: str) -> Session:
        return Session(places, name="job", reuse=True, fingerprint=mark)

    def prepare() -> None:
        with session("") as kept, TensorStore(kept, weights=[1, 1]) as store:
            store.put("a", pattern(8 * MIB)).result()

    def empty(_: Path) -> None:
        session("2").close()

    prepare()
    seen = set()
    for name, number in traced(empty, place, folder).points():
        if name in CHANGING | {"mkdir", "getdents64"}:
            prepare()
            traced(empty, place, folder, kill_at(name, number))
            with session(fingerprint) as kept, TensorStore(kept, weights=[1, 1]) as store:
                seen.add(len(store))
                if len(store):
                    assert fingerprint == ""
                    assert torch.equal(got(store, "a"), pattern(8 * MIB))
    assert seen == ({0, 1} if fingerprint == "" else {0})


def test_what_is_not_kept_is_gone_after_a_kill_at_any_call(place: Path, folder: Path) -> None:
    def work(_: Path) -> None:
        session = Session(place, name="job")
        TensorStore(session, handle=aio_handle(backend="threads")).put("a", OLD["a"])
        session.close()

    left = 0
    for name, number in traced(work, place, folder).points():
        if name in {"mkdir", "flock", "pwrite64", "fallocate", "unlink", "rmdir"}:
            killed = traced(work, place, folder, kill_at(name, number))
            assert killed.status in (0, -signal.SIGKILL)
            left += len(list(place.iterdir()))
            Session(place, name="another").close()
            assert list(place.iterdir()) == []
    assert left > 0


def test_a_first_put_that_was_killed_leaves_nothing_or_all(place: Path, folder: Path) -> None:
    outcome = traced(put, place, folder)
    found(place)
    counts = [number for name, number in outcome.points() if name == "pwrite64"]
    assert counts
    for number in counts:
        traced(put, place, folder, kill_at("pwrite64", number))
        assert set(found(place).values()) <= {"new"}


def test_an_index_that_cannot_be_written_leaves_the_old_value(place: Path, folder: Path) -> None:
    """And the store can go on, with no half line before its next one."""

    def work(folder: Path) -> None:
        session = opened(folder)
        store = TensorStore(session, handle=aio_handle(backend="threads"))
        failures = [store.put(key, tensor).exception() for key, tensor in NEW.items()]
        for key, failure in zip(NEW, failures, strict=True):
            if failure is not None:
                assert torch.equal(got(store, key), OLD[key])
                store.put(key, NEW[key]).result()
        assert any(failures)
        os._exit(7)

    fill(place)
    outcome = traced(put, place, folder)
    found(place)
    failed = 0
    for name, number in outcome.points():
        if name == "pwrite64":
            fill(place)
            ended = traced(work, place, folder, fail_at(name, number, "ENOSPC"))
            failed += ended.status == 7
            state = found(place)
            assert state == (ALL_NEW if ended.status == 7 else state)
    assert failed > 0


def test_what_was_put_and_waited_for_survives_a_kill(folder: Path) -> None:
    program = """
    import os, signal, sys, torch
    from nvme_ops.storage import Session, TensorStore
    store = TensorStore(Session(sys.argv[1], name="job", reuse=True))
    for number in range(20):
        store.put(str(number), torch.full((10_000 * number,), float(number)))
    store.wait()
    store.put("3", torch.zeros(5_000_000))
    os.kill(os.getpid(), signal.SIGKILL)
    """
    run_python(program, folder, check=False)
    with opened(folder) as session, TensorStore(session) as store:
        assert len(store) == 20
        for number in range(20):
            if number != 3:
                assert torch.equal(got(store, str(number)), torch.full((10_000 * number,), float(number)))


# A damaged index


def line(entry: object) -> bytes:
    text = json.dumps(entry).encode()
    return b"%08x %s\n" % (zlib.crc32(text), text)


def entry(key: str = "x", nbytes: int = 100, start: int = 0, **changes: Any) -> dict[str, Any]:
    size = -(-nbytes // PAGE) * PAGE
    pieces = [[0, 0, nbytes, start, size]]
    return {
        "key": key,
        "dtype": "uint8",
        "shape": [nbytes],
        "stride": [1],
        "checksum": None,
        "pieces": pieces,
    } | changes


@pytest.mark.parametrize("cut", [1, 10, 60])
def test_a_torn_last_line_does_not_count(folder: Path, cut: int) -> None:
    fill(folder)
    path = index_of(folder)
    whole = path.read_bytes()
    path.write_bytes(whole + line(entry())[:-cut])
    assert found(folder) == ALL_OLD
    fill(folder)
    lines = path.read_bytes().splitlines(keepends=True)[:-1]  # without the mark
    path.write_bytes(b"".join(lines)[:-cut])
    state = found(folder)
    assert len(state) == 2
    assert set(state.values()) == {"old"}


DAMAGED = {
    "garbage": b"\x00\xffgarbage\n",
    "no checksum": json.dumps(entry()).encode() + b"\n",
    "not a dict": line([1, 2]),
    "no key": line({"pieces": []}),
    "another dtype": line(entry(dtype="nn")),
    "no dtype": line(entry(dtype="float99")),
    "another shape": line(entry(shape=[101])),
    "another stride": line(entry(stride=[])),
    "no pieces": line(entry(pieces=[])),
    "a piece of nothing": line(entry(pieces=[[0, 0, 0, 0, 0]])),
    "a gap": line(entry(pieces=[[0, 50, 100, 0, PAGE]])),
    "a short extent": line(entry(nbytes=PAGE + 1, pieces=[[0, 0, PAGE + 1, 0, PAGE]])),
    "an overlap": line(entry(start=0)) + line(entry("y", start=0)),
    "beyond the end": line(entry(start=1 << 40)),
    "before the beginning": line(entry(start=-PAGE)),
    "in the middle of a page": line(entry(start=8)),
    "another folder": line(entry(pieces=[[1, 0, 100, 0, PAGE]])),
    "a negative folder": line(entry(pieces=[[-1, 0, 100, 0, PAGE]])),
    "a word for a number": line(entry(pieces=[[0, 0, 100, "0", PAGE]])),
    "a fraction": line(entry(pieces=[[0.5, 0, 100, 0, PAGE]])),
}


@pytest.mark.parametrize("damage", DAMAGED)
@pytest.mark.parametrize("place_in_file", ["first", "last"])
def test_a_damaged_index_is_an_error_that_names_it(folder: Path, damage: str, place_in_file: str) -> None:
    fill(folder)
    path = index_of(folder)
    before = path.read_bytes()
    content = DAMAGED[damage] + before if place_in_file == "first" else before + DAMAGED[damage]
    path.write_bytes(content)
    with opened(folder) as session:
        for _ in range(2):
            with pytest.raises(FormatError, match="index") as caught:
                TensorStore(session)
            assert str(path) in str(caught.value)
            assert path.read_bytes() == content  # for whoever wants to look
    path.write_bytes(before)
    assert found(folder) == ALL_OLD


def test_every_flipped_bit_in_the_index_is_found(folder: Path) -> None:
    fill(folder)
    path = index_of(folder)
    before = path.read_bytes()
    with opened(folder) as session:
        for place in range(0, len(before) - 1, 7):
            damaged = bytearray(before)
            damaged[place] ^= 1
            path.write_bytes(damaged)
            with pytest.raises(FormatError):
                TensorStore(session)


def test_a_slab_that_was_cut_is_an_error(folder: Path) -> None:
    fill(folder)
    with opened(folder) as session:
        os.truncate(session.path(0, "slab"), PAGE)
        with pytest.raises(FormatError, match="beyond the 4096 bytes"):
            TensorStore(session)
