"""Pictures of documents: which bars they have, and in which colours; and those that the pages show."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import pytest

from nvme_ops.measure import picture
from tests.conftest import REPOSITORY


def row(name: str, median: float | None) -> dict[str, Any]:
    return {"name": name, "spread": median and {"median": median, "min": median / 2, "max": median * 2}}


def table(*rows: dict[str, Any], unit: str = "GB/s") -> dict[str, Any]:
    return {"title": "a title", "unit": unit, "rows": rows}


def pixels(path: Path) -> tuple[int, int]:
    width, height = struct.unpack(">II", path.read_bytes()[16:24])
    return width, height


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The figures that are saved."""
    from_matplotlib = pytest.importorskip("matplotlib.figure", reason="matplotlib is not installed")
    figures: list[Any] = []
    save = from_matplotlib.Figure.savefig

    def saved(figure: Any, *args: Any, **more: Any) -> None:
        figures.append(figure)
        save(figure, *args, **more)

    monkeypatch.setattr(from_matplotlib.Figure, "savefig", saved)
    return figures


def test_rows_with_a_throughput_are_bars_and_ours_have_one_colour(drawn: list[Any], tmp_path: Path) -> None:
    rows = [row("fio best", 3), row("nvme_ops, locked", 2.5), row("aio_handle", 0.012), row("not installed", None)]
    places = {
        "/a/DISK": {"tables": [table(*rows), table(row("late", 1), unit="us")]},
        "/a/RAM": {"tables": [table(rows[0])]},
    }
    path = tmp_path / "a.png"
    assert picture.plot({"folders": {**places, "/a/idle": {}}}, str(path))
    (figure,) = drawn
    first, second = figure.axes
    assert [each.get_text() for each in first.get_yticklabels()] == ["fio best", "nvme_ops, locked", "aio_handle"]
    assert [each.get_text() for each in first.texts] == ["3.00", "2.50", "0.012"]
    theirs, ours, the_same = (bar.get_facecolor() for bar in first.patches)
    assert ours == the_same != theirs == second.patches[0].get_facecolor()
    assert [each.get_text() for each in figure.texts][:2] == ["a title, GB/s; DISK", "a title, GB/s; RAM"]
    assert path.read_bytes().startswith(b"\x89PNG")


def test_many_tables_are_columns_and_none_leaves_its_place(drawn: list[Any], tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    assert picture.plot({"tables": [table(*[row("a name of thirty-six characters, or so", 1)] * 16)] * 10}, str(path))
    width, height = pixels(path)
    assert (width <= 1000, height < 2000) == (True, True)
    boxes = [axis.get_position() for axis in drawn[0].axes]
    assert all(0 < box.x0 < box.x1 < 1 and 0 < box.y0 < box.y1 < 1 for box in boxes)
    assert not any(one.overlaps(other) for number, one in enumerate(boxes) for other in boxes[:number])


def test_without_a_throughput_there_is_no_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    assert not picture.plot({"tables": [table(row("us", 1), unit="us"), table(row("none", None))]}, str(tmp_path / "a"))
    assert list(tmp_path.iterdir()) == []


def test_the_pictures_of_the_pages_fit_them() -> None:
    found = {path.name: pixels(path) for path in (REPOSITORY / "docs").rglob("*.png")}
    assert len(found) > 10
    assert {name: size for name, size in found.items() if size[0] > 1000 or size[1] > 2000} == {}
