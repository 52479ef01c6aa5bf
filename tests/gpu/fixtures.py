"""Fixtures for the tests on a real GPU, to be imported by name: other tests have some of the same names."""

from __future__ import annotations

from pathlib import Path

import pytest

from nvme_ops import gds_handle
from tests.gpu.support import TELLING, cufile_refusal, empty


@pytest.fixture
def cufile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skips where cuFile cannot work."""
    if cufile_refusal():
        pytest.skip(cufile_refusal())
    monkeypatch.delenv("NVME_OPS_GDS", raising=False)


@pytest.fixture
def way(cufile: None, folder: Path) -> str:
    """cuFile's way to files in ``folder``, ``gds`` or ``compat``; skips where it takes none of them."""
    handle, there, path = gds_handle(), empty(TELLING), folder / "probe"
    for _ in range(2):
        handle.write(there, path)
    path.unlink()
    statistics = handle.path_statistics()
    ways = set(statistics["uses"]) - {"bounce"}
    if not ways:
        pytest.skip(f"cuFile takes no file here: {statistics['why']}")
    return str(ways.pop())
