"""Files of torch.save, beside torch itself: each reads what the other saved, and to the same objects."""

from __future__ import annotations

import resource
import shutil
import subprocess
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import nvme_ops
from nvme_ops._native import native
from nvme_ops.checkpoint import new_tensors, torch_load, torch_save
from nvme_ops.errors import FormatError
from nvme_ops.formats import torch_pickle, torch_zip
from nvme_ops.formats.pickle_scan import scan
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
from tests.conftest import GIB, MIB, pattern

load: Any = nvme_ops.load  # takes its options as dictionaries here
IN_A_FOLDER = settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])

pytestmark = pytest.mark.filterwarnings("ignore")  # of torch: quantized and nested tensors, complex halves


@pytest.mark.parametrize("name", OBJECTS)
def test_each_reads_what_the_other_saved(name: str, folder: Path) -> None:
    obj = OBJECTS[name]()
    expected = essence(obj)
    nvme_ops.save(obj, folder / "a.pt")
    for mmap in (False, True):
        assert essence(torch.load(folder / "a.pt", weights_only=True, mmap=mmap)) == expected
    for path in (folder / "a.pt", saved_by_torch(folder / "b.pt", obj)):
        for options in ({}, {"mmap": True}, {"verify": True}, {"map_location": lambda storage, _: storage}):
            assert essence(load(path, **options)) == expected


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


def test_what_is_one_object_stays_one(folder: Path) -> None:
    shared, tensor = [1, 2], torch.arange(6.0)
    pair = (shared, tensor)
    obj: dict[str, Any] = {"t": tensor, "u": [tensor, tensor[2:4]], "pair": pair, "again": pair, "list": []}
    obj["list"].append(obj["list"])
    path = saved_here(folder / "a.pt", {**obj, "self": obj})
    for found in (load(path), torch.load(path, weights_only=True), torch.load(path, mmap=True)):
        assert found["t"] is found["u"][0]
        assert found["pair"] is found["again"]
        assert found["list"][0] is found["list"] is found["self"]["list"]
        found["t"][2] = 7
        assert found["u"][1][0] == 7


def test_many_tensors_take_no_detour(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = trained()
    state = {f"layer.{number}": torch.full((number % 7, 3), float(number)) for number in range(3000)}
    obj = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "list": list(model.parameters()), **state}
    more = {**obj, "more": [torch.ones(3).to(torch.uint16), torch.Size([2]), torch.int8]}
    theirs = saved_by_torch(folder / "b.pt", more)
    expected = essence(obj), essence(more)
    monkeypatch.setattr(torch.Tensor, "__reduce_ex__", lambda *_: pytest.fail("torch pickled it"))
    monkeypatch.setattr(torch.serialization, "_load", lambda *_, **__: pytest.fail("torch read it"))
    assert (essence(load(saved_here(folder / "a.pt", obj), verify=True)), essence(load(theirs))) == expected


# The file


def test_the_container(folder: Path) -> None:
    """Nothing is wrong with it, shared memory is in it once, and its bytes say nothing of when it was made."""
    big, all_of_them = torch.zeros(MIB), mixed_sizes()
    obj = {"sizes": all_of_them, "views": views(), "shared": [big, big[3:], big.view(4, -1).t()]}
    path = saved_here(folder / "a.pt", obj)
    with zipfile.ZipFile(path) as opened:
        assert opened.testzip() is None
        assert opened.namelist()[0] == "archive/data.pkl"
    if shutil.which("unzip") is not None:
        subprocess.run(["unzip", "-tq", path], check=True, capture_output=True)
    items = contents(path).items
    assert {item.bytes >= 64 * 1024 for item in items} == {True, False}
    assert all(item.start % (4096 if item.bytes >= 64 * 1024 else 64) == 0 for item in items)
    assert path.stat().st_size < sum(each.nbytes for each in all_of_them.values()) + big.nbytes + MIB // 2
    assert saved_here(folder / "other.pt", obj).read_bytes() == path.read_bytes()


