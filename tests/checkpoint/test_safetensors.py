"""safetensors files, beside safetensors' own library: each reads what the other saved, and to the same tensors."""

from __future__ import annotations

import json
import os
import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

import nvme_ops
from nvme_ops import aio_handle
from nvme_ops.base.errors import ChecksumError, FormatError
from nvme_ops.checkpoint.contents import contents, damaged
from nvme_ops.formats import integrity
from nvme_ops.formats import safetensors_format as layout
from nvme_ops.formats.safetensors_format import DTYPES
from tests import conftest
from tests.conftest import REPOSITORY, pattern

safetensors = pytest.importorskip("safetensors", reason="safetensors is not installed: pip install safetensors")
their = pytest.importorskip("safetensors.torch")

Tensors = dict[str, torch.Tensor]
IN_A_FOLDER = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=15)


def filled(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Any bits there can be, also those that are no numbers."""
    if dtype is torch.bool:
        return pattern(torch.Size(shape).numel()).view(shape) % 2 == 1
    return pattern(torch.Size(shape).numel() * dtype.itemsize).view(dtype).view(shape)


def raw(tensor: torch.Tensor) -> torch.Tensor:
    """Its bytes in row-major order."""
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return plain.view(-1).view(torch.uint8) if tensor.nbytes else torch.empty(0, dtype=torch.uint8)


def assert_same(actual: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (actual[name].dtype, actual[name].shape) == (tensor.dtype, tensor.shape), name
        assert torch.equal(raw(actual[name]), raw(tensor)), name


def round_trip(path: Path, tensors: Mapping[str, torch.Tensor], **options: Any) -> Tensors:
    """Saved by us, read by their library, and loaded by us."""
    nvme_ops.save(tensors, path, **options)
    assert_same(their.load_file(path), tensors)
    stored = {name: bytes(entry["data"]) for name, entry in safetensors.deserialize(path.read_bytes())}
    assert stored == {name: raw(tensor).numpy().tobytes() for name, tensor in tensors.items()}
    return loaded(path, tensors, verify=True)


def loaded(path: Path, expected: Mapping[str, torch.Tensor], **options: Any) -> Tensors:
    """The file's tensors, by a mapping of the file and without, if they are as expected."""
    for mmap in (True, False):
        tensors: Tensors = nvme_ops.load(path, mmap=mmap, **options)
        assert_same(tensors, expected)
    return tensors


@pytest.fixture
def path(folder: Path) -> Path:
    return folder / "model.safetensors"


# What a file can hold

LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "transposed": lambda tensor: tensor.t(),
    "every third": lambda tensor: tensor[:, 1::3],
    "a column": lambda tensor: tensor[:, 2],
    "a part": lambda tensor: tensor[3:, 2:7],
    "one value": lambda tensor: tensor[1, 1],
    "expanded": lambda tensor: tensor[0].expand(4, -1),
    "expanded from one": lambda tensor: tensor[0, 0].expand(3, 5),
    "permuted": lambda tensor: tensor[:6, :8].reshape(2, 3, 2, 4).permute(3, 1, 0, 2),
}


def test_every_dtype_and_layout(path: Path) -> None:
    shapes = [(), (1,), (0,), (3, 0), (0, 4, 2), (7,), (3, 4), (2, 1, 3, 2)]
    tensors = {f"{kind} {shape}": filled(dtype, *shape) for kind, dtype in DTYPES.items() for shape in shapes if shape}
    tensors |= {f"{kind} ()": filled(dtype) for kind, dtype in DTYPES.items() if kind != "F4"}
    for dtype in (torch.float32, torch.int8, torch.complex64):
        tensors |= {f"{dtype} {name}": make(filled(dtype, 11, 13)) for name, make in LAYOUTS.items()}
    whole = filled(torch.float32, 6, 10)
    tensors |= {"1": whole[:2], "2": whole[3:], "none": whole[1:1], "3": whole[2, :4], "4": whole[2, 4:]}
    round_trip(path, tensors)
    their.save_file({name: tensor.contiguous().clone() for name, tensor in tensors.items()}, path)
    loaded(path, tensors)


