"""Ctrl-C in the middle of a step on an accelerator: the next one is right, and no memory is left behind."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
import torch

from tests.device.kinds import Simulated, on_simulated
from tests.device.test_out_of_memory import KINDS
from tests.moments import Interrupt, numbers


@on_simulated
@pytest.mark.usefixtures("unraisable")  # what is raised while Python frees an object is lost
@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("points", [12, pytest.param(400, marks=pytest.mark.nightly)])
def test_a_step_after_one_that_was_interrupted(device: Simulated, folder: Path, kind: str, points: int) -> None:
    events = device.now.events
    with device.computing():
        step, closed = KINDS[kind](device, folder)
        wanted = [step() for _ in range(3)][-1]
        with Interrupt() as counted:
            step()
        for number in numbers(kind, counted.count, points):
            with contextlib.suppress(KeyboardInterrupt), Interrupt(number) as interrupted:
                step()
            for _ in range(2):
                assert torch.equal(step(), wanted), interrupted.where
        closed.close()
        del step, closed
    device.now.events = events  # torch never frees those that were not recorded
