"""Starts a module as ranks, as torchrun does, without the seconds in which each process would import torch."""

from __future__ import annotations

import tempfile
from pathlib import Path

from tests import prepared

PROGRAM = """
import atexit, os, runpy, signal, socket, sys
import torch
import nvme_ops.dcp, nvme_ops.offload  # once for all
ranks, logs, module, *words = sys.argv[1:]
with socket.create_server(("127.0.0.1", 0)) as free:
    port = str(free.getsockname()[1])
children = []
for rank in map(str, range(int(ranks))):
    children.append(os.fork())
    if not children[-1]:
        signal.alarm(270)  # one that hangs ends too
        os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=ranks, LOCAL_WORLD_SIZE=ranks)
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
        for number, name in ((1, "stdout"), (2, "stderr")):
            os.dup2(os.open(f"{logs}/{rank}.{name}", os.O_CREAT | os.O_WRONLY), number)
        torch.set_num_threads(1)
        sys.argv[1:] = words
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        atexit._run_exitfuncs()
        sys.stdout.flush()
        os._exit(0)  # a thread of gloo that still releases a tensor ends Python's end by SIGABRT (pytorch issue 190489)
while children:
    child, status = os.wait()
    children.remove(child)
    if status:  # for whom the others would wait
        for each in children:
            os.kill(each, signal.SIGKILL)
        sys.exit(f"a rank has ended with {os.waitstatus_to_exitcode(status)}")
"""


def run_ranks(ranks: int, module: str, *words: object, **environment: str) -> str:
    """Returns what the ranks print, one rank after the other; fails with all of it unless every one succeeds.

    Each has files of its own to print to: in a pipe that they share, the lines of two can mix.
    """
    with tempfile.TemporaryDirectory() as logs:
        command = ("-c", PROGRAM, str(ranks), logs, module, *map(str, words))
        done = prepared.run(*command, environment=environment, timeout=280)
        said = {path.name: path.read_text() for path in sorted(Path(logs).iterdir())}
        everything = [f"{name}: {text[-5000:]}" for name, text in said.items()]
        assert done.returncode == 0, "\n".join([*everything, done.stderr])
        return "".join(text for name, text in said.items() if name.endswith("stdout"))