def test_large_tensors_that_lie_otherwise(path: Path, handle: aio_handle) -> None:
    """Longer than the buffers they pass through, by each backend."""
    tensor = filled(torch.int16, 2_000_003, 3, 2).permute(2, 1, 0)
    nvme_ops.save({"a": tensor, "b": filled(torch.float32, 3)}, path, durable=False, handle=handle)
    target = torch.zeros(2_000_003, 3, 2, dtype=torch.int16).permute(2, 1, 0)
    nvme_ops.load(path, into={"a": target}, keys=["a"], verify=True, handle=handle)
    assert torch.equal(target, tensor)
    assert torch.equal(their.load_file(path)["a"], tensor)


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
    for target in (torch.zeros(40, dtype=torch.complex64).conj(), torch.zeros(80, dtype=torch.complex64)[::2].conj()):
        nvme_ops.load(path, into={"conjugate": target}, keys=["conjugate"], verify=True)
        assert_same({"a": target}, {"a": value.conj()})


@given(st.dictionaries(st.text(st.characters(exclude_categories=["Cs"]), max_size=8), st.integers(0, 5), max_size=6))
@example({"": 1, '"\\\n\t\0\x7f\u2028': 2, "\U0001f600": 3, "\u00e9": 4, "e\u0301": 5, "/": 0, "__metadata": 1})
@example({})
@IN_A_FOLDER
def test_any_names(path: Path, sizes: dict[str, int]) -> None:
    sizes.pop("__metadata__", None)
    round_trip(path, {name: filled(torch.int32, size) for name, size in sizes.items()}, durable=False)


@pytest.mark.parametrize("mmap", [True, False])
def test_new_tensors_can_be_changed_alone_and_outlive_the_file(path: Path, mmap: bool) -> None:
    tensors = {"a": filled(torch.float32, 300_000), "b": filled(torch.int8, 7)}
    nvme_ops.save(tensors, path)
    conftest.store(path, conftest.contents(path))  # not in the page cache: data are read while the header is parsed
    nvme_ops.save({name: tensor * 0 for name, tensor in tensors.items()}, path.with_name("other.safetensors"))
    result = nvme_ops.load(path, mmap=mmap)
    nvme_ops.save({"a": torch.zeros(1)}, path)
    path.unlink()
    assert_same(result, tensors)
    version = result["b"]._version
    result["a"].zero_()
    assert_same({"b": result["b"]}, {"b": tensors["b"]})
    assert result["b"]._version == version


def test_data_begin_on_a_page(path: Path) -> None:
    """So that large tensors go from the device to memory without a copy."""
    nvme_ops.save({"a": torch.ones(16, dtype=torch.int8), "b": torch.ones(65536, dtype=torch.int8)}, path)
    (length,) = struct.unpack("<Q", path.read_bytes()[:8])
    assert (8 + length) % 4096 == 0
    assert nvme_ops.load(path, keys=["b"])["b"].data_ptr() % 4096 == 16


# Metadata


def words_in(path: Path) -> Any:
    with safetensors.safe_open(path, "pt") as file:
        return file.metadata()


def test_metadata(path: Path) -> None:
    tensors = {"a": torch.ones(2)}
    nvme_ops.save(tensors, path, metadata={"step": "7", "é\n": '"'})
    words = words_in(path)
    round_trip(path, {"a": torch.zeros(2), "b": torch.zeros(3)}, metadata=words)  # its checksums are not this one's
    nvme_ops.save(tensors, path, metadata=words, checksums=False)
    assert words_in(path) == {"format": "pt", "step": "7", "é\n": '"'}
    nvme_ops.save(tensors, path, metadata={"format": "np"}, checksums=False)
    assert words_in(path) == {"format": "np"}


# Files of other writers


