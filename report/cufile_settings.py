"""cuFile's own settings, as far as they decide which path data take: a JSON file with comments, and the environment.

cuFile reads the file named by CUFILE_ENV_PATH_JSON, else /etc/cufile.json; the environment takes precedence.
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass

from nvme_ops.host import Host

DEFAULT = "/etc/cufile.json"
NAMED_BY = "CUFILE_ENV_PATH_JSON"
FORCED_BY = "CUFILE_FORCE_COMPAT_MODE"
PEER_TO_PEER_BY = "CUFILE_USE_PCIP2PDMA"
_STRING_OR_COMMENT = re.compile(r'("(?:\\.|[^"\\])*")|//[^\n]*|/\*.*?\*/', re.DOTALL)
_STRING_OR_COMMA = re.compile(r'("(?:\\.|[^"\\])*")|,(?=\s*[}\]])')


@dataclass(frozen=True)
class CuFileSettings:
    """The settings of file and environment, cuFile's defaults elsewhere."""

    path: str | None = None  # None where there is no file
    allow_compatibility: bool = True
    force_compatibility: bool = False
    forced_by: str = ""
    peer_to_peer: bool = False
    problem: str = ""
    fix: str = ""


def read(host: Host) -> CuFileSettings:
    """Returns the settings in force; ``problem`` says why a file could not be read."""
    named = os.environ.get(NAMED_BY)
    path = os.path.abspath(named) if named else DEFAULT
    problem = fix = ""
    document: object = {}
    if named or host.exists(path):
        try:
            document = parse(host.read(path))
        except OSError as error:
            problem = f"{path}: {error.strerror}"
            fix = f"unset {NAMED_BY}" if named else f"ls -ld {path}  # must be a file that everyone may read"
        except ValueError as error:
            problem, fix = f"{path} cannot be read as JSON: {error}", f"correct {path}"
    properties = document.get("properties") if isinstance(document, dict) else None
    values = properties if isinstance(properties, dict) else {}
    return CuFileSettings(
        path=path if named or host.exists(path) else None,
        allow_compatibility=_is_true(values.get("allow_compat_mode", True)),
        force_compatibility=_is_true(os.environ.get(FORCED_BY) or values.get("force_compat_mode", False)),
        forced_by=FORCED_BY if _is_true(os.environ.get(FORCED_BY, "")) else path,
        peer_to_peer=_is_true(os.environ.get(PEER_TO_PEER_BY) or values.get("use_pci_p2pdma", False)),
        problem=problem,
        fix=fix,
    )


def parse(text: str) -> object:
    """Parses JSON with ``//`` and ``/* */`` comments and trailing commas. Raises ValueError."""
    for skipped in (_STRING_OR_COMMENT, _STRING_OR_COMMA):
        text = skipped.sub(lambda found: found[1] or "", text)
    return json.loads(text) if text.strip() else {}


def _is_true(value: object) -> bool:
    return value.lower() in ("true", "1") if isinstance(value, str) else bool(value)
