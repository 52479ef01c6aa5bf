"""safetensors files, beside safetensors' own library: each reads what the other saved, and to the same tensors."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

import nvme_ops
from nvme_ops import aio_handle
from nvme_ops.errors import FormatError
from nvme_ops.formats import integrity
from nvme_ops.formats import safetensors_format as layout
from nvme_ops.formats.safetensors_format import DTYPES
from tests.conftest import MIB, pattern

safetensors = pytest.importorskip("safetensors", reason="safetensors is not installed: pip install safetensors")
their = pytest.importorskip("safetensors.torch")

Tensors = dict[str, torch.Tensor]
IN_A_FOLDER = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


def filled(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Any bits there can be, also those that are no numbers."""
    if dtype is torch.bool:
        return pattern(torch.Size(shape).numel()).view(shape) % 2 == 1
    return pattern(torch.Size(shape).numel() * dtype.itemsize).view(dtype).view(shape)


def raw(tensor: torch.Tensor) -> torch.Tensor:
    """Its bytes in row-major order."""
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return plain.view(-1).view(torch.uint8) if tensor.nbytes else torch.empty(0, dtype=torch.uint8)


def assert_same(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape), name
        assert torch.equal(raw(found[name]), raw(tensor)), name


def round_trip(path: Path, tensors: Mapping[str, torch.Tensor], **options: Any) -> Tensors:
    """Saved by us, read by their library, and loaded by us."""
    nvme_ops.save(tensors, path, **options)
    assert_same(their.load_file(path), tensors)
    stored = {name: bytes(each["data"]) for name, each in safetensors.deserialize(path.read_bytes())}
    assert stored == {name: raw(tensor).numpy().tobytes() for name, tensor in tensors.items()}
    return loaded(path, tensors, verify=True)


def loaded(path: Path, expected: Mapping[str, torch.Tensor], **options: Any) -> Tensors:
    """The file's tensors, by a mapping of the file and without, if they are as expected."""
    for mmap in (True, False):
        found: Tensors = nvme_ops.load(path, mmap=mmap, **options)
        assert_same(found, expected)
    return found


@pytest.fixture
def path(folder: Path) -> Path:
    return folder / "model.safetensors"


# What a file can hold

SHAPES = [(), (1,), (0,), (3, 0), (0, 4, 2), (7,), (3, 4), (2, 1, 3, 2)]


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_every_dtype(path: Path, dtype: torch.dtype) -> None:
    shapes = [shape for shape in SHAPES if shape or dtype is not DTYPES.get("F4")]
    tensors = {f"of shape {shape}": filled(dtype, *shape) for shape in shapes}
    round_trip(path, tensors)
    their.save_file(tensors, path)
    loaded(path, tensors)


def test_four_bits_without_a_dimension(path: Path) -> None:
    """Two values in one element have nowhere to go, and safetensors saves none either."""
    if "F4" not in DTYPES:
        pytest.skip("this torch has no float4_e2m1fn_x2")
    with pytest.raises(ValueError, match="'a'"):
        nvme_ops.save({"a": torch.zeros((), dtype=torch.uint8).view(DTYPES["F4"])}, path)


LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "transposed": lambda tensor: tensor.t(),
    "every third": lambda tensor: tensor[:, 1::3],
    "a column": lambda tensor: tensor[:, 2],
    "a part": lambda tensor: tensor[3:, 2:7],
    "a row": lambda tensor: tensor[5],
    "one value": lambda tensor: tensor[1, 1],
    "expanded": lambda tensor: tensor[0].expand(4, -1),
    "expanded from one": lambda tensor: tensor[0, 0].expand(3, 5),
    "permuted": lambda tensor: tensor[:6, :8].reshape(2, 3, 2, 4).permute(3, 1, 0, 2),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.int8, torch.bool, torch.bfloat16, torch.complex64])
def test_tensors_that_lie_otherwise(path: Path, layout: str, dtype: torch.dtype) -> None:
    round_trip(path, {"a": LAYOUTS[layout](filled(dtype, 11, 13)), "b": filled(dtype, 5)})


