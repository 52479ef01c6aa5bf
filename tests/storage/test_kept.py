"""Stores in sessions that are kept: after a kill, damage or a failed sync the next one has whole values, or is told."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import signal
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from nvme_ops import aio_handle
from nvme_ops.base.errors import FormatError
from nvme_ops.base.settings import PAGE
from nvme_ops.storage import Session, TensorStore, journal, striped
from tests.conftest import pattern
from tests.crashing_save import CHANGING, SOME_CALLS, Outcome, fail_at, kill_at, save_under_strace
from tests.storage.conftest import failing, got, kept

OLD = {"a": pattern(9000), "b": pattern(5000, 1).view(50, 100).t(), "none": torch.zeros(0)}
NEW = {"a": OLD["a"] + 1, "b": OLD["b"] + 1, "none": torch.zeros(0, 2)}
ALL_OLD, ALL_NEW = dict.fromkeys(OLD, "old"), dict.fromkeys(OLD, "new")


def fill(folder: Path) -> None:
    with kept(folder) as session, TensorStore(session) as store:
        for key, tensor in OLD.items():
            store.put(key, tensor).result()


def index_of(folder: Path) -> Path:
    with kept(folder) as session:
        return Path(session.path(0, "index"))


def checked(folder: Path) -> dict[str, str]:
    """For each key ``"old"`` or ``"new"``; fails for anything else, and for space that nobody has."""
    result = {}
    with kept(folder) as session:
        names = {"owner", *(os.path.basename(session.path(0, name)) for name in ("slab", "index"))}
        assert {path.name for path in Path(session.folders[0]).iterdir()} <= names, "leftovers"
        with TensorStore(session) as store:
            for key in store:
                tensor = got(store, key)
                (result[key],) = (
                    name for name, tensors in (("old", OLD), ("new", NEW)) if torch.equal(tensor, tensors[key])
                )
                store.drop(key)
            store.sync()
            assert store.bytes_in_use == 0
    return result


def test_the_index_does_not_grow_for_ever(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal, "_LINES", 20)
    with kept(folder) as session, TensorStore(session) as store:
        path = Path(session.path(0, "index"))
        for turn in range(100):
            store.put("a", pattern(100, turn)).result()
            assert path.read_bytes().count(b"\n") <= 23
    assert path.read_bytes().count(b"\n") == 2  # and a mark
    with kept(folder) as session, TensorStore(session) as store:
        assert torch.equal(got(store, "a"), pattern(100, 99))


@pytest.mark.parametrize("during", [striped, journal], ids=["slabs", "index"])
def test_a_sync_beside_a_rewritten_index_survives_a_power_failure(
    folder: Path, monkeypatch: pytest.MonkeyPatch, during: Any
) -> None:
    monkeypatch.setattr(journal, "_LINES", 0)

    def rewritten_meanwhile(fd: int, _: str) -> None:
        before = os.stat(index).st_ino
        while os.stat(index).st_ino == before:
            store.put("a", NEW["a"]).result()
        os.fsync(fd)
        replaced.append(True)

    replaced: list[bool] = []
    with kept(folder) as session, TensorStore(session) as store:
        index = session.path(0, "index")
        for key, tensor in OLD.items():
            store.put(key, tensor).result()
        with monkeypatch.context() as patch:
            patch.setattr(during, "sync", rewritten_meanwhile)
            store.sync()
        assert replaced
        shutil.copytree(session.folders[0], folder / "copy" / Path(session.folders[0]).name)
    monkeypatch.setattr(journal, "boot_id", lambda: "another")
    assert checked(folder / "copy") == ALL_OLD


# Kills


def put(folder: Path) -> None:
    with kept(folder) as session, TensorStore(session, handle=aio_handle(backend="threads")) as store:
        for key, tensor in NEW.items():
            store.put(key, tensor, atomic=key == "a").result()


def drop(folder: Path) -> None:
    with kept(folder) as session, TensorStore(session, handle=aio_handle(backend="threads")) as store:
        for key in OLD:
            store.drop(key)
            store.put("a", NEW["a"]).result()  # perhaps where the dropped one was
        store.sync()
        store.trim()


@SOME_CALLS
@pytest.mark.parametrize(("work", "first"), [(put, False), (put, True), (drop, False)])
def test_killed_at_any_system_call_it_has_whole_values(
    folder: Path, work: Callable[[Path], None], first: bool, ends: bool
) -> None:
    def killed(*injections: str) -> Outcome:
        if not first:
            fill(folder)
        return save_under_strace(lambda: work(folder), folder, *injections)

    outcome = killed()
    assert (outcome.status, outcome.error) == (0, None)
    checked(folder)
    seen = set()
    for name, number in outcome.points(ends and not first):
        if name in ({"pwrite64"} if first else CHANGING - {"openat"}):
            assert killed(kill_at(name, number)).status in (0, -signal.SIGKILL), (name, number)
            state = checked(folder)
            assert work is drop or first or state.keys() == OLD.keys(), (name, number)
            assert not first or set(state.values()) <= {"new"}
            seen.add((state.get("a"), state.get("b")))
    assert len(seen) > 1  # it was killed in between too


@SOME_CALLS
def test_killed_while_it_is_emptied_it_is_whole_or_empty(
    folder: Path, ends: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of several places all, and never with the new fingerprint."""
    monkeypatch.setattr(striped, "STRIPE", PAGE)

    def session(mark: str) -> Session:
        return Session([folder / "a", folder / "b"], name="job", reuse=True, fingerprint=mark)

    def emptied(*injections: str) -> Outcome:
        with session("") as kept, TensorStore(kept, weights=[1, 1]) as store:
            store.put("a", pattern(4 * PAGE)).result()
        return save_under_strace(lambda: session("2").close(), folder, *injections)

    seen = set()
    points = [point for point in emptied().points(ends) if point[0] in CHANGING]
    for turn, point in enumerate(points):
        emptied(kill_at(*point))
        fingerprint = "2" * (turn % 2)
        with session(fingerprint) as kept, TensorStore(kept, weights=[1, 1]) as store:
            seen.add((fingerprint, len(store)))
            assert not len(store) or torch.equal(got(store, "a"), pattern(4 * PAGE))
    assert seen == {("", 0), ("", 1), ("2", 0)}


