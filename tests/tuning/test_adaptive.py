"""``aio_handle.adaptive``: any tool moves the right bytes, what is learned is used and told, and can be frozen."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import nvme_ops
from nvme_ops import Priority, aio_handle
from nvme_ops.base.settings import PAGE, Settings
from nvme_ops.filesystem.device import identify
from nvme_ops.io.tuning import store as kept
from nvme_ops.io.tuning.adaptive import MODE, TransferClass
from tests.conftest import KIB, MIB, contents, in_child, pattern, round_trip, store

MANY = 30  # transfers, by which every class has settled, and before a changed cost counts
# Memory that stays of one class: the pool's becomes huge pages after a while, torch's is at any address.
_MEMORY = torch.zeros(2 * MIB + PAGE, dtype=torch.uint8)
DATA = _MEMORY[-_MEMORY.data_ptr() % PAGE :][: 2 * MIB].copy_(pattern(2 * MIB))


def write(handle: aio_handle, folder: Path, times: int = MANY) -> None:
    for _ in range(times):
        handle.sync_pwrite(DATA, folder / "used", 0)


def only(handle: aio_handle, **wanted: object) -> TransferClass:
    (learned,) = [one for one in handle.learned() if all(getattr(one, name) == value for name, value in wanted.items())]
    return learned


@pytest.mark.parametrize(("size", "cached"), [(100 * KIB + 1, True), (5 * MIB, False)])
def test_every_tool_moves_the_right_bytes(folder: Path, size: int, cached: bool) -> None:
    """The handle of a file object learns, too."""
    handle = aio_handle.adaptive(folder, cache=None)
    path = store(folder / "file", pattern(size + 7))
    for number in range(24):
        data = pattern(size, number)
        handle.sync_pwrite(data, path, 3)
        if cached:
            path.read_bytes()
        back = torch.zeros_like(data)
        if number % 2:
            handle.sync_pread(back, path, 3)
        else:
            with nvme_ops.open(path, "r", handle=handle) as file:
                file.pread(back, 3)
        assert torch.equal(back, data)
    counted = {op: sum(one.transfers for one in handle.learned() if one.op == op) for op in ("read", "write")}
    assert counted == {"read": 24, "write": 24}


@pytest.mark.parametrize(
    ("concurrency", "call"),
    [
        ("waited", lambda handle, path: handle.sync_pwrite(DATA, path)),
        ("alone", lambda handle, path: (handle.async_pwrite(DATA, path), handle.wait())),
        ("alone", lambda handle, path: handle.submit_pwrite(DATA, path, priority=Priority.WRITEBACK).result()),
        ("crowd", lambda handle, path: handle.submit_pwritev([DATA[:MIB], DATA[MIB:]], path, [0, MIB]).result()),
        ("", lambda handle, path: handle.write(DATA, path, True)),
        ("", lambda handle, path: handle.submit_pwrite(DATA, path, priority=Priority.BACKGROUND).result()),
    ],
)
def test_every_way_to_move_data_is_learned_from_if_it_is_measured(
    folder: Path, concurrency: str, call: Callable[[aio_handle, Path], object]
) -> None:
    handle = pickle.loads(pickle.dumps(aio_handle.adaptive(folder, queue_depth=7)))  # as path and arguments
    assert handle.get_queue_depth() == 7
    for _ in range(6 if concurrency else MANY):
        call(handle, folder / "file")
    assert torch.equal(contents(folder / "file"), DATA)
    if concurrency:
        assert [(one.transfers, one.concurrency) for one in handle.learned()] == [(6, concurrency)]
    else:
        assert all(tried.cost is None for one in handle.learned() for tried in one.tools)


def test_a_failed_transfer_raises_and_teaches_nothing(folder: Path) -> None:
    handle, back = aio_handle.adaptive(folder), torch.empty(2 * MIB, dtype=torch.uint8)
    short = store(folder / "short", pattern(MIB))
    for call, error in (
        (lambda: handle.sync_pread(back, short), EOFError),
        (lambda: handle.submit_pread(back, folder / "none").result(), FileNotFoundError),
        (lambda: handle.sync_pread(back, 3.5), TypeError),  # type: ignore[arg-type]
    ):
        for _ in range(MANY):
            with pytest.raises(error):
                call()
    assert all(tried.cost is None for one in handle.learned() for tried in one.tools)
    handle.submit_pread(back[:MIB], short).result()
    assert only(handle, most_bytes=MIB, concurrency="alone").transfers == 1


def test_it_begins_with_what_nvme_tune_found_and_never_changes_arguments(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept.keep(identify(folder, "cpu", aio_handle().backend), Settings(256 * KIB, 16, intra_op_parallelism=2), {})
    handle = aio_handle.adaptive(folder)
    write(handle, folder, 1)
    first, *others = only(handle).tools
    assert (first.block_size, first.queue_depth, first.lanes) == (256 * KIB, 16, 2)
    assert others
    handle = aio_handle.adaptive(folder, block_size=512 * KIB, queue_depth=9, num_threads=1, cache="direct")
    data = nvme_ops.empty(17 * MIB, dtype=torch.uint8)
    handle.sync_pwrite(data, folder / "file")
    handle.sync_pread(data, folder / "file")
    for one in handle.learned():
        (tool,) = one.tools
        assert (tool.block_size, tool.queue_depth, tool.lanes, tool.cache) == (512 * KIB, 9, 1, "direct")
    monkeypatch.setenv("NVME_OPS_CACHE", "direct")
    handle = aio_handle.adaptive(folder)
    handle.sync_pread(data[:4096], folder / "file")
    assert {tool.cache for one in handle.learned() for tool in one.tools} == {"direct"}


def test_handles_of_a_device_learn_together_and_forget_what_has_ended(folder: Path) -> None:
    one, other, ended = aio_handle.adaptive(folder), aio_handle.adaptive(folder / "elsewhere"), threading.Event()
    write(one, folder, 3)
    future = one.submit_pwrite(pattern(8 * MIB), folder / "large", 0)  # whose result nobody asks for yet
    future.add_done_callback(lambda _: ended.set())
    assert ended.wait(60)
    write(other, folder, 4)
    assert only(one, most_bytes=4 * MIB).transfers == 7
    assert only(other, most_bytes=4 * MIB).concurrency == "waited"
    assert future.result() == 8 * MIB


def test_a_forked_child_continues_from_what_its_parent_has_learned(folder: Path) -> None:
    parent = aio_handle.adaptive(folder)
    write(parent, folder, 3)

    def learn() -> None:
        other = aio_handle.adaptive(folder)
        assert only(other).transfers == 3
        for handle in (parent, other):
            write(handle, folder, 12)
        assert (only(other).transfers, only(other).exploring) == (27, False)

    in_child(learn)
    assert only(parent).transfers == 3


@pytest.mark.parametrize("times", [1, MANY])
def test_frozen_the_same_calls_use_the_same_tool_and_nothing_is_learned(folder: Path, times: int) -> None:
    handle, other, large = aio_handle.adaptive(folder), aio_handle.adaptive(folder), pattern(64 * MIB)
    with other:
        write(other, folder, times)  # once: the tools would be tried next
    other.freeze()
    other = aio_handle.adaptive(folder)
    known = handle.learned()
    assert [(one.frozen, one.exploring, one.transfers) for one in known] == [(True, False, times)]
    requests = set()
    for number in range(MANY):
        beside = [other.submit_pwrite(large, folder / "large", 0)] if number % 10 == 9 else []
        before = handle.statistics().requests
        write(handle, folder, 1)
        requests.add(handle.statistics().requests - before)
        assert [future.result() for future in beside] == [64 * MIB] * len(beside)
    assert len(requests) == 1
    assert handle.learned() == known == other.learned()
    assert f"waited: frozen after {times} transfers" in handle.explain()
    assert handle.explain().endswith("frozen: all other transfers use the handle's settings")


def test_it_explains_itself_is_tuned_if_off_and_refuses_another_mode(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    handle = aio_handle.adaptive(folder)
    assert handle.explain() == "nothing was transferred yet"
    write(handle, folder)
    text = handle.explain()
    assert "write up to 4 MiB, aligned, waited: settled after 30 transfers" in text
    assert text.count("  -> ") == text.count("(the handle's settings): ") == 1
    monkeypatch.setenv(MODE, "off")
    with aio_handle.adaptive(folder) as handle:
        round_trip(handle, folder / "file")
        handle.freeze()
        assert handle.learned() == []
        assert "NVME_OPS_ADAPTIVE=off: every transfer uses the handle's settings" in handle.explain()
    monkeypatch.setenv(MODE, "frozen")
    with pytest.raises(ValueError, match="NVME_OPS_ADAPTIVE='frozen' is not one of learn, off"):
        aio_handle.adaptive(folder)
