"""Programs written for DeepNVMe run here: every method, argument, default and return value that they use; and ours."""

from __future__ import annotations

import errno
import inspect
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

import nvme_ops
from nvme_ops import aio_handle, gds_handle
from nvme_ops.base.native import native
from nvme_ops.io.pin_memory import pin_handle
from tests.conftest import HandleFactory, contents, pattern, store

SIZE = 100_003  # a multiple of nothing

# What follows ``.def(`` and ``"name"_a`` in csrc/aio/py_lib/py_ds_aio.cpp, csrc/gds/py_lib/py_ds_gds.cpp and
# csrc/pin_memory/py_ds_pin_memory.cpp of DeepSpeed 0.19.8: a method, its arguments in order, defaults behind a colon.
BOTH = """
__init__ block_size:1048576 queue_depth:128 single_submit:False overlap_events:False intra_op_parallelism:1
get_block_size
get_queue_depth
get_single_submit
get_overlap_events
get_intra_op_parallelism
get_alignment
read buffer filename validate file_offset:0
write buffer filename validate file_offset:0
pread buffer filename validate async file_offset:0
pwrite buffer filename validate async file_offset:0
sync_pread buffer filename file_offset:0
sync_pwrite buffer filename file_offset:0
async_pread buffer filename file_offset:0
async_pwrite buffer filename file_offset:0
async_pwrite buffer fd file_offset:0
new_cpu_locked_tensor num_elem example_tenosr
free_cpu_locked_tensor tensor
is_pinned buffer
wait
"""
GDS = """
new_pinned_device_tensor num_elem example_tenosr
free_pinned_device_tensor tensor
pin_device_tensor tensor
unpin_device_tensor tensor
"""
PIN = """
__init__
new_cpu_locked_tensor num_elem example_tensor
free_cpu_locked_tensor locked_tensor
free_cpu_locked_tensor_by_ptr address
is_pinned buffer
"""
# Arguments that DeepSpeed's callers also give by position, where the name is another one here.
OTHER_NAMES = {"async": "async_op", "example_tenosr": "example_tensor", "fd": "filename"}
# Of these a write without an offset makes the tensor the whole file; DeepSpeed's 0 leaves an old tail in place.
# The number of lanes has two names here, neither of which is given by default.
OTHER_DEFAULTS = {"file_offset": None, "intra_op_parallelism": None}


@pytest.mark.parametrize(("kind", "table"), [(aio_handle, BOTH), (gds_handle, BOTH + GDS), (pin_handle, PIN)])
def test_deepspeeds_keywords_positions_and_defaults(kind: type, table: str) -> None:
    for method, *arguments in map(str.split, filter(None, table.split("\n"))):
        signature = inspect.signature(getattr(kind, method) if method != "__init__" else kind)
        names = [argument.partition(":")[0] for argument in arguments]
        own = [] if method == "__init__" else [None]
        signature.bind(*own, **dict.fromkeys(names))
        signature.bind(*own, **{name: None for name in arguments if ":" not in name})
        bound = signature.bind(*own, *names).arguments
        assert [name for name in bound if name != "self"] == [OTHER_NAMES.get(name, name) for name in names], method
        for name, colon, default in (argument.partition(":") for argument in arguments):
            if colon:
                expected = OTHER_DEFAULTS.get(name, default)
                assert str(signature.parameters[name].default) == str(expected), (method, name)


def test_a_handle_says_how_it_was_made() -> None:
    """FastFileWriter asserts that its buffer is a multiple of the alignment."""
    for handle in (aio_handle(4096, 7, True, False, 3), aio_handle(4096, 7, True, False, 3, num_threads=3)):
        assert (handle.get_block_size(), handle.get_queue_depth()) == (4096, 7)
        assert (handle.get_single_submit(), handle.get_overlap_events()) == (True, False)
        assert handle.get_intra_op_parallelism() == handle.get_thread_count() == 3
        assert handle.get_alignment() == 512 * 3
        assert repr(pickle.loads(pickle.dumps(handle))) == repr(handle)
    assert aio_handle().get_intra_op_parallelism() == 1
    with pytest.raises(ValueError, match=r"two names for one number"):
        aio_handle(intra_op_parallelism=2, num_threads=3)


