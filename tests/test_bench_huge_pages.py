"""Huge pages that are reserved for fio: as many as before afterwards, also where the process that did it was killed.

A file stands for the kernel's counter; ``test_two_at_once_give_their_huge_pages_back`` takes the real one.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from conftest import NOBODY, REPOSITORY, give_up_root, in_child, open_to_all

from nvme_ops.bench import huge_pages as pages
from nvme_ops.bench.huge_pages import huge_pages

WANTED = pages.SIZE // pages.page_size()


class Counter:
    """A file with a number, as /proc/sys/vm/nr_hugepages, with memory for so many."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.file, self.records, self.most = folder / "nr_hugepages", folder / "records", 1 << 30
        self.there = 0
        inner = pages._set
        monkeypatch.setattr(pages, "COUNTER", str(self.file))
        monkeypatch.setattr(pages, "RECORDS", str(self.records))
        monkeypatch.setattr(pages, "_set", lambda counter, count: inner(counter, min(self.most, count)))

    @property
    def there(self) -> int:
        return int(self.file.read_text().split()[0])

    @there.setter
    def there(self, count: int) -> None:
        self.file.write_text(f"{count}\n")


@pytest.fixture
def counter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Counter:
    return Counter(tmp_path, monkeypatch)


HOLDER = """
    import sys
    from nvme_ops.bench import huge_pages as pages
    pages.COUNTER, pages.RECORDS = sys.argv[1:3]
    inner = pages._set
    def kill_before(counter, count):
        import os, signal
        os.kill(os.getpid(), signal.SIGKILL)
    def kill_after(counter, count):
        inner(counter, count)
        kill_before(counter, count)
    when = sys.argv[3]
    if when.endswith("reserved"):
        pages._set = {"before": kill_before, "after": kill_after}[when.split()[0]]
    with pages.huge_pages():
        print("reserved", flush=True)
        if when == "alive":
            sys.stdin.readline()
        pages._set = kill_before if when.startswith("before") else kill_after
"""


@pytest.fixture
def hold(counter: Counter) -> Iterator[Callable[[str], subprocess.Popen[str]]]:
    """A process that holds huge pages until a line is sent to it, or is killed when the counter is changed."""
    started = []

    def start(when: str = "alive") -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(HOLDER), str(counter.file), str(counter.records), when],
            env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        assert process.stdout is not None
        process.stdout.readline()
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


@pytest.mark.parametrize(("there", "most"), [(0, 1000), (7, 1000), (7, 20)], ids=["none", "some", "not all to be had"])
def test_they_are_as_many_as_before(counter: Counter, there: int, most: int) -> None:
    counter.there, counter.most = there, most
    with huge_pages():
        assert counter.there == min(most, there + WANTED)
    assert counter.there == there
    assert not counter.records.exists()


def test_a_process_that_is_killed_gets_its_own_given_back_by_the_next(
    counter: Counter, hold: Callable[..., subprocess.Popen[str]]
) -> None:
    counter.there = 7
    alive, killed = hold(), hold()
    assert counter.there == 7 + 2 * WANTED
    pages.settle()
    assert counter.there == 7 + 2 * WANTED, "both are alive"
    os.kill(killed.pid, signal.SIGKILL)
    killed.wait()
    with huge_pages():
        assert counter.there == 7 + 2 * WANTED
    assert counter.there == 7 + WANTED
    alive.kill()
    alive.wait()
    pages.settle()
    assert counter.there == 7
    assert not counter.records.exists()


@pytest.mark.parametrize("when", ["before reserved", "after reserved", "before given back", "after given back"])
def test_a_kill_at_any_moment_is_settled_exactly(
    counter: Counter, hold: Callable[..., subprocess.Popen[str]], when: str
) -> None:
    counter.there = 7
    assert hold(when).wait() == -signal.SIGKILL
    assert len(list(counter.records.iterdir())) == 1
    pages.settle()
    assert counter.there == 7
    assert not counter.records.exists()


def test_those_of_an_earlier_start_of_the_machine_are_gone_already(
    counter: Counter, hold: Callable[..., subprocess.Popen[str]]
) -> None:
    killed = hold()
    killed.kill()
    killed.wait()
    (record,) = counter.records.iterdir()
    record.write_text(json.dumps({**json.loads(record.read_text()), "boot": "another one"}))
    counter.there = 500
    pages.settle()
    assert counter.there == 500
    assert not counter.records.exists()


def test_files_of_others_stay(counter: Counter) -> None:
    counter.records.mkdir(mode=0o700)
    names = ["huge-pages", "huge-pages-0123456789abcde", "huge-pages-0123456789abcdef.json"]
    for name in names:
        (counter.records / name).write_text("{}")
    with huge_pages():
        pass
    assert sorted(entry.name for entry in counter.records.iterdir()) == names


@pytest.mark.parametrize("how", ["writable", "a link"])
def test_records_that_others_could_write_are_not_trusted(counter: Counter, tmp_path: Path, how: str) -> None:
    if how == "a link":
        (tmp_path / "elsewhere").mkdir(mode=0o700)
        counter.records.symlink_to(tmp_path / "elsewhere")
    else:
        counter.records.mkdir()
        counter.records.chmod(0o777)
    with huge_pages():
        assert counter.there == 0, "what could not be given back for certain is not reserved"


def test_without_the_right_to_reserve_them_the_block_runs_all_the_same(counter: Counter, tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("another user is needed, which needs root")
    open_to_all(tmp_path)
    counter.file.chmod(0o644)

    def body() -> None:
        give_up_root()
        assert os.geteuid() == NOBODY
        pages.settle()
        with huge_pages():
            assert counter.there == 0

    in_child(body)
