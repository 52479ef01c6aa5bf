"""Many tensors on accelerators at once: in lists, on several devices, from several threads."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import pytest
import torch

from tests.conftest import MIB, contents, in_child, in_threads, store
from tests.device.kinds import PAGE, Device, sample

pytest_plugins = ("tests.fake_cufile.fixtures",)

each_lanes = pytest.mark.parametrize("lanes", [1, 3])


@pytest.mark.parametrize(("files", "lanes"), [(1, 3), (2, 1)])
def test_cpu_and_device_tensors_in_one_call(device: Device, folder: Path, files: int, lanes: int) -> None:
    handle, data = device.handle(lanes), sample(12 * MIB)
    sizes = [0, 1, 5000, 3 * MIB + 1, MIB, 2 * MIB - 1]
    starts = [100, 200, 300, 6000, 4 * MIB, 9 * MIB]
    parts = [data[start : start + size] for start, size in zip(starts, sizes, strict=True)]
    names = [folder / str(i // 2 % files) for i in range(6)]
    sent = [device.tensor(part) if i % 2 else part for i, part in enumerate(parts)]
    assert handle.submit_pwritev(sent, names, starts).result() == sum(sizes)
    for start, part, name in zip(starts, parts, names, strict=True):
        assert torch.equal(contents(name)[start : start + len(part)], part)
    back = [torch.zeros(size, dtype=torch.uint8) if i % 2 else device.empty(size) for i, size in enumerate(sizes)]
    for tensors in (back, [device.empty(size) for size in sizes]):
        assert handle.submit_preadv(tensors, names, starts).result() == sum(sizes)
        for part, there in zip(parts, tensors, strict=True):
            assert torch.equal(there if there.is_cpu else device.peek(there), part)


@each_lanes
def test_many_files_and_several_devices_in_one_call(device: Device, folder: Path, lanes: int) -> None:
    count = 200
    handle, sizes = device.handle(lanes), [PAGE * (number % 7) + 37 * (number % 3) for number in range(count)]
    sizes[:4] = [device.odd] * 4
    names, indices = [folder / f"file{number}" for number in range(count)], [i % device.count for i in range(count)]
    sent = [device.tensor(sample(sizes[number], number), index) for number, index in enumerate(indices)]
    back = [device.empty(sizes[number], index=index) for number, index in enumerate(indices)]
    assert handle.submit_pwritev(sent, names).result() == sum(sizes)
    assert handle.submit_preadv(back, names).result() == sum(sizes)
    for number, index in enumerate(indices):
        assert back[number].device == device.device(index)
        assert torch.equal(contents(names[number]), sample(sizes[number], number))
        assert torch.equal(device.peek(back[number]), sample(sizes[number], number))


def test_rows_on_a_device_are_refused(device: Device, folder: Path) -> None:
    path = store(folder / "file", sample(4096))
    with pytest.raises(ValueError, match="accelerator must be a list of tensors"):
        device.handle().submit_preadv(device.empty(4, 1024), path, [0, 1024, 2048, 3072])


@each_lanes
def test_many_asynchronous_operations(device: Device, folder: Path, lanes: int) -> None:
    handle, count = device.handle(lanes), 12
    sent = [device.tensor(sample(MIB + i, i), i % device.count) for i in range(count)]
    device.settle()
    for i in range(count):
        with device.on():
            assert handle.async_pwrite(sent[i], folder / f"file{i}") == 0
    assert handle.wait() == count
    assert handle.wait() == 0
    back = [device.empty(MIB + i, index=i % device.count) for i in range(count)]
    for i in range(count):
        handle.async_pread(back[i], folder / f"file{i}")
    on_host = torch.zeros(MIB, dtype=torch.uint8)
    assert handle.sync_pread(on_host, folder / "file0") == count + 1
    assert torch.equal(on_host, sample(MIB))
    for i in range(count):
        assert torch.equal(device.peek(back[i]), sample(MIB + i, i))


@pytest.mark.parametrize("shared", [True, False], ids=["one handle", "a handle each"])
def test_threads(device: Device, folder: Path, shared: bool) -> None:
    common = device.handle(2)
    wrong: list[str] = []

    def work(number: int) -> None:
        handle = common if shared else device.handle()
        path, index = folder / f"file{number}", number % device.count
        for round_ in range(4):
            seed = 10 * number + round_
            new = device.tensor(sample(device.odd, seed), index)
            device.settle()
            with device.on(index=index):
                before = device.current()
                there, back = device.empty(device.odd, index=index), device.empty(device.odd, index=index)
                device.keep_busy()
                there.copy_(new, non_blocking=True)
                handle.write(there, path, True)
                handle.submit_pread(back, path).result()
                if device.current() != before:
                    wrong.append(f"thread {number} is on another stream")
            if not torch.equal(device.peek(back), sample(device.odd, seed)):
                wrong.append(f"thread {number} read something else in round {round_}")

    in_threads(work, 4)
    assert wrong == []


def test_threads_on_one_file(device: Device, folder: Path) -> None:
    handle, count, size = device.handle(4), 8, device.odd
    path = store(folder / "file", sample(count * MIB, 1))
    wrong: list[int] = []

    def work(number: int) -> None:
        for seed in range(3):
            data, back = sample(size, 10 * number + seed), device.empty(size)
            handle.write(device.tensor(data), path, file_offset=number * size)
            handle.read(back, path, file_offset=number * size)
            if not torch.equal(device.peek(back), data):
                wrong.append(number)

    in_threads(work, count)
    assert wrong == []


def test_nothing_leaks(device: Device, folder: Path) -> None:
    handle, path, there = device.handle(), store(folder / "file", sample(device.odd)), device.empty(device.odd)

    def held() -> tuple[int, int]:
        for _ in range(20):
            handle.sync_pwrite(there, path, 0)
            handle.async_pread(there, path, 0)
            handle.wait()
            with pytest.raises(EOFError):
                handle.sync_pread(there, path, 1)
        gc.collect()
        return device.memory(), len(os.listdir("/proc/self/fd"))

    before = held()
    assert held() == before


def test_a_forked_child_may_still_use_the_cpu(device: Device, folder: Path) -> None:
    """CUDA itself does not survive a fork; a handle used for it before does, for tensors in CPU memory."""
    path, handle = folder / "file", device.handle()
    handle.write(device.tensor(sample(device.odd)), path)

    def body() -> None:
        back = torch.zeros(device.odd, dtype=torch.uint8)
        handle.sync_pread(back, path)
        assert torch.equal(back, sample(device.odd))

    in_child(body)
