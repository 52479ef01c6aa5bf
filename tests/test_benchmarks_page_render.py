"""The page of results and the README's table: made-up documents as Markdown."""

from __future__ import annotations

import re
from typing import Any

import pytest

from benchmarks import page, page_render, page_tables
from benchmarks.page_sections import SECTIONS
from nvme_ops.text import GIB

DESCRIPTION = {
    "machine": {"cpu": "4 x Example", "memory": "8 GiB", "kernel": "6.1.2", "deepspeed": "0.19.8"},
    "settings": {"memlock limit": "8 MiB"},
    "places": {
        "DISK": {"file system": "ext4 on DISK from /dev/sda1 (rw,relatime)", "device": "sda, NVMe, Example 9"},
        "MEMORY": {"file system": "tmpfs on MEMORY from tmpfs", "device": "none, tmpfs lives in memory"},
    },
}


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
    return {"group": group, "title": f"title of {group}, 1 GiB", "unit": unit, "reference": reference, "rows": rows}


def raw_io_tables() -> list[dict[str, Any]]:
    cpu = {"columns": {"CPU s/GiB": spread(0.0123)}}
    ours = [
        row("nvme_ops, locked", 1.9, 0.95, peer="DeepSpeed, locked", against_peer=spread(1.71), **cpu),
        row("nvme_ops, pageable", 1.8, 0.9, peer="DeepSpeed, pageable", against_peer=spread(2.5), **cpu),
    ]
    random = "nvme_ops submit_preadv, nvme_ops.empty"
    fio_random = "fio randread 4k, depth 128"
    return [
        table("read", "fio best", [row("fio best", 2.0, 1.0), *ours]),
        table("write", "fio best", [row("fio best", 2.0, 1.0), *ours]),
        table("cached", "os.preadv in 64 MiB pieces", [row("nvme_ops, pageable", 7.12, 0.99, **cpu)]),
        table("random", fio_random, [row(fio_random, 60.0, 1.0), row(random, 235.4, 1.1)], "kIOPS"),
    ]


def raw_io_document() -> dict[str, Any]:
    memory = {"idle_before": 0, "busy": 20 << 20, "peak_resident_growth": None}
    folders = {name: {"tables": raw_io_tables(), "memory": memory} for name in ("DISK", "MEMORY")}
    start = table("start", "", [row("nvme_ops, warm", 0.061)], "s")
    return {"size": 1 << 30, "rounds": 7, "folders": folders, "start": start}


def stored(document: Any = None, **more: Any) -> dict[str, Any]:
    run = {"command": "some --command", "failure": "", "document": document, "text": "", "plot": ""}
    run |= {name: more.pop(name) for name in list(more) if name in run}
    return {"section": "", "date": "2026-01-02", "skipped": "", "description": DESCRIPTION, "runs": [run], **more}


def one_section(name: str, found: dict[str, Any] | None) -> str:
    results = {} if found is None else {name: found}
    text = page_render.page(f"before\n\n<!-- section {name} -->\n\nafter\n", results, "benchmarks")
    begin, end = f"{page_render.NOTICE}\n\nbefore\n\n", "\n\nafter\n"
    assert text.startswith(begin)
    assert text.endswith(end)
    return text[len(begin) : -len(end)]


# Documents as Markdown


def test_a_table_shows_medians_ranges_and_ratios() -> None:
    lines = page_tables.table(raw_io_tables()[0])
    assert lines == [
        "**title of read, 1 GiB**",
        "",
        "|  | GB/s (min - max) | CPU s/GiB | / fio best | / DeepSpeed |",
        "| --- | --- | --- | --- | --- |",
        "| fio best | 2.000 (1.800 - 2.200) | - | - | - |",
        "| nvme_ops, locked | 1.900 (1.710 - 2.090) | 0.012 | 0.95 (0.85 - 1.04) | 1.71 (1.54 - 1.88) |",
        "| nvme_ops, pageable | 1.800 (1.620 - 1.980) | 0.012 | 0.90 (0.81 - 0.99) | 2.50 (2.25 - 2.75) |",
        "",
    ]


