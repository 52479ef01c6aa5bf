"""The page of results: what must not get into it; sections that are measured, kept and shown; the README's table."""

from __future__ import annotations

import getpass
import json
import os
import re
import socket
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("tabulate")  # of the extra bench

from benchmarks import page
from benchmarks.page import SECTIONS, Section

ROOT = Path(__file__).parents[2]
DESCRIPTION = {
    "machine": {"cpu": "4 x Example", "memory": "8 GiB", "kernel": "6.1.2"},
    "settings": {"memlock limit": "8 MiB"},
    "places": {"DISK": {"file system": "ext4 on DISK from /dev/sda1 (rw,relatime)", "device": "sda, NVMe, Example 9"}},
}
SUMMARY = "\n<!-- summary -->\n<!-- /summary -->\n"
README = "intro\n\n<!-- benchmarks -->\nold\n<!-- /benchmarks -->\n\nrest\n"
PAGE = "intro\n\n<!-- section {} -->\nold\n<!-- /section {} -->\n\n<!-- machines -->\n<!-- /machines -->\n"


def test_folders_hosts_users_and_kernels_are_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Name:
        nodename, release = "blade", "6.1.2-made-by-ann"

    monkeypatch.setattr(socket, "gethostname", lambda: "blade.example.org")
    monkeypatch.setattr(getpass, "getuser", lambda: "ann")
    monkeypatch.setattr(os, "uname", Name)
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    places = {"DISK": str(tmp_path / "link"), "DEEP": str(tmp_path / "real" / "deep"), "MEMORY": "/dev/shm"}
    scrub = page.scrub_for(places, str(tmp_path / "gone"))
    for value, expected in {
        f"{tmp_path}/link": "DISK",
        f"{tmp_path}/real/data: gone": "DISK/data: gone",
        f"in '{tmp_path}/real/deep/x', twice": "in 'DEEP/x', twice",
        "tmpfs on /dev/shm from tmpfs": "tmpfs on MEMORY from tmpfs",  # a mount point
        str(ROOT / "setup.py"): "CHECKOUT/setup.py",
        f"{tmp_path}/gone/raw_io.json": "raw_io.json",
        os.path.expanduser("~/x"): "~/x",
        "/home/" + "ann/x": "~/x",
        "blade.example.org, on blade: by ann, planned; blade.nr": "HOST, on HOST: by USER, planned; blade.nr",
        "kernel 6.1.2-made-by-ann; x": "kernel 6.1.2; x",
    }.items():
        assert scrub({value: [value]}) == {expected: [expected]}
    other = {"root": True, "path": "/usr/lib/x", "n": 12345678, "f": 1.23456789, "none": None, "at": "ext4 on / from x"}
    assert page.scrub_for({"DISK": "/"})(other) == {**other, "f": 1.23457}


class Run:
    """A run of page.py in a folder of its own, with other sections."""

    def __init__(self, folder: Path) -> None:
        self.results, self.page, self.readme = folder / "results", folder / "page.md", folder / "README.md"
        self.readme.write_text(README)
        parts = [PAGE.replace("{}", name) for name in SECTIONS]
        self.page.write_text(parts[0] + "".join(part.partition("<!-- machines")[0] for part in parts[1:]))
        self.disk = folder / "a disk"
        self.disk.mkdir()

    @property
    def words(self) -> list[str]:
        files = ["--results", self.results, "--page", self.page, "--readme", self.readme]
        return ["--place", f"disk={self.disk}", *map(str, files)]

    def __call__(self, *words: str) -> int:
        return page.main([*self.words, *words])

    def program(self, section: str, text: str, **more: bool) -> None:
        """Gives a section a Python program as its command; ``json`` is the file to write, if it is asked for one."""
        file = self.results.parent / f"{section}-{len(text)}.py"
        file.write_text("import sys, pathlib; json = pathlib.Path(sys.argv[-1])\n" + text)
        page.SECTIONS[section] = Section(f"python {file} {{place}} {{plot}}", **more)

    def stored(self, section: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.results / f"{section}.json").read_text())
        return found


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setattr(page, "describe", lambda places: DESCRIPTION)
    monkeypatch.setattr(page, "SECTIONS", dict.fromkeys(SECTIONS, Section("true")))
    monkeypatch.setattr("nvme_ops.measure.stop.leave_on_signals", lambda: None)
    return Run(tmp_path)


SPREAD = {"median": 1, "min": 1, "max": 1}
ROW: dict[str, Any] = {"name": "found HERE", "note": "", "spread": SPREAD, "columns": {}}
ROW |= dict.fromkeys(("against_reference", "against_peer"))
TABLE = {"group": "read", "title": "title", "unit": "GB/s", "reference": "", "peers": "DeepSpeed", "rows": [ROW]}
FOUND = json.dumps({"tables": [TABLE], "passes": [1]}).replace("HERE", "%s")
WRITE = f"json.write_text({FOUND!r} % sys.argv[1])\n"
DRAW = "pathlib.Path(sys.argv[3]).write_bytes(b'png')\n"


