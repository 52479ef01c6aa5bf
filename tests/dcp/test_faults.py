"""nvme_ops.dcp: what is kept when a save fails, what is found out when files are damaged or change under a load."""

from __future__ import annotations

import enum
import errno
import fcntl
import gc
import inspect
import os
import pickle
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata

from nvme_ops import aio_handle
from nvme_ops.base.errors import ChecksumError, FormatError
from nvme_ops.checkpoint.contents import contents
from nvme_ops.checkpoint.dcp import folder as dcp_folder
from nvme_ops.checkpoint.dcp.folder import Reading
from nvme_ops.dcp import NvmeStorageReader, NvmeStorageWriter
from tests.conftest import MIB
from tests.contract.faulty import flip
from tests.dcp.states import equal, files, load, save, state, why, why_of

pytestmark = pytest.mark.filterwarnings("ignore:.*(torch.distributed is disabled|Detected an existing checkpoint)")


class PlannerError(Exception):
    """What a planner of these tests raises."""


@pytest.fixture
def nothing_left_open(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Fails where a test leaves a descriptor open."""
    place = tmp_path_factory.mktemp("first")  # the handle of the process keeps its own
    save(place, 0)
    load(NvmeStorageReader(place))
    before = len(os.listdir("/proc/self/fd"))
    yield
    gc.collect()  # an exception keeps what it went through
    assert len(os.listdir("/proc/self/fd")) <= before


# The old checkpoint or the new one


def test_a_new_checkpoint_replaces_the_old_one_and_its_files(tmp_path: Path) -> None:
    """Also with planners that keep their plans, and with them the old name."""
    cached = "enable_plan_caching" in inspect.signature(dcp.DefaultSavePlanner).parameters
    for seed in range(4):
        planner: Any = dcp.DefaultSavePlanner(enable_plan_caching=True) if cached and seed else None
        dcp.save(state(seed), storage_writer=NvmeStorageWriter(tmp_path), planner=planner)
        assert files(tmp_path) == [".metadata", f"__0_{seed}.distcp"]
        assert equal(load(dcp.FileSystemReader(tmp_path)), state(seed))


def test_ranks_that_save_alone_keep_each_others_files(tmp_path: Path) -> None:
    if "use_collectives" not in inspect.signature(dcp.save).parameters:
        pytest.skip("ranks of this torch save together")
    (tmp_path / "__1_0.distcp").touch()
    for seed in range(2):
        dcp.save(state(seed), storage_writer=NvmeStorageWriter(tmp_path), use_collectives=False)
    assert files(tmp_path) == ["__0.metadata", "__0_1.distcp", "__1_0.distcp"]
    assert equal(load(NvmeStorageReader(tmp_path)), state(1))


class SavePlanner(dcp.DefaultSavePlanner):
    def __init__(self, good: int) -> None:
        super().__init__()
        self.good = good

    def resolve_data(self, write_item: Any) -> Any:
        self.good -= 1
        if self.good < 0:
            raise PlannerError(write_item.index.fqn)
        return super().resolve_data(write_item)


@pytest.mark.parametrize("good", [0, 11])
def test_a_save_that_fails_leaves_the_old_checkpoint_and_holds_up_no_other(good: int, tmp_path: Path) -> None:
    class Unsaveable:
        def __reduce__(self) -> str:
            raise ValueError("not to be saved")

    save(tmp_path, 1)
    writer, other = NvmeStorageWriter(tmp_path), NvmeStorageWriter(tmp_path)  # which live on
    error = why_of(lambda: dcp.save(state(2), storage_writer=writer, planner=SavePlanner(good)))
    assert type(error) is PlannerError
    why_of(lambda: dcp.save({"a": Unsaveable()}, storage_writer=other))
    assert [path.name for path in tmp_path.glob("*.distcp")] == ["__0_0.distcp"]
    assert equal(load(NvmeStorageReader(tmp_path, verify=True)), state(1))
    save(tmp_path, 3)
    assert equal(load(NvmeStorageReader(tmp_path, verify=True)), state(3))
    assert files(tmp_path) == [".metadata", "__0_1.distcp"]


def test_a_sparse_tensor_is_refused(tmp_path: Path) -> None:
    """DCP's planners load nothing to one, and say nothing of it."""
    tensors = {"dense": torch.ones(3), "thin": torch.eye(3).to_sparse()}
    error = why_of(lambda: dcp.save(tensors, storage_writer=NvmeStorageWriter(tmp_path)))
    assert isinstance(error, ValueError)
    assert "'thin'" in str(error)
    assert list(tmp_path.glob("*.distcp")) == []


# Others at the same folder


def test_a_save_leaves_the_files_that_are_being_read(tmp_path: Path) -> None:
    save(tmp_path, 1)
    reading = Reading(str(tmp_path / ".metadata"))
    for seed in (2, 3):
        save(tmp_path, seed)
    assert {info.relative_path for info in reading.metadata.storage_data.values()} <= set(files(tmp_path))
    reading.close()
    before = len(os.listdir("/proc/self/fd"))
    reader = NvmeStorageReader(tmp_path)
    for _ in range(2):
        reader.read_metadata()
    del reader
    assert len(os.listdir("/proc/self/fd")) == before
    save(tmp_path, 4)
    assert len(files(tmp_path)) == 2


def test_a_checkpoint_that_came_while_waiting_is_not_replaced(tmp_path: Path) -> None:
    writer = NvmeStorageWriter(tmp_path, overwrite=False)
    writer.set_up_storage_writer(True)
    save(tmp_path, 1)
    with pytest.raises(FileExistsError):
        writer.prepare_global_plan([])
    save(tmp_path, 2)


def test_ranks_that_found_different_checkpoints_are_told(tmp_path: Path) -> None:
    plans = []
    for seed in (1, 2):
        save(tmp_path, seed)
        reader = NvmeStorageReader(tmp_path)
        reader.set_up_storage_reader(reader.read_metadata(), True)
        plans.append(reader.prepare_local_plan(dcp.LoadPlan([])))
    with pytest.raises(ValueError, match="a save replaced the checkpoint while ranks opened it"):
        reader.prepare_global_plan(plans)
    assert reader.prepare_global_plan(plans[1:]) == plans[1:]


def test_a_file_system_without_locks_or_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.ENOLCK, "no locks here")

    monkeypatch.setattr(fcntl, "flock", refuse)
    for seed in range(3):
        if seed == 2:
            monkeypatch.setattr(os, "link", refuse)
        save(tmp_path, seed)
        assert equal(load(NvmeStorageReader(tmp_path)), state(seed))
        assert files(tmp_path) == [".metadata", f"__0_{seed}.distcp"]