@pytest.mark.parametrize("blanks", [0, 3, 7, 8])
def test_unaligned_headers(path: Path, blanks: int) -> None:
    tensors = {"a": filled(torch.int8, 3), "b": filled(torch.float64, 5), "none": filled(torch.float32, 0)}
    tensors |= {"c": filled(torch.int16, 70_000), "d": filled(torch.uint8, 1), "e": filled(torch.complex64, 30_000)}
    document, data = {}, b""
    for name, tensor in tensors.items():
        content = raw(tensor).numpy().tobytes()
        place = [len(data), len(data) + len(content)]
        document[name] = {"data_offsets": place, "shape": list(tensor.shape), "dtype": layout.NAMES[tensor.dtype]}
        data += content
    text = (" " * blanks + json.dumps(document, indent=1) + "\n").encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    assert_same(their.load_file(path), tensors)
    loaded(path, tensors)
    loaded(path, {"b": tensors["b"], "e": tensors["e"]}, keys=["e", "b"])
    targets = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    nvme_ops.load(path, into=targets)
    assert_same(targets, tensors)


# What it cannot hold

WHOLE = torch.zeros(10)


@pytest.mark.parametrize(
    ("make", "kind", "words"),
    [
        (lambda: {3: torch.ones(1)}, TypeError, "must be str"),
        (lambda: {"__metadata__": torch.ones(1)}, ValueError, "'__metadata__'"),
        (lambda: {"a\ud800": torch.ones(1)}, ValueError, "'a.ud800'"),
        (lambda: {"a": torch.ones(1, dtype=torch.complex128)}, ValueError, "'a'.*complex128"),
        (lambda: {"a": torch.eye(2).to_sparse()}, ValueError, "'a'.*sparse_coo"),
        (lambda: {"a": torch.ones(1, device="meta")}, ValueError, "'a'.*meta"),
        (lambda: {"a": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])}, ValueError, "'a'"),
        (lambda: {"a": torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)}, ValueError, "'a'.*qint8"),
        (lambda: {"a": torch.zeros((), dtype=torch.uint8).view(torch.float4_e2m1fn_x2)}, ValueError, "'a'"),
        *(
            (lambda view=view: {"a": WHOLE, "b": view(WHOLE), "c": torch.zeros(1)}, ValueError, "'[ab]' .*share memory")
            for view in (torch.detach, lambda base: base[3:], lambda base: base.expand(3, 10))
        ),
    ],
)
@pytest.mark.filterwarnings("ignore")  # of what torch will drop
def test_what_the_format_has_no_place_for(path: Path, make: Any, kind: type[Exception], words: str) -> None:
    nvme_ops.save({"old": torch.ones(1)}, path)
    try:
        wrong = make()
    except AttributeError:
        pytest.skip("this torch has no float4_e2m1fn_x2")
    with pytest.raises(kind, match=words):
        nvme_ops.save(wrong, path)
    assert nvme_ops.load(path).keys() == {"old"}
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]


# Loading parts, and into what exists


def test_keys(path: Path) -> None:
    tensors = {f"{number}": filled(torch.float32, number * 1000) for number in range(20)}
    nvme_ops.save(tensors, path)
    for keys in (["3", "17", "4"], ("3", "3"), [], {"5": None}, tensors):
        loaded(path, {name: tensors[name] for name in keys}, keys=keys, verify=True)
    assert_same(nvme_ops.load(path, keys=iter(["19"])), {"19": tensors["19"]})
    assert_same(nvme_ops.load(path, keys="19"), {"19": tensors["19"]})
    with pytest.raises(KeyError, match=r"model\.safetensors has no tensor 'x'"):
        nvme_ops.load(path, keys=["1", "x"])


