"""Huge pages that are reserved for fio: as many as before afterwards, also where the process that did it was killed.

A file stands for the kernel's counter; ``test_two_at_once_give_their_huge_pages_back`` takes the real one.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from nvme_ops.measure import fio as pages
from nvme_ops.measure.fio import huge_pages
from tests.conftest import NOBODY, REPOSITORY, give_up_root, in_child, open_to_all

WANTED = pages.SIZE // pages.page_size()


class Counter:
    """A file with a number, as /proc/sys/vm/nr_hugepages."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.there = 0

    @property
    def there(self) -> int:
        return int(self.file.read_text().split()[0])

    @there.setter
    def there(self, count: int) -> None:
        self.file.write_text(f"{count}\n")

    def becomes(self, count: int) -> bool:
        """Within ten seconds: a process that keeps them outlives the one that it keeps them for."""
        end = time.monotonic() + 10
        while self.there != count and time.monotonic() < end:
            time.sleep(0.01)
        return self.there == count


@pytest.fixture
def counter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Counter:
    monkeypatch.setattr(pages, "COUNTER", str(tmp_path / "nr_hugepages"))
    return Counter(tmp_path / "nr_hugepages")


HOLDER = """
    import sys
    from nvme_ops.measure import fio as pages
    pages.COUNTER = sys.argv[1]
    with pages.huge_pages():
        print("reserved", flush=True)
        sys.stdin.readline()
"""


@pytest.fixture
def hold(counter: Counter) -> Iterator[Callable[[], subprocess.Popen[str]]]:
    """A process that holds huge pages until a line is sent to it, in a session of its own."""
    started = []

    def start() -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(HOLDER), str(counter.file)],
            env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        started.append(process)
        assert process.stdout is not None
        process.stdout.readline()
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("there", [0, 7])
def test_they_are_as_many_as_before(counter: Counter, there: int) -> None:
    counter.there = there
    with huge_pages():
        assert counter.there == there + WANTED
    assert counter.there == there


def test_an_error_in_the_block_gives_them_back_too(counter: Counter) -> None:
    with pytest.raises(RuntimeError), huge_pages():
        raise RuntimeError
    assert counter.there == 0


def test_what_others_reserve_meanwhile_stays(counter: Counter) -> None:
    with huge_pages():
        counter.there += 3
    assert counter.there == 3


def test_what_others_take_back_meanwhile_is_not_taken_twice(counter: Counter) -> None:
    with huge_pages():
        counter.there = 5
    assert counter.there == 0


def test_no_more_is_given_back_than_was_to_be_had(counter: Counter, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel without memory for all of them: it sets its counter to less than was written."""
    most = "os.pwrite(counter, b'%d\\n' % min(20, int(os.pread(counter, 64, 0))), 0)\n    changed ="
    monkeypatch.setattr(pages, "_KEEPER", pages._KEEPER.replace("changed =", most))
    counter.there = 17
    with huge_pages():
        assert counter.there == 20
    assert counter.there == 17


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_those_of_a_run_that_is_ended_are_given_back_and_no_others(
    counter: Counter, hold: Callable[[], subprocess.Popen[str]], number: signal.Signals
) -> None:
    counter.there = 7
    alive, ended = hold(), hold()
    assert counter.there == 7 + 2 * WANTED
    os.killpg(ended.pid, number)  # a terminal tells all processes of a session
    ended.wait()
    assert counter.becomes(7 + WANTED)
    alive.communicate("\n")
    assert counter.there == 7


def test_without_the_right_to_reserve_them_the_block_runs_all_the_same(counter: Counter, tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("another user is needed, which needs root")
    open_to_all(tmp_path)
    counter.file.chmod(0o644)

    def body() -> None:
        give_up_root()
        assert os.geteuid() == NOBODY
        with huge_pages():
            assert counter.there == 0

    in_child(body)