@pytest.mark.parametrize("shape", [(9, 600_001), (3, 5_000_000), (2, 3, 2_000_003), (20_000_000, 1)])
def test_large_tensors_that_lie_otherwise(path: Path, shape: tuple[int, ...]) -> None:
    """Longer than the buffers they pass through."""
    tensor = filled(torch.int16, *shape[::-1]).permute(*range(len(shape) - 1, -1, -1))
    nvme_ops.save({"a": tensor, "b": filled(torch.float32, 3)}, path)
    assert torch.equal(nvme_ops.load(path, verify=True)["a"], tensor)
    target = torch.zeros(shape[::-1], dtype=torch.int16).permute(*range(len(shape) - 1, -1, -1))
    nvme_ops.load(path, into={"a": target}, keys=["a"], verify=True)
    assert torch.equal(target, tensor)


def test_conjugates_and_negatives(path: Path) -> None:
    value = filled(torch.complex64, 40)
    tensors = {
        "conjugate": value.conj(),
        "of few": value.clone()[::7].conj(),
        "imaginary": value.clone().conj().imag,
        "negative": torch._neg_view(filled(torch.float64, 7)),
        "negative of one byte": torch._neg_view(filled(torch.int8, 5)),
    }
    assert tensors["imaginary"].is_neg()
    round_trip(path, tensors)


def test_parameters_and_their_gradients(path: Path) -> None:
    model = torch.nn.Linear(3, 4)
    model(torch.ones(3)).sum().backward()
    found = round_trip(path, dict(model.named_parameters()))
    assert not any(tensor.requires_grad for tensor in found.values())


@given(st.dictionaries(st.text(st.characters(exclude_categories=["Cs"]), max_size=8), st.integers(0, 5), max_size=6))
@example({"": 1, '"\\\n\t\0\x7f\u2028': 2, "\U0001f600": 3, "\u00e9": 4, "e\u0301": 5, "/": 0, "__metadata": 1})
@settings(IN_A_FOLDER, max_examples=40)
def test_any_names(path: Path, sizes: dict[str, int]) -> None:
    sizes.pop("__metadata__", None)
    round_trip(path, {name: filled(torch.int32, size) for name, size in sizes.items()})


def test_thousands_of_tensors(path: Path) -> None:
    kinds = [torch.float32, torch.int8, torch.bfloat16, torch.int64]
    round_trip(path, {f"layer.{number}": filled(kinds[number % 4], number % 17, 3) for number in range(3000)})


def test_each_backend(path: Path, handle: aio_handle) -> None:
    tensors = {"a": filled(torch.int8, 3 * MIB + 1), "b": filled(torch.float32, 700, 900).t()}
    nvme_ops.save(tensors, path, handle=handle)
    loaded(path, tensors, verify=True, handle=handle)


def test_no_tensors(path: Path) -> None:
    assert round_trip(path, {}) == {}


def test_another_suffix(folder: Path) -> None:
    nvme_ops.save({"a": torch.ones(2)}, folder / "model.bak", format="safetensors")
    assert_same(nvme_ops.load(folder / "model.bak", format="safetensors"), {"a": torch.ones(2)})
    with pytest.raises(ValueError, match=r"model\.bak: the name does not end with"):
        nvme_ops.load(folder / "model.bak")


def test_new_tensors_can_be_changed_alone(path: Path) -> None:
    nvme_ops.save({"a": torch.zeros(3), "b": torch.zeros(3)}, path)
    for mmap in (True, False):
        found = nvme_ops.load(path, mmap=mmap)
        found["a"] += 1
        assert found["b"].tolist() == nvme_ops.load(path, mmap=True)["a"].tolist() == [0, 0, 0]


@pytest.mark.parametrize("mmap", [True, False])
def test_tensors_outlive_the_file(path: Path, mmap: bool) -> None:
    tensors = {"a": filled(torch.float32, 3000), "b": filled(torch.int8, 7)}
    nvme_ops.save(tensors, path)
    found = nvme_ops.load(path, mmap=mmap)
    nvme_ops.save({"a": torch.zeros(1)}, path)
    path.unlink()
    assert_same(found, tensors)


def test_data_begin_on_a_page(path: Path) -> None:
    """So that large tensors go from the device to memory without a copy."""
    nvme_ops.save({"a": torch.ones(5, dtype=torch.int8), "b": torch.zeros(100, dtype=torch.int64)}, path)
    (length,) = struct.unpack("<Q", path.read_bytes()[:8])
    assert (8 + length) % 4096 == 0
    assert all(tensor.data_ptr() % tensor.element_size() == 0 for tensor in nvme_ops.load(path).values())