INTO: dict[str, Callable[[], torch.Tensor]] = {
    "contiguous": lambda: torch.zeros(60, 50),
    "transposed": lambda: torch.zeros(50, 60).t(),
    "every other": lambda: torch.zeros(120, 100)[::2, ::2],
    "a parameter": lambda: torch.nn.Parameter(torch.zeros(60, 50)),
    "off by a value": lambda: torch.zeros(3001)[1:].view(60, 50),
    "negative": lambda: torch._neg_view(torch.zeros(60, 50)),
    "pooled": lambda: nvme_ops.empty(60, 50, dtype=torch.float32),
}


def test_into_a_tensor_of_any_kind(path: Path) -> None:
    tensors = {"a": filled(torch.float32, 60, 50), "b": filled(torch.int8, 33)}
    nvme_ops.save(tensors, path)
    for kind, make in INTO.items():
        target = make()
        targets = {"a": target, "b": torch.zeros(33, dtype=torch.int8), "epoch": 3}
        result = nvme_ops.load(path, into=targets, verify=True)
        assert_same(result, tensors)
        assert torch.equal(raw(target), raw(tensors["a"])), kind
        assert result["a"].data_ptr() == target.data_ptr()


@pytest.mark.parametrize("name", ["model.safetensors", "model.pt", "folder"])
def test_nothing_is_filled_before_all_is_known_to_fit(folder: Path, name: str) -> None:
    path, b = folder / name, torch.zeros(2).half()
    nvme_ops.save({"b": torch.ones(2).half(), "a": torch.ones(4, 5)}, path)
    for into, kind, words in (
        ({"a": torch.zeros(5, 4)}, ValueError, r"'a' is torch\.float32 of shape \(4, 5\)"),
        ({"a": torch.zeros(4, 5, dtype=torch.int32)}, ValueError, r"'a' is torch\.float32 of shape \(4, 5\)"),
        ({"a": torch.zeros(1, 5).expand(4, 5)}, ValueError, "'a'"),
        ({"a": torch.empty(4, 5, device="meta")}, ValueError, "'a'"),
        ({"c": torch.zeros(2)}, KeyError, "'a' has no counterpart"),
        ({"a": torch.zeros(4, 5), "c": torch.zeros(2)}, KeyError, "has no tensor 'c', which into= asks for"),
    ):
        with pytest.raises(kind, match=words):
            nvme_ops.load(path, into={**into, "b": b})
        assert b.tolist() == [0, 0]
    nvme_ops.load(path, into={**into, "b": b}, keys=["b"])
    assert b.tolist() == [1, 1]
    result = nvme_ops.load(path, map_location="meta", verify=True)
    assert {name: (tensor.device.type, tensor.dtype, tuple(tensor.shape)) for name, tensor in result.items()} == {
        "a": ("meta", torch.float32, (4, 5)),
        "b": ("meta", torch.float16, (2,)),
    }


# Checksums

CHECKED = {"a": filled(torch.float32, 500), "none": torch.zeros(0), "t": filled(torch.int16, 70, 30).t()}
SIZE = sum(tensor.nbytes for tensor in CHECKED.values())


@given(st.integers(0, SIZE * 8 - 1))
@example(0)
@example(SIZE * 8 - 1)
@IN_A_FOLDER
def test_a_flipped_bit_anywhere_is_found(path: Path, bit: int) -> None:
    nvme_ops.save(CHECKED, path, durable=False)
    content = bytearray(path.read_bytes())
    content[len(content) - SIZE + bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)
    wrong = "a" if bit // 8 < CHECKED["a"].nbytes else "t"
    targets = {name: torch.zeros_like(tensor) for name, tensor in CHECKED.items()}
    for options in ({"mmap": True}, {"mmap": False}, {"into": targets}, {"keys": [wrong]}):
        with pytest.raises(ChecksumError) as caught:
            nvme_ops.load(path, verify=True, **options)
        assert (caught.value.tensors, caught.value.filename) == ([wrong], str(path))
    nvme_ops.load(path)
    nvme_ops.load(path, verify=True, keys=[name for name in CHECKED if name != wrong])


