"""What all passes so far say about every setting, tried or not: a Gaussian process over the settings' logarithms.

Neighbours resemble each other: what 1 MiB with 2 lanes reached says something about 2 MiB with 2 lanes. So every pass
counts for many settings, where duels alone would measure each of hundreds of combinations often enough to see through
the noise. Passes near each other in time share what disturbs the machine meanwhile; the model has a part for that too.

See Rasmussen and Williams, Gaussian Processes for Machine Learning, chapter 2 (the equations of ``Model.fit``) and 4.2
(the Matern kernel); Desautels, Krause and Burdick, Parallelizing Exploration-Exploitation Tradeoffs in Gaussian Process
Bandit Optimization (``Belief.promising``).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from nvme_ops.bench.settings import Settings
from nvme_ops.text import MIB

#: How far apart two values are: doublings (for switches: changes) over which rates become unlike each other.
_REACH = (2.5, 3.0, 2.0, 2.0, 1.5)  # block_size, queue_depth, single_submit, overlap_events, intra_op_parallelism
_SPREAD = 0.35  # of the logarithm of the rate over all settings
_DISTURBANCE, _LASTING = 0.05, 10.0  # of that logarithm by other users of the machine, and for how many passes
_NOISE = (0.01, 0.02, 0.03, 0.05, 0.08, 0.12, 0.2)  # of a single pass: whichever explains the passes best
_OUTLIER = 1.5  # times the noise: beyond, a pass counts as if it were just there (Huber)
_STARVED = 2 * MIB  # in flight: 2 GB/s at a latency of 1 ms; less is unlikely to be fast

_REAL = torch.float64


@dataclass(frozen=True)
class Belief:
    """Mean and covariance of the logarithm of every setting's rate."""

    candidates: Sequence[Settings]
    mean: torch.Tensor
    covariance: torch.Tensor
    noise: float  # of one pass, in the same logarithm

    @property
    def best(self) -> Settings:
        """The fastest, as far as is known."""
        return self.candidates[int(self.mean.argmax())]

    def ratio(self, settings: Settings, other: Settings) -> tuple[float, float]:
        """Rate of the one over that of the other, and how much that may be off (one standard deviation)."""
        one, two = self.candidates.index(settings), self.candidates.index(other)
        difference = float(self.mean[one] - self.mean[two])
        cov = self.covariance
        variance = float(cov[one, one] + cov[two, two] - 2 * cov[one, two])
        return math.exp(difference), math.sqrt(max(0.0, variance))

    def within(self, share: float, of: Settings) -> list[Settings]:
        """Those whose expected rate falls short of another one's by no more than this share."""
        least = float(self.mean[self.candidates.index(of)]) + math.log(1 - share)
        return [self.candidates[int(place)] for place in (self.mean >= least).nonzero()]

    def promising(self, count: int, optimism: float) -> list[Settings]:
        """The settings that may be the fastest, in the order in which to try them.

        Each choice counts on the knowledge that those before it will bring, so that not all are neighbours.
        ``optimism``: how many standard deviations above the mean each is judged at.
        """
        covariance, chosen = self.covariance.clone(), []
        for _ in range(count):
            place = int((self.mean + optimism * _spreads(covariance)).argmax())
            column = covariance[:, place].clone()
            covariance -= torch.outer(column, column) / (column[place] + self.noise**2)
            chosen.append(self.candidates[place])
        return chosen

    def possible_gain(self) -> float:
        """By which factor the best that is not ruled out, by two standard deviations, may exceed the best known."""
        best = int(self.mean.argmax())
        return float((self.mean - self.mean[best] + 2 * self._spread_against(best)).max().exp())

    def _spread_against(self, place: int) -> torch.Tensor:
        cov = self.covariance
        return (cov.diagonal() + cov[place, place] - 2 * cov[place]).clamp(min=0).sqrt()


class Model:
    """Collects passes; ``fit`` says what they mean."""

    def __init__(self, candidates: Sequence[Settings]) -> None:
        self._candidates = candidates
        self._place = {settings: place for place, settings in enumerate(candidates)}
        places = torch.tensor([_features(settings) for settings in candidates], dtype=_REAL)
        distance = math.sqrt(3) * torch.cdist(places, places)
        self._kernel = _SPREAD**2 * (1 + distance) * torch.exp(-distance)
        self._prior = torch.tensor([_starving(settings) for settings in candidates], dtype=_REAL)
        self._tried: list[int] = []
        self._logarithms: list[float] = []

    def __len__(self) -> int:
        return len(self._tried)

    def add(self, settings: Settings, rate: float) -> None:
        """One pass, in the order of time."""
        self._tried.append(self._place[settings])
        self._logarithms.append(math.log(rate))

    def fit(self) -> Belief:
        """At least one pass must have been added."""
        tried, when = torch.tensor(self._tried), torch.arange(len(self._tried), dtype=_REAL)
        seen = torch.tensor(self._logarithms, dtype=_REAL) - self._prior[tried]
        seen = (seen - seen.median())[:, None]
        known = self._kernel[:, tried]
        kernel = known[tried] + _DISTURBANCE**2 * torch.exp(-(when[:, None] - when).abs() / _LASTING)
        noise, factor, weights = max((_explain(kernel, seen, noise) for noise in _NOISE), key=lambda each: each[0])[1:]
        half = torch.linalg.solve_triangular(factor, known.T, upper=False)
        return Belief(self._candidates, self._prior + (known @ weights)[:, 0], self._kernel - half.T @ half, noise)


def _explain(kernel: torch.Tensor, seen: torch.Tensor, noise: float) -> tuple[float, float, torch.Tensor, torch.Tensor]:
    """How likely this much noise makes what was seen; and the noise, the factor and the weights of the fit."""
    factor = torch.linalg.cholesky(kernel + noise**2 * torch.eye(len(seen), dtype=_REAL))
    weights = torch.cholesky_solve(seen, factor)
    for _ in range(2):
        fitted = kernel @ weights
        near = fitted + (seen - fitted).clamp(-_OUTLIER * noise, _OUTLIER * noise)
        weights = torch.cholesky_solve(near, factor)
    beyond = ((seen - kernel @ weights).abs() / noise - _OUTLIER).clamp(min=0).sum()
    likelihood = -(near * weights).sum() / 2 - factor.diagonal().log().sum() - _OUTLIER / 2 * beyond
    return float(likelihood), noise, factor, weights


def _features(settings: Settings) -> list[float]:
    values = (
        math.log2(settings.block_size),
        math.log2(settings.queue_depth),
        float(settings.single_submit),
        float(settings.overlap_events),
        math.log2(settings.intra_op_parallelism),
    )
    return [value / reach for value, reach in zip(values, _REACH, strict=True)]


def _starving(settings: Settings) -> float:
    in_flight = settings.block_size * settings.queue_depth * settings.intra_op_parallelism
    return math.log(in_flight / (in_flight + _STARVED))


def _spreads(covariance: torch.Tensor) -> torch.Tensor:
    return covariance.diagonal().clamp(min=0).sqrt()
