"""What a sample consists of: bytes in, the same values out, and errors that name the column."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nvme_ops.data.columns import Columns
from nvme_ops.errors import FormatError

SPECS: dict[str, Any] = {
    "image": bytes,
    "label": torch.int64,
    "box": (torch.float32, (2, 2)),
    "tokens": (torch.int32, (-1,)),
    "name": str,
    "flag": torch.bool,
    "grid": (torch.float16, (-1, 3)),
}


def record_of(columns: Columns, sample: Any) -> torch.Tensor:
    """The record in memory of its own, as one that was read."""
    content = b"".join(columns.packed(sample))
    memory = torch.zeros(len(content) + 64, dtype=torch.uint8)
    start = -memory.data_ptr() % 8
    memory[start : start + len(content)] = torch.frombuffer(bytearray(content or b"-"), dtype=torch.uint8)[
        : len(content)
    ]
    return memory[start : start + len(content)]


@given(
    st.binary(max_size=50), st.integers(-(2**63), 2**63 - 1), st.lists(st.integers(-(2**31), 2**31 - 1), max_size=9),
    st.text(max_size=20), st.booleans(), st.integers(0, 4),
)  # fmt: skip
def test_samples_come_back(image: bytes, label: int, tokens: list[int], name: str, flag: bool, rows: int) -> None:
    columns = Columns(SPECS)
    sample: dict[str, Any] = {
        "image": image,
        "label": label,
        "box": torch.rand(2, 2),
        "tokens": tokens,
        "name": name,
        "flag": flag,
        "grid": torch.rand(rows, 3, dtype=torch.float16),
    }
    found = columns.unpacked(record_of(columns, sample))
    assert list(found) == list(SPECS)
    assert bytes(found["image"].tolist()) == image
    assert (int(found["label"]), found["name"], bool(found["flag"])) == (label, name, flag)
    assert found["tokens"].tolist() == tokens
    assert found["tokens"].dtype == torch.int32
    assert torch.equal(found["box"], sample["box"])
    assert torch.equal(found["grid"], sample["grid"])


def test_one_unnamed_column_is_its_bytes() -> None:
    assert Columns().packed(b"abc") == [b"abc"]
    assert Columns(str).unpacked(record_of(Columns(str), "grün")) == "grün"
    fixed = Columns((torch.float32, (3,)))
    assert fixed.record_bytes == 12
    assert fixed.unpacked(record_of(fixed, [1.0, 2.0, 3.0])).tolist() == [1, 2, 3]
    assert Columns(torch.int64).unpacked(record_of(Columns(torch.int64), 7)).item() == 7


def test_rows_of_fixed_records_are_stacked_without_a_copy() -> None:
    columns = Columns({"a": torch.int16, "b": (torch.float64, (2,))})
    assert columns.record_bytes == 24
    assert columns.alignment == 8
    rows = torch.zeros(2, 32, dtype=torch.uint8)
    for number in range(2):
        rows[number, :24] = record_of(columns, {"a": number, "b": [number, 0.5]})
    found = columns.stacked(rows)
    assert found["a"].tolist() == [0, 1]
    assert found["b"].tolist() == [[0, 0.5], [1, 0.5]]
    assert found["b"].untyped_storage().data_ptr() == rows.untyped_storage().data_ptr()


def test_they_survive_the_index() -> None:
    for given_columns in (SPECS, None, str, (torch.int8, (-1, 2)), {"only": torch.bfloat16}):
        columns = Columns(given_columns)
        assert Columns.from_json(columns.as_json()).all == columns.all


@pytest.mark.parametrize(
    ("spec", "value", "error", "words"),
    [
        (torch.int64, 1.5, TypeError, "'x' needs torch.int64, not torch.float64"),
        (torch.int8, 300, ValueError, "'x': 300 does not fit torch.int8"),
        (torch.float32, torch.ones((), dtype=torch.float64), TypeError, "not torch.float64"),
        ((torch.float32, (2,)), [1.0], ValueError, r"'x' needs the shape \(2,\), not \(1,\)"),
        ((torch.float32, (-1, 2)), [[1.0]], ValueError, "needs the shape"),
        ((torch.uint8, (4,)), b"abc", ValueError, "needs 4 bytes, not 3"),
        (torch.float16, 1e10, ValueError, "does not fit torch.float16"),
        (torch.complex64, [1, 2], ValueError, "needs the shape"),
        (str, b"abc", TypeError, "needs a str, not bytes"),
        (bytes, "abc", TypeError, "'x' cannot hold str"),
        (bytes, object(), TypeError, "'x' cannot hold object"),
    ],
)
def test_values_that_do_not_fit(spec: Any, value: object, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        Columns({"x": spec}).packed({"x": value})


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    ("dtype", "value"),
    [
        (torch.uint64, (1 << 63) + 5),
        (torch.complex64, 3),
        (torch.float16, float("inf")),
        (torch.float32, 0.1),
        (torch.bool, True),
    ],
)
def test_numbers_that_fit(dtype: torch.dtype, value: Any) -> None:
    columns = Columns(dtype)
    record = torch.frombuffer(bytearray(columns.packed(value)[0]), dtype=torch.uint8)
    assert columns.unpacked(record).item() == torch.tensor(value, dtype=dtype).item()


@pytest.mark.parametrize(
    ("spec", "value"),
    [
        (torch.float64, 0.1),
        (torch.float64, 1e300),
        ((torch.float64, (-1,)), [0.1, 1e300, 1 / 3]),
        ((torch.float64, (2, 1)), [[0.1], [2.0**-1000]]),
        (torch.complex128, 0.1 + 1e300j),
        (torch.complex128, 0.1),
    ],
)
def test_floats_of_python_keep_their_bits(spec: Any, value: Any) -> None:
    columns = Columns(spec)
    assert columns.unpacked(record_of(columns, value)).tolist() == value


def test_floats_of_python_are_rounded_to_their_column() -> None:
    columns = Columns((torch.float32, (-1,)))
    found = columns.unpacked(record_of(columns, [0.1, 1 / 3]))
    assert torch.equal(found, torch.tensor([0.1, 1 / 3], dtype=torch.float32))
    with pytest.raises(ValueError, match="does not fit"):
        columns.packed([1e300])


@pytest.mark.parametrize("sample", [{}, {"x": 1, "y": 2}, 5, [1]])
def test_samples_of_other_columns(sample: object) -> None:
    with pytest.raises(KeyError, match="a sample must be a dict of 'x'"):
        Columns({"x": torch.int64}).packed(sample)


@pytest.mark.parametrize(
    "spec", [int, "float32", (torch.int8, (2, -1)), (torch.int8, (-2,)), (torch.int8, (-1, 0)), ()]
)
def test_what_is_no_column(spec: Any) -> None:
    with pytest.raises((TypeError, ValueError)):
        Columns({"x": spec})
    with pytest.raises(ValueError, match="empty"):
        Columns({})


def test_records_that_cannot_be() -> None:
    columns = Columns({"a": bytes, "b": bytes})
    record = record_of(columns, {"a": b"12345678", "b": b"1"})
    for wrong in (record[:4], record[:12], torch.full((16,), 255, dtype=torch.uint8)):
        with pytest.raises(FormatError):
            columns.unpacked(wrong)
    with pytest.raises(FormatError):
        Columns(torch.int64).unpacked(torch.zeros(7, dtype=torch.uint8))
    with pytest.raises(FormatError):
        Columns(str).unpacked(torch.tensor([255], dtype=torch.uint8))


@pytest.mark.parametrize("value", [-1, [1, -1], -(2**63), [-1, 2**63]])
def test_negative_numbers_do_not_become_unsigned_ones(value: Any) -> None:
    columns = Columns((torch.uint64, (-1,)) if isinstance(value, list) else torch.uint64)
    with pytest.raises((TypeError, ValueError), match="a record"):
        columns.packed(value)


def test_large_unsigned_numbers_of_numpy_and_lists() -> None:
    numpy = pytest.importorskip("numpy")
    one, many = Columns(torch.uint64), Columns((torch.uint64, (-1,)))
    assert one.unpacked(record_of(one, numpy.uint64(2**64 - 1))).tolist() == 2**64 - 1
    assert many.unpacked(record_of(many, [2**63, 1])).tolist() == [2**63, 1]
    assert many.unpacked(record_of(many, numpy.array([2**64 - 1, 0], numpy.uint64))).tolist() == [2**64 - 1, 0]


def test_arrays_of_numpy_that_torch_cannot_share(recwarn: pytest.WarningsRecorder) -> None:
    numpy = pytest.importorskip("numpy")
    columns = Columns((torch.int32, (3,)))
    locked = numpy.arange(3, dtype=numpy.int32)
    locked.flags.writeable = False
    for each in (locked, locked[::-1]):
        assert columns.unpacked(record_of(columns, each)).tolist() == each.tolist()
    assert not recwarn


@pytest.mark.parametrize(
    ("spec", "value", "words"),
    [
        ({"n": str}, {"n": "a\udc80"}, "column 'n' cannot hold"),
        ((torch.float32, (2, 2)), torch.eye(2).to_sparse(), "a tensor of layout torch.sparse_coo"),
        ((torch.float8_e4m3fn, (-1,)), [1.0, 1e9], "does not fit torch.float8_e4m3fn"),
    ],
)
def test_what_a_column_cannot_hold_is_named(spec: Any, value: Any, words: str) -> None:
    with pytest.raises((TypeError, ValueError), match=words):
        Columns(spec).packed(value)


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ({0: torch.int64}, "the name of a column must be a str, not 0"),
        ({"a": (torch.float32, 3)}, "column 'a': the shape must be a sequence of ints, not 3"),
        (["a"], "a record must be bytes, str, a dtype"),
    ],
)
def test_what_is_no_column_is_named(spec: Any, words: str) -> None:
    with pytest.raises(TypeError, match=words):
        Columns(spec)