def test_no_flipped_bit_of_a_header_goes_unnoticed(path: Path) -> None:
    nvme_ops.save({"tensor": torch.ones(2, 3)}, path, metadata={"step": "7"}, durable=False)
    content = path.read_bytes()
    end = content.rindex(b"}") + 4  # and some of the spaces behind it
    for place in range(end):
        for bit in (place % 8, (place + 5) % 8):
            path.write_bytes(content[:place] + bytes([content[place] ^ 1 << bit]) + content[place + 1 :])
            with pytest.raises((FormatError, ChecksumError, ValueError)):
                nvme_ops.load(path, verify=True)
    path.write_bytes(content.replace(b'"step":"7"', b'"step":"6"'))
    assert nvme_ops.load(path).keys() == {"tensor"}
    assert damaged(contents(path)) == ["header"]


def test_files_without_checksums_or_with_others(path: Path) -> None:
    tensors = {name: tensor.contiguous() for name, tensor in CHECKED.items()}
    for save in (lambda: their.save_file(tensors, path), lambda: nvme_ops.save(CHECKED, path, checksums=False)):
        save()
        with pytest.raises(ValueError, match=r"model\.safetensors has no checksums to verify"):
            nvme_ops.load(path, verify=True)
    their.save_file({}, path)
    assert nvme_ops.load(path, verify=True) == {}
    for words in ("", "0" * 31, "0" * 33, "x" * 32, "-" + "0" * 31):  # as of other tensors
        their.save_file(tensors, path, {integrity.KEY: words})
        with pytest.raises(FormatError, match=rf"model\.safetensors: __metadata__: {integrity.KEY} does not match"):
            nvme_ops.load(path, verify=True)
        assert_same(nvme_ops.load(path), CHECKED)
    nvme_ops.save({f"{number:02}": filled(torch.int8, 5) for number in range(30)}, path)
    content = path.read_bytes()
    path.write_bytes(content[:-150] + bytes(byte ^ 1 for byte in content[-150:]))
    with pytest.raises(ChecksumError, match="'09' and 20 more") as caught:
        nvme_ops.load(path, verify=True)
    assert caught.value.tensors == [f"{number:02}" for number in range(30)]


# Their own tests, on our functions: only what is listed with its reason differs