def test_a_section_is_measured_stored_and_shown_and_the_others_stay(run: Run) -> None:
    run.program("raw_io", WRITE + DRAW)
    run.program("explain", "print('looked at', sys.argv[1])", json=False)
    assert run("--only", "raw_io", "explain") == 0
    found = run.stored("raw_io")
    (measured,) = found["runs"]
    assert (found["description"], measured["failure"], measured["plot"]) == (DESCRIPTION, "", "raw_io_disk.png")
    assert "passes" not in measured["document"]
    assert measured["command"].endswith(" DISK --output raw_io_disk.png")
    assert (run.results / "raw_io_disk.png").read_bytes() == b"png"
    text = run.page.read_text()
    assert "| found DISK" in text  # the command got the folder
    assert "](results/raw_io_disk.png)" in text
    assert "```text\nlooked at DISK\n```" in text
    assert str(run.disk) not in text + json.dumps(found)
    before = run.stored("explain") | {"date": "2001-02-03"}
    (run.results / "explain.json").write_text(json.dumps(before))
    run.program("raw_io", f"json.write_text({json.dumps({'tables': [], 'x': [1, -2.5, 1e-07]})!r})")
    assert run("--only", "raw_io") == 0
    assert run.stored("explain") == before
    assert "2001-02-03, machine 1." in run.page.read_text()
    assert sorted(path.name for path in run.results.iterdir()) == ["explain.json", "raw_io.json"], "old pictures go"
    assert '"x": [1, -2.5, 1e-07]' in (run.results / "raw_io.json").read_text()


def test_a_command_that_fails_is_told_and_the_next_go_on(run: Run) -> None:
    run.program("raw_io", "sys.exit('no space in ' + sys.argv[1])")
    run.program("sweep", "pass")
    run.program("engines", WRITE)
    assert run("--only", "raw_io", "engines", "sweep") == 1
    assert run.stored("sweep")["runs"][0]["failure"].startswith("it wrote no results ([Errno 2]")
    text = run.page.read_text()
    assert "**This run failed: exit status 1: no space in DISK**" in text
    assert "| found DISK" in text