def test_without_checksums_the_file_is_as_torch_writes_it_without(folder: Path) -> None:
    nvme_ops.save({"a": torch.ones(3), "big": torch.ones(3 * MIB)}, folder / "a.pt", checksums=False)
    with zipfile.ZipFile(folder / "a.pt") as opened:
        assert {each.CRC for each in opened.infolist()} == {0}
    assert torch.equal(torch.load(folder / "a.pt", weights_only=True)["big"], torch.ones(3 * MIB))


def test_more_records_than_sixteen_bits_count(folder: Path) -> None:
    texts = [b"data.pkl", *(b"data/%d" % number for number in range(66_000))]
    records = [
        torch_zip.ZipRecord(b"archive/" + each, len(each), torch.frombuffer(bytearray(each), dtype=torch.uint8))
        for each in texts
    ]
    end = torch_zip.lay_out(records)
    with (folder / "a.pt").open("w+b") as file:
        torch_save.write(nvme_ops.aio_handle(), file.fileno(), records, True)
        file.seek(end)
        file.write(torch_zip.directory(records, end))
    with zipfile.ZipFile(folder / "a.pt") as opened:
        assert len(opened.namelist()) == len(records)
        assert opened.read("archive/data/65999") == b"data/65999"
    with opened_for_reading(str(folder / "a.pt")) as fd:
        found = torch_zip.open_archive(fd, "a.pt", nvme_ops.aio_handle())
        assert len(found.records) == len(records)
        assert found.content("data/65999") == b"data/65999"


def test_storages_beyond_four_gibibytes(folder: Path) -> None:
    obj = {"huge": torch.empty(5 * GIB, dtype=torch.uint8), "after": pattern(MIB)}  # the first is never touched
    records, end = torch_save.plan(obj, checksums=True, metadata=None).records()
    with (folder / "a.pt").open("w+b") as file:  # with a hole
        small = [record for record in records if record.size <= MIB]
        torch_save.write(nvme_ops.aio_handle(), file.fileno(), small, True)
        huge = next(record for record in records if record.size > MIB)
        for place, content in ((huge.header, huge.local()), (end, torch_zip.directory(records, end))):
            file.seek(place)
            file.write(content)
    with zipfile.ZipFile(folder / "a.pt") as opened:
        assert [each.file_size for each in opened.infolist() if "data/" in each.filename] == [5 * GIB, MIB]
    theirs = torch.load(folder / "a.pt", mmap=True, weights_only=True)
    assert theirs["huge"].numel() == 5 * GIB
    for found in (theirs, load(folder / "a.pt", keys=["after"], verify=True), load(folder / "a.pt", mmap=True)):
        assert torch.equal(found["after"], obj["after"])


def test_contents_are_named_by_the_tensors_in_each_storage(folder: Path) -> None:
    obj = {"model": trained()[0].state_dict(), "half": torch.ones(8)[:4], "s": torch.eye(3).to_sparse()}
    nvme_ops.save(obj, folder / "a.pt", metadata={"step": "3", "name": "ü"})
    assert list(torch.load(folder / "a.pt", weights_only=True)) == list(obj)
    found = contents(folder / "a.pt")
    items = {item.name: item for item in found.items}
    assert len(items) == len(found.items)
    assert {"data.pkl", "s", "s (2)"} <= items.keys()
    tied = items["model.0.weight = model.2.weight"]
    assert (tied.dtype, tied.shape, tied.bytes) == ("float32", (6, 6), 144)
    assert (items["half"].dtype, items["half"].shape) == ("float32", (8,))
    assert items["data.pkl"].checksum is not None
    assert found.metadata == {"step": "3", "name": "ü"}
    assert damaged(found) == []
    assert not compare(found, found)


@pytest.mark.parametrize("options", [{}, {"memory": 5 * MIB}, {"strategy": "copy_free"}], ids=["all", "some", "lent"])
def test_an_object_in_the_background(folder: Path, options: Any) -> None:
    obj = {"all": mixed_sizes(), "views": views()}
    nvme_ops.save_async(obj, folder / "a.pt", **options).result()
    assert essence(torch.load(folder / "a.pt", weights_only=True)) == essence(obj)


