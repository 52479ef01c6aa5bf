"""The page of results and the README's table: the figures of made-up results, and what they lack, are in them."""

from __future__ import annotations

import re
from typing import Any

import pytest

pytest.importorskip("tabulate")  # of the extra bench

from benchmarks import page, page_render
from nvme_ops.text import GIB

DESCRIPTION = {
    "machine": {"cpu": "4 x Example", "memory": "8 GiB", "kernel": "6.1.2", "deepspeed": "0.19.8"},
    "settings": {"memlock limit": "8 MiB"},
    "places": {
        "DISK": {"file system": "ext4 on DISK from /dev/sda1 (rw,relatime)", "device": "sda, NVMe, Example 9"},
        "MEMORY": {"file system": "tmpfs on MEMORY from tmpfs", "device": "none, tmpfs lives in memory"},
    },
}
README = "intro\n\n<!-- benchmarks -->\nold\n<!-- /benchmarks -->\n\nrest\n"
PAGE = "intro\n\n<!-- section {} -->\nold\n<!-- /section {} -->\n\n<!-- machines -->\n<!-- /machines -->\n"
RANDOM = "nvme_ops submit_preadv, nvme_ops.empty"


def spread(median: float) -> dict[str, float]:
    return {"median": median, "min": median * 0.9, "max": median * 1.1}


def row(name: str, median: float | None, ratio: float | None = None, **more: Any) -> dict[str, Any]:
    return {
        "name": name, "note": "", "wrong": False, "values": [median],
        "spread": None if median is None else spread(median),
        "against_reference": None if ratio is None else spread(ratio),
        "columns": {}, "peer": "", "against_peer": None, **more,
    }  # fmt: skip


def table(group: str, reference: str, rows: list[dict[str, Any]], unit: str = "GB/s") -> dict[str, Any]:
    return {
        "group": group,
        "title": f"title of {group}, 1 GiB",
        "unit": unit,
        "reference": reference,
        "peers": "DeepSpeed",
        "rows": rows,
    }


def raw_io_tables() -> list[dict[str, Any]]:
    cpu = {"columns": {"CPU s/GiB": spread(0.0123)}}
    ours = [
        row("nvme_ops, locked", 1.9, 0.95, against_peer=spread(1.71), **cpu),
        row("nvme_ops, pageable", 1.8, 0.9, against_peer=spread(2.5), **cpu),
    ]
    fio_random = "fio randread 4k, depth 128"
    return [
        table("read", "fio best", [row("fio best", 2.0, 1.0), *ours]),
        table("write", "fio best", [row("fio best", 2.0, 1.0), *ours]),
        table("cached", "os.preadv in 64 MiB pieces", [row("nvme_ops, pageable", 7.12, 0.99, **cpu)]),
        table("random", fio_random, [row(fio_random, 60.0, 1.0), row(RANDOM, 235.4, 1.1)], "kIOPS"),
    ]


def raw_io_document() -> dict[str, Any]:
    sizes = [row("busy", 20 << 20), row("peak resident growth", None)]
    folders = {name: {"tables": [*raw_io_tables(), table("memory", "", sizes, "bytes")]} for name in ("DISK", "MEMORY")}
    folders["MEMORY"]["tables"].append(table("start", "", [row("nvme_ops, warm", 0.061)], "s"))
    return {"size": GIB, "rounds": 7, "folders": folders}


def stored(document: Any = None, **more: Any) -> dict[str, Any]:
    run = {"command": "some --command", "failure": "", "document": document, "text": "", "plot": ""}
    run |= {name: more.pop(name) for name in list(more) if name in run}
    return {"section": "", "date": "2026-01-02", "skipped": "", "description": DESCRIPTION, "runs": [run], **more}


def section(name: str, found: dict[str, Any] | None) -> str:
    """What the page shows of a section."""
    text = page_render.page(PAGE.replace("{}", name), {name: found} if found else {}, "pictures")
    assert "old" not in text
    return text.partition(f"<!-- section {name} -->\n")[2].partition(f"<!-- /section {name} -->\n")[0].strip("\n")


def tables(text: str) -> list[list[dict[str, str]]]:
    """The Markdown tables in a text: their rows by column."""
    found = []
    for block in re.findall(r"(?:^\|.*\n?)+", text, re.MULTILINE):
        cells = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in block.splitlines()]
        assert {len(line) for line in cells} == {len(cells[0])}
        assert set("".join(cells[1])) == {"-"}
        found.append([dict(zip(cells[0], line, strict=True)) for line in cells[2:]])
    return found


