"""Samples to write and to recognize: what the tests of ``nvme_ops.data`` share."""

from __future__ import annotations

import io
import json
import struct
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from nvme_ops.data import SampleWriter
from nvme_ops.io.tensors import checksums_of
from tests.conftest import pattern

COLUMNS: dict[str, Any] = {"image": bytes, "label": torch.int64, "name": str}


def sample(number: int) -> dict[str, Any]:
    """A sample of varying size, which tells its number; the image of every tenth has 70 KiB."""
    size = 70_000 + number if number % 10 == 9 else number * 37 % 5000
    return {"image": pattern(size, number), "label": number, "name": f"sample {number}"}


def is_sample(got: dict[str, Any], number: int) -> bool:
    wanted = sample(number)
    same = torch.equal(got["image"], wanted["image"]), int(got["label"]) == number, got["name"] == wanted["name"]
    return all(same)


def are_samples(samples: Sequence[dict[str, Any]], numbers: Sequence[int]) -> bool:
    return all(is_sample(got, number) for got, number in zip(samples, numbers, strict=True))


def write(folders: Path | Sequence[Path], count: int = 100, **more: Any) -> None:
    """A store of samples of varying size, in several files."""
    for folder in [folders] if isinstance(folders, Path) else folders:
        folder.mkdir(exist_ok=True)
    with SampleWriter(folders, COLUMNS, **{"shard_bytes": "256K", **more}) as writer:
        writer.extend(map(sample, range(count)))


def fixed(number: int, nbytes: int = 4096) -> torch.Tensor:
    return pattern(nbytes, number)


def write_fixed(folder: Path, count: int = 100, nbytes: int = 4096, **more: Any) -> None:
    """A store of samples of one size."""
    folder.mkdir(exist_ok=True)
    with SampleWriter(folder, (torch.uint8, (nbytes,)), **{"shard_bytes": "128K", **more}) as writer:
        writer.extend(fixed(number, nbytes) for number in range(count))


def data_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("samples-*"))


def index_parts(content: bytes) -> tuple[dict[str, Any], bytes]:
    """The header of the file of an index, and its sections."""
    end = 20 + struct.unpack_from("<8sIII", content)[2]
    return json.loads(content[20:end]), content[-(-end // 4096) * 4096 :]


def index_of(text: bytes, sections: bytes = b"") -> bytes:
    """The file of an index with this text for a header, whatever it says, and the checksum that it has."""
    head = struct.pack("<8sIII", b"NVMEDATA", 1, len(text), checksums_of([text], "crc32c")[0]) + text
    return head.ljust(-(-len(head) // 4096) * 4096, b"\0") + sections


# MosaicML's shards

ENCODINGS = {"image": "jpeg", "label": "int", "name": "str", "meta": "json", "x": "float32", "a": "ndarray:int16:2,3",
             "b": "ndarray", "c": "ndarray:float32", "raw": "bytes", "n": "uint16", "t": "str_int"}  # fmt: skip
SIZES = [None, 8, None, None, 4, 12, None, None, None, 2, None]


def mds_sample(number: int) -> dict[str, Any]:
    return {
        "image": bytes(pattern(number * 91 % 3000, number).tolist()),
        "label": number - 50,
        "name": f"sample {number}",
        "meta": {"number": number},
        "x": number / 2,
        "a": torch.full((2, 3), number, dtype=torch.int16),
        "b": torch.arange(number % 4 * 2, dtype=torch.float32).view(-1, 2),
        "c": torch.arange(number % 3, dtype=torch.float32),
        "raw": b"x" * (number % 5),
        "n": number,
        "t": -number,
    }


def mds_bytes(sample: dict[str, Any]) -> bytes:
    arrays = [
        bytes([len(array.shape) << 2, *array.shape]) + array.numpy().tobytes() for array in (sample["b"], sample["c"])
    ]
    parts = [
        sample["image"], struct.pack("<q", sample["label"]), sample["name"].encode(),
        json.dumps(sample["meta"]).encode(), struct.pack("<f", sample["x"]), sample["a"].numpy().tobytes(),
        b"\x22" + arrays[0], arrays[1],  # the byte stands for float32, those of the shapes are uint8
        sample["raw"], struct.pack("<H", sample["n"]), b"%d" % sample["t"],
    ]  # fmt: skip
    sizes = [len(part) for part, size in zip(parts, SIZES, strict=True) if size is None]
    return struct.pack(f"<{len(sizes)}I", *sizes) + b"".join(parts)


def shard(
    folder: Path, name: str, samples: list[bytes], encodings: Sequence[str], sizes: Sequence[Any]
) -> dict[str, Any]:
    """Writes one, and returns what the index says of it."""
    head, places = 4 * (len(samples) + 2) + 5, [0]  # and 5 bytes of something that the format allows in between
    for encoded in samples:
        places.append(places[-1] + len(encoded))
    content = struct.pack("<I", len(samples)) + struct.pack(f"<{len(places)}I", *(head + place for place in places))
    (folder / name).write_bytes(content + b"extra" + b"".join(samples))
    return {
        "column_encodings": encodings, "column_names": list(ENCODINGS)[: len(encodings)], "column_sizes": sizes,
        "compression": None, "format": "mds", "hashes": [], "samples": len(samples), "version": 2,
        "raw_data": {"basename": name, "bytes": (folder / name).stat().st_size, "hashes": {}}, "zip_data": None,
    }  # fmt: skip


def write_index(folder: Path, shards: list[dict[str, Any]]) -> None:
    (folder / "index.json").write_text(json.dumps({"shards": shards, "version": 2}))


def write_mds(folder: Path, count: int = 100, per_shard: int = 30, name: str = "shard.{:05d}.mds") -> None:
    folder.mkdir(exist_ok=True)
    shards = []
    for start in range(0, count, per_shard):
        samples = [mds_bytes(mds_sample(number)) for number in range(start, min(count, start + per_shard))]
        shards.append(shard(folder, name.format(start), samples, list(ENCODINGS.values()), SIZES))
    write_index(folder, shards)


def same_mds(got: dict[str, Any], number: int) -> bool:
    wanted = mds_sample(number)
    return (
        list(got) == list(wanted)
        and all(bytes(got[name].tolist()) == wanted[name] for name in ("image", "raw"))
        and all(torch.equal(got[name], wanted[name]) for name in ("a", "b", "c"))
        and all(got[name] == wanted[name] for name in ("label", "name", "meta", "x", "n", "t"))
    )


# WebDataset's tars


def add(tar: tarfile.TarFile, name: str, content: bytes = b"", kind: bytes = tarfile.REGTYPE) -> None:
    member = tarfile.TarInfo(name)
    member.size, member.type = len(content), kind
    tar.addfile(member, io.BytesIO(content))


def write_tar(path: Path, numbers: range, prefix: str = "", form: int = tarfile.USTAR_FORMAT) -> None:
    with tarfile.open(path, "w", format=form) as tar:
        for number in numbers:
            for extension, content in tar_sample(number).items():
                add(tar, f"{prefix}{number:06d}.{extension}", content)


def tar_sample(number: int) -> dict[str, bytes]:
    image = bytes(pattern(number * 77 % 4000, number).tolist())
    return {"jpg": image, "cls": str(number).encode(), "seg.png": b"p" * 10}


def same_tar(got: dict[str, Any], number: int, prefix: str = "") -> bool:
    wanted = tar_sample(number)
    key = got.pop("__key__")
    return key == f"{prefix}{number:06d}" and {name: bytes(value.tolist()) for name, value in got.items()} == wanted
