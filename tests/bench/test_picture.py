"""Pictures of documents: which bars they have, and how large they are."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import pytest

from nvme_ops.measure import picture

pytest.importorskip("matplotlib", reason="matplotlib is not installed")


def document(unit: str, *names: str, tables: int = 1) -> dict[str, Any]:
    spread = {"median": 2.5, "min": 2, "max": 3}
    rows = [{"name": name, "spread": spread if name else None} for name in names]
    return {"tables": [{"title": "a title", "unit": unit, "rows": rows}] * tables}


def test_rows_with_a_throughput_are_bars_ours_have_one_colour_and_many_tables_are_columns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.png"
    for nothing in (document("us", "late"), document("GB/s", "")):
        assert not picture.plot(nothing, str(path))
    assert not path.exists()
    many = document("GB/s", *["a name of thirty-six characters, or so"] * 16, tables=10)
    assert picture.plot(many, str(path))
    width, height = struct.unpack(">II", path.read_bytes()[16:24])
    assert (width <= 1000, height <= 2000) == (True, True)
    drawn: list[Any] = []
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda figure, *_, **__: drawn.append(figure))
    assert picture.plot(document("GB/s", "torch", "nvme_ops, locked", "aio_handle", ""), str(tmp_path / "a.svg"))
    theirs, ours, the_same = (bar.get_facecolor() for bar in drawn[0].axes[0].patches)
    assert ours == the_same != theirs
