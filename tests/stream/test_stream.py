"""``nvme_ops.open``: what is gathered before it is written, what is read before it is asked for, modes, tensors."""

from __future__ import annotations

import gc
import io
import os
import random
import resource
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import nvme_ops
from nvme_ops.base.native import native
from nvme_ops.io import blocks
from nvme_ops.io.blocks import BLOCK, BLOCKS
from tests.conftest import KIB, MIB, in_child, in_threads, limited, pattern
from tests.crashing_save import small_files

SIZES = [0, 1, 100, 4095, 4096, 70_000, 256 * KIB, MIB + 1, BLOCK - 1, BLOCK, BLOCK + 1, 9 * MIB + 17]
DATA = bytes(pattern(24 * MIB).numpy())


@pytest.fixture
def path(folder: Path) -> Path:
    return folder / "file"


@pytest.fixture
def filled(path: Path) -> Path:
    path.write_bytes(DATA)
    return path


# As any other file


@pytest.mark.parametrize("seed", range(4))
def test_it_does_what_a_file_of_python_does(seed: int, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "_LARGE", 5 * MIB)
    chance = random.Random(seed)
    content = DATA[: chance.choice(SIZES)]
    path.write_bytes(content)
    expected = io.BytesIO(content)
    with nvme_ops.open(path, "r+") as file:
        for _ in range(60):
            size = chance.choice(SIZES)
            match chance.randrange(8):
                case 0 | 1 | 2:
                    for stream in (file, expected):
                        stream.write(DATA[size : 2 * size])
                case 3 | 4:
                    assert file.read(size) == expected.read(size)
                case 5:
                    place = chance.randrange(len(expected.getvalue()) + 10)
                    assert file.seek(place) == expected.seek(place)
                case 6:
                    assert file.seek(0, os.SEEK_END) == expected.seek(0, os.SEEK_END)
                case 7:
                    size = chance.randrange(len(expected.getvalue()) + 1)
                    assert file.truncate(size) == expected.truncate(size)
            assert file.tell() == expected.tell()
    assert path.read_bytes() == expected.getvalue()


@pytest.mark.parametrize("size", [1, 3 * MIB])
def test_writes_and_reads_of_one_size_come_to_the_end_in_order(size: int, path: Path) -> None:
    data = DATA if size > 1 else DATA[:5_000]
    with nvme_ops.open(path, "w") as file:
        buffer = bytearray(size)
        for start in range(0, len(data), size):
            part = data[start : start + size]
            buffer[: len(part)] = part
            file.write(memoryview(buffer)[: len(part)])  # which may change at once
    assert path.read_bytes() == data
    with nvme_ops.open(path) as file:
        pieces = list(iter(lambda: file.read(size), b""))
        file.seek(7)
        buffer = bytearray(len(data))
        assert file.readinto(buffer) == len(data) - 7
    assert {len(piece) for piece in pieces[:-1]} <= {size}
    assert b"".join(pieces) == data
    assert buffer[:-7] == data[7:]


def test_what_is_read_in_order_is_read_ahead_wherever_it_begins(filled: Path) -> None:
    handle = nvme_ops.aio_handle()
    with nvme_ops.open(filled, handle=handle) as file:
        file.seek(5 * MIB)
        assert file.read(1000) == DATA[5 * MIB : 5 * MIB + 1000]
        assert handle.statistics().bytes < MIB  # it may be the only one
        assert file.read(1000) == DATA[5 * MIB + 1000 : 5 * MIB + 2000]
        assert handle.statistics().bytes >= MIB


# torch, numpy and pickle