def test_what_calls_return_and_count(make_handle: HandleFactory, folder: Path) -> None:
    handle, path, data = make_handle(intra_op_parallelism=3), folder / "file", pattern(SIZE)
    assert handle.wait() == 0
    assert handle.write(data, str(path), True) == 0
    back, part = torch.zeros_like(data), torch.zeros(20, dtype=torch.uint8)
    assert handle.read(back, str(path), True) == 0
    assert torch.equal(back, data)
    assert handle.write(buffer=data[:10], filename=str(path), validate=False, file_offset=5) == 0
    assert handle.read(buffer=part, filename=str(path), validate=False, file_offset=1) == 0
    assert torch.equal(part, torch.cat([data[1:5], data[:10], data[15:21]]))
    assert handle.sync_pwrite(data, str(path)) == 1
    others = [torch.zeros_like(data) for _ in range(4)]
    for other in others:
        assert handle.async_pread(other, str(path)) == 0
    assert handle.sync_pread(back.zero_(), str(path), 0) == 5
    assert all(torch.equal(tensor, data) for tensor in [back, *others])
    assert handle.async_pwrite(data, str(path), 0) == 0
    assert handle.pwrite(data, str(path), False, False, 0) == 2
    assert handle.pwrite(data, str(path), True, True) == 0
    assert handle.wait() == 1
    assert handle.pread(buffer=part, filename=str(path), validate=False, async_op=True, file_offset=7) == 0
    assert handle.pread(back.zero_(), str(path), True, **{"async": True}) == 0
    assert handle.wait() == 2
    assert torch.equal(back, data)
    assert torch.equal(part, data[7:27])
    assert handle.pread(back, str(path), True, **{"async": False}) == handle.pwrite(data, str(path), True, False) == 1
    assert handle.wait() == 0


def test_async_is_said_once_and_as_a_bool(folder: Path) -> None:
    handle, path, back = aio_handle(), str(store(folder / "file", pattern(10))), torch.zeros(10)
    wrong: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = [
        ("both async_op", (False, False), {"async": True}),
        ("unexpected keyword argument 'asynchronous'", (), {"asynchronous": True}),
        ("async must be a bool", (), {"async": "false"}),
        ("async_op must be a bool", (False, "false"), {}),
        ("validate must be a bool", ("false",), {}),
    ]
    for match, arguments, keywords in wrong:
        for call in (handle.pread, handle.pwrite):
            with pytest.raises(TypeError, match=match):
                call(back, path, *arguments, **keywords)
    assert handle.wait() == 0


def test_a_descriptor_as_a_keyword(folder: Path) -> None:
    handle, path, data = aio_handle(), store(folder / "file", pattern(SIZE, 1)), pattern(1000)
    with path.open("r+b") as file:
        assert handle.async_pwrite(buffer=data, fd=file.fileno(), file_offset=5) == 0
        assert handle.async_pwrite(data[:3], fd=file.fileno()) == 0
        assert handle.wait() == 2
        os.fsync(file.fileno())  # still open
        with pytest.raises(TypeError, match="both a filename and an fd"):
            handle.async_pwrite(data, str(path), fd=file.fileno())
    assert torch.equal(contents(path), torch.cat([data[:3], pattern(SIZE, 1)[3:5], data, pattern(SIZE, 1)[1005:]]))
    others: list[Any] = [None, "1", 1.5, True]
    for other in others:
        with pytest.raises(TypeError, match="fd"):
            handle.async_pwrite(data, fd=other)
    assert handle.wait() == 0


def test_aio_read_and_aio_write(folder: Path) -> None:
    data, path = pattern(SIZE), folder / "file"
    back = torch.zeros_like(data)
    assert native().aio_write(data, str(path), 65536, 8, False, True, True) == 0
    assert native().aio_read(back, str(path), 65536, 8, True, False, True) == 0
    assert torch.equal(back, data)


def test_memcpy() -> None:
    memcpy = native().deepspeed_memcpy
    source = torch.arange(24, dtype=torch.float64).reshape(2, 3, 4)
    raw, leaf = torch.zeros(24 * 8, dtype=torch.uint8), torch.zeros(2, 3, 4, dtype=torch.float64, requires_grad=True)
    strided = torch.zeros(4, 3, 2, dtype=torch.float64).permute(2, 1, 0)
    for target in (leaf, strided):
        assert memcpy(dest=target, src=source) == 0
        assert torch.equal(target, source)
    assert memcpy(raw, source.permute(2, 0, 1)) == 0
    assert torch.equal(raw.view(torch.float64).view(4, 2, 3), source.permute(2, 0, 1))
    with pytest.raises(ValueError, match="dest has 16 bytes and src has 12"):
        memcpy(torch.zeros(4), torch.zeros(3))
    with pytest.raises(ValueError, match="contiguous"):
        memcpy(torch.zeros(4, 4).t(), torch.zeros(16))
    with pytest.raises(TypeError, match="src"):
        memcpy(torch.zeros(4), [0, 0, 0, 0])


# validate=True reads back and compares


