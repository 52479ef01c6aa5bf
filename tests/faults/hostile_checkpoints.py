"""The formats of checkpoints that ``hostile`` changes: how files are made, changed by their structure, and read."""

from __future__ import annotations

import contextlib
import io
import json
import pickletools
import random
import struct
import zipfile
from pathlib import Path
from typing import Any

import torch

import nvme_ops
from nvme_ops.base.errors import MissingTensorError
from nvme_ops.checkpoint.contents import contents, damaged
from nvme_ops.integrations.safetensors import safe_open
from tests.faults.hostile import NUMBERS, at_random, changed_json, edited, text_of

STATE = {
    "a": torch.arange(40.0).view(5, 8),
    "b.c": torch.arange(6, dtype=torch.int64),
    "d": torch.ones(3, dtype=torch.bfloat16),
}


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
    codes = [(code, place) for code, _, place in pickletools.genops(content) if place is not None]
    ends = [place for _, place in codes[1:]] + [len(content)]
    parts = [content[place:end] for (_, place), end in zip(codes, ends, strict=True)]
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


def read_dcp(folder: Path) -> None:
    damaged(contents(folder))


def changed_metadata(content: bytes, draw: random.Random) -> bytes:
    return changed_pickle(content.rpartition(b"\nnvme_ops")[0], draw)


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
