"""nvme_ops.dcp: DCP's files both ways, in one process, in the background and on several ranks."""

from __future__ import annotations

import gc
import io
import logging
import os
import pickle
import warnings
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import logger as dcp_logger
from torch.distributed.checkpoint.metadata import Metadata

import nvme_ops
from nvme_ops import aio_handle
from nvme_ops.checkpoint.dcp import frame
from nvme_ops.dcp import NvmeStorageReader, NvmeStorageWriter, use_by_default
from tests.conftest import MIB, in_child, run_python
from tests.dcp.states import equal, files, load, needs_fork, save, state
from tests.launch import run_ranks
from tests.private_device import private_device

pytestmark = pytest.mark.filterwarnings("ignore:.*(torch.distributed is disabled|Detected an existing checkpoint)")


def test_the_package_has_it_without_another_import() -> None:
    program = "import nvme_ops, sys; assert 'torch' not in sys.modules; print(nvme_ops.dcp.NvmeStorageWriter.__name__)"
    assert run_python(program, fresh=True).stdout.strip() == "NvmeStorageWriter"


def test_a_distributed_tensor_is_no_matter_for_one_file(tmp_path: Path) -> None:
    in_child(lambda: refused(tmp_path))


def refused(folder: Path) -> None:
    from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    tensor = distribute_tensor(torch.ones(4, 4), init_device_mesh("cpu", (1,)), [Shard(0)])
    with pytest.raises(ValueError, match=r"'a' is a DTensor, .*full_tensor\(\).*nvme_ops\.dcp"):
        nvme_ops.save({"a": tensor}, folder / "model.safetensors")
    nvme_ops.save({"a": tensor.full_tensor()}, folder / "model.safetensors")
    dist.destroy_process_group()


# Both ways


@pytest.mark.parametrize("reader", [NvmeStorageReader, dcp.FileSystemReader])
@pytest.mark.parametrize("writer", [NvmeStorageWriter, dcp.FileSystemWriter])
def test_what_either_writer_wrote_either_reader_reads(writer: Any, reader: Any, tmp_path: Path) -> None:
    dcp.save(state(1), storage_writer=writer(tmp_path))
    assert equal(load(reader(tmp_path)), state(1))


def test_save_and_load_take_the_settings_of_writer_and_reader(tmp_path: Path) -> None:
    saved = nvme_ops.dcp.save(state(1), tmp_path, durable=False)
    assert isinstance(saved, Metadata)
    found = state(2)
    nvme_ops.dcp.load(found, tmp_path, verify=True, handle=aio_handle())
    assert equal(found, state(1))
    with pytest.raises(dcp.CheckpointException, match="FileExistsError"):
        nvme_ops.dcp.save(state(2), tmp_path, overwrite=False)
    assert gc.isenabled()
    nvme_ops.dcp.save(state(2), tmp_path, checksums=False)
    with pytest.raises(dcp.CheckpointException, match="has no checksums to verify"):
        nvme_ops.dcp.load(found, tmp_path, verify=True)
    assert gc.isenabled()


def test_dcps_log_is_written_where_somebody_reads_it(tmp_path: Path) -> None:
    logger = dcp_logger._dcp_logger
    nvme_ops.dcp.save(state(1), tmp_path)
    assert not logger.disabled
    heard: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = heard.append  # type: ignore[method-assign,assignment]
    logger.addHandler(handler)
    try:
        nvme_ops.dcp.save(state(1), tmp_path)
        nvme_ops.dcp.load(state(1), tmp_path)
    finally:
        logger.removeHandler(handler)
    assert {"write_data", "read_data"} <= {record.msg["func_name"] for record in heard if isinstance(record.msg, dict)}


def test_dcps_log_is_not_written_where_nobody_reads_it(tmp_path: Path) -> None:
    """In a process of its own: pytest reads every log."""
    program = """
        import logging, sys, torch
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.logger import _dcp_logger
        import nvme_ops.dcp

        made = []
        _dcp_logger.addFilter(lambda record: made.append(record))
        nvme_ops.dcp.save({"a": torch.ones(3)}, sys.argv[1])
        nvme_ops.dcp.load({"a": torch.zeros(3)}, sys.argv[1])
        print(len(made), _dcp_logger.disabled)
        dcp.load({"a": torch.zeros(3)}, checkpoint_id=sys.argv[1])
        print(len(made) > 0)
    """
    assert run_python(program, tmp_path).stdout.split() == ["0", "False", "True"]


@pytest.mark.parametrize("threads", [1, 3])
def test_files_of_several_threads_of_dcp_are_read(threads: int, tmp_path: Path) -> None:
    dcp.save(state(1), storage_writer=dcp.FileSystemWriter(tmp_path, thread_count=threads))
    assert equal(load(NvmeStorageReader(tmp_path)), state(1))


