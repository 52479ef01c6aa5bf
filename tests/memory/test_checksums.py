"""The native checksums against published values and zlib's."""

from __future__ import annotations

import torch

from nvme_ops.base.native import native


def test_published_check_values() -> None:
    assert native().checksums("crc32c", [b"123456789", b""]) == [0xE3069283, 0]
    assert native().checksums("crc32", [b"123456789", b""]) == [0xCBF43926, 0]
    tensor = torch.arange(10_000, dtype=torch.float32).view(100, 100)
    expected = native().checksums("crc32c", [tensor.numpy().tobytes(), tensor.t().numpy().tobytes()])
    assert native().checksums("crc32c", [tensor, tensor.t()]) == expected