# Documents


def test_every_figure_of_a_table_is_shown_under_its_column() -> None:
    ((best, locked, _), *_) = tables(section("raw_io", stored(raw_io_document())))
    assert best == {"": "fio best", "GB/s (min - max)": "2.000 (1.800 - 2.200)", "CPU s/GiB": "-", "/ fio best": "-",
                    "/ DeepSpeed": "-"}  # fmt: skip
    assert list(locked.values())[1:] == [
        "1.900 (1.710 - 2.090)", "0.012", "0.95 (0.85 - 1.04)", "1.71 (1.54 - 1.88)"
    ]  # fmt: skip


def test_notes_get_a_column_where_there_are_any_and_cannot_break_the_table() -> None:
    rows = [row("a | b", None, note="not installed:\npip install it"), row("c", 1)]
    ((first, second),) = tables(section("engines", stored({"tables": [table("read", "", rows)]})))
    assert first == {"": "a \\| b", "GB/s (min - max)": "-", "note": "not installed: pip install it"}
    assert second["note"] == ""


def test_every_folder_and_every_group_of_raw_io_is_shown() -> None:
    text = section("raw_io", stored(raw_io_document()))
    assert re.findall("^#### .*", text, re.MULTILINE) == ["#### `DISK`", "#### `MEMORY`"]
    assert len(tables(text)) == 2 * (4 + 1) + 1
    assert {row[""]: row["bytes"] for row in tables(text)[4]}["busy"] == "20 MiB"
    assert text.count("unknown") == 2
    assert tables(text)[-1][0]["s (min - max)"] == "0.061 (0.055 - 0.067)"


def test_single_blocks_of_nvme_bench_are_shown() -> None:
    times = {"count": 512, "complete": {"0.5": 1e-4, "0.9": 2e-4, "0.99": 3e-4, "0.999": 4e-4}, "submit": {}}
    ours = {**times, "submit": {"0.5": 1e-5, "0.9": 1e-5, "0.99": 2e-5, "0.999": 3e-5}}
    found = tables(section("engines", stored({"tables": [], "blocks": {"fio": times, "aio_handle": ours}})))
    assert [list(row.values()) for row in found[0]] == [
        ["fio", "100", "200", "300", "400", "-", "-", "512"],
        ["aio_handle", "100", "200", "300", "400", "10.0", "20.0", "512"],
    ]


def test_notes_are_shown_and_what_peers_are_called() -> None:
    rows = [row("the sum", 1), row("ours", 1, peer="the sum", against_peer=spread(0.96))]
    folder = {"tables": [table("read", "", rows) | {"peers": "the sum of each"}], "notes": ["ours / theirs: reached"]}
    text = section("gpu", stored({"about": {"gpu": "Example", "cuda": "13"}, "folders": {"": folder}}))
    assert "gpu Example; cuda 13" in text
    assert "- ours / theirs: reached" in text
    assert tables(text)[0][1]["/ the sum of each"] == "0.96 (0.86 - 1.06)"
    assert "####" not in text


# Sections


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (None, "Not measured yet."),
        (stored(skipped="no GPU", runs=[]), "Not run: no GPU."),
        (stored({"tables": [{}]}), "These results cannot be shown"),
        (stored({"tables": 7}), "These results cannot be shown"),
        (stored({"folders": {"DISK": {"tables": [{"rows": [{}]}]}}}), "These results cannot be shown"),
    ],
    ids=["none", "skipped", "other version", "no list", "empty row"],
)
def test_what_there_is_not_is_said(found: dict[str, Any] | None, said: str) -> None:
    assert said in section("engines", found)


def test_a_section_has_its_command_date_machine_failure_and_picture_and_what_was_measured() -> None:
    found = stored({"tables": [raw_io_tables()[0]]}, plot="engines.png", failure="exit status 1: wrong data")
    text = section("engines", found)
    for words in (
        "    some --command\n",
        "2026-01-02, machine 1.",
        "exit status 1: wrong data",
        "](pictures/engines.png)",
    ):
        assert words in text
    assert len(tables(text)) == 1


def test_a_command_that_prints_is_shown_as_it_printed() -> None:
    assert "```text\nread: 1 GB/s\n  | as it is\n```" in section("explain", stored(text="read: 1 GB/s\n  | as it is\n"))


