"""Makes docs/benchmarks.md and the README's table: measures section by section, keeps the results, writes the page."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))  # so that it runs from anywhere, uninstalled too

from benchmarks import command as shared
from benchmarks import page_machine, page_render
from benchmarks.page_scrub import ROOT, scrub_for
from benchmarks.page_sections import PLOT, SECTIONS, Command, Plan
from nvme_ops.arguments import positive
from nvme_ops.bench import stop
from nvme_ops.bench.scratch import scratch_folder

TEMPLATE = ROOT / "benchmarks" / "page_template.md"
_PATIENCE = 30.0  # seconds for a command to remove its files


def arguments(words: Sequence[str] | None) -> argparse.Namespace:
    """Exits with status 2 on wrong ones."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").partition("\n")[0],
        epilog="sections: " + ", ".join(SECTIONS),
    )
    parser.add_argument(
        "--place", action="append", default=[], metavar="NAME=DIR",
        help="a folder to measure in, and its name on the page; may be repeated",
    )  # fmt: skip
    parser.add_argument("--only", nargs="+", choices=SECTIONS, metavar="SECTION", help="measure only these")
    parser.add_argument("--render", action="store_true", help="measure nothing: write the page from the results")
    parser.add_argument("--size", type=shared.file_size, default="1G", help="of a file, a multiple of 4M (default 1G)")
    parser.add_argument("--rounds", type=positive, default=7, help="timed passes of every row (default 7)")
    parser.add_argument("--results", type=Path, default=ROOT / "docs" / "benchmarks", help="folder of the results")
    parser.add_argument("--page", type=Path, default=ROOT / "docs" / "benchmarks.md", help="the page")
    parser.add_argument("--readme", type=Path, default=ROOT / "README.md", help="the README with its markers")
    given = parser.parse_args(words)
    try:
        given.places = dict(_place(text) for text in given.place)
        page_render.readme(given.readme.read_text(encoding="utf-8"), {})
    except ValueError as error:
        parser.error(f"{given.readme}: {error}" if "has no lines" in str(error) else str(error))
    except OSError as error:
        parser.error(f"{given.readme}: {error.strerror}")
    if not given.render and not given.places:
        parser.error("--place NAME=DIR is needed, or --render")
    return given


def _place(text: str) -> tuple[str, str]:
    name, separator, folder = text.partition("=")
    if not separator or not re.fullmatch(r"[A-Za-z]\w*", name):
        raise ValueError(f"--place {text}: not NAME=DIR")
    if not os.path.isdir(folder):
        raise ValueError(f"--place {text}: no such folder")
    return name.upper(), os.path.abspath(folder)


def measure(section: str, plan: Plan, places: Mapping[str, str], results: Path) -> bool:
    """Runs the commands of a section and stores what they found; False when one failed.

    Where a section cannot be run, results of an earlier run stay.
    """
    stored = results / f"{section}.json"
    if reason := SECTIONS[section].why_not():
        print(f"{section}: not run: {reason}")
        if not stored.exists():
            _store(stored, {"section": section, "date": _today(), "skipped": reason, "description": None, "runs": []})
        return True
    with scratch_folder(tempfile.gettempdir(), 0) as scratch:
        scrub = scrub_for(places, scratch)
        description = scrub(page_machine.describe(places))
        runs = [scrub(_run(command, places, Path(scratch))) for command in SECTIONS[section].commands(plan)]
        for old in _read(stored).get("runs", []):
            if old["plot"]:
                (results / old["plot"]).unlink(missing_ok=True)
        for run in runs:
            if run["plot"]:
                shutil.copyfile(Path(scratch, run["plot"]), results / run["plot"])
    _store(
        stored,
        {"section": section, "date": _today(), "skipped": "", "description": description, "runs": runs},
    )
    return not any(run["failure"] for run in runs)