def test_an_index_that_cannot_be_written_leaves_the_old_value(folder: Path) -> None:
    """And the store can go on, with no half line before its next one."""

    def work() -> None:
        with kept(folder) as session, TensorStore(session, handle=aio_handle(backend="threads")) as store:
            failed = [key for key, tensor in NEW.items() if store.put(key, tensor).exception() is not None]
            for key in failed:
                assert torch.equal(got(store, key), OLD[key])
                store.put(key, NEW[key]).result()
            os._exit(7 if failed else 1)

    def ended(*injections: str) -> Outcome:
        fill(folder)
        return save_under_strace(work, folder, *injections)

    failures = 0
    for name, number in ended().points():
        if name == "pwrite64":
            failed = ended(fail_at(name, number, "ENOSPC")).status == 7
            assert checked(folder) == ALL_NEW or not failed
            failures += failed
    assert failures


# A damaged index


def sealed(text: bytes) -> bytes:
    return b"%08x %s\n" % (zlib.crc32(text), text)


def line(entry: object) -> bytes:
    return sealed(json.dumps(entry).encode())


FREE = 1 << 20  # where nothing lies: only what is damaged is refused


def entry(key: str = "x", nbytes: int = 100, start: int = FREE, **changes: Any) -> dict[str, Any]:
    size = -(-nbytes // PAGE) * PAGE
    described = {"dtype": "uint8", "shape": [nbytes], "stride": [1], "checksum": None}
    return {"key": key, **described, "pieces": [[0, 0, nbytes, start, size]]} | changes


@pytest.mark.parametrize("cut", [1, 60])
def test_a_torn_last_line_does_not_count(folder: Path, cut: int) -> None:
    fill(folder)
    path = index_of(folder)
    before = path.read_bytes()
    path.write_bytes(before + line(entry())[:-cut])
    assert checked(folder) == ALL_OLD
    *lines, _ = before.splitlines(keepends=True)  # without the mark
    fill(folder)
    path.write_bytes(b"".join(lines)[:-cut])
    assert list(checked(folder).values()) == ["old", "old"]


DAMAGED = {
    "garbage": b"\x00\xffgarbage\n",
    "no checksum": json.dumps(entry()).encode() + b"\n",
    "a wrong checksum": b"0" * 8 + line(entry())[8:],
    "not a dict": line([1, 2]),
    "no key": line({"pieces": []}),
    "another dtype": line(entry(dtype="nn")),
    "no dtype": line(entry(dtype="float99")),
    "another shape": line(entry(shape=[101])),
    "another stride": line(entry(stride=[])),
    "a stride that leaves gaps": line(entry(stride=[9])),
    "a dict for a stride": line(entry(stride=[{}])),
    "a fraction for a shape": line(entry(shape=[100.0])),
    "no pieces": line(entry(pieces=[])),
    "a piece of nothing": line(entry(pieces=[[0, 0, 0, FREE, 0]])),
    "a gap": line(entry(pieces=[[0, 50, 100, FREE, PAGE]])),
    "a short extent": line(entry(nbytes=PAGE + 1, pieces=[[0, 0, PAGE + 1, FREE, PAGE]])),
    "an overlap": line(entry()) + line(entry("y")),
    "beyond the end": line(entry(start=1 << 40)),
    "before the beginning": line(entry(start=-PAGE)),
    "in the middle of a page": line(entry(start=FREE + 8)),
    "another folder": line(entry(pieces=[[1, 0, 100, FREE, PAGE]])),
    "a negative folder": line(entry(pieces=[[-1, 0, 100, FREE, PAGE]])),
    "a word for a number": line(entry(pieces=[[0, 0, 100, "0", PAGE]])),
    "a fraction": line(entry(pieces=[[0.5, 0, 100, FREE, PAGE]])),
    "a word for a checksum": line(entry(checksum="0")),
    "a mark of infinity": line({"mark": "0", "bytes": float("inf")}),
    "a mark nested deeply": sealed(b'{"mark": "0", "bytes": %s}' % (b"[" * 100_000)),
}


def test_a_damaged_index_is_an_error_that_names_it(folder: Path) -> None:
    fill(folder)
    path = index_of(folder)
    before = path.read_bytes()
    with kept(folder) as session:
        for damage, lines in DAMAGED.items():
            for content in (lines + before, before + lines):
                path.write_bytes(content)
                with pytest.raises(FormatError, match=f"{re.escape(str(path))}.*index"):
                    pytest.fail(f"{damage}: {list(TensorStore(session))}")
                assert path.read_bytes() == content  # for whoever wants to look
        path.write_bytes(before)
    assert checked(folder) == ALL_OLD


def test_an_index_that_is_read_in_parts_is_not_cut(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A read returns less than was asked, as before a page that cannot be read."""
    fill(folder)
    with monkeypatch.context() as patch:
        read = os.pread
        patch.setattr(os, "pread", lambda fd, nbytes, offset: read(fd, min(nbytes, 100), offset))
        with kept(folder) as session, TensorStore(session) as store:
            assert sorted(store) == sorted(OLD)
    assert checked(folder) == ALL_OLD


# Syncs that failed, and power failures


def fails_to_sync(store: TensorStore, monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    failing(monkeypatch, "fdatasync", path)
    with pytest.raises(OSError, match="fdatasync") as caught:
        store.sync()
    assert (caught.value.errno, caught.value.filename) == (errno.EIO, path)


def test_a_sync_that_failed_stays_failed_until_the_values_are_put_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with kept(folder) as session, TensorStore(session) as store:
        store.put("old", torch.ones(5))
        store.sync()
        store.put("new", torch.ones(6))
        store.put("gone", torch.ones(7))
        fails_to_sync(store, monkeypatch, session.path(0, "slab"))
        for _ in range(2):
            with pytest.raises(OSError, match=r"2 tensors put before it may be lost.*'gone', 'new'"):
                store.sync()
        store.put("new", torch.ones(6))
        store.drop("gone")
        store.sync()


def test_an_index_whose_sync_failed_is_written_anew(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with kept(folder) as session, TensorStore(session) as store:
        path = session.path(0, "index")
        before = os.stat(path).st_ino
        store.put("a", torch.ones(5))
        fails_to_sync(store, monkeypatch, path)
        store.put("a", torch.ones(5))
        store.sync()
        assert os.stat(path).st_ino != before
        written = Path(path).read_bytes()
        store.sync()
        assert Path(path).read_bytes() == written, "nothing is new"
        store.put("b", torch.ones(5))
        fails_to_sync(store, monkeypatch, path)
        store.put("b", torch.ones(5))
        with monkeypatch.context() as patch:
            patch.setattr(journal, "replacing", refuse)
            with pytest.raises(OSError, match="neither be made durable nor rewritten"):
                store.sync()
    with kept(folder) as session, TensorStore(session) as store:
        assert sorted(store) == ["a", "b"]


def refuse(_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_after_a_restart_only_what_was_synced_must_be_whole(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with kept(folder) as session, TensorStore(session) as store:
        lines = Path(session.path(0, "index"))
        store.put("first", torch.ones(5))
        store.sync()
        durable = lines.stat().st_size
        store.put("second", torch.ones(5))
        store.sync()
        store.put("third", torch.ones(5)).result()
        content = lines.read_bytes()
    monkeypatch.setattr(journal, "boot_id", lambda: "another")
    for begin in range(0, len(content), 20):
        gone = bytes(min(100, len(content) - begin))
        lines.write_bytes(content[:begin] + gone + content[begin + 100 :])
        with kept(folder) as session:
            if begin < durable - 200:
                with pytest.raises(FormatError, match="is damaged"):
                    TensorStore(session)
            elif begin >= durable:
                with TensorStore(session) as store:
                    assert "first" in store


def test_a_store_without_a_record_gives_back_what_it_does_not_need(folder: Path) -> None:
    with kept(folder) as session, TensorStore(session, journal=False) as store:
        store.put("a", OLD["a"]).result()
        entries, slab = store.described(["a"]), Path(session.path(0, "slab"))
    size = slab.stat().st_size
    assert size < 100_000
    with kept(folder) as session, TensorStore(session, journal=False):
        pass  # its user has found nothing that it can use, and another one may
    assert slab.stat().st_size == size
    with kept(folder) as session, TensorStore(session, journal=False) as store:
        store.adopt(entries)
        assert torch.equal(got(store, "a"), OLD["a"])
