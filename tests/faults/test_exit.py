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
    "daemon thread": "run(lambda: (work(), time.sleep(600)))\n    wait()",
    "multiprocessing": "child()",
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

def run(function):
    threading.Thread(target=function, daemon=True).start()

def wait():
    while not os.path.exists(folder + "/worked"):
        time.sleep(0.01)

def child():
    process = multiprocessing.get_context("fork").Process(target=work)
    process.start()
    process.join()

if __name__ == "__main__":
    {way}
"""


def ended(folder: Path, way: str, work: str) -> str:
    """Runs a program, and returns what it said on stderr. One that hangs fails the test."""
    (folder / "work").mkdir()
    return run_python(PROGRAM.format(work=work, way=WAYS[way]), folder / "work", check=False).stderr


WORK = """
    writer = SampleWriter(folder + "/samples"); writer.extend(bytes(1 << 20) for _ in range(40))
    future = nvme_ops.save_async({"a": torch.zeros(9)}, folder + "/no/such.safetensors")
    file = nvme_ops.open(folder + "/file", "w"); file.write(b"abc")
    log = AsyncLog(folder + "/log", window=99); log.append("def")
    session = Session(folder + "/session", name="s"); store = TensorStore(session)
    kept_session = Session(folder + "/kept", name="s", reuse=True); kept_store = TensorStore(kept_session)
    store.put("a", torch.arange(1 << 22)); kept_store.put("a", torch.arange(1 << 22))
"""


@pytest.mark.parametrize("way", WAYS)
def test_what_is_open_is_completed_left_for_the_next_one_or_told(folder: Path, way: str) -> None:
    said, place = ended(folder, way, WORK), folder / "work"
    assert ("of the program" in said) == (way == "exception")
    assert "a SampleWriter was not closed when the program ended: its 40 samples are not kept" in said
    assert "/no/such.safetensors') failed, and its exception was never retrieved" in said
    assert said.count("nvme_ops: ") == 2, said
    assert not [*(place / "samples").iterdir(), *(place / "session").iterdir()]
    assert (place / "file").read_bytes() == b"abc"
    assert list(AsyncLog.read(place / "log")) == [b"def"]
    with Session(place / "kept", name="s", reuse=True) as session, TensorStore(session) as store:
        loaded = torch.zeros(1 << 22, dtype=torch.int64)
        store.get("a", loaded).result()
        assert torch.equal(loaded, torch.arange(1 << 22))


def test_a_writer_that_a_daemon_thread_has(folder: Path) -> None:
    work = "writer = SampleWriter(folder); writer.add(b'abc'); writer._lock.acquire()"
    assert ended(folder, "daemon thread", work).count("its 1 samples are not kept") == 1
    with SampleWriter(folder / "work"):
        pass
    assert not list((folder / "work").glob(".samples-*")), "the next one removes it"
