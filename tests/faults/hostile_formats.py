"""The formats that ``hostile`` changes: how files of each are made, changed by their structure, and read."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pickletools
import random
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import nvme_ops
from nvme_ops._native import native
from nvme_ops.adaptive.dictionary import Dictionary
from nvme_ops.checksums import checksums_of
from nvme_ops.data import AsyncLog, SampleStore, SampleWriter, read_log
from nvme_ops.data.claim import settle_abandoned
from nvme_ops.data.convert import open_source
from nvme_ops.errors import MissingTensorError
from nvme_ops.inspection.contents import contents, damaged
from nvme_ops.checkpoint.safe_open import safe_open
from nvme_ops.storage import Session, TensorStore
from nvme_ops.storage.identity import Identity
from nvme_ops.tune import store as tuned
from tests.faults.hostile import NUMBERS, VALUES, Format, at_random, changed_json, edited, text_of

STATE = {
    "a": torch.arange(40.0).view(5, 8), "b.c": torch.arange(6, dtype=torch.int64), "d": torch.ones(3, dtype=torch.bfloat16)
}  # fmt: skip


def crc(content: bytes) -> int:
    return checksums_of([content], "crc32c")[0]


# Checkpoints


def changed_safetensors(content: bytes, draw: random.Random) -> bytes:
    (length,) = struct.unpack_from("<Q", content)
    text, data = changed_json(content[8 : 8 + length], draw), content[8 + length :]
    length = draw.choice(NUMBERS[2:]) if draw.random() < 0.05 else len(text)
    return struct.pack("<Q", length & 2**64 - 1) + text + data


def verified(path: Path) -> None:
    """Loads a file whose data may differ, by their checksums, or have none."""
    try:
        nvme_ops.load(path, verify=True)
    except OSError:
        pass
    except ValueError as error:
        if "has no checksums to verify" not in str(error):
            raise


def read_safetensors(folder: Path) -> None:
    path = folder / "model.safetensors"
    verified(path)
    nvme_ops.load(path, mmap=True)
    with safe_open(path) as file:
        for name in file.keys():  # noqa: SIM118  (it is no dict)
            file.get_slice(name)[:1] if file.get_slice(name).get_shape() else file.get_tensor(name)
    damaged(contents(path))


def save_sharded(folder: Path) -> None:
    nvme_ops.save(STATE, folder / "model.safetensors.index.json", max_shard_size=100)


def read_sharded(folder: Path) -> None:
    path = folder / "model.safetensors.index.json"
    with contextlib.suppress(MissingTensorError):
        nvme_ops.load(path)
    with contextlib.suppress(MissingTensorError):
        nvme_ops.load(path, keys=["a"])
    damaged(contents(path))


def changed_index(content: bytes, draw: random.Random) -> bytes:
    document = json.loads(content)
    if draw.random() < 0.9:  # else its checksum does not match
        document["metadata"].pop("nvme_ops.crc32c", None)
    return text_of(edited(document, draw), draw)


def changed_pickle(content: bytes, draw: random.Random) -> bytes:
    """Changes the argument of a code, or which codes there are."""
    found = [(code, place) for code, _, place in pickletools.genops(content) if place is not None]
    ends = [place for _, place in found[1:]] + [len(content)]
    parts = [content[place:end] for (_, place), end in zip(found, ends, strict=True)]
    for _ in range(draw.choice((1, 1, 2, 5))):
        k = draw.randrange(len(parts))
        what = draw.randrange(6)
        if what == 0:
            parts[k] = b""
        elif what == 1:
            parts[k] = parts[draw.randrange(len(parts))]
        elif what == 2:
            parts[k] += draw.choice(parts)
        elif what == 3 and len(parts[k]) > 1:
            parts[k] = parts[k][:1] + at_random(parts[k][1:], draw)
        elif what == 4:
            number = draw.choice(NUMBERS)
            parts[k] = b"\x8a\x09" + (number & 2**72 - 1).to_bytes(9, "little")  # LONG1
        else:
            deep = draw.choice((10, 1000, 100_000))
            parts[k] = draw.choice(
                (b"]" * deep, b"(" * deep, b"N" + b"\x85" * deep, b"r\xff\xff\xff\x7f", b"0", b"}", b"N")
            )
    return b"".join(parts)


def changed_zip(content: bytes, draw: random.Random) -> bytes:
    """Changes the pickle or another record of a file of ``torch.save``, in a zip file that is whole."""
    made = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(content)) as old, zipfile.ZipFile(made, "w") as new:
        names = old.namelist()
        chosen = (
            next(name for name in names if name.endswith("data.pkl")) if draw.random() < 0.8 else draw.choice(names)
        )
        for name in names:
            data = old.read(name)
            if name == chosen:
                data = changed_pickle(data, draw) if name.endswith(".pkl") else at_random(data, draw)
            if draw.random() < 0.01:
                name = draw.choice((name + "x", "x", "../x", name.encode().decode("latin-1") + "\xff"))
            new.writestr(name, data, zipfile.ZIP_DEFLATED if draw.random() < 0.03 else None)
    return made.getvalue()


class Config:
    """An object as training arguments are."""


def save_torch(folder: Path) -> None:
    layer = torch.nn.Linear(3, 2)
    optimizer = torch.optim.Adam(layer.parameters())
    layer(torch.ones(3)).sum().backward()
    optimizer.step()
    state = {"model": layer.state_dict(), "optimizer": optimizer.state_dict(), "view": torch.arange(20)[3:9:2],
             "list": [1, 2.5, "x", None, (torch.ones(2, dtype=torch.float16),)], "parameter": torch.nn.Parameter(torch.ones(2))}  # fmt: skip
    nvme_ops.save(state, folder / "model.pt")
    torch.save(state, folder / "torch.pt")
    torch.save(STATE, folder / "old.pt", _use_new_zipfile_serialization=False)


def read_torch(folder: Path) -> None:
    for path in sorted(folder.glob("*.pt")):
        nvme_ops.load(path)
        if path.name != "old.pt":
            verified(path)
            with contextlib.suppress(MissingTensorError):
                nvme_ops.load(path, keys=["view"])
            damaged(contents(path))


def save_dcp(folder: Path) -> None:
    nvme_ops.dcp.save({**STATE, "number": 5}, folder)


def read_dcp(folder: Path) -> None:
    damaged(contents(folder))


def changed_metadata(content: bytes, draw: random.Random) -> bytes:
    return changed_pickle(content.rpartition(b"\nnvme_ops")[0], draw)


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
        if store.columns is not None:
            store.columns.words()


def changed_store(content: bytes, draw: random.Random) -> bytes | None:
    if not content.startswith(b"NVMEDATA"):
        return None
    _, version, length, _ = struct.unpack_from("<8sIII", content)
    header = json.loads(content[20 : 20 + length])
    body = bytearray(content[-(-(20 + length) // 4096) * 4096 :])
    if draw.random() < 0.4:  # a section, with the checksum that it then has
        section = header["sections"][draw.choice(list(header["sections"]))]
        place = section["offset"] + 8 * draw.randrange(max(1, section["bytes"] // 8))
        body[place : place + 8] = (draw.choice(NUMBERS) & 2**64 - 1).to_bytes(8, "little")
        section["crc32c"] = crc(bytes(body[section["offset"] : section["offset"] + section["bytes"]]))
        text = json.dumps(header).encode()
    else:
        text = text_of(edited(header, draw), draw)
    head = struct.pack("<8sIII", b"NVMEDATA", version, len(text), crc(text)) + text
    return head.ljust(-(-len(head) // 4096) * 4096, b"\0") + bytes(body)


_MDS = ("int", "bytes", "ndarray:float32", "str", "json", "ndarray", "uint16", "str_int", "ndarray:int8:2,2")


def write_mds(folder: Path) -> None:
    samples = []
    for k in range(8):
        parts = [struct.pack("<q", k), b"x" * k, struct.pack("<BBf", 1 << 2, 1, k), "é".encode() * k, json.dumps({"k": k}).encode(),
                 bytes([32, 1 << 2, k]) + bytes(4 * k), struct.pack("<H", k), b"%d" % k, bytes(4)]  # fmt: skip
        sizes = [len(part) for part, fixed in zip(parts, (8, 0, 0, 0, 0, 0, 2, 0, 4), strict=True) if not fixed]
        samples.append(struct.pack(f"<{len(sizes)}I", *sizes) + b"".join(parts))
    begin, places = 4 * (len(samples) + 2), []
    for sample in samples:
        places.append(begin)
        begin += len(sample)
    head = struct.pack(f"<{len(places) + 2}I", len(samples), *places, begin)
    (folder / "shard.mds").write_bytes(head + b"".join(samples))
    shard = {
        "format": "mds", "raw_data": {"basename": "shard.mds", "bytes": begin, "hashes": {}}, "zip_data": None,
        "compression": None, "samples": len(samples), "column_names": [str(k) for k in range(len(_MDS))],
        "column_encodings": list(_MDS), "column_sizes": [8, None, None, None, None, None, 2, None, 4],
    }  # fmt: skip
    (folder / "index.json").write_text(json.dumps({"version": 2, "shards": [shard]}))


def changed_mds(content: bytes, draw: random.Random) -> bytes:
    if content.startswith(b"{"):
        return changed_json(content, draw)
    data = bytearray(content)
    place = 4 * draw.randrange(len(data) // 4) if draw.random() < 0.5 else 4 * draw.randrange(10)
    data[place : place + 4] = (draw.choice((*NUMBERS, len(data), draw.randrange(500))) & 2**32 - 1).to_bytes(
        4, "little"
    )
    return bytes(data)


def write_foreign(folder: Path) -> None:
    write_mds(folder)
    SampleStore(folder).close()


def write_tar(folder: Path) -> None:
    for number, kind in enumerate((tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT)):
        with tarfile.open(folder / f"{number}.tar", "w", format=kind) as tar:
            for k in range(4):
                for extension, data in (("txt", b"x" * 100 * k), ("json", b"{}")):
                    member = tarfile.TarInfo(f"{'' if k < 3 or not number else 'long/' * 30}{k}.{extension}")
                    member.size = len(data)
                    if number == 2 and k == 2:
                        member.pax_headers = {"comment": "é" * 9, "size": str(len(data))}
                    tar.addfile(member, io.BytesIO(data))


def changed_tar(content: bytes, draw: random.Random) -> bytes:
    """Changes a field of a header and its sum, or the record of a pax header."""
    data = bytearray(content)
    heads = [k for k in range(0, len(data), 512) if data[k + 257 : k + 262] == b"ustar"]
    head = draw.choice(heads)
    begin, end = draw.choice(
        (
            (0, 100),
            (100, 108),
            (124, 136),
            (124, 136),
            (136, 148),
            (156, 157),
            (156, 157),
            (157, 257),
            (257, 265),
            (345, 500),
        )
    )
    new = draw.choice(
        (b"%o" % abs(draw.choice(NUMBERS)), b"\x80" + (draw.choice(NUMBERS) & 2**88 - 1).to_bytes(11, "big"), b"\xff" * 12,
         draw.choice((b"x", b"g", b"L", b"K", b"S", b"5", b"2", b"0", b"\0", b"X", b"7", b"1", b"3", b"A", b"N")), b"-1", b"a.b\xff\xfe.c", b"", b"../x.y", b"\x1b[31m.txt", b" 7 7")
    )  # fmt: skip
    if draw.random() < 0.3:
        records = draw.choice(
            (b"size=%d" % draw.choice(NUMBERS), b"path=\xff\xfe.txt", b"path=a\0b.txt", b"size=x", b"GNU.sparse.map=1,2,3",
             b"GNU.sparse.major=1\n", b"hdrcharset=BINARY", b"mtime=nan", b"uid=%d" % 10**30, b"GNU.sparse.size=%d" % draw.choice(NUMBERS), b"GNU.sparse.major=1")
        )  # fmt: skip
        lengths = draw.choice(
            (b"%d" % (len(records) + len(str(len(records) + 4)) + 2), b"0", b"99999999999999999999", b"5", b"")
        )
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
    with Session(folder, name="s", keep=True, fingerprint="f") as session, TensorStore(session) as store:
        for name, tensor in STATE.items():
            store.put(name, tensor)
        store.sync()


def read_session(folder: Path) -> None:
    with Session(folder, name="s", keep=True, fingerprint="f") as session, TensorStore(session) as store:
        for key in list(store.keys()):
            store.get(key).result()


def changed_owner(content: bytes, draw: random.Random) -> bytes:
    return changed_json(content, draw)


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
    tuned.save(DEVICE, nvme_ops.settings.Settings(), {"seconds": 1.0, "complete": True})


def read_tuned(_: Path) -> None:
    tuned.load(DEVICE)


def write_adaptive(folder: Path) -> None:
    native()
    os.environ["XDG_CACHE_HOME"] = str(folder)
    entry = {"op": "async_io", "energy": False, "class": [0, 5, 0, 0, 0], "tools": [[1 << 20, 32, 1, False, False, 0], [1 << 18, 8, 2, True, False, 1]],
             "costs": [1e-9, 2e-9], "chosen": 0, "usual": 1e-9, "transfers": 50}  # fmt: skip
    tuned.save_section(DEVICE, "adaptive", {"classes": [entry]})


def read_adaptive(_: Path) -> None:
    made = Dictionary(DEVICE, False, (1 << 20, 32, 1, False, False, 0), 2, (False,) * 4, False)
    made.of(native(), cufile=False)
    for each in made.learned():
        str(each)


_PARAMETERS = torch.nn.Linear(4, 4)


def _optimizer(folder: Path) -> Any:
    torch.manual_seed(0)
    layer = torch.nn.Linear(4, 4)
    made = nvme_ops.offload.NvmeOptimizer(torch.optim.Adam, layer.parameters(), folder / "work", lr=0.1)
    layer(torch.ones(4)).sum().backward()
    made.step()
    return made


def write_states(folder: Path) -> None:
    (folder / "work").mkdir()
    made = _optimizer(folder)
    made.save_states(folder / "states")
    made.close()


def changed_states(content: bytes, draw: random.Random) -> bytes:
    if draw.random() < 0.3:
        return changed_safetensors(content, draw)
    (length,) = struct.unpack_from("<Q", content)
    header = json.loads(content[8 : 8 + length])
    header["__metadata__"]["nvme_ops.optimizer"] = changed_json(
        header["__metadata__"]["nvme_ops.optimizer"].encode(), draw
    ).decode()
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + content[8 + length :]


_made: dict[str, Any] = {}


def read_states(folder: Path) -> None:
    if "optimizer" not in _made:
        _made["optimizer"] = _optimizer(folder)
    try:
        _made["optimizer"].load_states(folder / "states")
    except ValueError as error:
        if "has the states of other parameters" not in str(error):
            raise


FORMATS = {
    "safetensors": Format(
        lambda folder: nvme_ops.save(STATE, folder / "model.safetensors"),
        read_safetensors,
        "*.safetensors",
        changed_safetensors,
    ),
    "sharded": Format(save_sharded, read_sharded, "*.index.json", changed_index),
    "torch": Format(
        save_torch,
        read_torch,
        "*.pt",
        lambda content, draw: changed_zip(content, draw) if content[:2] == b"PK" else None,
    ),
    "dcp": Format(save_dcp, read_dcp, ".metadata", changed_metadata),
    "store": Format(write_store, read_samples, "*[0-9a]", changed_store),
    "mds": Format(write_mds, read_samples, "[is]*", changed_mds),
    "foreign": Format(write_foreign, read_samples, ".foreign.nvmedata", changed_store),
    "tar": Format(write_tar, read_samples, "*.tar", changed_tar),
    "npy": Format(save_npy, read_npy, "*.npy"),
    "log": Format(write_log, lambda folder: list(read_log(folder / "log")), "log.*", changed_log),
    "owner": Format(write_session, read_session, ".nvme_ops-*/owner", changed_owner),
    "journal": Format(write_session, read_session, ".nvme_ops-*/7d95*", changed_journal),
    "claim": Format(write_claim, read_claim, ".*-claim", changed_json),
    "tuned": Format(write_tuned, read_tuned, "nvme_ops/tune/*.json", changed_json),
    "adaptive": Format(write_adaptive, read_adaptive, "nvme_ops/tune/*.json", changed_json),
    "states": Format(write_states, read_states, "states", changed_states),
}
