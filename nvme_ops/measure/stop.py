"""How a command ends on a signal: by an ordinary exit, so that it removes what it made, and ends its children."""

from __future__ import annotations

import functools
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import connection
from types import FrameType

from nvme_ops.base.command_line import Main, command, say
from nvme_ops.base.lifetime import in_this_process
from nvme_ops.measure.files import NotUsable

#: A lost terminal, a request to end, Ctrl-\.
SIGNALS = (signal.SIGHUP, signal.SIGTERM, signal.SIGQUIT)


def measuring(name: str) -> Callable[[Main], Main]:
    """Decorates the ``main`` of a command that measures: however it ends, its files are removed.

    Adds to ``arguments.command``: SIGNALS end it by an ordinary exit, NotUsable with a line and status 2.
    """

    def decorated(main: Main) -> Main:
        @command(name)
        @functools.wraps(main)
        def run(argv: Sequence[str] | None = None) -> int:
            leave_on_signals()
            try:
                return main(sys.argv[1:] if argv is None else argv)
            except NotUsable as reason:
                say(f"{name}: {reason}")
                return 2

        return run

    return decorated


def leave_on_signals() -> None:
    """Turns SIGNALS into an ordinary exit, status 128 + number, which removes files on the way.

    Signals ignored when the program starts stay ignored: ``nohup`` relies on it. After the first signal others are
    ignored: a lost terminal sends several, and another one must not interrupt the cleanup. A forked child has nothing
    to clean up and dies of the signal.
    """
    is_ours = in_this_process()

    def leave(number: int, _: FrameType | None) -> None:
        if not is_ours():
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        for ignored in SIGNALS:
            signal.signal(ignored, signal.SIG_IGN)
        sys.exit(128 + number)

    for number in SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, leave)


@contextmanager
def deferred() -> Iterator[None]:
    """Defers SIGNALS and SIGINT to the end of the block. Only the main thread gets any."""
    arrived: list[int] = []
    before = {}

    def remember(number: int, _: FrameType | None) -> None:
        arrived.append(number)

    try:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, *SIGNALS):
                before[number] = signal.getsignal(number)
                signal.signal(number, remember)
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        for late in arrived:
            signal.raise_signal(late)


def serve_parent() -> None:
    """Makes this process of multiprocessing end with its parent, and ignore Ctrl-C, which the parent handles.

    It gets a process group of its own, which includes what it starts: ``kill_group`` ends them together.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.setpgid(0, 0)
    parent = multiprocessing.parent_process()
    if parent is None:
        return

    def end_with(sentinel: int) -> None:
        connection.wait([sentinel])
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=end_with, args=[parent.sentinel], name="nvme_ops-parent", daemon=True).start()


def kill_group(process: multiprocessing.process.BaseProcess) -> None:
    """Kills a process that has called ``serve_parent`` and all that it started; before that call, only itself."""
    if process.pid is None:
        return
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        process.kill()