def test_notes_get_a_column_where_there_are_any() -> None:
    lines = page_tables.table(
        table("read", "", [row("a | b", None, note="not installed:\npip install it"), row("c", 1)])
    )
    assert lines[2] == "|  | GB/s (min - max) | note |"
    assert lines[4] == "| a \\| b | - | not installed: pip install it |"
    assert lines[5] == "| c | 1.000 (0.900 - 1.100) |  |"


def test_every_folder_of_raw_io_is_shown() -> None:
    text = "\n".join(page_tables.raw_io(raw_io_document()))
    assert re.findall("^#### .*", text, re.MULTILINE) == ["#### `DISK`", "#### `MEMORY`"]
    assert text.count("| busy | 20 MiB |") == 2
    assert text.count("| peak resident growth | unknown |") == 2
    assert text.count("| nvme_ops, warm | 0.061 (0.055 - 0.067) |") == 1


def test_single_blocks_of_nvme_bench_are_shown() -> None:
    times = {"count": 512, "complete": {"0.5": 1e-4, "0.9": 2e-4, "0.99": 3e-4, "0.999": 4e-4}, "submit": {}}
    ours = {**times, "submit": {"0.5": 1e-5, "0.9": 1e-5, "0.99": 2e-5, "0.999": 3e-5}}
    document = {"tables": [raw_io_tables()[0]], "blocks": {"aio_handle": ours, "fio": times}}
    lines = page_tables.bench(document)
    assert "**title of read, 1 GiB**" in lines
    assert "| aio_handle | 100 | 200 | 300 | 400 | 10.0 | 20.0 | 512 |" in lines
    assert "| fio | 100 | 200 | 300 | 400 | - | - | 512 |" in lines


def scaling_line(engine: str, ratio: float | None) -> dict[str, Any]:
    plain = None if ratio is None else {"median": ratio, "low": ratio, "high": ratio}
    return {"group": "read", "engine": engine, "devices": 2, "rate": plain, "alone": plain, "ratio": plain}


def test_scaling_is_judged_by_its_aim() -> None:
    document = {
        "least": 0.95,
        "tables": [table("read", "", [row("x", 1, note="why")])],
        "scaling": [
            scaling_line("fio, a job each", 0.5),
            scaling_line("nvme_ops, one handle", 0.96),
            scaling_line("nvme_ops, a process each", 0.94),
            scaling_line("nvme_ops, of no round", None),
        ],
    }
    lines = page_tables.scaling(document)
    assert lines[2] == "|  | devices | GB/s (min - max) | / sum of each alone | aim 0.95 |"
    assert [line.split("|")[-2].strip() for line in lines[4:8]] == ["", "reached", "missed", ""]
    assert "- x: why" in lines


def test_scaling_of_nvme_bench_is_shown_without_an_aim() -> None:
    lines = page_tables.bench({"tables": [], "scaling": [scaling_line("aio_handle", 0.97)]})
    assert lines[2] == "| aio_handle | 2 | 0.970 (0.970 - 0.970) | 0.97 (0.97 - 0.97) |"


def test_what_nvme_tune_found_is_shown_and_the_best_of_the_sweep() -> None:
    aio = {
        "block_size": 8 << 20, "queue_depth": 32, "single_submit": False, "overlap_events": True,
        "intra_op_parallelism": 2,
    }  # fmt: skip
    words = "8 MiB blocks, depth 32, intra_op_parallelism 2, overlap_events"
    ratio = {"median": 0.98, "min": 0.97, "max": 1.01}
    lines = page_tables.tuning(
        {
            "sweep": [{"aio": aio, "ratio": 1.06}] * 300,
            "repetitions": [{"aio": aio, "seconds": 45.4, "against_best": ratio}],
            "against_default": [{"aio": aio, "ratio": 1.0099, "noise": 0.0113}],
        }
    )
    assert lines == [
        "| run of nvme-tune | its settings | seconds | / the sweep's best (min - max) |",
        "| --- | --- | --- | --- |",
        f"| 1 | {words} | 45 | 0.98 (0.97 - 1.01) |",
        "",
        "**the best of 300 combinations, measured again**",
        "",
        "| settings | / the default | noise |",
        "| --- | --- | --- |",
        f"| {words} | 1.010 | 0.011 |",
        "",
    ]


