"""States kept for the next program, which goes on with the last completed step, whatever ended the one before."""

from __future__ import annotations

import contextlib
import copy
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from nvme_ops import aio_handle
from nvme_ops.offload import NvmeOptimizer
from tests.conftest import in_child, run_python
from tests.crashing_save import NoStraceError, kill_at, save_under_strace
from tests.offload.training import equal, values


def kept(folder: Path, model: torch.nn.Module, **options: Any) -> NvmeOptimizer:
    return NvmeOptimizer(
        model.parameters(), torch.optim.AdamW, folder, **{"memory_budget": "1M", "reuse": True, "lr": 0.01, **options}
    )


def small() -> torch.nn.Module:
    torch.manual_seed(2)
    return torch.nn.Linear(300, 301)


def pull(model: torch.nn.Module, step: int) -> None:
    """Gives gradients that depend on the parameters, without autograd's threads, which a forked child lacks."""
    for each in model.parameters():
        each.grad = (each.detach() * (step + 1)).sin()


def test_kept_states_go_on_where_they_ended(folder: Path) -> None:
    mine, other = small(), small()
    plain = torch.optim.AdamW(other.parameters(), lr=0.01)
    for step in range(6):
        pull(other, step)
        plain.step()
    for step in range(6):
        with kept(folder, mine) as optimizer:
            assert optimizer.steps == step
            pull(mine, step)
            optimizer.step()
    assert equal(values(mine), values(other))


def test_kept_states_of_something_else_are_refused(folder: Path) -> None:
    model = small()
    with kept(folder, model, memory_budget="8M") as optimizer:
        pull(model, 0)
        optimizer.step()
        with pytest.raises(BlockingIOError, match=f"in use by process {os.getpid()}"):
            kept(folder, small())
    with pytest.raises(ValueError, match=r"'optimizer' in .* has the states of other parameters"):
        kept(folder, torch.nn.Linear(10, 10), memory_budget="8M")
    with pytest.raises(ValueError, match="of another optimizer"):
        kept(folder, small(), memory_budget="8M", amsgrad=True)
    with pytest.raises(ValueError, match="memory_budget must be 8 MiB"):
        kept(folder, small())
    with kept(folder, small(), memory_budget="16M") as optimizer:
        assert optimizer.steps == 1
    with kept(folder, small(), name="another") as optimizer:
        assert optimizer.steps == 0


def parameters_after(steps: int) -> list[dict[str, torch.Tensor]]:
    """Those of torch's own optimizer before the first step, and after each."""
    model = small()
    plain, found = torch.optim.AdamW(model.parameters(), lr=0.01), [copy.deepcopy(model.state_dict())]
    for step in range(steps):
        pull(model, step)
        plain.step()
        found.append(copy.deepcopy(model.state_dict()))
    return found


def go_on(folder: Path, expected: list[dict[str, torch.Tensor]], steps: int) -> tuple[int, torch.nn.Module]:
    """Resumes with the parameters of the last step; returns which that was, and the model after ``steps``."""
    model = small()
    with kept(folder, model, handle=aio_handle(backend="threads")) as optimizer:
        first = optimizer.steps
        model.load_state_dict(expected[first])
        for step in range(first, steps):
            pull(model, step)
            optimizer.step()
    return first, model


