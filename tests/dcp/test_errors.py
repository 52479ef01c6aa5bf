"""nvme_ops.dcp where planners raise, files change under a load, metadata contradict each other, locks are missing."""

from __future__ import annotations

import enum
import fcntl
import gc
import os
import pickle
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata

from nvme_ops import aio_handle
from nvme_ops._native import native
from nvme_ops.checkpoint.dcp import folder as dcp_folder
from nvme_ops.dcp import NvmeStorageReader, NvmeStorageWriter, use_by_default
from nvme_ops.errors import ChecksumError, FormatError
from nvme_ops.inspection.contents import contents
from tests.conftest import MIB, give_up_root, in_child, open_to_all
from tests.dcp.states import equal, files, load, needs_fork, save, state, why, why_of

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


# Planners that raise


class SavePlanner(dcp.DefaultSavePlanner):
    def __init__(self, good: int) -> None:
        super().__init__()
        self.good = good

    def resolve_data(self, write_item: Any) -> Any:
        self.good -= 1
        if self.good < 0:
            raise PlannerError(write_item.index.fqn)
        return super().resolve_data(write_item)


@pytest.mark.parametrize("good", [0, 1, 5, 11])
def test_a_planner_that_raises_in_a_save_leaves_the_old_checkpoint(good: int, tmp_path: Path) -> None:
    save(tmp_path, 1)
    writer = NvmeStorageWriter(tmp_path)
    error = why_of(lambda: dcp.save(state(2), storage_writer=writer, planner=SavePlanner(good)))
    assert type(error) is PlannerError
    assert [path.name for path in tmp_path.glob("*.distcp")] == ["__0_0.distcp"]
    assert equal(load(NvmeStorageReader(tmp_path, verify=True)), state(1))
    save(tmp_path, 3)
    assert equal(load(NvmeStorageReader(tmp_path, verify=True)), state(3))
    assert files(tmp_path) == [".metadata", "__0_1.distcp"]


class LoadPlanner(dcp.DefaultLoadPlanner):
    def __init__(self, step: str, good: int) -> None:
        super().__init__()
        self.step, self.good = step, good

    def count(self, step: str, item: Any) -> None:
        self.good -= step == self.step
        if self.good < 0:
            raise PlannerError(item.storage_index.fqn)

    def resolve_tensor(self, read_item: Any) -> Any:
        self.count("resolve_tensor", read_item)
        return super().resolve_tensor(read_item)

    def commit_tensor(self, read_item: Any, tensor: torch.Tensor) -> None:
        self.count("commit_tensor", read_item)
        super().commit_tensor(read_item, tensor)

    def load_bytes(self, read_item: Any, value: Any) -> None:
        self.count("load_bytes", read_item)
        super().load_bytes(read_item, value)


