"""Reads and writes the index of a sharded checkpoint, which says in which file each tensor is."""

from __future__ import annotations

import functools
import json
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from nvme_ops.base.errors import FormatError
from nvme_ops.filesystem import publication
from nvme_ops.formats import integrity
from nvme_ops.formats.mistaken import refuse
from nvme_ops.formats.safetensors_format import unique_names

# Files that save_pretrained may have written to a folder, in the order in which transformers looks for them.
_IN_FOLDERS = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")
#: The longest index that is read or written, in bytes: of about ten million tensors.
MAX_INDEX = 1 << 30
_SHARDS = (".safetensors", ".pt", ".pth", ".bin")


@dataclass
class ShardedIndex:
    """The content of an index."""

    path: str
    places: dict[str, str]  # the file of each tensor, in the folder of the index
    metadata: dict[str, str]
    fits: bool | None = None  # whether the index matches its checksum; None if it has none
    save: str | None = None  # the id of its save
    headers: Mapping[str, str] = field(default_factory=dict)  # checksums of its shards' headers

    def shards(self, names: Iterable[str]) -> dict[str, list[str]]:
        """Returns the paths of the shards that have these tensors, each with the names of its tensors."""
        shards: dict[str, list[str]] = {}
        for name in names:
            shards.setdefault(os.path.join(os.path.dirname(self.path), self.places[name]), []).append(name)
        return shards

    def part(self, path: str) -> integrity.ShardEntry:
        """Returns what the index says about a shard."""
        return integrity.ShardEntry(
            self.path, self.save, self.headers.get(os.path.basename(path)), self.fits is not None
        )


def read_index(path: str) -> ShardedIndex:
    """Parses an index. Raises FormatError, which says what is wrong, and OSError."""
    content = publication.content_of(path, MAX_INDEX)
    document = _parse(content, path)
    places = document.get("weight_map")
    if not isinstance(places, dict):
        refuse(path, "weight_map is missing, or not an object")
    for name, file_name in places.items():
        if not isinstance(file_name, str):
            refuse(path, f"weight_map: the file of {name!r} is {file_name!r}, not a name")
        parts = file_name.split("/")
        if not file_name or "\0" in file_name or not _encodes(file_name) or os.path.isabs(file_name) or ".." in parts:
            refuse(path, f"weight_map: the file of {name!r}, {file_name!r}, is not in the folder of the index")
        if not file_name.endswith(_SHARDS):
            refuse(path, f"weight_map: the file of {name!r}, {file_name!r}, is not in a known format")
    metadata = document.get("metadata", {})
    if not isinstance(metadata, dict):
        refuse(path, "metadata is not an object")
    headers = metadata.pop(integrity.SHARDS, {})
    texts = {key: str(value) for key, value in metadata.items()}
    fits = None if integrity.KEY not in texts else not integrity.differs(content, texts)
    texts.pop(integrity.KEY, None)
    save = texts.pop(integrity.SAVE, None)
    return ShardedIndex(path, places, texts, fits, save, headers if isinstance(headers, dict) else {})


def _encodes(name: str) -> bool:
    """Returns whether the name can be encoded as bytes: half a surrogate pair cannot."""
    try:
        os.fsencode(name)
    except UnicodeEncodeError:
        return False
    return True


def _parse(content: bytes, path: str) -> dict[str, Any]:
    try:
        document = json.loads(content.decode(), object_pairs_hook=functools.partial(unique_names, path))
    except FormatError:
        raise
    except (ValueError, RecursionError) as error:
        refuse(path, f"the index is not JSON: {error}", content[:64])
    if not isinstance(document, dict):
        refuse(path, "the index is not a JSON object")
    return document


def resolved(path: str) -> str:
    """Returns the path; for a folder, that of the first file or index of ``_IN_FOLDERS`` that exists in it."""
    if not os.path.isdir(path):
        return path
    for name in _IN_FOLDERS:
        if os.path.isfile(os.path.join(path, name)):
            return os.path.join(path, name)
    what = f"is a folder that has none of {', '.join(_IN_FOLDERS)}"
    if os.path.isfile(os.path.join(path, ".metadata")):
        what = "is a checkpoint of torch.distributed.checkpoint: nvme_ops.dcp.load(state_dict, path) reads it, and "
        what += "nvme-checkpoint convert makes a file of it"
    return refuse(path, what)


def names_for(folder: str, index: str, stem: str, count: int) -> list[str]:
    """Returns names for new shards that the present index does not use, so that no reader confuses them."""
    try:
        old: Iterable[str] = read_index(os.path.join(folder, index)).places.values()
    except FileNotFoundError:
        old = []
    except FormatError:
        old = os.listdir(folder)
    pattern = _pattern(stem)
    generations = [int(match["generation"] or 1) for match in map(pattern.fullmatch, set(old)) if match]
    mark = f"-g{max(generations) + 1}" if generations else ""
    return [f"{stem}{mark}-{number + 1:05d}-of-{count:05d}.safetensors" for number in range(count)]


def shards_of(folder: str, stem: str) -> list[str]:
    """Returns the names of files that are, or were, shards of this index."""
    return [name for name in os.listdir(folder) if _pattern(stem).fullmatch(name)]


def _pattern(stem: str) -> re.Pattern[str]:
    return re.compile(re.escape(stem) + r"(-g(?P<generation>\d+))?-\d{5,}-of-\d{5,}\.safetensors")


def text_of(document: Mapping[str, Any]) -> bytes:
    """Returns the JSON of an index, with its checksum if its metadata have a placeholder.

    Raises ValueError for one that ``read_index`` would refuse.
    """
    text = json.dumps(document, indent=2, separators=(",", ":"), sort_keys=True) + "\n"
    if len(text) > MAX_INDEX:
        raise ValueError(f"the index would be {len(text)} bytes long, and readers accept {MAX_INDEX}: too many tensors")
    return integrity.sealed(text.encode(), [])[0]
