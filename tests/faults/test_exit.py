"""What is never closed: a program that ends does so within seconds, and says what it did not complete."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from nvme_ops.data import AsyncLog, SampleWriter
from nvme_ops.storage import Session, TensorStore
from tests.conftest import run_python

WAYS = {
    "end": "work()",
    "exception": "work()\n    raise SystemExit('of the program')",
    "exit in a thread": "run(lambda: (work(), sys.exit(1))).join()",
    "daemon thread": "run(lambda: (work(), time.sleep(600)), daemon=True)\n    wait()",
    "forked child": "os.waitpid(os.fork() or (work(), sys.exit(0)), 0)",
    "multiprocessing, fork": "child('fork')",
    "multiprocessing, spawn": "child('spawn')",
}
PROGRAM = """
import multiprocessing, os, sys, threading, time
import torch, nvme_ops
from nvme_ops.data import AsyncLog, SampleWriter
from nvme_ops.storage import Session, TensorStore

folder, kept = sys.argv[1], []

def work():
    {work}
    kept.append(locals())
    open(folder + "/worked", "w").close()

def run(function, daemon=False):
    thread = threading.Thread(target=function, daemon=daemon)
    thread.start()
    return thread

def wait():
    while not os.path.exists(folder + "/worked"):
        time.sleep(0.01)

def child(method):
    process = multiprocessing.get_context(method).Process(target=work)
    process.start()
    process.join()

if __name__ == "__main__":
    {way}
"""


def ended(folder: Path, way: str, work: str) -> str:
    """Runs a program, and returns what it said on stderr. One that hangs fails the test."""
    path = folder / "program.py"
    path.write_text(PROGRAM.format(work=work, way=WAYS[way]))
    (folder / "work").mkdir()
    result = run_python(
        f"import runpy; runpy.run_path({str(path)!r}, run_name='__main__')", folder / "work", check=False
    )
    return result.stderr


@pytest.mark.parametrize("way", WAYS)
def test_a_sample_writer(folder: Path, way: str) -> None:
    said = ended(folder, way, "writer = SampleWriter(folder); writer.extend(bytes(1 << 20) for _ in range(40))")
    assert "a SampleWriter was not closed when the program ended: its 40 samples are not kept" in said
    assert [path.name for path in (folder / "work").iterdir()] == ["worked"]


@pytest.mark.parametrize("way", WAYS)
def test_a_file_and_a_log_are_written(folder: Path, way: str) -> None:
    work = "file = nvme_ops.open(folder + '/file', 'w'); file.write(b'abc')\n    "
    work += "log = AsyncLog(folder + '/log', window=99); log.append('def')"
    assert ended(folder, way, work) == ("of the program\n" if way == "exception" else "")
    assert (folder / "work" / "file").read_bytes() == b"abc"
    assert list(AsyncLog.read(folder / "work" / "log")) == [b"def"]


@pytest.mark.parametrize("way", WAYS)
def test_a_save_that_fails(folder: Path, way: str) -> None:
    said = ended(folder, way, "future = nvme_ops.save_async({'a': torch.zeros(9)}, folder + '/no/such.safetensors')")
    assert "/no/such.safetensors') failed, and nobody asked its future" in said


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_a_session(folder: Path, way: str, keep: bool) -> None:
    """Is removed, or left for the next one with what was on its way."""
    work = f"session = Session(folder, name='s', reuse={keep}); store = TensorStore(session); "
    work += "store.put('a', torch.arange(1 << 22))"
    assert ended(folder, way, work) == ("of the program\n" if way == "exception" else "")
    (folder / "work" / "worked").unlink()
    assert bool(list((folder / "work").iterdir())) == keep
    if keep:
        with Session(folder / "work", name="s", reuse=True) as session, TensorStore(session) as store:
            found = torch.zeros(1 << 22, dtype=torch.int64)
            store.get("a", found).result()
            assert torch.equal(found, torch.arange(1 << 22))


def test_a_writer_that_a_daemon_thread_has(folder: Path) -> None:
    work = "writer = SampleWriter(folder); writer.add(b'abc'); writer._lock.acquire()"
    assert ended(folder, "daemon thread", work).count("its 1 samples are not kept") == 1
    with SampleWriter(folder / "work"):
        pass
    assert not list((folder / "work").glob(".samples-*")), "the next one removes it"