def test_tensors_of_every_dtype_are_dcps(tmp_path: Path) -> None:
    kinds = {str(kind): kind for kind in vars(torch).values() if isinstance(kind, torch.dtype)}
    data = torch.arange(64, dtype=torch.uint8) % 2
    tensors = {}
    for name, kind in kinds.items():
        if "q" not in name and "bits" not in name and name != "uint1" and kind.itemsize <= 16:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                try:
                    tensors[name] = data.view(kind)
                    torch.save(tensors[name].clone(), io.BytesIO())
                except (RuntimeError, AttributeError, KeyError):  # torch itself cannot
                    tensors.pop(name, None)
    assert len(tensors) > 15
    dcp.save(tensors, storage_writer=NvmeStorageWriter(tmp_path))
    for reader in (NvmeStorageReader, dcp.FileSystemReader):
        found = {name: torch.zeros(64, dtype=torch.uint8).view(tensor.dtype) for name, tensor in tensors.items()}
        dcp.load(found, storage_reader=reader(tmp_path))
        assert all(torch.equal(tensor.view(torch.uint8), data) for tensor in found.values())


def test_another_dtype_and_another_layout_are_filled(tmp_path: Path) -> None:
    tensor = torch.arange(12.0 * 70_000).view(12, 70_000)
    dcp.save({"tensor": tensor}, storage_writer=NvmeStorageWriter(tmp_path))
    found = {"tensor": torch.zeros(70_000, 12, dtype=torch.float64).t()}
    dcp.load(found, storage_reader=NvmeStorageReader(tmp_path, verify=True))
    assert torch.equal(found["tensor"], tensor.double())


def test_the_default_of_dcp_can_be_ours(tmp_path: Path) -> None:
    use_by_default()
    try:
        dcp.save(state(1), checkpoint_id=tmp_path)
        assert b"nvme_ops" in (tmp_path / ".metadata").read_bytes()
        found = state(99)
        dcp.load(found, checkpoint_id=tmp_path)
        assert equal(found, state(1))
        dcp.save(state(2), storage_writer=dcp.FileSystemWriter(tmp_path, True, sync_files=False, thread_count=4))
        assert isinstance(dcp.FileSystemReader(tmp_path), NvmeStorageReader)
    finally:
        use_by_default(False)
    assert not isinstance(dcp.FileSystemReader(tmp_path), NvmeStorageReader)
    assert equal(load(dcp.FileSystemReader(tmp_path)), state(2))


