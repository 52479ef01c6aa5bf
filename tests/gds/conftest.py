"""The fixture ``device`` of these tests is that of the contract with cuFile's double."""

from __future__ import annotations

import pytest

from tests.device.kinds import Doubles, sample
from tests.doubles import FakeCuFile


@pytest.fixture
def device(cufile: FakeCuFile) -> Doubles:
    sample(0)  # made once, not in every child
    return Doubles(cufile)