# Metadata


def test_metadata(path: Path) -> None:
    tensors = {"a": torch.ones(2)}
    nvme_ops.save(tensors, path, metadata={"step": "7", "é\n": '"'})
    with safetensors.safe_open(path, "pt") as file:
        words = file.metadata()
    assert words.pop(integrity.KEY)
    assert words == {"format": "pt", "step": "7", "é\n": '"'}
    nvme_ops.save(tensors, path, metadata={"format": "np"}, checksums=False)
    with safetensors.safe_open(path, "pt") as file:
        assert file.metadata() == {"format": "np"}


def test_metadata_of_another_file(path: Path) -> None:
    """Its checksums are not taken for this one's."""
    nvme_ops.save({"a": torch.ones(2)}, path)
    with safetensors.safe_open(path, "pt") as file:
        words = file.metadata()
    round_trip(path, {"a": torch.zeros(2), "b": torch.zeros(3)}, metadata=words)
    nvme_ops.save({"a": torch.ones(2)}, path, metadata=words, checksums=False)
    with pytest.raises(ValueError, match="no checksums"):
        nvme_ops.load(path, verify=True)


def test_metadata_of_theirs(path: Path) -> None:
    their.save_file({"a": torch.ones(2)}, path, metadata={"é": "1"})
    loaded(path, {"a": torch.ones(2)})


@pytest.mark.parametrize("words", [{"a": 1}, {1: "a"}, {"a": None}])
def test_metadata_must_be_strings(path: Path, words: Any) -> None:
    with pytest.raises(TypeError, match="metadata"):
        nvme_ops.save({}, path, metadata=words)
    assert not path.exists()


# Files of other writers


def by_hand(path: Path, tensors: Tensors, before: str = "", after: str = "") -> None:
    """In the order given, without a thought for alignment; blanks may surround the header."""
    document, data = {}, b""
    for name, tensor in tensors.items():
        dtype = next(name for name, dtype in DTYPES.items() if dtype == tensor.dtype)
        content = raw(tensor).numpy().tobytes()
        place = [len(data), len(data) + len(content)]
        document[name] = {"data_offsets": place, "shape": list(tensor.shape), "dtype": dtype}
        data += content
    text = (before + json.dumps(document, indent=1) + after).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


@pytest.mark.parametrize("blanks", range(9))
def test_unaligned_headers(path: Path, blanks: int) -> None:
    tensors = {"a": filled(torch.int8, 3), "b": filled(torch.float64, 5), "none": filled(torch.float32, 0)}
    tensors |= {"c": filled(torch.int16, 70_000), "d": filled(torch.uint8, 1), "e": filled(torch.complex64, 30_000)}
    by_hand(path, tensors, before=" " * blanks, after="\n")
    assert_same(their.load_file(path), tensors)
    loaded(path, tensors)
    loaded(path, {"b": tensors["b"], "e": tensors["e"]}, keys=["e", "b"])
    targets = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    nvme_ops.load(path, into=targets)
    assert_same(targets, tensors)


@given(st.integers(0, 5000))
@example(0)
@example(8)
@settings(IN_A_FOLDER, max_examples=40)
def test_a_file_cut_short(path: Path, size: int) -> None:
    nvme_ops.save({"a": filled(torch.int8, 1000)}, path)
    content = path.read_bytes()
    path.write_bytes(content[: min(size, len(content) - 1)])
    with pytest.raises(FormatError, match=r"model\.safetensors"):
        nvme_ops.load(path)


# What it cannot hold