def test_the_aims_on_a_gpu_are_shown() -> None:
    aims: dict[str, Any] = {
        "read": {"ours / theirs": {"ratio": {"median": 1.0, "low": 0.9, "high": 1.1}, "least": 0.95}}
    }
    aims["read"]["other"] = {"ratio": None, "least": 1}
    folder = {"tables": [raw_io_tables()[0]], "aims": aims}
    lines = page_tables.gpu_io({"device": {"gpu": "Example"}, "folders": {"DISK": folder}})
    assert lines[0] == "gpu Example"
    assert "| ours / theirs | 1.00 (0.90 - 1.10) | 0.95 |" in lines
    assert "| other | - | 1 |" in lines


# The page


def test_a_section_that_was_never_measured_says_so() -> None:
    assert one_section("raw_io", None) == "Not measured yet."


def test_a_section_that_cannot_be_run_says_why() -> None:
    assert one_section("gpu", stored(skipped="no GPU", runs=[])) == "Not run: no GPU."


def test_a_section_stands_under_its_command_date_and_machine() -> None:
    lines = one_section("engines", stored({"tables": [raw_io_tables()[0]]}, plot="engines.png")).splitlines()
    assert lines[:4] == ["    some --command", "", "2026-01-02, machine 1.", ""]
    assert lines[4] == "**title of read, 1 GiB**"
    assert lines[-1] == "![some --command](benchmarks/engines.png)"


def test_a_failure_is_shown_with_what_was_measured() -> None:
    text = one_section("engines", stored({"tables": [raw_io_tables()[0]]}, failure="exit status 1: wrong data"))
    assert "**This run failed: exit status 1: wrong data**\n\n**title of read, 1 GiB**" in text


def test_results_of_another_version_are_said_to_be_so() -> None:
    assert "**These results cannot be shown (KeyError: 'rows')" in one_section("engines", stored({"tables": [{}]}))


def test_a_command_that_prints_is_shown_as_it_printed() -> None:
    text = one_section("explain", stored(text="read: 1 GB/s\n  | as it is\n"))
    assert text.endswith("```text\nread: 1 GB/s\n  | as it is\n```")


def test_machines_are_described_once_each() -> None:
    other = {**DESCRIPTION, "machine": {"cpu": "8 x Other"}}
    results = {"raw_io": stored({}), "engines": stored({}), "sweep": stored({}, description=other)}
    text = page_render.page("<!-- machines -->\n<!-- section sweep -->\n", results, "x")
    assert re.findall(r"^\| machine \d", text, re.MULTILINE) == ["| machine 1", "| machine 2"]
    assert "| cpu | 8 x Other |" in text
    assert "2026-01-02, machine 2." in text
    assert "| `DISK` | file system: ext4 on DISK from /dev/sda1; device: sda, NVMe, Example 9 |" in text


def test_the_template_has_every_section_once() -> None:
    template = page.TEMPLATE.read_text(encoding="utf-8")
    assert re.findall(r"^<!-- section (\w+) -->$", template, re.MULTILINE) == list(SECTIONS)
    assert template.count("\n<!-- machines -->\n") == 1


def test_the_template_has_no_measured_figures() -> None:
    template = page.TEMPLATE.read_text(encoding="utf-8")
    assert re.findall(r"\d+(?:\.\d+)? (?:GB/s|kIOPS|us|s)\b", template.replace("of 10^9 bytes", "")) == []


# The README

README = "intro\n\n<!-- benchmarks -->\nold\n<!-- /benchmarks -->\n\nrest\n"


