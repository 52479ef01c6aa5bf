"""The fixture ``device`` of the contract. What it stands on is that of ``fake_cufile.fixtures`` and ``gpu.support``."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.device.kinds import GPUS, Device, Gpu, Simulated, SimulatedCuFile, SimulatedCuFileOff, sample
from tests.gpu.support import GDS, KINDS, cufile_refusal

DOUBLES = ("simulated", "fake-cufile")


@pytest.fixture(params=[*DOUBLES, *GPUS])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, folder: Path) -> Iterator[Device]:
    """Each kind in turn; one that is not there is skipped with the reason."""
    sample(0)  # made once, not in every child
    if request.param.startswith("fake-cufile"):  # in whose child it is seen what the test leaves behind
        kind = SimulatedCuFile if request.param == "fake-cufile" else SimulatedCuFileOff
        yield kind(request.getfixturevalue("the_device"), request.getfixturevalue("cufile"))
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


Case = dict[str, int]  # for each parametrisation of a test the number of its values in this one


@pytest.hookimpl(tryfirst=True)  # before -m chooses
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leaves ``make test`` a part of each test's cases on a double, and marks the rest as slow.

    The simulated device has every pair of two parameters' values; cuFile's double, which shares most of what is between
    the call and the device with it, every value.
    """
    tests: dict[tuple[str, str], list[pytest.Function]] = {}
    for item in items:
        if (
            item.path.parent == Path(__file__).parent
            and isinstance(item, pytest.Function)
            and hasattr(item, "callspec")
        ):
            kind = str(item.callspec.params.get("device", ""))
            if kind.startswith(DOUBLES):
                tests.setdefault((kind, f"{item.path}::{item.originalname}"), []).append(item)
    for (kind, _), found in tests.items():
        cases = numbered(found)
        for item, kept in zip(found, each_pair(cases) if kind == "simulated" else each_value(cases), strict=True):
            if not kept:
                item.add_marker(pytest.mark.slow)


def numbered(items: list[pytest.Function]) -> list[Case]:
    """The cases of one test on one kind of device."""
    axes = [mark.args[0] for mark in items[0].iter_markers("parametrize") if mark.args[0] != "device"]
    names = {str(axis): [axis] if isinstance(axis, str) else axis for axis in axes}
    met: dict[str, dict[str, int]] = {axis: {} for axis in names}
    return [
        {
            axis: met[axis].setdefault(repr([item.callspec.params[name] for name in names[axis]]), len(met[axis]))
            for axis in names
        }
        for item in items
    ]


def each_pair(cases: list[Case]) -> list[bool]:
    """Whether a case has two values that no earlier one has together; all of what has one parameter."""
    met: set[tuple[tuple[str, int], ...]] = set()
    kept = []
    for case in cases:
        pairs = set(itertools.combinations(case.items(), min(2, len(case))))
        kept.append(not pairs <= met)
        met |= pairs
    return kept


def each_value(cases: list[Case]) -> list[bool]:
    """Whether a case is one of as many as the longest parameter has values, in which each value of each is met."""
    counts = {axis: 1 + max(case[axis] for case in cases) for axis in cases[0]}
    longest = max(counts, key=lambda axis: counts[axis], default="")
    strides, stride = {}, 1
    for axis in [axis for axis in counts if axis != longest]:
        fits = stride * counts[axis] <= counts[longest]  # not the same values of two parameters together each time
        strides[axis] = stride if fits else 1
        stride *= counts[axis] if fits else 1
    return [
        all(case[axis] == case[longest] // stride % counts[axis] for axis, stride in strides.items()) for case in cases
    ]
