"""The native checksums against published values and zlib's."""

from __future__ import annotations

import pytest
import torch

from nvme_ops.base.native import native


def test_published_check_values() -> None:
    assert native().checksums("crc32c", [b"123456789", b""]) == [0xE3069283, 0]
    assert native().checksums("crc32", [b"123456789", b""]) == [0xCBF43926, 0]
    tensor = torch.arange(10_000, dtype=torch.float32).view(100, 100)
    expected = native().checksums("crc32c", [tensor.numpy().tobytes(), tensor.t().numpy().tobytes()])
    assert native().checksums("crc32c", [tensor, tensor.t()]) == expected


def test_bad_arguments() -> None:
    for kind, part, error in (
        ("md5", b"", ValueError), ("crc32c", torch.zeros(3, device="meta"), ValueError), ("crc32c", 3, TypeError)
    ):  # fmt: skip
        with pytest.raises(error):
            native().checksums(kind, [part])
