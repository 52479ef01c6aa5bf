"""States that are kept for the next program: which step that goes on with, whatever ended the one before."""

from __future__ import annotations

import contextlib
import copy
import errno
import json
import os
import random
import re
import shutil
import signal
import stat
import threading
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from nvme_ops import aio_handle
from nvme_ops.base.errors import FormatError
from nvme_ops.base.ranks import Rank
from nvme_ops.io.engine import Op
from nvme_ops.offload import NvmeOptimizer
from nvme_ops.offload.optimizer.records import Records, _checksum
from nvme_ops.offload.optimizer.states import States
from nvme_ops.storage import Session, TensorStore
from nvme_ops.storage.striped import StripedSlabs
from tests.conftest import in_child, run_python
from tests.contract.adapters import WrongResultError
from tests.contract.faulty import WrappedEngine
from tests.crashing_save import kill_at, save_under_strace
from tests.faults import promises_keep
from tests.offload.training import adamw, equal, values

PAGE = 4096


def kept(folder: Path, model: torch.nn.Module, **options: Any) -> NvmeOptimizer:
    return adamw(model, folder, **{"reuse": True, "lr": 0.01, **options})


def small() -> torch.nn.Module:
    torch.manual_seed(2)
    return torch.nn.Linear(300, 301)


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, begin: int, end: int) -> None:
    """Takes steps with gradients that depend on the parameters, without autograd, whose threads a child lacks."""
    for step in range(begin, end):
        for param in model.parameters():
            param.grad = (param.detach() * (step + 1)).sin()
        optimizer.step()


