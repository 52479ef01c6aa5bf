"""Files of torch.save, beside torch itself: each reads what the other saved, and to the same objects."""

from __future__ import annotations

import resource
import shutil
import signal
import subprocess
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import nvme_ops
from nvme_ops.checkpoint import new_tensors, torch_load, torch_save
from nvme_ops.formats import torch_zip
from nvme_ops.inspection.contents import compare, contents, damaged
from nvme_ops.storage.publication import opened as opened_for_reading
from tests.checkpoint.torch_files import (
    OBJECTS,
    bytes_read,
    essence,
    mixed_sizes,
    raw,
    saved_by_torch,
    saved_here,
    storable,
    torch_save_content,
    trained,
    views,
    write_zip,
)
from tests.conftest import GIB, MIB, in_child, pattern

load: Any = nvme_ops.load  # takes its options as dictionaries here
IN_A_FOLDER = settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])

pytestmark = pytest.mark.filterwarnings("ignore")  # of torch: quantized and nested tensors, complex halves


@pytest.mark.parametrize("name", OBJECTS)
def test_torch_reads_what_is_saved(name: str, folder: Path) -> None:
    obj = OBJECTS[name]()
    nvme_ops.save(obj, folder / "a.pt")
    for mmap in (False, True):
        assert essence(torch.load(folder / "a.pt", weights_only=True, mmap=mmap)) == essence(obj)


@pytest.mark.parametrize("save", [saved_by_torch, saved_here])
@pytest.mark.parametrize("name", OBJECTS)
def test_loads_to_the_same_object(name: str, save: Any, folder: Path) -> None:
    obj = OBJECTS[name]()
    path = save(folder / "a.pt", obj)
    for options in ({}, {"mmap": True}, {"verify": True}, {"map_location": lambda storage, _: storage}):
        assert essence(load(path, **options)) == essence(obj)


@pytest.mark.parametrize("dtype", storable(), ids=str)
def test_every_dtype_of_torch(dtype: torch.dtype, folder: Path) -> None:
    obj = {"some": pattern(320).view(dtype), "none": torch.empty(0, dtype=torch.uint8).view(dtype)}
    for path in (saved_here(folder / "a.pt", obj), saved_by_torch(folder / "b.pt", obj)):
        for found in (load(path, verify=True), torch.load(path, weights_only=True)):
            assert found["some"].dtype == found["none"].dtype == dtype
            assert raw(found["some"].untyped_storage()) == raw(obj["some"].untyped_storage())


def test_a_storage_by_itself(folder: Path) -> None:
    typed = torch.arange(6.0)._typed_storage()
    for storage, dtype in ((typed, torch.float32), (typed._untyped_storage, torch.uint8)):
        nvme_ops.save({"it": storage, "view": torch.empty(0, dtype=dtype).set_(storage)[1:]}, folder / "a.pt")
        for found in (torch.load(folder / "a.pt", weights_only=True), load(folder / "a.pt")):
            assert isinstance(found["it"], torch.storage.TypedStorage)
            assert found["it"]._untyped_storage._cdata == found["view"].untyped_storage()._cdata


def test_plain_objects_are_made_without_torchs_slow_reader(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = trained()
    obj = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "list": list(model.parameters())}
    path = saved_by_torch(
        folder / "a.pt", {**obj, "more": [torch.ones(3).to(torch.uint16), torch.Size([2]), torch.int8]}
    )
    monkeypatch.setattr(torch.serialization, "_load", lambda *_, **__: pytest.fail("torch read it"))
    assert essence(load(path)["optimizer"]) == essence(obj["optimizer"])


LEAVES = st.one_of(
    st.integers(-(2**80), 2**80), st.text(max_size=5), st.none(), st.booleans(), st.floats(allow_nan=False)
)
TENSORS = st.builds(
    lambda dtype, shape, turn: (
        torch.ones(shape, dtype=dtype).transpose(0, -1) if turn and shape else torch.zeros(shape)
    ),
    st.sampled_from([torch.float32, torch.int8, torch.bfloat16]),
    st.lists(st.integers(0, 4), max_size=3),
    st.booleans(),
)
NESTED = st.recursive(
    LEAVES | TENSORS,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3) | st.integers(0, 9), inner, max_size=3)
    ),
    max_leaves=12,
)


