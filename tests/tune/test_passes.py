"""One pass: what it moves, what it tells, and what it leaves."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from nvme_ops import aio_handle
from nvme_ops.measure import search as passes
from nvme_ops.measure.files import filled
from nvme_ops.measure.search import Passes
from nvme_ops.settings import Settings
from nvme_ops.text import KIB, MIB
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


@pytest.mark.parametrize(("seconds", "least", "size"), [(1000, 32 * MIB, SIZE), (1e-9, 64 * KIB, 64 * KIB)])
def test_calibrating_fills_the_file_and_chooses_the_size_of_passes(
    file: Path, tensor: torch.Tensor, monkeypatch: pytest.MonkeyPatch, seconds: float, least: int, size: int
) -> None:
    monkeypatch.setattr(passes, "LEAST_PASS", least)
    subject = Passes(str(file), tensor, aio_handle)
    subject.calibrate(seconds)
    assert torch.equal(contents(file)[:size], tensor[:size])
    assert (subject.short, subject.full) == (size, size)


@pytest.mark.parametrize("directions", [["write", "read"], ["read"], ["write"]])
def test_a_pass_tells_the_rate_of_each_direction_and_keeps_the_file(
    file: Path, tensor: torch.Tensor, directions: list[str]
) -> None:
    subject = Passes(str(file), tensor, aio_handle, directions)
    subject.calibrate(1000)
    expected, before = tensor.clone(), file.stat().st_mtime_ns
    for settings in (Settings(), Settings(64 * KIB, 4, True, True, 2)):
        for full in (False, True):
            rates = subject.measure(settings, full)
            assert list(rates) == directions
            assert min(rates.values()) > 0
    assert torch.equal(contents(file), expected)
    assert torch.equal(tensor, expected)
    assert (file.stat().st_mtime_ns > before) == ("write" in directions)


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
