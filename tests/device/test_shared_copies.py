"""Processes that stream the same model share what they have of it in host memory, also when they are killed."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import random
import signal
import textwrap
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from nvme_ops.base import limits
from nvme_ops.memory import shared_memory
from nvme_ops.offload import from_pretrained
from nvme_ops.offload.residency import shared_files
from tests import prepared
from tests.conftest import MIB, open_to_all
from tests.device.kinds import Simulated, on_simulated
from tests.offload.llama import saved_llama
from tests.offload.models import nbytes, saved

PROGRAM = """
    import json, os, signal, sys
    import torch
    from nvme_ops.offload import from_pretrained
    from tests.conftest import give_up_root
    from tests.doubles import private_device
    path, result, seconds, what, options = sys.argv[1:]
    torch.set_num_threads(1)
    device = private_device()
    tokens = device.tensor(torch.arange(3, 9)[None])
    if what == "as nobody":  # who may not be able to import
        with device.computing(), from_pretrained(path, device=device.device(), **json.loads(options)) as model:
            model(tokens)
        give_up_root()
    if what == "is stopped":
        signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGSTOP))
    with device.computing(), from_pretrained(path, device=device.device(), **json.loads(options)) as model:
        open(result + ".opened", "w").write(str(os.getpid()))
        signal.setitimer(signal.ITIMER_REAL, float(seconds))  # which kills it
        logits = model(tokens).logits.cpu()
        while float(seconds):
            model(tokens)
        torch.save((logits, model.stats().bytes_read), result)
"""
pytestmark = on_simulated
BUDGETS = {"device_budget": "2200K", "host_budget": "64M"}


@pytest.fixture
def path(folder: Path, one_thread: None) -> Path:
    """A model of 21 MiB, of which 19 are in host memory; on the number of threads its last bits depend."""
    return saved_llama(folder)


def opened(device: Simulated, path: Path, host_budget: Any = "64M", **options: Any) -> Any:
    return from_pretrained(path, device=device.device(), **{**BUDGETS, "host_budget": host_budget, **options})


def logits_of(device: Simulated, model: Any) -> torch.Tensor:
    logits: torch.Tensor = model(device.tensor(torch.arange(3, 9)[None])).logits.cpu()
    return logits


def other_process(
    path: Path, seconds: float = 0, share: str = "1", what: str = "", **options: Any
) -> tuple[torch.Tensor, int]:
    """What it computes, and the bytes that it reads; with ``seconds`` it is killed, or stopped, after some."""
    command, result = textwrap.dedent(PROGRAM), path / "result"
    words = map(str, (path, result, seconds, what, json.dumps({**BUDGETS, **options})))
    environment, imported = {"NVME_OPS_SHARE_HOST": share}, ("transformers", "tests.doubles", "tests.conftest")
    done = prepared.run("-c", command, *words, environment=environment, imported=imported)
    end = signal.SIGKILL if what == "is stopped" else signal.SIGALRM
    assert done.returncode == (-end if seconds else 0), done.stderr
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


def test_what_one_has_read_another_reads_no_more(device: Simulated, path: Path) -> None:
    with device.computing(), opened(device, path) as model:
        wanted = logits_of(device, model)
        logits, bytes_read = other_process(path)
        assert torch.equal(logits, wanted)
        assert bytes_read < MIB < model.stats().bytes_read
        assert torch.equal(logits_of(device, model), wanted), "the other one has ended"


@pytest.mark.parametrize("why", ["file was changed", "switched off"])
def test_nothing_is_shared(device: Simulated, path: Path, why: str) -> None:
    with device.computing(), opened(device, path) as model:
        wanted = logits_of(device, model)
        if why == "file was changed":
            os.utime(path / "model.safetensors")
        logits, bytes_read = other_process(path, share="0" if why == "switched off" else "1")
        assert torch.equal(logits, wanted)
        assert bytes_read > 16 * MIB


@pytest.mark.parametrize("name", ["Llama", "Qwen3Moe"])
@pytest.mark.parametrize("times", [2, pytest.param(30, marks=pytest.mark.nightly)])
def test_processes_are_killed_at_any_moment(device: Simulated, path: Path, name: str, times: int) -> None:
    """Another one goes on meanwhile, and then from what they have filled; nothing is left in the end."""
    budgets: dict[str, Any] = {}
    if name == "Qwen3Moe":
        path, kind = saved(path, name)
        budgets = {"device_budget": nbytes(kind.from_pretrained(path)) // 2, "compute_on_host": True}
    with device.computing(), opened(device, path, "0", **budgets) as model:
        wanted = logits_of(device, model)
    del model
    for number in range(times):
        with device.computing(), opened(device, path, **budgets) as model, ThreadPoolExecutor(1) as pool:
            killed = pool.submit(other_process, path, 10 ** -random.Random(number).uniform(0.5, 3), **budgets)
            while number % 2 and not killed.done():
                assert torch.equal(logits_of(device, model), wanted)
            killed.result()
            assert all(torch.equal(logits_of(device, model), wanted) for _ in range(3))
            assert (model.stats().experts_on_host > 0) == (name == "Qwen3Moe")
            memfd = memfd_of(model)
            assert users_of(memfd) == [str(os.getpid())]
        del model
        gc.collect()
        assert users_of(memfd) == []


def test_a_process_is_stopped_at_any_moment(device: Simulated, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Others wait a while for what it was reading, and then read it."""
    monkeypatch.setattr(shared_files, "_PATIENCE", 0.2)
    monkeypatch.setattr(shared_memory, "_PATIENCE", 0.2)
    for seconds in (0.003, 0.03):
        with device.computing(), opened(device, path) as model, ThreadPoolExecutor(1) as pool:
            other = pool.submit(other_process, path, seconds, what="is stopped")
            process = ""
            while not process or "T (stopped)" not in (Path("/proc") / process / "status").read_text():
                process = process or (said.read_text() if (said := path / "result.opened").exists() else "")
                time.sleep(0.01)
            (path / "result.opened").unlink()
            begin, logits = time.monotonic(), logits_of(device, model)
            assert time.monotonic() - begin < 20
            os.kill(int(process), signal.SIGKILL)
            other.result()
            assert torch.equal(logits, logits_of(device, model))


