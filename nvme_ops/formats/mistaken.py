"""Refuses a file; if its first bytes show what it really is, says so, and often what to do."""

from __future__ import annotations

import os
from typing import NoReturn

from nvme_ops.base.errors import FormatError

_HEAD = 64  # bytes at the beginning of a file that are looked at
_BEGINNINGS = {
    b"version https://git-lfs": "is a pointer of Git LFS, not the file that it stands for: git lfs pull fetches that",
    b"PK\x03\x04": "is a zip archive, as torch.save writes: give it a name that ends in .pt",
    b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.": "was written by torch.save: give it a name that ends in .pt",
    b"\x89HDF\r\n\x1a\n": "is an HDF5 file, as Keras and h5py write",
    b"GGUF": "is a GGUF file, as llama.cpp reads: nvme_ops.offload.from_pretrained streams it, and transformers "
    "converts it (from_pretrained(folder, gguf_file=name), then save_pretrained)",
    b"\x1f\x8b": "is compressed by gzip",
    b"\x28\xb5\x2f\xfd": "is compressed by zstd",
    b"<": "is a web page, perhaps of a download that failed",
}


def refuse(path: str, reason: str, head: bytes | int = b"") -> NoReturn:
    """Raises FormatError with what the file is by its ``head`` (first bytes, or a descriptor), else with the reason."""
    head = os.pread(head, _HEAD, 0) if isinstance(head, int) else head
    raise FormatError(f"{path}: {_mistaken(head) or reason}") from None


def _mistaken(head: bytes) -> str | None:
    if head[8:9] == b"{" and int.from_bytes(head[:8], "little") < 1 << 32:
        return "is a safetensors file: give it a name that ends in .safetensors"
    return next((words for beginning, words in _BEGINNINGS.items() if head.startswith(beginning)), None)
