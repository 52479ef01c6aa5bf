"""Which of two results for one device to trust: a hasty run must not take the place of a thorough one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_HASTY = 0.5  # of the earlier run's seconds


def why_worse(found: Mapping[str, Any], known: Mapping[str, Any]) -> str:
    """Why ``found`` must not replace ``known``; an empty string where it may. Both as ``report.details`` makes them."""
    if _from_memory(found) and not _from_memory(known):
        return "this run read from the page cache, that one from the device"
    missing = sorted(_directions(known) - _directions(found))
    if missing:
        return f"this run left out {' and '.join(missing)}s"
    if known.get("complete") and not found.get("complete"):
        return "the final of this run was cut short"
    seconds, before = _number(found, "seconds"), _number(known, "seconds")
    if seconds < _HASTY * before:
        return f"this run took {seconds:.0f} s, that one {before:.0f} s"
    return ""


def _from_memory(document: Mapping[str, Any]) -> bool:
    return _number(document, "from_page_cache") >= 0.5


def _directions(document: Mapping[str, Any]) -> set[str]:
    rates = document.get("bytes_per_second")
    best = rates.get("best") if isinstance(rates, Mapping) else None
    return set(best) if isinstance(best, Mapping) else set()


def _number(document: Mapping[str, Any], name: str) -> float:
    value = document.get(name)
    return float(value) if isinstance(value, (int, float)) else 0.0
