"""The native checksums against published values and zlib's."""

from __future__ import annotations

import zlib

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nvme_ops._native import native


def test_published_check_values() -> None:
    assert native().checksums("crc32c", [b"123456789", b""]) == [0xE3069283, 0]
    assert native().checksums("crc32", [b"123456789", b""]) == [0xCBF43926, 0]


@given(st.binary(max_size=5000), st.integers(0, 5000))
def test_crc32_is_zlibs(data: bytes, cut: int) -> None:
    assert native().checksums("crc32", [data]) == [zlib.crc32(data)]
    first, second = native().checksums("crc32", [data[:cut], data[cut:]])
    assert native().joined_checksum("crc32", first, second, len(data[cut:])) == zlib.crc32(data)


def test_of_tensors() -> None:
    tensor = torch.arange(10_000, dtype=torch.float32).view(100, 100)
    expected = native().checksums("crc32c", [tensor.numpy().tobytes(), tensor.t().numpy().tobytes()])
    assert native().checksums("crc32c", [tensor, tensor.t()]) == expected


def test_bad_arguments() -> None:
    with pytest.raises(ValueError, match="'crc32c' or 'crc32', not 'md5'"):
        native().checksums("md5", [b""])
    with pytest.raises(ValueError, match="memory"):
        native().checksums("crc32c", [torch.zeros(3, device="meta")])
    with pytest.raises(TypeError):
        native().checksums("crc32c", [3])
