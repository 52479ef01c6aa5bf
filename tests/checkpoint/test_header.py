"""The parser of safetensors headers, beside safetensors' own: what one accepts the other does, and to the same tensors.

Two deviations are wanted, both refusals: of tensors that have one name, of which safetensors keeps the last, and of
tensors described by an array, which no writer makes.
"""

from __future__ import annotations

import json
import os
import resource
import struct
import tracemalloc
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import nvme_ops
from nvme_ops.errors import FormatError
from nvme_ops.formats import safetensors_format as layout
from tests.conftest import MIB, in_child

safetensors = pytest.importorskip("safetensors", reason="safetensors is not installed: pip install safetensors")
BITS = {"BOOL": 8, "U8": 8, "F8_E8M0": 8, "I16": 16, "F32": 32, "I64": 64, "C64": 64, "F4": 4, "F6_E2M3": 6}


# What each makes of a file


@dataclass(frozen=True)
class Found:
    """A tensor as a reader describes it."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes


def by_safetensors(content: bytes) -> dict[str, Found] | None:
    """The tensors, or None where it refuses."""
    try:
        tensors = safetensors.deserialize(content)
    except safetensors.SafetensorError:
        return None
    return {name: Found(each["dtype"], tuple(each["shape"]), bytes(each["data"])) for name, each in tensors}


def by_us(content: bytes) -> dict[str, Found] | None:
    """The same by way of a file that has no name."""
    fd = os.memfd_create("header")
    try:
        os.write(fd, content)
        header = layout.read(fd, "the file")
    except FormatError:
        return None
    finally:
        os.close(fd)
    return {
        name: Found(each.dtype, each.shape, content[each.start : each.end]) for name, each in header.entries.items()
    }


def is_wanted_deviation(content: bytes) -> bool:
    """Whether a name comes twice, or an array describes a tensor."""
    (length,) = struct.unpack("<Q", content[:8])
    try:
        pairs = json.loads(content[8 : 8 + length].decode(), object_pairs_hook=lambda pairs: pairs)
    except (ValueError, RecursionError):
        return False
    names = [name for name, _ in pairs if name != "__metadata__"]
    # an object is a list of pairs here, an array a list of anything else
    arrays = [value for name, value in pairs if name in names and isinstance(value, list) and not _is_object(value)]
    return len(set(names)) < len(names) or bool(arrays)


def _is_object(value: list[Any]) -> bool:
    return all(isinstance(pair, tuple) for pair in value)


def agree(content: bytes) -> None:
    theirs, ours = by_safetensors(content), by_us(content)
    if ours is None and theirs is not None and is_wanted_deviation(content):
        return
    assert (ours is None) == (theirs is None), content
    assert ours == theirs


# Files that are nearly right


@dataclass
class Pairs:
    """A JSON object that may have a name twice."""

    items: list[tuple[str, Any]]


@dataclass(frozen=True)
class Raw:
    """Text to stand where a value should."""

    text: str


def text_of(value: Any) -> str:
    if isinstance(value, Raw):
        return value.text
    if isinstance(value, Pairs):
        return "{" + ",".join(f"{json.dumps(name)}:{text_of(each)}" for name, each in value.items) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(text_of, value)) + "]"
    return json.dumps(value, ensure_ascii=False)


def file_of(text: str | bytes, data: int = 0, length: int | None = None) -> bytes:
    """A file with this header, so much data, and another length than the right one."""
    raw = text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass")
    content = bytes(index % 251 for index in range(data))
    return struct.pack("<Q", len(raw) if length is None else length) + raw + content


names = st.text(st.characters(exclude_categories=["Cs"]), max_size=3) | st.sampled_from(["a", "b", "__metadata__"])
numbers = st.sampled_from([
    "0", "1", "-1", "-0", "2", "8", "007", "+1", "1.", ".5", "2.0", "2e0", "8E0", "0e0", "-0.0", "0.5", "1e400",
    "-1e400", "1e-400", "NaN", "Infinity", "-Infinity", "4294967296", "9223372036854775807", "9223372036854775808",
    "18446744073709551615", "18446744073709551616", "1000000000000000000000", "1" * 400, "9" * 5000, "0x8", "1_0",
    "\u0661",
])  # fmt: skip
strings = st.sampled_from([
    '"F32"', '"f32"', '""', '"\\ud800"', '"\\ud83d\\ude00"', '"\\udc00\\ud800"', '"\\u0000"', '"\\x41"', '"\x01"',
    '"\x7f"', '"\\/"', '"\\ud800\\u0041"', '"\ud800"', "'a'", '"', '"\\u00e9"', '"\\uD8', '"\\ud800\\"',
])  # fmt: skip
words = st.sampled_from(["null", "true", "false", "True", "", "//", "[]", "{}", "[[]]", "[0,8]", "[0,8,]", "{,}"])
deep = st.sampled_from([100, 124, 125, 126, 127, 128, 129, 500, 20_000]).map(lambda depth: "[" * depth + "]" * depth)
objects = st.sampled_from(
    ['{"a":1,"a":2}', '{"a":"1","a":"2"}', '{"F32":null}', '{"\\ud800":0}', '{"a":1e999}', "{1:2}"]
)
anything = (numbers | strings | words | deep | objects).map(Raw)


@st.composite
def documents(draw: st.DrawFn) -> tuple[Pairs, int]:
    """A header that is right, and the bytes of the data it tells of."""
    items: list[tuple[str, Any]] = []
    position = 0
    for name in draw(st.lists(names.filter(lambda name: name != "__metadata__"), max_size=4, unique=True)):
        dtype = draw(st.sampled_from(sorted(BITS)))
        shape = draw(st.lists(st.integers(0, 4), max_size=3))
        if BITS[dtype] < 8:
            shape = [*shape, 8]
        bits = BITS[dtype]
        for length in shape:
            bits *= length
        place = [position, position + bits // 8]
        items.append((name, Pairs([("dtype", dtype), ("shape", shape), ("data_offsets", place)])))
        position = place[1]
    if draw(st.booleans()):
        words = draw(st.dictionaries(names, names, max_size=2))
        items.append(("__metadata__", Pairs(list(words.items()))))
    return Pairs(draw(st.permutations(items))), position


def containers(value: Any) -> list[Any]:
    """All objects and arrays in a value."""
    below = [each for _, each in value.items] if isinstance(value, Pairs) else value if isinstance(value, list) else []
    return ([value] if isinstance(value, Pairs | list) else []) + [
        found for each in below for found in containers(each)
    ]


@st.composite
def wrong_documents(draw: st.DrawFn) -> tuple[Pairs, int]:
    """One with a few of its parts exchanged, doubled, left out or put in."""
    document, size = draw(documents())
    for _ in range(draw(st.integers(0, 3))):
        target = draw(st.sampled_from(containers(document)))
        items: list[Any] = target.items if isinstance(target, Pairs) else target
        index = draw(st.integers(0, max(0, len(items) - 1)))
        change = draw(st.sampled_from(["value", "number", "name", "twice", "gone", "more"]))
        if change == "more" or not items:
            value = draw(anything)
            name = draw(names | st.sampled_from(["dtype", "shape", "x"]))
            items.insert(index, (name, value) if isinstance(target, Pairs) else value)
        elif change == "gone":
            del items[index]
        elif change == "twice":
            items.append(items[index])
        elif change == "name" and isinstance(target, Pairs):
            items[index] = (draw(names | st.sampled_from(["dtype", "Shape", "data_offset"])), items[index][1])
        elif change == "number" and isinstance(items[index], int):
            items[index] = max(0, items[index] + draw(st.integers(-3, 3)))
        else:
            value = draw(anything)
            items[index] = (items[index][0], value) if isinstance(target, Pairs) else value
    return document, size


@given(wrong_documents(), st.sampled_from([0] * 8 + [-1, 1, 8]))
@example((Pairs([("a", Pairs([("dtype", "U8"), ("shape", [Raw("9" * 5000)]), ("data_offsets", [0, 2])]))]), 2), 0)
@settings(max_examples=300)
def test_headers_of_another_structure(document: tuple[Pairs, int], more: int) -> None:
    structure, size = document
    agree(file_of(text_of(structure), max(0, size + more)))


pieces = (
    st.sampled_from([bytes([byte]) for byte in b'{}[],:"\\-01.e \t\r\n\x00\x0b\xa0\xff'])
    | st.sampled_from([b"\xef\xbb\xbf", b"\xc2\xa0", b"\xed\xa0\x80", b"\xc0\x80", b"NaN", b"/**/", b"{}", b"\\u0000"])
    | st.binary(min_size=1, max_size=3)
)


@st.composite
def damaged_texts(draw: st.DrawFn) -> tuple[bytes, int]:
    """The text of a right header with a few of its bytes exchanged, left out or put in."""
    document, size = draw(documents())
    text = text_of(document).encode()
    for _ in range(draw(st.integers(1, 3))):
        where = draw(st.sampled_from([0, len(text)]) | st.integers(0, len(text)))
        removed = draw(st.sampled_from([0, 0, 1, 2, 1000]))
        text = text[:where] + draw(st.just(b"") | pieces) + text[where + removed :]
    return text, size


@given(damaged_texts())
@settings(max_examples=300)
def test_headers_with_other_bytes(damaged: tuple[bytes, int]) -> None:
    agree(file_of(*damaged))


@given(documents(), st.integers(0, 2**64 - 1) | st.integers(-20, 20))
@settings(max_examples=100)
def test_header_lengths_that_lie(document: tuple[Pairs, int], length: int) -> None:
    structure, size = document
    text = text_of(structure)
    agree(file_of(text, size, length=max(0, len(text.encode()) + length) if abs(length) <= 20 else length))


# What random changes seldom meet


def tensor(extra: str = "", shape: str = "[2]", offsets: str = "[0,2]", dtype: str = '"U8"') -> str:
    return f'{{"a":{{"dtype":{dtype},"shape":{shape},"data_offsets":{offsets}{extra}}}}}'


def nested(depth: int) -> str:
    return "[" * depth + "]" * depth


UNUSED = [
    "1e308", "1e309", "-1e400", "[1e400]", "1e-400", "1e99999999999999999999", "NaN", "-Infinity", "1.", "9" * 308,
    "9" * 309, "-" + "9" * 400, "9" * 5000, "123456789012345678901e300", "0." + "0" * 500 + "1", '"\\ud800"',
    '{"\\udc00":1}', '"\\ude00\\ud83d"', '"\\ud83d\\ude00"', '"\\\\ud800"', '"\\ud83d\\\\ude00"',
]  # fmt: skip
BIG = [
    [2**62, 0], [0, 2**62, 8], [2**62, 8, 0], [2**63, 0], [2**64 - 1, 1, 0], [2**64, 0], [2, 2**64 - 1, 0], [2**61, 8],
    [0, 2**64 - 1, 2**64 - 1], [2**32, 2**32], [2**32, 2**31], [2**40], [2**64], [2**200, 0],
]  # fmt: skip
SMALL = [(3, 1), (3, 2), (4, 3), (4, 2), (8, 6), (8, 4), (0, 0), (1, 1)]  # lengths, and bytes
DEPTHS = (100, 125, 126, 127, 128, 500, 100_000)
RARE: dict[str, list[tuple[str, int]]] = {
    "values that no reader needs": [(tensor(f',"x":{value}'), 2) for value in UNUSED],
    "nesting": [
        *((tensor(f',"x":{nested(depth)}'), 2) for depth in DEPTHS),
        *((tensor(',"x":' + '{"x":' * depth + "0" + "}" * depth), 2) for depth in DEPTHS),
        *((f'{{"__metadata__":{nested(depth)}}}', 0) for depth in DEPTHS),
        *((tensor(shape=nested(depth)), 0) for depth in DEPTHS),
        *((nested(depth), 0) for depth in DEPTHS),
    ],
    "names that come twice": [
        *((tensor(f",{extra}"), 2) for extra in (
            '"x":{"b":1,"b":2}', '"x":{"b":{"c":1,"c":1}}', '"x":1,"x":2', '"x":"\\ud800","x":2', '"dtype":"U8"',
            '"shape":[2]', '"data_offsets":[0,2]',
        )),
        ('{"__metadata__":{"a":"1","a":"2"}}', 0),
        ('{"__metadata__":{"a":1,"a":"2"}}', 0),
        ('{"__metadata__":{},"__metadata__":{}}', 0),
        ('{"__metadata__":null,"__metadata__":{}}', 0),
        ('{"\\u005f_metadata__":{},"__metadata__":{}}', 0),
        ('{"a":null,"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}}', 2),
    ],
    "shapes beyond any memory": [
        (tensor(shape=json.dumps(shape), offsets="[0,0]", dtype=dtype), 0)
        for dtype in ('"U8"', '"F32"', '"F4"', '"F6_E2M3"') for shape in BIG
    ],
    "less than a byte": [
        (tensor(shape=f"[{length}]", offsets=f"[0,{size}]", dtype=dtype), size)
        for dtype in ('"F4"', '"F6_E2M3"', '"F6_E3M2"') for length, size in SMALL
    ],
    "dtypes that look otherwise": [
        (tensor(dtype=dtype), 2)
        for dtype in ('"u8"', '"I4"', '["U8"]', '{"U8":null}', '{"U8":{}}', "0", '"\\u0055\\u0038"', "null")
    ],
    "every dtype": [
        (tensor(shape="[8]", offsets=f"[0,{bits}]", dtype=json.dumps(dtype)), bits)
        for dtype, bits in layout._BITS.items()
    ],
}  # fmt: skip


@pytest.mark.parametrize("kind", RARE)
def test_what_random_changes_seldom_meet(kind: str) -> None:
    for text, data in RARE[kind]:
        agree(file_of(text, data))


@pytest.mark.parametrize(
    "text",
    [tensor()[:-1] + "," + tensor()[1:], tensor()[:-1] + ',"\\u0061":' + tensor()[5:], '{"a":["U8",[2],[0,2]]}'],
)
def test_wanted_deviations(text: str) -> None:
    content = file_of(text, 2)
    assert is_wanted_deviation(content)
    assert by_safetensors(content) is not None
    assert by_us(content) is None


# What is refused names the file and the field

OTHER = '"b":{"dtype":"U8","shape":[2],"data_offsets":'


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "0 bytes are too few"),
        (b"\0" * 8, "not JSON"),
        (file_of("{}", length=100_000_000), "header length 100000000"),
        (file_of("{}", 1), "1 bytes follow"),
        (file_of("[]"), "not a JSON object"),
        (file_of('{"a":1,"a":1}'), "'a' comes twice"),
        (file_of('{"a":NaN}'), "NaN"),
        (file_of('{"a":1}'), "tensor 'a': is not described"),
        (file_of('{"__metadata__":{"x":1}}'), "__metadata__"),
        (file_of(tensor(dtype='"Q3"'), 2), "tensor 'a': dtype 'Q3'"),
        (file_of(tensor(shape="[-1]"), 2), "tensor 'a': shape"),
        (file_of(tensor(offsets="[1,3]"), 3), "tensor 'a': data_offsets"),
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
        ("U8", f"[{2**63},0]", 0),
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


@pytest.mark.parametrize("shape", [(2**62, 0), (2**63 - 1, 0), (0, 2**62, 2**62)])
def test_a_zero_size_tensor_of_a_huge_shape(tmp_path: Path, shape: tuple[int, ...]) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(file_of(tensor(shape=json.dumps(shape), offsets="[0,0]")))
    assert nvme_ops.load(path)["a"].shape == shape


# Lies about sizes cost nothing


def test_nothing_is_allocated_for_what_is_not_there(tmp_path: Path) -> None:
    """In a child that gets only so much more from Python, and 64 MiB from the system."""
    lies = [file_of(tensor(), 2, length=length) for length in (100_000_000, 2**31, 2**40, 2**63, 2**64 - 1)]
    for dtype, bits in (("U8", 8), ("F64", 64), ("F4", 4)):
        size = 2**40 * bits // 8
        lies.append(file_of(tensor(dtype=json.dumps(dtype), shape=f"[{2**40}]", offsets=f"[0,{size}]"), 8))
    lies.append(struct.pack("<Q", 2**33))
    path = tmp_path / "model.safetensors"

    def child() -> None:
        with open("/proc/self/statm", encoding="ascii") as file:
            now = int(file.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (now + 64 * MIB, now + 64 * MIB))
        tracemalloc.start()
        for content in lies:
            path.write_bytes(content)
            if len(content) == 8:
                os.truncate(path, 2**34)  # of holes, and long enough
            with pytest.raises(FormatError):
                nvme_ops.load(path)
        assert tracemalloc.get_traced_memory()[1] < MIB

    nvme_ops.load  # noqa: B018  (imported before the limit)
    in_child(child)


def test_files_beyond_all_memory(folder: Path) -> None:
    """Of holes: only what is asked for gets memory, and damage is told without any."""
    path = folder / "model.safetensors"
    text = tensor(shape=f"[{2**40}]", offsets=f"[0,{2**40}]")[:-1] + f",{OTHER}[{2**40},{2**40 + 2}]}}}}"
    path.write_bytes(file_of(text))
    try:
        os.truncate(path, 8 + len(text) + 2**40 + 2)
        assert nvme_ops.load(path, keys=["b"])["b"].tolist() == [0, 0]
        os.truncate(path, 2**43)
    except OSError as error:
        pytest.skip(f"no file of eight tebibytes here: {error}")
    with pytest.raises(FormatError, match="bytes follow the last tensor"):
        nvme_ops.load(path)


def test_many_names_of_which_one_comes_twice() -> None:
    """Found in one look at them: a child that takes a minute is ended."""
    content = file_of("{" + "".join(f'"{number}":0,' for number in range(200_000)) + '"199999":0}')
    in_child(lambda: by_us(content))
