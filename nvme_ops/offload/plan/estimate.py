"""Estimates the time and memory of a model on a machine, in inference and training, from its sizes and a few rates.

Nothing is timed here. A step computes and moves bytes at the same time, and takes the longer of the two times. In
inference, a step and the first token after a prompt read the weights that do not stay in memory, from the page cache
where free memory holds all of them; a cold start reads all of the model once, from storage. In training, a step moves
states, parameters or activations.

A plan is a document for programs: bytes, seconds, tokens per second. The text for people is made from it.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

from nvme_ops.base.text import columns_text, rate_words, rounded, seconds_words, share_words, size_words
from nvme_ops.offload.residency.placement import placement, placements, room_beside_buffers
from nvme_ops.offload.weights.window import MANY_ROWS

_AS_FAST = 1.1  # a step of up to this many times the shortest counts as equally short
_NOISY = 0.25  # noise of the steps from which no batch can be recommended
_STATES = 8  # bytes of AdamW for each parameter: exp_avg, exp_avg_sq in float32
_MASTER = 4  # and the float32 copy of a parameter that has fewer bits
_DAY = 86400  # seconds
_TERABYTE = 1e12
_BUDGET_SHARE = 8  # parameters, states and activations that pass through each get the memory divided by this
_NOISE = "measurements of a step differ by up to {}"
_AT_WORK = 2  # a layer in the backward pass has this many times what it keeps: gradients are added


def _table(columns: Mapping[str, Sequence[str]]) -> str:
    """Returns a table as text; ``columns`` has the cells below each heading."""
    return columns_text([list(columns), *zip(*columns.values(), strict=True)])


# Inference


@dataclass(frozen=True)
class Mixture:
    """Experts that are all equally likely to be used, which is the worst case: fewest are in memory then."""

    experts: int = 0  #: in all layers
    used_per_token: int = 0
    bytes: int = 0  #: of all experts
    memory: int = 0  #: bytes for experts alone, where it computes

    def hits_and_read(self, tokens: int) -> tuple[float, int]:
        """Returns the share of the experts in use that are in memory, and the bytes of others in a step of tokens."""
        in_use = 1 - (1 - self.used_per_token / max(1, self.experts)) ** tokens
        kept = min(1.0, self.memory / max(1, self.bytes))
        hits = kept * (1 - in_use * (1 - kept))  # what a step reads takes the place of some before their turn
        return hits, round(self.bytes * in_use * (1 - hits))


@dataclass(frozen=True)
class Sizes:
    """Bytes of a model and of the memory that it computes in."""

    model: int  #: all weights
    resident: int  #: weights that are not streamed
    memory: int  #: for streamed weights, which stay there or pass through, and for experts
    streamed: tuple[int, ...]  #: bytes, in whole pages, of each weight that every token uses, in the order of use
    experts: Mixture = Mixture()
    tables: tuple[tuple[int, int], ...] = ()  #: rows and bytes of a row of each embedding; a token reads one row
    cache: int = 0  #: keys and values of one token
    working: int = 0  #: other results, for each token of the prompt, while it is read
    logits: int = 0  #: for each sequence
    host: int = 0  #: host memory for weights, beside that of an accelerator

    def beside(self, batch: int, prompt_length: int, new_tokens: int) -> int:
        """Returns about how many bytes of memory are needed beside the weights."""
        return batch * ((prompt_length + new_tokens) * self.cache + prompt_length * self.working + self.logits)


@dataclass(frozen=True)
class Rates:
    """Bytes per second, and bytes of free memory."""

    storage: float
    device_free: int  #: where the model computes
    host_free: int
    to_device: float | None = None  #: from host memory; None if the model computes there
    noise: float = 0.0  #: by how much measurements of ``storage`` differ, as a share of it
    cached: float | None = None  #: from the page cache; None if it would never have all weights
    cached_noise: float = 0.0  #: as ``noise``


@dataclass(frozen=True)
class Computing:
    """Seconds that a batch takes with all weights in memory."""

    step: float
    prompt: float
    noise: float = 0.0  #: by how much measurements of ``step`` differ, as a share of it


@dataclass(frozen=True)
class Placement:
    """What to expect with the weights in one kind of memory."""

    bytes_per_step: int
    reading: float  #: seconds of a step, from storage and over the bus at once
    computing: float  #: seconds of a step
    first_token: float  #: seconds after a prompt, once the model runs
    first_token_cold: float  #: the same with nothing in memory
    fits: bool  #: into free memory
    bound: str  #: what limits a step: ``"reading"``, ``"bus"`` or ``"computing"``
    tokens_per_second: float  #: of all sequences of the batch
    from_host: int = 0  #: bytes of a step that are copied from host memory to the accelerator


@dataclass(frozen=True)
class Estimate:
    """What to expect of one batch size."""

    batch: int
    cache_bytes: int  #: at the end, for all sequences
    beside_bytes: int  #: memory beside the weights, including the cache
    nvme: Placement
    no_offload: Placement
    in_page_cache: bool  #: free memory holds all weights, so that ``nvme`` reads from there after the first pass
    cpu_memory: Placement | None = None  #: None if the model computes there
    noise: float = 0.0  #: by how much the step with ``nvme`` may be off, as a share of it


class StepBytes(NamedTuple):
    """Where the weights of a step come from."""

    read: int  #: from storage
    kept: int  #: of weights, but experts, that stay where it computes
    from_host: int  #: of those that come from host memory


def step_bytes(sizes: Sizes, tokens: int) -> StepBytes:
    """Returns the bytes that a step of ``tokens`` tokens moves, and those that stay."""
    weights = [(number, 1.0, nbytes) for number, nbytes in enumerate(sizes.streamed)]
    stay = placements(weights, sizes.memory - sizes.experts.memory, sizes.host)
    kept, in_host = (sum(sizes.streamed[number] for number in numbers) for numbers in stay)
    from_tables = sum(nbytes * (tokens if MANY_ROWS * tokens <= rows else rows) for rows, nbytes in sizes.tables)
    missing = sizes.experts.hits_and_read(tokens)[1]
    read = replace(sizes.experts, memory=sizes.experts.memory + sizes.host - in_host).hits_and_read(tokens)[1]
    return StepBytes(sum(sizes.streamed) - kept - in_host + from_tables + read, kept, in_host + missing - read)


def estimate(
    sizes: Sizes, rates: Rates, computing: Computing, batch: int, prompt_length: int, new_tokens: int
) -> Estimate:
    """Returns what to expect of ``batch`` sequences at once."""
    moved, by_prompt = (step_bytes(sizes, tokens) for tokens in (batch, batch * prompt_length))
    beside = sizes.beside(batch, prompt_length, new_tokens)
    load = sizes.model / rates.storage
    own = sizes.resident + sizes.memory
    left = rates.host_free - (own + beside if rates.to_device is None else 0)
    in_page_cache = rates.cached is not None and own < sizes.model <= left  # where it fits into memory, it is read once
    rate = rates.cached if rates.cached is not None and in_page_cache else rates.storage
    bus = math.inf if rates.to_device is None else rates.to_device

    def place(moved: StepBytes, by_prompt: StepBytes, rate: float, bus: float, cold: float, fits: bool) -> Placement:
        """Returns what to expect of weights read at ``rate`` bytes per second; all pass the ``bus``."""
        reading, crossing = (max(of.read / rate, (of.read + of.from_host) / bus) for of in (moved, by_prompt))
        slower = "bus" if reading > moved.read / rate else "reading"
        return Placement(
            bytes_per_step=moved.read if math.isfinite(rate) else 0,
            reading=reading,
            computing=computing.step,
            first_token=max(crossing, computing.prompt),
            first_token_cold=cold,
            fits=fits,
            bound=slower if reading > computing.step else "computing",
            tokens_per_second=batch / max(reading, computing.step),
            from_host=moved.from_host,
        )

    streams = own + beside <= rates.device_free
    from_host = None
    nowhere = StepBytes(0, sizes.model, 0)
    if rates.to_device is not None:
        prompt = max(sizes.model / rates.to_device, computing.prompt)
        one, other = (StepBytes(0, of.kept, of.read + of.from_host) for of in (moved, by_prompt))
        fits = streams and sizes.model <= rates.host_free
        from_host = place(one, other, math.inf, bus, load + prompt, fits)
    nvme = place(moved, by_prompt, rate, bus, max(load, computing.prompt), streams)
    step = max(nvme.reading, computing.step)
    return Estimate(
        batch,
        cache_bytes=batch * (prompt_length + new_tokens) * sizes.cache,
        beside_bytes=beside,
        nvme=nvme,
        no_offload=place(
            nowhere, nowhere, math.inf, math.inf, load + computing.prompt, sizes.model + beside <= rates.device_free
        ),
        in_page_cache=in_page_cache,
        cpu_memory=from_host,
        noise=max(step, computing.step * (1 + computing.noise)) / step - 1,  # how fast storage is concerns all alike
    )


def best(estimates: Sequence[Estimate]) -> tuple[int | None, int | None]:
    """Returns the best batch sizes for online and for offline use; None if no batch fits, or noise hides which it is.

    Online is the largest whose step is, noise included, about as short as the shortest; offline is the smallest that
    gives as many tokens per second as any, as far as the noise tells.
    """
    tokens = {entry.batch: entry.nvme.tokens_per_second for entry in estimates if entry.nvme.fits}
    step = {batch: batch / rate for batch, rate in tokens.items()}
    error = 1 + noise_of(estimates)
    online = [batch for batch in step if step[batch] * error <= _AS_FAST * min(step.values())]
    offline = [batch for batch in tokens if tokens[batch] * error >= max(tokens.values())]
    return max(online, default=None), min(offline, default=None) if error <= 1 + _NOISY else None


def noise_of(estimates: Sequence[Estimate]) -> float:
    """Returns by how much the step of any batch that fits may be off, as a share of it."""
    return max((entry.noise for entry in estimates if entry.nvme.fits), default=0.0)


def inference_plan(
    about: Mapping[str, Any],
    sizes: Sizes,
    rates: Rates,
    estimates: Sequence[Estimate],
    left_out: Sequence[int],
    memory: int,
    price_per_hour: float | None = None,
    watts: float | None = None,
) -> dict[str, Any]:
    """Returns the plan of several batch sizes.

    Args:
        about: describes the model.
        sizes: those of the model.
        rates: those of the machine.
        estimates: one for each batch size.
        left_out: batch sizes that do not fit into memory.
        memory: bytes for weights.
        price_per_hour: of the machine, in any currency.
        watts: of the machine.
    """
    online, offline = best(estimates)
    streamed = step_bytes(sizes, estimates[0].batch).kept if estimates else 0
    spent = {"joules_per_1000_tokens": watts, "cost_per_1000_tokens": price_per_hour and price_per_hour / 3600}
    hits, read = sizes.experts.hits_and_read(1)
    experts = {**asdict(sizes.experts), "share_of_hits": hits, "bytes_per_token": read}

    def shown(entry: Estimate) -> dict[str, Any]:
        figures = {name: value for name, value in asdict(entry).items() if value is not None}
        for name in ("nvme", "cpu_memory", "no_offload"):
            if name in figures:
                per_token = 1000 / figures[name]["tokens_per_second"]
                figures[name] |= {key: rate * per_token for key, rate in spent.items() if rate is not None}
        return figures

    return {
        **about,
        "memory": memory,
        "host_memory": sizes.host,
        "bytes_kept": sizes.resident + streamed,
        "experts": experts if sizes.experts.experts else None,
        "cache_bytes_per_token": sizes.cache,
        "rates": asdict(rates),
        "noise": noise_of(estimates),
        "online_batch": online,
        "offline_batch": offline,
        "batches_that_do_not_fit": left_out,
        "batches": [shown(entry) for entry in estimates],
    }


def inference_text(plan: Mapping[str, Any]) -> str:
    """Returns an ``inference_plan`` as a page for people."""
    lines = [
        f"{plan['model']}: {plan['layers']} layers, {size_words(plan['bytes'])} of {plan['dtype']}, "
        f"{size_words(plan['cache_bytes_per_token'])} of key-value cache for each token",
        f"storage {rate_words(plan['rates']['storage'])} (noise {share_words(plan['rates']['noise'])}); "
        f"memory for weights {size_words(plan['memory'])}, in which {size_words(plan['bytes_kept'])} stay",
    ]
    if cached := [entry["batch"] for entry in plan["batches"] if entry["in_page_cache"]]:
        beside = "" if len(cached) == len(plan["batches"]) else f" beside batch {', '.join(map(str, cached))}"
        lines.append(
            f"free memory holds all of it{beside}: after the first pass weights come from the page cache, "
            f"{rate_words(plan['rates']['cached'])} (noise {share_words(plan['rates']['cached_noise'])})"
        )
    if experts := plan["experts"]:
        lines.append(
            f"{experts['experts']} experts, {experts['used_per_token']} used per token; memory for experts "
            f"{size_words(experts['memory'])}, which has {share_words(experts['share_of_hits'])} of those used: "
            f"{size_words(experts['bytes_per_token'])} {'brought there' if plan['host_memory'] else 'read'} per token, "
            "less if some are used more than others"
        )
    if batches := plan["batches"]:
        lines += ["", _batches(batches), "", "tokens/s with the weights in", _places(plan, batches)]
    lines.append("")
    if plan["batches_that_do_not_fit"]:
        left_out = ", ".join(map(str, plan["batches_that_do_not_fit"]))
        lines.append(f"batch {left_out}: the cache does not fit into the memory that is free")
    if not any(entry["nvme"]["fits"] for entry in batches):
        lines.append("no batch fits into the memory that is free")
        return "\n".join(lines)
    lines += _next_steps(plan)
    lines.append(_NOISE.format(share_words(plan["noise"])))
    for name, most, words in (
        ("online", _AS_FAST - 1, "the largest whose tokens come about as fast as those of any"),
        ("offline", _NOISY, "the smallest that gives as many tokens per second as any"),
    ):
        if (batch := plan[f"{name}_batch"]) is not None:
            lines.append(f"{name + ':':8} batch {batch}, {words}")
        else:
            lines.append(f"{name + ':':8} no recommendation with more than {share_words(most)} of noise")
    return "\n".join(lines)


def _next_steps(plan: Mapping[str, Any]) -> Iterator[str]:
    """Yields what the next faster way needs, on an accelerator."""
    first = plan["batches"][0]
    if "cpu_memory" in first and (missing := first["nvme"]["bytes_per_step"]):
        yield f"with {size_words(missing)} more host memory nothing is read from storage"
    if "cpu_memory" in first and (crossing := first["nvme"]["bytes_per_step"] + first["nvme"]["from_host"]):
        yield f"with {size_words(crossing)} more of the device nothing is copied to it"


def _batches(batches: Sequence[Mapping[str, Any]]) -> str:
    places = [entry["nvme"] for entry in batches]
    columns = {
        "batch": [str(entry["batch"]) for entry in batches],
        "reads": [size_words(place["bytes_per_step"]) for place in places],
        **({"from host": [size_words(place["from_host"]) for place in places]} if places[0]["from_host"] else {}),
        "reading": [seconds_words(place["reading"]) for place in places],
        "computing": [seconds_words(place["computing"]) for place in places],
        "bound by": [place["bound"] for place in places],
        "tokens/s": [_tokens(place) + ("" if place["fits"] else " (does not fit)") for place in places],
        "first token": [seconds_words(place["first_token"]) for place in places],
        "cold": [seconds_words(place["first_token_cold"]) for place in places],
        "beside weights": [size_words(entry["beside_bytes"]) for entry in batches],
    }
    if "joules_per_1000_tokens" in places[0]:
        columns["energy/1000"] = [f"{rounded(place['joules_per_1000_tokens'], 3)} J" for place in places]
    if "cost_per_1000_tokens" in places[0]:
        columns["cost/1000"] = [f"{place['cost_per_1000_tokens']:.3g}" for place in places]
    return _table(columns)


def _places(plan: Mapping[str, Any], batches: Sequence[Mapping[str, Any]]) -> str:
    rows = [("NVMe", plan["memory"], "nvme")]
    if "cpu_memory" in batches[0]:
        own, host = plan["memory"], min(plan["host_memory"], plan["bytes"])
        rows = [("device, host, NVMe" if host else "device, NVMe", own + host, "nvme")]
        rows += [("device, host", plan["bytes"], "cpu_memory"), ("device", plan["bytes"], "no_offload")]
    else:
        rows.append(("CPU memory, no offload", plan["bytes"], "no_offload"))
    table = [["", "memory", *(f"batch {entry['batch']}" for entry in batches)]]
    for name, memory, key in rows:
        tokens = [_tokens(entry[key]) if entry[key]["fits"] else "does not fit" for entry in batches]
        table.append([name, size_words(memory), *tokens])
    return columns_text(table)


def _tokens(placement: Mapping[str, Any]) -> str:
    return rounded(placement["tokens_per_second"], 3)


# Training


@dataclass(frozen=True)
class TrainedModel:
    """The sizes of a model in training, and its seconds for each token with all of it in memory."""

    parameters: int  #: elements
    itemsize: int  #: bytes of each
    largest: int  #: bytes of the largest parameter
    activations: int  #: bytes that autograd keeps for the backward pass, for each token
    of_layer: int  #: those of the layer that keeps most
    seconds: float  #: for each token, forward and backward
    noise: float = 0.0  #: by how much measurements of ``seconds`` differ, as a share of it

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
    """A step of one batch size, with states, parameters and activations in memory or on storage."""

    name: str
    memory: int  #: bytes needed
    read: int  #: bytes for each step
    written: int
    seconds: float  #: of a step
    fits: bool
    largest_batch: int  #: that fits into memory and on storage; 0 for none


def ways(model: TrainedModel, memory: int, rate: float, free: int, batch: int, length: int) -> list[TrainingWay]:
    """Returns the ways to train on a batch of sequences of ``length`` tokens.

    Args:
        model: trained by AdamW.
        memory: bytes for everything.
        rate: bytes per second of storage, reading and writing at the same time, together.
        free: free bytes of storage.
        batch: number of sequences.
        length: tokens of each.
    """
    computing = model.seconds * batch * length
    of_sequence, at_work = max(1, model.activations * length), _AT_WORK * model.of_layer * length
    share = max(1, memory // _BUDGET_SHARE)
    budget = max(2 * model.largest, share)

    def way(name: str, fixed: int, states: int, parameters: int = 0, activations: bool = False) -> TrainingWay:
        def needed(batch: int) -> tuple[int, int]:
            """Returns bytes of memory and of storage."""
            saved, stored = of_sequence * batch, states + parameters
            if not activations:
                return fixed + saved, stored
            return fixed + min(saved, share + min(at_work, of_sequence) * batch), stored + max(0, saved - share)

        def fits(batch: int) -> bool:
            needs = needed(batch)
            return needs[0] <= memory and needs[1] <= free

        taken, stored = needed(batch)
        passing = 0 if placement([("parameters", 1.0, parameters)], budget) else parameters
        written = stored - parameters + passing
        read = written + passing  # forward and backward
        seconds = max(computing, (read + written) / rate)
        # a sequence takes at least a byte of one of them, so that no larger batch fits
        largest = bisect.bisect_left(range(1, memory + free + 2), True, key=lambda count: not fits(count))
        return TrainingWay(name, taken, read, written, seconds, fits(batch), largest)

    whole = model.nbytes + model.nbytes + model.states
    in_memory, states = min(budget, model.states), max(0, model.states - room_beside_buffers(budget))
    swapped = min(budget, model.nbytes) + 2 * in_memory + model.largest
    return [
        way("in memory", whole, 0),
        way("states on NVMe", 2 * model.nbytes + in_memory, states),
        way("states, gradients freed", model.nbytes + 2 * in_memory + model.largest, states),
        way("states and parameters", swapped, states, model.nbytes),
        way("activations", whole, 0, activations=True),
        way("all of these", swapped, states, model.nbytes, activations=True),
    ]


def training_plan(
    about: Mapping[str, Any],
    model: TrainedModel,
    memory: int,
    rate: float,
    rate_noise: float,
    free: int,
    batches: Sequence[int],
    length: int,
) -> dict[str, Any]:
    """Returns the plan of several batch sizes.

    The arguments are those of ``ways``; measurements of ``rate`` differ by ``rate_noise``, as a share of it.
    """

    def described(way: TrainingWay) -> dict[str, Any]:
        return {**asdict(way), "written_per_day": way.written / way.seconds * _DAY}

    return {
        **about,
        "memory": memory,
        "rate": rate,
        "rate_noise": rate_noise,
        "free": free,
        "sequence_length": length,
        **asdict(model),
        "states": model.states,
        "batches": [
            {"batch": batch, "ways": list(map(described, ways(model, memory, rate, free, batch, length)))}
            for batch in batches
        ],
    }


def training_text(plan: Mapping[str, Any]) -> str:
    """Returns a ``training_plan`` as a page for people."""
    length = plan["sequence_length"]
    lines = [
        f"{plan['model']}: {plan['parameters'] / 1e9:.3g} billion parameters of {plan['dtype']}, "
        f"{size_words(plan['states'])} of AdamW's states, {size_words(plan['activations'] * length)} of activations "
        f"for each sequence of {length} tokens",
        f"storage {rate_words(plan['rate'])} read and written at once (noise {share_words(plan['rate_noise'])}), "
        f"{size_words(plan['free'])} free; memory {size_words(plan['memory'])}",
    ]
    for entry in plan["batches"]:
        rows, tokens = entry["ways"], entry["batch"] * length
        columns = {
            "": [way["name"] for way in rows],
            "memory": [size_words(way["memory"]) for way in rows],
            "read": [size_words(way["read"]) for way in rows],
            "written": [size_words(way["written"]) for way in rows],
            "step": [f"{rounded(way['seconds'], 3)} s" for way in rows],
            "tokens/s": [rounded(tokens / way["seconds"], 3) if way["fits"] else "does not fit" for way in rows],
            "written per day": [
                f"{rounded(way['written_per_day'] / _TERABYTE, 3)} TB" if way["written"] else "-" for way in rows
            ],
            "largest batch": [str(way["largest_batch"]) for way in rows],
        }
        lines += ["", f"batch {entry['batch']}", _table(columns)]
    return "\n".join([*lines, "", _NOISE.format(share_words(plan["noise"]))])
