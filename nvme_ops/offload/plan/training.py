"""What training a model will take with states, parameters or activations on storage: ``nvme-offload plan --train``.

A step computes, and moves bytes. With the optimizer's step in the backward pass the two overlap: the step takes the
longer of the two times.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from nvme_ops.text import columns_text, rate_words, rounded, size_words

_STATES = 8  # bytes of AdamW for each parameter: exp_avg, exp_avg_sq in float32
_MASTER = 4  # and a float32 copy of one in fewer bits
_DAY = 86400  # seconds
_TERABYTE = 1e12
_BUDGET_SHARE = 8  # the memory divided by this, each for parameters, states and activations that pass through
_AT_WORK = 2  # times what a layer keeps, while it computes: gradients are added


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
            rows = [["", "memory", "read", "written", "step", "tokens/s", "written per day", "largest batch"]]
            for each in self._ways(batch):
                tokens = rounded(batch * length / each.seconds, 3) if each.fits else "does not fit"
                a_day = f"{rounded(each.written_per_day / _TERABYTE, 3)} TB" if each.written else "-"
                rows.append(
                    [each.name, size_words(each.memory), size_words(each.read), size_words(each.written),
                     f"{rounded(each.seconds, 3)} s", tokens, a_day, str(each.largest_batch)]
                )  # fmt: skip
            lines += ["", f"batch {batch}", columns_text(rows)]
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

    def _ways(self, batch: int) -> list[TrainingWay]:
        return ways(self.model, self.memory, self.rate, self.free, batch, self.length)
