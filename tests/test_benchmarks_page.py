"""The page of results: what must not get into it, and sections that are measured, kept and shown."""

from __future__ import annotations

import getpass
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from test_benchmarks_page_render import DESCRIPTION, README

from benchmarks import page, page_machine, page_scrub, page_sections
from benchmarks.page_sections import SECTIONS, Command, Plan, Section

ROOT = Path(__file__).parent.parent


# What must not get into it


def test_folders_are_replaced_by_their_names(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    scrub = page_scrub.scrub_for({"DISK": str(tmp_path / "link"), "DEEP": str(tmp_path / "real" / "deep")})
    value = {f"{tmp_path}/link": [f"{tmp_path}/real/data: gone", {"a": f"in '{tmp_path}/real/deep/x', twice"}]}
    assert scrub(value) == {"DISK": ["DISK/data: gone", {"a": "in 'DEEP/x', twice"}]}


def test_mount_points_of_folders_are_replaced() -> None:
    scrub = page_scrub.scrub_for({"MEMORY": "/dev/shm"})
    assert scrub("tmpfs on /dev/shm from tmpfs") == "tmpfs on MEMORY from tmpfs"


def test_checkout_environment_home_and_scratch_are_replaced(tmp_path: Path) -> None:
    scrub = page_scrub.scrub_for({}, str(tmp_path))
    words = [str(ROOT / "setup.py"), f"{tmp_path}/raw_io.json", os.path.expanduser("~/x"), "/home/" + "ann/x"]
    assert scrub(words) == ["CHECKOUT/setup.py", "raw_io.json", "~/x", "~/x"]


def test_hosts_and_users_are_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "blade.example.org")
    monkeypatch.setattr(getpass, "getuser", lambda: "ann")
    scrub = page_scrub.scrub_for({})
    words = "blade.example.org, on blade: by ann, planned; blade.nr_pages"
    assert scrub(words) == "HOST, on HOST: by USER, planned; blade.nr_pages"


def test_the_kernel_loses_what_its_builder_added(monkeypatch: pytest.MonkeyPatch) -> None:
    class Name:
        nodename, release = "blade", "6.1.2-made-by-ann"

    monkeypatch.setattr(os, "uname", Name)
    assert page_scrub.scrub_for({})("kernel 6.1.2-made-by-ann; x") == "kernel 6.1.2; x"


def test_other_words_and_numbers_stay_as_they_are() -> None:
    scrub = page_scrub.scrub_for({"DISK": "/"})
    value = {"root": True, "path": "/usr/lib/x", "n": 12345678, "f": 1.23456789, "none": None, "at": "ext4 on / from x"}
    assert scrub(value) == {**value, "f": 1.23457}


# Measuring


@pytest.fixture
def described(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_machine, "describe", lambda places: DESCRIPTION)


class Run:
    """A run of page.py in a folder of its own, with other sections."""

    def __init__(self, folder: Path) -> None:
        self.results, self.page, self.readme = folder / "results", folder / "page.md", folder / "README.md"
        self.readme.write_text(README)
        self.disk = folder / "a disk"
        self.disk.mkdir()

    @property
    def words(self) -> list[str]:
        files = ["--results", self.results, "--page", self.page, "--readme", self.readme]
        return ["--place", f"disk={self.disk}", *map(str, files)]

    def __call__(self, *words: str) -> int:
        return page.main([*self.words, *words])

    def stored(self, section: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.results / f"{section}.json").read_text())
        return found


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, described: None) -> Run:
    for name in SECTIONS:
        monkeypatch.setitem(SECTIONS, name, Section(lambda plan: []))
    return Run(tmp_path)


def program(text: str) -> Section:
    """A section whose command is a Python program; in it ``json`` is the file to write."""
    head = "import sys, pathlib; json = pathlib.Path(sys.argv[sys.argv.index('--json') + 1]); "
    words = ["python", "-c", head + text, "DISK", page_sections.PLOT]
    return Section(lambda plan: [Command("x", words)], lambda document: [f"found {document['found']}", ""])


FOUND = 'json.write_text(\'{"found": "%s", "passes": [1]}\' % sys.argv[1]); '


def test_a_section_is_measured_stored_and_shown(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SECTIONS, "raw_io", program(FOUND + "pathlib.Path(sys.argv[2]).write_bytes(b'png')"))
    assert run("--only", "raw_io") == 0
    found = run.stored("raw_io")
    (measured,) = found["runs"]
    assert (found["description"], measured["failure"], measured["plot"]) == (DESCRIPTION, "", "x.png")
    assert measured["document"] == {"found": "DISK"}  # the command got the folder
    assert measured["command"].endswith(" DISK x.png")
    assert (run.results / "x.png").read_bytes() == b"png"
    text = run.page.read_text()
    assert "\nfound DISK\n" in text
    assert "](results/x.png)" in text
    assert str(run.disk) not in text + json.dumps(found)


