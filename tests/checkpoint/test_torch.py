"""Files of torch.save, beside torch itself: each reads what the other saved, and to the same objects."""

from __future__ import annotations

import contextlib
import pickle
import resource
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch

import nvme_ops
from nvme_ops.base.errors import FormatError, UnsafeError
from nvme_ops.base.native import native
from nvme_ops.checkpoint import torch_load, torch_save
from nvme_ops.checkpoint.contents import compare, contents, damaged
from nvme_ops.checkpoint.request import SaveOptions
from nvme_ops.checkpoint.strided import StridedTensor
from nvme_ops.filesystem.publication import opened as opened_for_reading
from nvme_ops.formats import torch_pickle, torch_zip
from nvme_ops.formats.pickle_protocol import in_protocol_2
from nvme_ops.formats.pickle_scan import scan
from tests.checkpoint.torch_files import (
    OBJECTS,
    Evil,
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
from tests.doubles import PrivateDevice

load: Any = nvme_ops.load  # takes its options as dictionaries here

pytestmark = pytest.mark.filterwarnings("ignore")  # of torch: quantized and nested tensors, complex halves


@pytest.mark.parametrize("name", OBJECTS)
def test_each_reads_what_the_other_saved(name: str, folder: Path) -> None:
    obj = OBJECTS[name]()
    expected = essence(obj)
    nvme_ops.save(obj, folder / "a.pt")
    for mmap in (False, True):
        assert essence(torch.load(folder / "a.pt", weights_only=True, mmap=mmap)) == expected
    for path in (folder / "a.pt", saved_by_torch(folder / "b.pt", obj)):
        for options in ({"mmap": True}, {"verify": True}, {"map_location": lambda storage, _: storage}):
            assert essence(load(path, **options)) == expected


@pytest.mark.parametrize("protocol", [3, 4, 5])
@pytest.mark.parametrize("name", OBJECTS)
def test_pickles_of_later_protocols(name: str, protocol: int, tmp_path: Path) -> None:
    """torch.load reads them only with weights_only=False."""
    obj, path = OBJECTS[name](), tmp_path / "a.pt"
    if name == "plain values" and protocol > 3:
        torch.save(obj, path, pickle_protocol=protocol)
        with pytest.raises(UnsafeError, match=rf"ADDITEMS of pickle protocol {protocol}, .* save it without pickle_pr"):
            load(path)
        obj["s"] = None
    torch.save(obj, path, pickle_protocol=protocol)
    for options in ({}, {"verify": True}, {"map_location": lambda storage, _: storage}):
        assert essence(load(path, **options)) == essence(obj)
    assert [item.name for item in contents(path).items] == [
        item.name for item in contents(saved_by_torch(tmp_path / "b.pt", obj)).items
    ]


def test_a_pickle_of_protocol_4_does_no_more_than_one_of_protocol_2(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(3), "e": Evil(tmp_path / "harm")}, tmp_path / "a.pt", pickle_protocol=4)
    with pytest.raises(UnsafeError, match="open"):
        load(tmp_path / "a.pt")
    assert not (tmp_path / "harm").exists()
    text = "x" * 100
    bomb = b"\x80\x04\x8c\x64" + text.encode() + b"\x94" + b"h\x00" * 100_000 + b"."
    assert in_protocol_2(bomb, "") == bomb  # a hundred times its size is not made of it
    usual = pickle.dumps({"a": [text, text, "y" * 300], text: b"\xff\0"}, 4)
    assert pickle.loads(in_protocol_2(usual, "")) == pickle.loads(usual)
    for length in range(len(usual)):
        assert in_protocol_2(usual[:length], "") == usual[:length]


def test_every_dtype_of_torch(folder: Path) -> None:
    kinds = storable()
    obj = {str(kind): pattern(320).view(kind) for kind in kinds}
    obj |= {f"no {kind}": torch.empty(0, dtype=torch.uint8).view(kind) for kind in kinds}
    expected = {name: (tensor.dtype, raw(tensor.untyped_storage())) for name, tensor in obj.items()}
    for path in (saved_here(folder / "a.pt", obj), saved_by_torch(folder / "b.pt", obj)):
        for loaded in (load(path, verify=True), torch.load(path, weights_only=True)):
            assert {name: (it.dtype, raw(it.untyped_storage())) for name, it in loaded.items()} == expected