BITS = torch.ones(4)


@pytest.mark.parametrize(
    ("make", "options", "error", "words"),
    [
        (lambda: {"f": (number for number in range(3))}, {}, TypeError, "generator"),
        (lambda: [BITS, BITS.view(torch.int32)], {}, RuntimeError, "float32 and as torch.int32"),
        (lambda: torch.empty(3, device="meta").untyped_storage(), {}, TypeError, "meta"),
        (list, {"metadata": {"step": 3}}, TypeError, "strings"),
    ],
    ids=["not to be pickled", "two dtypes", "no bytes", "metadata"],
)
def test_what_cannot_be_saved_leaves_the_old_file(
    make: Any, options: Any, error: Any, words: str, folder: Path
) -> None:
    path = saved_here(folder / "a.pt", [1])
    with pytest.raises(error, match=words):
        nvme_ops.save(make(), path, **options)
    assert load(path) == [1]
    assert [each.name for each in folder.iterdir()] == ["a.pt"]


# Where it goes


def test_a_function_decides_with_the_data_before_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And sees little more memory than it keeps."""
    obj = {"all": mixed_sizes(), "small": torch.arange(6.0), "more": [torch.zeros(MIB) for _ in range(6)]}
    seen: list[tuple[int, str, bytes]] = []

    def decide(storage: Any, location: str) -> Any:
        seen.append((storage.nbytes(), location, raw(storage)[:4]))
        return None if storage.nbytes() % 2 else storage.clone()

    sizes = bytes_read(monkeypatch)
    for path in (saved_here(folder / "a.pt", obj), saved_by_torch(folder / "b.pt", obj)):
        seen.clear()
        assert essence(load(path, map_location=decide)) == essence(obj)
        mine = list(seen)
        seen.clear()
        torch.load(path, map_location=decide, weights_only=True)
        assert mine == seen
    assert 0 < max(sizes) <= 9 * MIB + MIB


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
    monkeypatch.setattr(new_tensors, "begin", lambda *_: pytest.fail("read"))
    found = load(path, map_location="meta", verify=True)
    assert {each.device.type for each in found.values()} == {"meta"}


def test_each_tensor_has_a_storage_of_its_own_size_that_cannot_grow_into_its_neighbour(folder: Path) -> None:
    found = load(saved_here(folder / "a.pt", [torch.zeros(4), torch.ones(5)]))
    assert [each.untyped_storage().nbytes() for each in found] == [16, 20]
    with pytest.raises(RuntimeError, match="resizable"):
        found[0].resize_(8)


def test_fake_tensors(folder: Path) -> None:
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

    path = saved_here(folder / "a.pt", {"a": torch.ones(3)})
    with FakeTensorMode():
        assert isinstance(load(path)["a"], FakeTensor)


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


@pytest.mark.parametrize("kind", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_containers_of_other_zippers(folder: Path, kind: int) -> None:
    obj = {"a": pattern(5000), "b": torch.arange(33, dtype=torch.float64)}
    path = write_zip(folder / "a.pt", *torch_save_content(obj), compression=kind)
    assert essence(load(path, verify=True)) == essence(obj)
    assert essence(load(path, mmap=True)) == essence(obj)
    assert all(each.data_ptr() % 8 == 0 for each in load(path, mmap=True).values())


def test_the_other_byte_order(folder: Path) -> None:
    content, storages = torch_save_content({"a": torch.arange(4, dtype=torch.int32)})
    turned = torch.frombuffer(bytearray(storages["data/0"]), dtype=torch.uint8).view(-1, 4).flip(1)
    path = write_zip(folder / "a.pt", content, {"byteorder": b"big", "data/0": turned.numpy().tobytes()})
    assert torch.equal(load(path)["a"], torch.arange(4, dtype=torch.int32))


# The scan of a pickle, and tensors over parts of a memory

CODES = torch_load._CODES


def make(content: bytes) -> Any:
    return torch_load.make(content, lambda _: torch.device("cpu"), lambda *_: torch.empty(0))


def test_the_scan_lets_through_what_torch_writes() -> None:
    obj = {"a": [torch.zeros(2), 1, -5, 2**40, 1.5, "x" * 300, None, True], "b": OrderedDict(c=(1, 2, 3, 4))}
    content = torch_save_content(obj)[0]
    assert scan(content, CODES) == scan(torch_save.pickled(obj)[0], CODES) == ""
    for length in range(len(content)):
        assert scan(content[:length], CODES) == "it ends too early"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"\x80\x02}r\xff\xff\xff\x7f.", "it numbers more objects than it has"),
        (b"\x80\x02}q\xff.", "it numbers more objects than it has"),
        (b"\x80\x02X\xff\xff\xff\xffabc.", "it ends too early"),
        (b"\x80\x02\x8a\xffabc.", "it ends too early"),
        (b"\x80\x02cos\nsystem", "it ends too early"),
        (b"\x80\x04\x95\x00.", "code 149 is not allowed"),
        (b"ios\nsystem\n.", "code 105 is not allowed"),
        (b"\x80\x02N.r\xff\xff\xff\xff", ""),  # nobody reads on
        (b"\x80\x02}q\x05.", ""),  # pickletools.optimize leaves numbers out
    ],
)
def test_the_scan_refuses_what_costs_more_than_it_is(content: bytes, words: str) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert scan(content, CODES) == words
    if words:
        with pytest.raises(torch_pickle.NotReadError, match=words):
            make(content)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10  # KiB


def test_a_pickle_cannot_change_what_stands_for_a_storage_or_a_function() -> None:
    described = b"\x80\x02(U\x07storagectorch\nFloatStorage\nU\x010U\x03cpuK\x04tQ"
    found, storages = torch_pickle.read(described + b".", "file")
    assert [found] == storages == [torch_pickle.Storage("0", torch.float32, "cpu", 16)]
    with pytest.raises(FormatError, match=r"data\.pkl"):
        torch_pickle.read(described + b"}U\x04sizeK\xffsb.", "file")
    with pytest.raises(torch_pickle.NotReadError, match="function"):
        make(b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n}X\x01\x00\x00\x00aK\x01sb.")


def parts(count: int) -> list[torch.Tensor]:
    empty = torch.empty(0, dtype=torch.uint8)
    return [empty.data for _ in range(count)]


def test_parts_of_a_memory_have_storages_of_their_own() -> None:
    memory = torch.arange(10, dtype=torch.uint8)
    first, second = parts(2)
    native().set_parts([first, second], memory, [2, 10], [4, 0])
    assert (first.tolist(), second.tolist()) == ([2, 3, 4, 5], [])
    assert first.untyped_storage().nbytes() == 4
    memory[3] = 77
    del memory
    assert first[1] == 77


@pytest.mark.parametrize(
    ("places", "lengths"), [([8], [3]), ([-1], [1]), ([0], [-1]), ([11], [0]), ([0, 0], [1]), ([2**62], [2**62])]
)
def test_parts_beyond_the_memory_are_refused(places: list[int], lengths: list[int]) -> None:
    with pytest.raises(ValueError, match=r"beyond the memory|one of everything"):
        native().set_parts(parts(1), torch.zeros(10, dtype=torch.uint8), places, lengths)


@pytest.mark.parametrize(
    ("offset", "size", "stride"),
    [(0, (3, 2), (2, 1)), (5, (1,), (1,)), (-1, (1,), (1,)), (0, (-1,), (1,)), (0, (2,), (-1,)), (0, (2, 2), (1,)),
     (0, (2**62, 2**62), (2**62, 2**62)), (2**63 - 1, (2,), (2**62,)), (0, (2**62, 2**62), (0, 0)), (6, (0,), (1,))],
)  # fmt: skip
def test_views_beyond_their_storage_are_refused(offset: int, size: tuple[int, ...], stride: tuple[int, ...]) -> None:
    tensor = torch.empty(0).data
    with pytest.raises(ValueError, match="reaches beyond its storage"):
        native().set_storages([tensor], [torch.zeros(5)], [offset], [size], [stride])
