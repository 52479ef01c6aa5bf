"""The result of ``nvme-tune`` in words, and as JSON."""

from __future__ import annotations

import json
import textwrap
from dataclasses import asdict, replace
from typing import Any

from nvme_ops.bench.settings import Settings
from nvme_ops.text import columns_text, share_words, size_words
from nvme_ops.tune.duel import Duel
from nvme_ops.tune.run import Result, Tuned
from nvme_ops.tune.search import DEFAULT, Outcome

_FLAT = 0.03  # settings that lose no more than this


def text(result: Result) -> str:
    """Device by device, then the section of the configuration."""
    parts = []
    for tuned in result.devices:
        parts += [_device(tuned)]
        parts += [_why(tuned.outcome)] if result.options.explain else []
    if result.together:
        parts.append("all devices at once, against the default\n" + "\n".join(map(_duel, result.together)))
    return "\n\n".join([*parts, json.dumps({"aio": in_order(result.best)}, indent=2)])


def as_document(result: Result) -> dict[str, Any]:
    """``aio`` is what ``aio_handle(**aio)`` takes and DeepSpeed's configuration has by this name."""
    return {
        "aio": in_order(result.best),
        "interrupted": result.interrupted,
        "devices": list(map(details, result.devices)),
    }


def details(tuned: Tuned) -> dict[str, Any]:
    """All about one device."""
    outcome = tuned.outcome
    return {
        "nvme_dir": tuned.folders,
        "identity": asdict(tuned.identity),
        "aio": in_order(outcome.best),
        "bytes_per_second": {
            name: dict(outcome.rates.get(settings, {}))
            for name, settings in (("best", outcome.best), ("default", outcome.baseline))
        },
        "challenger": in_order(outcome.challenger),
        "ratio": outcome.final.ratio if outcome.final else None,
        "noise": outcome.final.noise if outcome.final else None,
        "rounds": list(outcome.final.ratios) if outcome.final else [],
        "passes": sum(outcome.passes.values()),
        "pass_bytes": tuned.pass_size,
        "from_page_cache": tuned.from_page_cache,
        "seconds": tuned.seconds,
        "complete": outcome.complete,
    }


def in_order(settings: Settings) -> dict[str, Any]:
    """In the order in which ds_nvme_tune prints them."""
    order = ("single_submit", "overlap_events", "intra_op_parallelism", "queue_depth", "block_size")
    return {name: getattr(settings, name) for name in order}


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
    """Each setting's values with the best's other values, as the model sees them after all passes."""
    belief = outcome.belief
    if belief is None:
        return "why: too little was measured"
    lines = [
        f"why: rates over the best's, what they may be off (one standard deviation), passes with this value; "
        f"one pass alone is off by {belief.noise:.2f}"
    ]
    for axis in outcome.axes:
        label = axis.name
        for value in axis.values:
            settings = replace(outcome.best, **{axis.name: value})
            ratio, noise = belief.ratio(settings, outcome.best)
            count = sum(passes for tried, passes in outcome.passes.items() if getattr(tried, axis.name) == value)
            figures = "the best       " if settings == outcome.best else f"{ratio:.3f} +- {noise:.3f}"
            lines.append(f"  {label:22}{_value(axis.name, value):>8}  {figures}  {count:4}")
            label = ""
    flat = len(belief.within(_FLAT, outcome.best))
    lines.append(
        f"{flat} of {len(belief.candidates)} combinations reach {1 - _FLAT:.2f} of it or more: "
        + ("a flat optimum, little is lost with another" if flat > len(belief.candidates) / 10 else "a narrow optimum")
    )
    if outcome.final is not None:
        lines.append(f"the final, round by round: {' '.join(f'{ratio:.3f}' for ratio in outcome.final.ratios)}")
    return "\n".join(lines)


def _value(name: str, value: Any) -> str:
    return size_words(value) if name == "block_size" else str(value).lower()
