"""Estimates the steps of a training by AdamW whose tensors are where it computes, in host memory, and on storage.

Nothing is timed here. Each way gives budgets to ``NvmeOptimizer``, ``swap_params``, ``swap_gradients`` and
``save_on_nvme``; what stays and what moves then follows from the functions that decide it in a run. A step takes as
long as computing, storage or the bus, whichever takes longest.
"""

from __future__ import annotations

import bisect
import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch

from nvme_ops.base.text import MIB, rate_words, rounded, share_words, size_words
from nvme_ops.memory.tier import in_pages
from nvme_ops.offload.optimizer.chunks import MemoryLayout, ParameterLayout, divide
from nvme_ops.offload.optimizer.state_dtypes import MASTER, Region, StateDtype, packed
from nvme_ops.offload.optimizer.states import buffers_of, staying
from nvme_ops.offload.plan.estimate import noise_words, table_text
from nvme_ops.offload.residency.placement import kept_of_saved, worth_keeping

_DAY = 86400  # seconds
_TERABYTE = 1e12
_SHARE = 8  # what passes through memory where it computes gets that divided by this
_LEAST = MIB  # bytes of a tensor that leaves memory: ``min_bytes`` of each function
_ON_THEIR_WAY = 256 * MIB  # bytes of states, if not all are less: the default of ``NvmeOptimizer``
_PLACES = 2  # of a state on storage
_USES = 3  # of a parameter in a step: forward, backward and update
_TURNS = 2  # of the order of use in a step, where what was used last is used next
_AT_WORK = 2  # a layer in the backward pass has this many times what it keeps: gradients are added

Budgets = dict[str, dict[str, int]]  #: bytes by function and argument


@dataclass(frozen=True)
class TrainedModel:
    """The sizes of a model in training, and its seconds for each token with all of it in memory."""

    sizes: tuple[int, ...]  #: bytes of each parameter, in the order of use
    itemsize: int  #: bytes of an element
    activations: int  #: bytes that autograd keeps for the backward pass, for each token
    of_layer: int  #: those of the layer that keeps most
    largest_saved: int  #: those of the largest tensor
    seconds: float  #: for each token, forward and backward
    noise: float = 0.0  #: by how much measurements of ``seconds`` differ, as a share of it
    state_dtype: StateDtype | None = None  #: that of ``NvmeOptimizer``

    @property
    def nbytes(self) -> int:
        """Bytes of the parameters."""
        return sum(self.sizes)

    @property
    def regions(self) -> tuple[Region, ...]:
        """AdamW's states, master weights included."""
        master = (MASTER,) if self.itemsize < torch.float32.itemsize else ()
        return tuple(Region(name, torch.float32) for name in (*master, "exp_avg", "exp_avg_sq"))

    @property
    def states(self) -> int:
        """Bytes of AdamW's states as torch has them."""
        return self.nbytes // self.itemsize * torch.float32.itemsize * len(self.regions)


@dataclass(frozen=True)
class Machine:
    """What there is to train with: bytes, and bytes per second."""

    memory: int  #: where it computes, for everything
    storage: float  #: reading and writing at the same time, together
    free: int  #: on storage
    host: int = 0  #: beside the memory of an accelerator
    bus: float | None = None  #: each way, to the accelerator; None if it computes on the CPU
    on_cpu: float | None = None  #: seconds for each token on the CPU, beside an accelerator


class Moved(NamedTuple):
    """Where tensors of one kind, or of all, have bytes, and the bytes of them that a step moves."""

    memory: int = 0  #: where it computes
    host: int = 0
    stored: int = 0
    read: int = 0
    written: int = 0
    from_host: int = 0
    to_host: int = 0


def _sum(parts: Sequence[Moved]) -> Moved:
    return Moved(*map(sum, zip(*parts, strict=True)))


