"""Programs in processes of their own that need not import torch first: forked from one process that has.

Such a process begins and ends as any other does; but it is there in milliseconds instead of two seconds. Of variables
that are read when Python starts or torch is imported it minds PYTHONWARNINGS alone: a program that is about others, or
about imports, needs ``subprocess``.
"""

from __future__ import annotations

import atexit
import builtins
import concurrent.futures
import contextlib
import functools
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import warnings
from pathlib import Path

ROOT = Path(__file__).parents[1]
MAX_MESSAGE = 200_000  # bytes of a message: a program and an environment


def run(
    *command: str,
    environment: dict[str, str] | None = None,
    folder: Path | None = None,
    timeout: float = 240,
    imported: tuple[str, ...] = (),
) -> subprocess.CompletedProcess[str]:
    """Runs what ``python`` with these arguments would: ``-c`` and a program, ``-m`` and a module, or a script.

    Args:
        imported: modules besides torch that take long to import and need not be imported again, if they can be.

    Raises:
        TimeoutExpired: when it took longer; it has been killed.
    """
    server = _server(os.getpid(), imported)
    variables = {**os.environ, **(environment or {})}
    message = json.dumps([command, variables, str(folder or Path.cwd())]).encode()
    (output, its_output), (errors, its_errors) = os.pipe(), os.pipe()
    socket.send_fds(server, [message], [its_output, its_errors])
    os.close(its_output)
    os.close(its_errors)
    process = int(server.recv(MAX_MESSAGE))
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        said = [pool.submit(_read, descriptor) for descriptor in (output, errors)]
        late = bool(concurrent.futures.wait(said, timeout).not_done)
        if late:
            with contextlib.suppress(ProcessLookupError):  # it has just ended
                os.kill(process, signal.SIGKILL)
    status = os.waitstatus_to_exitcode(int(server.recv(MAX_MESSAGE)))
    done = subprocess.CompletedProcess([sys.executable, *command], status, *(future.result() for future in said))
    if late:
        raise subprocess.TimeoutExpired(done.args, timeout, done.stdout, done.stderr)
    return done


def _read(pipe: int) -> str:
    with open(pipe, encoding="utf-8") as file:
        return file.read()


@functools.cache
def _server(process: int, imported: tuple[str, ...]) -> socket.socket:
    """The connection of ``process`` to its server of this kind; a forked child has one of its own."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    server = subprocess.Popen(
        [sys.executable, __file__, str(theirs.fileno()), *imported],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        pass_fds=[theirs.fileno()],
        stdin=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C is for the tests
    )
    theirs.close()

    def end() -> None:
        if os.getpid() == process:
            ours.close()
            server.wait()

    atexit.register(end)
    return ours


def _serve(connection: socket.socket) -> tuple[list[str], dict[str, str], str] | None:
    """Forks a child for each message, and returns what to run in the child; None at the end."""
    while True:
        message, descriptors, *_ = socket.recv_fds(connection, MAX_MESSAGE, 2)
        if not message:
            return None
        child = os.fork()
        if child == 0:
            connection.close()
            for number, descriptor in enumerate(descriptors, 1):
                os.dup2(descriptor, number)
                os.close(descriptor)
            command, variables, folder = json.loads(message)
            return command, variables, folder
        for descriptor in descriptors:
            os.close(descriptor)
        connection.send(str(child).encode())
        connection.send(str(os.waitpid(child, 0)[1]).encode())


def _become(command: list[str], variables: dict[str, str], folder: str) -> None:
    """Does what a new process with these arguments would."""
    os.environ.clear()
    os.environ.update(variables)
    os.chdir(folder)
    for words in filter(None, variables.get("PYTHONWARNINGS", "").split(",")):  # as Python does when it starts
        action, _, category, *_ = [*words.split(":"), "", ""]
        warnings.simplefilter(action, getattr(builtins, category or "Warning"))  # type: ignore[arg-type]
    first, *rest = command
    sys.argv = ["-c", *rest[1:]] if first == "-c" else rest if first == "-m" else command
    sys.path[0] = "" if first == "-c" else folder if first == "-m" else os.path.dirname(first)
    run_module = runpy.run_module
    names = vars(sys.modules["__main__"])  # which outlives all that is done at exit
    for name in names.keys() - {"__name__", "__builtins__"}:
        del names[name]
    names["__spec__"] = None
    if first == "-m":
        run_module(rest[0], run_name="__main__", alter_sys=True)
    elif first == "-c":
        exec(compile(rest[0], "<string>", "exec"), names)
    else:
        names["__file__"] = first
        with open(first, encoding="utf-8") as file:
            code = compile(file.read(), first, "exec")
        exec(code, names)


if __name__ == "__main__":
    import gc
    import importlib

    import torch._dynamo  # noqa: F401  # the first step of an optimizer imports it, for as long as torch itself

    for name in sys.argv[2:]:
        with contextlib.suppress(Exception):  # transformers has some of its own
            importlib.import_module(name)
    gc.freeze()  # what a child inherits, it need not look through
    if (asked := _serve(socket.socket(fileno=int(sys.argv[1])))) is not None:
        _become(*asked)