def test_torch_saves_to_it_and_loads_from_it(path: Path) -> None:
    expected, plain = {"large": pattern(9 * MIB), "small": torch.randn(3)}, path.with_suffix(".pt")
    torch.save(expected, plain)
    with nvme_ops.open(path, "w") as file:
        torch.save(expected, file)
    for saved in (nvme_ops.open(path), nvme_ops.open(plain), path):
        loaded = torch.load(saved, weights_only=True)
        assert all(torch.equal(loaded[name], tensor) for name, tensor in expected.items())
    with nvme_ops.open(path, "w") as file:  # two old files in one
        for _ in range(2):
            torch.save(expected, file, _use_new_zipfile_serialization=False)
    with nvme_ops.open(path) as file:
        for _ in range(2):
            assert torch.equal(torch.load(file)["large"], expected["large"])


# When it is in the file


@pytest.mark.parametrize("size", [10, BLOCK + 10])
def test_whatever_needs_the_file_finds_it_whole(size: int, path: Path) -> None:
    tensor = torch.frombuffer(bytearray(DATA[:10]), dtype=torch.uint8)
    calls: list[Callable[[nvme_ops.File], object]] = [
        lambda file: file.flush(), lambda file: file.sync(), lambda file: file.seek(0),
        lambda file: file.pread(tensor, 0), lambda file: file.pwrite(tensor, 0), lambda file: file.truncate(),
        lambda file: file.close(),
    ]  # fmt: skip
    for call in calls:
        with nvme_ops.open(path, "w+") as file:
            file.write(DATA[:size])
            assert path.stat().st_size < size
            call(file)
            assert path.read_bytes() == DATA[:size]


def test_what_others_write_behind_the_end_is_kept(path: Path) -> None:
    tensor = torch.frombuffer(bytearray(DATA[: 4 * MIB]), dtype=torch.uint8)
    with nvme_ops.open(path, "w") as file:
        file.pwrite_async(tensor, 20 * MIB)
        file.write(DATA[: 2 * BLOCK])
        with path.open("r+b") as other:
            other.seek(12 * MIB)
            other.write(b"other")
        file.write(DATA[2 * BLOCK : 9 * MIB])
    content = path.read_bytes()
    assert (content[: 9 * MIB], content[20 * MIB :]) == (DATA[: 9 * MIB], DATA[: 4 * MIB])
    assert content[12 * MIB :][:5] == b"other"


def test_appending_takes_turns_with_others(path: Path) -> None:
    with nvme_ops.open(path, "a") as file, path.open("ab") as other:
        for number in range(3):
            file.write(b"ours")
            other.write(b"others")
            other.flush()
            file.flush()
            assert path.read_bytes() == b"othersours" * (number + 1)
            assert file.tell() == path.stat().st_size
        file.write(DATA)
    assert path.read_bytes() == b"othersours" * 3 + DATA


def test_a_file_that_grows_is_read_to_its_new_end(filled: Path) -> None:
    with nvme_ops.open(filled) as file, filled.open("ab") as other:
        for size in (100, 5 * MIB, 100, 20 * MIB):
            file.read(size)
        assert file.read(100) == b""
        other.write(DATA[: 6 * MIB])
        other.flush()
        assert file.read(10) + file.read() == DATA[: 6 * MIB]
        assert file.read(10) == b""


def test_changes_by_others_are_read_after_a_flush_also_a_shorter_end(filled: Path) -> None:
    with nvme_ops.open(filled) as file, filled.open("r+b") as other:
        for _ in range(4):
            file.read(100)
        other.seek(400)
        other.write(b"changed")
        other.flush()
        file.flush()
        assert file.read(7) == b"changed"
        for _ in range(4):
            file.read(100 * KIB)
        os.truncate(filled, 20 * MIB)
        file.seek(19 * MIB)
        assert file.read(5 * MIB) == DATA[19 * MIB : 20 * MIB]
        assert file.read(1) == b""


def test_memory_is_bounded_taken_at_first_use_and_given_back(path: Path) -> None:
    def taken() -> int:
        return int(native().pool_statistics()["live_bytes"])

    gc.collect()
    before = taken()
    with nvme_ops.open(path, "w") as file:
        assert taken() == before
        for _ in range(3):
            file.write(DATA)
            assert taken() - before <= BLOCKS * BLOCK
    assert taken() == before
    with nvme_ops.open(path) as file:
        file.read(10)
        assert taken() == before
        while file.read(300 * KIB):
            assert taken() - before <= BLOCKS * BLOCK
    assert taken() == before


