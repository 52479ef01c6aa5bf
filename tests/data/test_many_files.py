"""Stores of more files than a process may have open, and files that come and go."""

from __future__ import annotations

import os
import pickle
import resource
import threading
from pathlib import Path

import pytest
import torch

from nvme_ops.data import Loader, SampleStore, SampleWriter
from tests.conftest import in_child

FILES = 300

USUAL = 40  # descriptors of a process that has just begun to test


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("many")
    write(folder)
    return folder


def write(folder: Path, first: int = 0, overwrite: bool = False) -> None:
    with SampleWriter(folder, torch.int64, shard_bytes=8, overwrite=overwrite) as writer:
        writer.extend(range(first, first + FILES))


@pytest.mark.parametrize("limit", [100, 256])
def test_few_descriptors_are_enough(many: Path, limit: int) -> None:
    def body() -> None:
        most = limit + max(0, len(os.listdir("/proc/self/fd")) - USUAL)  # earlier tests of this process may have some
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        with SampleStore(many) as store:
            assert [int(each) for each in store.read(range(FILES))] == list(range(FILES))
            for batch in (7, 100, FILES):
                found = torch.cat(list(Loader(store, batch, shuffle=True, decode=None)))
                assert torch.equal(found.sort().values, torch.arange(FILES))
            assert len(list(Loader(store, 64, shuffle=True, decode=int))) == -(-FILES // 64)

    in_child(body)


def test_relative_paths_are_those_of_the_beginning(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(folder)
    monkeypatch.chdir(folder.parent)
    store = SampleStore(folder.name)
    kept = pickle.dumps(store)
    monkeypatch.chdir("/")
    assert len(store.read(range(FILES))) == FILES
    assert len(pickle.loads(kept).read(range(FILES))) == FILES


def test_opening_while_others_replace_it(folder: Path) -> None:
    write(folder)
    failures: list[BaseException] = []
    ended = threading.Event()

    def keep_opening() -> None:
        try:
            while not ended.is_set():
                with SampleStore(folder) as store:
                    numbers = [0, 1, 2]
                    first, *others = (int(each) for each in store.read(numbers))
                    assert others == [first + 1, first + 2]
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=keep_opening) for _ in range(2)]
    for thread in threads:
        thread.start()
    for number in range(15):
        write(folder, 1000 * number, overwrite=True)
    ended.set()
    for thread in threads:
        thread.join()
    assert not failures
    assert len(os.listdir(folder)) == FILES + 1
