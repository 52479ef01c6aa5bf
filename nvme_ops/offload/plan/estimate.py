"""What a model will take on a machine, in inference and in training, from its sizes and a few rates.

Nothing is timed here. A step computes and moves bytes at once, and takes the longer of the two times. In inference it
reads the weights that do not stay in memory; so does the first token after a prompt, and from a cold start all of the
model is read once. In training it moves states, parameters or activations, beside the backward pass.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from nvme_ops.offload.order import what_stays
from nvme_ops.offload.weights.window import MANY_ROWS
from nvme_ops.text import columns_text, rate_words, rounded, size_words

_AS_FAST = 1.1  # times the shortest step: what counts as no longer than it
_STATES = 8  # bytes of AdamW for each parameter: exp_avg, exp_avg_sq in float32
_MASTER = 4  # and a float32 copy of one in fewer bits
_DAY = 86400  # seconds
_TERABYTE = 1e12
_BUDGET_SHARE = 8  # the memory divided by this, each for parameters, states and activations that pass through
_AT_WORK = 2  # times what a layer keeps, while it computes: gradients are added

_Row = TypeVar("_Row")


def _table(columns: Mapping[str, Callable[[_Row], str]], rows: Iterable[_Row]) -> str:
    """Returns a table: of each column its heading, and its cell in a row."""
    return columns_text([list(columns), *([cell(row) for cell in columns.values()] for row in rows)])


def seconds_words(seconds: float) -> str:
    """Returns a duration for people: ``1.25 s``, ``30.0 ms``."""
    return f"{rounded(seconds, 3)} s" if seconds >= 1 else f"{rounded(1000 * seconds, 3)} ms"


# Inference


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
    beside = sizes.beside(batch, prompt_length, new_tokens)
    load = sizes.model / rates.storage

    def placement(rate: float | None, cold: float, fits: bool) -> Placement:
        per_step, by_prompt = (read, read_by_prompt) if rate is not None else (0, 0)
        first = max(by_prompt / (rate or 1), computing.prompt)
        return Placement(per_step, per_step / (rate or 1), computing.step, first, cold, batch, fits)

    streams = sizes.resident + sizes.memory + beside <= rates.device_free
    from_host = None
    if rates.to_device is not None:
        prompt = max(sizes.model / rates.to_device, computing.prompt)
        from_host = placement(rates.to_device, load + prompt, streams and sizes.model <= rates.host_free)
    return Estimate(
        batch,
        cache_bytes=batch * (prompt_length + new_tokens) * sizes.cache,
        beside_bytes=beside,
        nvme=placement(rates.storage, max(load, computing.prompt), streams),
        no_offload=placement(None, load + computing.prompt, sizes.model + beside <= rates.device_free),
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


def per_thousand(each_second: float, tokens_per_second: float) -> float:
    """Returns what 1,000 tokens take of what is spent at this rate: joules for watts, a price for one per second."""
    return 1000 * each_second / tokens_per_second


@dataclass(frozen=True)
class InferencePlan:
    """The estimates of several batch sizes, the best of these, and how ``nvme-offload plan`` shows them."""

    about: dict[str, Any]
    sizes: Sizes
    rates: Rates
    estimates: Sequence[Estimate]
    left_out: Sequence[int]  #: batches that do not fit into memory
    memory: int  #: for weights
    price_per_hour: float | None = None
    watts: float | None = None

    @property
    def bytes_kept(self) -> int:
        """Weights that stay in memory, at the first batch size."""
        streamed = step_bytes(self.sizes, self.estimates[0].batch)[1] if self.estimates else 0
        return self.sizes.resident + streamed

    def text(self) -> str:
        """Returns a page for people."""
        about, batches = self.about, self.estimates
        online, offline = best(batches)
        lines = [
            f"{about['model']}: {about['layers']} layers, {size_words(about['bytes'])} of {about['dtype']}, "
            f"{size_words(self.sizes.cache)} of key-value cache for each token",
            f"storage {rate_words(self.rates.storage)}; memory for weights {size_words(self.memory)}, in which "
            f"{size_words(self.bytes_kept)} stay",
        ]
        if batches:
            places = [["", "memory", *(f"batch {each.batch}" for each in batches)], *self._places()]
            lines += ["", _table(self._columns(), batches), "", "tokens/s with the weights in", columns_text(places)]
        lines.append("")
        if self.left_out:
            left_out = ", ".join(map(str, self.left_out))
            lines.append(f"batch {left_out}: the cache does not fit into the memory that is free")
        if online is None or offline is None:
            lines.append("no batch fits into the memory that is free")
        else:
            lines += [
                f"online:  batch {online}, the largest whose tokens come about as fast as those of any",
                f"offline: batch {offline}, which gives most tokens per second",
            ]
        return "\n".join(lines)

    def document(self) -> dict[str, Any]:
        """Returns the same for programs: bytes, seconds, tokens per second."""
        online, offline = best(self.estimates)
        return {
            **self.about,
            "memory": self.memory,
            "bytes_kept": self.bytes_kept,
            "cache_bytes_per_token": self.sizes.cache,
            "rates": asdict(self.rates),
            "online_batch": online,
            "offline_batch": offline,
            "batches_that_do_not_fit": self.left_out,
            "batches": [self._estimate(each) for each in self.estimates],
        }

    def _columns(self) -> dict[str, Callable[[Estimate], str]]:
        columns: dict[str, Callable[[Estimate], str]] = {
            "batch": lambda each: str(each.batch),
            "reads": lambda each: size_words(each.nvme.bytes_per_step),
            "reading": lambda each: seconds_words(each.nvme.reading),
            "computing": lambda each: seconds_words(each.nvme.computing),
            "bound by": lambda each: each.nvme.bound,
            "tokens/s": lambda each: _tokens(each.nvme) + ("" if each.nvme.fits else " (does not fit)"),
            "first token": lambda each: seconds_words(each.nvme.first_token),
            "cold": lambda each: seconds_words(each.nvme.first_token_cold),
            "beside weights": lambda each: size_words(each.beside_bytes),
        }
        if self.watts is not None:
            columns["energy/1000"] = lambda each: f"{rounded(self._spent(each.nvme)['joules_per_1000_tokens'], 3)} J"
        if self.price_per_hour is not None:
            columns["cost/1000"] = lambda each: f"{self._spent(each.nvme)['cost_per_1000_tokens']:.3g}"
        return columns

    def _places(self) -> list[list[str]]:
        def row(name: str, memory: int, found: Iterable[Placement]) -> list[str]:
            return [name, size_words(memory), *(_tokens(each) if each.fits else "does not fit" for each in found)]

        whole = self.about["bytes"]
        from_host = [each.cpu_memory for each in self.estimates if each.cpu_memory is not None]
        no_offload = "no offload" if from_host else "CPU memory, no offload"
        return [
            row("NVMe", self.memory, [each.nvme for each in self.estimates]),
            *([row("CPU memory", whole, from_host)] if from_host else []),
            row(no_offload, whole, [each.no_offload for each in self.estimates]),
        ]

    def _estimate(self, each: Estimate) -> dict[str, Any]:
        found: dict[str, Any] = {name: getattr(each, name) for name in ("batch", "cache_bytes", "beside_bytes")}
        for name in ("nvme", "cpu_memory", "no_offload"):
            placement: Placement | None = getattr(each, name)
            if placement is not None:
                more = {"bound": placement.bound, "tokens_per_second": placement.tokens_per_second}
                found[name] = asdict(placement) | more | self._spent(placement)
                del found[name]["batch"]
        return found

    def _spent(self, placement: Placement) -> dict[str, float]:
        found = {}
        if self.watts is not None:
            found["joules_per_1000_tokens"] = per_thousand(self.watts, placement.tokens_per_second)
        if self.price_per_hour is not None:
            found["cost_per_1000_tokens"] = per_thousand(self.price_per_hour / 3600, placement.tokens_per_second)
        return found


def _tokens(placement: Placement) -> str:
    return rounded(placement.tokens_per_second, 3)


# Training


@dataclass(frozen=True)
class TrainedModel:
    """Sizes of a model, and what a token of a training step takes with all of it in memory."""

    parameters: int  #: elements
    itemsize: int  #: bytes of each
    largest: int  #: bytes of the largest parameter
    activations: int  #: bytes for each token that autograd keeps for the backward pass
    of_layer: int  #: bytes of these for each token, in the layer that keeps most
    seconds: float  #: for each token, forward and backward

    @property
    def states(self) -> int:
        """Bytes of AdamW's states, master weights included."""
        return self.parameters * (_STATES + (_MASTER if self.itemsize < _MASTER else 0))

    @property
    def nbytes(self) -> int:
        """Bytes of the parameters."""
        return self.parameters * self.itemsize