def test_lists_of_figures_are_stored_on_one_line(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    document = {"found": [1, -2.5, 1e-07], "words": ["a", "[1, 2]"], "none": []}
    monkeypatch.setitem(SECTIONS, "raw_io", program(f"json.write_text({json.dumps(json.dumps(document))})"))
    assert run("--only", "raw_io") == 0
    assert run.stored("raw_io")["runs"][0]["document"] == document
    assert '"found": [1, -2.5, 1e-07],' in (run.results / "raw_io.json").read_text()


def test_other_sections_keep_their_results(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SECTIONS, "raw_io", program(FOUND))
    monkeypatch.setitem(SECTIONS, "engines", program(FOUND))
    assert run() == 0
    before = run.stored("raw_io") | {"date": "2001-02-03"}
    (run.results / "raw_io.json").write_text(json.dumps(before))
    assert run("--only", "engines") == 0
    assert run.stored("raw_io") == before
    assert "2001-02-03, machine 1." in run.page.read_text()


def test_a_command_that_fails_is_told_and_the_next_go_on(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SECTIONS, "raw_io", program("sys.exit('no space in ' + sys.argv[1])"))
    monkeypatch.setitem(SECTIONS, "engines", program(FOUND))
    assert run("--only", "raw_io", "engines") == 1
    assert run.stored("raw_io")["runs"][0]["failure"] == "exit status 1: no space in DISK"
    text = run.page.read_text()
    assert "**This run failed: exit status 1: no space in DISK**" in text
    assert "\nfound DISK\n" in text


def test_a_command_that_writes_nothing_has_failed(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SECTIONS, "raw_io", program("pass"))
    assert run("--only", "raw_io") == 1
    assert run.stored("raw_io")["runs"][0]["failure"].startswith("it wrote no results ([Errno 2]")


def test_what_a_command_prints_can_be_its_result(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["python", "-c", "import sys; print('looked at', sys.argv[1])", "DISK"]
    monkeypatch.setitem(SECTIONS, "explain", Section(lambda plan: [Command("x", words, json=False)]))
    assert run("--only", "explain") == 0
    assert "```text\nlooked at DISK\n```" in run.page.read_text()


def test_pictures_of_an_earlier_run_go(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = program(FOUND + "pathlib.Path(sys.argv[2]).touch()")
    monkeypatch.setitem(SECTIONS, "raw_io", drawn)
    assert run("--only", "raw_io") == 0
    monkeypatch.setitem(SECTIONS, "raw_io", program(FOUND))
    assert run("--only", "raw_io") == 0
    assert [path.name for path in run.results.iterdir()] == ["raw_io.json"]


def test_a_section_that_cannot_run_here_keeps_what_there_is(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SECTIONS, "gpu", program(FOUND))
    assert run("--only", "gpu") == 0
    before = run.stored("gpu")
    monkeypatch.setitem(SECTIONS, "gpu", Section(lambda plan: [], why_not=lambda: "no GPU"))
    assert run("--only", "gpu") == 0
    assert run.stored("gpu") == before


def test_a_section_that_never_could_run_says_why(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SECTIONS, "gpu", Section(lambda plan: [], why_not=lambda: "no GPU"))
    assert run("--only", "gpu") == 0
    assert "Not run: no GPU." in run.page.read_text()


def test_rendering_measures_nothing(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SECTIONS, "raw_io", program(FOUND))
    assert page.main(["--render", *run.words[2:]]) == 0
    assert not list(run.results.iterdir())
    assert "Not measured yet." in run.page.read_text()
    assert "Not measured yet." in run.readme.read_text()


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_lets_the_command_clean_up(tmp_path: Path, number: signal.Signals, status: int) -> None:
    begun, ended = tmp_path / "begun", tmp_path / "ended"
    command = f"trap 'touch {ended}; exit 1' TERM; touch {begun}; sleep 60 & wait"
    source = (
        "import sys\n"
        "from benchmarks import page, page_machine\n"
        "from benchmarks.page_sections import SECTIONS, Command, Section\n"
        "page_machine.describe = lambda places: {}\n"
        f"SECTIONS['raw_io'] = Section(lambda plan: [Command('x', ['sh', '-c', {command!r}])])\n"
        "sys.exit(page.main(sys.argv[1:]))\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", source, *Run(tmp_path).words, "--only", "raw_io"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stderr=subprocess.PIPE,
        text=True,
    )
    while not begun.exists():
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.02)
    process.send_signal(number)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == status, errors
    assert ended.exists()
    assert not (tmp_path / "results" / "raw_io.json").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "--place NAME=DIR is needed, or --render"),
        (["--place", "/mnt"], "not NAME=DIR"),
        (["--place", "a b=/"], "not NAME=DIR"),
        (["--place", "disk=/no/such"], "no such folder"),
        (["--only", "all"], "invalid choice"),
        (["--size", "5M"], "not a multiple of 4 MiB"),
        (["--rounds", "0"], "not a number of at least 1"),
        (["--render", "--readme", "/no/such"], "/no/such: No such file"),
    ],
)
def test_wrong_arguments_are_refused(
    words: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    readme = [] if "--readme" in words else ["--readme", str(Run(tmp_path).readme)]
    with pytest.raises(SystemExit, match="2"):
        page.arguments([*words, *readme])
    assert said in capsys.readouterr().err


def test_a_readme_without_markers_is_refused_before_anything_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "README.md").write_text("nothing\n")
    with pytest.raises(SystemExit, match="2"):
        page.arguments(["--render", "--readme", str(tmp_path / "README.md")])
    assert "README.md: it has no lines <!-- benchmarks --> and <!-- /benchmarks -->" in capsys.readouterr().err


def test_the_machine_is_described_by_the_report(tmp_path: Path) -> None:
    found = page_machine.describe({"DISK": str(tmp_path)})
    assert {"cpu", "memory", "kernel", "torch", "backends"} <= set(found["machine"])
    assert "memlock limit" in found["settings"]
    assert {"file system", "O_DIRECT", "device"} <= set(found["places"]["DISK"])


@pytest.mark.parametrize("name", SECTIONS)
def test_the_commands_of_a_section_name_places_and_files_of_their_own(name: str) -> None:
    commands = SECTIONS[name].commands(Plan(["DISK", "MEMORY"], "1G", 7))
    assert len({command.name for command in commands}) == len(commands) >= 1
    if name != "scaling":
        used = {word for command in commands for word in command.words}
        assert {"DISK", "MEMORY"} <= used
