"""Many tensors on accelerators at once: in lists, on several devices, from several threads."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import pytest
import torch

from tests.conftest import MIB, contents, in_child, in_threads, store
from tests.device.kinds import PAGE, Device, sample


def test_cpu_and_device_tensors_in_one_call(device: Device, folder: Path) -> None:
    handle, data = device.handle(3), sample(12 * MIB)
    sizes = [0, 1, 5000, 3 * MIB + 1, MIB, 2 * MIB - 1]
    starts = [100, 200, 300, 6000, 4 * MIB, 9 * MIB]
    parts = [data[start : start + size] for start, size in zip(starts, sizes, strict=True)]
    names = [folder / str(i // 2 % 2) for i in range(6)]
    sent = [device.tensor(part) if i % 2 else part for i, part in enumerate(parts)]
    assert handle.submit_pwritev(sent, names, starts).result() == sum(sizes)
    device.require_route(handle)
    for start, part, name in zip(starts, parts, names, strict=True):
        assert torch.equal(contents(name)[start : start + len(part)], part)
    back = [torch.zeros(size, dtype=torch.uint8) if i % 2 else device.empty(size) for i, size in enumerate(sizes)]
    for tensors in (back, [device.empty(size) for size in sizes]):
        assert handle.submit_preadv(tensors, names, starts).result() == sum(sizes)
        for part, there in zip(parts, tensors, strict=True):
            assert torch.equal(there if there.is_cpu else device.peek(there), part)
    with pytest.raises(ValueError, match="accelerator must be a list of tensors"):
        handle.submit_preadv(device.empty(4, 1024), names[0], [0, 1024, 2048, 3072])


@pytest.mark.parametrize(("lanes", "in_one_call"), [(3, True), (1, False)])
def test_many_files_and_several_devices(device: Device, folder: Path, lanes: int, in_one_call: bool) -> None:
    count = 100 if in_one_call else 8
    handle, sizes = device.handle(lanes), [PAGE * (number % 7) + 37 * (number % 3) for number in range(count)]
    sizes[:4] = [device.odd] * 4
    names, indices = [folder / f"file{number}" for number in range(count)], [i % device.count for i in range(count)]
    sent = [device.tensor(sample(sizes[number], number), index) for number, index in enumerate(indices)]
    back = [device.empty(sizes[number], index=index) for number, index in enumerate(indices)]
    device.settle()
    if in_one_call:
        assert handle.submit_pwritev(sent, names).result() == sum(sizes)
        assert handle.submit_preadv(back, names).result() == sum(sizes)
    else:
        for number in range(count):
            with device.on():
                assert handle.async_pwrite(sent[number], names[number]) == 0
        assert handle.wait() == count
        for number in range(count):
            handle.async_pread(back[number], names[number])
        on_host = torch.zeros(device.odd, dtype=torch.uint8)
        assert handle.sync_pread(on_host, names[0]) == count + 1
        assert torch.equal(on_host, sample(device.odd))
    for number, index in enumerate(indices):
        assert back[number].device == device.device(index)
        assert torch.equal(contents(names[number]), sample(sizes[number], number))
        assert torch.equal(device.peek(back[number]), sample(sizes[number], number))


@pytest.mark.parametrize("shared", [True, False], ids=["one handle and file", "a handle and file each"])
def test_threads(device: Device, folder: Path, shared: bool) -> None:
    common, size = device.handle(2), device.odd
    path = store(folder / "file", sample(4 * size, 1))

    def work(number: int) -> None:
        handle, index = common if shared else device.handle(), number % device.count
        place, offset = (path, number * size) if shared else (folder / f"file{number}", 0)
        for round_ in range(2):
            data = sample(size, 10 * number + round_)
            new = device.tensor(data, index)
            device.settle()
            with device.on(index=index):
                before = device.current()
                there, back = device.empty(size, index=index), device.empty(size, index=index)
                device.keep_busy()
                there.copy_(new, non_blocking=True)
                handle.write(there, place, True, file_offset=offset)
                handle.submit_pread(back, place, offset).result()
                assert device.current() == before
            assert torch.equal(device.peek(back), data)

    in_threads(work, 4)


def test_nothing_leaks_and_a_forked_child_may_still_use_the_cpu(device: Device, folder: Path) -> None:
    """CUDA itself does not survive a fork; a handle used for it before does, for tensors in CPU memory."""
    handle, path, there = device.handle(), store(folder / "file", sample(device.odd)), device.empty(device.odd)

    def held() -> tuple[int, int]:
        for _ in range(8):
            handle.async_pread(there, path, 0)
            handle.wait()
            handle.sync_pwrite(there, path, 0)
            with pytest.raises(EOFError):
                handle.sync_pread(there, path, 1)
        gc.collect()
        return device.memory(), len(os.listdir("/proc/self/fd"))

    before = held()
    assert held() == before

    def body() -> None:
        back = torch.zeros(device.odd, dtype=torch.uint8)
        handle.sync_pread(back, path)
        assert torch.equal(back, sample(device.odd))

    in_child(body)
