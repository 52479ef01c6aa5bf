"""Processes that stream the same model share what they have of it in host memory, also when they are killed."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import textwrap
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from nvme_ops.base import limits
from nvme_ops.offload import from_pretrained
from tests import prepared
from tests.conftest import MIB, in_child
from tests.device.kinds import Simulated, on_simulated
from tests.offload.llama import saved_llama

PROGRAM = """
    import signal, sys
    import torch
    from nvme_ops.offload import from_pretrained
    from tests.doubles import private_device
    path, result, seconds = sys.argv[1:]
    torch.set_num_threads(1)
    device = private_device()
    tokens = device.tensor(torch.arange(3, 9)[None])
    budgets = {"device_budget": "2200K", "host_budget": "64M"}
    with device.computing(), from_pretrained(path, device=device.device(), **budgets) as model:
        signal.setitimer(signal.ITIMER_REAL, float(seconds))  # which kills it
        logits = model(tokens).logits.cpu()
        while float(seconds):
            model(tokens)
        torch.save((logits, model.stats().bytes_read), result)
"""


@pytest.fixture
def path(folder: Path) -> Iterator[Path]:
    """A model of 21 MiB, of which 19 are in host memory."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # of which the last bits depend
    yield saved_llama(folder)
    torch.set_num_threads(threads)


def opened(device: Simulated, path: Path, host_budget: str = "64M") -> Any:
    return from_pretrained(path, device=device.device(), device_budget="2200K", host_budget=host_budget)


def logits_of(device: Simulated, model: Any) -> torch.Tensor:
    logits: torch.Tensor = model(device.tensor(torch.arange(3, 9)[None])).logits.cpu()
    return logits


def other_process(path: Path, seconds: float = 0, share: str = "1") -> tuple[torch.Tensor, int]:
    """What it computes, and the bytes that it reads; with ``seconds`` it is killed after some."""
    command, result = textwrap.dedent(PROGRAM), path / "result"
    words, environment = map(str, (path, result, seconds)), {"NVME_OPS_SHARE_HOST": share}
    done = prepared.run("-c", command, *words, environment=environment, imported=("transformers", "tests.doubles"))
    assert done.returncode == (-signal.SIGALRM if seconds else 0), done.stderr
    if seconds:
        return torch.empty(0), 0
    logits, bytes_read = torch.load(result)
    return logits, bytes_read


def memfd_of(model: Any) -> str:
    """Its name among the open files of a process."""
    return os.readlink(f"/proc/self/fd/{model._nvme_window._host._shared.tier.memory._fd}")


def users_of(memfd: str) -> list[str]:
    """The processes that have it open."""
    users = []
    for process in filter(str.isdecimal, os.listdir("/proc")):
        with contextlib.suppress(OSError):  # it has ended
            for number in os.listdir(f"/proc/{process}/fd"):
                with contextlib.suppress(OSError):  # it was closed
                    users += [process] * (os.readlink(f"/proc/{process}/fd/{number}") == memfd)
    return users


@on_simulated
def test_what_one_has_read_another_reads_no_more(device: Simulated, path: Path) -> None:
    with device.computing(), opened(device, path) as model:
        wanted = logits_of(device, model)
        logits, bytes_read = other_process(path)
        assert torch.equal(logits, wanted)
        assert bytes_read < MIB < model.stats().bytes_read
        assert torch.equal(logits_of(device, model), wanted), "the other one has ended"


@on_simulated
@pytest.mark.parametrize("why", ["file was changed", "switched off"])
def test_nothing_is_shared(device: Simulated, path: Path, why: str) -> None:
    with device.computing(), opened(device, path) as model:
        wanted = logits_of(device, model)
        if why == "file was changed":
            os.utime(path / "model.safetensors")
        logits, bytes_read = other_process(path, share="0" if why == "switched off" else "1")
        assert torch.equal(logits, wanted)
        assert bytes_read > 16 * MIB


@on_simulated
def test_processes_are_killed_at_any_moment(device: Simulated, path: Path) -> None:
    """Another one goes on from what they have filled until then, and nothing is left in the end."""
    with device.computing(), opened(device, path, "0") as model:
        wanted = logits_of(device, model)
    del model
    for seconds in (0.01, 0.03, 0.1, 0.3):
        with device.computing(), opened(device, path) as model:
            other_process(path, seconds)
            assert torch.equal(logits_of(device, model), wanted)
            memfd = memfd_of(model)
            assert users_of(memfd) == [str(os.getpid())]
        del model
        gc.collect()
        assert users_of(memfd) == []


@on_simulated
def test_a_forked_child_is_refused(device: Simulated, path: Path) -> None:
    with device.computing(), opened(device, path) as model:
        wanted = logits_of(device, model)

        def use() -> None:
            with pytest.raises(RuntimeError, match="parent process"):
                logits_of(device, model)

        in_child(use)
        assert torch.equal(logits_of(device, model), wanted)


@on_simulated
@pytest.mark.parametrize("given", ["auto", "25M"])
def test_what_others_have_read_counts_as_free(
    device: Simulated, path: Path, given: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with device.computing(), opened(device, path) as model:
        wanted = logits_of(device, model)
        there = model._nvme_window._host._shared.tier.memory.bytes_complete()
        assert there > 16 * MIB
        monkeypatch.setattr(limits, "free_memory", lambda: 8 * MIB)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            other = opened(device, path, given)
        with other:
            assert other._nvme_window._host.share.nbytes == 7 * MIB + there if given == "auto" else 25 * MIB
            assert torch.equal(logits_of(device, other), wanted)
            assert other.stats().bytes_read < MIB
        monkeypatch.setenv("NVME_OPS_SHARE_HOST", "0")
        with pytest.warns(UserWarning, match="7 MiB are used"):
            opened(device, path, "25M").close()
