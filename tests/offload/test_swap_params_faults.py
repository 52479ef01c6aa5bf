"""swap_params: disks that fail or are full, and what is changed while it is written."""

from __future__ import annotations

import contextlib
import errno
import gc
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from nvme_ops import aio_handle
from nvme_ops.errors import ChecksumError
from nvme_ops.offload import swap_params
from nvme_ops.offload.weights.resident import Resident
from tests.conftest import MIB
from tests.offload.random_comparison import interrupted
from tests.offload.test_optimizer import Failing
from tests.offload.test_swap_params import KIB, layers, swapped_of
from tests.offload.training import equal, values


class EndsLater:
    """A write that ends when the test says so, or somebody waits for it."""

    ended = False

    def done(self) -> bool:
        return self.ended

    def exception(self) -> BaseException | None:
        self.ended = True
        return None


@pytest.mark.parametrize("then", ["room", "settle"])
def test_what_is_changed_while_it_is_written_is_written_again(
    folder: Path, then: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The end of a write was taken for that of the one of the last change: several threads lost theirs."""
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64, bias=False) for _ in range(4)))
    with swap_params(model, folder, memory_budget=40 * KIB, min_bytes=1) as swapped, torch.no_grad():
        first, *others = swapped_of(model)
        first.zero_()
        its = swapped._residents
        write_back = its._write_back
        write_back(first.resident)
        assert first.resident.writing is not None
        assert first.resident.writing.exception() is None
        writing = first.resident.writing = EndsLater()  # type: ignore[assignment]
        first.fill_(2.0)
        if then == "settle":
            its.settle()
            its._forget(first.resident)

        def and_it_ends(resident: Resident) -> None:
            write_back(resident)
            writing.ended = True

        monkeypatch.setattr(its, "_write_back", and_it_ends)
        with others[0].lent():
            others[1].add(1.0)
        assert torch.equal(first + 0.0, torch.full((64, 64), 2.0))


@pytest.mark.parametrize("error", [OSError(errno.EIO, os.strerror(errno.EIO)), KeyboardInterrupt()])
def test_a_read_that_fails_is_raised_and_tried_again_by_the_next_use(folder: Path, error: BaseException) -> None:
    mine, other, handle = layers(), layers(), Failing()
    handle.error = error
    with swap_params(mine, folder, memory_budget=20 * KIB, min_bytes=1, handle=handle):
        for number in range(4):
            x = torch.full((1, 64), number + 1.0)
            handle.after["read"] = 2
            with pytest.raises(type(error)):
                mine(x).sum().backward()
            mine.zero_grad()
            mine(x).sum().backward()
            other.zero_grad()
            other(x).sum().backward()
            for one, two in zip(mine.parameters(), other.parameters(), strict=True):
                assert one.grad is not None
                assert two.grad is not None
                assert torch.equal(one.grad, two.grad)


def test_a_write_that_fails_loses_nothing(folder: Path) -> None:
    mine, other, handle = layers(), layers(), Failing()
    with swap_params(mine, folder, memory_budget=40 * KIB, min_bytes=1, handle=handle), torch.no_grad():
        for number in range(4):
            handle.after["write"] = number
            for each in other.parameters():
                each.add_(1)
            for each in mine.parameters():
                try:
                    each.add_(1)
                except OSError:
                    each.add_(1)
            handle.after["write"] = -1
            assert equal(values(mine), values(other))


class Ill(aio_handle):
    """Has the next so many writes fail once they are under way."""

    ill = 0

    def submit_pwrite(self, tensor: Any, file: Any, *arguments: Any, **options: Any) -> Any:
        file, self.ill = "/dev/full" if self.ill else file, max(0, self.ill - 1)
        return super().submit_pwrite(tensor, file, *arguments, **options)


def test_a_write_that_has_failed_is_repeated_where_its_memory_is_needed(folder: Path) -> None:
    mine, other, handle = layers(), layers(), Ill()
    with swap_params(mine, folder, memory_budget=60 * KIB, min_bytes=1, handle=handle), torch.no_grad():
        handle.ill = 1
        for model in (mine, other):
            for each in list(model.parameters())[:3]:
                each.add_(1)
        assert equal(values(mine), values(other))


def test_a_full_disk(make_file_system: Callable[..., Path]) -> None:
    place = make_file_system(8 * MIB)
    model = torch.nn.Sequential(*(torch.nn.Linear(1000, 1000) for _ in range(3)))
    before = list(model.parameters())
    with pytest.raises(OSError, match="making room for") as caught:
        swap_params(model, place, memory_budget="8M", min_bytes=1)
    assert caught.value.errno == errno.ENOSPC
    assert all(one is other for one, other in zip(before, model.parameters(), strict=True))
    assert not [each for each in place.iterdir() if each.name != "lost+found"]


def test_a_flipped_bit_is_told(folder: Path) -> None:
    model = layers()
    with swap_params(model, folder, memory_budget=20 * KIB, min_bytes=1, checksums=True):
        model(torch.ones(1, 64))
        (file,) = [each for each in folder.rglob("*") if each.is_file() and each.stat().st_size >= 6 * 16 * KIB]
        with open(file, "r+b") as opened:
            for place in range(0, 6 * 16 * KIB, 4 * KIB):
                opened.seek(place)
                opened.write(b"\xff")
        with pytest.raises(ChecksumError):
            model(torch.ones(1, 64))


@pytest.mark.parametrize(
    "line", [pytest.param(each, marks=[pytest.mark.slow] * (each % 9 > 0)) for each in range(1, 1000)]
)
def test_ctrl_c_at_any_line_of_a_use_loses_nothing(folder: Path, line: int) -> None:
    """Neither a change that was made before, nor memory."""
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64, bias=False) for _ in range(4)))
    with swap_params(model, folder, memory_budget=32 * KIB, min_bytes=1) as swapped, torch.no_grad():
        for number, each in enumerate(model.parameters()):
            each.fill_(number)  # the last two are newer in memory than on storage
        its = swapped._residents
        with contextlib.suppress(KeyboardInterrupt), interrupted(line):
            its.acquire(swapped_of(model)[0].resident, "forward")
        gc.collect()
        assert all(torch.equal(each, torch.full((64, 64), number)) for number, each in enumerate(model.parameters()))
        both = swapped_of(model)[2:]
        with its.used(both[0].resident, "forward"), its.used(both[1].resident, "forward"):
            assert its._memory.bytes_in_use == 32 * KIB