def test_what_is_one_object_stays_one_and_each_storage_has_its_own_size(folder: Path) -> None:
    shared, tensor = [1, 2], torch.arange(6.0)
    pair = (shared, tensor)
    obj: dict[str, Any] = {"t": tensor, "u": [tensor, tensor[2:4]], "pair": pair, "again": pair, "list": []}
    obj["list"].append(obj["list"])
    path = saved_here(folder / "a.pt", {**obj, "self": obj})
    for loaded in (load(path), torch.load(path, weights_only=True), torch.load(path, mmap=True)):
        assert loaded["t"] is loaded["u"][0]
        assert loaded["pair"] is loaded["again"]
        assert loaded["list"][0] is loaded["list"] is loaded["self"]["list"]
        loaded["t"][2] = 7
        assert loaded["u"][1][0] == 7
    loaded = load(saved_here(folder / "a.pt", [torch.zeros(4), torch.ones(5)]))
    assert [part.untyped_storage().nbytes() for part in loaded] == [16, 20]
    with pytest.raises(RuntimeError, match="resizable"):
        loaded[0].resize_(8)  # into its neighbour


def test_a_storage_by_itself(folder: Path) -> None:
    typed = torch.arange(6.0)._typed_storage()
    for storage, dtype in ((typed, torch.float32), (typed._untyped_storage, torch.uint8)):
        nvme_ops.save({"it": storage, "view": torch.empty(0, dtype=dtype).set_(storage)[1:]}, folder / "a.pt")
        for loaded in (torch.load(folder / "a.pt", weights_only=True), load(folder / "a.pt")):
            assert isinstance(loaded["it"], torch.storage.TypedStorage)
            assert loaded["it"]._untyped_storage._cdata == loaded["view"].untyped_storage()._cdata


def test_many_tensors_take_no_detour(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = trained()
    state = {f"layer.{number}": torch.full((number % 7, 3), float(number)) for number in range(50)}
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
        assert {info.extract_version for info in opened.infolist()} == {20}  # readers need not know ZIP64
    items = contents(path).items
    assert {item.bytes >= 64 * 1024 for item in items} == {True, False}
    assert all(item.start % (4096 if item.bytes >= 64 * 1024 else 64) == 0 for item in items)
    assert path.stat().st_size < sum(tensor.nbytes for tensor in all_of_them.values()) + big.nbytes + MIB // 2
    assert saved_here(folder / "other.pt", obj).read_bytes() == path.read_bytes()
    nvme_ops.save(obj, path, checksums=False)
    with zipfile.ZipFile(path) as opened:
        assert {info.CRC for info in opened.infolist()} == {0}  # as torch writes it without


def test_more_records_than_sixteen_bits_count(folder: Path) -> None:
    records = [torch_zip.ZipRecord(b"archive/data/%d" % number, 0) for number in range(66_000)]
    end = torch_zip.lay_out(records)
    (folder / "a.pt").write_bytes(b"".join(record.local() for record in records) + torch_zip.directory(records, end))
    with zipfile.ZipFile(folder / "a.pt") as opened:
        assert opened.namelist() == [record.name.decode() for record in records]
    with opened_for_reading(str(folder / "a.pt")) as fd:
        archive = torch_zip.open_archive(fd, "a.pt", nvme_ops.aio_handle())
        assert len(archive.records) == len(records)
        assert archive.content("data/65999") == b""


def test_storages_beyond_four_gibibytes(folder: Path) -> None:
    obj = {"huge": torch.empty(5 * GIB, dtype=torch.uint8), "after": pattern(MIB)}  # the first is never touched
    records, end = torch_save.plan(obj, SaveOptions()).records()
    with (folder / "a.pt").open("w+b") as file:  # with a hole
        small = [record for record in records if record.size <= MIB]
        torch_save.write(nvme_ops.aio_handle(), file.fileno(), small, True)
        huge = next(record for record in records if record.size > MIB)
        for place, content in ((huge.header, huge.local()), (end, torch_zip.directory(records, end))):
            file.seek(place)
            file.write(content)
    with zipfile.ZipFile(folder / "a.pt") as opened:
        sizes = [(info.file_size, info.extract_version) for info in opened.infolist() if "data/" in info.filename]
        assert sizes == [(5 * GIB, 45), (MIB, 45)]
    theirs = torch.load(folder / "a.pt", mmap=True, weights_only=True)
    assert theirs["huge"].numel() == 5 * GIB
    for loaded in (theirs, load(folder / "a.pt", keys=["after"], verify=True), load(folder / "a.pt", mmap=True)):
        assert torch.equal(loaded["after"], obj["after"])


def test_contents_are_named_by_the_tensors_in_each_storage(folder: Path) -> None:
    obj = {"model": trained()[0].state_dict(), "half": torch.ones(8)[:4], "s": torch.eye(3).to_sparse()}
    nvme_ops.save(obj, folder / "a.pt", metadata={"step": "3", "name": "ü"})
    assert list(torch.load(folder / "a.pt", weights_only=True)) == list(obj)
    listing = contents(folder / "a.pt")
    items = {item.name: item for item in listing.items}
    assert len(items) == len(listing.items)
    assert {"data.pkl", "s", "s (2)"} <= items.keys()
    tied = items["model.0.weight = model.2.weight"]
    assert (tied.dtype, tied.shape, tied.bytes) == ("float32", (6, 6), 144)
    assert (items["half"].dtype, items["half"].shape) == ("float32", (8,))
    assert items["data.pkl"].checksum is not None
    assert listing.metadata == {"step": "3", "name": "ü"}
    assert damaged(listing) == []
    assert not compare(listing, listing)


BITS = torch.ones(4)


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: {"f": (number for number in range(3))}, TypeError, "generator"),
        (lambda: [BITS, BITS.view(torch.int32)], RuntimeError, "float32 and as torch.int32"),
        (lambda: torch.empty(3, device="meta").untyped_storage(), TypeError, "meta"),
    ],
    ids=["not to be pickled", "two dtypes", "no bytes"],
)
def test_what_cannot_be_saved_leaves_the_old_file(make: Any, error: Any, words: str, folder: Path) -> None:
    path = saved_here(folder / "a.pt", [1])
    with pytest.raises(error, match=words):
        nvme_ops.save(make(), path)
    assert load(path) == [1]
    assert [entry.name for entry in folder.iterdir()] == ["a.pt"]