@IN_A_FOLDER
@given(obj=NESTED)
def test_any_nesting(obj: Any, folder: Path) -> None:
    nvme_ops.save(obj, folder / "a.pt", durable=False)
    assert essence(torch.load(folder / "a.pt", weights_only=True)) == essence(obj)
    assert essence(load(folder / "a.pt")) == essence(obj)


# The file


@pytest.fixture
def archive(folder: Path) -> Path:
    return saved_here(folder / "a.pt", {"sizes": mixed_sizes(), "views": views()})


def test_other_unzippers_find_nothing_wrong(archive: Path) -> None:
    with zipfile.ZipFile(archive) as opened:
        assert opened.testzip() is None
        assert opened.namelist()[0] == "archive/data.pkl"
    if shutil.which("unzip") is None:
        pytest.skip("unzip is not installed")
    assert subprocess.run(["unzip", "-tq", archive], capture_output=True, text=True, check=False).returncode == 0


def test_shared_memory_is_stored_once(folder: Path) -> None:
    big = torch.zeros(MIB)
    nvme_ops.save([big, big[3:], big.view(4, -1).t(), torch.nn.Parameter(big)], folder / "a.pt")
    assert (folder / "a.pt").stat().st_size < 1.1 * big.nbytes


def test_large_storages_lie_on_pages_and_small_ones_are_aligned(archive: Path) -> None:
    items = contents(archive).items
    assert {item.bytes >= 64 * 1024 for item in items} == {True, False}
    for item in items:
        assert item.start % (4096 if item.bytes >= 64 * 1024 else 64) == 0


def test_equal_objects_make_equal_files(folder: Path) -> None:
    files = [saved_here(folder / name, {"a": torch.arange(5)}).read_bytes() for name in ("a.pt", "other.pt")]
    assert files[0] == files[1]


def test_without_checksums_the_file_is_as_torch_writes_it_without(folder: Path) -> None:
    nvme_ops.save({"a": torch.ones(3), "big": torch.ones(3 * MIB)}, folder / "a.pt", checksums=False)
    with zipfile.ZipFile(folder / "a.pt") as opened:
        assert {each.CRC for each in opened.infolist()} == {0}
    assert torch.equal(torch.load(folder / "a.pt", weights_only=True)["big"], torch.ones(3 * MIB))


def test_more_records_than_sixteen_bits_count(folder: Path) -> None:
    records = [
        torch_zip.ZipRecord(b"archive/data.pkl", 4, torch.frombuffer(bytearray(b"\x80\x02}."), dtype=torch.uint8))
    ]
    for number in range(66_000):
        data = torch.frombuffer(bytearray(b"%d" % number), dtype=torch.uint8)
        records.append(torch_zip.ZipRecord(b"archive/data/%d" % number, data.nbytes, data))
    end = torch_zip.lay_out(records)
    with (folder / "a.pt").open("w+b") as file:
        torch_save.write(nvme_ops.aio_handle(), file.fileno(), records, True)
        file.seek(end)
        file.write(torch_zip.directory(records, end))
    with zipfile.ZipFile(folder / "a.pt") as opened:
        assert len(opened.namelist()) == len(records)
        assert opened.read("archive/data/65999") == b"65999"
    with opened_for_reading(str(folder / "a.pt")) as fd:
        found = torch_zip.open_archive(fd, "a.pt", nvme_ops.aio_handle())
        assert len(found.records) == len(records)
        assert found.content("data/65999") == b"65999"


def test_storages_beyond_four_gibibytes(folder: Path) -> None:
    obj = {"huge": torch.empty(5 * GIB, dtype=torch.uint8), "after": pattern(MIB)}  # the first is never touched
    plan = torch_save.plan(obj, checksums=True, metadata=None)
    records, end = plan.records()
    with (folder / "a.pt").open("w+b") as file:  # with a hole
        small = [record for record in records if record.size <= MIB]
        torch_save.write(nvme_ops.aio_handle(), file.fileno(), small, True)
        huge = next(record for record in records if record.size > MIB)
        for place, content in ((huge.header, huge.local()), (end, torch_zip.directory(records, end))):
            file.seek(place)
            file.write(content)
    with zipfile.ZipFile(folder / "a.pt") as opened:
        assert [each.file_size for each in opened.infolist() if "data/" in each.filename] == [5 * GIB, MIB]
        assert opened.read("archive/data/1") == obj["after"].numpy().tobytes()
    theirs = torch.load(folder / "a.pt", mmap=True, weights_only=True)
    assert theirs["huge"].numel() == 5 * GIB
    for found in (theirs, load(folder / "a.pt", keys=["after"], verify=True), load(folder / "a.pt", mmap=True)):
        assert torch.equal(found["after"], obj["after"])


