"""How the tests are run, whatever machine and shell they are started from: hooks of pytest, loaded by conftest.py.

Knows nothing of what is tested. Every run

- has Ctrl-C work, though the shell that started it ignores it (``nohup``, a job in the background);
- says at its end what was skipped: each reason once, with the number of tests;
- fails where it left something in the checkout;
- gives a test marked ``alone`` the machine for itself, when there are several processes (``-n``);
- begins with what takes longest;
- ends a test that hangs, wherever it hangs, and says where;
- fails a test in a thread, a callback or a destructor of which an exception was raised and nobody heard of it.
"""

from __future__ import annotations

import contextlib
import faulthandler
import fcntl
import os
import shutil
import signal
import subprocess
import tempfile
from collections import Counter
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

#: Python's and the test tools' own, and what a later run uses again.
CACHES = ("__pycache__/", ".pytest_cache/", ".hypothesis/", ".mypy_cache/", ".ruff_cache/", "tests/cpp/build/")

IN_CHECKOUT, LEFT = pytest.StashKey[set[str]](), pytest.StashKey[list[str]]()
SLOW = 1200  # seconds that a slow test may take
TURNS, STDERR = pytest.StashKey[Path](), pytest.StashKey[int]()


def is_worker(config: pytest.Config) -> bool:
    """Whether this process runs tests for another one, which collects the results."""
    return hasattr(config, "workerinput")


# Signals


def pytest_configure(config: pytest.Config) -> None:
    """A signal that the parent ignores, all ignore who come after; one with a handler, children have as by default."""
    for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP):  # ignored in background jobs, and by nohup
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    config.stash[STDERR] = os.dup(2)  # before pytest captures it
    for warning in ("PytestUnhandledThreadExceptionWarning", "PytestUnraisableExceptionWarning"):
        config.addinivalue_line("filterwarnings", f"error::pytest.{warning}")


# Time limits


@pytest.hookimpl(optionalhook=True)
def pytest_timeout_set_timer(item: pytest.Item, settings: Any) -> bool:
    """In place of pytest-timeout's own timers: tests use SIGALRM themselves, and with -n what a thread says gets lost.

    This one needs no lock of the interpreter's. It ends the process, which with -n is replaced: the run goes on.
    """
    faulthandler.dump_traceback_later(settings.timeout, exit=True, file=item.config.stash[STDERR])
    return True


@pytest.hookimpl(optionalhook=True)
def pytest_timeout_cancel_timer() -> bool:
    faulthandler.cancel_dump_traceback_later()
    return True


def pytest_enter_pdb() -> None:
    faulthandler.cancel_dump_traceback_later()


# The summary


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    skipped = Counter(reason_of(report) for report in terminalreporter.stats.get("skipped", []))
    if skipped:
        terminalreporter.section(f"{skipped.total()} skipped")
        for reason, count in sorted(skipped.items(), key=lambda item: (-item[1], item[0])):
            terminalreporter.write_line(f"{count:5}  {reason}")
    for line in config.stash.get(LEFT, []):
        terminalreporter.write_line(f"left in the checkout: {line}", red=True)


def reason_of(report: Any) -> str:
    """In one line, without the place."""
    words = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    return " ".join(words.removeprefix("Skipped: ").split()) or "no reason given"


# Time


@pytest.hookimpl(trylast=True)  # when it is known which are run
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Slow tests may take long on a machine that is busy: the time limit of all is for what hangs.

    Those with a limit of their own take longest, and begin first.
    """
    slow = [item for item in items if item.get_closest_marker("slow")]
    limited = [item for item in slow if item.get_closest_marker("timeout")]
    for item in slow:
        if item not in limited:
            item.add_marker(pytest.mark.timeout(SLOW))
    items.sort(key=lambda item: item not in limited)


# The checkout


def in_checkout(root: Path) -> set[str]:
    """What lies in the checkout and is not in git, ignored or not; nothing where git cannot tell."""
    command = ["git", "-C", str(root), "status", "--porcelain", "--untracked-files=all", "--ignored=matching"]
    try:
        output = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    except OSError:
        return set()
    lines = (line[3:] for line in output.splitlines() if line.startswith(("??", "!!")))
    return {line for line in lines if not line.endswith(CACHES)}


def pytest_sessionstart(session: pytest.Session) -> None:
    if not is_worker(session.config):
        session.config.stash[IN_CHECKOUT] = in_checkout(session.config.rootpath)


@pytest.hookimpl(tryfirst=True)  # before the summary
def pytest_sessionfinish(session: pytest.Session) -> None:
    config = session.config
    if is_worker(config) or IN_CHECKOUT not in config.stash:
        return
    before = config.stash[IN_CHECKOUT]
    config.stash[LEFT] = left = sorted(line for line in in_checkout(config.rootpath) if line not in before)
    if left and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


# Turns


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Called for every process that tests will run in."""
    if TURNS not in node.config.stash:
        node.config.stash[TURNS] = folder = Path(tempfile.mkdtemp(prefix="nvme_ops-tests-"))
        node.config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))
    node.workerinput["turns"] = str(node.config.stash[TURNS])


@pytest.hookimpl(wrapper=True, tryfirst=True)  # the wait counts towards no time limit
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    turns = getattr(item.config, "workerinput", {}).get("turns")
    with contextlib.nullcontext() if turns is None else turn(Path(turns), item.get_closest_marker("alone") is not None):
        return (yield)


@contextlib.contextmanager
def turn(folder: Path, alone: bool) -> Iterator[None]:
    """Runs beside others, or alone: who waits to be alone holds the door, so that nobody gets in before."""
    with open(folder / "door", "w") as door, open(folder / "room", "w") as room:
        fcntl.flock(door, fcntl.LOCK_EX)
        fcntl.flock(room, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        fcntl.flock(door, fcntl.LOCK_UN)
        try:
            yield
        finally:
            fcntl.flock(room, fcntl.LOCK_UN)  # closing it does not do where a forked child has it too
