"""The fixture ``device`` of the contract. What it stands on is that of ``fake_cufile.fixtures`` and ``gpu.support``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.device.kinds import GPUS, Device, Gpu, Simulated, SimulatedCuFile, sample
from tests.gpu.support import GDS, KINDS, cufile_refusal


@pytest.fixture(params=["simulated", "fake-cufile", *GPUS])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, folder: Path) -> Iterator[Device]:
    """Each kind in turn; one that is not there is skipped with the reason."""
    sample(0)  # made once, not in every child
    if request.param == "fake-cufile":  # in whose child it is seen what the test leaves behind
        yield SimulatedCuFile(request.getfixturevalue("the_device"), request.getfixturevalue("cufile"))
    elif request.param == "simulated":
        simulated = request.getfixturevalue("the_device")
        with simulated.left_as_found():
            yield Simulated(simulated)
    else:
        on_gpu = KINDS[request.param]
        if on_gpu is GDS and cufile_refusal():
            pytest.skip(cufile_refusal())
        monkeypatch.setenv("NVME_OPS_GDS", on_gpu.mode)
        yield Gpu(on_gpu, folder)
