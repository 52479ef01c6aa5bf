"""nvme_ops.dcp: DCP's files both ways, in one process, in the background and on several ranks."""

from __future__ import annotations

import functools
import gc
import io
import logging
import pickle
import pickletools
import re
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata

import nvme_ops
from nvme_ops import aio_handle
from nvme_ops.checkpoint.cli import main
from nvme_ops.dcp import NvmeStorageReader, NvmeStorageWriter, use_by_default
from tests.checkpoint.torch_files import storable
from tests.conftest import MIB, in_child, run_python
from tests.dcp.job import reference
from tests.dcp.states import equal, files, load, save, state
from tests.doubles import private_device
from tests.launch import run_ranks

pytestmark = pytest.mark.filterwarnings("ignore:.*(torch.distributed is disabled|Detected an existing checkpoint)")


# Both ways


@pytest.mark.parametrize(
    ("writer", "reader"),
    [
        (NvmeStorageWriter, dcp.FileSystemReader),
        (dcp.FileSystemWriter, NvmeStorageReader),
        (functools.partial(dcp.FileSystemWriter, thread_count=3), NvmeStorageReader),
    ],
)
def test_what_either_writer_wrote_either_reader_reads(writer: Any, reader: Any, tmp_path: Path) -> None:
    path = tmp_path / "run" / "step 1"  # which the writer makes
    dcp.save(state(1), storage_writer=writer(path))
    assert equal(load(reader(path)), state(1))
    data = torch.arange(64, dtype=torch.uint8) % 2
    tensors = {str(kind): data.view(kind) for kind in storable() if not re.search("q|bits", str(kind))}
    assert len(tensors) > 15
    dcp.save(tensors, storage_writer=writer(tmp_path))
    loaded = {name: torch.zeros(64, dtype=torch.uint8).view(tensor.dtype) for name, tensor in tensors.items()}
    dcp.load(loaded, storage_reader=reader(tmp_path))
    assert all(torch.equal(tensor.view(torch.uint8), data) for tensor in loaded.values())


def test_save_and_load_take_the_settings_of_writer_and_reader(tmp_path: Path) -> None:
    assert isinstance(nvme_ops.dcp.save(state(1), tmp_path, durable=False), Metadata)
    loaded = state(2)
    nvme_ops.dcp.load(loaded, tmp_path, verify=True, handle=aio_handle())
    assert equal(loaded, state(1))
    with pytest.raises(dcp.CheckpointException, match="FileExistsError"):
        nvme_ops.dcp.save(state(2), tmp_path, overwrite=False)
    assert equal(load(NvmeStorageReader(tmp_path)), state(1))
    nvme_ops.dcp.save(state(2), tmp_path, checksums=False)
    dcp.save(state(2), storage_writer=dcp.FileSystemWriter(tmp_path / "theirs"))
    for path in (tmp_path, tmp_path / "theirs"):
        with pytest.raises(dcp.CheckpointException, match="has no checksums to verify"):
            nvme_ops.dcp.load(loaded, path, verify=True)
    assert gc.isenabled()


def test_dcps_log_is_written_where_somebody_reads_it(tmp_path: Path) -> None:
    """In a process of its own: pytest reads every log."""
    program = """
        import logging, sys, torch
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.logger import _dcp_logger
        import nvme_ops.dcp

        made, heard, handler = [], [], logging.Handler()
        handler.emit = heard.append
        _dcp_logger.addFilter(lambda record: made.append(record) or True)
        nvme_ops.dcp.save({"a": torch.ones(3)}, sys.argv[1])
        print(len(made), _dcp_logger.disabled)
        _dcp_logger.addHandler(handler)
        nvme_ops.dcp.save({"a": torch.ones(3)}, sys.argv[1])
        nvme_ops.dcp.load({"a": torch.zeros(3)}, sys.argv[1])
        print({"write_data", "read_data"} <= {each.msg["func_name"] for each in heard if isinstance(each.msg, dict)})
    """
    assert run_python(program, tmp_path).stdout.split() == ["0", "False", "True"]


def test_the_default_of_dcp_can_be_ours(tmp_path: Path) -> None:
    more: Any = object()
    use_by_default()
    try:
        dcp.save(state(1), checkpoint_id=tmp_path)
        assert b"nvme_ops" in (tmp_path / ".metadata").read_bytes()
        loaded = state(99)
        dcp.load(loaded, checkpoint_id=tmp_path)
        assert equal(loaded, state(1))
        dcp.save(state(2), storage_writer=dcp.FileSystemWriter(tmp_path, True, sync_files=False, thread_count=4))
        assert isinstance(dcp.FileSystemReader(tmp_path), NvmeStorageReader)
        try:  # more than we have
            theirs = (
                dcp.FileSystemWriter(tmp_path, _extensions=[more]),
                dcp.FileSystemReader(tmp_path, _extension_registry=more),
            )
        except TypeError:
            theirs = None  # this torch has no extensions
    finally:
        use_by_default(False)
    assert not isinstance(dcp.FileSystemReader(tmp_path), NvmeStorageReader)
    assert equal(load(dcp.FileSystemReader(tmp_path)), state(2))
    assert theirs is None or tuple(map(type, theirs)) == (dcp.FileSystemWriter, dcp.FileSystemReader)