@pytest.mark.slow
def test_only_what_is_listed_differs() -> None:
    try:
        socket.create_connection(("pypi.org", 443), timeout=10).close()
    except OSError:
        pytest.skip("pypi.org cannot be reached, which has the tests")
    done = subprocess.run(
        [sys.executable, "tools/safetensors_suite.py"], cwd=REPOSITORY, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "NOT EXPECTED" not in done.stdout


# The parser of headers, beside safetensors' own: what one accepts the other does, and to the same tensors.
#
# Two deviations are wanted, both refusals: of tensors that have one name, of which safetensors keeps the last, and of
# tensors described by an array, which no writer makes. How deeply unknown fields may be nested is no matter.


Found = dict[str, tuple[str, tuple[int, ...], bytes]]


def by_safetensors(content: bytes) -> Found | None:
    """The tensors' dtypes, shapes and bytes, or None where it refuses."""
    try:
        tensors = safetensors.deserialize(content)
    except safetensors.SafetensorError:
        return None
    return {name: (entry["dtype"], tuple(entry["shape"]), bytes(entry["data"])) for name, entry in tensors}


def by_us(content: bytes) -> Found | None:
    """The same by way of a file that has no name."""
    fd = os.memfd_create("header")
    try:
        os.write(fd, content)
        header = layout.read(fd, "the file")
    except FormatError:
        return None
    finally:
        os.close(fd)
    return {name: (item.dtype, item.shape, content[item.start : item.end]) for name, item in header.entries.items()}


def is_wanted_deviation(content: bytes) -> bool:
    """Whether several tensors have one name, or an array describes a tensor."""
    (length,) = struct.unpack("<Q", content[:8])
    try:
        pairs = json.loads(content[8 : 8 + length].decode(), object_pairs_hook=tuple)  # an array is a list
    except (ValueError, RecursionError):
        return False
    return len(dict(pairs)) < len(pairs) or any(isinstance(value, list) for _, value in pairs)


def agree(content: bytes) -> None:
    theirs, ours = by_safetensors(content), by_us(content)
    assert ours == theirs or (ours is None and is_wanted_deviation(content)), content


# Files that are nearly right


def file_of(text: str | bytes, data: int = 0, length: int | None = None) -> bytes:
    """A file with this header, so much data, and another length than the right one."""
    raw = text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass")
    content = bytes(index % 251 for index in range(data))
    return struct.pack("<Q", len(raw) if length is None else length) + raw + content


def tensor(extra: str = "", shape: str = "[2]", offsets: str = "[0,2]", dtype: str = '"U8"') -> str:
    return f'{{"a":{{"dtype":{dtype},"shape":{shape},"data_offsets":{offsets}{extra}}}}}'


OTHER = '"b":{"dtype":"U8","shape":[2],"data_offsets":'

#: In JSON, or nearly: a place of a header may have any of them.
VALUES = [
    "0", "1", "-1", "-0", "2", "8", "007", "+1", "1.", ".5", "2.0", "2e0", "8E0", "0e0", "-0.0", "0.5", "1e308",
    "1e309", "-1e400", "1e-400", "1e99999999999999999999", "NaN", "Infinity", "-Infinity", "4294967295", "4294967296",
    "9223372036854775807", "9223372036854775808", "18446744073709551615", "18446744073709551616", "1" * 308, "9" * 309,
    "-" + "9" * 400, "9" * 5000, "123456789012345678901e300", "0." + "0" * 500 + "1", "0x8", "1_0", "\u0661",
    '"U8"', '"u8"', '"I4"', '"F32"', '""', '"\\u0055\\u0038"', '"\\ud800"', '"\\ud83d\\ude00"', '"\\ude00\\ud83d"',
    '"\\\\ud800"', '"\\ud83d\\\\ude00"', '"\\u0000"', '"\\x41"', '"\x01"', '"\x7f"', '"\\/"', '"\\ud800\\u0041"',
    '"\ud800"', "'a'", '"', '"\\u00e9"', '"\\uD8', '"\\ud800\\"', "null", "true", "false", "True", "", "//", "[]", "{}",
    "[[]]", "[0,2]", "[0,8,]", "{,}", "[2,]", "[2.0]", "[1e400]", '["U8"]', '{"U8":null}', '{"U8":null,"U8":null}',
    '{"U8":1}', '{"a":1,"a":2}', '{"a":"1","a":"2"}', '{"a":1,"a":"2"}', '{"b":{"c":1,"c":1}}', '{"\\ud800":0}',
    '{"a":1e999}', '{"x":[NaN]}', "{1:2}", "{}{}", " 2 ", "\u00a02", "\x0b2", "/**/2",
    *("[" * depth + "]" * depth for depth in (100, 100_000)), '{"x":' * 100 + "0" + "}" * 100,
]  # fmt: skip
PLACES = [
    ("@", 0), ('{"a":@}', 2), (tensor(dtype="@"), 2), (tensor(shape="@"), 2), (tensor(shape="[@]"), 2),
    (tensor(shape="[2,@]"), 2), (tensor(shape="[0,@]", offsets="[0,0]"), 0), (tensor(offsets="@"), 2),
    (tensor(offsets="[@,2]"), 2), (tensor(offsets="[0,@]"), 2), (tensor(offsets="[0,2,@]"), 2), (tensor(',"x":@'), 2),
    (tensor(',"x":{"y":[@]}'), 2), (tensor(',"x":1,"x":@'), 2), (tensor(',"dtype":@'), 2), (tensor(',"shape":@'), 2),
    (tensor(',"data_offsets":@'), 2), ('{"__metadata__":@}', 0), ('{"__metadata__":{"x":@}}', 0), ("@" + tensor(), 2),
    ('{"__metadata__":@,"__metadata__":{}}', 0), ('{"\\u005f_metadata__":@,"__metadata__":{}}', 0), (tensor() + "@", 2),
    ('{"a":@,' + tensor()[1:], 2), ('{"__metadata_x":@,' + tensor()[1:], 2), ("{@:" + tensor()[5:], 2),
    (tensor()[:-1] + ",@:0}", 2),
]  # fmt: skip


@pytest.mark.parametrize(("text", "size"), PLACES)
def test_any_value_in_any_place(text: str, size: int) -> None:
    for value in VALUES:
        agree(file_of(text.replace("@", value), size))


SIZES = [
    [2**62, 0], [0, 2**62, 8], [2**62, 8, 0], [2**63, 0], [2**64 - 1, 1, 0], [2**64, 0], [2, 2**64 - 1, 0], [2**61, 8],
    [0, 2**64 - 1, 2**64 - 1], [2**32, 2**32], [2**32, 2**31], [2**40], [2**64], [2**200, 0], [0], [1], [3], [4], [8],
]  # fmt: skip


@pytest.mark.parametrize("dtype", layout._BITS)
def test_every_dtype_and_sizes_beyond_any_memory(dtype: str) -> None:
    for shape in SIZES:
        for size in {0, 1, 2, 3, 4, 6, 8, 16, 32, 64}:
            agree(file_of(tensor(shape=json.dumps(shape), offsets=f"[0,{size}]", dtype=json.dumps(dtype)), size))


# What is refused names the file and the field


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "0 bytes are too few"),
        (file_of("{}", length=100_000_000), "header length 100000000"),
        (file_of("[]"), "not a JSON object"),
        (file_of(tensor()[:-1] + "," + tensor()[1:], 2), "'a' appears twice"),
        (file_of('{"__metadata__":{"x":1}}'), "__metadata__"),
        (file_of(tensor(dtype='"Q3"'), 2), "tensor 'a': dtype 'Q3'"),
        (file_of(tensor(), 1), "cut short"),
        (file_of(tensor()[:-1] + f",{OTHER}[1,3]}}}}", 3), "tensor 'b': data_offsets begin at 1, which overlaps"),
        (file_of(tensor()[:-1] + f",{OTHER}[3,5]}}}}", 5), "tensor 'b': data_offsets begin at 3, which leaves a gap"),
    ],
)
def test_a_refusal_names_the_file_and_the_field(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    for options in ({}, {"keys": [], "verify": True}):
        with pytest.raises(FormatError) as caught:
            nvme_ops.load(path, **options)  # type: ignore[arg-type]
        assert str(path) in str(caught.value)
        assert words in str(caught.value)


@pytest.mark.parametrize(
    ("dtype", "shape", "size"),
    [
        ("F6_E2M3", "[4]", 3),  # torch has no such dtype
        ("F4", "[4,3]", 6),  # its values come by two
        ("U8", f"[0,{2**64 - 1}]", 0),
    ],
)
def test_a_tensor_that_torch_cannot_make(tmp_path: Path, dtype: str, shape: str, size: int) -> None:
    """The header is right, so the refusal comes with the tensor; others of the file can be loaded."""
    path = tmp_path / "model.safetensors"
    text = tensor(dtype=json.dumps(dtype), shape=shape, offsets=f"[0,{size}]")
    path.write_bytes(file_of(text[:-1] + f",{OTHER}[{size},{size + 2}]}}}}", size + 2))
    with pytest.raises(FormatError, match="'a'") as caught:
        nvme_ops.load(path)
    assert str(path) in str(caught.value)
    assert nvme_ops.load(path, keys="b")["b"].shape == (2,)
    path.write_bytes(file_of(tensor(shape=f"[{2**63 - 1},0]", offsets="[0,0]")))  # which it can
    assert nvme_ops.load(path)["a"].shape == (2**63 - 1, 0)