def _run(command: Command, places: Mapping[str, str], scratch: Path) -> dict[str, Any]:
    """What one command found, and how it failed."""
    document, plot = scratch / f"{command.name}.json", scratch / f"{command.name}.png"
    shown = [plot.name if word == PLOT else word for word in command.words]
    print(f"{' '.join(shown)}", end="", flush=True)
    words = [str(plot) if word == PLOT else places.get(word, word) for word in command.words]
    begin = time.monotonic()
    status, output, errors = _execute(words + (["--json", str(document)] if command.json else []), scratch)
    print(f"  ({time.monotonic() - begin:.0f} s)" + (f": exit status {status}" if status else ""), flush=True)
    said = [line.strip() for line in (errors or output).splitlines() if line.strip()]
    found, failure = None, f"exit status {status}{': ' + said[-1] if said else ''}" if status else ""
    if command.json:
        try:
            found = json.loads(document.read_text(encoding="utf-8"))
            found.pop("passes", None)  # long, and the rows have their figures
        except (OSError, ValueError) as error:
            failure = failure or f"it wrote no results ({error})"
    return {
        "command": " ".join(shown),
        "failure": failure,
        "document": found,
        "text": "" if command.json or status else output,
        "plot": plot.name if plot.exists() else "",
    }


def _execute(words: Sequence[str], scratch: Path) -> tuple[int, str, str]:
    """Status, output and errors. When this process is stopped, so is the command, which then removes its files."""
    programs = {"python": [sys.executable], "nvme-bench": [sys.executable, "-m", "nvme_ops.bench"]}
    command = [*programs.get(words[0], words[:1]), *words[1:]]
    with (scratch / "output").open("w+") as output, (scratch / "errors").open("w+") as errors:
        with subprocess.Popen(
            stop.tied(command, "TERM"), stdin=subprocess.DEVNULL, stdout=output, stderr=errors, cwd=ROOT,
            env=page_machine.environment(),
            start_new_session=True,  # it gets one signal from us, not also the terminal's while it cleans up
        ) as process:  # fmt: skip
            try:
                status = process.wait()
            except BaseException:
                process.terminate()
                try:
                    process.wait(_PATIENCE)
                except subprocess.TimeoutExpired:
                    process.kill()
                raise
        output.seek(0)
        errors.seek(0)
        return status, output.read(), errors.read()


def write(results: Path, page: Path, readme: Path) -> None:
    """The page and the README's table, from what is stored."""
    stored = {name: found for name in SECTIONS if (found := _read(results / f"{name}.json"))}
    template = TEMPLATE.read_text(encoding="utf-8")
    text = page_render.page(template, stored, os.path.relpath(results, page.parent))
    page.write_text(text, encoding="utf-8")
    readme.write_text(page_render.readme(readme.read_text(encoding="utf-8"), stored), encoding="utf-8")


def _read(file: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    return found


def _store(file: Path, found: Mapping[str, Any]) -> None:
    text = json.dumps(found, indent=1)
    lists = re.compile(r"\[\n\s*([-+\d.e,\s]+?)\n\s*\]")  # of numbers: on one line each
    text = lists.sub(lambda each: f"[{', '.join(each[1].replace(',', ' ').split())}]", text)
    file.write_text(text + "\n", encoding="utf-8")


def _today() -> str:
    return datetime.date.today().isoformat()


def main(words: Sequence[str] | None = None) -> int:
    """Status 0; 1 when a command failed; 2 for wrong arguments; 130 after Ctrl-C, which keeps finished sections."""
    given = arguments(words)
    stop.leave_on_signals()
    given.results.mkdir(parents=True, exist_ok=True)
    chosen = [] if given.render else [name for name in SECTIONS if not given.only or name in given.only]
    plan = Plan(list(given.places), _size_word(given.size), given.rounds)
    failed = []
    try:
        for section in chosen:
            if not measure(section, plan, given.places, given.results):
                failed.append(section)
            write(given.results, given.page, given.readme)
    except KeyboardInterrupt:
        print("\ninterrupted; the sections that were finished are kept", file=sys.stderr)
        return 130
    except OSError as error:
        print(f"page.py: {error}", file=sys.stderr)
        return 1
    write(given.results, given.page, given.readme)
    if failed:
        print(f"page.py: failed, and the page says so: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


def _size_word(size: int) -> str:
    """As an argument: ``1G``, ``512M``."""
    return f"{size >> 30}G" if size % (1 << 30) == 0 else f"{size >> 20}M"


if __name__ == "__main__":
    sys.exit(main())