@pytest.mark.parametrize(
    ("make", "kind", "words"),
    [
        (lambda: [torch.ones(1)], TypeError, "not list"),
        (lambda: {"a": {"b": torch.ones(1)}}, TypeError, "'a' is a dict"),
        (lambda: {"a": 1.5}, TypeError, "'a' is a float"),
        (lambda: {3: torch.ones(1)}, TypeError, "must be str"),
        (lambda: {"__metadata__": torch.ones(1)}, ValueError, "'__metadata__'"),
        (lambda: {"a\ud800": torch.ones(1)}, ValueError, "'a.ud800'"),
        (lambda: {"a": torch.ones(1, dtype=torch.complex128)}, ValueError, "'a'.*complex128"),
        (lambda: {"a": torch.eye(2).to_sparse()}, ValueError, "'a'.*sparse_coo"),
        (lambda: {"a": torch.eye(2).to_sparse_csr()}, ValueError, "'a'.*sparse_csr"),
        (lambda: {"a": torch.ones(1, device="meta")}, ValueError, "'a'.*meta"),
        (lambda: {"a": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])}, ValueError, "'a'"),
        (lambda: {"a": torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)}, ValueError, "'a'.*qint8"),
    ],
)
@pytest.mark.filterwarnings("ignore")  # of what torch will drop
def test_what_the_format_has_no_place_for(
    path: Path, make: Callable[[], Any], kind: type[Exception], words: str
) -> None:
    nvme_ops.save({"old": torch.ones(1)}, path)
    with pytest.raises(kind, match=words):
        nvme_ops.save(make(), path)
    assert nvme_ops.load(path).keys() == {"old"}
    assert [each.name for each in path.parent.iterdir()] == [path.name]


@st.composite
def views(draw: st.DrawFn) -> Tensors:
    """Of two memories, contiguous, none empty: of an empty one theirs says that it shares what it lies in."""
    memories = [torch.zeros(64, dtype=torch.uint8) for _ in range(2)]
    tensors = {}
    for number in range(draw(st.integers(2, 5))):
        dtype = draw(st.sampled_from([torch.uint8, torch.int16, torch.float32]))
        first = draw(st.integers(0, 15))
        last = draw(st.integers(first + 1, 16))
        part = draw(st.sampled_from(memories))[first * 4 : last * 4].view(dtype)
        tensors[f"{number}"] = part
    return tensors


@given(views())
@settings(IN_A_FOLDER, max_examples=150)
def test_shared_memory_is_refused_as_they_do(path: Path, tensors: Tensors) -> None:
    def refuses(save: Callable[[], object], kind: type[Exception]) -> bool:
        try:
            save()
        except kind as error:
            return "share memory" in str(error)
        return False

    theirs = refuses(lambda: their.save(tensors), RuntimeError)
    assert refuses(lambda: nvme_ops.save(tensors, path, durable=False), ValueError) == theirs


def test_shared_memory_is_named(path: Path) -> None:
    tensor = torch.zeros(10)
    for other in (tensor, tensor[3:], tensor.view(5, 2), tensor[::2], tensor.expand(3, 10), tensor.detach()):
        with pytest.raises(ValueError, match=r"'(a|b)' and '(a|b)' share memory"):
            nvme_ops.save({"a": tensor, "b": other, "c": torch.zeros(1)}, path)


def test_parts_of_one_memory(path: Path) -> None:
    whole = filled(torch.float32, 6, 10)
    round_trip(path, {"a": whole[:2], "b": whole[3:], "none": whole[1:1], "c": whole[2, :4], "d": whole[2, 4:]})


# Loading parts, and into what exists


def test_keys(path: Path) -> None:
    tensors = {f"{number}": filled(torch.float32, number * 1000) for number in range(20)}
    nvme_ops.save(tensors, path)
    for keys in (["3", "17", "4"], ("3", "3"), [], ["0"], {"5": None}, tensors):
        loaded(path, {name: tensors[name] for name in keys}, keys=keys, verify=True)
    assert_same(nvme_ops.load(path, keys=iter(["19"])), {"19": tensors["19"]})
    assert_same(nvme_ops.load(path, keys="19"), {"19": tensors["19"]})
    with pytest.raises(KeyError, match=r"model\.safetensors has no tensor 'x'"):
        nvme_ops.load(path, keys=["1", "x"])


def test_keys_of_every_other_tensor(path: Path) -> None:
    tensors = {f"{number:04}": filled(torch.int16, 50 + number % 3, 7) for number in range(1000)}
    nvme_ops.save(tensors, path)
    names = list(tensors)[::2]
    loaded(path, {name: tensors[name] for name in names}, keys=names)


INTO: dict[str, Callable[[], torch.Tensor]] = {
    "contiguous": lambda: torch.zeros(60, 50),
    "transposed": lambda: torch.zeros(50, 60).t(),
    "a part": lambda: torch.zeros(70, 99)[5:65, 7:57],
    "every other": lambda: torch.zeros(120, 100)[::2, ::2],
    "a parameter": lambda: torch.nn.Parameter(torch.zeros(60, 50)),
    "off by a value": lambda: torch.zeros(3001)[1:].view(60, 50),
    "negative": lambda: torch._neg_view(torch.zeros(60, 50)),
    "pooled": lambda: nvme_ops.empty(60, 50, dtype=torch.float32),
}


