"""Estimates the time and memory of a model on a machine, in inference, from its sizes and a few rates.

Nothing is timed here. A step computes and moves bytes at the same time, and takes the longer of the two times. A step
and the first token after a prompt read the weights that do not stay in memory, from the page cache where free memory
holds all of them; a cold start reads all of the model once, from storage.

A plan is a document for programs: bytes, seconds, tokens per second. The text for people is made from it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

from nvme_ops.base.text import columns_text, rate_words, rounded, seconds_words, share_words, size_words
from nvme_ops.memory.tier import in_pages
from nvme_ops.offload.residency.placement import kept_as_they_grow, placements
from nvme_ops.offload.weights.window import MANY_ROWS

_AS_FAST = 1.1  # a step of up to this many times the shortest counts as equally short
_CACHE_SLOTS = 2  # layers of keys and values that have room beside those that stay
_NOISY = 0.25  # noise of the steps from which no batch can be recommended


def noise_words(noise: float) -> str:
    """Says by how much measurements of a step differ."""
    return f"measurements of a step differ by up to {share_words(noise)}"


def table_text(columns: Mapping[str, Sequence[str]]) -> str:
    """Returns a table as text; ``columns`` has the cells below each heading."""
    return columns_text([list(columns), *zip(*columns.values(), strict=True)])


@dataclass(frozen=True)
class Mixture:
    """Experts that are all equally likely to be used, which is the worst case: fewest are in memory then."""

    experts: int = 0  #: in all layers
    used_per_token: int = 0
    bytes: int = 0  #: of all experts
    memory: int = 0  #: bytes for experts alone, where it computes
    expanded: int = 0  #: bytes of the values of all that are packed

    def in_use(self, tokens: int) -> float:
        """Returns the share of the experts that a step of tokens uses."""
        return 1 - (1 - self.used_per_token / max(1, self.experts)) ** tokens

    def hits_and_read(self, tokens: int) -> tuple[float, int]:
        """Returns the share of the experts in use that are in memory, and the bytes of others in a step of tokens."""
        in_use = self.in_use(tokens)
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
    cache_stored: int = 0  #: the same in 8 bits, as ``NvmeCache(dtype=)`` stores them; 0: as they are
    cache_page: int = 1  #: tokens that it stores at once; it has the newest two pages as they are
    working: int = 0  #: other results, for each token of the prompt, while it is read
    logits: int = 0  #: for each sequence
    host: int = 0  #: host memory for weights, beside that of an accelerator
    layers: int = 1  #: that have keys and values
    expanded: int = 0  #: bytes of the values of packed weights that every token uses
    multiplied: int = 0  #: up to so many rows are multiplied with packed weights as these are stored

    def expanded_in(self, tokens: int) -> float:
        """Returns the bytes that a step of tokens expands packed weights to."""
        of_expert = tokens * self.experts.used_per_token / max(1, self.experts.experts)
        dense = 0 if tokens <= self.multiplied else self.expanded
        return dense + (0 if of_expert <= self.multiplied else self.experts.expanded * self.experts.in_use(tokens))

    def in_cache(self, batch: int, tokens: int) -> tuple[int, int, int]:
        """Returns the bytes of keys and values as stored, of their values if in 8 bits, and what these take beside."""
        if not self.cache_stored:
            return batch * tokens * self.cache, 0, 0
        stored = batch * -(-tokens // self.cache_page) * self.cache_page
        values, newest = stored * self.cache, 2 * batch * self.cache_page * self.cache
        return stored * self.cache_stored, values, newest + values // self.layers  # one is expanded at a time

    def beside(self, batch: int, prompt_length: int, new_tokens: int) -> int:
        """Returns about how many bytes of memory are needed beside the weights, the cache as it is."""
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
    expanding: float = math.inf  #: bytes of values, of packed weights, where it computes
    expanding_cache: float = math.inf  #: the same of keys and values in 8 bits


@dataclass(frozen=True)
class Computing:
    """Seconds that a batch takes with all weights in memory."""

    step: float
    prompt: float
    noise: float = 0.0  #: by how much measurements of ``step`` differ, as a share of it

    def longer(self, step: float, prompt: float) -> Computing:
        """Returns those of a batch that takes so many seconds more."""
        return Computing(self.step + step, self.prompt + prompt, self.noise)

    def scaled(self, by: float) -> Computing:
        """Returns those of a batch that is so many times larger."""
        return Computing(self.step * by, self.prompt * by, self.noise)


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


class CacheBytes(NamedTuple):
    """Where keys and values are, at the end; a step brings those that are not where it computes."""

    kept: int
    in_host: int = 0
    stored: int = 0


@dataclass(frozen=True)
class Estimate:
    """What to expect of one batch size."""

    batch: int
    cache_bytes: int  #: at the end, for all sequences, as stored
    beside_bytes: int  #: memory beside the weights, including the cache
    nvme: Placement
    no_offload: Placement
    in_page_cache: bool  #: free memory holds all weights, so that ``nvme`` reads from there after the first pass
    cache: CacheBytes  #: all are kept, unless ``NvmeCache`` is needed
    cpu_memory: Placement | None = None  #: None if the model computes there
    on_cpu: Placement | None = None  #: computing there instead, without offload; None if it does anyway
    noise: float = 0.0  #: by how much the step with ``nvme`` may be off, as a share of it
    expanding: float = 0.0  #: seconds of a step in which weights, keys and values are expanded, a part of computing


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


def cache_bytes(nbytes: int, layers: int, room: int, host: int) -> CacheBytes | None:
    """Returns where ``NvmeCache`` has keys and values of some layers; None if there is no room for one layer.

    Args:
        nbytes: of all layers, at the end.
        layers: how many have any.
        room: bytes where they are used: what weights and others leave.
        host: bytes of host memory beside an accelerator's.
    """
    if nbytes <= room:
        return CacheBytes(nbytes)
    sizes = [in_pages(-(-nbytes // layers))] * layers
    if sizes[0] > room:
        return None
    kept = min(nbytes, len(kept_as_they_grow(sizes, room - _CACHE_SLOTS * sizes[0])) * sizes[0])
    in_host = min(nbytes - kept, host)
    return CacheBytes(kept, in_host, nbytes - kept - in_host)


def estimate(
    sizes: Sizes, rates: Rates, computing: Computing, batch: int, prompt_length: int, new_tokens: int,
    on_cpu: Computing | None = None,
) -> Estimate:  # fmt: skip
    """Returns what to expect of ``batch`` sequences at once; ``on_cpu`` is computing there, beside an accelerator."""
    moved, by_prompt = (step_bytes(sizes, tokens) for tokens in (batch, batch * prompt_length))
    expanding = sizes.expanded_in(batch) / rates.expanding
    computing = computing.longer(expanding, sizes.expanded_in(batch * prompt_length) / rates.expanding)
    whole, tokens = sizes.beside(batch, prompt_length, new_tokens), prompt_length + new_tokens
    (cached, of_values, in_use), others = sizes.in_cache(batch, tokens), whole - batch * tokens * sizes.cache
    beside = others + in_use + cached
    load = sizes.model / rates.storage
    own = sizes.resident + sizes.memory
    left = rates.host_free - (own + beside if rates.to_device is None else 0)
    in_page_cache = rates.cached is not None and own < sizes.model <= left  # where it fits into memory, it is read once
    rate = rates.cached if rates.cached is not None and in_page_cache else rates.storage
    bus = math.inf if rates.to_device is None else rates.to_device
    beside_host = 0 if rates.to_device is None else max(0, rates.host_free - sizes.host)
    cache = cache_bytes(cached, sizes.layers, rates.device_free - own - others - in_use, beside_host)
    streams, cache = cache is not None, cache or CacheBytes(cached)
    of_cache = of_values / rates.expanding_cache
    streaming = computing.longer(of_cache, 0)

    def place(
        moved: StepBytes, by_prompt: StepBytes, fits: bool, cold: float, rate: float, cache: CacheBytes, by: Computing
    ) -> Placement:
        """Returns what to expect of weights read at ``rate`` bytes per second; what moves passes the bus."""
        times = [
            (of.read / rate + stored / rates.storage, (of.read + of.from_host + stored + in_host) / bus)
            for of, (_, in_host, stored) in ((moved, cache), (by_prompt, CacheBytes(0)))
        ]
        (storage, crossing), first = times[0], max(times[1])
        reading = max(storage, crossing)
        slower = "bus" if crossing > storage else "reading"
        return Placement(
            bytes_per_step=(moved.read if math.isfinite(rate) else 0) + cache.stored,
            reading=reading,
            computing=by.step,
            first_token=max(first, by.prompt),
            first_token_cold=cold,
            fits=fits,
            bound=slower if reading > by.step else "computing",
            tokens_per_second=batch / max(reading, by.step),
            from_host=moved.from_host + cache.in_host,
        )

    def in_memory(free: int, by: Computing) -> Placement:
        """Returns what to expect with all of it in the memory of what computes."""
        nowhere = StepBytes(0, sizes.model, 0)
        fits = sizes.model + whole <= free
        return place(nowhere, nowhere, fits, load + by.prompt, math.inf, CacheBytes(0), by)

    from_host = None
    if rates.to_device is not None:
        cold, fits = load + max(sizes.model / rates.to_device, computing.prompt), sizes.model <= rates.host_free
        one, other = (StepBytes(0, of.kept, of.read + of.from_host) for of in (moved, by_prompt))
        from_host = place(one, other, streams and fits, cold, math.inf, cache, streaming)
    nvme = place(moved, by_prompt, streams, max(load, computing.prompt), rate, cache, streaming)
    step = max(nvme.reading, nvme.computing)
    return Estimate(
        batch,
        cache_bytes=cached,
        beside_bytes=beside,
        nvme=nvme,
        no_offload=in_memory(rates.device_free, computing),
        in_page_cache=in_page_cache,
        cache=cache,
        cpu_memory=from_host,
        on_cpu=None if on_cpu is None else in_memory(rates.host_free, on_cpu),
        noise=max(step, nvme.computing * (1 + computing.noise)) / step - 1,  # how fast storage is concerns all alike
        expanding=expanding + of_cache,
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


_WAYS = ("nvme", "cpu_memory", "no_offload", "on_cpu")


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
        figures["cache"] = entry.cache._asdict()
        for name in _WAYS:
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
        "cache_bytes_per_token": sizes.cache_stored or sizes.cache,
        "rates": {key: rate for key, rate in asdict(rates).items() if rate != math.inf},
        "noise": noise_of(estimates),
        "online_batch": online,
        "offline_batch": offline,
        "batches_that_do_not_fit": left_out,
        "batches": [shown(entry) for entry in estimates],
    }


def inference_text(plan: Mapping[str, Any]) -> str:
    """Returns an ``inference_plan`` as a page for people."""
    in_bits = f" in {plan['cache_dtype']}" if plan.get("cache_dtype") else ""
    lines = [
        f"{plan['model']}: {plan['layers']} layers, {size_words(plan['bytes'])} of {plan['dtype']}, "
        f"{size_words(plan['cache_bytes_per_token'])} of key-value cache for each token{in_bits}",
        f"storage {rate_words(plan['rates']['storage'])} (noise {share_words(plan['rates']['noise'])}); "
        f"memory for weights {size_words(plan['memory'])} of {size_words(plan['rates']['device_free'])} free, in which "
        f"{size_words(plan['bytes_kept'])} stay",
    ]
    if cached := [entry["batch"] for entry in plan["batches"] if entry["in_page_cache"]]:
        beside = "" if len(cached) == len(plan["batches"]) else f" beside batch {', '.join(map(str, cached))}"
        lines.append(
            f"free memory holds all of it{beside}: after the first pass weights come from the page cache, "
            f"{rate_words(plan['rates']['cached'])} (noise {share_words(plan['rates']['cached_noise'])})"
        )
    for name, stored in (
        ("expanding", f"packed weights ({plan.get('stored_as')})"),
        ("expanding_cache", f"keys{in_bits}"),
    ):
        if rate := plan["rates"].get(name):
            lines.append(f"{stored} are expanded at {rate_words(rate)} of values")
    if experts := plan["experts"]:
        lines.append(
            f"{experts['experts']} experts, {experts['used_per_token']} used per token; memory for experts "
            f"{size_words(experts['memory'])}, which has {share_words(experts['share_of_hits'])} of those used: "
            f"{size_words(experts['bytes_per_token'])} {'brought there' if plan['host_memory'] else 'read'} per token, "
            "less if some are used more than others"
        )
    if batches := plan["batches"]:
        lines += ["", _batches(batches), "", "tokens/s with the weights in (and what limits)", _places(plan, batches)]
    lines.append("")
    if plan["batches_that_do_not_fit"]:
        left_out = ", ".join(map(str, plan["batches_that_do_not_fit"]))
        lines.append(f"batch {left_out}: the cache does not fit into the memory that is free")
    if not any(entry["nvme"]["fits"] for entry in batches):
        lines.append("no batch fits into the memory that is free")
        return "\n".join(lines)
    lines += _next_steps(plan)
    lines.append(noise_words(plan["noise"]))
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
    """Yields what the next faster ways need."""
    first, lacking = plan["batches"][0], plan["bytes"] - plan["memory"]  # a row of an embedding is read anyway
    missing = first["nvme"]["bytes_per_step"] if lacking > plan["host_memory"] else 0
    if missing:
        where = "host memory" if "cpu_memory" in first else "memory"
        yield f"with {size_words(missing)} more {where} nothing is read from storage"
    if lacking > 0 and "cpu_memory" in first and (crossing := missing + first["nvme"]["from_host"]):
        yield f"with {size_words(crossing)} more of the device nothing is copied to it"


def _batches(batches: Sequence[Mapping[str, Any]]) -> str:
    places, expanding = [entry["nvme"] for entry in batches], [entry["expanding"] for entry in batches]
    columns = {
        "batch": [str(entry["batch"]) for entry in batches],
        "reads": [size_words(place["bytes_per_step"]) for place in places],
        **({"from host": [size_words(place["from_host"]) for place in places]} if places[0]["from_host"] else {}),
        "reading": [seconds_words(place["reading"]) for place in places],
        "computing": [seconds_words(place["computing"]) for place in places],
        **({"expanding": [seconds_words(at) for at in expanding]} if any(expanding) else {}),
        "bound by": [place["bound"] for place in places],
        "tokens/s": [_tokens(place) + ("" if place["fits"] else " (does not fit)") for place in places],
        "first token": [seconds_words(place["first_token"]) for place in places],
        "cold": [seconds_words(place["first_token_cold"]) for place in places],
        "beside weights": [size_words(entry["beside_bytes"]) for entry in batches],
    }
    for name, key in (("cache in host", "in_host"), ("cache on NVMe", "stored")):
        if any(entry["cache"][key] for entry in batches):
            columns[name] = [size_words(entry["cache"][key]) for entry in batches]
    if "joules_per_1000_tokens" in places[0]:
        columns["energy/1000"] = [f"{rounded(place['joules_per_1000_tokens'], 3)} J" for place in places]
    if "cost_per_1000_tokens" in places[0]:
        columns["cost/1000"] = [f"{place['cost_per_1000_tokens']:.3g}" for place in places]
    return table_text(columns)


def _places(plan: Mapping[str, Any], batches: Sequence[Mapping[str, Any]]) -> str:
    rows = [("NVMe", plan["memory"], "nvme")]
    if "cpu_memory" in batches[0]:
        own, host = plan["memory"], min(plan["host_memory"], plan["bytes"])
        rows = [("device, host, NVMe" if host else "device, NVMe", own + host, "nvme")]
        rows += [("device, host", plan["bytes"], "cpu_memory"), ("device", plan["bytes"], "no_offload")]
        rows += [("CPU", plan["bytes"], "on_cpu")] if "on_cpu" in batches[0] else []
    else:
        rows.append(("CPU memory, no offload", plan["bytes"], "no_offload"))
    table = [["", "memory", *(f"batch {entry['batch']}" for entry in batches)]]
    for name, memory, key in rows:
        tokens = [
            f"{_tokens(entry[key])} ({entry[key]['bound']})" if entry[key]["fits"] else "does not fit"
            for entry in batches
        ]
        table.append([name, size_words(memory), *tokens])
    return columns_text(table)


def _tokens(placement: Mapping[str, Any]) -> str:
    return rounded(placement["tokens_per_second"], 3)
