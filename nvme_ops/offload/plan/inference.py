"""What a model will do with its weights in memory or on storage, from its sizes and a few rates. Nothing is timed here.

A token step reads the weights that do not stay in memory while it computes: it takes as long as the longer of the two.
So does the first token after a prompt; from a cold start all of the model is read once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from nvme_ops.offload.order import what_stays
from nvme_ops.offload.weights.window import MANY_ROWS

_AS_FAST = 1.1  # times the shortest step: what counts as no longer than it


@dataclass(frozen=True)
class Streamed:
    """A weight that is read when it is used, or one of ``experts`` of which each token uses ``used``."""

    nbytes: int
    experts: int = 1
    used: int = 1

    def uses(self, tokens: int) -> float:
        """How likely a step of so many tokens uses it, if all experts are as likely."""
        return 1 - (1 - self.used / self.experts) ** tokens


@dataclass(frozen=True)
class Sizes:
    """Bytes of a model and of what it computes with."""

    model: int  #: all weights
    memory: int  #: in which streamed weights stay or pass through
    streamed: tuple[Streamed, ...]  #: in the order of use
    tables: tuple[tuple[int, int], ...] = ()  #: rows of embeddings and bytes of a row, of which one a token is read
    cache: int = 0  #: keys and values of one token
    working: int = 0  #: other results, while the prompt is read, for each of its tokens
    logits: int = 0  #: for each sequence

    @property
    def resident(self) -> int:
        """Bytes of weights that are not streamed."""
        of_tables = sum(rows * nbytes for rows, nbytes in self.tables)
        return max(0, self.model - of_tables - sum(each.nbytes for each in self.streamed))

    def beside(self, batch: int, prompt_length: int, new_tokens: int) -> int:
        """Bytes of memory beside the weights, about."""
        return batch * ((prompt_length + new_tokens) * self.cache + prompt_length * self.working + self.logits)


@dataclass(frozen=True)
class Rates:
    """Bytes per second, and bytes of memory that are free."""

    storage: float
    device_free: int  #: where it computes
    host_free: int
    to_device: float | None = None  #: from host memory; None where the model computes in that


@dataclass(frozen=True)
class Computing:
    """Seconds that a batch takes with all weights in memory."""

    step: float
    prompt: float


@dataclass(frozen=True)
class Placement:
    """What is expected with the weights in one place."""

    bytes_per_step: int
    reading: float  #: seconds of a step
    computing: float  #: seconds of a step
    first_token: float  #: seconds after a prompt, once the model runs
    first_token_cold: float  #: the same with nothing in memory
    batch: int
    fits: bool  #: in the memory that is free

    @property
    def step(self) -> float:
        """Seconds."""
        return max(self.reading, self.computing)

    @property
    def tokens_per_second(self) -> float:
        """Of all sequences of the batch."""
        return self.batch / self.step

    @property
    def bound(self) -> str:
        """What limits it: ``"reading"`` or ``"computing"``."""
        return "reading" if self.reading > self.computing else "computing"


@dataclass(frozen=True)
class Estimate:
    """What is expected of one batch size."""

    batch: int
    cache_bytes: int  #: at the end, for all sequences
    beside_bytes: int  #: memory beside the weights, that of the cache included
    nvme: Placement
    no_offload: Placement
    cpu_memory: Placement | None = None  #: None where the model computes in that


@dataclass(frozen=True)
class InferencePlan:
    """The estimates of several batch sizes, and the best of these."""

    estimates: tuple[Estimate, ...]
    online: int | None  #: the largest batch whose tokens come about as fast as those of any
    offline: int | None  #: the batch with most tokens per second
    bytes_kept: int = field(default=0)  #: weights that stay in memory, at the first batch size


def step_bytes(sizes: Sizes, tokens: int) -> tuple[int, int]:
    """Returns the bytes that a step of so many tokens reads, and those of streamed weights that stay in memory."""
    weights = [(number, each.uses(tokens), each.nbytes) for number, each in enumerate(sizes.streamed)]
    kept = what_stays([weight for weight in weights if weight[1] > 0], sizes.memory)
    read = sum(uses * nbytes for number, uses, nbytes in weights if number not in kept)
    from_tables = sum(nbytes * (tokens if MANY_ROWS * tokens <= rows else rows) for rows, nbytes in sizes.tables)
    return round(read) + from_tables, sum(nbytes for number, _, nbytes in weights if number in kept)


def estimate(
    sizes: Sizes, rates: Rates, computing: Computing, batch: int, prompt_length: int, new_tokens: int
) -> Estimate:
    """Returns what is expected of ``batch`` sequences at once."""
    read, _ = step_bytes(sizes, batch)
    read_by_prompt, _ = step_bytes(sizes, batch * prompt_length)
    cache = batch * (prompt_length + new_tokens) * sizes.cache
    beside = sizes.beside(batch, prompt_length, new_tokens)
    load = sizes.model / rates.storage

    def placement(rate: float | None, cold: float, fits: bool) -> Placement:
        per_step, by_prompt = (read, read_by_prompt) if rate is not None else (0, 0)
        return Placement(
            bytes_per_step=per_step,
            reading=per_step / (rate or 1),
            computing=computing.step,
            first_token=max(by_prompt / (rate or 1), computing.prompt),
            first_token_cold=cold,
            batch=batch,
            fits=fits,
        )

    streams = sizes.resident + sizes.memory + beside <= rates.device_free
    whole = sizes.model + beside <= rates.device_free
    from_host = None
    if rates.to_device is not None:
        prompt = max(sizes.model / rates.to_device, computing.prompt)
        from_host = placement(rates.to_device, load + prompt, streams and sizes.model <= rates.host_free)
    return Estimate(
        batch,
        cache,
        beside,
        nvme=placement(rates.storage, max(load, computing.prompt), streams),
        no_offload=placement(None, load + computing.prompt, whole),
        cpu_memory=from_host,
    )


def best(estimates: Sequence[Estimate]) -> tuple[int | None, int | None]:
    """Returns the best batch sizes online and offline; None where no batch fits into memory."""
    usable = [each for each in estimates if each.nvme.fits]
    if not usable:
        return None, None
    shortest = min(each.nvme.step for each in usable)
    online = max(each.batch for each in usable if each.nvme.step <= _AS_FAST * shortest)
    return online, max(usable, key=lambda each: each.nvme.tokens_per_second).batch


def plan(
    sizes: Sizes, rates: Rates, computing: dict[int, Computing], prompt_length: int, new_tokens: int
) -> InferencePlan:
    """Returns the plan of the batch sizes for which it is known how long they compute."""
    found = tuple(estimate(sizes, rates, times, batch, prompt_length, new_tokens) for batch, times in computing.items())
    kept = step_bytes(sizes, found[0].batch)[1] if found else 0
    return InferencePlan(found, *best(found), kept)


def per_thousand(each_second: float, tokens_per_second: float) -> float:
    """Returns what 1,000 tokens take of what is spent at this rate: joules for watts, a price for one per second."""
    return 1000 * each_second / tokens_per_second
