"""What a sample consists of: bytes in, the same values out, and errors that name the column."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nvme_ops.base.errors import FormatError
from nvme_ops.data.columns import Columns

numpy = pytest.importorskip("numpy")

SPECS: dict[str, Any] = {
    "image": bytes,
    "label": torch.int64,
    "box": (torch.float32, (2, 2)),
    "tokens": (torch.int32, (-1,)),
    "name": str,
    "flag": torch.bool,
    "grid": (torch.float16, (-1, 3)),
}


def back(spec: Any, value: Any) -> Any:
    """The value after a way through memory, by columns that have been in an index."""
    content = b"".join(Columns(spec).packed(value))
    memory = torch.zeros(len(content) + 64, dtype=torch.uint8)
    record = memory[-memory.data_ptr() % 16 :][: len(content)]
    record[:] = torch.tensor(list(content), dtype=torch.uint8)
    return Columns.from_json(Columns(spec).as_json()).unpacked(record)


def plain(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else list(value) if isinstance(value, bytes) else value


@settings(max_examples=15)
@given(
    st.binary(max_size=50), st.integers(-(2**63), 2**63 - 1), st.lists(st.integers(-(2**31), 2**31 - 1), max_size=9),
    st.text(max_size=20), st.booleans(), st.integers(0, 4),
)  # fmt: skip
def test_samples_come_back(image: bytes, label: int, tokens: list[int], name: str, flag: bool, rows: int) -> None:
    box, grid = torch.rand(2, 2), torch.rand(rows, 3, dtype=torch.float16)
    sample = {"image": image, "label": label, "box": box, "tokens": tokens, "name": name, "flag": flag, "grid": grid}
    again = back(SPECS, sample)
    assert list(again) == list(SPECS)
    assert {key: plain(value) for key, value in again.items()} == {key: plain(value) for key, value in sample.items()}


@pytest.mark.filterwarnings("error")
def test_values_keep_every_bit() -> None:
    values: list[tuple[Any, Any]] = [
        (None, b"abc"), (str, "grün"), ((torch.float32, (3,)), [1.0, 2.0, 3.0]), (torch.int64, 7), (torch.bool, True),
        (torch.float16, float("inf")), (torch.float64, 0.1), (torch.float64, 1e300), (torch.complex64, 3),
        ((torch.float64, (-1,)), [0.1, 1e300, 1 / 3]), ((torch.float64, (2, 1)), [[0.1], [2.0**-1000]]),
        (torch.complex128, 0.1 + 1e300j), (torch.complex128, 0.1), (torch.uint64, (1 << 63) + 5),
        (torch.uint64, numpy.uint64(2**64 - 1)), ((torch.uint64, (-1,)), [2**63, 1]),
        ((torch.uint64, (-1,)), numpy.array([2**64 - 1, 0], numpy.uint64)),
        ((torch.int32, (3,)), numpy.frombuffer(bytes(range(12)), numpy.int32)),  # which torch cannot share
        ((torch.int32, (3,)), numpy.arange(3, dtype=numpy.int32)[::-1]),
    ]  # fmt: skip
    for spec, value in values:
        restored = back(spec, value)
        assert plain(restored) == plain(value)
        if isinstance(restored, torch.Tensor) and spec is not None:
            assert restored.dtype == (spec if isinstance(spec, torch.dtype) else spec[0])


@pytest.mark.parametrize(
    ("spec", "value", "words"),
    [
        (torch.int64, 1.5, "'x' needs torch.int64, not torch.float64"),
        (torch.int8, 300, "'x': 300 does not fit torch.int8"),
        ((torch.float32, (2,)), [1.0], r"'x' needs the shape \(2,\), not \(1,\)"),
        ((torch.uint8, (4,)), b"abc", "needs 4 bytes, not 3"),
        (torch.float16, 1e10, "does not fit torch.float16"),
        ((torch.float8_e4m3fn, (-1,)), [1.0, 1e9], "does not fit torch.float8_e4m3fn"),
        (torch.uint64, -1, "'x'"),
        ((torch.uint64, (-1,)), [-1, 2**63], "'x'"),
        (str, b"abc", "needs a str, not bytes"),
        (str, "a\udc80", "'x' cannot hold"),
        (bytes, "abc", "'x' cannot hold str"),
        ((torch.float32, (2, 2)), torch.eye(2).to_sparse(), "a tensor of layout torch.sparse_coo"),
    ],
)
def test_values_that_do_not_fit(spec: Any, value: object, words: str) -> None:
    with pytest.raises((TypeError, ValueError), match=words):
        Columns({"x": spec}).packed({"x": value})


def test_what_is_no_column_or_a_sample_of_others() -> None:
    wrong: list[Any] = [
        {}, ["a"], {0: torch.int64}, {"": bytes}, {"x": complex}, {"x": (torch.int8, (2, -1))},
        {"x": (torch.int8, (-2,))}, {"x": (torch.int8, (-1, 0))}, {"x": ()}, {"x": (torch.float32, 3)},
    ]  # fmt: skip
    for spec in wrong:
        with pytest.raises((TypeError, ValueError), match=r"column|a record"):
            Columns(spec)
    for sample in ({}, {"x": 1, "y": 2}):
        with pytest.raises(KeyError, match="a sample must be a dict of 'x'"):
            Columns({"x": torch.int64}).packed(sample)


def test_records_that_cannot_be() -> None:
    two = Columns({"a": bytes, "b": bytes})
    record = torch.frombuffer(bytearray(b"".join(two.packed({"a": b"12345678", "b": b"1"}))), dtype=torch.uint8)
    full = torch.full((16,), 255, dtype=torch.uint8)
    for columns, wrong in (
        (two, record[:4]), (two, record[:12]), (two, full), (Columns(torch.int64), full[:7]), (Columns(str), full[:1]),
    ):  # fmt: skip
        with pytest.raises(FormatError):
            columns.unpacked(wrong)