def test_machines_are_described_once_each() -> None:
    other = {**DESCRIPTION, "machine": {"cpu": "8 x Other"}}
    results = {"raw_io": stored({}), "engines": stored({}), "sweep": stored({}, description=other)}
    text = page_render.page(PAGE.replace("{}", "sweep"), results, "x")
    first, second = tables(text)
    assert {"machine 1": "cpu", "": "4 x Example"} in first
    assert {"machine 2": "cpu", "": "8 x Other"} in second
    assert {
        "machine 1": "`DISK`",
        "": "file system: ext4 on DISK from /dev/sda1; device: sda, NVMe, Example 9",
    } in first
    assert "2026-01-02, machine 2." in text


def test_the_page_has_every_section_once_and_no_figures_that_are_not_measured() -> None:
    text = (page.ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    assert re.findall(r"^<!-- section (\w+) -->$", text, re.MULTILINE) == list(page.SECTIONS)
    prose = re.sub(r"<!-- (section \w+) -->.*?<!-- /\1 -->", "", text, flags=re.DOTALL)
    assert len(prose) < len(text) / 2
    assert re.findall(r"\d+(?:\.\d+)? (?:GB/s|kIOPS|us|s)\b", prose.replace("of 10^9 bytes", "")) == []


# The README


def test_the_readme_gets_the_figures_and_what_they_were_measured_on() -> None:
    text = page_render.readme(README, {"raw_io": stored(raw_io_document())})
    assert text.startswith("intro\n\n<!-- benchmarks -->\n\nAgainst fio at its best (io_uring, 4 MiB")
    assert text.endswith("|\n\n<!-- /benchmarks -->\n\nrest\n")
    intro = " ".join(text.partition("\n|")[0].split())
    for words in ("DeepSpeed 0.19.8", "1 GiB, cold, medians of 7", "4 x Example", "memory is tmpfs)", "2026-01-02:",
                  "disk is ext4 on sda, NVMe, Example 9;"):  # fmt: skip
        assert words in intro
    assert all(len(line) <= 120 for line in text.splitlines() if not line.startswith("|"))
    ((locked, *_, cached, random),) = tables(text)
    assert list(locked.values())[1:] == ["1.90", "0.95", "1.7", "1.90", "0.95", "1.7", "0.012"]
    assert list(cached.values())[1:4] == ["7.12", "0.99 of `os.preadv`", "-"]
    assert list(random.values())[1:4] == ["235 kIOPS", "1.10", "-"]


def test_the_readme_says_what_fio_lacked_and_leaves_gaps_where_rows_are_missing() -> None:
    document = raw_io_document()
    best, _, ordinary = document["folders"]["DISK"]["tables"][0]["rows"]
    best["note"], ordinary["spread"] = "without huge pages (vm.nr_hugepages)", None
    del document["folders"]["MEMORY"]["tables"][2:]
    text = page_render.readme(README, {"raw_io": stored(document)})
    assert "(without huge pages (vm.nr_hugepages)) and" in text
    ((_, ordinary, *_, random),) = tables(text)
    assert list(ordinary.values())[1:5] == ["-", "-", "-", "1.80"]
    assert list(random.values())[1:5] == ["235 kIOPS", "1.10", "-", "-"]


@pytest.mark.parametrize(
    ("results", "said"),
    [
        ({}, "Not measured yet."),
        ({"raw_io": stored(None, failure="exit status 1")}, "Not measured yet."),
        ({"raw_io": stored({"folders": {"DISK": {}}})}, "These results cannot be shown"),
    ],
    ids=["none", "failed", "damaged"],
)
def test_a_readme_without_results_says_so(results: dict[str, Any], said: str) -> None:
    text = page_render.readme(README, results)
    assert text.startswith("intro\n\n<!-- benchmarks -->\n")
    assert text.endswith("\n<!-- /benchmarks -->\n\nrest\n")
    assert said in text
    assert "old" not in text


@pytest.mark.parametrize("text", ["no markers\n", "<!-- benchmarks -->\n", "<!-- /benchmarks -->\n"])
def test_a_readme_or_page_without_markers_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="it has no lines <!-- benchmarks -->"):
        page_render.readme(text, {})
    with pytest.raises(ValueError, match="it has no lines <!-- machines -->"):
        page_render.page(text, {}, "")