# Loads that fail


class LoadPlanner(dcp.DefaultLoadPlanner):
    """Does something at each step, and has parts of tensors filled."""

    def __init__(self, act: Callable[[str], object], part: Any = ...) -> None:
        super().__init__()
        self.act, self.part = act, part

    def resolve_tensor(self, read_item: Any) -> Any:
        self.act("resolve_tensor")
        return super().resolve_tensor(read_item)[self.part]

    def commit_tensor(self, read_item: Any, tensor: torch.Tensor) -> None:
        self.act("commit_tensor")
        super().commit_tensor(read_item, tensor)

    def load_bytes(self, read_item: Any, value: Any) -> None:
        self.act("load_bytes")
        super().load_bytes(read_item, value)


@pytest.mark.usefixtures("nothing_left_open")
@pytest.mark.parametrize(
    ("step", "group"), [("resolve_tensor", 1), ("commit_tensor", 256 * MIB), ("commit_tensor", 1), ("load_bytes", 1)]
)
def test_a_planner_that_raises_in_a_load(step: str, group: int, tmp_path: Path, monkeypatch: Any) -> None:
    def act(done: str) -> None:
        if done == step and next(good, None) is None:
            raise PlannerError

    monkeypatch.setattr("nvme_ops.checkpoint.dcp.reader._GROUP", group)
    save(tmp_path, 1)
    reader = NvmeStorageReader(tmp_path, verify=True, handle=aio_handle())
    for count in (0, 1):
        good = iter(range(count))
        error = why_of(lambda: dcp.load(state(99), storage_reader=reader, planner=LoadPlanner(act)))
        assert type(error) is PlannerError
    assert equal(load(reader), state(1))
    target = state(99)
    error = why_of(lambda: dcp.load(target, storage_reader=reader, planner=LoadPlanner(str, slice(2))))
    assert isinstance(error, ValueError)
    assert re.search(r"'model\.\w+': \(", str(error)), error