@pytest.mark.parametrize("text", ["", "{", json.dumps({"date": "", "description": None, "runs": [{}]})])
def test_rendering_measures_nothing_and_names_a_damaged_file(
    run: Run, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run.program("raw_io", WRITE)
    run.results.mkdir()
    if text:
        (run.results / "raw_io.json").write_text(text)
    assert page.main(["--render", *run.words[2:]]) == (2 if text else 0)
    said = r"page: (.*raw_io\.json is damaged .*: remove it|results cannot be shown .*: measure)"
    assert bool(re.match(said, capsys.readouterr().err)) == bool(text)
    for file in (run.page, run.readme):
        assert ("\nold\n" in file.read_text()) == bool(text)
        assert ("Not measured yet." in file.read_text()) != bool(text)


def stored(document: Any = None, **more: Any) -> dict[str, Any]:
    run = {"command": "some --command", "failure": "", "document": document, "text": "", "plot": ""}
    return {"date": "2026-01-02", "description": DESCRIPTION, "runs": [run], **more}


def results() -> dict[str, Any]:
    """A copy of what is stored beside the page."""
    return {name: found for name in SECTIONS if (found := page._read(ROOT / "docs" / "benchmarks" / f"{name}.json"))}


def emptied(text: str) -> str:
    """The text without what stands between its marks."""
    return re.sub(r"(<!-- ((?:section )?\w+) -->\n).*?(<!-- /\2 -->)", r"\1\3", text, flags=re.DOTALL)


DOCS = ROOT / "docs"
FIGURE = re.compile(r"\d+(?:\.\d+)? (?:GB/s|kIOPS|us|ms|s|samples/s|tokens/s)(?![\w/])|times as fast")


def test_pages_and_readme_are_what_the_stored_results_say_and_no_figure_is_by_hand() -> None:
    text = (DOCS / "benchmarks.md").read_text(encoding="utf-8")
    assert page.render_page(emptied(text), results(), "benchmarks") == text
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert page.render_readme(emptied(readme), results()) == readme
    assert [found for found in FIGURE.findall(emptied(readme)) if found != "times as fast"] == []
    assert FIGURE.findall(emptied(text).replace("of 10^9 bytes", "")) == []


SECTION = re.compile(r"^<!-- section (\w+) -->$", re.MULTILINE)
OTHERS = [
    file for file in sorted(DOCS.glob("*.md")) if file.name != "benchmarks.md" and SECTION.search(file.read_text())
]


@pytest.mark.parametrize("file", OTHERS, ids=lambda file: file.name)
def test_figures_of_other_pages_are_what_the_stored_results_say(file: Path) -> None:
    text = file.read_text(encoding="utf-8")
    assert page.render_other(emptied(text), results(), "benchmarks") == text
    assert FIGURE.findall(emptied(text).partition("\n## Figures\n")[2].partition("\n## ")[0]) == []


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
    pictures = {run["plot"] for found in results().values() for run in found["runs"]} - {""}
    assert {file.name for file in (DOCS / "benchmarks").glob("*.png")} == pictures


def test_the_readme_compares_with_what_is_used_today_and_gives_the_date() -> None:
    found = results()
    made = [line.split("|") for line in page.render_readme(README, found).splitlines() if line.startswith("| ")]
    (save,) = [cells for cells in made if "checkpoint" in cells[1]]
    rows = {
        row["name"]: row for row in found["checkpoint"]["runs"][0]["document"]["folders"]["DISK"]["tables"][0]["rows"]
    }
    ours, theirs = (rows[name] for name in ("nvme_ops .safetensors", "torch.save, torch.load"))
    assert save[2].split() == [f"{ours['spread']['median']:.3g}", "GB/s"]
    assert save[3].split()[0] == f"{theirs['spread']['median']:.3g}"
    assert 2 < float(save[4]) < 3
    assert save[5].strip() == found["checkpoint"]["date"]
    theirs["spread"] = None
    assert (
        len(page.render_readme(README, found).splitlines())
        == len(page.render_readme(README, results()).splitlines()) - 1
    )


def test_a_program_with_several_sizes_has_one_table_for_a_group() -> None:
    def table(size: str, *medians: float) -> dict[str, Any]:
        rows = [{**ROW, "name": name, "spread": {**SPREAD, "median": median},
                 "against_reference": {**SPREAD, "median": median / medians[0]}}
                for name, median in zip(("ours", "theirs"), medians, strict=False)]  # fmt: skip
        return {**TABLE, "title": f"reads of {size}, cold", "reference": "ours", "rows": rows}

    one, other = table("4 KiB", 2.0, 1.0), table("1 MiB", 3.0)
    ((title, rows),) = page.by_size({"sizes": [4096, 1 << 20]}, [one, other])
    assert title.startswith("reads of each size, GB/s; in brackets: how many times as fast ours is")
    assert rows == [{"": "ours", "4 KiB": "2", "1 MiB": "3"}, {"": "theirs", "4 KiB": "1 (2)"}]
    assert [title for title, _ in page.by_size({}, [one, other])] == ["reads of 4 KiB, cold", "reads of 1 MiB, cold"]


def test_long_commands_are_broken_and_long_tables_wait_below_their_picture() -> None:
    found = stored({"tables": [TABLE]})
    found["runs"][0] |= {"command": "nvme-bench" + " --flag value" * 12, "plot": "a.png"}
    marks = "<!-- section {0} -->\n<!-- /section {0} -->\n"
    text = page.render_other(marks.format("sweep"), {"sweep": found}, "pictures")
    command = [line for line in text.splitlines() if line.startswith("    ")]
    assert max(map(len, command)) < 120
    assert " ".join(line.strip(" \\") for line in command) == found["runs"][0]["command"]
    parts = ["](pictures/a.png)", "<details markdown", "| found HERE", "</details>"]
    assert [text.count(part) for part in parts] == [1] * 4
    assert sorted(parts, key=text.index) == parts
    text = page.render_other(marks.format("fresh"), {"fresh": found}, "pictures")
    assert "<details" not in text
    assert text.index("| found HERE") < text.index("](pictures/a.png)")


def test_what_a_machine_lacks_and_rows_without_figures_are_shown() -> None:
    found = results()["raw_io"]
    document = found["runs"][0]["document"]
    document |= {"about": {"gpu": "Example", "cuda": "13"}}
    there, other = document["folders"].values()
    best, missing, *_ = rows = there["tables"][0]["rows"]
    there["notes"] = ["ours / theirs: reached"]
    best["note"] = "without huge pages (vm.nr_hugepages)"
    missing |= {"name": "a | b", "spread": None, "note": "not installed:\npip install it"}
    next(each for each in rows if each["name"] == "nvme_ops, pageable")["spread"] = None
    del other["tables"][2:]
    text = page.render_page(PAGE.replace("{}", "raw_io"), {"raw_io": found}, "pictures")
    assert re.search(r"^\| a \\\| b +\| - +\| .*\| not installed: pip install it +\|$", text, re.MULTILINE)
    assert "- ours / theirs: reached" in text
    assert "gpu Example; cuda 13" in text
    made = page.render_page(PAGE.replace("{}", "raw_io") + SUMMARY, {"raw_io": found})
    made = made.partition("<!-- summary -->")[2]
    assert "Against fio at its best (without huge pages" in made
    cells = [[cell.strip() for cell in line.split("|")[2:-1]] for line in made.splitlines() if line.startswith("| ")]
    assert (cells[2][:3], cells[-1][3:6]) == (["-"] * 3, ["-"] * 3)