def prepare(folder: Path) -> None:
    """One step, in an empty folder."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    go_on(folder, parameters_after(0), 1)


def same_bits(one: torch.nn.Module, other: torch.nn.Module, when: str) -> None:
    """Tells how many elements differ, and where."""
    torch.testing.assert_close(values(one), values(other), rtol=0, atol=0, msg=lambda found: f"{when}: {found}")


CHANGING = {"openat", "pwrite64", "write", "ftruncate", "fallocate", "rename", "unlink", "flock"}


@pytest.mark.parametrize("calls", ["some", pytest.param("all", marks=pytest.mark.slow)])
def test_killed_at_any_system_call_of_a_step_it_is_resumed_to_the_same_bits(folder: Path, calls: str) -> None:
    place, expected, last = folder / "place", parameters_after(3), small()
    last.load_state_dict(expected[3])
    prepare(place)
    try:
        outcome = save_under_strace(lambda: go_on(place, expected, 2), folder)
    except NoStraceError as error:
        pytest.skip(f"strace: {error}")
    assert (outcome.status, outcome.error) == (0, None)
    points = [point for point in outcome.points() if point[0] in CHANGING]
    seen = set()
    for name, number in points if calls == "all" else points[:: max(1, len(points) // 12)]:
        prepare(place)
        killed = save_under_strace(lambda: go_on(place, expected, 2), folder, kill_at(name, number))
        assert killed.status in (0, -signal.SIGKILL), (name, number, killed.error)
        first, model = go_on(place, expected, 3)
        seen.add(first)
        same_bits(model, last, f"killed at {name} {number}, found step {first}")
    assert seen == {1, 2}


class Killing(aio_handle):
    """Kills the process, or is interrupted, when so many more writes were begun; those before have ended then."""

    left, stop = -1, False

    def submit_pwrite(self, *arguments: Any, **options: Any) -> Any:
        self.left -= 1
        if self.left == 0 and self.stop:
            raise KeyboardInterrupt
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        future = super().submit_pwrite(*arguments, **options)
        if self.left >= 0:
            future.result()
        return future


def loaded(optimizer: NvmeOptimizer, _: torch.nn.Module, handle: Killing, number: int) -> None:
    found = optimizer.state_dict()
    for each in found["state"].values():
        each["exp_avg"].fill_(7.0)
    handle.left = number
    optimizer.load_state_dict(found)


def attempted_twice(optimizer: NvmeOptimizer, model: torch.nn.Module, handle: Killing, number: int) -> None:
    handle.left, handle.stop = 2, True
    with contextlib.suppress(KeyboardInterrupt):
        pull(model, 7)
        optimizer.step()
    pull(model, 8)
    handle.left, handle.stop = number, False
    optimizer.step()


@pytest.mark.parametrize("act", [loaded, attempted_twice])
@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize("number", [2, 4, 5])
def test_killed_before_a_commit_it_goes_on_with_the_one_before(
    folder: Path, act: Callable[..., None], steps: int, number: int
) -> None:
    """What is committed is not written, whichever place it is in."""

    def child() -> None:
        torch.set_num_threads(1)
        model, handle = small(), Killing(backend="threads")
        optimizer = kept(folder, model, handle=handle)
        for step in range(steps):
            pull(model, step)
            optimizer.step()
        act(optimizer, model, handle, number)

    with pytest.raises(AssertionError, match="-9"):
        in_child(child)
    other = small()
    plain = torch.optim.AdamW(other.parameters(), lr=0.01)
    for step in range(steps):
        pull(other, step)
        plain.step()
    with kept(folder, small()) as optimizer:
        assert optimizer.steps == steps
        found, expected = optimizer.state_dict()["state"], plain.state_dict()["state"]
        assert all(equal(list(found[each].values()), list(expected[each].values())) for each in expected)


def test_a_failed_step_takes_a_third_place_for_no_longer_than_it_lasts(folder: Path) -> None:
    model, handle = small(), Killing()
    with kept(folder, model, handle=handle) as optimizer:
        for step in range(3):
            if step == 2:
                before = optimizer.stats().bytes_stored
                attempted_twice(optimizer, model, handle, -1)
            pull(model, step)
            optimizer.step()
        optimizer.step()
        assert optimizer.stats().bytes_stored <= before


def test_a_second_process_is_refused_while_the_first_has_the_states(folder: Path) -> None:
    program = f"""
        import sys, torch
        from nvme_ops.offload import NvmeOptimizer
        model = torch.nn.Linear(300, 301)
        try:
            options = {{"memory_budget": "1M", "reuse": True, "lr": 0.01}}
            NvmeOptimizer(model.parameters(), torch.optim.AdamW, {str(folder)!r}, **options)
        except BlockingIOError as error:
            print(error)
    """
    with kept(folder, model := small()) as optimizer:
        pull(model, 0)
        optimizer.step()
        assert f"in use by process {os.getpid()}" in run_python(program).stdout
        pull(model, 1)
        optimizer.step()
    assert run_python(program).stdout == ""
    with kept(folder, small()) as optimizer:
        assert optimizer.steps == 2


def test_foreign_files_in_the_folder_stay(folder: Path) -> None:
    (folder / "notes.txt").write_text("mine")
    with kept(folder, model := small()) as optimizer:
        pull(model, 0)
        optimizer.step()
        (inner,) = [each for each in folder.iterdir() if each.is_dir()]
        (inner / "foreign").write_text("not ours")
    with kept(folder, small()) as optimizer:
        assert optimizer.steps == 1
    assert (inner / "foreign").read_text() == "not ours"
    assert (folder / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize("change", ["cut", "gone"])
def test_states_that_somebody_has_damaged_are_refused(folder: Path, change: str) -> None:
    with kept(folder, model := small()) as optimizer:
        pull(model, 0)
        optimizer.step()
    slab = max((each for each in folder.rglob("*") if each.is_file()), key=lambda each: each.stat().st_size)
    if change == "cut":
        os.truncate(slab, 4096)
    else:
        slab.unlink()
    model = small()
    before = values(model)
    pull(model, 1)
    with pytest.raises((OSError, ValueError, EOFError)):
        kept(folder, model).step()
    assert equal(values(model), before)
