"""What is kept survives a power failure: flushes, their order and their failures, and the record of the last step."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import random
import re
import shutil
import signal
import stat
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from nvme_ops import aio_handle
from nvme_ops.errors import FormatError
from nvme_ops.offload import NvmeOptimizer
from nvme_ops.offload.optimizer.records import Records, _checksum
from nvme_ops.storage import Session, TensorStore
from nvme_ops.storage.striped import StripedSlabs
from tests.conftest import in_child, run_python
from tests.faults import promises_keep
from tests.offload.test_optimizer_kept import kept, pull, small
from tests.offload.training import equal

PAGE = 4096


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, begin: int, end: int) -> None:
    for step in range(begin, end):
        pull(model, step)
        optimizer.step()


def same_as_torch(optimizer: NvmeOptimizer, steps: int) -> bool:
    """Whether the states are those of torch's own optimizer after so many steps."""
    other = small()
    plain = torch.optim.AdamW(other.parameters(), lr=0.01)
    train(other, plain, 0, steps)
    found, expected = optimizer.state_dict()["state"], plain.state_dict()["state"]
    return optimizer.steps == steps and all(
        equal(list(found[each].values()), list(expected[each].values())) for each in expected
    )


def records(folder: Path) -> list[Path]:
    """The files of the records, the newer one first."""
    found = [each for each in folder.rglob("*") if each.is_file() and b"nvme_ops commit 2" in each.read_bytes()[:17]]
    return sorted(found, key=lambda each: -int(each.read_bytes().split()[3]))


@contextlib.contextmanager
def restarted() -> Iterator[None]:
    """As if the machine had been started since."""
    with mock.patch("nvme_ops.offload.optimizer.records.boot_id", return_value="another"):
        yield


class Flushes:
    """Stands for ``os.fdatasync``: counts, fails, or waits before each until ``let`` is set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.fail: Callable[[str], bool] = lambda _: False
        self.files: list[str] = []
        self.let = threading.Event()
        self.let.set()
        self._real = os.fdatasync
        monkeypatch.setattr(os, "fdatasync", self._flush)

    def _flush(self, fd: int) -> None:
        assert self.let.wait(60)
        name = os.readlink(f"/proc/self/fd/{fd}")
        self.files.append(name)
        if self.fail(name):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        self._real(fd)


@pytest.fixture
def flushes(monkeypatch: pytest.MonkeyPatch) -> Flushes:
    return Flushes(monkeypatch)


class Disks:
    """What a power failure would leave of the files in a folder: what was flushed, and any pages of what was not."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, flushed: bool) -> None:
        self.folder, self.durable, self._lock = folder, dict[Path, bytes](), threading.RLock()
        self.moment: Callable[[], None] = lambda: None
        real_sync, real_write, real_rename = os.fdatasync, os.pwrite, os.rename

        def fdatasync(fd: int) -> None:
            path = Path(os.readlink(f"/proc/self/fd/{fd}"))
            content = self._content(path) if folder in path.parents else b""
            real_sync(fd)
            with self._lock:
                if flushed and folder in path.parents:
                    self.durable[path] = content
            self.moment()

        def pwrite(fd: int, content: bytes, place: int) -> int:
            done = real_write(fd, content, place)
            self.moment()
            return done

        def rename(one: str, other: str) -> None:  # durable files alone are renamed before they are written to
            real_rename(one, other)
            with self._lock:
                if Path(one) in self.durable:
                    self.durable[Path(other)] = self.durable.pop(Path(one))

        monkeypatch.setattr(os, "fdatasync", fdatasync)
        monkeypatch.setattr(os, "pwrite", pwrite)
        monkeypatch.setattr(os, "rename", rename)

    @staticmethod
    def _content(path: Path) -> bytes:
        with path.open("rb") as file:
            return file.read(4 << 20)  # extents are taken from the beginning

    def crash(self, target: Path, rng: random.Random) -> None:
        """Copies what is left."""
        with self._lock:
            share = rng.choice((0.0, 0.1, 0.5, 1.0))
            for path in [each for each in self.folder.rglob("*") if each.is_file()]:
                now, durable = self._content(path), self.durable.get(path, b"")
                left = bytearray(durable.ljust(len(now), b"\0"))
                for begin in range(0, len(now), PAGE):
                    if rng.random() < share or path.name == "owner":
                        left[begin : begin + PAGE] = now[begin : begin + PAGE]
                other = target / path.relative_to(self.folder)
                other.parent.mkdir(0o700, parents=True, exist_ok=True)
                other.write_bytes(left)
                os.truncate(other, path.stat().st_size)
                other.chmod(stat.S_IMODE(path.stat().st_mode))


