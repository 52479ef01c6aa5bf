"""What only the simulated device can be made to do: to fail, to wait, and to have no page-locked memory."""

from __future__ import annotations

import copy
import errno
import os
from pathlib import Path

import pytest
import torch

from nvme_ops.offload import stream_weights
from tests.conftest import MIB, contents, store
from tests.device.kinds import CHUNK, READS, WRITES, Simulated, on_simulated, sample, still_works
from tests.offload.models import Tied

pytestmark = on_simulated


@pytest.mark.parametrize(("size", "offset"), [(CHUNK - 1, 12345), (8 * CHUNK + MIB + 3, 4095)])
def test_round_trip_without_page_locked_memory(device: Simulated, folder: Path, size: int, offset: int) -> None:
    """The last size needs every slot, one of them twice."""
    handle, path, data = device.handle(), store(folder / "file", sample(offset)), sample(size)
    with device.pinned_memory(False):
        handle.write(device.tensor(data), path, file_offset=offset)
        assert torch.equal(contents(path)[offset:], data)
        back = device.empty(size)
        handle.read(back, path, file_offset=offset)
    assert torch.equal(device.peek(back), data)


def test_a_file_cut_while_a_read_waits(device: Simulated, folder: Path) -> None:
    """The file was long enough at the call: the failure meets the transfer with some chunks on their way."""
    handle, size = device.handle(), device.odd
    first, second = store(folder / "first", sample(size)), store(folder / "second", sample(5 * size))
    back, cut = device.empty(size), device.empty(5 * size)
    with device.held():
        ahead, behind = handle.submit_pread(back, first), handle.submit_pread(cut, second)
        device.wait_for_held_up()
        os.truncate(second, 2 * size)
    assert ahead.result() == size
    with pytest.raises(EOFError, match="second"):
        behind.result()
    assert torch.equal(device.peek(back), sample(size))
    still_works(device, handle, folder)


@pytest.mark.parametrize(
    ("call", "what", "skipped"),
    [
        ("sync_pwrite", "queue", 0), ("async_pwrite", "run", 5), ("async_pwrite", "record", 11),
        ("async_pread", "queue", 5), ("sync_pread", "run", 11), ("sync_pread", "record", 0),
    ],
)  # fmt: skip
def test_a_device_that_fails(device: Simulated, folder: Path, call: str, what: str, skipped: int) -> None:
    handle, size = device.handle(), 11 * CHUNK + 5  # twelve copies
    path, there = store(folder / "file", sample(size)), device.tensor(sample(size))
    match = r"copying to or from the device: .* private device"
    with device.elsewhere():
        before = device.current()
        with device.failing(what, skipped), pytest.raises(RuntimeError, match=match):
            {**WRITES, **READS}[call](handle, there, path, 0)
        assert device.current() == before
    still_works(device, handle, folder)


def test_validation_finds_what_differs(device: Simulated, folder: Path) -> None:
    path, there = store(folder / "file", sample(device.odd)), device.empty(device.odd)
    handle = device.handle()
    with device.held():
        handle.pread(there, path, True, True)
        device.wait_for_held_up()  # the first chunk has been read
        with path.open("r+b") as file:
            file.write(bytes([int(sample(1)) ^ 1]))
    with pytest.raises(OSError, match="differ") as caught:
        handle.wait()
    assert caught.value.errno == errno.EIO
    assert caught.value.filename == str(path)
    del caught
    still_works(device, handle, folder)


def test_in_random_order_some_of_what_is_queued_has_happened(device: Simulated) -> None:
    seen, ones = set[bool](), torch.ones(64, dtype=torch.uint8).pin_memory()
    for seed in range(40):
        with device.in_random_order(seed), device.on() as stream:
            there = device.empty(64)
            there.copy_(ones, non_blocking=True)
            seen.add(bool((device.peek(there) == 1).all()))
            device.synchronize(stream)
            assert (device.peek(there) == 1).all()
        assert seed or not any(seen), "and in the usual order nothing has"
    assert seen == {True, False}


@torch.no_grad()
@pytest.mark.parametrize("seeds", [4, pytest.param(100, marks=pytest.mark.nightly)])
def test_streamed_weights_are_right_in_any_order_of_work(device: Simulated, folder: Path, seeds: int) -> None:
    model, tokens = Tied().eval(), torch.tensor([[1, 2, 2], [5, 1, 3]])
    there = device.device()
    wanted = copy.deepcopy(model).to(there)(tokens.to(there)).cpu()
    with (
        device.computing(),
        stream_weights(model, folder, memory_budget="1200K", device=there, handle=device.handle()) as streamed,
    ):
        given = tokens.to(there)
        for seed in range(seeds):
            with device.in_random_order(seed), device.on() as stream:
                outputs = [streamed(given) for _ in range(3)]
                device.synchronize(stream)
            assert all(torch.equal(output.cpu(), wanted) for output in outputs), seed
        del outputs
