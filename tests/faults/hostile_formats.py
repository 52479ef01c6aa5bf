"""The formats that ``hostile`` changes: how files of each are made, changed by their structure, and read."""

from __future__ import annotations

import json
import os
import random
import struct
import tarfile
import zlib
from pathlib import Path

import torch

import nvme_ops
from nvme_ops.base.native import native
from nvme_ops.data import AsyncLog, SampleStore, SampleWriter
from nvme_ops.data.convert import open_source
from nvme_ops.data.writer import settle_abandoned
from nvme_ops.filesystem.device import Identity
from nvme_ops.io.tensors import checksums_of
from nvme_ops.io.tuning import store as tuning_store
from nvme_ops.storage import Session, TensorStore
from tests.data.samples import index_of, index_parts, write_mds, write_tar
from tests.faults import hostile_checkpoints as checkpoints
from tests.faults.hostile import NUMBERS, Format, at_random, changed_json, edited, text_of
from tests.faults.hostile_checkpoints import STATE


def crc(content: bytes) -> int:
    return checksums_of([content], "crc32c")[0]


# Samples


def write_store(folder: Path) -> None:
    with SampleWriter(folder, {"number": torch.int64, "text": str, "values": (torch.float32, (-1,))}) as writer:
        for k in range(20):
            writer.add({"number": k, "text": "x" * k, "values": torch.ones(k)})


def read_samples(folder: Path) -> None:
    with SampleStore(folder, verify=True) as store:
        for numbers in store.ranges(1 << 20):
            store.read(numbers)
        store.submit(range(len(store))).batch() if len(store) else None


