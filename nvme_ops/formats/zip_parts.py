"""Builds the parts of a zip file whose records are stored uncompressed.

https://pkware.cachefly.net/webdocs/casestudies/APPNOTE.TXT
"""

from __future__ import annotations

import struct

LOCAL = struct.Struct("<4s5H3I2H")
CENTRAL = struct.Struct("<4s6H3I5H2I")
END = struct.Struct("<4s4H2IH")
END64 = struct.Struct("<4sQ2H2I4Q")
LOCATOR = struct.Struct("<4sIQI")
LOCAL_MARK, CENTRAL_MARK, END_MARK = b"PK\3\4", b"PK\1\2", b"PK\5\6"
END64_MARK, LOCATOR_MARK = b"PK\6\6", b"PK\6\7"
#: Beyond these a number is kept in a field of zip64.
MOST_32, MOST_16 = 0xFFFFFFFF, 0xFFFF
ZIP64 = 1  # id of the extra field
#: Where the checksum stands in what ``descriptor`` and ``central`` make.
DESCRIPTOR_CHECKSUM, CENTRAL_CHECKSUM = 4, 16
#: Flags: the checksum and sizes stand in a descriptor behind the data, and names are UTF-8.
FOLLOWS, UTF8 = 0x8, 0x800

_DESCRIPTOR, _DESCRIPTOR_64, _DESCRIPTOR_MARK = struct.Struct("<4s3I"), struct.Struct("<4sI2Q"), b"PK\7\x08"
_NEEDS, _NEEDS_64 = 20, 45  # format version needed to extract, times ten
_DATE = 0x21  # 1980-01-01: equal objects make equal files
_FIELD = struct.Struct("<2sH")
_PADDING = b"FB"  # id of the extra field with which torch pads


def least_local(name: bytes, size: int) -> int:
    """Returns the bytes of a ``local`` header with a padding of 0."""
    return LOCAL.size + len(name) + (20 if size >= MOST_32 else 0) + 4


def local(name: bytes, size: int, checksum: int, flags: int = 0, padding: int | None = None) -> bytes:
    """Returns the header in front of ``size`` bytes of data, with an extra field of ``padding`` bytes if not 0."""
    if size < MOST_32 and padding is not None and not flags & FOLLOWS:  # most are
        length = _FIELD.size + padding
        head = LOCAL.pack(LOCAL_MARK, _NEEDS, flags, 0, 0, _DATE, checksum, size, size, len(name), length)
        return head + name + _FIELD.pack(_PADDING, padding) + bytes(padding)
    wide = size >= MOST_32
    extra = struct.pack("<2H2Q", ZIP64, 16, size, size) if wide else b""
    if padding is not None:
        extra += _FIELD.pack(_PADDING, padding) + bytes(padding)
    shown = MOST_32 if wide else 0 if flags & FOLLOWS else size
    needs = _NEEDS_64 if wide else _NEEDS
    fields = (needs, flags, 0, 0, _DATE, checksum, shown, shown, len(name), len(extra))
    return LOCAL.pack(LOCAL_MARK, *fields) + name + extra


def descriptor(size: int, checksum: int) -> bytes:
    """Returns the data descriptor, which follows the data if the flags say so."""
    kind = _DESCRIPTOR_64 if size >= MOST_32 else _DESCRIPTOR
    return kind.pack(_DESCRIPTOR_MARK, checksum, size, size)


def central(name: bytes, size: int, checksum: int, place: int, flags: int = 0) -> bytes:
    """Returns the directory's entry for a record whose header is at ``place``."""
    if size < MOST_32 and place < MOST_32:  # most are
        numbers = (_NEEDS, _NEEDS, flags, 0, 0, _DATE, checksum, size, size, len(name), 0, 0, 0, 0, 0, place)
        return CENTRAL.pack(CENTRAL_MARK, *numbers) + name
    wide = [number for number in (size, size, place) if number >= MOST_32]
    extra = struct.pack(f"<2H{len(wide)}Q", ZIP64, 8 * len(wide), *wide)
    needs, shown = _NEEDS_64 if wide else _NEEDS, min(size, MOST_32)
    fields = (needs, needs, flags, 0, 0, _DATE, checksum, shown, shown, len(name), len(extra), 0, 0, 0, 0)
    return CENTRAL.pack(CENTRAL_MARK, *fields, min(place, MOST_32)) + name + extra


def end(count: int, length: int, place: int) -> bytes:
    """Returns the end of a directory of ``count`` entries and ``length`` bytes, which begins at ``place``."""
    found = b""
    if count >= MOST_16 or max(place, length) >= MOST_32:
        fields = (END64.size - 12, _NEEDS_64, _NEEDS_64, 0, 0, count, count, length, place)
        found = END64.pack(END64_MARK, *fields) + LOCATOR.pack(LOCATOR_MARK, 0, place + length, 1)
    count = min(count, MOST_16)
    return found + END.pack(END_MARK, 0, 0, count, count, min(length, MOST_32), min(place, MOST_32), 0)
