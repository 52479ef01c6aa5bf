"""What the parts of ``nvme-bench`` put out besides tables: a document, and a line of progress."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


def write_json(file: str, document: dict[str, Any]) -> None:
    """Writes a document to a file; ``-`` is standard output."""
    text = json.dumps(document, indent=2) + "\n"
    if file == "-":
        sys.stdout.write(text)
    else:
        Path(file).write_text(text, encoding="utf-8")


def show_progress(words: str) -> None:
    """One line that is written over, on a terminal only."""
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\033[K{words}")
        sys.stderr.flush()