@pytest.mark.parametrize(("way", "write"), [("blocking", True), ("all lanes", False), ("asynchronous", True)])
def test_a_mismatch_is_told(make_handle: HandleFactory, folder: Path, way: str, write: bool) -> None:
    """Provoked by a tensor that maps the very file it is moved to or from, a little further on.

    The move shifts the file under the tensor, so that afterwards they do differ.
    """
    handle = make_handle(cache="buffered", intra_op_parallelism=1 + 2 * (way == "all lanes"))
    path = store(folder / "file", pattern(9 * 4096))
    mapped = torch.from_file(str(path), shared=True, size=9 * 4096, dtype=torch.uint8)
    if write:
        tensor, place, blocking, every = mapped[5 * 4096 + 2048 :][:4096], 5 * 4096, handle.write, handle.pwrite
    else:
        tensor, place, blocking, every = mapped[: 3 * 4096], 4096, handle.read, handle.pread
    match = f"validation failed: file and tensor differ at offset {place}: '{path}'"
    with pytest.raises(OSError, match=match) as caught:  # noqa: PT012  (asynchronous: from wait)
        if way == "blocking":
            blocking(tensor, path, True, place)
        else:
            every(tensor, path, True, way == "asynchronous", place)
            handle.wait()
    assert (caught.value.errno, caught.value.filename) == (errno.EIO, str(path))
    assert handle.wait() == 0
    with (folder / "other").open("wb") as file:  # a descriptor that only writes
        assert handle.pwrite(pattern(100_001), file.fileno(), True, False) == 1
    assert torch.equal(contents(folder / "other"), pattern(100_001))


# What the constructor refuses, and the environment's say


SIZES = ("block_size", "queue_depth", "intra_op_parallelism", "num_threads")


def refused(error: type[Exception], match: str, **arguments: Any) -> None:
    with pytest.raises(error, match=match):
        aio_handle(**arguments)


def test_sizes_out_of_range_or_of_another_type() -> None:
    for name in SIZES:
        told = name.replace("num_threads", "intra_op_parallelism")
        for value in (0, -1, -(1 << 63), 1 << 63, 1 << 100, -(1 << 100)):
            refused(ValueError, told, **{name: value})
        for other in ("8", 1.5, True, [1], b"1"):
            refused(TypeError, told, **{name: other})
    assert aio_handle(intra_op_parallelism=1024).get_thread_count() == 1024
    refused(ValueError, "at most 1024", intra_op_parallelism=1025)


def test_the_environment_names_the_backend(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NVME_OPS_BACKEND", backend)
    assert aio_handle().backend == backend
    assert aio_handle(backend="threads").backend == "threads"  # the argument counts more
    best = next(name for name, reason in native().backends().items() if reason is None)
    for nothing in ("", "auto"):
        monkeypatch.setenv("NVME_OPS_BACKEND", nothing)
        assert aio_handle().backend == aio_handle(backend="auto").backend == best
    monkeypatch.setenv("NVME_OPS_BACKEND", "spdk")
    refused(ValueError, "NVME_OPS_BACKEND='spdk' is not one of auto, io_uring, libaio, threads")
    assert aio_handle(backend="threads").backend == "threads"


def test_the_environment_names_the_cache_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NVME_OPS_GDS", "off")
    for value, given, mode in (
        ("direct", None, "direct"),
        ("", None, "auto"),
        ("direct", "buffered", "buffered"),
        ("nonsense", "auto", "auto"),
        ("DIRECT", None, None),
    ):
        monkeypatch.setenv("NVME_OPS_CACHE", value)
        for kind in (aio_handle, nvme_ops.gds_handle):
            if mode is None:
                with pytest.raises(ValueError, match=f"NVME_OPS_CACHE='{value}' is not one of auto, direct, buffered"):
                    kind()
            else:
                assert f"cache='{mode}'" in repr(kind(cache=given))  # type: ignore[arg-type]


# Beside its work


def test_a_handle_ends_with_its_block_and_raises_what_was_pending(tmp_path: Path) -> None:
    data = pattern(100_001)
    with aio_handle(intra_op_parallelism=2) as handle:
        handle.async_pwrite(data, tmp_path / "file")
    assert (tmp_path / "file").stat().st_size == 100_001  # what was pending is done
    for use in (handle.wait, lambda: handle.read(data, tmp_path / "file"), lambda: handle.backend, handle.statistics):
        with pytest.raises(ValueError, match="the handle is closed"):
            use()
    handle = aio_handle()
    handle.async_pread(torch.zeros(10), tmp_path / "nosuch")
    with pytest.raises(FileNotFoundError):
        handle.close()
    assert handle.closed