def test_copies_come_later_if_a_process_stood_still(
    device: Simulated, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_memory, "_PATIENCE", 0.2)
    with device.computing(), opened(device, path) as model, warnings.catch_warnings():
        warnings.simplefilter("error")
        memory = model._nvme_window._host._shared.tier.memory
        other = shared_memory.SharedMemory(os.open(f"/proc/self/fd/{memory._fd}", os.O_RDWR), memory._nbytes)
        wanted = other.locked(logits_of, device, model)
        assert model.stats().bytes_in_host == 0
        assert torch.equal(logits_of(device, model), wanted)
        assert model.stats().bytes_in_host > 16 * MIB


@pytest.mark.parametrize("options", [{"host_budget": "3M"}, {"dtype": "bfloat16", "device_budget": "3200K"}])
def test_processes_with_other_options_share_what_is_stored(
    device: Simulated, path: Path, options: dict[str, Any]
) -> None:
    wanted, bytes_alone = other_process(path, **options)
    with device.computing(), opened(device, path) as model:
        before = logits_of(device, model)
        logits, bytes_read = other_process(path, **options)
        assert torch.equal(logits, wanted)
        assert bytes_read < bytes_alone - 2 * MIB
        assert torch.equal(logits_of(device, model), before)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root becomes another user")
def test_another_user_has_a_copy_of_its_own(device: Simulated, path: Path) -> None:
    open_to_all(path)
    for file in path.iterdir():
        file.chmod(0o644)
    with device.computing(), opened(device, path) as model:
        wanted = logits_of(device, model)
        logits, bytes_read = other_process(path, what="as nobody")
        assert torch.equal(logits, wanted)
        assert bytes_read > 16 * MIB
        assert torch.equal(logits_of(device, model), wanted)


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


def test_experts_are_shared_where_there_is_room_for_all(device: Simulated, folder: Path) -> None:
    path, kind = saved(folder, "Qwen3Moe")
    tokens = torch.tensor([[1, 2, 3]])
    plain = kind.from_pretrained(path, experts_implementation="eager").eval()
    wanted = plain.generate(tokens, max_new_tokens=6, do_sample=False)
    size = nbytes(plain)
    for host_budget, is_shared in ((2 * size, True), (size // 4, False)):
        read = []
        with contextlib.ExitStack() as stack:
            stack.enter_context(device.computing())
            for _ in range(3):
                model = stack.enter_context(opened(device, path, host_budget, device_budget=size // 2))
                for _ in range(2):
                    said = model.generate(device.tensor(tokens), max_new_tokens=6, do_sample=False)
                    assert torch.equal(said.cpu(), wanted)
                read.append(model.stats().bytes_read)
            memory = model._nvme_window._host._shared.tier.memory
            assert os.fstat(memory._fd).st_blocks * 512 < 1.1 * size
        assert (max(read[1:]) < read[0] // 8) == is_shared
