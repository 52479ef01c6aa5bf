"""Indexes with right checksums that cannot be true: refused before anything is read by them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nvme_ops.checksums import checksums_of
from nvme_ops.data import SampleStore
from nvme_ops.data.index import _PREFIX, MAGIC, NAME, VERSION, read_index, write_index
from nvme_ops.errors import FormatError
from tests.data.samples import write, write_fixed


def lie(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Changes the header of an index, and its checksum too."""
    path = folder / NAME
    content = path.read_bytes()
    size = _PREFIX.unpack(content[: _PREFIX.size])[2]
    header = json.loads(content[_PREFIX.size : _PREFIX.size + size])
    change(header)
    text = json.dumps(header).encode()
    head = _PREFIX.pack(MAGIC, VERSION, len(text), checksums_of([text], "crc32c")[0]) + text
    assert len(head) <= 4096, "the sections stay where they are"
    path.write_bytes(head.ljust(4096, b"\0") + content[4096:])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"record_bytes": 8}, "record_bytes is 8, and the columns have another size"),
        ({"record_bytes": None}, "record_bytes is None, and the columns"),
        ({"records": 1_000_000}, "cannot hold 1000000 records"),
        ({"records": 2**62}, "a size that cannot be"),
        ({"alignment": 0}, "a size that cannot be"),
        ({"alignment": -8}, "a size that cannot be"),
        ({"alignment": "8"}, "a size that cannot be"),
        ({"columns": []}, "columns must not be empty"),
    ],
)
def test_a_header_that_cannot_be_true(folder: Path, change: dict[str, Any], words: str) -> None:
    write_fixed(folder / "store", 20)
    lie(folder / "store", lambda header: header.update(change))
    with pytest.raises(FormatError, match=words):
        SampleStore(folder / "store")


@pytest.mark.parametrize(("start", "words"), [(4096, "does not begin with its first record"), (-1, "cannot be")])
def test_a_file_that_does_not_begin_with_its_first_record(folder: Path, start: int, words: str) -> None:
    write(folder / "store")
    lie(folder / "store", lambda header: header["files"][0].update(start=start))
    with pytest.raises(FormatError, match=words):
        SampleStore(folder / "store")


@pytest.mark.parametrize("offset", [1 << 40, -4096])
def test_a_section_that_is_not_in_the_file(folder: Path, offset: int) -> None:
    write(folder / "store", 20, checksums=False)
    lie(folder / "store", lambda header: header["sections"]["ends"].update(offset=offset))
    with pytest.raises(FormatError, match="was cut off within section 'ends'"):
        SampleStore(folder / "store")


def test_what_the_writer_of_indexes_writes_of_a_wrong_size(folder: Path) -> None:
    write_fixed(folder / "store", 20)
    index = read_index(str(folder / "store" / NAME))
    index.record_bytes = 4095
    write_index(str(folder / "store" / NAME), index)
    with pytest.raises(FormatError, match="record_bytes is 4095"):
        SampleStore(folder / "store")