def test_metadata_is_a_record_that_torch_does_not_mind(folder: Path) -> None:
    nvme_ops.save({"a": torch.ones(3)}, folder / "a.pt", metadata={"step": "3", "name": "ü"})
    assert contents(folder / "a.pt").metadata == {"step": "3", "name": "ü"}
    assert list(torch.load(folder / "a.pt", weights_only=True)) == ["a"]


def test_contents_are_named_by_the_tensors_in_each_storage(folder: Path) -> None:
    model, _ = trained()
    torch.save({"model": model.state_dict(), "half": torch.ones(8)[:4]}, folder / "a.pt")
    items = {item.name: item for item in contents(folder / "a.pt").items}
    tied = items["model.0.weight = model.2.weight"]
    assert (tied.dtype, tied.shape, tied.bytes) == ("float32", (6, 6), 144)
    assert (items["half"].dtype, items["half"].shape) == ("float32", (8,))
    assert items["data.pkl"].checksum is not None
    assert damaged(contents(folder / "a.pt")) == []


def test_each_of_the_contents_has_a_name_of_its_own(folder: Path) -> None:
    nvme_ops.save({"s": torch.eye(3).to_sparse(), "t": torch.ones(1)}, folder / "a.pt")
    assert {item.name for item in contents(folder / "a.pt").items} == {"data.pkl", "s", "s (2)", "t"}
    assert not compare(contents(folder / "a.pt"), contents(folder / "a.pt"))


def test_an_object_in_the_background(folder: Path) -> None:
    obj = {"all": mixed_sizes(), "views": views()}
    for strategy, memory in (("copy", None), ("copy", 5 * MIB), ("copy_free", None)):
        nvme_ops.save_async(obj, folder / "a.pt", strategy=strategy, memory=memory).result()  # type: ignore[arg-type]
        assert essence(torch.load(folder / "a.pt", weights_only=True)) == essence(obj)


# What cannot be saved leaves the old file


def two_dtypes() -> list[torch.Tensor]:
    tensor = torch.ones(4)
    return [tensor, tensor.view(torch.int32)]


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: {"f": (number for number in range(3))}, TypeError, "generator"),
        (two_dtypes, RuntimeError, "float32 and as torch.int32"),
        (lambda: torch.empty(3, device="meta").untyped_storage(), TypeError, "meta"),
    ],
    ids=["not to be pickled", "two dtypes", "no bytes"],
)
def test_what_cannot_be_saved(make: Any, error: Any, words: str, folder: Path) -> None:
    path = saved_here(folder / "a.pt", [1])
    with pytest.raises(error, match=words):
        nvme_ops.save(make(), path)
    assert load(path) == [1]
    assert [each.name for each in folder.iterdir()] == ["a.pt"]


def test_an_error_while_writing_leaves_the_old_file(folder: Path) -> None:
    path = saved_here(folder / "a.pt", [1])

    def limited() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (20 * MIB, 20 * MIB))
        with pytest.raises(OSError, match="File too large"):
            nvme_ops.save(mixed_sizes(), path)

    in_child(limited)
    assert load(path) == [1]
    assert [each.name for each in folder.iterdir()] == ["a.pt"]


def test_metadata_must_be_strings(folder: Path) -> None:
    with pytest.raises(TypeError, match="strings"):
        nvme_ops.save([], folder / "a.pt", metadata={"step": 3})  # type: ignore[dict-item]


# Where it goes


def test_a_function_decides_with_the_data_before_it(folder: Path) -> None:
    obj = {"all": mixed_sizes(), "small": torch.arange(6.0)}
    seen: list[tuple[int, str, bytes]] = []

    def decide(storage: Any, location: str) -> Any:
        seen.append((storage.nbytes(), location, raw(storage)[:4]))
        return None if storage.nbytes() % 2 else storage.clone()

    for path in (saved_here(folder / "a.pt", obj), saved_by_torch(folder / "b.pt", obj)):
        seen.clear()
        assert essence(load(path, map_location=decide)) == essence(obj)
        mine = list(seen)
        seen.clear()
        torch.load(path, map_location=decide, weights_only=True)
        assert mine == seen