@functools.cache
def states_moved(model: TrainedModel, budget: int) -> Moved:
    """Returns what a step of ``NvmeOptimizer`` moves."""
    (room, _, buffer), dtype = buffers_of(budget), torch.float32 if len(model.regions) == 2 else torch.bfloat16
    parameters = [torch.empty(nbytes // model.itemsize, dtype=dtype, device="meta") for nbytes in model.sizes]
    layouts = {
        one: ParameterLayout(
            MemoryLayout(one.shape, one.stride()), packed(model.regions, model.state_dtype, one, "AdamW")
        )
        for one in parameters
    }
    chunks = list(divide(layouts, 0, buffer))
    held = sum(chunk.nbytes for chunk in staying(chunks, room))
    stored = sum(chunk.nbytes for chunk in chunks)
    moved = stored - held
    return Moved(0, min(budget, stored), _PLACES * moved, moved, moved, held, held)


def parameters_moved(model: TrainedModel, budget: int, host: int) -> Moved:
    """Returns what ``swap_params`` moves in a step; an update during the backward pass may use them less often."""
    large = [(number, 1.0, in_pages(size)) for number, size in enumerate(model.sizes) if size >= _LEAST]
    total = sum(nbytes for *_, nbytes in large)
    if total <= budget:
        return Moved(model.nbytes)
    here = sum(model.sizes[number] for number in worth_keeping(large, host)) if host else 0
    stored = sum(model.sizes[number] for number, *_ in large) - here
    used = _USES - _TURNS * budget / (stored + here)
    memory = model.nbytes - stored - here + budget
    return Moved(memory, here, stored, round(used * stored), stored, round(used * here), here)


def gradients_moved(model: TrainedModel, budget: int, host: int) -> Moved:
    """Returns what ``swap_gradients`` moves: the last parameters' gradients are first, while host memory has room."""
    large, here = [size for size in reversed(model.sizes) if size >= _LEAST], 0
    for size in large:
        here += size if here + in_pages(size) <= host else 0
    stored = sum(large) - here
    return Moved(model.nbytes - sum(large) + min(budget, sum(large)), here, stored, stored, stored, here, here)


def activations_moved(saved: int, largest: int, budget: int, host: int) -> Moved:
    """Returns what ``save_on_nvme`` moves of so many bytes saved, of which what was saved last stays."""
    away = min(saved, max(0, saved - kept_of_saved(saved, budget, largest)))
    here = min(away, host)
    stored = away - here
    return Moved(min(saved, budget), here, stored, stored, stored, here, here)


@dataclass(frozen=True)
class TrainingWay:
    """A step of one batch size, with what is named on storage or in host memory, as far as it has no room above."""

    name: str
    memory: int  #: bytes needed where it computes
    host: int  #: beside the memory of an accelerator
    stored: int  #: on storage
    read: int  #: bytes for each step
    written: int
    from_host: int
    to_host: int
    seconds: float  #: of a step
    bound: str  #: what limits it: ``"computing"``, ``"storage"`` or ``"bus"``
    fits: bool
    largest_batch: int  #: that fits into memory and on storage; 0 for none
    budgets: Budgets  #: what to give to each function
    moved: dict[str, Moved]  #: by function


_STATES, _GRADIENTS, _PARAMETERS, _SAVED = "NvmeOptimizer", "swap_gradients", "swap_params", "save_on_nvme"
_FREED = "free_gradients"
_WAYS = {
    "in memory": (),
    "states": (_STATES,),
    "states, gradients freed": (_STATES, _FREED),
    "states and gradients": (_STATES, _GRADIENTS),
    "states and parameters": (_STATES, _FREED, _PARAMETERS),
    "activations": (_SAVED,),
    "all of these": (_STATES, _GRADIENTS, _PARAMETERS, _SAVED),
}


def ways(model: TrainedModel, machine: Machine, batch: int, length: int) -> list[TrainingWay]:
    """Returns the ways to train on a batch of sequences of ``length`` tokens."""
    of_sequence, at_work = max(1, model.activations * length), _AT_WORK * model.of_layer * length
    share = max(1, machine.memory // _SHARE)
    own = max(2 * max(model.sizes), share, MIB)
    buffers = max(MIB, min(_ON_THEIR_WAY, model.states)) if machine.bus else own  # the least for states on their way

    def way(name: str, moves: Sequence[str]) -> TrainingWay:
        budgets = Budgets()
        left = max(0, machine.host - buffers) if _STATES in moves else machine.host

        def given(function: str, nbytes: int) -> tuple[int, int]:
            """Returns the budgets of a function, and notes them."""
            budgets[function] = (
                {"device_budget": nbytes, "host_budget": left} if machine.bus else {"host_budget": nbytes}
            )
            return nbytes, left

        freed = min(buffers, model.nbytes) + max(model.sizes)
        parts = {_PARAMETERS: Moved(model.nbytes), _GRADIENTS: Moved(freed if _FREED in moves else model.nbytes)}
        for function, moving in ((_PARAMETERS, parameters_moved), (_GRADIENTS, gradients_moved)):
            if function in moves:
                parts[function] = moving(model, *given(function, own))
                left -= parts[function].host
        parts[_STATES] = Moved(model.states)
        if _STATES in moves:
            budgets[_STATES] = {"host_budget": buffers + left if machine.bus else own}
            parts[_STATES] = states_moved(model, budgets[_STATES]["host_budget"])
            left = max(0, left + buffers - parts[_STATES].host)
        if _SAVED in moves:
            given(_SAVED, share)

        def saved_by(batch: int) -> Moved:
            """Returns what is saved of a batch."""
            saved = of_sequence * batch
            if _SAVED not in moves:
                return Moved(saved)
            kept = activations_moved(saved, model.largest_saved * length * batch, share, left)
            return kept._replace(memory=min(saved, share + min(at_work, of_sequence) * batch))

        def needed(batch: int) -> Moved:
            """Returns what a batch needs, and moves."""
            needs = _sum([*parts.values(), saved_by(batch)])
            return needs if machine.bus else Moved(needs.memory + needs.host, 0, *needs[2:5])

        def fits(batch: int) -> bool:
            needs = needed(batch)
            most = machine.memory, max(machine.host, buffers), machine.free
            return all(nbytes <= room for nbytes, room in zip(needs, most, strict=False))

        needs = needed(batch)
        backup = model.nbytes if _STATES in moves else 0  # of parameters, in the buffers
        crossing = max(needs.read + needs.from_host, needs.written + needs.to_host + backup)
        seconds = {
            "computing": model.seconds * batch * length,
            "storage": (needs.read + needs.written) / machine.storage,
            "bus": crossing / machine.bus if machine.bus else 0.0,
        }
        bound = max(seconds, key=seconds.__getitem__)
        # a sequence takes at least a byte of one of them, so that no larger batch fits
        most = machine.memory + max(machine.host, buffers) + machine.free + 2
        largest = bisect.bisect_left(range(1, most), True, key=lambda count: not fits(count))
        moved = {function: of for function, of in {**parts, _SAVED: saved_by(batch)}.items() if function in moves}
        return TrainingWay(name, *needs, seconds[bound], bound, fits(batch), largest, budgets, moved)

    found = [way(name, moves) for name, moves in _WAYS.items()]
    if machine.on_cpu is not None:
        whole = 2 * model.nbytes + model.states
        largest, taken = max(0, machine.host - whole) // of_sequence, whole + of_sequence * batch
        step = machine.on_cpu * batch * length
        found.append(
            TrainingWay("on the CPU", *Moved(host=taken), step, "computing", taken <= machine.host, largest, {}, {})
        )
    return found


def training_plan(
    about: Mapping[str, Any], model: TrainedModel, machine: Machine, rate_noise: float, batches: Sequence[int],
    length: int,
) -> dict[str, Any]:  # fmt: skip
    """Returns the plan of several batch sizes; measurements of the storage differ by ``rate_noise``, as a share."""

    def described(way: TrainingWay) -> dict[str, Any]:
        moved = {function: of._asdict() for function, of in way.moved.items()}
        return {**asdict(way), "moved": moved, "written_per_day": way.written / way.seconds * _DAY}

    sizes = {"parameters": model.nbytes // model.itemsize, "largest": max(model.sizes), "states": model.states}
    return {
        **about,
        **{name: value for name, value in asdict(model).items() if name != "sizes"},
        **sizes,
        "memory": machine.memory,
        "host_memory": machine.host,
        "rate": machine.storage,
        "rate_noise": rate_noise,
        "bus": machine.bus,
        "free": machine.free,
        "sequence_length": length,
        "batches": [
            {"batch": batch, "ways": list(map(described, ways(model, machine, batch, length)))} for batch in batches
        ],
    }


def training_text(plan: Mapping[str, Any]) -> str:
    """Returns a ``training_plan`` as a page for people."""
    length, bus = plan["sequence_length"], plan["bus"]
    beside = f" + {size_words(plan['host_memory'])} of the host, bus {rate_words(bus)}" if bus else ""
    lines = [
        f"{plan['model']}: {plan['parameters'] / 1e9:.3g} billion parameters of {plan['dtype']}, "
        f"{size_words(plan['states'])} of AdamW's states, {size_words(plan['activations'] * length)} of activations "
        f"for each sequence of {length} tokens",
        f"storage {rate_words(plan['rate'])} read and written at once (noise {share_words(plan['rate_noise'])}), "
        f"{size_words(plan['free'])} free; memory {size_words(plan['memory'])} of {size_words(plan['memory_free'])} "
        f"free{beside}",
    ]
    for entry in plan["batches"]:
        rows, tokens = entry["ways"], entry["batch"] * length

        def sizes(name: str, rows: Sequence[Mapping[str, Any]] = rows) -> list[str]:
            return [size_words(way[name]) for way in rows]

        columns = {
            "": [way["name"] for way in rows],
            "device" if bus else "memory": sizes("memory"),
            **({"host": sizes("host")} if bus else {}),
            "NVMe": sizes("stored"),
            **({"from host": sizes("from_host"), "to host": sizes("to_host")} if bus else {}),
            "read": sizes("read"),
            "written": sizes("written"),
            "step": [f"{rounded(way['seconds'], 3)} s" for way in rows],
            "bound by": [way["bound"] for way in rows],
            "tokens/s": [rounded(tokens / way["seconds"], 3) if way["fits"] else "does not fit" for way in rows],
            "written per day": [
                f"{rounded(way['written_per_day'] / _TERABYTE, 3)} TB" if way["written"] else "-" for way in rows
            ],
            "largest batch": [str(way["largest_batch"]) for way in rows],
        }
        lines += ["", f"batch {entry['batch']}", table_text(columns), *_advice(plan, rows)]
    return "\n".join([*lines, "", noise_words(plan["noise"])])


def _advice(plan: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yields how to have the fastest way that fits, and what the next faster ones need."""
    best = min((way for way in rows if way["fits"]), key=lambda way: float(way["seconds"]), default=None)
    if best is None:
        least = min(rows, key=lambda way: int(way["memory"]))
        yield f"none fits: {least['name']} takes the least memory, {size_words(least['memory'])}"
    else:
        calls = [
            f"{function}({', '.join(f'{name}={size_words(nbytes)!r}' for name, nbytes in given.items())})"
            for function, given in best["budgets"].items()
        ]
        yield f"fastest: {best['name']}" + (f", by {', '.join(calls)}" if calls else "")
        if best["written"] and plan["bus"]:
            yield f"with {size_words(best['written'])} more host memory nothing is read from storage"
    if not rows[0]["fits"]:
        yield f"with {size_words(rows[0]['memory'] - plan['memory'])} more memory, all of it is where it computes"
