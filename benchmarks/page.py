"""Makes docs/benchmarks.md and the README's table: measures section by section, keeps the results, writes the page."""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))  # so that it runs from anywhere, uninstalled too

import torch

from benchmarks import command as shared
from benchmarks import page_machine, page_render
from benchmarks.command import ROOT
from nvme_ops.arguments import positive
from nvme_ops.measuring import stop
from nvme_ops.measuring.scratch import scratch_folder

_PATIENCE = 30.0  # seconds for a command to remove its files


@dataclass(frozen=True)
class Section:
    """Its command, once for all ``{paths}`` or for each ``{place}`` and ``{direction}``. The results are its JSON."""

    command: str
    json: bool = True  # it takes --json FILE; else what it prints is its result
    needs_gpu: bool = False


_EACH, _EFFORT = "nvme-bench --folder {place} {direction}", "--io_size {size} --loops {rounds} {plot}"
# A new one is one line here, and two on the page, <!-- section NAME --> and its end; page_results.md shows the results.
SECTIONS = {
    "raw_io": Section("python benchmarks/raw_io.py {paths} --size {size} --rounds {rounds} {plot}"),
    "engines": Section(f"{_EACH} --engine all {_EFFORT}"),
    "overhead": Section("python benchmarks/bench_overhead.py {paths} --size {size} --rounds {rounds}"),
    "checkpoint": Section("python benchmarks/checkpoint.py {paths} --size {size} --rounds {rounds} {plot}"),
    "fresh": Section("python benchmarks/fresh_process.py {paths} --size {size} --rounds {rounds} {plot}"),
    "sweep": Section(f"{_EACH} --sweep block_size=64K,256K,1M,4M queue_depth=1,8,32,128 {_EFFORT}"),
    "scaling": Section("python benchmarks/scaling.py --size {size} --rounds {rounds} {plot}"),
    "tuning": Section("python benchmarks/tuning.py {paths}"),
    "explain": Section("nvme-bench explain {place}", json=False),
    "gpu": Section("python benchmarks/gpu_io.py {paths} --size {size} --rounds {rounds} {plot}", needs_gpu=True),
}


def commands(name: str, places: Sequence[str], size: str, rounds: int) -> dict[str, list[str]]:
    """Those of a section by a name of their own, as the page shows them: places by name, pictures without folder."""
    text, made = SECTIONS[name].command, {}
    for place in places if "{place}" in text else [""]:
        for direction in ("read", "write") if "{direction}" in text else ("",):
            own = "_".join(filter(None, (name, direction, place.lower())))
            words = text.format(
                place=place, direction="--read" if direction == "read" else "", size=size, rounds=rounds,
                paths=" ".join(f"--path {each}" for each in places), plot=f"--plot {own}.png",
            )  # fmt: skip
            made[own] = shlex.split(words)
    return made


