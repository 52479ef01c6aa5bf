"""Formats the result of ``nvme-tune`` as text and as JSON."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Mapping
from dataclasses import asdict, replace
from datetime import datetime, timezone
from typing import Any

from nvme_ops.settings import Settings
from nvme_ops.text import columns_text, share_words, size_words
from nvme_ops.tune.devices import Tuned, TuneResult
from nvme_ops.tune.duel import Duel
from nvme_ops.tune.search import DEFAULT, Outcome

_HASTY = 0.25  # of the earlier run's seconds
_FLAT = 0.03  # settings that lose no more than this
_ORDER = ("single_submit", "overlap_events", "intra_op_parallelism", "queue_depth", "block_size")  # ds_nvme_tune's


def text(result: TuneResult) -> str:
    """Returns the result device by device, then the section of the configuration."""
    parts = []
    for tuned in result.devices:
        parts += [_device(tuned)]
        parts += [_why(tuned.outcome)] if result.options.explain else []
    return "\n\n".join([*parts, json.dumps({"aio": _section(result.best)}, indent=2)])


def as_document(result: TuneResult) -> dict[str, Any]:
    """Returns the result as JSON; its ``aio`` is what ``aio_handle(**aio)`` and DeepSpeed's configuration accept."""
    return {
        "aio": _section(result.best),
        "interrupted": result.interrupted,
        "devices": list(map(details, result.devices)),
    }


def details(tuned: Tuned) -> dict[str, Any]:
    """Returns everything about one device."""
    outcome = tuned.outcome
    return {
        "nvme_dir": tuned.folders,
        "identity": asdict(tuned.identity),
        "aio": _section(outcome.best),
        "bytes_per_second": {
            name: dict(outcome.rates.get(settings, {}))
            for name, settings in (("best", outcome.best), ("default", outcome.baseline))
        },
        "challenger": _section(outcome.challenger),
        "ratio": outcome.final.ratio if outcome.final else None,
        "noise": outcome.final.noise if outcome.final else None,
        "rounds": list(outcome.final.ratios) if outcome.final else [],
        "passes": sum(outcome.passes.values()),
        "pass_bytes": tuned.pass_size,
        "from_page_cache": tuned.from_page_cache,
        "seconds": tuned.seconds,
        "complete": outcome.complete,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }


def _section(settings: Settings) -> dict[str, Any]:
    return {name: getattr(settings, name) for name in _ORDER}


def _device(tuned: Tuned) -> str:
    outcome = tuned.outcome
    name = "default" if outcome.baseline == DEFAULT else "nearest to the default"
    shown = {outcome.best: "best", outcome.baseline: name}
    if outcome.best == outcome.baseline:
        shown = {outcome.best: f"best ({name})"}
    shown.setdefault(outcome.challenger, "challenger")
    rows = [
        [label, settings.words(), *(f"{direction} {rate / 1e9:.2f} GB/s" for direction, rate in rates.items())]
        for settings, label in shown.items()
        if (rates := outcome.rates.get(settings))
    ]
    lines = [
        f"{' '.join(tuned.folders)}: {tuned.identity.words()}",
        textwrap.indent(columns_text(rows), "  "),
        f"  {_verdict(outcome)}",
        f"  {sum(outcome.passes.values())} passes in {tuned.seconds:.0f} s"
        + ("" if outcome.complete else ", after which the final was cut short"),
    ]
    if tuned.from_page_cache:
        share = share_words(tuned.from_page_cache)
        lines.append(f"  {share} of what was read lay in the page cache: so far memory was measured, not the device")
    return "\n".join(lines)


def _verdict(outcome: Outcome) -> str:
    if outcome.challenger == outcome.baseline:
        return "nothing is faster than the default by more than 1 %, as far as the passes tell"
    if outcome.final is None:
        return "not confirmed: no time was left for passes of full size in turn with the default"
    if outcome.best == outcome.challenger:
        return _duel(outcome.final)
    reason = "inside the noise" if outcome.final.ratio > 1 else "not faster"
    return f"{_duel(outcome.final)}: {reason}, so the default stays"


def _duel(duel: Duel) -> str:
    words = f"{duel.challenger.words()}: {duel.ratio:.3f} of the default's rate, +- {duel.noise:.3f}"
    return f"{words}, in {len(duel.ratios)} rounds"


def _why(outcome: Outcome) -> str:
    """Compares each setting's values, with the best's other values, over the rounds that measured the best."""
    if not outcome.races:
        return "why: too little was measured"
    noise = next(iter(outcome.races.values())).noise_of_a_pass
    lines = [
        f"why: rates over the best's, what they may be off (one standard deviation), passes with this value; "
        f"one pass alone is off by {noise:.2f}"
    ]
    for axis in outcome.axes:
        label = axis.name
        for value in axis.values:
            settings = replace(outcome.best, **{axis.name: value})
            duel = outcome.races.get(settings)
            figures = f"{duel.ratio:.3f} +- {duel.noise:.3f}" if duel else "not measured"
            figures = "the best" if settings == outcome.best else figures
            count = sum(passes for tried, passes in outcome.passes.items() if getattr(tried, axis.name) == value)
            words = size_words(value) if axis.name == "block_size" else str(value).lower()
            lines.append(f"  {label:22}{words:>8}  {figures:15}  {count:4}")
            label = ""
    flat = 1 + sum(duel.ratio >= 1 - _FLAT for duel in outcome.races.values())
    lines.append(
        f"{flat} of {1 + len(outcome.races)} combinations that raced reach {1 - _FLAT:.2f} of it or more: "
        + ("a flat optimum, little is lost with another" if flat > len(outcome.races) / 2 else "a narrow optimum")
    )
    if outcome.final is not None:
        lines.append(f"the final, round by round: {' '.join(f'{ratio:.3f}' for ratio in outcome.final.ratios)}")
    return "\n".join(lines)


def why_keep(known: Mapping[str, Any], found: Mapping[str, Any]) -> str:
    """Returns why ``known`` is more reliable than ``found``; an empty string if ``found`` may replace it.

    Both come from ``details``.
    """
    if (known.get("from_page_cache") or 0) < 0.5 <= (found.get("from_page_cache") or 0):
        return "this run read from the page cache, that one from the device"
    if missing := sorted(_directions(known) - _directions(found)):
        return f"this run left out {' and '.join(missing)}s"
    if known.get("complete") and not found.get("complete"):
        return "the final of this run was cut short"
    if found["seconds"] < _HASTY * known.get("seconds", 0):
        return f"this run took {found['seconds']:.0f} s, that one {known['seconds']:.0f} s"
    return ""


def _directions(document: Mapping[str, Any]) -> set[str]:
    return set(document.get("bytes_per_second", {}).get("best", {}))