def test_the_metadata_need_no_nvme_ops(tmp_path: Path) -> None:
    class Unpickler(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            assert not module.startswith("nvme_ops")
            return super().find_class(module, name)

    save(tmp_path, 1)
    with (tmp_path / ".metadata").open("rb") as file:
        assert len(Unpickler(file).load().storage_data) == 12


def test_a_damaged_tensor_is_found_by_unzip_too(tmp_path: Path) -> None:
    save(tmp_path, 1)
    metadata: Metadata = pickle.loads((tmp_path / ".metadata").read_bytes())
    content = (tmp_path / "__0_0.distcp").read_bytes()
    for index, info in metadata.storage_data.items():
        archive = zipfile.ZipFile(io.BytesIO(content[info.offset : info.offset + info.length]))
        assert archive.testzip() is None, index


def test_an_archive_of_more_than_4_gib_is_one(folder: Path) -> None:
    shape, path = (5 << 30,), folder / "sparse"
    head, tail = frame.frame(torch.uint8, shape, 0).around(zlib.crc32(b""))
    with path.open("wb") as file:
        file.write(head)
        file.seek(shape[0], os.SEEK_CUR)
        file.write(tail)
    assert zipfile.ZipFile(path).getinfo("archive/data/0").file_size == shape[0]
    tensor = torch.load(path, mmap=True, weights_only=True)
    assert tuple(tensor.shape) == shape
    assert tensor[-1] == 0


def test_tensors_on_an_accelerator_are_saved_and_filled(tmp_path: Path) -> None:
    if torch.cuda.is_available() or (hasattr(torch, "accelerator") and torch.accelerator.is_available()):
        pytest.skip("torch has a real accelerator, and only one can page-lock memory in a process")
    expected = {"small": torch.randn(5), "large": torch.randn(3 * MIB), "wide": torch.randn(1100, 1000)}

    def body() -> None:  # in a process of its own: torch takes the device for an accelerator from then on
        device = private_device()
        with device.pinned_memory(True):
            tensors = {name: device.tensor(tensor) for name, tensor in expected.items()}
            dcp.save(tensors, storage_writer=NvmeStorageWriter(tmp_path))
            found = {name: device.tensor(torch.zeros(tensor.shape)) for name, tensor in expected.items()}
            dcp.load(found, storage_reader=NvmeStorageReader(tmp_path, verify=True))
            assert all(torch.equal(found[name].cpu(), tensor) for name, tensor in expected.items())

    in_child(body)


@needs_fork
def test_little_memory_is_used_beside_the_tensors(tmp_path: Path) -> None:
    def most(work: Callable[[], object]) -> int:
        def status(name: str) -> int:
            lines = Path("/proc/self/status").read_text().splitlines()
            return next(int(line.split()[1]) for line in lines if line.startswith(name))

        Path("/proc/self/clear_refs").write_text("5")  # the peak is the present from here on
        before = status("VmRSS")
        work()
        return (status("VmHWM") - before) * 1024

    def body() -> None:
        state = {"whole": torch.ones(40 * MIB), "turned": torch.ones(4096, 5120).t(), "gone": torch.ones(MIB)}
        state |= {f"small{number}": torch.ones(1000) for number in range(500)}
        dcp.save({"a": state["gone"]}, storage_writer=NvmeStorageWriter(tmp_path))
        assert most(lambda: dcp.save(state, storage_writer=NvmeStorageWriter(tmp_path))) <= 64 * MIB
        for verify in (False, True):
            reader = NvmeStorageReader(tmp_path, verify=verify)
            assert most(lambda reader=reader: dcp.load(state, storage_reader=reader)) <= 64 * MIB  # type: ignore[misc]

    in_child(body)


# Saving in the background


@pytest.fixture
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A process group of this process alone."""
    store = tmp_path_factory.mktemp("store") / "file"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("kept", [False, True], ids=["fresh-memory", "kept-memory"])
def test_async_save_saves_what_there_was(group: None, kept: bool, tmp_path: Path) -> None:
    if kept and not torch.cuda.is_available():
        pytest.skip("torch keeps the copies in page-locked memory, which needs an accelerator")
    values = state(1)
    writer = NvmeStorageWriter(tmp_path, cache_staged_state_dict=kept)
    future: Any = dcp.async_save(values, storage_writer=writer)
    values["model"]["large"].zero_()
    future.result()
    assert equal(load(NvmeStorageReader(tmp_path, verify=True)), state(1))


def test_async_save_tells_what_went_wrong(group: None, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    future: Any = dcp.async_save(state(1), storage_writer=NvmeStorageWriter(tmp_path / "file"))
    with pytest.raises(dcp.CheckpointException, match="FileExistsError"):
        future.result()


def test_async_saves_of_one_folder_come_one_after_the_other(group: None, tmp_path: Path) -> None:
    writers = [NvmeStorageWriter(tmp_path, durable=False) for _ in range(4)]
    futures: list[Any] = [dcp.async_save(state(seed), storage_writer=each) for seed, each in enumerate(writers)]
    for future in futures:
        future.result()
    found = load(NvmeStorageReader(tmp_path, verify=True))
    assert equal(found, state(found["step"]))
    assert len(files(tmp_path)) == 2


def test_async_save_in_a_process(group: None, tmp_path: Path) -> None:
    try:
        from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
    except ImportError:
        pytest.skip("this torch saves in threads alone")
    values = state(1)
    future: Any = dcp.async_save(
        values, storage_writer=NvmeStorageWriter(tmp_path), async_checkpointer_type=AsyncCheckpointerType.PROCESS
    )
    values["model"]["large"].zero_()
    future.result()
    assert equal(load(NvmeStorageReader(tmp_path, verify=True)), state(1))


def test_the_writer_goes_to_a_process_that_saves(tmp_path: Path) -> None:
    writer = pickle.loads(pickle.dumps(NvmeStorageWriter(tmp_path, handle=aio_handle(), checksums=False)))
    dcp.save(state(1), storage_writer=writer)
    assert equal(load(NvmeStorageReader(tmp_path)), state(1))


# Several ranks


@pytest.fixture(scope="module")
def saved_on_two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("job")
    run_ranks(2, "tests.dcp.job", "save", path, TMPDIR=str(path))
    return path


def test_two_ranks_save_and_one_process_loads(saved_on_two: Path) -> None:
    from tests.dcp.job import reference

    for name, seed in (("ours", 1), ("theirs", 2), ("asynchronous", 3)):
        for reader in (NvmeStorageReader(saved_on_two / name), dcp.FileSystemReader(saved_on_two / name)):
            found = reference(99)
            dcp.load(found, storage_reader=reader)
            assert equal(found, reference(seed))


def test_one_process_saves_and_two_ranks_load(tmp_path: Path) -> None:
    from tests.dcp.job import reference

    dcp.save(reference(5), storage_writer=NvmeStorageWriter(tmp_path / "one"))
    run_ranks(2, "tests.dcp.job", "reshard", tmp_path, TMPDIR=str(tmp_path))
    found = {"rows": torch.zeros_like(reference(6)["rows"])}
    for reader in (NvmeStorageReader(tmp_path / "shards", verify=True), dcp.FileSystemReader(tmp_path / "shards")):
        dcp.load(found, storage_reader=reader)
        assert torch.equal(found["rows"], reference(6)["rows"])


@pytest.mark.slow
def test_the_error_of_one_rank_reaches_all(saved_on_two: Path) -> None:
    for rank in range(2):
        assert (saved_on_two / f"failed-{rank}.json").read_text() == '{"1": "OSError"}'


@pytest.mark.slow
def test_two_ranks_save_and_three_load(saved_on_two: Path) -> None:
    run_ranks(3, "tests.dcp.job", "load", saved_on_two, TMPDIR=str(saved_on_two))
