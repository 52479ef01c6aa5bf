"""``TensorStore`` where things go wrong: full disks, failing devices, flipped bits, and its end."""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import subprocess
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from nvme_ops import IoFuture, aio_handle
from nvme_ops.errors import ChecksumError
from nvme_ops.storage import Session, TensorStore
from tests.conftest import MIB, LoopDevice, in_child, in_threads, pattern, run_python, sync_file_system
from tests.storage.slow_store import Slow, got


@pytest.fixture
def session(folder: Path) -> Iterator[Session]:
    with Session(folder, name="job") as opened:
        yield opened


class Failed:
    """A native operation that has failed."""

    def __init__(self, after: IoFuture, place: int) -> None:
        self.after, self.error = after, OSError(errno.EIO, os.strerror(errno.EIO), f"device {place}")

    def done(self) -> bool:
        return self.after.done()

    def wait(self, seconds: float | None) -> bool:
        self.after.exception(seconds)
        return True

    def exception(self) -> BaseException:
        return self.error


class Faulty(aio_handle):
    """Fails writes of these numbers: when they are submitted, or after half of it was written."""

    def __init__(self, at_once: bool = False) -> None:
        super().__init__()
        self.failing: set[int] = set()
        self.writes, self.at_once = 0, at_once

    def __copy__(self) -> Faulty:
        return self

    def submit_pwrite(self, tensor: Any, *arguments: Any, **options: Any) -> Any:
        self.writes += 1
        if self.writes not in self.failing:
            return super().submit_pwrite(tensor, *arguments, **options)
        if self.at_once:
            raise OSError(errno.EIO, os.strerror(errno.EIO), "at once")
        half = super().submit_pwrite(tensor[: len(tensor) // 2], *arguments, **options)
        return IoFuture(Failed(half, self.writes))  # type: ignore[arg-type]


@pytest.mark.parametrize("size", [MIB, 300_000])
def test_a_failed_put_beside_the_old_value_leaves_it(session: Session, size: int) -> None:
    handle = Faulty()
    store = TensorStore(session, handle=handle)
    store.put("a", pattern(MIB)).result()
    handle.failing = {2}
    with pytest.raises(OSError, match="device 2"):
        store.put("a", pattern(size, 1), atomic=True).result()
    assert torch.equal(got(store, "a"), pattern(MIB))
    assert store.bytes_in_use == MIB
    store.put("a", pattern(size, 1), atomic=True).result()
    assert torch.equal(got(store, "a"), pattern(size, 1))
    store.drop("a")
    assert store.bytes_in_use == 0


def test_a_failed_put_in_place_leaves_no_value(session: Session) -> None:
    handle = Faulty()
    store = TensorStore(session, handle=handle)
    store.put("a", pattern(MIB)).result()
    handle.failing = {2}
    future = store.put("a", pattern(MIB, 1))
    with pytest.raises(KeyError):
        store.get("a")
    with pytest.raises(OSError, match="device 2"):
        future.result()
    assert store.bytes_in_use == 0
    store.put("a", pattern(MIB, 2))
    assert torch.equal(got(store, "a"), pattern(MIB, 2))


@pytest.mark.parametrize("failing", [{1}, {3}, {1, 2, 3}])
@pytest.mark.parametrize("at_once", [False, True])
def test_a_folder_of_several_that_fails(folder: Path, failing: set[int], at_once: bool) -> None:
    places = [folder / name for name in "abc"]
    for place in places:
        place.mkdir()
    handle = Faulty(at_once)
    with Session(places, name="job") as session, TensorStore(session, handle=handle, weights=[1, 1, 1]) as store:
        handle.failing = failing
        with pytest.raises(OSError, match="at once" if at_once else "device") as caught:
            store.put("a", pattern(12 * MIB)).result()
        if len(failing) > 1 and not at_once:
            failures = caught.value.failures  # type: ignore[attr-defined]
            assert [failure.filename for failure in failures] == ["device 1", "device 2", "device 3"]
        store.wait()  # the failure is known already
        assert "a" not in store
        assert store.bytes_in_use == 0
        handle.failing = set()
        store.put("a", pattern(12 * MIB))
        assert torch.equal(got(store, "a"), pattern(12 * MIB))


def test_a_checksum_that_cannot_be_made_undoes_the_put(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bytes are on their way by then."""

    def refuse(*_: object) -> None:
        raise MemoryError("none left")

    handle = Slow("pwrite")
    store = TensorStore(session, checksums=True, handle=handle)
    with monkeypatch.context() as patch:
        patch.setattr("nvme_ops.storage.store.checksums_anywhere", refuse)
        with pytest.raises(MemoryError, match="none left"):
            store.put("a", pattern(MIB))
    assert store.bytes_in_use == MIB  # is still being written to
    handle.go.set()
    store.wait()
    assert store.bytes_in_use == 0
    assert store.keys() == []


def test_an_interrupted_put_keeps_no_frames(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    """What Ctrl-C has raised in the midst of it would keep the graph of a training step, for as long as the store."""

    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    store, tensor = TensorStore(session), pattern(MIB)
    kept = weakref.ref(tensor)
    with monkeypatch.context() as patch:
        patch.setattr(store._slabs, "move", interrupted)
        gc.disable()
        try:
            with contextlib.suppress(KeyboardInterrupt):
                store.put("a", tensor)
            del tensor
            assert kept() is None, "it is freed at once, not by the collector"
        finally:
            gc.enable()
    assert store.bytes_in_use == 0


def test_a_failure_that_nobody_asks_for_is_raised_by_wait(session: Session) -> None:
    handle = Faulty()
    store = TensorStore(session, handle=handle)
    handle.failing = {1, 2}
    store.put("a", pattern(MIB))
    store.put("b", pattern(MIB))
    store.put("c", pattern(MIB)).result()
    assert torch.equal(got(store, "c"), pattern(MIB))
    with pytest.raises(OSError, match="device 1"):
        store.sync()
    store.wait()
    assert store.keys() == ["c"]


def test_a_failure_is_told_by_close(folder: Path) -> None:
    handle = Faulty()
    handle.failing = {1}
    session = Session(folder, name="job")
    TensorStore(session, handle=handle).put("a", pattern(MIB))
    with pytest.raises(OSError, match="device 1"):
        session.close()
    assert session.closed
    assert list(folder.iterdir()) == []


def test_a_read_that_fails_and_is_dropped_is_reported(session: Session, unraisable: list[Any]) -> None:
    store = TensorStore(session, checksums=True)
    store.put("a", pattern(MIB)).result()
    flip(session, 5)
    future = store.get("a")
    while not future.done():
        gc.collect()
    del future
    gc.collect()
    assert [type(each) for each in unraisable] == [ChecksumError]


def flip(session: Session, place: int) -> None:
    """A bit in the slab."""
    fd = session.open(0, "slab")
    byte = os.pread(fd, 1, place)[0]
    os.pwrite(fd, bytes([byte ^ 4]), place)
    os.fsync(fd)
    os.close(fd)


@pytest.mark.parametrize("place", [0, 777_777, 2 * MIB + 4])
@pytest.mark.parametrize("into", ["new memory", "out", "out of other strides"])
def test_a_flipped_bit_is_found(session: Session, place: int, into: str) -> None:
    store, data = TensorStore(session, checksums=True), pattern(2 * MIB + 8).view(-1, 8)
    store.put("layer.weight", data).result()
    flip(session, place)
    out = {"out": torch.zeros_like(data), "out of other strides": torch.zeros_like(data.t()).t()}.get(into)
    future = store.get("layer.weight", out)
    with pytest.raises(ChecksumError, match=r"layer\.weight") as caught:
        future.result()
    assert caught.value.tensors == ["layer.weight"]
    assert caught.value.filename == session.path(0, "slab")
    store.put("layer.weight", data)
    assert torch.equal(got(store, "layer.weight"), data)


def test_a_slab_that_was_cut_gives_no_wrong_data(session: Session) -> None:
    store = TensorStore(session)
    store.put("a", pattern(MIB)).result()
    fd = session.open(0, "slab")
    os.ftruncate(fd, MIB // 2)
    os.close(fd)
    with pytest.raises(EOFError):
        store.get("a").result()


@pytest.mark.parametrize("atomic", [False, True])
def test_a_full_disk_leaves_the_old_value(make_file_system: Callable[..., Path], atomic: bool) -> None:
    with Session(make_file_system(16 * MIB), name="job") as session, TensorStore(session) as store:
        store.put("a", pattern(3 * MIB)).result()
        for key in ("a", "b"):
            with pytest.raises(OSError, match="No space left") as caught:
                store.put(key, torch.zeros(40 * MIB, dtype=torch.uint8), atomic=atomic)
            assert (caught.value.errno, caught.value.filename) == (errno.ENOSPC, session.path(0, "slab"))
        assert store.keys() == ["a"]
        assert store.bytes_in_use == 3 * MIB
        assert torch.equal(got(store, "a"), pattern(3 * MIB))
        store.put("b", pattern(3 * MIB, 1))
        assert torch.equal(got(store, "b"), pattern(3 * MIB, 1))


def test_one_full_disk_of_two_gives_back_the_room_on_the_other(
    folder: Path, make_file_system: Callable[..., Path]
) -> None:
    (folder / "large").mkdir()
    places = [folder / "large", make_file_system(16 * MIB)]
    with Session(places, name="job") as session, TensorStore(session, weights=[1, 1]) as store:
        with pytest.raises(OSError, match="No space left"):
            store.put("a", torch.zeros(64 * MIB, dtype=torch.uint8))
        assert store.bytes_in_use == 0


def test_a_device_that_fails(make_device: Callable[..., LoopDevice], folder: Path) -> None:
    """The file behind a loop device is cut: the kernel answers EIO from there on."""
    device = make_device(64 * MIB)
    mounted = folder / "mounted"
    mounted.mkdir()
    subprocess.run(["mkfs.ext4", "-q", "-F", "-b", "4096", "-O", "^has_journal", device.path], check=True)
    subprocess.run(["mount", device.path, mounted], check=True)
    try:
        with Session(mounted, name="job") as session:
            store = TensorStore(session, handle=aio_handle(cache="direct"))
            store.put("a", pattern(8 * MIB)).result()
            sync_file_system(mounted)
            os.truncate(device.image, 0)
            with pytest.raises(OSError, match="Input/output error"):
                store.get("a").result()
            future = store.put("a", pattern(8 * MIB, 1))
            assert future.exception() is None or "a" not in store  # a loop device may write beyond its file's end
            store.close()
    finally:
        subprocess.run(["umount", mounted], check=True)


# The end


def test_a_closed_store(session: Session) -> None:
    store = TensorStore(session)
    put = store.put("a", pattern(MIB))
    store.close()
    store.close()
    assert put.done()
    for call in (lambda: store.put("a", torch.zeros(1)), lambda: store.get("a"), lambda: store.drop("a"), store.trim):
        with pytest.raises(ValueError, match="closed"):
            call()
    with TensorStore(session) as again:
        assert len(again) == 0


def test_a_closed_session_has_closed_its_stores(folder: Path) -> None:
    session = Session(folder, name="job")
    store, other = TensorStore(session), TensorStore(session, name="other")
    with pytest.raises(ValueError, match="has an open store named 'other'"):
        TensorStore(session, name="other")
    futures = [each.put("a", pattern(8 * MIB)) for each in (store, other)]
    session.close()
    assert all(future.done() for future in futures)
    with pytest.raises(ValueError, match="closed"):
        store.put("b", pattern(1))
    assert list(folder.iterdir()) == []


def test_close_waits_for_those_who_are_in_the_store(session: Session, eager_switches: None) -> None:
    for _ in range(10):
        store = TensorStore(session)
        ended = threading.Event()

        def use(store: TensorStore = store, ended: threading.Event = ended) -> None:
            while not ended.is_set():
                store.put("a", pattern(10_000))
                store.get("a")

        def work(_: int, use: Callable[[], None] = use) -> None:
            with pytest.raises(ValueError, match="closed"):
                use()

        timer = threading.Timer(0.01, store.close)
        timer.start()
        in_threads(work, 3)
        ended.set()
        timer.join()


def test_a_forked_child_has_no_part_in_it(session: Session) -> None:
    handle = Slow("pwrite")
    store = TensorStore(session, handle=handle)
    future = store.put("a", pattern(MIB))

    def child() -> None:
        for call in (store.keys, store.wait, lambda: store.get("a"), lambda: store.put("b", pattern(1)), future.result):
            with pytest.raises(RuntimeError, match="the parent's"):
                call()
        assert not future.done()
        names = [
            os.readlink(f"/proc/self/fd/{fd}")
            for fd in os.listdir("/proc/self/fd")
            if os.path.exists(f"/proc/self/fd/{fd}")
        ]
        assert session.path(0, "slab") not in names
        store.close()
        session.close()

    in_child(child)
    handle.go.set()
    assert torch.equal(got(store, "a"), pattern(MIB))


def test_descriptors_do_not_stay(folder: Path) -> None:
    def once() -> None:
        with Session(folder, name="job", reuse=True) as session, TensorStore(session) as store:
            store.put("a", pattern(MIB)).result()
            store.get("a").result()

    once()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        once()
    assert len(os.listdir("/proc/self/fd")) == before


def test_at_exit_what_is_under_way_ends_and_the_folder_goes(folder: Path) -> None:
    program = """
    import sys, torch
    from nvme_ops.storage import Session, TensorStore
    store = TensorStore(Session(sys.argv[1], name="job"))
    for number in range(20):
        store.put(str(number), torch.full((1 << 20,), float(number)))
    reads = [store.get(str(number)) for number in range(20)]
    """
    result = run_python(program, folder)
    assert result.stderr == ""
    assert list(folder.iterdir()) == []