# Errors


def write_much(file: nvme_ops.File) -> None:
    for start in range(0, len(DATA), MIB):
        file.write(DATA[start : start + MIB])
    file.sync()


def test_an_error_in_the_background_is_told_and_ends_the_writing(path: Path) -> None:
    with limited(resource.RLIMIT_FSIZE, 10 * MIB):
        file = nvme_ops.open(path, "w")
        with pytest.raises(OSError, match="too large"):
            write_much(file)
        for call in (file.flush, file.sync, lambda: file.write(b"x")):
            with pytest.raises(OSError):  # noqa: PT011  (the same)
                call()
        file.close()
        assert file.closed


def test_an_error_that_nobody_was_told_is_raised_by_close(path: Path) -> None:
    for size in (2 * MIB, 100 * KIB):
        with small_files():
            file = nvme_ops.open(path, "w")
            file.seek(MIB)
            file.write(DATA[:size])
            with pytest.raises(OSError):  # noqa: PT011  (whatever the kernel says)
                file.close()
            assert file.closed


# Threads, processes and the end of the program


def test_threads_take_turns(path: Path) -> None:
    records = [bytes([number]) * 10_001 for number in range(4)]
    with nvme_ops.open(path, "w") as file:
        in_threads(lambda number: [file.write(records[number]) for _ in range(100)], 4)
    parts: list[bytes] = []
    with nvme_ops.open(path) as file:
        in_threads(lambda _: parts.extend(iter(lambda: file.read(10_001), b"")), 4)
    assert sorted(parts) == [record for record in records for _ in range(100)]


def test_a_forked_child_goes_on_reading_and_writing(filled: Path, path: Path) -> None:
    file, written = nvme_ops.open(filled, "r+"), nvme_ops.open(path.with_name("other"), "w")
    file.read(1000)
    file.read(1000)
    written.write(DATA[: 2 * BLOCK + 100])

    def body() -> None:
        written.close()  # which is its parent's to write
        assert file.read(5 * MIB) == DATA[2000 : 2000 + 5 * MIB]
        file.seek(0)
        file.write(b"child")
        file.close()

    in_child(body)
    assert file.read(1000) == DATA[2000:3000]
    file.close()
    assert filled.read_bytes() == b"child" + DATA[5:]
    written.write(b"more")
    written.close()
    assert path.with_name("other").read_bytes() == DATA[: 2 * BLOCK + 100] + b"more"


def test_a_dropped_file_is_written_with_a_warning_and_its_error_is_told(path: Path, unraisable: list[Any]) -> None:
    files = [nvme_ops.open(path, "w")]
    files[0].write(DATA[:MIB])
    with pytest.warns(ResourceWarning, match="unclosed file"):
        files.clear()
    assert path.read_bytes() == DATA[:MIB]
    file = nvme_ops.open(path, "w")
    file.write(b"lost")
    os.close(file.fileno())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        del file
        gc.collect()
    assert [type(error) for error in unraisable] == [OSError]


def test_a_signal_handler_that_uses_the_file_while_it_is_at_work_is_told(path: Path) -> None:
    file = nvme_ops.open(path, "w")
    file.write(b"x")
    turn = file._stream._turn
    with turn, pytest.raises(RuntimeError, match="signal handler"):
        file.write(b"y")
    file.close()
    assert path.read_bytes() == b"x"


# Modes, positions, the tensors beside the stream, and who else uses the descriptor


