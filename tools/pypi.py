"""What a project has on PyPI."""

from __future__ import annotations

import json
import urllib.request

INDEX = "https://pypi.org/simple"


def files(project: str) -> dict[str, str]:
    """The URLs of its files, by name. Raises OSError."""
    wanted = urllib.request.Request(f"{INDEX}/{project}/", headers={"Accept": "application/vnd.pypi.simple.v1+json"})
    with urllib.request.urlopen(wanted) as answer:
        return {str(file["filename"]): str(file["url"]) for file in json.load(answer)["files"]}