@dataclass(frozen=True)
class TrainingWay:
    """A step of one batch size, with the states, or more, in memory or on storage."""

    name: str
    memory: int  #: bytes needed
    read: int  #: bytes for each step
    written: int
    seconds: float  #: of a step
    fits: bool
    largest_batch: int  #: that fits in memory and on the disk; 0 for none

    @property
    def written_per_day(self) -> float:
        """Bytes written if it trains all day."""
        return self.written / self.seconds * _DAY


def ways(model: TrainedModel, memory: int, rate: float, free: int, batch: int, length: int) -> list[TrainingWay]:
    """Returns the ways to train on a batch of sequences of ``length`` tokens.

    Args:
        model: trained by AdamW.
        memory: bytes for all of it.
        rate: bytes per second that storage reads and writes at the same time, together.
        free: free bytes of storage.
        batch: sequences.
        length: tokens of each.
    """
    computing = model.seconds * batch * length
    of_sequence, at_work = max(1, model.activations * length), _AT_WORK * model.of_layer * length
    share = max(1, memory // _BUDGET_SHARE)
    budget = max(2 * model.largest, share)

    def way(name: str, fixed: int, read: int, written: int, activations: bool = False) -> TrainingWay:
        def needed(batch: int) -> tuple[int, int]:
            """Returns bytes of memory and of storage."""
            saved = of_sequence * batch
            if not activations:
                return fixed + saved, written
            return fixed + min(saved, share + min(at_work, of_sequence) * batch), written + max(0, saved - share)

        def fits(batch: int) -> bool:
            needs = needed(batch)
            return needs[0] <= memory and needs[1] <= free

        taken, stored = needed(batch)
        moved = stored - written
        seconds = max(computing, (read + written + 2 * moved) / rate)
        # a sequence takes at least a byte of either, so that no larger batch fits
        largest = bisect.bisect_left(range(1, memory + free + 2), True, key=lambda count: not fits(count))
        return TrainingWay(name, taken, read + moved, stored, seconds, fits(batch), largest)

    whole = model.nbytes + model.nbytes + model.states
    on_storage = min(budget, model.states)
    swapped = min(budget, model.nbytes) + 2 * on_storage + model.largest
    read, written = model.states + 2 * model.nbytes, model.states + model.nbytes
    return [
        way("in memory", whole, 0, 0),
        way("states on NVMe", 2 * model.nbytes + on_storage, model.states, model.states),
        way("states, gradients freed", model.nbytes + 2 * on_storage + model.largest, model.states, model.states),
        way("states and parameters", swapped, read, written),
        way("activations", whole, 0, 0, activations=True),
        way("all of these", swapped, read, written, activations=True),
    ]


@dataclass(frozen=True)
class TrainingPlan:
    """What ``nvme-offload plan --train`` shows."""

    about: dict[str, Any]
    model: TrainedModel
    memory: int  #: bytes
    rate: float  #: bytes per second
    free: int  #: bytes of storage
    batches: Sequence[int]
    length: int  #: tokens of a sequence

    def text(self) -> str:
        """Returns the plan as text."""
        model, length = self.model, self.length
        lines = [
            f"{self.about['model']}: {model.parameters / 1e9:.3g} billion parameters of {self.about['dtype']}, "
            f"{size_words(model.states)} of AdamW's states, {size_words(model.activations * length)} of activations "
            f"for each sequence of {length} tokens",
            f"storage {rate_words(self.rate)} read and written at once, {size_words(self.free)} free; "
            f"memory {size_words(self.memory)}",
        ]
        for batch in self.batches:
            lines += ["", f"batch {batch}", _table(self._columns(batch), self._ways(batch))]
        return "\n".join(lines)

    def document(self) -> dict[str, Any]:
        """Returns the same for programs: bytes, seconds."""
        return {
            **self.about,
            "memory": self.memory,
            "rate": self.rate,
            "free": self.free,
            "sequence_length": self.length,
            **asdict(self.model),
            "states": self.model.states,
            "batches": [
                {
                    "batch": batch,
                    "ways": [{**asdict(each), "written_per_day": each.written_per_day} for each in self._ways(batch)],
                }
                for batch in self.batches
            ],
        }

    def _columns(self, batch: int) -> dict[str, Callable[[TrainingWay], str]]:
        return {
            "": lambda each: each.name,
            "memory": lambda each: size_words(each.memory),
            "read": lambda each: size_words(each.read),
            "written": lambda each: size_words(each.written),
            "step": lambda each: f"{rounded(each.seconds, 3)} s",
            "tokens/s": lambda each: rounded(batch * self.length / each.seconds, 3) if each.fits else "does not fit",
            "written per day": lambda each: (
                f"{rounded(each.written_per_day / _TERABYTE, 3)} TB" if each.written else "-"
            ),
            "largest batch": lambda each: str(each.largest_batch),
        }

    def _ways(self, batch: int) -> list[TrainingWay]:
        return ways(self.model, self.memory, self.rate, self.free, batch, self.length)
