"""The parser of safetensors headers, beside safetensors' own: what one accepts the other does, and to the same tensors.

Two deviations are wanted, both refusals: of tensors that have one name, of which safetensors keeps the last, and of
tensors described by an array, which no writer makes. How deeply unknown fields may be nested is no matter.
"""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path

import pytest

import nvme_ops
from nvme_ops.base.errors import FormatError
from nvme_ops.formats import safetensors_format as layout

safetensors = pytest.importorskip("safetensors", reason="safetensors is not installed: pip install safetensors")
# What each makes of a file


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
