"""``TensorStore`` where things go wrong: full disks, failing devices, flipped bits, and its end."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from nvme_ops.errors import ChecksumError
from nvme_ops.storage import Session, TensorStore
from tests.conftest import MIB, in_child, pattern
from tests.contract.faulty import Faulty, flip
from tests.storage.conftest import got


@pytest.mark.parametrize(("size", "atomic"), [(MIB, True), (MIB, False), (300_000, False)])
def test_a_put_that_failed_leaves_the_old_value_or_none(session: Session, size: int, atomic: bool) -> None:
    handle = Faulty()
    store = TensorStore(session, handle=handle)
    store.put("a", pattern(MIB)).result()
    handle.will("write", "fail", {1})
    with pytest.raises(OSError, match="device 1"):
        store.put("a", pattern(size, 1), atomic=atomic).result()
    if atomic or size != MIB:
        assert torch.equal(got(store, "a"), pattern(MIB))
        assert store.bytes_in_use == MIB
    else:  # it was overwritten in part
        with pytest.raises(KeyError):
            store.get("a")
        assert store.bytes_in_use == 0
    store.put("a", pattern(size, 1), atomic=atomic).result()
    assert torch.equal(got(store, "a"), pattern(size, 1))
    store.drop("a")
    assert store.bytes_in_use == 0


@pytest.mark.parametrize(("do", "failing"), [("fail", {1, 2, 3}), ("refuse", {3})])
def test_a_folder_of_several_that_fails(folder: Path, failing: set[int], do: str) -> None:
    places = [folder / name for name in "abc"]
    handle = Faulty("write", do, failing)
    with Session(places, name="job") as session, TensorStore(session, handle=handle, weights=[1, 1, 1]) as store:
        with pytest.raises(OSError, match="device") as caught:
            store.put("a", pattern(12 * MIB)).result()
        if len(failing) > 1 and do == "fail":
            failures = caught.value.failures  # type: ignore[attr-defined]
            assert [failure.filename for failure in failures] == ["device 1", "device 2", "device 3"]
        store.wait()  # the failure is known already
        assert "a" not in store
        assert store.bytes_in_use == 0
        handle.will()
        store.put("a", pattern(12 * MIB))
        assert torch.equal(got(store, "a"), pattern(12 * MIB))


def test_a_checksum_that_cannot_be_made_undoes_the_put(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bytes are on their way by then."""

    def refuse(*_: object) -> None:
        raise MemoryError("none left")

    handle = Faulty("write", "hold")
    store = TensorStore(session, checksums=True, handle=handle)
    with monkeypatch.context() as patch:
        patch.setattr("nvme_ops.storage.striped.checksums_anywhere", refuse)
        with pytest.raises(MemoryError, match="none left"):
            store.put("a", pattern(MIB))
    assert store.bytes_in_use == MIB  # is still being written to
    handle.go.set()
    store.wait()
    assert store.bytes_in_use == 0
    assert store.keys() == []


def test_a_failure_that_nobody_asks_for_is_raised_by_wait_and_by_close(folder: Path) -> None:
    handle = Faulty("write", "fail", {1, 2, 4})
    session = Session(folder, name="job")
    store = TensorStore(session, handle=handle)
    store.put("a", pattern(MIB))
    store.put("b", pattern(MIB))
    store.put("c", pattern(MIB)).result()
    assert torch.equal(got(store, "c"), pattern(MIB))
    with pytest.raises(OSError, match="device 1"):
        store.sync()
    store.wait()
    assert store.keys() == ["c"]
    store.put("d", pattern(MIB))
    with pytest.raises(OSError, match="device 4"):
        session.close()
    assert session.closed
    assert list(folder.iterdir()) == []


def test_a_flipped_bit_is_found(session: Session) -> None:
    store, data = TensorStore(session, checksums=True), pattern(2 * MIB + 8).view(-1, 8)
    for place, out in ((0, None), (777_777, torch.zeros_like(data)), (2 * MIB + 4, torch.zeros_like(data.t()).t())):
        store.put("layer.weight", data).result()
        store.sync()
        flip(Path(session.path(0, "slab")), place)
        with pytest.raises(ChecksumError, match=r"layer\.weight") as caught:
            store.get("layer.weight", out).result()
        assert caught.value.tensors == ["layer.weight"]
        assert caught.value.filename == session.path(0, "slab")


def test_a_full_disk_leaves_the_old_value(make_file_system: Callable[..., Path], folder: Path) -> None:
    """One of two: the room on the other is given back."""
    places = [folder / "large", make_file_system(16 * MIB)]
    with Session(places, name="job") as session, TensorStore(session, weights=[1] * len(places)) as store:
        store.put("a", pattern(3 * MIB)).result()
        for key, atomic in (("a", False), ("a", True), ("b", False)):
            with pytest.raises(OSError, match="No space left") as caught:
                store.put(key, torch.zeros(64 * MIB, dtype=torch.uint8), atomic=atomic)
            assert (caught.value.errno, caught.value.filename) == (errno.ENOSPC, session.path(len(places) - 1, "slab"))
        assert store.keys() == ["a"]
        assert store.bytes_in_use == 3 * MIB
        assert torch.equal(got(store, "a"), pattern(3 * MIB))
        store.put("b", pattern(3 * MIB, 1))
        assert torch.equal(got(store, "b"), pattern(3 * MIB, 1))


# The end


def test_a_closed_store(folder: Path) -> None:
    session = Session(folder, name="job")
    store, other = TensorStore(session), TensorStore(session, name="other")
    with pytest.raises(ValueError, match="has an open store named 'other'"):
        TensorStore(session, name="other")
    put = store.put("a", pattern(8 * MIB))
    store.close()
    store.close()
    assert put.done()
    with TensorStore(session) as again:
        assert len(again) == 0
    put = other.put("a", pattern(8 * MIB))
    session.close()  # closes its stores
    assert put.done()
    for call in (lambda: store.put("a", torch.zeros(1)), lambda: store.get("a"), lambda: other.drop("a"), other.trim):
        with pytest.raises(ValueError, match="closed"):
            call()
    assert list(folder.iterdir()) == []


def test_a_forked_child_has_no_part_in_it(session: Session) -> None:
    handle = Faulty("write", "hold")
    store = TensorStore(session, handle=handle)
    future = store.put("a", pattern(MIB))

    def child() -> None:
        for call in (store.keys, store.wait, lambda: store.get("a"), lambda: store.put("b", pattern(1)), future.result):
            with pytest.raises(RuntimeError, match="the parent process"):
                call()
        assert not future.done()
        names = [os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")]
        assert session.path(0, "slab") not in names
        store.close()
        session.close()

    in_child(child)
    handle.go.set()
    assert torch.equal(got(store, "a"), pattern(MIB))