def test_seek_from_every_base_and_lines(path: Path) -> None:
    path.write_bytes(b"one\ntwo\nthree")
    with nvme_ops.open(path) as file:
        assert file.readline() == b"one\n"
        assert file.peek(3) == b"two"
        assert list(file) == [b"two\n", b"three"]
        assert file.peek(3) == b""
        assert file.seek(3) == 3
        assert file.seek(2, io.SEEK_CUR) == 5
        assert file.seek(-1, io.SEEK_END) == 12
        assert file.read() == b"e"
        assert file.seek(100) == 100
        assert file.read() == b""
        with pytest.raises(ValueError, match="negative"):
            file.seek(-1)
        with pytest.raises(ValueError, match="whence"):
            file.seek(0, 7)


def test_modes(path: Path) -> None:
    path.write_bytes(b"0123456789")
    with nvme_ops.open(path, "r+") as file:
        assert file.peek(4) == b"0123"
        file.seek(2)
        file.write(b"xx")
        assert file.peek(4) == b"4567"
        file.seek(0)
        assert file.read() == b"01xx456789"
    with nvme_ops.open(path, "a") as file:
        assert file.tell() == 10
        file.seek(0)
        file.write(b"more")
    assert path.read_bytes() == b"01xx456789more"
    with pytest.raises(FileExistsError):
        nvme_ops.open(path, "x+")
    for mode in ("w+", "xb+"):
        with nvme_ops.open(path, mode) as file:
            assert path.stat().st_size == 0
            assert file.readable()
            assert file.writable()
            file.write(b"content")
            file.seek(3)
            assert file.read() == b"tent"
        path.unlink()
    for wrong in ("x-", "rw", "", "wt"):
        with pytest.raises(ValueError, match="mode"):
            nvme_ops.open(path, wrong)  # type: ignore[arg-type]
    with pytest.raises(FileNotFoundError):
        nvme_ops.open(path, "r")


def test_tensors_at_offsets_keep_the_position_and_close_waits_for_them(path: Path) -> None:
    tensors = [torch.randn(1000, 333) for _ in range(3)]
    size = tensors[0].nbytes
    with nvme_ops.open(path, "w") as file:
        file.write(b"head")
        futures = [file.pwrite_async(tensor, 4 + i * size) for i, tensor in enumerate(tensors)]
        assert file.tell() == 4
    assert all(future.done() for future in futures)
    with nvme_ops.open(path) as file:
        back = [torch.empty_like(tensor) for tensor in tensors]
        futures = [file.pread_async(tensor, 4 + i * size) for i, tensor in enumerate(back)]
        assert [future.result() for future in futures] == [size] * 3
        assert all(torch.equal(a, b) for a, b in zip(tensors, back, strict=True))
        assert file.tell() == 0
        with pytest.raises(EOFError, match=f"{4 + 3 * size} bytes"):
            file.pread(back[0], 4 + 2 * size + 1)


def test_the_wrong_direction_and_a_closed_file_are_refused(path: Path) -> None:
    tensor = torch.zeros(4)
    file: nvme_ops.File
    reading = [lambda: file.read(1), lambda: file.pread(tensor, 0), lambda: file.pread_async(tensor, 0)]
    writing = [lambda: file.write(b"x"), lambda: file.pwrite(tensor, 0), lambda: file.truncate(0)]
    for mode, calls in (("w", reading), ("r", writing)):
        with nvme_ops.open(path, mode) as file:  # type: ignore[arg-type]
            for call in calls:
                with pytest.raises(io.UnsupportedOperation):
                    call()
    for call in (*reading, file.tell, file.fileno, lambda: file.seek(0)):
        with pytest.raises(ValueError, match="closed"):
            call()


def test_what_goes_through_the_descriptor_moves_the_position(path: Path) -> None:
    with nvme_ops.open(path, "w") as file:
        file.write(b"one")
        file.flush()
        os.write(file.fileno(), b"two")
        assert file.tell() == 6
        file.write(b"three")
    assert path.read_bytes() == b"onetwothree"
    with nvme_ops.open(path) as file:
        assert file.read(3) == b"one"
        file.flush()
        assert os.read(file.fileno(), 3) == b"two"
        assert file.read() == b"three"