def test_the_readme_gets_its_table() -> None:
    text = page_render.readme(README, {"raw_io": stored(raw_io_document())})
    assert text.startswith(
        "intro\n\n<!-- benchmarks -->\nAgainst fio at its best (io_uring, 4 MiB, depth 32, huge pages,"
    )
    assert text.endswith("|\n<!-- /benchmarks -->\n\nrest\n")
    lines = text.splitlines()
    begin = next(number for number, line in enumerate(lines) if line.startswith("|"))
    intro = " ".join(lines[3:begin])
    assert "DeepSpeed 0.19.8 with its defaults, 1 GiB, cold, medians of 7 interleaved rounds on 4 x Example" in intro
    assert "disk is ext4 on sda, NVMe, Example 9; memory is tmpfs), 2026-01-02:" in intro
    assert all(len(line) <= 120 for line in lines[:begin])
    assert lines[begin : begin + 8] == [
        "|  | disk, GB/s | of fio's best | x DeepSpeed | memory, GB/s | of fio's best | x DeepSpeed | CPU s/GiB |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
        "| read, page-locked tensor | 1.90 | 0.95 | 1.7 | 1.90 | 0.95 | 1.7 | 0.012 |",
        "| read, ordinary tensor that was in use | 1.80 | 0.90 | 2.5 | 1.80 | 0.90 | 2.5 | 0.012 |",
        "| write, page-locked tensor | 1.90 | 0.95 | 1.7 | 1.90 | 0.95 | 1.7 | 0.012 |",
        "| write, ordinary tensor that was in use | 1.80 | 0.90 | 2.5 | 1.80 | 0.90 | 2.5 | 0.012 |",
        "| read from the page cache, ordinary tensor that was in use | 7.12 | 0.99 of `os.preadv` |  | 7.12 "
        "| 0.99 of `os.preadv` |  | 0.012 |",
        "| 16,384 random 4 KiB reads in one call | 235 kIOPS | 1.10 |  | 235 kIOPS | 1.10 |  |  |",
    ]


def test_the_readme_gets_a_table_of_checkpoints() -> None:
    def table(group: str, title: str, rows: dict[str, float | None]) -> dict[str, Any]:
        found = [{"name": name, "spread": rate and {"median": rate}} for name, rate in rows.items()]
        return {"group": group, "title": title, "rows": found}

    tables = [
        table("save", "save, durably; large: 32 tensors, 1 GiB", {"fio best": 4, "ours": 3.5, "theirs": 0.5}),
        table("save", "save, durably; small: 20,000 tensors", {"fio best": 4, "ours": 1}),
        table("load", "load; large: 32 tensors, 1 GiB", {"ours": 1.875, "loader": 1.7, "missing": None}),
    ]
    document = {"size": GIB, "rounds": 5, "folders": {"DISK": {"tables": tables}}}
    loads = table("load", "load by a new process", {"ours": 1.5, "ours, otherwise": 1.4})
    fresh = {"folders": {"DISK": {"tables": [loads, table("locked", "a new process allocates", {"ours": 9})]}}}
    text = page_render.readme(README, {"checkpoint": stored(document), "fresh": stored(fresh)})
    assert "rounds on the same disk, 2026-01-02, GB/s:" in " ".join(text.split())
    assert text.splitlines()[-9:-2] == [
        "|  | save, durably | load, cold, warm memory | load, cold, fresh process |",
        "| --- | --- | --- | --- |",
        "| fio best | 4.00 | - | - |",
        "| ours | 3.50 | 1.88 | 1.50 |",
        "| theirs | 0.50 | - | - |",
        "| loader | - | 1.70 | - |",
        "<!-- /benchmarks -->",
    ]


def test_the_readme_says_what_fio_lacked_and_leaves_gaps_where_rows_are_missing() -> None:
    document = raw_io_document()
    best, _, ordinary = document["folders"]["DISK"]["tables"][0]["rows"]
    best["note"], ordinary["spread"] = "without huge pages (vm.nr_hugepages)", None
    del document["folders"]["MEMORY"]["tables"][2:]
    text = page_render.readme(README, {"raw_io": stored(document)})
    assert "Against fio at its best (without huge pages (vm.nr_hugepages)) and" in text
    assert "| read, ordinary tensor that was in use | - | - |  | 1.80 |" in text
    assert "| 16,384 random 4 KiB reads in one call | 235 kIOPS | 1.10 |  | - | - |  |  |" in text


@pytest.mark.parametrize("results", [{}, {"raw_io": stored(None, failure="exit status 1")}], ids=["none", "failed"])
def test_a_readme_without_results_says_so(results: dict[str, Any]) -> None:
    text = page_render.readme(README, results)
    assert text == "intro\n\n<!-- benchmarks -->\nNot measured yet.\n<!-- /benchmarks -->\n\nrest\n"


@pytest.mark.parametrize("text", ["no markers\n", "<!-- benchmarks -->\n", "<!-- /benchmarks -->\n"])
def test_a_readme_without_markers_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="it has no lines <!-- benchmarks -->"):
        page_render.readme(text, {})
