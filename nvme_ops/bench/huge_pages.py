"""Reserves huge pages while fio runs, and restores their number afterwards, whatever happens to the run.

A separate process reserves them, and releases them when the pipe to it closes. That happens at the end of the block,
and when the run is killed. Only one such process at a time changes the kernel's counter.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from nvme_ops.text import MIB

COUNTER = "/proc/sys/vm/nr_hugepages"
SIZE = 160 * MIB  # fio's best: 32 blocks of 4 MiB, and room to align them
_KEEPER = """
import fcntl, os, signal, sys

for number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM):  # also sent to the run, which ends it
    signal.signal(number, signal.SIG_IGN)
counter = os.open(sys.argv[1], os.O_RDWR)

def there():
    return int(os.pread(counter, 64, 0).split()[0])

def change(pages):
    fcntl.flock(counter, fcntl.LOCK_EX)
    before = there()
    os.pwrite(counter, b"%d\\n" % max(0, before + pages), 0)
    changed = there() - before
    fcntl.flock(counter, fcntl.LOCK_UN)
    return changed

got = change(int(sys.argv[2]))
print(got, flush=True)
sys.stdin.read()
change(-got)
"""


@contextmanager
def huge_pages(wanted: bool = True) -> Iterator[None]:
    """Reserves ``SIZE`` bytes of them for the block, or as many as there is memory for; none without permission.

    Only while fio runs, so that nothing else in the run takes them.
    """
    if not wanted or not os.access(COUNTER, os.W_OK):  # not root: those already reserved may suffice
        yield
        return
    command = [sys.executable, "-I", "-S", "-c", _KEEPER, COUNTER, str(SIZE // page_size())]
    pipe, null = subprocess.PIPE, subprocess.DEVNULL
    # in a session of its own: a signal to all processes of the run must not end this one
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=null, start_new_session=True) as keeper:
        if keeper.stdout is not None:
            keeper.stdout.readline()
        yield


def page_size() -> int:
    """Returns the bytes of a huge page."""
    with open("/proc/meminfo", encoding="ascii") as file:
        return next((int(line.split()[1]) * 1024 for line in file if line.startswith("Hugepagesize")), 2 * MIB)