def changed_store(content: bytes, draw: random.Random) -> bytes | None:
    if not content.startswith(b"NVMEDATA"):
        return None
    header, sections = index_parts(content)
    body = bytearray(sections)
    if draw.random() < 0.4:  # a section, with the checksum that it then has
        section = header["sections"][draw.choice(list(header["sections"]))]
        place = section["offset"] + 8 * draw.randrange(max(1, section["bytes"] // 8))
        body[place : place + 8] = (draw.choice(NUMBERS) & 2**64 - 1).to_bytes(8, "little")
        section["crc32c"] = crc(bytes(body[section["offset"] : section["offset"] + section["bytes"]]))
        text = json.dumps(header).encode()
    else:
        text = text_of(edited(header, draw), draw)
    return index_of(text, bytes(body))


def changed_mds(content: bytes, draw: random.Random) -> bytes:
    if content.startswith(b"{"):
        return changed_json(content, draw)
    data = bytearray(content)
    place = 4 * draw.randrange(len(data) // 4) if draw.random() < 0.5 else 4 * draw.randrange(10)
    number = draw.choice((*NUMBERS, len(data), draw.randrange(500)))
    data[place : place + 4] = (number & 2**32 - 1).to_bytes(4, "little")
    return bytes(data)


def write_foreign(folder: Path) -> None:
    write_mds(folder, 8)
    SampleStore(folder).close()


def write_tars(folder: Path) -> None:
    for number, kind in enumerate((tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT)):
        write_tar(folder / f"{number}.tar", range(4), "long/" * 30 * (number > 0), kind)


def changed_tar(content: bytes, draw: random.Random) -> bytes:
    """Changes a field of a header and its sum, or the record of a pax header."""
    data = bytearray(content)
    heads = [k for k in range(0, len(data), 512) if data[k + 257 : k + 262] == b"ustar"]
    head = draw.choice(heads)
    fields = (0, 100), (100, 108), (124, 136), (136, 148), (156, 157), (157, 257), (257, 265), (345, 500)
    begin, end = draw.choice((*fields, (124, 136), (156, 157)))
    new = draw.choice((
        b"%o" % abs(draw.choice(NUMBERS)), b"\x80" + (draw.choice(NUMBERS) & 2**88 - 1).to_bytes(11, "big"),
        b"\xff" * 12, draw.choice((b"x", b"g", b"L", b"K", b"S", b"5", b"2", b"0", b"\0", b"X", b"7", b"1", b"A")),
        b"-1", b"a.b\xff\xfe.c", b"", b"../x.y", b"\x1b[31m.txt", b" 7 7",
    ))  # fmt: skip
    if draw.random() < 0.3:
        records = draw.choice((
            b"size=%d" % draw.choice(NUMBERS), b"path=\xff\xfe.txt", b"path=a\0b.txt", b"size=x",
            b"GNU.sparse.map=1,2,3", b"GNU.sparse.major=1\n", b"hdrcharset=BINARY", b"mtime=nan", b"uid=%d" % 10**30,
            b"GNU.sparse.size=%d" % draw.choice(NUMBERS), b"GNU.sparse.major=1",
        ))  # fmt: skip
        length = b"%d" % (len(records) + len(str(len(records) + 4)) + 2)
        lengths = draw.choice((length, b"0", b"99999999999999999999", b"5", b""))
        text = lengths + b" " + records + b"\n"
        block = tarfile.TarInfo("x")
        block.size, block.type = len(text), draw.choice((b"x", b"x", b"g"))
        data[head:head] = block.tobuf(tarfile.USTAR_FORMAT) + text.ljust(512, b"\0")
    else:
        data[head + begin : head + end] = new[: end - begin].ljust(end - begin, b"\0")
        field = data[head : head + 512]
        data[head + 148 : head + 156] = b"%06o\0 " % (sum(field) - sum(field[148:156]) + 256)
    return bytes(data)


def save_npy(folder: Path) -> None:
    import numpy

    numpy.save(folder / "rows.npy", numpy.arange(60, dtype="float32").reshape(10, 6))


def read_npy(folder: Path) -> None:
    source = open_source(str(folder / "rows.npy"), None, [])
    for _ in source.samples:
        pass


# Logs, sessions, settings


def write_log(folder: Path) -> None:
    for _ in range(2):
        with AsyncLog(folder / "log", window=0.001) as log:
            for k in range(5):
                log.append(b"x" * 30 * k)
                log.flush()


def changed_log(content: bytes, draw: random.Random) -> bytes:
    blocks = [b"NVLG" + part for part in content.split(b"NVLG")[1:]]
    k = draw.randrange(len(blocks))
    count, nbytes = struct.unpack_from("<IQ", blocks[k], 8)
    body = blocks[k][20:]
    what = draw.randrange(4)
    if what == 0:
        count = draw.choice(NUMBERS) & 2**32 - 1
    elif what == 1:
        nbytes = draw.choice(NUMBERS) & 2**64 - 1
    elif what == 2:
        body = at_random(body, draw)
    else:
        blocks.insert(k, blocks[draw.randrange(len(blocks))])
    head = struct.pack("<IQ", count, nbytes)
    blocks[k] = b"NVLG" + struct.pack("<I", crc(head + body)) + head + body
    return b"".join(blocks)


def write_session(folder: Path) -> None:
    with Session(folder, name="s", reuse=True, fingerprint="f") as session, TensorStore(session) as store:
        for name, tensor in STATE.items():
            store.put(name, tensor)
        store.sync()


def read_session(folder: Path) -> None:
    with Session(folder, name="s", reuse=True, fingerprint="f") as session, TensorStore(session) as store:
        for key in list(store.keys()):
            store.get(key).result()


def changed_journal(content: bytes, draw: random.Random) -> bytes | None:
    if content[8:9] != b" ":
        return None
    lines = content.splitlines(keepends=True)
    k = draw.randrange(len(lines))
    text = changed_json(lines[k][9:-1], draw)
    lines[k] = b"%08x %s\n" % (zlib.crc32(text), text)
    return b"".join(lines)


def write_claim(folder: Path) -> None:
    mark = folder / ".samples-0123456789abcdef.nvme_ops-claim"
    mark.write_text(json.dumps({"index": str(folder / "index.nvmedata"), "folders": [str(folder)]}))


def read_claim(folder: Path) -> None:
    settle_abandoned(str(folder / "index.nvmedata"))


DEVICE = Identity(("made up",), "ext4", "1", "6.1", 8, "cpu", "io_uring")


def write_tuned(folder: Path) -> None:
    native()
    os.environ["XDG_CACHE_HOME"] = str(folder)  # the op, which is cached there, is loaded
    tuning_store.keep(DEVICE, nvme_ops.base.settings.Settings(), {"seconds": 1.0, "complete": True})


def read_tuned(_: Path) -> None:
    tuning_store.load(DEVICE)


FORMATS = {
    "safetensors": Format(
        lambda folder: nvme_ops.save(STATE, folder / "model.safetensors"),
        checkpoints.read_safetensors,
        "*.safetensors",
        checkpoints.changed_safetensors,
    ),
    "sharded": Format(checkpoints.save_sharded, checkpoints.read_sharded, "*.index.json", checkpoints.changed_index),
    "torch": Format(
        checkpoints.save_torch,
        checkpoints.read_torch,
        "*.pt",
        lambda content, draw: checkpoints.changed_zip(content, draw) if content[:2] == b"PK" else None,
    ),
    "dcp": Format(checkpoints.save_dcp, checkpoints.read_dcp, ".metadata", checkpoints.changed_metadata),
    "store": Format(write_store, read_samples, "*[0-9a]", changed_store),
    "mds": Format(lambda folder: write_mds(folder, 8), read_samples, "[is]*", changed_mds),
    "foreign": Format(write_foreign, read_samples, ".foreign.nvmedata", changed_store),
    "tar": Format(write_tars, read_samples, "*.tar", changed_tar),
    "npy": Format(save_npy, read_npy, "*.npy"),
    "log": Format(write_log, lambda folder: list(AsyncLog.read(folder / "log")), "log.*", changed_log),
    "owner": Format(write_session, read_session, ".nvme_ops-*/owner", changed_json),
    "journal": Format(write_session, read_session, ".nvme_ops-*/7d95*", changed_journal),
    "claim": Format(write_claim, read_claim, ".*-claim", changed_json),
    "tuned": Format(write_tuned, read_tuned, "nvme_ops/tune/*.json", changed_json),
    "states": Format(checkpoints.write_states, checkpoints.read_states, "states", checkpoints.changed_states),
}
