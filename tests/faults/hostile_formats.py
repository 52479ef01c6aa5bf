"""The formats that ``hostile`` changes: how files of each are made, changed by their structure, and read."""

from __future__ import annotations

import contextlib
import functools
import io
import json
import os
import pickletools
import random
import struct
import tarfile
import zipfile
import zlib
from pathlib import Path
from typing import Any

import torch

import nvme_ops
from nvme_ops.base.errors import MissingTensorError
from nvme_ops.base.native import native
from nvme_ops.checkpoint.contents import contents, damaged
from nvme_ops.data import AsyncLog, SampleStore, SampleWriter
from nvme_ops.data.convert import open_source
from nvme_ops.data.writer import settle_abandoned
from nvme_ops.filesystem.device import Identity
from nvme_ops.integrations.safetensors import safe_open
from nvme_ops.io.tensors import checksums_of
from nvme_ops.io.tuning import store as tuning_store
from nvme_ops.storage import Session, TensorStore
from tests.data.samples import index_of, index_parts, write_mds, write_tar
from tests.faults.hostile import NUMBERS, Format, at_random, changed_json, edited, text_of


def crc(content: bytes) -> int:
    return checksums_of([content], "crc32c")[0]


STATE = {
    "a": torch.arange(40.0).view(5, 8),
    "b.c": torch.arange(6, dtype=torch.int64),
    "d": torch.ones(3, dtype=torch.bfloat16),
}


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
    list(open_source(str(folder / "rows.npy"), None, []).samples)


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


def save_safetensors(folder: Path) -> None:
    nvme_ops.save(STATE, folder / "model.safetensors")


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
    places = [place for _, _, place in pickletools.genops(content) if place is not None]
    parts = [content[begin:end] for begin, end in zip(places, [*places[1:], len(content)], strict=True)]
    for _ in range(draw.choice((1, 1, 2, 5))):
        k, deep = draw.randrange(len(parts)), draw.choice((10, 1000, 100_000))
        parts[k] = draw.choice((
            b"", draw.choice(parts), parts[k] + draw.choice(parts), parts[k][:1] + at_random(parts[k][1:], draw),
            b"\x8a\x09" + (draw.choice(NUMBERS) & 2**72 - 1).to_bytes(9, "little"),  # LONG1
            draw.choice((b"]" * deep, b"(" * deep, b"N" + b"\x85" * deep, b"r\xff\xff\xff\x7f", b"0", b"}", b"N")),
        ))  # fmt: skip
    return b"".join(parts)


def changed_zip(content: bytes, draw: random.Random) -> bytes | None:
    """Changes the pickle or another record of a file of ``torch.save``, in a zip file that is whole."""
    if not content.startswith(b"PK"):
        return None
    made = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(content)) as old, zipfile.ZipFile(made, "w") as new:
        pickles = [name for name in old.namelist() if name.endswith("data.pkl")]
        chosen = draw.choice(pickles if draw.random() < 0.8 else old.namelist())
        for name in old.namelist():
            data = old.read(name)
            if name == chosen:
                data = changed_pickle(data, draw) if name.endswith(".pkl") else at_random(data, draw)
            if draw.random() < 0.01:
                name = draw.choice((name + "x", "x", "../x", name + "\xff"))
            new.writestr(name, data, zipfile.ZIP_DEFLATED if draw.random() < 0.03 else None)
    return made.getvalue()


def save_torch(folder: Path) -> None:
    layer = torch.nn.Linear(3, 2)
    optimizer = torch.optim.Adam(layer.parameters())
    layer(torch.ones(3)).sum().backward()
    optimizer.step()
    state = {
        "model": layer.state_dict(),
        "optimizer": optimizer.state_dict(),
        "view": torch.arange(20)[3:9:2],
        "list": [1, 2.5, "x", None, (torch.ones(2, dtype=torch.float16),)],
        "parameter": torch.nn.Parameter(torch.ones(2)),
    }
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


