"""One pass: what it moves, what it tells, and what it leaves."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from nvme_ops import aio_handle
from nvme_ops.measuring.files import filled
from nvme_ops.settings import Settings
from nvme_ops.text import KIB, MIB
from nvme_ops.tune import passes
from nvme_ops.tune.passes import Passes
from tests.conftest import contents, run_python

SIZE = MIB + 5 * KIB


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "data"
    path.touch()
    return path


@pytest.fixture
def tensor() -> torch.Tensor:
    return filled(torch.empty(SIZE, dtype=torch.uint8))


def test_calibrating_fills_the_file_with_the_tensor(file: Path, tensor: torch.Tensor) -> None:
    subject = Passes(str(file), tensor, aio_handle)
    subject.calibrate(1000)
    assert torch.equal(contents(file), tensor)
    assert (subject.short, subject.full) == (SIZE, SIZE)


def test_little_time_makes_short_passes_but_not_too_short(
    file: Path, tensor: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(passes, "LEAST", 64 * KIB)
    subject = Passes(str(file), tensor, aio_handle)
    subject.calibrate(1e-9)
    assert (subject.short, subject.full) == (64 * KIB, 64 * KIB)


def test_a_pass_tells_the_rate_of_each_direction_and_keeps_the_file(file: Path, tensor: torch.Tensor) -> None:
    subject = Passes(str(file), tensor, aio_handle)
    subject.calibrate(1000)
    expected = tensor.clone()
    for settings in (Settings(), Settings(64 * KIB, 4, True, True, 2)):
        for full in (False, True):
            rates = subject.measure(settings, full)
            assert list(rates) == ["write", "read"]
            assert min(rates.values()) > 0
    assert torch.equal(contents(file), expected)
    assert torch.equal(tensor, expected)


@pytest.mark.parametrize("direction", ["read", "write"])
def test_only_the_directions_asked_for_are_measured(file: Path, tensor: torch.Tensor, direction: str) -> None:
    subject = Passes(str(file), tensor, aio_handle, [direction])
    subject.calibrate(1000)
    before = subject.written
    assert list(subject.measure(Settings(), True)) == [direction]
    assert (subject.written > before) == (direction == "write")


def test_the_bytes_written_are_counted(file: Path, tensor: torch.Tensor) -> None:
    subject = Passes(str(file), tensor, aio_handle, loops=3)
    subject.calibrate(1000)
    before = subject.written
    subject.measure(Settings(), True)
    assert subject.written - before == 3 * SIZE


def test_filling_memory_leaves_the_generator_of_torch_alone() -> None:
    before = torch.random.get_rng_state()
    full = filled(torch.zeros(SIZE, dtype=torch.uint8))
    assert torch.equal(torch.random.get_rng_state(), before)
    assert len(torch.unique(full)) == 256


def test_before_each_read_the_file_is_made_cold(file: Path, tensor: torch.Tensor) -> None:
    calls: list[int] = []
    subject = Passes(str(file), tensor, aio_handle, loops=2, before_read=calls.append)
    subject.calibrate(1000)
    calls.clear()
    subject.measure(Settings(), True)
    assert calls == [SIZE, SIZE]


def test_a_descriptor_of_a_nameless_file_does(tmp_path: Path, tensor: torch.Tensor) -> None:
    try:
        descriptor = os.open(tmp_path, os.O_RDWR | os.O_TMPFILE)
    except OSError as error:
        pytest.skip(f"no nameless files here: {error.strerror}")
    try:
        subject = Passes(f"/proc/self/fd/{descriptor}", tensor, aio_handle)
        subject.calibrate(1000)
        assert subject.measure(Settings(), True)
        assert os.fstat(descriptor).st_size == SIZE
    finally:
        os.close(descriptor)
    assert list(tmp_path.iterdir()) == []


def test_what_only_reaches_the_page_cache_is_synchronised_within_the_pass(
    file: Path, tensor: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    synchronised: list[str] = []
    monkeypatch.setattr(passes, "_direct", lambda _: False)
    monkeypatch.setattr(passes, "sync", synchronised.append)
    subject = Passes(str(file), tensor, aio_handle, before_read=lambda _: None)
    subject.calibrate(1000)
    synchronised.clear()
    subject.measure(Settings(), True)
    assert synchronised == [str(file)]


def test_an_error_of_the_device_comes_through(file: Path, tensor: torch.Tensor) -> None:
    subject = Passes(str(file), tensor, aio_handle)
    subject.calibrate(1000)
    file.write_bytes(b"")
    with pytest.raises(EOFError):
        subject.measure(Settings(), True)


def test_memory_of_an_accelerator_does(tmp_path: Path) -> None:
    """On a device simulated in host memory, in a process of its own: torch keeps it."""
    program = """
        import sys, torch
        from tests.conftest import contents, pattern
        from pathlib import Path
        from tests.private_device import private_device
        from nvme_ops import aio_handle
        from tests.tune.test_passes import SIZE, Passes, Settings

        path, data = Path(sys.argv[1]), pattern(SIZE)
        path.touch()
        device = private_device()
        with device.pinned_memory(True):
            tensor = device.tensor(data)
            subject = Passes(str(path), tensor, aio_handle)
            subject.calibrate(1000)
            assert list(subject.measure(Settings(intra_op_parallelism=2), True)) == ["write", "read"]
            assert torch.equal(tensor.cpu(), data)
            assert torch.equal(contents(path), data)
    """
    if torch.cuda.is_available():
        pytest.skip("torch has a real accelerator, and only one can page-lock memory in a process")
    run_python(program, tmp_path / "data")
