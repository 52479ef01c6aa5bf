"""What can be said about names of files."""

from __future__ import annotations

import re

#: The beginning of a name that no local file has: ``s3://``, ``hf://``, ``https://``.
URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
