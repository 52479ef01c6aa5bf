"""The fixture ``device`` of the contract."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.device.kinds import GPUS, HANDLES, Device, Doubles, Gpu, Simulated, cufile_refusal, sample


@pytest.fixture(params=["simulated", "fake-cufile", *GPUS])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, folder: Path) -> Iterator[Device]:
    """Each kind in turn; one that is not there is skipped with the reason."""
    sample(0)  # made once, not in every child
    if request.param in HANDLES:
        gpu = Gpu(*HANDLES[request.param], folder)
        if gpu.may_take_cufile and cufile_refusal():
            pytest.skip(cufile_refusal())
        monkeypatch.setenv("NVME_OPS_GDS", gpu.mode)
        yield gpu
    elif request.param == "fake-cufile":  # in whose child it is seen what the test leaves behind
        yield Doubles(request.getfixturevalue("cufile"))
    else:
        request.getfixturevalue("the_device")
        simulated = Simulated()
        with simulated.left_as_found():
            yield simulated
