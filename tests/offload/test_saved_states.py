"""NvmeOptimizer.save_states: the states in a file, sharing its blocks where the file system can."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from nvme_ops.base.errors import FormatError
from tests.conftest import MIB
from tests.contract.faulty import Faulty, interrupt_two_waits
from tests.offload.training import adamw, backward, equal, network, values


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, begin: int, end: int) -> None:
    for step in range(begin, end):
        backward(model, step)
        optimizer.step()


@pytest.fixture
def xfs(make_file_system: Callable[..., Path]) -> Path:
    """A file system whose files can share blocks."""
    return make_file_system(320 * MIB, kind="xfs")


def go_on(folder: Path, path: Path, dtype: torch.dtype) -> bool:
    """Saves after three steps; another optimizer goes on from there, and the first one is not disturbed."""
    mine, other = network(dtype), network(dtype)
    with adamw(mine, folder) as optimizer:
        train(mine, optimizer, 0, 3)
        at_three = {name: value.clone() for name, value in mine.state_dict().items()}
        shared = optimizer.save_states(path)
        train(mine, optimizer, 3, 6)
        with adamw(other, folder, checksums=True) as resumed:
            train(other, resumed, 9, 10)  # whose states are replaced
            other.load_state_dict(at_three)
            resumed.load_states(path)
            assert resumed.steps == 3
            train(other, resumed, 3, 6)
    assert equal(values(mine), values(other))
    return shared


def test_another_optimizer_goes_on_from_the_file(folder: Path) -> None:
    go_on(folder, folder / "states", torch.bfloat16)


def test_where_files_share_blocks_nothing_is_copied(xfs: Path) -> None:
    assert go_on(xfs, xfs / "states", torch.float32)
    model = torch.nn.Linear(2000, 2000)
    with adamw(model, xfs) as optimizer:
        model(torch.ones(1, 2000)).sum().backward()
        optimizer.step()
        free = shutil.disk_usage(xfs).free
        assert optimizer.save_states(xfs / "states")
        assert free - shutil.disk_usage(xfs).free < 4 * MIB, "the states have 32 MiB"
        assert os.stat(xfs / "states").st_size >= 8 * 2000 * 2000


def test_what_does_not_fit_is_refused_and_nothing_changes(folder: Path) -> None:
    mine, other = network(), network()
    (folder / "foreign").write_bytes(b"no states at all")
    with adamw(mine, folder) as optimizer:
        optimizer.save_states(folder / "none")
        train(mine, optimizer, 0, 2)
        optimizer.load_states(folder / "none")  # of before the first step
        assert optimizer.steps == 0
        mine.load_state_dict(network().state_dict())
        train(mine, optimizer, 0, 2)
        with adamw(torch.nn.Linear(9, 9), folder, name="other") as small:
            small.save_states(folder / "small")
        optimizer.save_states(folder / "cut", durable=False)
        os.truncate(folder / "cut", os.path.getsize(folder / "cut") - 4096)
        for name, error, word in (
            ("small", ValueError, "has the states of other parameters"), ("foreign", FormatError, "foreign"),
            ("missing", FileNotFoundError, "missing"), ("cut", FormatError, "cut short"),
        ):  # fmt: skip
            with pytest.raises(error, match=word):
                optimizer.load_states(folder / name)
        with pytest.raises(FileNotFoundError):
            optimizer.save_states(folder / "missing" / "states")
        train(mine, optimizer, 2, 4)
    train(other, torch.optim.AdamW(other.parameters()), 0, 4)
    assert equal(values(mine), values(other))


def test_what_fails_keeps_the_file_before(make_file_system: Callable[..., Path], folder: Path) -> None:
    place, handle = make_file_system(96 * MIB), Faulty()
    model = torch.nn.Linear(1000, 1000)

    def step() -> None:
        model(torch.ones(1, 1000)).sum().backward()
        optimizer.step()

    with adamw(model, folder, handle=handle) as optimizer:
        step()
        optimizer.save_states(place / "states")
        before = (place / "states").read_bytes()
        step()
        handle.will("read", "refuse", {1})
        with pytest.raises(OSError, match=os.strerror(errno.EIO)):
            optimizer.save_states(place / "states")
        with (place / "ballast").open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while file.write(bytes(4096)):
                pass
        with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
            optimizer.save_states(place / "states")
        assert (place / "states").read_bytes() == before
        (place / "ballast").unlink()
        optimizer.save_states(place / "states")
        assert (place / "states").read_bytes() != before


@pytest.mark.parametrize(
    ("call", "what"), [("save_states", "write"), ("load_states", "read"), ("state_dict", "write"), ("step", "write")]
)
def test_what_ctrl_c_has_left_under_way_is_waited_for_by_the_next_step(
    folder: Path, monkeypatch: pytest.MonkeyPatch, call: str, what: str
) -> None:
    """Also where a second one ends the wait that follows the first: the step uses the same memory."""
    mine, other, handle = network(), network(), Faulty()
    interrupt_two_waits(monkeypatch)
    with adamw(mine, folder, handle=handle) as optimizer:
        train(mine, optimizer, 0, 2)
        optimizer.save_states(folder / "states")
        backward(mine, 2)
        handle.will(what, "hold", {1})
        with pytest.raises(KeyboardInterrupt):
            getattr(optimizer, call)(*([folder / "states"] if "states" in call else []))
        assert handle.under_way.is_set()
        handle.will()
        threading.Timer(0.3, handle.go.set).start()
        optimizer.step()
        assert handle.go.is_set(), "it was waited for"
        train(other, torch.optim.AdamW(other.parameters()), 0, 3)
        assert equal(values(mine), values(other))
