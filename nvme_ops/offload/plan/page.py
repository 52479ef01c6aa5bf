"""What ``nvme-offload`` shows: a plan, and what a generation has reached, as text and as documents for JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from nvme_ops.offload.plan.inference import Estimate, InferencePlan, Placement, Rates, Sizes, per_thousand
from nvme_ops.offload.weights.generation import Reached
from nvme_ops.text import columns_text, rate_words, rounded, share_words, size_words


@dataclass(frozen=True)
class Shown:
    """A plan, and all that belongs to it."""

    about: dict[str, Any]
    sizes: Sizes
    rates: Rates
    plan: InferencePlan
    left_out: list[int]  # batches that do not fit into memory
    memory: int
    price_per_hour: float | None
    watts: float | None

    def text(self) -> str:
        """Returns a page for people."""
        about, plan = self.about, self.plan
        lines = [
            f"{about['model']}: {about['layers']} layers, {size_words(about['bytes'])} of {about['dtype']}, "
            f"{size_words(self.sizes.cache)} of key-value cache for each token",
            f"storage {rate_words(self.rates.storage)}; memory for weights {size_words(self.memory)}, in which "
            f"{size_words(self.sizes.resident + plan.bytes_kept)} stay",
        ]
        if plan.estimates:
            rows = [self._heading(), *(self._row(each) for each in plan.estimates)]
            placements = [["", "memory", *(f"batch {each.batch}" for each in plan.estimates)], *self._placements()]
            lines += ["", columns_text(rows), "", "tokens/s with the weights in", columns_text(placements)]
        lines.append("")
        if self.left_out:
            lines.append(
                f"batch {', '.join(map(str, self.left_out))}: the cache does not fit into the memory that is free"
            )
        if plan.online is None or plan.offline is None:
            return "\n".join([*lines, "no batch fits into the memory that is free"])
        lines += [
            f"online:  batch {plan.online}, the largest whose tokens come about as fast as those of any",
            f"offline: batch {plan.offline}, which gives most tokens per second",
        ]
        return "\n".join(lines)

    def document(self) -> dict[str, Any]:
        """Returns the same for programs: bytes, seconds, tokens per second."""
        return {
            **self.about,
            "memory": self.memory,
            "bytes_kept": self.sizes.resident + self.plan.bytes_kept,
            "cache_bytes_per_token": self.sizes.cache,
            "rates": asdict(self.rates),
            "online_batch": self.plan.online,
            "offline_batch": self.plan.offline,
            "batches_that_do_not_fit": self.left_out,
            "batches": [self._estimate(each) for each in self.plan.estimates],
        }

    def _heading(self) -> list[str]:
        found = [
            "batch",
            "reads",
            "reading",
            "computing",
            "bound by",
            "tokens/s",
            "first token",
            "cold",
            "beside weights",
        ]
        found += ["energy/1000"] if self.watts is not None else []
        return found + (["cost/1000"] if self.price_per_hour is not None else [])

    def _row(self, each: Estimate) -> list[str]:
        placement = each.nvme
        cells = [
            str(each.batch),
            size_words(placement.bytes_per_step),
            _seconds(placement.reading),
            _seconds(placement.computing),
            placement.bound,
            rounded(placement.tokens_per_second, 3) + ("" if placement.fits else " (does not fit)"),
            _seconds(placement.first_token),
            _seconds(placement.first_token_cold),
            size_words(each.beside_bytes),
        ]
        spent = self._spent(placement)
        cells += [f"{rounded(spent['joules_per_1000_tokens'], 3)} J"] if self.watts is not None else []
        return cells + ([f"{spent['cost_per_1000_tokens']:.3g}"] if self.price_per_hour is not None else [])

    def _placements(self) -> list[list[str]]:
        found = [["NVMe", size_words(self.memory), *(_tokens(each.nvme) for each in self.plan.estimates)]]
        from_host = [each.cpu_memory for each in self.plan.estimates if each.cpu_memory is not None]
        whole = size_words(self.about["bytes"])
        if from_host:
            found.append(["CPU memory", whole, *map(_tokens, from_host)])
        name = "no offload" if from_host else "CPU memory, no offload"
        return [*found, [name, whole, *(_tokens(each.no_offload) for each in self.plan.estimates)]]

    def _estimate(self, each: Estimate) -> dict[str, Any]:
        placements = {"nvme": each.nvme, "cpu_memory": each.cpu_memory, "no_offload": each.no_offload}
        return {
            "batch": each.batch,
            "cache_bytes": each.cache_bytes,
            "beside_bytes": each.beside_bytes,
            **{name: self._placement(placement) for name, placement in placements.items() if placement is not None},
        }

    def _placement(self, placement: Placement) -> dict[str, Any]:
        figures = {name: value for name, value in asdict(placement).items() if name != "batch"}
        return {
            **figures,
            "bound": placement.bound,
            "tokens_per_second": placement.tokens_per_second,
            **self._spent(placement),
        }

    def _spent(self, placement: Placement) -> dict[str, float]:
        found = {}
        if self.watts is not None:
            found["joules_per_1000_tokens"] = per_thousand(self.watts, placement.tokens_per_second)
        if self.price_per_hour is not None:
            found["cost_per_1000_tokens"] = per_thousand(self.price_per_hour / 3600, placement.tokens_per_second)
        return found


def reached_text(found: Reached, joules: float | None = None) -> str:
    """Returns a few lines on a generation, which has used so many joules if that is known."""
    lines = [f"first token after {_seconds(found.first_token)}"]
    if found.tokens_per_second is not None:
        lines.append(
            f"{rounded(found.tokens_per_second, 3)} tokens/s, {share_words(found.share or 0)} of what is possible: "
            f"{_bound(found.reading_bound)} if reading were all, {_bound(found.computing_bound)} if computing were"
        )
        per_token = found.bytes_per_step / len(found.tokens)
        lines.append(
            f"{size_words(round(per_token))} read for each token, at {rate_words(found.rate_reached)} of "
            f"{rate_words(found.rate)}"
        )
    if joules is not None:
        lines.append(f"{rounded(1000 * joules / found.count, 3)} J for 1,000 tokens")
    lines.append(f"peak memory: weights {size_words(found.peak_weights)}, process {size_words(found.peak_process)}")
    return "\n".join(lines)


def reached_document(found: Reached, texts: Sequence[str] | None, joules: float | None) -> dict[str, Any]:
    """Returns the same for programs: bytes, seconds, tokens per second."""
    return {
        **asdict(found),
        "texts": texts,
        "tokens_per_second": found.tokens_per_second,
        "bytes_per_step": found.bytes_per_step,
        "rate_reached": found.rate_reached,
        "reading_bound": found.reading_bound,
        "computing_bound": found.computing_bound,
        "share_of_bound": found.share,
        "joules_per_1000_tokens": None if joules is None else 1000 * joules / found.count,
    }


def _bound(tokens_per_second: float | None) -> str:
    return "no limit" if tokens_per_second is None else rounded(tokens_per_second, 3)


def _tokens(placement: Placement) -> str:
    return rounded(placement.tokens_per_second, 3) if placement.fits else "does not fit"


def _seconds(seconds: float) -> str:
    return f"{rounded(seconds, 3)} s" if seconds >= 1 else f"{rounded(1000 * seconds, 3)} ms"