def states(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [value for _, state in sorted(optimizer.state_dict()["state"].items()) for value in state.values()]


def same_as_torch(optimizer: NvmeOptimizer, steps: int) -> bool:
    """Whether the states are those of torch's own optimizer after so many steps."""
    other = small()
    plain = torch.optim.AdamW(other.parameters(), lr=0.01)
    train(other, plain, 0, steps)
    return optimizer.steps == steps and equal(states(optimizer), states(plain))


def records(folder: Path) -> list[Path]:
    """The files of the records, the newer one first."""
    files = [path for path in folder.rglob("*") if path.is_file() and b"nvme_ops commit 2" in path.read_bytes()[:17]]
    return sorted(files, key=lambda path: -int(path.read_bytes().split()[3]))


def restarted() -> Any:
    """As if the machine had been started since."""
    return mock.patch("nvme_ops.offload.optimizer.records.boot_id", return_value="another")


def test_kept_states_go_on_where_they_ended_and_no_others(folder: Path) -> None:
    (folder / "notes.txt").write_text("mine")
    mine = small()
    for step in range(3):
        with kept(folder, mine, memory_budget="8M") as optimizer:
            train(mine, optimizer, step, step + 1)
            with pytest.raises(BlockingIOError, match=f"in use by process {os.getpid()}"):
                kept(folder, small())
            (inner,) = [path for path in folder.iterdir() if path.is_dir()]
            (inner / "foreign").write_text("not ours")
    for model, options, word in (
        (torch.nn.Linear(10, 10), {}, r"'optimizer' in .* has the states of other parameters"),
        (small(), {"amsgrad": True}, "of another optimizer"), (small(), {"memory_budget": "1M"}, "must be 8 MiB"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=word):
            kept(folder, model, **{"memory_budget": "8M", **options})
    with mock.patch("nvme_ops.filesystem.files.sync_folder") as synced:
        with kept(folder, small(), memory_budget="16M") as optimizer:
            assert same_as_torch(optimizer, 3)
        assert mock.call(str(folder.parent)) in synced.mock_calls, "so that a power failure leaves the names"
        with kept(folder, small(), name="another") as optimizer:
            assert optimizer.steps == 0
    assert (inner / "foreign").read_text() == "not ours"
    assert (folder / "notes.txt").read_text() == "mine"


# Kills


def go_on(folder: Path, expected: list[Any], steps: int) -> tuple[int, torch.nn.Module]:
    """Resumes with the parameters of the last step; returns which that was, and the model after ``steps``."""
    model = small()
    with kept(folder, model, handle=aio_handle(backend="threads")) as optimizer:
        first = optimizer.steps
        model.load_state_dict(expected[first])
        train(model, optimizer, first, steps)
    return first, model


def prepare(folder: Path) -> None:
    """One step, in an empty folder."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    go_on(folder, [small().state_dict()], 1)


CHANGING = {"openat", "pwrite64", "write", "ftruncate", "fallocate", "rename", "unlink", "flock"}


@pytest.mark.parametrize("calls", ["some", pytest.param("all", marks=pytest.mark.slow)])
def test_killed_at_any_system_call_of_a_step_it_resumes_the_same_bits(folder: Path, calls: str) -> None:
    place, model = folder / "place", small()
    plain, expected = torch.optim.AdamW(model.parameters(), lr=0.01), [copy.deepcopy(model.state_dict())]
    for step in range(3):
        train(model, plain, step, step + 1)
        expected.append(copy.deepcopy(model.state_dict()))
    prepare(place)
    outcome = save_under_strace(lambda: go_on(place, expected, 2), folder)
    assert (outcome.status, outcome.error) == (0, None)
    points = [point for point in outcome.points() if point[0] in CHANGING]
    seen = set()
    for name, number in points if calls == "all" else points[:: -max(1, len(points) // 8)]:
        prepare(place)
        killed = save_under_strace(lambda: go_on(place, expected, 2), folder, kill_at(name, number))
        assert killed.status in (0, -signal.SIGKILL), (name, number, killed.error)
        first, resumed = go_on(place, expected, 3)
        seen.add(first)
        assert equal(values(resumed), values(model)), f"killed at {name} {number}, found step {first}"
    assert seen == {1, 2}


class Acting(aio_handle):
    """Calls something before each write is begun, when all those before have ended."""

    act: Callable[[], object] = staticmethod(lambda: None)

    def _make_engine(self) -> Any:
        return _ActingEngine(super()._make_engine(), self)

    def after(self, writes: int, act: Callable[[], object]) -> None:
        """Calls something before the write of this number, once."""
        left = iter(range(1, writes))
        self.act = lambda: None if next(left, None) else act()


class _ActingEngine(WrappedEngine):
    def submit(self, op: int, *arguments: Any) -> Any:
        if op == Op.WRITE:
            self._handle.act()
        operation = self._engine.submit(op, *arguments)
        if op == Op.WRITE:
            operation.wait(None)
        return operation


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def loaded(optimizer: NvmeOptimizer, _: torch.nn.Module, handle: Acting, number: int) -> None:
    saved = optimizer.state_dict()
    for state in saved["state"].values():
        state["exp_avg"].fill_(7.0)
    handle.after(number, kill)
    optimizer.load_state_dict(saved)


def attempted_twice(optimizer: NvmeOptimizer, model: torch.nn.Module, handle: Acting, number: int = 0) -> None:
    handle.after(2, lambda: signal.raise_signal(signal.SIGINT))
    with contextlib.suppress(KeyboardInterrupt):
        train(model, optimizer, 7, 8)
    handle.act = lambda: None
    if number:
        handle.after(number, kill)
    train(model, optimizer, 8, 9)


@pytest.mark.parametrize("budget", ["1M", "2M"])  # the second holds some of the states
@pytest.mark.parametrize(("act", "steps", "number"), [(loaded, 1, 5), (loaded, 2, 2), (attempted_twice, 1, 2)])
@pytest.mark.usefixtures("small_chunks")
def test_killed_before_a_commit_it_goes_on_with_the_one_before(
    folder: Path, act: Callable[..., None], steps: int, number: int, budget: str
) -> None:
    """What is committed is not written, whichever place it is in."""

    def child() -> None:
        torch.set_num_threads(1)
        model, handle = small(), Acting(backend="threads")
        optimizer = kept(folder, model, handle=handle, memory_budget=budget)
        train(model, optimizer, 0, steps)
        act(optimizer, model, handle, number)

    with pytest.raises(AssertionError, match="-9"):
        in_child(child)
    with kept(folder, small()) as optimizer:
        assert same_as_torch(optimizer, steps)


def test_a_failed_step_takes_a_third_place_for_no_longer_than_it_lasts(folder: Path) -> None:
    model, handle = small(), Acting()
    with kept(folder, model, handle=handle) as optimizer:
        train(model, optimizer, 0, 2)
        before = optimizer.stats().bytes_stored
        attempted_twice(optimizer, model, handle)
        train(model, optimizer, 3, 5)
        assert optimizer.stats().bytes_stored <= before


# Damage


@pytest.mark.parametrize("change", [lambda path: os.truncate(path, 4096), Path.unlink], ids=["cut", "gone"])
def test_states_that_somebody_has_damaged_are_refused(folder: Path, change: Callable[[Path], object]) -> None:
    with kept(folder, model := small()) as optimizer:
        train(model, optimizer, 0, 1)
    change(max((path for path in folder.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size))
    model = small()
    with pytest.raises((OSError, ValueError, EOFError)):
        train(model, kept(folder, model), 1, 2)
    assert equal(values(model), values(small()))


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda _: b"",
    "its first sector lost": lambda content: bytes(512) + content[512:],
    "a bit": lambda content: content[:700] + bytes([content[700] ^ 1]) + content[701:],
    "cut": lambda content: content[:-5],
    "later": lambda content: content.replace(b"commit 2", b"commit 3", 1),
}


def test_a_damaged_or_missing_record_is_refused_with_its_name(folder: Path) -> None:
    with kept(folder, model := small()) as optimizer:
        train(model, optimizer, 0, 2)
    newest, other = records(folder)
    content = newest.read_bytes()
    for damage in DAMAGE.values():
        newest.write_bytes(damage(content))
        with pytest.raises(FormatError, match=f"^{re.escape(str(newest))}: the record"):
            kept(folder, small())
    newest.write_bytes(content)
    for missing in ([newest], [newest, other]):
        for path in missing:
            path.rename(path.with_suffix(".away"))
        with pytest.raises(FormatError, match=r"missing|damaged"):
            kept(folder, small())
        for path in missing:
            path.with_suffix(".away").rename(path)
    with kept(folder, small()) as optimizer:
        assert same_as_torch(optimizer, 2)


def as_earlier(folder: Path, version: int, damage: bytes = b"") -> None:
    """Has the folder as earlier versions left it: a journal, and the record in the store, perhaps with a damage."""
    with Session(folder, name="optimizer", reuse=True) as session:
        current = Records(session)
        current.close()
        content = current.newest.content
        places = content.pop("places")
        with TensorStore(session, journal=False) as store:
            store.adopt(places)
            tensors = {key: torch.zeros(value.shape, dtype=value.dtype) for key, value in store._values.items()}
            for key, tensor in tensors.items():
                store.get(key, tensor).result()
        for path in Path(session.folders[0]).iterdir():
            if path.name != "owner":
                path.unlink()
        text = json.dumps(content).encode()
        record = (f"nvme_ops commit 1 {_checksum(text):08x}\n".encode() if version else b"") + text
        record = record.replace(damage, b"\xff" * len(damage)) if damage else record
        tensors["commit"] = torch.frombuffer(bytearray(record), dtype=torch.uint8)
        with TensorStore(session) as store:
            for key, tensor in tensors.items():
                store.put(key, tensor).result()


@pytest.mark.parametrize(("version", "damage"), [(0, b""), (1, b""), (1, b'"steps": 2'), (1, b"nvme_ops commit 1")])
def test_states_of_earlier_versions_are_continued_unless_damaged(folder: Path, version: int, damage: bytes) -> None:
    with kept(folder, model := small()) as optimizer:
        train(model, optimizer, 0, 2)
    as_earlier(folder, version, damage)
    if damage:
        for _ in range(2):
            with pytest.raises(FormatError, match=f"^{re.escape(str(folder))}.*: the record of the last step"):
                kept(folder, small())
        return
    with kept(folder, model) as optimizer:
        assert same_as_torch(optimizer, 2)
        train(model, optimizer, 2, 3)
    with kept(folder, model) as optimizer:
        assert same_as_torch(optimizer, 3)
    with Session(folder, name="optimizer", reuse=True) as session, pytest.raises(FormatError, match="index"):
        TensorStore(session)  # as they would, and know no other record


def test_states_of_a_version_without_empty_parameters_are_continued(folder: Path) -> None:
    model = small()
    model.register_parameter("none", torch.nn.Parameter(torch.zeros(0, 3)))
    full = States.record

    def record(self: States, *arguments: Any) -> dict[str, Any]:
        content = full(self, *arguments)
        for chunk, entry in zip(self.division.chunks, content["chunks"], strict=True):
            entry[1] = [one for one, part in zip(entry[1], chunk.slices, strict=True) if part.parameter.numel()]
        return content

    with mock.patch.object(States, "record", record), kept(folder, model) as optimizer:
        train(model, optimizer, 0, 2)
    for step in (2, 3):
        with kept(folder, model) as optimizer:
            assert optimizer.steps == step
            assert len(optimizer.state) == step  # none has states from step 3 on
            train(model, optimizer, step, step + 1)


# Other ranks


def as_rank(rank: int, world_size: int) -> Any:
    return mock.patch("nvme_ops.base.ranks.distributed", return_value=Rank(rank, world_size))


@pytest.mark.parametrize("earlier", [False, True])
@pytest.mark.filterwarnings("error")
def test_the_only_rank_of_a_launcher_goes_on_as_a_program_without_one_does(folder: Path, earlier: bool) -> None:
    name = "optimizer of rank 0 of 1" if earlier else "optimizer"  # as earlier versions have named it
    with kept(folder, model := small(), name=name) as optimizer:
        train(model, optimizer, 0, 1)
    with as_rank(0, 1), kept(folder, model) as optimizer:
        assert optimizer.steps == 1
        train(model, optimizer, 1, 2)
    with kept(folder, model) as optimizer:
        assert same_as_torch(optimizer, 2)
    assert len(list(folder.iterdir())) == 1


@pytest.mark.filterwarnings("ignore:'optimizer' begins without states")
def test_states_of_another_number_of_ranks_are_named_and_can_be_taken(folder: Path) -> None:
    for rank in range(2):
        with as_rank(rank, 2), kept(folder, model := small()) as optimizer:
            train(model, optimizer, 0, 2 + rank)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with kept(folder, small(), name="another"), as_rank(1, 2), kept(folder, small()) as optimizer:
            assert optimizer.steps == 3
            optimizer.save_states(folder / "states")
    some = rf"step 2 of 'optimizer of rank 0 of 2' in {folder}/\S+"
    with as_rank(1, 3), pytest.warns(UserWarning, match=rf"at step 0, as rank 1 of 3, .*{some}.* load_states") as said:
        optimizer = kept(folder, model)
    assert said[0].filename.endswith("training.py")  # which makes it
    with optimizer:
        optimizer.load_states(folder / "states")
        assert same_as_torch(optimizer, 3)
    with pytest.warns(UserWarning, match=rf"{some}.*name='optimizer of rank 0 of 2' continues"):
        kept(folder, model).close()
    with kept(folder, model, name="optimizer of rank 0 of 2") as optimizer:
        assert same_as_torch(optimizer, 2)


def test_what_is_kept_takes_no_more_space_than_it_needs(folder: Path) -> None:
    """Also where the program ends without close()."""
    program = """
        import sys, torch
        from tests.offload.test_optimizer_kept import kept, small, train
        train(model := small(), optimizer := kept(sys.argv[1], model), 0, 1)
    """
    run_python(program, folder)
    for step in (1, 2):
        taken = sum(path.stat().st_blocks * 512 for path in folder.rglob("*") if path.is_file())
        with kept(folder, model := small()) as optimizer:
            train(model, optimizer, step, step + 1)
            needed = optimizer.stats().bytes_stored
        assert needed // 2 <= taken <= needed + 64 * 1024  # the first step needs one of two places


# Flushes


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


def test_a_step_flushes_each_file_once_beside_what_follows(folder: Path, flushes: Flushes) -> None:
    places: Any = [folder / "one", folder / "two"]
    model = torch.nn.Linear(2000, 600)
    options: Any = {"reuse": True, "memory_budget": "8M"}
    with NvmeOptimizer(model.parameters(), torch.optim.AdamW, places, **options) as optimizer:
        train(model, optimizer, 0, 2)
        optimizer._states.settle()
        flushes.files.clear()
        flushes.let.clear()
        train(model, optimizer, 2, 3)  # returns before its flushes
        assert (optimizer.steps, flushes.files) == (3, [])
        flushes.let.set()
        optimizer._states.settle()
        of_records = [Path(file) in records(folder) for file in flushes.files]
        assert of_records == [False, False, True], "the data before the record that names them"
        flushes.files.clear()
        expected = states(optimizer)
    assert not flushes.files, "closing has nothing to flush any more"
    with NvmeOptimizer(model.parameters(), torch.optim.AdamW, places, **options) as optimizer:
        assert equal(states(optimizer), expected)


@pytest.mark.parametrize(("another_boot", "expected"), [(False, 3), (True, 2)])
def test_killed_before_its_flush_a_step_counts_until_the_next_boot(
    folder: Path, another_boot: bool, expected: int
) -> None:
    def child() -> None:
        torch.set_num_threads(1)
        optimizer = kept(folder, model := small())
        train(model, optimizer, 0, 2)
        optimizer._states.settle()
        with mock.patch.object(StripedSlabs, "sync", side_effect=threading.Event().wait):
            train(model, optimizer, 2, 3)
            kill()

    with pytest.raises(AssertionError, match="-9"):
        in_child(child)
    with restarted() if another_boot else contextlib.nullcontext():
        with pytest.raises(ValueError, match="other parameters"):  # who cannot use them takes nothing away
            kept(folder, torch.nn.Linear(301, 300))
        with kept(folder, model := small()) as optimizer:
            assert same_as_torch(optimizer, expected)
    with restarted(), kept(folder, model) as optimizer:
        assert same_as_torch(optimizer, expected), "it was made durable since"


@pytest.mark.parametrize("budget", ["1M", "2M"])
@pytest.mark.parametrize(("file", "then"), [("slab", "step"), ("record", "save_states"), ("record", "load_states")])
@pytest.mark.usefixtures("small_chunks")
def test_a_flush_that_fails_is_told_once_and_its_data_written_anew(
    folder: Path, flushes: Flushes, file: str, then: str, budget: str
) -> None:

    def is_it(name: str) -> bool:
        return (Path(name) in records(folder)) is (file == "record")

    optimizer = kept(folder, model := small(), memory_budget=budget)
    train(model, optimizer, 0, 2)
    optimizer.save_states(folder / "states of 2")
    flushes.fail = is_it
    train(model, optimizer, 2, 3)
    optimizer._states._flush.wait()  # type: ignore[union-attr]
    flushes.fail = lambda _: False
    flushed = len(flushes.files)
    if file == "record":
        assert all(map(is_it, flushes.files[-2:])), "and once more, that it is void"
    arguments = {"save_states": [folder / "states"], "load_states": [folder / "states of 2"]}.get(then, [])
    with pytest.raises(OSError, match=r"fdatasync.*Input/output error") as caught:
        getattr(optimizer, then)(*arguments)
    assert caught.value.errno == errno.EIO
    assert is_it(caught.value.filename)
    assert same_as_torch(optimizer, 3)
    assert len(flushes.files) <= flushed + (file == "record"), "it is not tried again"  # but to make it void
    shutil.copytree(folder, folder / "crashed", ignore=shutil.ignore_patterns("crashed"))
    with restarted(), kept(folder / "crashed", small()) as other:
        assert same_as_torch(other, 2)
    if then == "step":
        named = {chunk: version.slot for chunk, version in optimizer._states.current.items()}
        next(model.parameters()).grad = None
        optimizer.step()
        assert all(version.slot != named[chunk] for chunk, version in optimizer._states.current.items()), "all anew"
    elif then == "save_states":
        assert not optimizer.save_states(folder / "states")
        optimizer.load_states(folder / "states")
        assert same_as_torch(optimizer, 3)
    else:
        optimizer.load_states(folder / "states of 2")
        assert same_as_torch(optimizer, 2)
    steps, expected = optimizer.steps, states(optimizer)
    optimizer.close()
    with restarted(), kept(folder, small()) as optimizer:
        assert (optimizer.steps, equal(states(optimizer), expected)) == (steps, True)


@pytest.mark.parametrize("failing", [False, True])
def test_closing_after_a_failed_flush_writes_anew_or_says_what_is_lost(
    folder: Path, flushes: Flushes, failing: bool
) -> None:
    optimizer = kept(folder, model := small())
    train(model, optimizer, 0, 2)
    optimizer._states.settle()
    flushes.fail = lambda _: True
    with pytest.raises(OSError, match="fdatasync"):
        train(model, optimizer, 2, 4)
    flushes.fail = lambda _: failing
    with pytest.raises(OSError, match="fdatasync") if failing else contextlib.nullcontext():
        optimizer.close()
    flushes.fail = lambda _: False
    with restarted(), kept(folder, small()) as optimizer:
        assert same_as_torch(optimizer, 2 if failing else 3)


def test_a_flush_that_failed_and_nobody_has_asked_for_is_told_at_exit(folder: Path) -> None:
    program = """
        import errno, os, sys
        from tests.offload.test_optimizer_kept import kept, small, train
        optimizer = kept(sys.argv[1], model := small())
        def fdatasync(fd):
            raise OSError(errno.EIO, "Input/output error")
        os.fdatasync = fdatasync
        train(model, optimizer, 0, 1)
    """
    assert "fdatasync: Input/output error" in run_python(program, folder).stderr


def test_during_a_long_flush_a_fork_is_harmless_and_ctrl_c_works(folder: Path, flushes: Flushes) -> None:
    with kept(folder, model := small()) as optimizer:
        train(model, optimizer, 0, 2)
        optimizer._states.settle()
        flushes.let.clear()
        train(model, optimizer, 2, 3)

        def child() -> None:
            with pytest.raises(RuntimeError, match="parent process"):
                train(model, optimizer, 3, 4)
            optimizer.close()

        in_child(child)
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            train(model, optimizer, 3, 4)
        flushes.let.set()
        optimizer.step()
        assert same_as_torch(optimizer, 4)
    with restarted(), kept(folder, small()) as optimizer:
        assert same_as_torch(optimizer, 4)


# Power failures


class Disks:
    """What a power failure would leave of the files in a folder: what was flushed, and any pages of what was not."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, flushed: bool) -> None:
        self.folder, self.durable, self._lock = folder, dict[int, bytes](), threading.RLock()
        self.moment: Callable[[], object] = lambda: None
        real_sync, real_write = os.fdatasync, os.pwrite

        def fdatasync(fd: int) -> None:
            content = self._content(Path(f"/proc/self/fd/{fd}"))
            real_sync(fd)
            with self._lock:
                if flushed:
                    self.durable[os.fstat(fd).st_ino] = content
            self.moment()

        def pwrite(fd: int, content: bytes, place: int) -> int:
            done = real_write(fd, content, place)
            self.moment()
            return done

        monkeypatch.setattr(os, "fdatasync", fdatasync)
        monkeypatch.setattr(os, "pwrite", pwrite)

    @staticmethod
    def _content(path: Path) -> bytes:
        with path.open("rb") as file:
            return file.read(4 << 20)  # extents are taken from the beginning

    def crash(self, target: Path, rng: random.Random) -> None:
        """Copies what is left."""
        with self._lock:
            share = rng.choice((0.0, 0.1, 0.5, 1.0))
            for path in [entry for entry in self.folder.rglob("*") if entry.is_file()]:
                now, status = self._content(path), path.stat()
                left = bytearray(self.durable.get(status.st_ino, b"").ljust(len(now), b"\0"))
                for begin in range(0, len(now), PAGE):
                    if rng.random() < share or path.name == "owner":
                        left[begin : begin + PAGE] = now[begin : begin + PAGE]
                other = target / path.relative_to(self.folder)
                other.parent.mkdir(0o700, parents=True, exist_ok=True)
                other.write_bytes(left)
                os.truncate(other, status.st_size)
                other.chmod(stat.S_IMODE(status.st_mode))


@pytest.mark.parametrize(("option", "flushed"), [("checksum", True), ("backward", True), ("plain", False)])
def test_a_power_failure_costs_the_newest_step_and_no_more(
    folder: Path, option: str, flushed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On disks made up here; with flushes that do nothing it is seen to be lost, or mixed."""
    monkeypatch.setattr(promises_keep, "STEPS", 6)
    monkeypatch.setattr(promises_keep, "_SIZES", ((70, 1100), (3, 50), (7,)))
    disks, handle, rng = Disks(folder / "disk", monkeypatch, flushed), Acting(backend="threads"), random.Random(option)
    crashed: list[tuple[Path, list[tuple[str, int]]]] = []
    promised: list[tuple[str, int]] = []

    def moment() -> None:
        if promised and rng.random() < 0.4:
            crashed.append((folder / f"crash {len(crashed)}", list(promised)))
            disks.crash(crashed[-1][0], rng)

    disks.moment = handle.act = moment
    with monkeypatch.context() as patched:
        patched.setattr(promises_keep, "made", partial(promises_keep.made, handle=handle))
        promises_keep.write(folder / "disk", promised.append, option)
    disks.moment = lambda: None
    assert len(crashed) > 10
    wrong = []
    for place, told in crashed:
        try:
            promises_keep.check(place, told, option)
        except (OSError, ValueError, WrongResultError) as error:
            wrong.append(error)
        shutil.rmtree(place)
    assert (not wrong) is flushed, wrong