def test_a_function_sees_little_more_memory_than_it_keeps(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = saved_here(folder / "a.pt", [torch.zeros(MIB) for _ in range(12)])
    sizes = bytes_read(monkeypatch)
    load(path, map_location=lambda storage, _: None)
    assert 0 < max(sizes) <= torch_load._AHEAD + MIB


def test_what_a_function_raises_comes_through(folder: Path) -> None:
    path = saved_here(folder / "a.pt", [torch.ones(3)])
    with pytest.raises(ZeroDivisionError):
        load(path, map_location=lambda *_: 1 / 0)


@pytest.mark.parametrize("location", [None, "cpu", torch.device("cpu"), {"cpu": "cpu"}, {"cuda:0": "cpu"}])
def test_every_form_of_map_location(location: Any, folder: Path) -> None:
    obj = trained()[0].state_dict()
    assert essence(load(saved_here(folder / "a.pt", obj), map_location=location)) == essence(obj)


def test_tensors_of_a_missing_device_are_an_error_or_go_where_they_are_sent(folder: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    content, storages = torch_save_content({"t": torch.arange(3.0), "step": torch.tensor(1)})
    path = write_zip(folder / "a.pt", content.replace(b"X\3\0\0\0cpu", b"X\6\0\0\0cuda:0", 1), storages)
    with pytest.raises(RuntimeError, match=r"a\.pt.*CUDA"):
        load(path)
    for location in ("cpu", {"cuda:0": "cpu"}, lambda storage, _: storage):
        assert torch.equal(load(path, map_location=location)["t"], torch.arange(3.0))


@pytest.mark.parametrize("save", [saved_by_torch, saved_here])
def test_onto_the_meta_device_nothing_is_read(save: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save(folder / "a.pt", trained()[0].state_dict())
    monkeypatch.setattr(new_tensors, "read", lambda *_: pytest.fail("read"))
    found = load(path, map_location="meta", verify=True)
    assert {each.device.type for each in found.values()} == {"meta"}


def test_no_tensor_can_grow_into_its_neighbour(folder: Path) -> None:
    found = load(saved_here(folder / "a.pt", [torch.zeros(4), torch.ones(4)]))
    with pytest.raises(RuntimeError, match="resizable"):
        found[0].resize_(8)


def test_each_tensor_has_a_storage_of_its_own_size(folder: Path) -> None:
    found = load(saved_here(folder / "a.pt", [torch.zeros(4), torch.ones(5)]))
    assert [each.untyped_storage().nbytes() for each in found] == [16, 20]


def test_fake_tensors(folder: Path) -> None:
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

    path = saved_here(folder / "a.pt", {"a": torch.ones(3)})
    with FakeTensorMode():
        found = load(path)
    assert isinstance(found["a"], FakeTensor)


# Other formats of torch's


def test_files_from_before_zip(folder: Path) -> None:
    obj: dict[str, Any] = {"model": trained()[0].state_dict(), "views": views(), "big": pattern(3 * MIB)}
    torch.save(obj, folder / "a.pt", _use_new_zipfile_serialization=False)
    assert essence(load(folder / "a.pt")) == essence(obj)
    found = load(folder / "a.pt", keys=["big", "views.row"])
    assert list(found) == ["views.row", "big"]
    assert torch.equal(found["views.row"], views()["row"])
    into = {"big": torch.zeros(3 * MIB, dtype=torch.uint8)}
    load(folder / "a.pt", into=into, keys=["big"])
    assert torch.equal(into["big"], obj["big"])
    with pytest.raises(ValueError, match="not looked into"):
        contents(folder / "a.pt")


def test_containers_of_other_zippers(folder: Path) -> None:
    obj = {"a": pattern(5000), "b": torch.arange(33, dtype=torch.float64)}
    for kind in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        path = write_zip(folder / "a.pt", *torch_save_content(obj), compression=kind)
        assert essence(load(path, verify=True)) == essence(obj)
        assert essence(load(path, mmap=True)) == essence(obj)
        assert all(each.data_ptr() % 8 == 0 for each in load(path, mmap=True).values())


def test_the_other_byte_order(folder: Path) -> None:
    content, storages = torch_save_content({"a": torch.arange(4, dtype=torch.int32)})
    turned = torch.frombuffer(bytearray(storages["data/0"]), dtype=torch.uint8).view(-1, 4).flip(1)
    path = write_zip(folder / "a.pt", content, {"byteorder": b"big", "data/0": turned.numpy().tobytes()})
    assert torch.equal(load(path)["a"], torch.arange(4, dtype=torch.int32))