class Meanwhile(NvmeStorageReader):
    """Calls ``change`` when the metadata have been read."""

    def __init__(self, path: Path, change: Callable[[Path], object]) -> None:
        super().__init__(path, verify=True)
        self.change, self.place = change, path

    def prepare_global_plan(self, plans: list[dcp.LoadPlan]) -> list[dcp.LoadPlan]:
        self.change(self.place)
        return super().prepare_global_plan(plans)


def data_file(path: Path) -> Path:
    (file,) = path.glob("*.distcp")
    return file


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        (lambda file: os.truncate(file, file.stat().st_size - 1), FormatError),
        (Path.unlink, FileNotFoundError),
        (lambda file: file.write_bytes(bytes(file.stat().st_size)), ChecksumError),
    ],
    ids=["cut", "gone", "others"],
)
def test_a_file_that_changes_after_the_metadata_were_read(change: Any, kind: Any, tmp_path: Path) -> None:
    save(tmp_path, 1)
    error = why(Meanwhile(tmp_path, lambda path: change(data_file(path))))
    assert isinstance(error, kind)
    assert str(tmp_path) in str(error)


@pytest.mark.usefixtures("nothing_left_open")
@pytest.mark.parametrize(("verify", "turned"), [(False, False), (True, True)])
def test_a_file_that_is_cut_during_the_reads(verify: bool, turned: bool, tmp_path: Path) -> None:
    dcp.save({"a": torch.ones(3 * MIB // 4, 4), "b": torch.ones(9)}, storage_writer=NvmeStorageWriter(tmp_path))
    target = {"a": torch.zeros(4, 3 * MIB // 4).t() if turned else torch.zeros(3 * MIB // 4, 4), "b": torch.zeros(9)}
    planner = LoadPlanner(lambda _: os.truncate(data_file(tmp_path), 5000))
    reader = NvmeStorageReader(tmp_path, verify=verify)
    error = why_of(lambda: dcp.load(target, storage_reader=reader, planner=planner))
    assert isinstance(error, EOFError)
    assert str(data_file(tmp_path)) in str(error)


# Damage


def test_a_flipped_bit_anywhere_in_an_item_is_found(tmp_path: Path) -> None:
    save(tmp_path, 1)
    metadata: Metadata = pickle.loads((tmp_path / ".metadata").read_bytes())
    for number, (index, info) in enumerate(metadata.storage_data.items()):
        if index.fqn == "model.empty":  # DCP asks for none of it
            continue
        place = info.offset + (0, info.length // 2, info.length - 1)[number % 3]
        flip(tmp_path / info.relative_path, place)
        error = why(NvmeStorageReader(tmp_path, verify=True))
        assert isinstance(error, ChecksumError)
        assert error.tensors == [index.fqn]
        flip(tmp_path / info.relative_path, place)
    assert equal(load(NvmeStorageReader(tmp_path, verify=True)), state(1))


def test_metadata_cut_anywhere_are_the_same_or_an_error(tmp_path: Path) -> None:
    dcp.save({"a": torch.arange(5.0)}, storage_writer=NvmeStorageWriter(tmp_path))
    content = (tmp_path / ".metadata").read_bytes()
    loaded = set()
    rest = range(len(content) - 27, len(content) + 1)
    for size in (*range(0, rest.start, 40), *rest):
        (tmp_path / ".metadata").write_bytes(content[:size])
        target = {"a": torch.zeros(5)}
        try:
            dcp.load(target, storage_reader=NvmeStorageReader(tmp_path))
        except dcp.CheckpointException:
            continue
        assert torch.equal(target["a"], torch.arange(5.0))
        loaded.add(size)
    assert loaded == set(range(len(content) - len("\nnvme_ops.crc32c=00000000\n"), len(content) + 1))
    (tmp_path / ".metadata").write_bytes(pickle.dumps({"a": 1}))
    assert ".metadata" in str(why(NvmeStorageReader(tmp_path)))


# Metadata of other versions, and such that contradict each other


def change_metadata(path: Path, change: Callable[[Metadata], object]) -> None:
    with (path / ".metadata").open("rb") as file:
        metadata = dcp_folder.read_metadata(str(path), file.fileno())
    change(metadata)
    (path / ".metadata").write_bytes(dcp_folder.metadata_bytes(metadata))


def later(metadata: Metadata) -> None:
    for info in metadata.storage_data.values():
        info.nvme_ops["later"] = {"a": 1}


class OtherPickler(pickle.Pickler):
    """Pickles members of an enumeration as some versions of Python do."""

    def reducer_override(self, obj: Any) -> Any:
        return (getattr, (type(obj), obj.name)) if isinstance(obj, enum.Enum) else NotImplemented


def test_metadata_of_other_versions_are_read(tmp_path: Path) -> None:
    save(tmp_path, 1)
    items = contents(tmp_path).items
    for change in (
        later,
        lambda metadata: setattr(metadata, "version", "999"),
        lambda metadata: metadata.__dict__.pop("version", None),
        lambda metadata: metadata.__dict__.pop("storage_meta", None),
    ):
        change_metadata(tmp_path, change)
        assert equal(load(NvmeStorageReader(tmp_path, verify=True)), state(1))
    metadata = pickle.loads((tmp_path / ".metadata").read_bytes())
    with (tmp_path / ".metadata").open("wb") as file:
        OtherPickler(file).dump(metadata)
    assert b"getattr" in (tmp_path / ".metadata").read_bytes()
    assert contents(tmp_path).items == items
    assert equal(load(NvmeStorageReader(tmp_path)), state(1))


def lie(name: str, value: Any) -> Callable[[Metadata], object]:
    def change(metadata: Metadata) -> None:
        (info,) = [info for index, info in metadata.storage_data.items() if index.fqn == "a"]
        if name == "data":
            info.nvme_ops["data"] = value
        else:
            setattr(info, name, value)

    return change


def larger_chunk(metadata: Metadata) -> None:
    metadata.state_dict_metadata["a"].chunks[0].sizes = torch.Size([4000, 4])  # type: ignore[union-attr]
    metadata.state_dict_metadata["a"].size = torch.Size([4000, 4])  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lie("data", 1 << 20), "48 bytes of data do not fit"),
        (lie("data", -1), "48 bytes of data do not fit"),
        (lie("offset", -1), "from byte -1 on"),
        (lie("length", -1), "-1 bytes from byte"),
        (lie("length", 1 << 40), "1099511627776 bytes from byte"),
        (larger_chunk, "64000 bytes of data do not fit"),
    ],
    ids=["beyond", "before", "offset", "length", "long", "chunk"],
)
def test_metadata_that_contradict_each_other_are_an_error(change: Any, words: str, tmp_path: Path) -> None:
    dcp.save({"a": torch.ones(3, 4), "b": torch.ones(7)}, storage_writer=NvmeStorageWriter(tmp_path))
    change_metadata(tmp_path, change)
    target = {"a": torch.zeros((4000, 4) if change is larger_chunk else (3, 4)), "b": torch.zeros(7)}
    error = why_of(lambda: dcp.load(target, storage_reader=NvmeStorageReader(tmp_path)))
    assert isinstance(error, FormatError)
    assert words in str(error)
    assert "'a'" in str(error)
    assert not target["b"].any()


def test_contradictions_are_told_to_who_looks(tmp_path: Path) -> None:
    for change, words in (
        (lie("relative_path", "../other/__0_0.distcp"), "is not in the folder"),
        (lambda metadata: metadata.state_dict_metadata.pop("a"), "its parts contradict each other"),
    ):
        dcp.save({"a": torch.ones(3, 4)}, storage_writer=NvmeStorageWriter(tmp_path))
        change_metadata(tmp_path, change)
        with pytest.raises(FormatError, match=words):
            contents(tmp_path)