def arguments(words: Sequence[str] | None) -> argparse.Namespace:
    """Exits with status 2 on wrong ones."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").partition("\n")[0], epilog="sections: " + ", ".join(SECTIONS)
    )
    parser.add_argument(
        "--place", type=_place, action="append", default=[], metavar="NAME=DIR",
        help="a folder to measure in, and its name on the page; may be repeated",
    )  # fmt: skip
    parser.add_argument("--only", nargs="+", choices=SECTIONS, metavar="SECTION", help="measure only these")
    parser.add_argument("--render", action="store_true", help="measure nothing: write the page from the results")
    parser.add_argument("--size", type=shared.file_size, default="1G", help="of a file, a multiple of 4M (default 1G)")
    parser.add_argument("--rounds", type=positive, default=7, help="timed passes of every row (default 7)")
    parser.add_argument("--results", type=Path, default=ROOT / "docs" / "benchmarks", help="folder of the results")
    parser.add_argument("--page", type=Path, default=ROOT / "docs" / "benchmarks.md", help="the page with its markers")
    parser.add_argument("--readme", type=Path, default=ROOT / "README.md", help="the README with its markers")
    given = parser.parse_args(words)
    given.places = dict(given.place)
    for file, render in ((given.readme, page_render.readme), (given.page, partial(page_render.page, pictures=""))):
        try:
            render(file.read_text(encoding="utf-8"), {})
        except ValueError as error:
            parser.error(f"{file}: {error}")
        except OSError as error:
            parser.error(f"{file}: {error.strerror}")
    if not given.render and not given.places:
        parser.error("--place NAME=DIR is needed, or --render")
    return given


def _place(text: str) -> tuple[str, str]:
    name, separator, folder = text.partition("=")
    if not separator or not re.fullmatch(r"[A-Za-z]\w*", name):
        raise argparse.ArgumentTypeError(f"{text}: not NAME=DIR")
    if not os.path.isdir(folder):
        raise argparse.ArgumentTypeError(f"{text}: no such folder")
    return name.upper(), os.path.abspath(folder)


def measure(name: str, given: argparse.Namespace) -> bool:
    """Runs the commands of a section and stores what they found; False when one failed.

    Where a section cannot be run, results of an earlier run stay.
    """
    stored, results = given.results / f"{name}.json", given.results
    found = {"section": name, "date": datetime.date.today().isoformat(), "skipped": ""}
    if SECTIONS[name].needs_gpu and not torch.cuda.is_available():
        reason = "there was no CUDA GPU where this page was made"
        print(f"{name}: not run: {reason}")
        if not stored.exists():
            _store(stored, {**found, "skipped": reason, "description": None, "runs": []})
        return True
    size = f"{given.size >> 30}G" if given.size % (1 << 30) == 0 else f"{given.size >> 20}M"
    with scratch_folder(tempfile.gettempdir(), 0) as folder:
        scrub, scratch = page_machine.scrub_for(given.places, folder), Path(folder)
        description = scrub(page_machine.describe(given.places))
        runs = [
            scrub(_run(own, words, SECTIONS[name].json, given.places, scratch))
            for own, words in commands(name, list(given.places), size, given.rounds).items()
        ]
        for old in _read(stored).get("runs", []):
            if old["plot"]:
                (results / old["plot"]).unlink(missing_ok=True)
        for run in runs:
            if run["plot"]:
                shutil.copyfile(scratch / run["plot"], results / run["plot"])
    _store(stored, {**found, "description": description, "runs": runs})
    return not any(run["failure"] for run in runs)


def _run(name: str, words: Sequence[str], has_json: bool, places: Mapping[str, str], scratch: Path) -> dict[str, Any]:
    """What one command found, and how it failed."""
    document, plot, shown = scratch / f"{name}.json", scratch / f"{name}.png", " ".join(words)
    print(shown, end="", flush=True)
    real = [{**places, plot.name: str(plot)}.get(word, word) for word in words]
    begin = time.monotonic()
    status, output, errors = _execute(real + (["--json", str(document)] if has_json else []))
    print(f"  ({time.monotonic() - begin:.0f} s)" + (f": exit status {status}" if status else ""), flush=True)
    said = [line.strip() for line in (errors or output).splitlines() if line.strip()]
    found, failure = None, f"exit status {status}{': ' + said[-1] if said else ''}" if status else ""
    if has_json:
        try:
            found = json.loads(document.read_text(encoding="utf-8"))
            found.pop("passes", None)  # long, and the rows have their figures
        except (OSError, ValueError) as error:
            failure = failure or f"it wrote no results ({error})"
    text, picture = "" if has_json or status else output, plot.name if plot.exists() else ""
    return {"command": shown, "failure": failure, "document": found, "text": text, "plot": picture}


def _execute(words: Sequence[str]) -> tuple[int, str, str]:
    """Status, output and errors. When this process is stopped, so is the command, which then removes its files."""
    programs = {"python": [sys.executable], "nvme-bench": [sys.executable, "-m", "nvme_ops.bench"]}
    with subprocess.Popen(
        stop.tied([*programs.get(words[0], words[:1]), *words[1:]], "TERM"), cwd=ROOT, env=shared.environment(),
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True,  # it gets one signal from us, not also the terminal's while it cleans up
    ) as process:  # fmt: skip
        try:
            output, errors = process.communicate()
        except BaseException:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_PATIENCE)
            process.kill()
            raise
    return process.returncode, output, errors


def write(given: argparse.Namespace) -> None:
    """The page and the README's table, from what is stored. Raises OSError."""
    stored = {name: found for name in SECTIONS if (found := _read(given.results / f"{name}.json"))}
    pictures = os.path.relpath(given.results, given.page.parent)
    text = page_render.page(given.page.read_text(encoding="utf-8"), stored, pictures)
    given.page.write_text(text, encoding="utf-8")
    given.readme.write_text(page_render.readme(given.readme.read_text(encoding="utf-8"), stored), encoding="utf-8")


def _read(file: Path) -> dict[str, Any]:
    """The results of a section, empty where there are none. Raises OSError for a file that holds something else."""
    try:
        found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        missing = {"date", "skipped", "description", "runs"} - set(found)
    except FileNotFoundError:
        return {}
    except (ValueError, TypeError) as error:
        raise OSError(f"{file} is damaged ({error}): remove it, and measure the section again") from error
    if missing:
        raise OSError(f"{file} is damaged (no {min(missing)}): remove it, and measure the section again")
    return found


def _store(file: Path, found: Mapping[str, Any]) -> None:
    text = json.dumps(found, indent=1)
    lists = re.compile(r"\[\n\s*([-+\d.e,\s]+?)\n\s*\]")  # of numbers: on one line each
    text = lists.sub(lambda each: f"[{', '.join(each[1].replace(',', ' ').split())}]", text)
    file.write_text(text + "\n", encoding="utf-8")


def main(words: Sequence[str] | None = None) -> int:
    """Status 0; 1 when a command failed; 2 for wrong arguments; 130 after Ctrl-C, which keeps finished sections."""
    given = arguments(words)
    stop.leave_on_signals()
    failed = []
    try:
        given.results.mkdir(parents=True, exist_ok=True)
        write(given)
        for name in SECTIONS:
            if not given.render and (not given.only or name in given.only):
                failed += [] if measure(name, given) else [name]
                write(given)
    except KeyboardInterrupt:
        print("\ninterrupted; the sections that were finished are kept", file=sys.stderr)
        return 130
    except OSError as error:
        print(f"page.py: {error}", file=sys.stderr)
        return 1
    if failed:
        print(f"page.py: failed, and the page says so: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
