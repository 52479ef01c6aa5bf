"""Entries in memory that processes share: who reads their files, and what the others do meanwhile."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from nvme_ops import FormatError
from nvme_ops.io.engine import Priority
from nvme_ops.io.file import shared_handle
from nvme_ops.offload.residency import shared_files as module
from nvme_ops.offload.residency.files import FileEntry
from nvme_ops.offload.residency.shared_files import SharedFiles, shared_files
from nvme_ops.storage.source import FileExtent, WeightFile
from tests.conftest import MIB, contents, pattern, store

SIZE = 3 * MIB


@pytest.fixture
def path(folder: Path) -> Path:
    return store(folder / "weights", pattern(SIZE))


class Process:
    """As much as a process has of a model of one weight."""

    def __init__(self, path: Path, flags: int = os.O_RDONLY, more: Sequence[Path] = ()) -> None:
        self.file, *others = (WeightFile(os.open(file, flags), str(file), shared_handle()) for file in [path, *more])
        shared = shared_files([self.file, *others], lambda _: 8 * MIB)
        assert isinstance(shared, SharedFiles)
        self.files, self.share = shared, shared.tier.share()
        self.entry = FileEntry([(FileExtent(self.file, 0, SIZE), 0)], SIZE)

    def read(self) -> tuple[torch.Tensor, Any, int]:
        memory = self.files.allocate(self.entry, self.share)
        assert memory is not None
        return self.files.read(self.entry, memory, Priority.DEMAND)

    def require_read(self, wanted: torch.Tensor) -> None:
        """Fails unless it reads the file itself, and has its bytes then."""
        values, reading, nbytes = self.read()
        assert nbytes == reading.result() == SIZE
        assert torch.equal(values, wanted)

    def has_it(self) -> bool:
        return self.files.has(self.entry)

    def begin_to_fill(self) -> torch.Tensor:
        """Begins what another thread of it is to go on with."""
        memory = self.files.allocate(self.entry, self.share)
        assert memory is not None
        assert self.files.tier.memory.begin_to_fill(self.files.tier.piece_of(memory) or 0)
        return memory


def test_a_file_is_read_once(path: Path) -> None:
    one, other = Process(path), Process(path)
    assert not other.has_it()
    one.require_read(pattern(SIZE))
    assert other.has_it()
    values, waiting, nbytes = other.read()
    assert (waiting, nbytes) == (None, 0)
    assert torch.equal(values, pattern(SIZE))


def test_what_another_one_reads_is_waited_for(path: Path) -> None:
    one, other = Process(path), Process(path)
    memory = one.begin_to_fill()
    values, waiting, nbytes = other.read()
    assert nbytes == 0
    assert not waiting.done()
    with pytest.raises(TimeoutError):
        waiting.result(0.01)
    memory.copy_(pattern(SIZE))
    one.files.tier.memory.end_to_fill(1, complete=True)
    assert waiting.result() == 0
    assert torch.equal(values, pattern(SIZE))


@pytest.mark.parametrize("why", ["ended", "failed", "stands still"])
def test_another_one_does_not_go_on(path: Path, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_PATIENCE", 0.0 if why == "stands still" else 60.0)
    one, other = Process(path), Process(path)
    memory = one.begin_to_fill()
    values, waiting, _ = other.read()
    if why == "failed":
        one.files.tier.memory.end_to_fill(1, complete=False)
    elif why == "ended":
        del memory, one
    assert waiting.result() == SIZE
    assert torch.equal(values, pattern(SIZE))


def test_a_read_that_fails_is_the_failure_of_one(path: Path) -> None:
    one, other = Process(path, os.O_WRONLY), Process(path)
    _, reading, _ = one.read()
    assert isinstance(reading.exception(), OSError)
    assert not other.has_it()
    other.require_read(pattern(SIZE))


def test_bytes_of_a_file_that_changes_meanwhile_are_not_shared(path: Path) -> None:
    one, other = Process(path), Process(path)
    memory = one.begin_to_fill()
    os.utime(path)
    with pytest.raises(FormatError, match="changed while"):
        module._end_to_fill(None, one.files.tier.memory, 1, {one.file})
    assert not other.has_it()
    assert not Process(path).has_it()
    _, reading, _ = other.read()
    assert isinstance(reading.exception(), FormatError)
    del memory


def test_one_that_waits_and_is_dropped_holds_nothing(path: Path) -> None:
    one, other = Process(path), Process(path)
    memory = one.begin_to_fill()
    values, waiting, _ = other.read()
    del values, waiting
    assert other.share.bytes_in_use == 0
    del memory


@pytest.mark.parametrize("what", ["replaced", "cut", "written", "another shard"])
def test_other_files_are_not_shared(path: Path, folder: Path, what: str) -> None:
    one = Process(path)
    one.require_read(pattern(SIZE))
    assert Process(path).has_it()
    if what == "replaced":
        os.replace(store(folder / "new", pattern(SIZE)), path)
    elif what == "cut":
        os.truncate(path, SIZE - 1)
        os.truncate(path, SIZE)
    elif what == "written":
        with path.open("r+b") as file:
            file.write(b"0")
    more = [store(folder / "shard", pattern(SIZE))] if what == "another shard" else []
    other = Process(path, more=more)
    assert not other.has_it()
    other.require_read(contents(path))
    assert other.has_it()
    assert what != "another shard" or one.has_it()


def test_files_that_may_be_written_to_are_not_shared(path: Path) -> None:
    file = WeightFile(os.open(path, os.O_RDONLY), str(path), shared_handle(), checked=False)
    assert shared_files([file], lambda _: MIB) is None
    assert shared_files([], lambda _: MIB) is None
