"""Bars of a document's throughputs, as a file: what ``--output`` writes, and what the pages show of stored results."""

from __future__ import annotations

import math
import os
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from nvme_ops.base.text import rounded

DRAWN = ("GB/s", "tokens/s", "samples/s")  # units of tables that are in a picture
# How rows of this package begin; "dataset" is its SampleStore behind torch's DataLoader
_OURS = ("nvme_ops", "aio_handle", "gds_handle", "save_on_nvme", "NvmeOptimizer", "dataset")
_COLOURS = {True: "#f57c00", False: "#8a8f98"}  # of those, of others
_LEGEND = "orange: this package; bars: medians; lines: from minimum to maximum"

# In inches of 100 dots: the widest picture fits a page of the site at its real size, with letters as those of tables.
_DPI, _FONT, _CHARACTER = 100, 9, 0.075  # points; the width that such a letter may need
_WIDE, _NARROW, _HIGHEST = 7.2, 4.9, 18.0  # a column that is alone, one of several; the height of a column
_BAR, _LINE, _GAP, _VALUE = 0.18, 0.17, 0.15, 0.45


@dataclass
class _Panel:
    """The bars of one table."""

    title: str
    rows: list[Mapping[str, Any]]

    @property
    def height(self) -> float:
        return _LINE * len(self.title.splitlines()) + _BAR * len(self.rows) + 2 * _GAP


def _panels(document: Mapping[str, Any], width: float) -> Iterator[_Panel]:
    folders = {name: entry["tables"] for name, entry in document.get("folders", {}).items() if entry.get("tables")}
    for folder, tables in [*folders.items(), ("", document.get("tables", []))]:
        for table in tables:
            rows = [row for row in table["rows"] if row["spread"]]
            if rows and table["unit"] in DRAWN:
                place = f"; {os.path.basename(folder.rstrip('/')) or folder}" if len(folders) > 1 else ""
                title = textwrap.wrap(f"{table['title']}, {table['unit']}{place}", int(width / _CHARACTER / 1.15))
                yield _Panel("\n".join(title), rows)


def plot(document: Mapping[str, Any], path: str) -> bool:
    """Draws the tables of all folders, in several columns if there are many; False if there is nothing to draw."""
    from matplotlib.figure import Figure  # type: ignore[import-not-found,unused-ignore]

    columns = math.ceil(sum(panel.height for panel in _panels(document, _NARROW)) / _HIGHEST)
    width = _WIDE if columns == 1 else _NARROW
    panels = list(_panels(document, width))
    if not panels:
        return False
    count = math.ceil(len(panels) / columns)
    parts = [panels[start : start + count] for start in range(0, len(panels), count)]
    size = (width * len(parts), max(sum(panel.height for panel in part) for part in parts) + _LINE + _GAP)
    figure = Figure(figsize=size)

    def write(x: float, y: float, words: str, points: int) -> None:
        figure.text(x / size[0], y / size[1], words, va="top", fontsize=points, linespacing=1.1)

    for number, part in enumerate(parts):
        left, top = number * width + 0.05, size[1] - 0.05
        labels = _CHARACTER * max(len(row["name"]) for panel in part for row in panel.rows) + 0.1
        for panel in part:
            write(left, top, panel.title, _FONT + 1)
            bars = (left + labels, top - panel.height + _GAP, width - labels - _VALUE, _BAR * len(panel.rows))
            _draw(figure.add_axes([length / size[index % 2] for index, length in enumerate(bars)]), panel.rows)
            top -= panel.height
    write(0.05, _LINE, _LEGEND, _FONT - 1)
    figure.savefig(path, dpi=_DPI)
    if path.lower().endswith(".png"):
        from PIL import Image  # type: ignore[import-not-found,unused-ignore]  # which matplotlib needs

        with Image.open(path) as image:
            image.convert("RGB").quantize(32).save(path, optimize=True)  # a quarter of the bytes
    return True


def _draw(axis: Any, rows: list[Mapping[str, Any]]) -> None:
    for place, row in enumerate(rows):
        median, low, high = (row["spread"][name] for name in ("median", "min", "max"))
        colour = _COLOURS[row["name"].startswith(_OURS)]
        axis.barh(place, median, xerr=[[median - low], [high - median]], color=colour, ecolor="#333333", capsize=2)
        near = {"xytext": (4, 0), "textcoords": "offset points", "va": "center", "fontsize": _FONT}
        axis.annotate(rounded(median, 3 if median >= 1 else 4), (high, place), **near)
    axis.set_yticks(range(len(rows)), [row["name"] for row in rows], fontsize=_FONT)
    axis.set_ylim(len(rows) - 0.5, -0.5)
    axis.set_xticks([])
    axis.tick_params(length=0)
    axis.spines[["top", "right", "bottom"]].set_visible(False)
