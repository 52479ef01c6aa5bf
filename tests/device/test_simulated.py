"""What only the simulated device can be made to do: to fail, to wait, and to have no page-locked memory."""

from __future__ import annotations

import contextlib
import copy
import errno
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conftest import MIB, contents, in_child, store
from tests.device.kinds import CHUNK, READS, WRITES, Simulated, on_simulated, sample, still_works
from tests.offload.llama import saved_llama

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


def test_in_time_each_direction_and_computing_take_turns_of_their_own(device: Simulated) -> None:
    def body() -> None:
        ones = torch.ones(MIB, dtype=torch.uint8).pin_memory()
        there, other, half = device.empty(MIB), device.empty(MIB), torch.empty(MIB // 2, dtype=torch.uint8).pin_memory()
        rate = 20 * MIB  # 50 ms for each
        with device.in_time(to_device=rate, from_device=rate, computing=rate):
            begin = time.monotonic()
            with device.on() as first:
                there.copy_(ones, non_blocking=True)
            with device.on() as second:
                half.copy_(other[: MIB // 2], non_blocking=True)
            with device.on() as third:
                other.copy_(ones, non_blocking=True)
            device.synchronize(first)
            assert device.idle(second), "it began as early, and is half as long"
            device.synchronize(third)
            assert time.monotonic() - begin >= 0.1, "one copy after another"
            assert (device.peek(other) == 1).all()
            begin = time.monotonic()
            with device.on() as stream:
                made = there + other
                device.synchronize(stream)
            assert time.monotonic() - begin >= 0.1, "its arguments"
            assert (device.peek(made) == 2).all()
        assert (made.cpu() == 2).all()
        del made, there, other

    in_child(body)  # no thread that keeps time is left here, where others fork


def test_a_model_of_transformers_generates_there(device: Simulated, folder: Path) -> None:
    transformers: Any = pytest.importorskip("transformers")
    plain = transformers.LlamaForCausalLM.from_pretrained(saved_llama(folder)).eval()
    prompt = torch.randint(3, 199, (1, 9))
    mask, options = torch.ones_like(prompt), {"max_new_tokens": 5, "do_sample": False}
    wanted = plain.generate(prompt, attention_mask=mask, **options)

    def body() -> None:
        for mode in (contextlib.nullcontext(), device.in_random_order(3), device.in_time(4e9, 4e9, 2e10)):
            with device.computing(), mode:
                there, *given = copy.deepcopy(plain).to(device.device()), device.tensor(prompt), device.tensor(mask)
                assert torch.equal(there.generate(given[0], attention_mask=given[1], **options).cpu(), wanted)
                del there, given

    in_child(body)