class Waiting(aio_handle):
    """Writes are moments at which the power may fail."""

    moment: Callable[[], None] = staticmethod(lambda: None)

    def submit_pwrite(self, *arguments: Any, **options: Any) -> Any:
        future = super().submit_pwrite(*arguments, **options)
        future.result()
        self.moment()
        return future


@pytest.mark.parametrize(("option", "flushed"), [*((each, True) for each in promises_keep.OPTIONS), ("plain", False)])
def test_a_power_failure_costs_the_newest_step_and_no_more(
    folder: Path, option: str, flushed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On disks made up here; with flushes that do nothing it is seen to be lost, or mixed."""
    monkeypatch.setattr(promises_keep, "STEPS", 6)
    monkeypatch.setattr(promises_keep, "_SIZES", ((70, 1100), (3, 50), (7,)))
    disks, handle, rng = Disks(folder / "disk", monkeypatch, flushed), Waiting(backend="threads"), random.Random(option)
    crashed: list[tuple[Path, list[str]]] = []
    promised: list[str] = []

    def moment() -> None:
        if promised and rng.random() < 0.4:
            crashed.append((folder / f"crash {len(crashed)}", list(promised)))
            disks.crash(crashed[-1][0], rng)

    disks.moment = moment
    handle.moment = moment
    with monkeypatch.context() as patched:
        made = promises_keep.made
        patched.setattr(promises_keep, "made", lambda *given, **options: made(*given, handle=handle, **options))
        promises_keep.write(str(folder / "disk"), promised.append, option)
    disks.moment = lambda: None
    assert len(crashed) > 10
    found = []
    for place, lines in crashed:
        try:
            found.append(promises_keep.check(str(place), lines, option))
        except (OSError, ValueError) as error:
            found.append(f"lost: {error}")
        shutil.rmtree(place)
    assert (set(found) == {"fine"}) is flushed, found


def test_a_step_flushes_each_file_once_beside_what_follows(folder: Path, flushes: Flushes) -> None:
    with kept(folder, model := small()) as optimizer:
        train(model, optimizer, 0, 2)
        optimizer._states.settle()
        flushes.files.clear()
        flushes.let.clear()
        train(model, optimizer, 2, 3)  # returns before its flushes
        assert optimizer.steps == 3
        assert not flushes.files
        flushes.let.set()
        optimizer._states.settle()
        names = [Path(each).read_bytes()[:17] == b"nvme_ops commit 2" for each in flushes.files]
        assert names == [False, True], "the data before the record that names them"
        flushes.files.clear()
    assert not flushes.files, "closing has nothing to flush any more"


@pytest.mark.parametrize(("boot", "expected"), [("the same", 3), ("another", 2)])
def test_killed_before_its_flush_a_step_counts_until_the_machine_starts_again(
    folder: Path, boot: str, expected: int
) -> None:
    def child() -> None:
        torch.set_num_threads(1)
        optimizer = kept(folder, model := small())
        train(model, optimizer, 0, 2)
        optimizer._states.settle()
        with mock.patch.object(StripedSlabs, "sync", side_effect=threading.Event().wait):
            train(model, optimizer, 2, 3)
            os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(AssertionError, match="-9"):
        in_child(child)
    with contextlib.ExitStack() as stack:
        if boot == "another":
            stack.enter_context(restarted())
        with pytest.raises(ValueError, match="other parameters"):  # who cannot use them takes nothing away
            kept(folder, torch.nn.Linear(301, 300))
        optimizer = stack.enter_context(kept(folder, model := small()))
        assert same_as_torch(optimizer, expected)
    with restarted(), kept(folder, model) as optimizer:
        assert same_as_torch(optimizer, expected), "it was made durable since"


def partly(model: torch.nn.Module, step: int) -> None:
    """Only one parameter has a gradient."""
    pull(model, step)
    next(model.parameters()).grad = None


@pytest.mark.parametrize("file", ["slab", "record"])
@pytest.mark.parametrize("then", ["step", "save_states", "close", "load_states"])
def test_a_flush_that_fails_is_told_once_and_its_data_written_anew(
    folder: Path, flushes: Flushes, file: str, then: str
) -> None:
    def is_it(name: str) -> bool:
        return (Path(name) in records(folder)) is (file == "record")

    optimizer = kept(folder, model := small())
    train(model, optimizer, 0, 2)
    optimizer.save_states(folder / "states of 2")
    flushes.fail = is_it
    train(model, optimizer, 2, 3)
    optimizer._states._flush[0].wait()  # type: ignore[index]
    flushes.fail = lambda _: False
    flushed = len(flushes.files)
    before = same_as_torch(optimizer, 3)
    act: Callable[[], object] = {
        "step": optimizer.step,
        "save_states": lambda: optimizer.save_states(folder / "states"),
        "load_states": lambda: optimizer.load_states(folder / "states of 2"),
        "close": optimizer.close,
    }[then]  # type: ignore[assignment]
    with pytest.raises(OSError, match=r"fdatasync.*Input/output error") as caught:
        act()
    assert caught.value.errno == errno.EIO
    assert is_it(caught.value.filename)
    if then == "close":
        with restarted(), kept(folder, model) as optimizer:
            assert same_as_torch(optimizer, 2), "the step before"
        return
    assert before
    assert same_as_torch(optimizer, 3)
    assert len(flushes.files) <= flushed + (file == "record"), "it is not tried again"  # but to make it void
    shutil.copytree(folder, folder / "crashed", ignore=shutil.ignore_patterns("crashed"))
    with restarted(), kept(folder / "crashed", small()) as other:
        assert same_as_torch(other, 2)
    if then == "step":
        named = {chunk: version.slot for chunk, version in optimizer._states.now.items()}
        partly(model, 3)
        optimizer.step()
        assert all(version.slot != named[chunk] for chunk, version in optimizer._states.now.items()), "all anew"
    elif then == "save_states":
        assert not optimizer.save_states(folder / "states")
        optimizer.load_states(folder / "states")
        assert same_as_torch(optimizer, 3)
    else:
        optimizer.load_states(folder / "states of 2")
        assert same_as_torch(optimizer, 2)
    steps = optimizer.steps
    expected = optimizer.state_dict()["state"]
    optimizer.close()
    with restarted(), kept(folder, small()) as optimizer:
        assert optimizer.steps == steps
        found = optimizer.state_dict()["state"]
        assert all(equal(list(found[each].values()), list(expected[each].values())) for each in expected)


def test_closing_after_a_flush_that_failed_writes_anew_or_says_that_the_step_is_lost(
    folder: Path, flushes: Flushes
) -> None:
    for failing in (False, True):
        optimizer = kept(folder, model := small(), name=str(failing))
        train(model, optimizer, 0, 2)
        optimizer._states.settle()
        flushes.fail = lambda _: True
        with pytest.raises(OSError, match="fdatasync"):
            train(model, optimizer, 2, 4)
        flushes.fail = lambda _, failing=failing: failing  # type: ignore[misc]
        with pytest.raises(OSError, match="fdatasync") if failing else contextlib.nullcontext():
            optimizer.close()
        flushes.fail = lambda _: False
        with restarted(), kept(folder, small(), name=str(failing)) as optimizer:
            assert same_as_torch(optimizer, optimizer.steps)
            assert optimizer.steps == (2 if failing else 3)


def test_a_flush_that_failed_and_nobody_has_asked_for_is_told_at_exit(folder: Path) -> None:
    found = run_python(
        f"""
        import errno, os, torch
        from nvme_ops.offload import NvmeOptimizer
        model = torch.nn.Linear(300, 301)
        optimizer = NvmeOptimizer(model.parameters(), torch.optim.AdamW, {str(folder)!r}, reuse=True)
        def fdatasync(fd):
            raise OSError(errno.EIO, "Input/output error")
        os.fdatasync = fdatasync
        model(torch.ones(300)).sum().backward()
        optimizer.step()
        """,
        fresh=True,
    )
    assert "fdatasync: Input/output error" in found.stderr


DAMAGE = {
    "empty": lambda _: b"",
    "zeros": lambda content: bytes(len(content)),
    "its first sector lost": lambda content: bytes(512) + content[512:],
    "a bit": lambda content: content[:700] + bytes([content[700] ^ 1]) + content[701:],
    "cut": lambda content: content[:-5],
    "not UTF-8": lambda content: b"\xff\xfe" + content[2:],
    "later": lambda content: content.replace(b"commit 2", b"commit 3", 1),
}


@pytest.mark.parametrize("how", list(DAMAGE))
def test_a_damaged_record_is_refused_with_the_name_of_its_file(folder: Path, how: str) -> None:
    with kept(folder, model := small()) as optimizer:
        train(model, optimizer, 0, 2)
    path = records(folder)[0]
    path.write_bytes(DAMAGE[how](path.read_bytes()))
    with pytest.raises(FormatError, match=f"^{re.escape(str(path))}: the record"):
        kept(folder, small())


def test_a_missing_record_is_refused(folder: Path) -> None:
    with kept(folder, model := small()) as optimizer:
        train(model, optimizer, 0, 2)
    newest, other = records(folder)
    for missing in ([newest], [newest, other]):
        for each in missing:
            each.rename(each.with_suffix(".away"))
        with pytest.raises(FormatError, match=r"missing|damaged"):
            kept(folder, small())
        for each in missing:
            each.with_suffix(".away").rename(each)
    with kept(folder, small()) as optimizer:
        assert same_as_torch(optimizer, 2)


@pytest.mark.parametrize("how", list(DAMAGE))
def test_a_record_that_was_being_written_leaves_the_step_before(folder: Path, how: str) -> None:
    (place := folder / "place").mkdir()
    optimizer = kept(place, model := small())
    train(model, optimizer, 0, 2)
    optimizer._states.settle()
    with mock.patch.object(StripedSlabs, "sync", side_effect=OSError(errno.EIO, "fdatasync")):
        train(model, optimizer, 2, 3)
        optimizer._states._flush[0].wait()  # type: ignore[index]
    shutil.copytree(place, crashed := folder / "crashed")
    with pytest.raises(OSError, match="fdatasync"):
        optimizer.step()
    path = records(crashed)[0]
    path.write_bytes(DAMAGE[how](path.read_bytes()))
    with kept(crashed, small()) as optimizer:
        assert same_as_torch(optimizer, 2)


def as_earlier(folder: Path, version: int) -> None:
    """Has the folder as earlier versions left it: a journal, and the record in the store."""
    with Session(folder, name="optimizer", reuse=True) as session:
        found = Records(session)
        found.close()
        content = found.newest.content
        places = content.pop("places")
        with TensorStore(session, journal=False) as store:
            store.adopt(places)
            tensors = {key: torch.zeros(value.shape, dtype=value.dtype) for key, value in store._values.items()}
            for key, tensor in tensors.items():
                store.get(key, tensor).result()
        for each in Path(session.folders[0]).iterdir():
            if each.name != "owner":
                each.unlink()
        text = json.dumps(content).encode()
        line = f"nvme_ops commit 1 {_checksum(text):08x}\n".encode() if version else b""
        with TensorStore(session) as store:
            for key, tensor in {
                **tensors,
                "commit": torch.frombuffer(bytearray(line + text), dtype=torch.uint8),
            }.items():
                store.put(key, tensor).result()


@pytest.mark.parametrize("version", [0, 1])
def test_what_earlier_versions_have_kept_is_gone_on_with(folder: Path, version: int) -> None:
    with kept(folder, model := small()) as optimizer:
        train(model, optimizer, 0, 2)
    as_earlier(folder, version)
    with kept(folder, model) as optimizer:
        assert same_as_torch(optimizer, 2)
        train(model, optimizer, 2, 4)
    with kept(folder, model) as optimizer:
        assert same_as_torch(optimizer, 4)
    with Session(folder, name="optimizer", reuse=True) as session, pytest.raises(FormatError, match="index"):
        TensorStore(session)  # as they would, and know no other record


@pytest.mark.parametrize("damage", [b'"steps": 2', b'{"ste', b"nvme_ops commit 1"])
def test_a_damaged_record_of_an_earlier_version_is_refused(folder: Path, damage: bytes) -> None:
    with kept(folder, model := small()) as optimizer:
        train(model, optimizer, 0, 2)
    as_earlier(folder, 1)
    with Session(folder, name="optimizer", reuse=True) as session, TensorStore(session) as store:
        (future := store.get("commit")).result()
        content = bytes(future.tensor.numpy())
        changed = bytearray(content.replace(damage, b"\xff" * len(damage)))
        store.put("commit", torch.frombuffer(changed, dtype=torch.uint8)).result()
    for _ in range(2):
        with pytest.raises(
            FormatError, match=f"^{re.escape(str(folder))}.*[0-9a-f]{{32}}: the record of the last step"
        ):
            kept(folder, small())


def test_a_forked_child_takes_nothing_away(folder: Path, flushes: Flushes) -> None:
    with kept(folder, model := small()) as optimizer:
        train(model, optimizer, 0, 2)
        optimizer._states.settle()
        flushes.let.clear()
        train(model, optimizer, 2, 3)

        def child() -> None:
            with pytest.raises(RuntimeError, match="parent's"):
                train(model, optimizer, 3, 4)
            optimizer.close()

        in_child(child)
        flushes.let.set()
    with restarted(), kept(folder, small()) as optimizer:
        assert same_as_torch(optimizer, 3)


def test_ctrl_c_while_a_step_waits_for_the_flush_before_it(folder: Path, flushes: Flushes) -> None:
    with kept(folder, model := small()) as optimizer:
        train(model, optimizer, 0, 2)
        optimizer._states.settle()
        flushes.let.clear()
        train(model, optimizer, 2, 3)
        pull(model, 3)
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            optimizer.step()
        flushes.let.set()
        optimizer.step()
        assert same_as_torch(optimizer, 4)
    with restarted(), kept(folder, small()) as optimizer:
        assert same_as_torch(optimizer, 4)


def test_several_folders_are_flushed_before_the_record(folder: Path, flushes: Flushes) -> None:
    places = [folder / "one", folder / "other"]
    for each in places:
        each.mkdir()
    model = torch.nn.Linear(2000, 600)
    with NvmeOptimizer(model.parameters(), torch.optim.AdamW, places, reuse=True, memory_budget="8M") as optimizer:
        train(model, optimizer, 0, 2)
        optimizer._states.settle()
        flushes.files.clear()
        train(model, optimizer, 2, 3)
        optimizer._states.settle()
        kinds = [Path(each).read_bytes()[:17] == b"nvme_ops commit 2" for each in flushes.files]
        assert kinds == [False, False, True]
        expected = optimizer.state_dict()["state"][0]["exp_avg"]
    with NvmeOptimizer(model.parameters(), torch.optim.AdamW, places, reuse=True, memory_budget="8M") as optimizer:
        assert torch.equal(optimizer.state_dict()["state"][0]["exp_avg"], expected)