def changed_metadata(content: bytes, draw: random.Random) -> bytes:
    return changed_pickle(content.rpartition(b"\nnvme_ops")[0], draw)


@functools.cache
def _optimizer(folder: Path) -> Any:
    torch.manual_seed(0)
    layer = torch.nn.Linear(4, 4)
    made = nvme_ops.offload.NvmeOptimizer(layer.parameters(), torch.optim.Adam, folder / "work", lr=0.1)
    for param in layer.parameters():  # no backward pass, which a forked child may not run
        param.grad = torch.ones_like(param)
    made.step()
    return made


def write_states(folder: Path) -> None:
    (folder / "work").mkdir()
    _optimizer(folder).save_states(folder / "states")
    _optimizer(folder).close()
    _optimizer.cache_clear()


def changed_states(content: bytes, draw: random.Random) -> bytes:
    if draw.random() < 0.3:
        return changed_safetensors(content, draw)
    (length,) = struct.unpack_from("<Q", content)
    header = json.loads(content[8 : 8 + length])
    described = header["__metadata__"]
    described["nvme_ops.optimizer"] = changed_json(described["nvme_ops.optimizer"].encode(), draw).decode()
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + content[8 + length :]


def read_states(folder: Path) -> None:
    try:
        _optimizer(folder).load_states(folder / "states")
    except ValueError as error:
        if "has the states of other parameters" not in str(error):
            raise


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
    number, head, body = draw.choice(NUMBERS), blocks[k][8:20], blocks[k][20:]
    head, body = draw.choice((
        (struct.pack("<I", number & 2**32 - 1) + head[4:], body),
        (head[:4] + struct.pack("<Q", number & 2**64 - 1), body),
        (head, at_random(body, draw)),
        (draw.choice(blocks)[8:20], body),
    ))  # fmt: skip
    blocks.insert(k, b"NVLG" + struct.pack("<I", crc(head + body)) + head + body)
    del blocks[k + draw.randrange(2)]
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


DEVICE = Identity(("made up",), "ext4", "1", "6.1", 8, "cpu", "io_uring")


def write_tuned(folder: Path) -> None:
    native()
    os.environ["XDG_CACHE_HOME"] = str(folder)  # the op, which is cached there, is loaded
    tuning_store.keep(DEVICE, nvme_ops.base.settings.Settings(), {"seconds": 1.0, "complete": True})


FORMATS = {
    "safetensors": Format(save_safetensors, read_safetensors, "*.safetensors", changed_safetensors),
    "sharded": Format(save_sharded, read_sharded, "*.index.json", changed_index),
    "torch": Format(save_torch, read_torch, "*.pt", changed_zip),
    "dcp": Format(save_dcp, lambda folder: damaged(contents(folder)), ".metadata", changed_metadata),
    "store": Format(write_store, read_samples, "*[0-9a]", changed_store),
    "mds": Format(lambda folder: write_mds(folder, 8), read_samples, "[is]*", changed_mds),
    "foreign": Format(write_foreign, read_samples, ".foreign.nvmedata", changed_store),
    "tar": Format(write_tars, read_samples, "*.tar", changed_tar),
    "npy": Format(save_npy, read_npy, "*.npy"),
    "log": Format(write_log, lambda folder: list(AsyncLog.read(folder / "log")), "log.*", changed_log),
    "owner": Format(write_session, read_session, ".nvme_ops-*/owner", changed_json),
    "journal": Format(write_session, read_session, ".nvme_ops-*/7d95*", changed_journal),
    "claim": Format(write_claim, lambda folder: settle_abandoned(f"{folder}/index.nvmedata"), ".*-claim", changed_json),
    "tuned": Format(write_tuned, lambda _: tuning_store.load(DEVICE), "nvme_ops/tune/*.json", changed_json),
    "states": Format(write_states, read_states, "states", changed_states),
}
