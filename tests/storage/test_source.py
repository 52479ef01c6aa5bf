"""``Source``: where the bytes of a tensor, and of its parts, are."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import example, given
from hypothesis import strategies as st

from nvme_ops.storage.source import FileExtent, Source

FILES: Any = ["a", "b"]
EXTENTS = st.lists(st.tuples(st.sampled_from(FILES), st.integers(0, 50), st.integers(0, 5)), max_size=6)


def bytes_of(extents: Any) -> list[tuple[Any, int]]:
    return [(file, start + at) for file, start, nbytes in extents for at in range(nbytes)]


@example(extents=[("a", 0, 1)], begin=1, nbytes=1)
@given(extents=EXTENTS, begin=st.integers(0, 32), nbytes=st.integers(0, 32))
def test_a_range_has_the_bytes_of_a_slice(extents: Any, begin: int, nbytes: int) -> None:
    given_bytes = bytes_of(extents)
    source = Source([FileExtent(*extent) for extent in extents], torch.uint8, (len(given_bytes),))
    part = source.range(begin, nbytes)
    assert bytes_of(part) == given_bytes[begin : begin + nbytes]
    assert all(extent.nbytes for extent in part)