# Where it goes


def test_tensors_of_a_missing_device_go_where_they_are_sent_or_raise(folder: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    content, storages = torch_save_content({"t": torch.arange(3.0), "step": torch.tensor(1)})
    path = write_zip(folder / "a.pt", content.replace(b"X\3\0\0\0cpu", b"X\6\0\0\0cuda:0", 1), storages)
    with pytest.raises(RuntimeError, match=r"a\.pt.*CUDA"):
        load(path)
    for location in ("cpu", {"cuda:0": "cpu"}, lambda storage, _: storage):
        assert torch.equal(load(path, map_location=location)["t"], torch.arange(3.0))
    for keys in (None, ["t"]):
        with pytest.raises(ZeroDivisionError):  # as the function raises it
            load(path, keys=keys, map_location=lambda *_: 1 // 0)


# Other formats of torch's


def test_files_from_before_zip(folder: Path) -> None:
    obj: dict[str, Any] = {"model": trained()[0].state_dict(), "views": views(), "big": pattern(3 * MIB)}
    torch.save(obj, folder / "a.pt", _use_new_zipfile_serialization=False)
    assert essence(load(folder / "a.pt")) == essence(obj)
    loaded = load(folder / "a.pt", keys=["big", "views.row"])
    assert list(loaded) == ["views.row", "big"]
    assert torch.equal(loaded["views.row"], views()["row"])
    into = {"big": torch.zeros(3 * MIB, dtype=torch.uint8)}
    load(folder / "a.pt", into=into, keys=["big"])
    assert torch.equal(into["big"], obj["big"])
    assert {"big", "views.base = views.row = views.columns = views.turned = views.again"} <= {
        item.name for item in contents(folder / "a.pt").items
    }


@pytest.mark.parametrize("kind", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_containers_of_other_zippers_and_of_the_other_byte_order(folder: Path, kind: int) -> None:
    obj = {"a": pattern(5000), "b": torch.arange(33, dtype=torch.float64)}
    content, storages = torch_save_content(obj)
    path = write_zip(folder / "a.pt", content, storages, compression=kind)
    assert essence(load(path, verify=True)) == essence(obj)
    assert essence(load(path, mmap=True)) == essence(obj)
    assert all(tensor.data_ptr() % 8 == 0 for tensor in load(path, mmap=True).values())
    turned = obj["b"].view(torch.uint8).view(-1, 8).flip(1).numpy().tobytes()
    path = write_zip(path, content, {**storages, "byteorder": b"big", "data/1": turned}, compression=kind)
    assert torch.equal(load(path)["b"], obj["b"])


# The scan of a pickle, and tensors over parts of a memory

CODES = torch_load._CODES


def make(content: bytes) -> Any:
    return torch_load.make(content, torch.device, lambda wanted: dict.fromkeys(wanted, torch.empty(0)).__getitem__)


def test_the_scan_refuses_what_costs_more_than_it_is() -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for content, words in (
        (b"\x80\x02}r\xff\xff\xff\x7f.", "it numbers more objects than it has"),
        (b"\x80\x02}q\x06.", "it numbers more objects than it has"),
        (b"\x80\x02X\xff\xff\xff\xffabc.", "it ends too early"),
        (b"\x80\x02\x8a\xffabc.", "it ends too early"),
        (b"\x80\x02cos\nsystem", "it ends too early"),
        (b"\x80\x04\x95\x00.", "code 149 is not allowed"),
        (b"ios\nsystem\n.", "code 105 is not allowed"),
        (b"\x80\x02N.r\xff\xff\xff\xff", ""),  # nobody reads on
        (b"\x80\x02}q\x05.", ""),  # pickletools.optimize leaves numbers out
    ):
        assert scan(content, CODES) == words
        with pytest.raises(torch_pickle.NotReadError, match=words) if words else contextlib.nullcontext():
            make(content)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10  # KiB
    usual = torch_save_content({"a": [torch.zeros(2), 1, 1.5, "x" * 300, None, True], "b": OrderedDict(c=(1, 2))})[0]
    assert scan(usual, CODES) == ""
    assert all(scan(usual[:length], CODES) == "it ends too early" for length in range(len(usual)))


def test_a_pickle_cannot_change_what_stands_for_a_storage_or_a_function() -> None:
    described = b"\x80\x02(U\x07storagectorch\nFloatStorage\nU\x010U\x03cpuK\x04tQ"
    value, storages = torch_pickle.read(described + b".", "file")
    assert [value] == storages == [torch_pickle.Storage("0", torch.float32, "cpu", 16)]
    with pytest.raises(FormatError, match=r"data\.pkl"):
        torch_pickle.read(described + b"}U\x04sizeK\xffsb.", "file")
    with pytest.raises(torch_pickle.NotReadError, match="function"):
        make(b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n}X\x01\x00\x00\x00aK\x01sb.")


def test_parts_of_a_memory_have_storages_of_their_own() -> None:
    memory, empty = torch.arange(10, dtype=torch.uint8), torch.empty(0, dtype=torch.uint8)
    first, second = empty.data, empty.data
    native().set_parts([first, second], memory, [2, 10], [4, 0])
    assert (first.tolist(), second.tolist()) == ([2, 3, 4, 5], [])
    assert first.untyped_storage().nbytes() == 4
    memory[3] = 77
    for places, lengths in ([8], [3]), ([-1], [1]), ([0], [-1]), ([11], [0]), ([0, 0], [1]), ([2**62], [2**62]):
        with pytest.raises(ValueError, match=r"beyond the memory|one of everything"):
            native().set_parts([empty.data], memory, places, lengths)
    del memory
    assert first[1] == 77


@pytest.mark.parametrize(
    ("offset", "size", "stride"),
    [(0, (3, 2), (2, 1)), (5, (1,), (1,)), (-1, (1,), (1,)), (0, (-1,), (1,)), (0, (2,), (-1,)), (0, (2, 2), (1,)),
     (0, (2**62, 2**62), (2**62, 2**62)), (2**63 - 1, (2,), (2**62,)), (0, (2**62, 2**62), (0, 0)), (6, (0,), (1,))],
)  # fmt: skip
def test_views_beyond_their_storage_are_refused(offset: int, size: tuple[int, ...], stride: tuple[int, ...]) -> None:
    tensor = torch.empty(0).data
    with pytest.raises(ValueError, match="reaches beyond its storage"):
        native().set_storages([tensor], [torch.zeros(5)], [offset], [size], [stride])


# Some tensors only, straight into tensors that are there, and from and to an accelerator, simulated in host memory


Checkpoint = tuple[Path, dict[str, Any]]


@pytest.fixture(params=[saved_by_torch, saved_here])
def checkpoint(request: pytest.FixtureRequest, folder: Path) -> Checkpoint:
    """A file of either writer, and what is in it."""
    model, optimizer = trained()
    odd = [torch.eye(3).to_sparse(), torch.randn(3, dtype=torch.complex64).conj(), torch.nn.Parameter(torch.ones(2))]
    states = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    obj: dict[str, Any] = {**states, "views": views(), "sizes": mixed_sizes(), "odd": odd}
    return request.param(folder / "a.pt", obj), obj


def test_keys_are_places_in_the_object(checkpoint: Checkpoint) -> None:
    path, obj = checkpoint
    wanted = {
        "odd.2": obj["odd"][2],
        "odd.1": obj["odd"][1],
        "model.0.weight": obj["model"]["0.weight"],
        "optimizer.state.0.exp_avg": obj["optimizer"]["state"][0]["exp_avg"],
        "views.turned": obj["views"]["turned"],
        "sizes.9": obj["sizes"]["9"],
    }
    for location in (None, "cpu", {"cpu": "cpu"}, lambda storage, _: storage.clone(), lambda *_: None):
        loaded = load(path, keys=list(wanted), map_location=location, verify=True)
        assert loaded.keys() == wanted.keys()
        for name, tensor in wanted.items():
            assert type(loaded[name]) is type(tensor)
            assert (loaded[name].stride(), loaded[name].is_conj()) == (tensor.stride(), tensor.is_conj())
            assert torch.equal(loaded[name], tensor)
    assert list(load(path, keys="views.row")) == ["views.row"]
    assert essence(load(path, keys=["odd.0", "views.row"])["odd.0"]) == essence(obj["odd"][0])
    with pytest.raises(KeyError, match=r"has no tensor 'model\.3'"):
        load(path, keys=["views.row", "model.3"])


def test_keys_read_no_more_than_their_tensors_which_share_memory_still(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, obj = checkpoint
    sizes = bytes_read(monkeypatch)
    assert torch.equal(load(path, keys=["sizes.9", "views.row"])["views.row"], obj["views"]["row"])
    assert sum(sizes) <= MIB + 20 * 4 + 64  # the row and what aligns it, not all that it is a view of
    loaded = load(path, keys=["model.0.weight", "model.2.weight", "views.row", "views.columns"])
    loaded["model.0.weight"][:] = 7
    assert loaded["model.2.weight"].eq(7).all()
    loaded["views.row"][0] = -1
    assert loaded["views.columns"][1, 0] == -1


def test_places_that_have_the_same_name(folder: Path) -> None:
    path = saved_here(folder / "a.pt", {"a.b": torch.ones(1), "a": {"b": torch.zeros(1)}})
    with pytest.raises(ValueError, match=r"'a\.b'"):
        load(path, keys=["a.b"])
    assert len(load(path)) == 2


def test_into_nested_containers_however_the_tensors_lie(checkpoint: Checkpoint, folder: Path) -> None:
    path, obj = checkpoint
    into: dict[str, Any] = {
        "views": {"base": torch.zeros(20, 3).t(), "columns": torch.zeros(3, 10), "turned": torch.zeros(40, 3)[::2]},
        "odd": [None, torch.zeros(3, dtype=torch.complex64)],
        "sizes": {name: torch.zeros_like(tensor) for name, tensor in obj["sizes"].items()},
    }
    names = ["views.base", "views.columns", "views.turned", "odd.1", *(f"sizes.{name}" for name in obj["sizes"])]
    loaded = load(path, into=into, keys=names, verify=True)
    assert loaded.keys() == set(names)
    for name in ("base", "columns", "turned"):
        assert torch.equal(into["views"][name], obj["views"][name])
    assert torch.equal(into["odd"][1], obj["odd"][1])
    assert essence(into["sizes"]) == essence(obj["sizes"])
    tall = torch.randn(3000, 1500)
    large = {"turned": tall.t(), "sparse": tall[:, ::700], "cube": tall.view(30, 100, 1500).permute(2, 0, 1)[1:]}
    into = {name: torch.zeros(tensor.shape) for name, tensor in large.items()}
    load(saved_here(folder / "large.pt", large), into=into)
    assert all(torch.equal(into[name], tensor) for name, tensor in large.items())


def test_rows_that_lie_apart_are_read_one_by_one() -> None:
    rows, size = torch.zeros(6, 2, 50), torch.float32.itemsize
    for stride, places in (
        ((40_000, 100, 1), [(8 + row * 40_000 * size, 150 * size) for row in range(6)]),
        ((400, 100, 1), [(8, (5 * 400 + 100 + 50) * size)]),
        ((1, 40_000, 6), [(8, 300 * size), (8 + 40_000 * size, 300 * size)]),
    ):
        blocks = list(StridedTensor("file", 8, torch.float32, stride, rows).blocks(1 << 20))
        assert [(place.start, place.nbytes) for _, place in blocks] == places
        assert sum(part.target.numel() for part, _ in blocks) == rows.numel()
    limited = StridedTensor("file", 8, torch.float32, (100, 50, 1), rows).blocks(1300)
    assert [place.start for _, place in limited] == [8, 8 + 300 * size]


def test_into_what_is_no_plain_tensor(folder: Path) -> None:
    odd = {"with": OBJECTS["with attributes"](), "plain": torch.ones(2)}
    into = {"with": torch.zeros(3), "plain": torch.zeros(2)}
    load(saved_here(folder / "a.pt", odd), into=into)
    assert torch.equal(into["with"], odd["with"])
    path = saved_here(folder / "a.pt", {"plain": torch.ones(2), "s": torch.eye(3).to_sparse()})
    into = {"plain": torch.zeros(2), "s": torch.zeros(3, 3).to_sparse()}
    with pytest.raises(ValueError, match="'s' has no dense memory"):
        load(path, into=into)
    with pytest.raises(ValueError, match=r"'s' is torch\.sparse_coo in the file, and the one to fill is dense"):
        load(path, into={**into, "s": torch.zeros(3, 3)})
    assert into["plain"].eq(0).all()


# An accelerator


def on_host(obj: Any) -> Any:
    """The same tensors, with their devices."""
    if isinstance(obj, torch.Tensor):
        return str(obj.device), obj.cpu().tolist() if obj.numel() < MIB else obj.cpu()[-9:].tolist()
    if isinstance(obj, dict):
        return {key: on_host(value) for key, value in obj.items()}
    return [on_host(value) for value in obj]


@pytest.mark.parametrize(
    "location",
    [
        None,
        {"privateuseone:0": "cpu", "cpu": "privateuseone:0"},
        lambda storage, location: None if location == "cpu" else storage.to(device=torch.device("privateuseone:1")),
    ],
    ids=["none", "mapping", "function"],
)
def test_goes_to_where_torch_would_put_it_without_a_move(
    location: Any, folder: Path, monkeypatch: pytest.MonkeyPatch, the_device: PrivateDevice
) -> None:
    device = the_device

    def current(wanted: torch.device) -> Any:
        return device.on(device.current()[1][wanted.index], index=wanted.index)

    monkeypatch.setattr(torch.get_device_module("privateuseone"), "device", current, raising=False)  # torch.load's need
    big = device.tensor(pattern(9 * MIB + 3))
    obj: dict[str, Any] = {"big": big, "view": big[5:9], "small": [device.tensor(torch.arange(9.0)) for _ in range(3)]}
    obj |= {"second": device.tensor(torch.arange(300), 1), "host": torch.arange(7)}
    path = saved_here(folder / "a.pt", obj)
    expected = on_host(torch.load(path, map_location=location, weights_only=True))
    assert location or expected == on_host(obj)
    moved, move = [0], torch.storage._to

    def watched(storage: torch.UntypedStorage, to: torch.device, wait: bool) -> Any:
        moved.append(storage.nbytes() if storage.device != to else 0)
        return move(storage, to, wait)

    monkeypatch.setattr(torch.storage, "_to", watched)
    assert on_host(load(path, map_location=location, verify=True)) == expected
    parts = load(path, map_location=location, verify=True, keys=["view", "second", "host"])
    assert on_host(parts) == {name: expected[name] for name in parts}
    assert max(moved) == 0 or callable(location)
    into: dict[str, Any] = {
        "big": device.empty(9 * MIB + 3, index=1),
        "second": torch.zeros(300, dtype=torch.int64),
        "host": device.empty(7, dtype=torch.int64),
    }
    load(path, into=into, keys=list(into), verify=True)
    assert all(torch.equal(tensor.cpu(), obj[name].cpu()) for name, tensor in into.items())
