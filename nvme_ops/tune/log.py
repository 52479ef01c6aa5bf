"""What was measured, pass by pass: a line of JSON each."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from typing import TextIO

from nvme_ops.bench.files import NotUsable
from nvme_ops.bench.settings import Settings
from nvme_ops.text import share_words, size_words

FILE = "passes.jsonl"


class Log:
    """Writes to ``passes.jsonl`` in a folder, which is made, and says the same in words; either may be None.

    Raises ``files.NotUsable`` where the file cannot be written.
    """

    def __init__(self, folder: str | None, say: Callable[[str], None] | None) -> None:
        self._say = say
        self._file: TextIO | None = None
        if folder is not None:
            try:
                os.makedirs(folder, exist_ok=True)
                self._file = open(os.path.join(folder, FILE), "w", encoding="utf-8", buffering=1)  # noqa: SIM115
            except OSError as error:
                raise NotUsable(f"--log_dir {folder}: {error.strerror}") from error

    def write(
        self,
        folder: str,
        seconds: float,
        settings: Settings,
        size: int,
        rates: Mapping[str, float],
        cached: float | None = None,
    ) -> None:
        """One pass: after how many seconds of the search, with what, how many bytes, bytes per second.

        ``cached``: the share of what was read that lay in the page cache; None where it is not known.
        """
        if self._file is not None:
            line = {
                "nvme_dir": folder, "seconds": round(seconds, 3), "bytes": size, "aio": settings.as_json(), **rates,
                "from_page_cache": cached,
            }  # fmt: skip
            self._file.write(json.dumps(line) + "\n")
        if self._say is not None:
            said = ", ".join(f"{name} {rate / 1e9:.3f} GB/s" for name, rate in rates.items())
            said += f" ({share_words(cached)} from the page cache)" if cached else ""
            self._say(f"{seconds:6.1f} s  {settings.words()}, {size_words(size)}: {said}")

    def close(self) -> None:
        """The file."""
        if self._file is not None:
            self._file.close()
