"""The page of results: what must not get into it, and sections that are measured, kept and shown."""

from __future__ import annotations

import getpass
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("tabulate")  # of the extra bench

from benchmarks import page
from benchmarks.page import SECTIONS, Section
from tests.benchmarks.test_page_render import DESCRIPTION, PAGE, README, row, table

ROOT = Path(__file__).parents[2]


# What must not get into it


def test_folders_are_replaced_by_their_names(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    scrub = page.scrub_for({"DISK": str(tmp_path / "link"), "DEEP": str(tmp_path / "real" / "deep")})
    value = {f"{tmp_path}/link": [f"{tmp_path}/real/data: gone", {"a": f"in '{tmp_path}/real/deep/x', twice"}]}
    assert scrub(value) == {"DISK": ["DISK/data: gone", {"a": "in 'DEEP/x', twice"}]}


def test_mount_points_of_folders_are_replaced() -> None:
    scrub = page.scrub_for({"MEMORY": "/dev/shm"})
    assert scrub("tmpfs on /dev/shm from tmpfs") == "tmpfs on MEMORY from tmpfs"


def test_checkout_environment_home_and_scratch_are_replaced(tmp_path: Path) -> None:
    scrub = page.scrub_for({}, str(tmp_path))
    words = [str(ROOT / "setup.py"), f"{tmp_path}/raw_io.json", os.path.expanduser("~/x"), "/home/" + "ann/x"]
    assert scrub(words) == ["CHECKOUT/setup.py", "raw_io.json", "~/x", "~/x"]


def test_hosts_and_users_are_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "blade.example.org")
    monkeypatch.setattr(getpass, "getuser", lambda: "ann")
    scrub = page.scrub_for({})
    words = "blade.example.org, on blade: by ann, planned; blade.nr_pages"
    assert scrub(words) == "HOST, on HOST: by USER, planned; blade.nr_pages"


def test_the_kernel_loses_what_its_builder_added(monkeypatch: pytest.MonkeyPatch) -> None:
    class Name:
        nodename, release = "blade", "6.1.2-made-by-ann"

    monkeypatch.setattr(os, "uname", Name)
    assert page.scrub_for({})("kernel 6.1.2-made-by-ann; x") == "kernel 6.1.2; x"


def test_other_words_and_numbers_stay_as_they_are() -> None:
    scrub = page.scrub_for({"DISK": "/"})
    value = {"root": True, "path": "/usr/lib/x", "n": 12345678, "f": 1.23456789, "none": None, "at": "ext4 on / from x"}
    assert scrub(value) == {**value, "f": 1.23457}


# Measuring


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
    return Run(tmp_path)


FOUND = json.dumps({"tables": [table("read", "", [row("found HERE", 1)])], "passes": [1]}).replace("HERE", "%s")
WRITE = f"json.write_text({FOUND!r} % sys.argv[1])\n"
DRAW = "pathlib.Path(sys.argv[3]).write_bytes(b'png')\n"


def test_a_section_is_measured_stored_and_shown(run: Run) -> None:
    run.program("raw_io", WRITE + DRAW)
    assert run("--only", "raw_io") == 0
    found = run.stored("raw_io")
    (measured,) = found["runs"]
    assert (found["description"], measured["failure"], measured["plot"]) == (DESCRIPTION, "", "raw_io_disk.png")
    assert "passes" not in measured["document"]
    assert measured["command"].endswith(" DISK --output raw_io_disk.png")
    assert (run.results / "raw_io_disk.png").read_bytes() == b"png"
    text = run.page.read_text()
    assert "| found DISK" in text  # the command got the folder
    assert "](results/raw_io_disk.png)" in text
    assert str(run.disk) not in text + json.dumps(found)


def test_lists_of_figures_are_stored_on_one_line(run: Run) -> None:
    document = {"found": [1, -2.5, 1e-07], "words": ["a", "[1, 2]"], "none": []}
    run.program("raw_io", f"json.write_text({json.dumps(json.dumps(document))})")
    assert run("--only", "raw_io") == 0
    assert run.stored("raw_io")["runs"][0]["document"] == document
    assert '"found": [1, -2.5, 1e-07],' in (run.results / "raw_io.json").read_text()


def test_other_sections_keep_their_results(run: Run) -> None:
    run.program("raw_io", WRITE)
    run.program("engines", WRITE)
    assert run("--only", "raw_io", "engines") == 0
    before = run.stored("raw_io") | {"date": "2001-02-03"}
    (run.results / "raw_io.json").write_text(json.dumps(before))
    assert run("--only", "engines") == 0
    assert run.stored("raw_io") == before
    assert "2001-02-03, machine 1." in run.page.read_text()


