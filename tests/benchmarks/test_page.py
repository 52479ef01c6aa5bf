"""The page of results: what is shown of each section, what must not get into it; the README's table."""

from __future__ import annotations

import os
import re
import struct
from pathlib import Path

import pytest

pytest.importorskip("tabulate")  # of the extra bench

from benchmarks import anonymous, page
from benchmarks.page import SECTIONS

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
SECTION = re.compile(r"^<!-- section (\w+) -->$", re.MULTILINE)
FIGURE = re.compile(r"\d+(?:\.\d+)? (?:GB/s|kIOPS|us|ms|s|samples/s|tokens/s)(?![\w/])|times as fast")


def emptied(text: str) -> str:
    """The text without what stands between its marks."""
    return re.sub(r"(<!-- ((?:section )?\w+) -->\n).*?(<!-- /\2 -->)", r"\1\3", text, flags=re.DOTALL)


OURS = [file for file in (ROOT / "README.md", *sorted(DOCS.glob("*.md"))) if "\n<!-- " in file.read_text()]


@pytest.mark.parametrize("file", OURS, ids=lambda file: file.name)
def test_pages_are_what_the_stored_results_say_and_no_figure_is_by_hand(file: Path) -> None:
    text = file.read_text(encoding="utf-8")
    assert page.render(file.name, emptied(text), page.results()) == text
    by_hand = emptied(text).replace("of 10^9 bytes", "")
    by_hand = re.sub(r"\*\*On a GPU\*\*.*\(docs/gpu-results\.md\)", "", by_hand, flags=re.DOTALL)  # from that page
    if file.name not in ("README.md", page.PAGE):
        by_hand = by_hand.partition("\n## Figures\n")[2].partition("\n## ")[0]
    assert [figure for figure in FIGURE.findall(by_hand) if figure != "times as fast"] == []


RATE = re.compile(r"\d (?:GB/s|kIOPS|samples/s|tokens/s|tokens a second)(?![\w/])|times as fast")
DATED = re.compile(r"20\d\d-\d\d-\d\d|gpu-results\.md")


@pytest.mark.parametrize("file", sorted({*DOCS.glob("*.md")} - {DOCS / "gpu-results.md"}), ids=lambda file: file.name)
def test_a_rate_that_is_not_from_stored_results_has_a_date(file: Path) -> None:
    """Or says where it is from. Text in code, such as an example of output, is no claim."""
    text = re.sub(r"```.*?```|`[^`]+`", "", emptied(file.read_text(encoding="utf-8")), flags=re.DOTALL)
    claims = [part for part in re.split(r"\n\n|\n(?=[-|] )", text) if RATE.search(part)]
    assert [part for part in claims if not DATED.search(part)] == []


def test_every_section_is_on_one_page_and_every_result_is_of_a_section() -> None:
    assert sorted(name for file in DOCS.glob("*.md") for name in SECTION.findall(file.read_text())) == sorted(SECTIONS)
    assert {file.stem for file in (DOCS / "benchmarks").glob("*.json")} == set(SECTIONS)
    pictures = {run["plot"] for result in page.results().values() for run in result["runs"]} - {""}
    assert {file.name for file in (DOCS / "benchmarks").glob("*.png")} == pictures
    sizes = {name: struct.unpack(">II", (DOCS / "benchmarks" / name).read_bytes()[16:24]) for name in pictures}
    assert {name: size for name, size in sizes.items() if size[0] > 1000 or size[1] > 2000} == {}


def test_folders_and_what_names_a_machine_are_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Name:
        nodename, release = "blade", "6.1.2-made-by-ann"

    monkeypatch.setattr(os, "uname", Name)
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    places = {"DISK": str(tmp_path / "link"), "DEEP": str(tmp_path / "real" / "deep"), "MEMORY": "/dev/shm"}
    scrub = anonymous.scrub_for(places, str(tmp_path / "gone"))
    for value, expected in {
        f"{tmp_path}/link": "DISK",
        f"{tmp_path}/real/data: gone": "DISK/data: gone",
        f"in '{tmp_path}/real/deep/x', twice": "in 'DEEP/x', twice",
        "tmpfs on /dev/shm from tmpfs": "tmpfs on MEMORY from tmpfs",  # a mount point
        str(ROOT / "setup.py"): "CHECKOUT/setup.py",
        os.path.expanduser("~/x"): "~/x",
        "kernel 6.1.2-made-by-ann; x": "kernel 6.1.2; x",
        "ext4 on /mnt/x.img": "ext4 on an image file",
    }.items():
        assert scrub({value: [value]}) == {expected: [expected]}
    other = {"root": True, "path": "/usr/lib/x", "n": 12345678, "f": 1.23456789, "none": None, "at": "ext4 on / from x"}
    assert anonymous.scrub_for({"DISK": "/"}, str(tmp_path))(other) == {**other, "f": 1.23457}