@pytest.mark.parametrize("kind", INTO)
def test_into_a_tensor_of_any_kind(path: Path, kind: str) -> None:
    tensors, target = {"a": filled(torch.float32, 60, 50), "b": filled(torch.int8, 33)}, INTO[kind]()
    nvme_ops.save(tensors, path)
    place = target.data_ptr()
    targets = {"a": target, "b": torch.zeros(33, dtype=torch.int8), "epoch": 3}
    found = nvme_ops.load(path, into=targets, verify=True)
    assert_same(found, tensors)
    assert torch.equal(raw(target), raw(tensors["a"]))
    assert found["a"].data_ptr() == target.data_ptr() == place
    assert targets["a"] is target


def test_into_conjugates(path: Path) -> None:
    tensors = {"a": filled(torch.complex64, 30)}
    nvme_ops.save(tensors, path)
    for target in (torch.zeros(30, dtype=torch.complex64).conj(), torch.zeros(60, dtype=torch.complex64)[::2].conj()):
        nvme_ops.load(path, into={"a": target}, verify=True)
        assert_same({"a": target}, tensors)


def test_into_a_module(path: Path) -> None:
    def make() -> torch.nn.Module:
        layers = [torch.nn.Linear(30, 40), torch.nn.BatchNorm1d(40), torch.nn.Linear(40, 5).to(torch.bfloat16)]
        return torch.nn.Sequential(*layers)

    saved, model = make(), make()
    nvme_ops.save(saved.state_dict(), path)
    weight = model.get_parameter("0.weight")
    nvme_ops.load(path, into=model, verify=True)
    assert_same(model.state_dict(), saved.state_dict())
    assert model.get_parameter("0.weight") is weight
    assert weight.requires_grad


@pytest.mark.parametrize("other", [torch.zeros(5, 4), torch.zeros(20), torch.zeros(4, 5, dtype=torch.int32)])
def test_into_another_shape_or_dtype(path: Path, other: torch.Tensor) -> None:
    """Is refused before anything is filled."""
    nvme_ops.save({"a": torch.ones(4, 5), "b": torch.ones(2)}, path)
    targets = {"a": other, "b": torch.zeros(2)}
    with pytest.raises(ValueError, match=r"model\.safetensors: tensor 'a' is torch\.float32 of shape \(4, 5\)"):
        nvme_ops.load(path, into=targets)
    assert targets["b"].tolist() == [0, 0]


def test_into_other_names(path: Path) -> None:
    nvme_ops.save({"a": torch.ones(2), "b": torch.ones(2)}, path)
    targets = {"a": torch.zeros(2), "c": torch.zeros(2)}
    with pytest.raises(KeyError, match="'b' has no counterpart"):
        nvme_ops.load(path, into=targets)
    nvme_ops.load(path, into=targets, keys=["a"])
    assert targets["a"].tolist() == [1, 1]
    targets = {name: torch.zeros(2) for name in "abc"}
    with pytest.raises(KeyError, match=r"model\.safetensors has no tensor 'c', which into= asks for"):
        nvme_ops.load(path, into=targets)


def test_map_location(path: Path) -> None:
    nvme_ops.save({"a": torch.ones(2)}, path)
    for place in (None, "cpu", torch.device("cpu")):
        assert nvme_ops.load(path, map_location=place)["a"].device.type == "cpu"
    with pytest.raises(TypeError, match="map_location of safetensors files must be a device, not dict"):
        nvme_ops.load(path, map_location={"cuda:0": "cpu"})


def test_what_both_writers_write_is_read_the_short_way(folder: Path) -> None:
    tensors = {"a": torch.ones(2, 3), "é ü": torch.zeros(0, dtype=torch.int8), "c": torch.ones(()).bfloat16()}
    nvme_ops.save(tensors, folder / "ours.safetensors", metadata={"quote": '"', "step": "7"})
    their.save_file(tensors, folder / "theirs.safetensors", {"step": "7"})
    for path in folder.iterdir():
        content = path.read_bytes()
        text = content[8 : 8 + int.from_bytes(content[:8], "little")]
        found = layout._read_plainly(text, 0, str(path))
        assert found is not None
        assert found == layout._read_strictly(text, 0, str(path))