def test_a_command_that_fails_is_told_and_the_next_go_on(run: Run) -> None:
    run.program("raw_io", "sys.exit('no space in ' + sys.argv[1])")
    run.program("engines", WRITE)
    assert run("--only", "raw_io", "engines") == 1
    assert run.stored("raw_io")["runs"][0]["failure"] == "exit status 1: no space in DISK"
    text = run.page.read_text()
    assert "exit status 1: no space in DISK" in text
    assert "| found DISK" in text


def test_a_command_that_writes_nothing_has_failed(run: Run) -> None:
    run.program("raw_io", "pass")
    assert run("--only", "raw_io") == 1
    assert run.stored("raw_io")["runs"][0]["failure"].startswith("it wrote no results ([Errno 2]")


def test_what_a_command_prints_can_be_its_result(run: Run) -> None:
    run.program("explain", "print('looked at', sys.argv[1])", json=False)
    assert run("--only", "explain") == 0
    assert "```text\nlooked at DISK\n```" in run.page.read_text()


def test_pictures_of_an_earlier_run_go(run: Run) -> None:
    run.program("raw_io", WRITE + DRAW)
    assert run("--only", "raw_io") == 0
    run.program("raw_io", WRITE)
    assert run("--only", "raw_io") == 0
    assert [path.name for path in run.results.iterdir()] == ["raw_io.json"]


def test_a_section_that_cannot_run_here_keeps_what_there_is_or_says_why(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    run.program("gpu", WRITE, needs_gpu=True)
    assert run("--only", "gpu") == 0
    assert "Not run: there was no CUDA GPU" in run.page.read_text()
    measured = run.stored("gpu") | {"date": "2001-02-03", "skipped": ""}
    (run.results / "gpu.json").write_text(json.dumps(measured))
    assert run("--only", "gpu") == 0
    assert run.stored("gpu") == measured


def test_rendering_measures_nothing(run: Run) -> None:
    run.program("raw_io", WRITE)
    assert page.main(["--render", *run.words[2:]]) == 0
    assert not list(run.results.iterdir())
    assert "Not measured yet." in run.page.read_text()
    assert "Not measured yet." in run.readme.read_text()


@pytest.mark.parametrize("text", ["{", "[]", '{"runs": []}'])
def test_a_damaged_file_of_results_is_named_and_nothing_is_written(
    run: Run, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run.results.mkdir()
    (run.results / "raw_io.json").write_text(text)
    assert page.main(["--render", *run.words[2:]]) == 1
    assert re.match(r"page: .*raw_io\.json is damaged .*: remove it", capsys.readouterr().err)
    assert "\nold\n" in run.page.read_text()
    assert run.readme.read_text() == README


@pytest.mark.parametrize(
    ("number", "status"), [pytest.param(signal.SIGTERM, 143, marks=pytest.mark.slow), (signal.SIGINT, 130)]
)
def test_a_signal_lets_the_command_clean_up(tmp_path: Path, number: signal.Signals, status: int) -> None:
    begun, ended = tmp_path / "begun", tmp_path / "ended"
    command = f"trap 'touch {ended}; exit 1' TERM; touch {begun}; sleep 60 & wait"
    source = (
        "import sys\n"
        "from benchmarks import page\n"
        "page.describe = lambda places: {}\n"
        f"page.SECTIONS['raw_io'] = page.Section({shlex.join(['sh', '-c', command])!r})\n"
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
    with pytest.raises(SystemExit, match="2"):
        page.arguments([*Run(tmp_path).words[2:], *words])
    assert said in capsys.readouterr().err


def test_a_readme_or_page_without_markers_is_refused_before_anything_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Run(tmp_path)
    for file, name in ((run.readme, "benchmarks"), (run.page, "machines")):
        before = file.read_text()
        file.write_text("nothing\n")
        with pytest.raises(SystemExit, match="2"):
            page.arguments(["--render", *run.words[2:]])
        assert f"{file}: it has no lines <!-- {name} --> and <!-- /{name} -->" in capsys.readouterr().err
        file.write_text(before)


def test_the_machine_is_described_by_the_report(tmp_path: Path) -> None:
    found = page.describe({"DISK": str(tmp_path)})
    assert {"cpu", "memory", "kernel", "torch", "backends"} <= set(found["machine"])
    assert "memlock limit" in found["settings"]
    assert {"file system", "O_DIRECT", "device"} <= set(found["places"]["DISK"])


@pytest.mark.parametrize("name", SECTIONS)
def test_the_commands_of_a_section_name_places_and_files_of_their_own(name: str) -> None:
    commands = page.commands(name, ["DISK", "MEMORY"], "1G", 7)
    used = [word for words in commands.values() for word in words]
    assert commands
    assert name == "scaling" or {"DISK", "MEMORY"} <= set(used)
    pictures = [word for word in used if word.endswith(".png")]
    assert pictures in ([], [f"{own}.png" for own in commands])
    assert not any("{" in word for word in used)
