"""Fixtures for the tests on a real GPU, to be imported by name: other tests have some of the same names."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from gpu.support import AIO, GDS, GDS_OFF, TELLING, Kind, cufile_refusal, empty, prime

from nvme_ops import aio_handle, gds_handle

HandleFactory = Callable[..., aio_handle]


@pytest.fixture(params=[AIO, GDS, GDS_OFF], ids=["aio", "gds", "gds-off"])
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Kind:
    """Each kind of handle in turn, its environment set."""
    kind: Kind = request.param
    if kind is GDS and cufile_refusal():
        pytest.skip(cufile_refusal())
    monkeypatch.setenv("NVME_OPS_GDS", kind.mode)
    return kind


@pytest.fixture
def make_handle(kind: Kind, folder: Path) -> HandleFactory:
    """Makes handles, for each kind in turn."""

    def make(**settings: int) -> aio_handle:
        handle = kind.make(**settings)
        if kind is GDS:
            prime(handle, folder)
        return handle

    return make


@pytest.fixture(params=[1, 3], ids=["1-lane", "3-lanes"])
def handle(request: pytest.FixtureRequest, make_handle: HandleFactory) -> aio_handle:
    """A handle of each kind."""
    return make_handle(intra_op_parallelism=request.param)


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


@pytest.fixture
def gds(way: str, folder: Path) -> gds_handle:
    """A handle whose next large transfer takes cuFile."""
    handle = gds_handle(intra_op_parallelism=2)
    prime(handle, folder)
    return handle