@pytest.mark.usefixtures("nothing_left_open")
@pytest.mark.parametrize("group", [1, 256 * MIB], ids=["groups of one", "one group"])
@pytest.mark.parametrize("good", [0, 1])
@pytest.mark.parametrize("step", ["resolve_tensor", "commit_tensor", "load_bytes"])
def test_a_planner_that_raises_in_a_load(
    step: str, good: int, group: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nvme_ops.checkpoint.dcp.reader._GROUP", group)
    save(tmp_path, 1)
    reader = NvmeStorageReader(tmp_path, verify=True, handle=aio_handle())
    error = why_of(lambda: dcp.load(state(99), storage_reader=reader, planner=LoadPlanner(step, good)))
    assert type(error) is PlannerError
    found = state(99)
    dcp.load(found, storage_reader=reader)
    assert equal(found, state(1))


def test_a_planner_with_another_shape_is_told(tmp_path: Path) -> None:
    class Planner(dcp.DefaultLoadPlanner):
        def resolve_tensor(self, read_item: Any) -> Any:
            return super().resolve_tensor(read_item)[:2]

    dcp.save({"a": torch.ones(3, 4)}, storage_writer=NvmeStorageWriter(tmp_path))
    found = {"a": torch.zeros(3, 4)}
    error = why_of(lambda: dcp.load(found, storage_reader=NvmeStorageReader(tmp_path), planner=Planner()))
    assert isinstance(error, ValueError)
    assert "'a': (3, 4) is to be read, and the tensor for it is (2, 4)" in str(error)
    assert not found["a"].any()


# Files that change between the metadata and the data


class Meanwhile(NvmeStorageReader):
    """Calls ``change`` when the metadata have been read."""

    def __init__(self, path: Path, change: Callable[[Path], object], **settings: Any) -> None:
        super().__init__(path, **settings)
        self.change, self.place = change, path

    def prepare_global_plan(self, plans: list[dcp.LoadPlan]) -> list[dcp.LoadPlan]:
        self.change(self.place)
        return super().prepare_global_plan(plans)


def data_file(path: Path) -> Path:
    (found,) = path.glob("*.distcp")
    return found


def grow(path: Path) -> None:
    with data_file(path).open("ab") as file:
        file.write(b"more")


def replace_by_its_like(path: Path) -> None:
    """Another program's file of the same name and size."""
    other = path / "other"
    other.write_bytes(bytes(data_file(path).stat().st_size))
    other.rename(data_file(path))


def cut(path: Path) -> None:
    os.truncate(data_file(path), data_file(path).stat().st_size - 1)


def test_a_file_that_is_cut_after_the_metadata_were_read(tmp_path: Path) -> None:
    save(tmp_path, 1)
    found = state(99)
    error = why_of(lambda: dcp.load(found, storage_reader=Meanwhile(tmp_path, cut)))
    assert isinstance(error, FormatError)
    assert str(data_file(tmp_path)) in str(error)
    assert "it was truncated or replaced" in str(error)
    assert equal(found, state(99))


@pytest.mark.usefixtures("nothing_left_open")
@pytest.mark.parametrize("turned", [False, True], ids=["straight", "through buffers"])
@pytest.mark.parametrize("verify", [False, True])
def test_a_file_that_is_cut_during_the_reads(verify: bool, turned: bool, tmp_path: Path) -> None:
    class Cuts(dcp.DefaultLoadPlanner):
        def resolve_tensor(self, read_item: Any) -> Any:
            os.truncate(data_file(tmp_path), 5000)
            return super().resolve_tensor(read_item)

    dcp.save({"a": torch.ones(3 * MIB // 4, 4), "b": torch.ones(9)}, storage_writer=NvmeStorageWriter(tmp_path))
    found = {"a": torch.zeros(4, 3 * MIB // 4).t() if turned else torch.zeros(3 * MIB // 4, 4), "b": torch.zeros(9)}
    reader = NvmeStorageReader(tmp_path, verify=verify)
    error = why_of(lambda: dcp.load(found, storage_reader=reader, planner=Cuts()))
    assert isinstance(error, EOFError)
    assert str(data_file(tmp_path)) in str(error)


def test_a_file_that_goes_after_the_metadata_were_read(tmp_path: Path) -> None:
    save(tmp_path, 1)
    error = why(Meanwhile(tmp_path, lambda path: data_file(path).unlink()))
    assert isinstance(error, FileNotFoundError)
    assert error.filename == str(tmp_path / "__0_0.distcp")


def test_a_file_that_is_replaced_after_the_metadata_were_read(tmp_path: Path) -> None:
    save(tmp_path, 1)
    error = why(Meanwhile(tmp_path, replace_by_its_like, verify=True))
    assert isinstance(error, ChecksumError)
    assert "model.weight" in error.tensors


def test_a_file_that_is_longer_is_no_matter(tmp_path: Path) -> None:
    save(tmp_path, 1)
    assert equal(load(Meanwhile(tmp_path, grow, verify=True)), state(1))


def test_a_save_of_dcps_own_writer_under_a_load_is_found(tmp_path: Path) -> None:
    """It writes over the files, which nothing can keep."""
    save(tmp_path, 1)
    over = lambda path: dcp.save({"a": torch.ones(MIB)}, storage_writer=dcp.FileSystemWriter(path))  # noqa: E731
    error = why(Meanwhile(tmp_path, over, verify=True))
    assert isinstance(error, FormatError | ChecksumError)


# Metadata


def change_metadata(path: Path, change: Callable[[Metadata], object]) -> None:
    """As another version or a bug would have written them."""
    with (path / ".metadata").open("rb") as file:
        metadata = dcp_folder.read_metadata(str(path), file.fileno())
    change(metadata)
    (path / ".metadata").write_bytes(dcp_folder.written(metadata))


def test_metadata_cut_anywhere_are_the_same_or_an_error(tmp_path: Path) -> None:
    dcp.save({"a": torch.arange(5.0)}, storage_writer=NvmeStorageWriter(tmp_path))
    content = (tmp_path / ".metadata").read_bytes()
    loaded = set()
    for size in range(len(content) + 1):
        (tmp_path / ".metadata").write_bytes(content[:size])
        found = {"a": torch.zeros(5)}
        try:
            dcp.load(found, storage_reader=NvmeStorageReader(tmp_path))
        except dcp.CheckpointException:
            continue
        assert torch.equal(found["a"], torch.arange(5.0))
        loaded.add(size)
    assert loaded == set(range(len(content) - len("\nnvme_ops.crc32c=00000000\n"), len(content) + 1))


def test_metadata_of_other_versions_of_torch_are_read(tmp_path: Path) -> None:
    save(tmp_path, 1)
    for name in ("storage_meta", "version"):
        change_metadata(tmp_path, lambda metadata, name=name: metadata.__dict__.pop(name, None))  # type: ignore[misc]
    assert equal(load(NvmeStorageReader(tmp_path, verify=True)), state(1))
    change_metadata(tmp_path, lambda metadata: setattr(metadata, "version", "999"))
    assert equal(load(NvmeStorageReader(tmp_path, verify=True)), state(1))


def test_what_a_later_version_of_ours_says_more_is_no_matter(tmp_path: Path) -> None:
    def more(metadata: Metadata) -> None:
        for info in metadata.storage_data.values():
            info.nvme_ops["later"] = {"a": 1}

    save(tmp_path, 1)
    change_metadata(tmp_path, more)
    assert equal(load(NvmeStorageReader(tmp_path, verify=True)), state(1))


def lie(name: str, value: Any) -> Callable[[Metadata], object]:
    def change(metadata: Metadata) -> None:
        for index, info in metadata.storage_data.items():
            if index.fqn == "a":
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
        (lie("data", 1 << 20), "48 bytes of data do not fit an item"),
        (lie("data", -1), "48 bytes of data do not fit an item"),
        (lie("offset", -1), "from byte -1 on, by the metadata"),
        (lie("length", -1), "-1 bytes from byte"),
        (lie("length", 1 << 40), "1099511627776 bytes from byte"),
        (larger_chunk, "64000 bytes of data do not fit an item"),
    ],
    ids=["beyond", "before", "offset", "length", "long", "chunk"],
)
def test_metadata_that_contradict_each_other_are_an_error(
    change: Callable[[Metadata], object], words: str, tmp_path: Path
) -> None:
    dcp.save({"a": torch.ones(3, 4), "b": torch.ones(7)}, storage_writer=NvmeStorageWriter(tmp_path))
    change_metadata(tmp_path, change)
    shape = (4000, 4) if change is larger_chunk else (3, 4)
    found = {"a": torch.zeros(shape), "b": torch.zeros(7)}
    error = why_of(lambda: dcp.load(found, storage_reader=NvmeStorageReader(tmp_path)))
    assert isinstance(error, FormatError)
    assert words in str(error)
    assert "'a'" in str(error)
    assert not found["b"].any()


class Runs:
    """A pickle that runs something when it is read."""

    def __reduce__(self) -> Any:
        return os.mkdir, ("ran",)


class Gets:
    """A pickle that takes something from what may be named."""

    def __reduce__(self) -> Any:
        return getattr, (Metadata, "__init__")


class OtherPickler(pickle.Pickler):
    """Pickles members of an enumeration as some versions of Python do."""

    def reducer_override(self, obj: Any) -> Any:
        return (getattr, (type(obj), obj.name)) if isinstance(obj, enum.Enum) else NotImplemented


def test_looking_at_a_checkpoint_runs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for thing in (Runs(), Gets()):
        (tmp_path / ".metadata").write_bytes(pickle.dumps(thing))
        with pytest.raises(FormatError, match="does not belong there"):
            contents(tmp_path)
    assert files(tmp_path) == [".metadata"]


def test_metadata_as_other_versions_of_python_write_them_are_looked_at(tmp_path: Path) -> None:
    save(tmp_path, 1)
    items = contents(tmp_path).items
    metadata = pickle.loads((tmp_path / ".metadata").read_bytes())
    with (tmp_path / ".metadata").open("wb") as file:
        OtherPickler(file).dump(metadata)
    assert b"getattr" in (tmp_path / ".metadata").read_bytes()
    assert contents(tmp_path).items == items
    assert equal(load(NvmeStorageReader(tmp_path)), state(1))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lie("relative_path", "../other/__0_0.distcp"), "does not lie in the folder of the checkpoint"),
        (lambda metadata: metadata.state_dict_metadata.pop("a"), "its parts contradict each other"),
    ],
    ids=["elsewhere", "unknown"],
)
def test_contradictions_are_told_to_who_looks(change: Callable[[Metadata], object], words: str, tmp_path: Path) -> None:
    dcp.save({"a": torch.ones(3, 4)}, storage_writer=NvmeStorageWriter(tmp_path))
    change_metadata(tmp_path, change)
    with pytest.raises(FormatError, match=words):
        contents(tmp_path)


# Rights, locks, links, forks


@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp"])
def test_a_file_that_may_not_be_read_is_named(name: str, tmp_path: Path) -> None:
    open_to_all(tmp_path)
    native()
    save(tmp_path, 1)
    for file in tmp_path.iterdir():
        file.chmod(0 if file.name == name else 0o644)

    def body() -> None:
        give_up_root()
        error = why(NvmeStorageReader(tmp_path))
        if name != ".metadata":  # torch says no more of metadata than that there are none
            assert isinstance(error, PermissionError)
            assert error.filename == str(tmp_path / name)

    in_child(body)


def test_a_folder_that_is_a_file_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert isinstance(why_of(lambda: save(tmp_path / "file", 1)), FileExistsError)
    assert isinstance(why_of(lambda: save(tmp_path / "file" / "below", 1)), NotADirectoryError)
    assert "file/.metadata" in str(why(NvmeStorageReader(tmp_path / "file")))
    assert (tmp_path / "file").read_bytes() == b""


def test_metadata_replaced_before_they_are_locked_are_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock, replaced = fcntl.flock, list[int]()

    def late(fd: Any, operation: int) -> None:
        if operation == fcntl.LOCK_SH and not replaced:
            replaced.append(fd)
            save(tmp_path, 2)
        lock(fd, operation)

    save(tmp_path, 1)
    monkeypatch.setattr(fcntl, "flock", late)
    assert equal(load(NvmeStorageReader(tmp_path, verify=True)), state(2))
    assert replaced


@needs_fork
def test_a_forked_child_saves_and_loads_with_what_it_inherits(tmp_path: Path) -> None:
    handle = aio_handle()
    writer, reader = NvmeStorageWriter(tmp_path, handle=handle), NvmeStorageReader(tmp_path, handle=handle, verify=True)
    dcp.save(state(1), storage_writer=writer)
    reader.read_metadata()  # which keeps the files from now on

    def child() -> None:
        found = state(99)
        dcp.load(found, storage_reader=reader)
        assert equal(found, state(1))
        dcp.save(state(2), storage_writer=writer)
        assert equal(load(NvmeStorageReader(tmp_path)), state(2))

    in_child(child)
    assert "__0_0.distcp" in files(tmp_path)  # this process still reads it
    dcp.save(state(3), storage_writer=writer)
    assert equal(load(reader), state(3))
    save(tmp_path, 4)
    assert files(tmp_path) == [".metadata", "__0_3.distcp"]


def test_a_program_that_asks_for_more_than_we_have_gets_dcps_own(tmp_path: Path) -> None:
    more: Any = object()
    use_by_default()
    try:
        writer = dcp.FileSystemWriter(tmp_path, _extensions=[more])
        reader = dcp.FileSystemReader(tmp_path, _extension_registry=more)
    except TypeError:
        pytest.skip("this torch has no extensions")
    finally:
        use_by_default(False)
    assert type(writer) is dcp.FileSystemWriter
    assert type(reader) is dcp.FileSystemReader


def test_a_checkpoint_that_was_moved_or_copied_is_the_same(tmp_path: Path) -> None:
    save(tmp_path / "one", 1)
    (tmp_path / "one").rename(tmp_path / "two")
    shutil.copytree(tmp_path / "two", tmp_path / "three")
    for name in ("two", "three"):
        assert equal(load(NvmeStorageReader(tmp_path / name, verify=True)), state(1))