def test_tensors_on_an_accelerator_are_saved_and_filled(tmp_path: Path) -> None:
    if torch.cuda.is_available() or (hasattr(torch, "accelerator") and torch.accelerator.is_available()):
        pytest.skip("torch has a real accelerator, and only one can page-lock memory in a process")
    expected = {"small": torch.randn(5), "large": torch.randn(3 * MIB), "wide": torch.randn(1100, 1000)}

    def body() -> None:  # in a process of its own: torch takes the device for an accelerator from then on
        device = private_device()
        with device.pinned_memory(True):
            tensors = {name: device.tensor(tensor) for name, tensor in expected.items()}
            dcp.save(tensors, storage_writer=NvmeStorageWriter(tmp_path))
            loaded = {name: device.tensor(torch.zeros(tensor.shape)) for name, tensor in expected.items()}
            dcp.load(loaded, storage_reader=NvmeStorageReader(tmp_path, verify=True))
            assert all(torch.equal(loaded[name].cpu(), tensor) for name, tensor in expected.items())

    in_child(body)


# In the background, and in a group


@pytest.fixture
def group() -> Iterator[None]:
    """A process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_async_save_saves_what_there_was(group: None, tmp_path: Path) -> None:
    from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

    for kept in (False, True) if torch.cuda.is_available() else (False,):  # torch keeps copies in page-locked memory
        values = state(1)
        writer = NvmeStorageWriter(tmp_path, cache_staged_state_dict=kept)
        future: Any = dcp.async_save(values, storage_writer=writer)
        values["model"]["large"].zero_()
        future.result()
        assert equal(load(NvmeStorageReader(tmp_path, verify=True)), state(1))
    tensor = distribute_tensor(torch.ones(4, 4), init_device_mesh("cpu", (1,)), [Shard(0)])
    with pytest.raises(ValueError, match=r"'a' is a DTensor, .*full_tensor\(\).*nvme_ops\.dcp"):
        nvme_ops.save({"a": tensor}, tmp_path / "model.safetensors")


def test_async_saves_of_one_folder_come_one_after_the_other(group: None, tmp_path: Path) -> None:
    writers = [NvmeStorageWriter(tmp_path, durable=False) for _ in range(4)]
    futures: list[Any] = [dcp.async_save(state(seed), storage_writer=writer) for seed, writer in enumerate(writers)]
    for future in futures:
        future.result()
    loaded = load(NvmeStorageReader(tmp_path, verify=True))
    assert equal(loaded, state(loaded["step"]))
    assert len(files(tmp_path)) == 2


def test_a_writer_and_a_reader_go_to_another_process(tmp_path: Path) -> None:
    """What they hold of this process stays here; the files need no nvme_ops, and each item is an archive."""
    writer = NvmeStorageWriter(tmp_path, handle=aio_handle())
    reader = NvmeStorageReader(tmp_path, handle=aio_handle(), verify=True)
    save(tmp_path, 1)
    reader.read_metadata()
    assert equal(load(pickle.loads(pickle.dumps(reader))), state(1))
    dcp.save(state(2), storage_writer=pickle.loads(pickle.dumps(writer)))
    assert equal(load(reader), state(2))
    content = (tmp_path / ".metadata").read_bytes()
    assert {opcode[1] for opcode in pickletools.genops(content) if "nvme_ops" in str(opcode[1])} == {"nvme_ops"}
    for index, info in pickle.loads(content).storage_data.items():
        with (tmp_path / info.relative_path).open("rb") as file:
            file.seek(info.offset)
            assert zipfile.ZipFile(io.BytesIO(file.read(info.length))).testzip() is None, index


# Several ranks


@pytest.fixture(scope="module")
def saved_on_two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("job")
    run_ranks(2, "tests.dcp.job", "save", path)
    return path


def test_two_ranks_save_and_one_process_loads(saved_on_two: Path) -> None:
    for name, seed in (("ours", 1), ("asynchronous", 3)):
        for reader in (NvmeStorageReader(saved_on_two / name), dcp.FileSystemReader(saved_on_two / name)):
            loaded = reference(99)
            dcp.load(loaded, storage_reader=reader)
            assert equal(loaded, reference(seed))
    for rank in range(2):  # the error of one reaches all
        assert (saved_on_two / f"failed-{rank}.json").read_text() == '{"1": "OSError"}'


def test_a_checkpoint_of_two_ranks_becomes_a_file(saved_on_two: Path, tmp_path: Path) -> None:
    """By rows from our writer, by columns from torch's."""
    tensors, target = torch.load(saved_on_two / "fsdp.pt"), tmp_path / "target.safetensors"
    rows = {path.removeprefix("model/"): tensors[path] for path in tensors if path.startswith("model/")}
    columns = {key: value for key, value in reference(3).items() if isinstance(value, torch.Tensor)}
    for name, expected in (("fsdp", rows), ("columns", columns)):
        assert main(["convert", str(saved_on_two / name), str(target), "--key", "model"]) == 0
        assert equal(nvme_ops.load(target), expected)


def test_two_ranks_save_and_three_load(saved_on_two: Path) -> None:
    dcp.save(reference(5), storage_writer=NvmeStorageWriter(saved_on_two / "one"))
    run_ranks(3, "tests.dcp.job", "load", saved_on_two)


# The lines of docs/dcp.md by which accelerate and transformers save through nvme_ops


def test_accelerate_saves_a_state_through_nvme_ops(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")
    monkeypatch.setattr("accelerate.utils.other.safe_save_file", nvme_ops.save)
    logging.disable()
    accelerator = accelerate.Accelerator(cpu=True)
    model = accelerator.prepare(torch.nn.Linear(5, 6))
    before = model.weight.detach().clone()
    accelerator.save_state(str(tmp_path / "state"))
    assert b"nvme_ops.crc32c" in (tmp_path / "state" / "model.safetensors").read_bytes()
    torch.nn.init.zeros_(model.weight)
    accelerator.load_state(str(tmp_path / "state"))
    assert torch.equal(model.weight, before)
    logging.disable(logging.NOTSET)
