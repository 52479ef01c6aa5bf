"""The pictures of nvme-bench, drawn from made-up timings: what lies along the axes, and which lines there are."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from nvme_ops.measure import bench as options
from nvme_ops.measure import run as plot
from nvme_ops.measure import tables
from nvme_ops.measure.rows import Row, Sample, Spread
from nvme_ops.measure.run import BenchResult, Scaling, contenders
from nvme_ops.text import KIB, MIB

figure = pytest.importorskip("matplotlib.figure", reason="matplotlib is not installed")
ANYWHERE = tempfile.gettempdir()
PNG = b"\x89PNG\r\n"


def result(*words: str, rates: Sequence[float | None] = ()) -> BenchResult:
    """With the rows that these flags ask for; ``rates``: GB/s of each, None for one that failed."""
    given = options.parse(["--folder", ANYWHERE, *words])
    rows = [Row(contender.name, lambda: Sample(1, 1)) for contender in contenders(given)]
    for row, rate in zip(rows, rates, strict=True):
        row.samples = [None if rate is None else Sample(1 / rate * slower, 10**9) for slower in (1, 2, 1)]
    return BenchResult(given, {}, {ANYWHERE: {}}, tables.Table("write", "write, 1 GiB", "GB/s", rows, "fio best"))


def axis_of(monkeypatch: pytest.MonkeyPatch, path: Path, found: BenchResult) -> Any:
    """What is drawn."""
    kept: list[Any] = []
    save = figure.Figure.savefig

    def keep(drawn: Any, *words: Any, **more: Any) -> None:
        kept.append(drawn)
        save(drawn, *words, **more)

    monkeypatch.setattr(figure.Figure, "savefig", keep)
    assert plot.plot(found, str(path))
    monkeypatch.undo()
    assert path.read_bytes().startswith(PNG)
    return kept[0].axes[0]


def points(line: Any) -> dict[float, float]:
    return dict(zip(line.get_xdata(), line.get_ydata(), strict=True))


def lines(axis: Any) -> dict[str, dict[float, float]]:
    """The points of each line of the legend, by their place on the axis."""
    handles, labels = axis.get_legend_handles_labels()
    found = {}
    for handle, label in zip(handles, labels, strict=True):
        line = handle[0] if isinstance(handle, tuple) else handle  # errorbars are a tuple
        found[label] = points(line)
    return found


def test_bars_of_engines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    axis = axis_of(monkeypatch, tmp_path / "a.png", result("--engine", "aio_handle", "torch", rates=[4, 3, None]))
    assert [label.get_text() for label in axis.get_yticklabels()] == ["fio best", "aio_handle", "torch"]
    assert [bar.get_width() for bar in axis.patches] == pytest.approx([4, 3])  # medians; what failed has none
    assert axis.get_xlabel() == "GB/s: median, least and most"


def test_a_sweep_lies_along_the_setting_with_most_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = result("--sweep", "queue_depth=1,8", "block_size=1M,64K,8M", rates=[9, 1, 2, 3, 4, 5, 6])
    axis = axis_of(monkeypatch, tmp_path / "a.png", found)
    assert axis.get_xlabel() == "block_size"
    assert [label.get_text() for label in axis.get_xticklabels()] == ["64 KiB", "1 MiB", "8 MiB"]
    assert lines(axis)["aio_handle, queue_depth 1"] == pytest.approx({64 * KIB: 2, MIB: 1, 8 * MIB: 3})
    assert lines(axis)["aio_handle, queue_depth 8"] == pytest.approx({64 * KIB: 5, MIB: 4, 8 * MIB: 6})
    assert list(lines(axis)["fio best"].values()) == pytest.approx([9, 9])


def test_an_engine_without_the_setting_adds_no_value_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["--engine", "aio_handle", "python", "--no_reference"]
    one = axis_of(monkeypatch, tmp_path / "a.png", result(*words, "--sweep", "queue_depth=1,8", rates=[1, 2, 3]))
    assert [label.get_text() for label in one.get_xticklabels()] == ["1", "8"]
    assert list(set(lines(one)["python"].values())) == pytest.approx([3])
    axes = ["--sweep", "queue_depth=1,8", "block_size=1M,64K,8M"]
    two = axis_of(monkeypatch, tmp_path / "b.png", result(*words, *axes, rates=range(1, 8)))
    assert two.get_xlabel() == "block_size"


def test_a_sweep_leaves_out_what_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = result("--sweep", "queue_depth=1,8,32", "--no_reference", rates=[1, None, 3])
    axis = axis_of(monkeypatch, tmp_path / "a.png", found)
    assert lines(axis)["aio_handle"] == pytest.approx({1: 1, 32: 3})
    assert [label.get_text() for label in axis.get_xticklabels()] == ["1", "8", "32"]


def test_a_sweep_of_switches_alone_has_bars(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = result("--sweep", "single_submit=0,1", "--no_reference", rates=[1, 2])
    axis = axis_of(monkeypatch, tmp_path / "a.png", found)
    assert [label.get_text() for label in axis.get_yticklabels()] == [
        "aio_handle, single_submit False",
        "aio_handle, single_submit True",
    ]


def test_scaling_lies_along_the_number_of_devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = result(rates=[1, 1])

    def scaling(devices: int, rate: float) -> Scaling:
        return Scaling("aio_handle", devices, Spread(rate, rate, rate), Spread(2.0 * devices, 0, 0), Spread(1, 1, 1))

    found.scaling = [scaling(2, 3.5), scaling(4, 7.5), Scaling("torch", 2, None, None, None)]
    axis = axis_of(monkeypatch, tmp_path / "a.png", found)
    assert axis.get_xlabel() == "devices at once"
    assert lines(axis)["aio_handle"] == {2: 3.5, 4: 7.5}
    assert {2: 4.0, 4: 8.0} in [points(line) for line in axis.lines]
    assert "sum of each device alone" in lines(axis)


def test_nothing_measured_is_no_picture(tmp_path: Path) -> None:
    assert not plot.plot(result(rates=[None, None]), str(tmp_path / "a.png"))
    assert not plot.plot(result("--sweep", "queue_depth=1,2", rates=[None] * 3), str(tmp_path / "a.png"))
    assert list(tmp_path.iterdir()) == []
