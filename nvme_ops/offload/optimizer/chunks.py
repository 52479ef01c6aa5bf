"""Divides parameters into chunks: what an optimizer keeps of each chunk's elements lies together on storage."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from nvme_ops.memory.carve import dense_bytes, is_dense
from nvme_ops.offload.weights.gradients import gradient_of
from nvme_ops.offload.weights.swapped import SwappedTensor
from nvme_ops.settings import PAGE

MASTER = "master_weights"  #: the state that has a parameter's value in float32

#: The optimizers of torch.optim that update each element by itself, so that any part of a parameter can be updated.
ELEMENTWISE = ("Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD")

_MASTER_BYTES = torch.float32.itemsize
_GRAIN = 64  # elements to which parts of a chunk are aligned: 64 bytes of any dtype


class Region(NamedTuple):
    """A state that has an element for each of a parameter's."""

    name: str
    dtype: torch.dtype


def regions_of(
    optimizer: Callable[..., torch.optim.Optimizer], options: Mapping[str, Any], parameter: torch.Tensor, master: bool
) -> tuple[Region, ...]:
    """Returns the elementwise states that the optimizer keeps of a parameter, found by one step of three elements.

    Args:
        optimizer: a class of ``torch.optim``.
        options: of the parameter group.
        parameter: of the group.
        master: whether the optimizer updates a copy in float32, which then comes first.
    """
    dtype = torch.float32 if master else parameter.dtype
    sample = torch.zeros(3, dtype=dtype, device=parameter.device)
    sample.grad = torch.ones_like(sample)
    inner = optimizer([{**copied(options), "params": [sample]}])
    inner.step()
    found = [Region(MASTER, torch.float32)] if master else []
    for name, value in inner.state[sample].items():
        if isinstance(value, torch.Tensor) and value.shape == sample.shape:
            found.append(Region(name, value.dtype))
    return tuple(found)


def copied(options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a group's options without its parameters."""
    return {name: copy.copy(value) for name, value in options.items() if name != "params"}


class Loan(NamedTuple):
    """A parameter and its gradient in memory, for as long as a chunk is being updated."""

    values: torch.Tensor
    gradient: torch.Tensor | None


@dataclass(eq=False)
class Slice:
    """Elements ``begin`` to ``end`` of a parameter, in the order of its memory; they begin at ``at`` in the chunk."""

    parameter: torch.Tensor
    begin: int
    end: int
    at: int
    loan: Loan | None = None  #: the parameter and its gradient, if these are on storage themselves
    place: slice = field(init=False)  #: where the elements are in the chunk

    def __post_init__(self) -> None:
        self.place = slice(self.at, self.at + self.end - self.begin)

    def values(self) -> torch.Tensor:
        """Returns these elements of the parameter, as a view of one dimension; of the loan while there is one."""
        return flat(local(self.parameter) if self.loan is None else self.loan.values)[self.begin : self.end]

    def gradient(self) -> torch.Tensor | None:
        """Returns these elements of the gradient, or None without one. Raises RuntimeError for a sparse one."""
        found = self.parameter.grad if self.loan is None else self.loan.gradient
        if found is None:
            return None
        gradient = local(found)
        if gradient.layout != torch.strided:
            raise RuntimeError("NvmeOptimizer does not support sparse gradients")
        values = local(self.parameter) if self.loan is None else self.loan.values
        if gradient.stride() != values.stride():
            gradient = torch.empty_like(values, dtype=gradient.dtype).copy_(gradient)
        return flat(gradient)[self.begin : self.end]


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the part of a tensor that is in this process: all of it, but of a DTensor its shard."""
    tensor = tensor.detach()
    to_local: Any = getattr(tensor, "to_local", None)
    return tensor if to_local is None else to_local()


def outline(tensor: torch.Tensor) -> torch.Tensor:
    """Returns what has shape, strides and dtype of ``local(tensor)``, without fetching it from storage."""
    if isinstance(tensor, SwappedTensor):
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
    return local(tensor)


@contextlib.contextmanager
def _loan_of(parameter: torch.Tensor) -> Iterator[Loan]:
    with contextlib.ExitStack() as uses:
        gradient = uses.enter_context(gradient_of(parameter))
        if isinstance(parameter, SwappedTensor):
            values = uses.enter_context(parameter.lent(change=gradient is not None))
            torch.autograd.graph.increment_version(parameter)
        else:
            values = local(parameter)
        yield Loan(values, gradient)


def sharded(part: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Undoes ``local``: returns the tensor of which ``part`` is in this process, divided as ``like`` is."""
    if not hasattr(like, "to_local"):
        return part
    from torch.distributed.tensor import DTensor  # which takes a while to import

    each: Any = like
    return DTensor.from_local(
        part, each.device_mesh, each.placements, run_check=False, shape=each.shape, stride=each.stride()
    )


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a dense tensor's elements in the order of its memory, as a view of one dimension."""
    return tensor.view(-1) if tensor.is_contiguous() else dense_bytes(tensor).view(tensor.dtype)


@dataclass(frozen=True, eq=False)
class Version:
    """The states of a chunk at one time; which one counts, ``States.now`` says."""

    slot: int | None = None  #: which of the chunk's values in the store has them; None: there are none
    #: What has no element for each of a slice's, and None for a state of the chunk that the slice does not have yet.
    #: Slices without any states are not in it.
    scalars: Mapping[Slice, dict[str, Any]] = field(default_factory=dict)
    attempt: int = -1  #: that has made it; see ``States.attempt``


@dataclass(eq=False)
class Chunk:
    """Slices of parameters of one group, dtype and device, whose states lie in one value of the store.

    In a buffer the states are followed by the backup: the elements of the parameters as they were.
    """

    group: int
    regions: tuple[Region, ...]
    dtype: torch.dtype
    device: torch.device
    slices: Sequence[Slice]
    number: int = -1  #: among all chunks
    elements: int = field(init=False)  #: those between the slices included
    nbytes: int = field(init=False)  #: of the states on storage, in whole pages
    updated: list[Slice] = field(default_factory=list)  #: whose parameters are in the backup, and may have changed
    scalars: dict[Slice, dict[str, Any]] = field(default_factory=dict)  #: those of the version to come
    pending: Version | None = None  #: what is being written

    def __post_init__(self) -> None:
        self.elements = _aligned(self.slices[-1].place.stop)
        size = sum(self.elements * region.dtype.itemsize for region in self.regions)
        self.nbytes = -(-size // PAGE) * PAGE
        self._end_of_backup = self.nbytes + self.elements * self.dtype.itemsize
        #: Of all chunks that torch's optimizer could update in one call.
        self.kind = (self.group, self.dtype, self.device)
        #: Whether a copy of the parameters in float32 is among the states.
        self.has_master = bool(self.regions) and self.regions[0].name == MASTER
        #: The states that the optimizer itself keeps of each element.
        self.names = [region.name for region in self.regions if region.name != MASTER]

    def begin(self) -> None:
        """Forgets the last pass."""
        self.updated, self.scalars, self.pending = [], {}, None

    def has_gradient(self) -> bool:
        """Whether a step changes something of it."""
        return any(each.parameter.grad is not None for each in self.slices)

    def borrowed(self, slices: Sequence[Slice] | None = None) -> Generator[list[Slice], None, None]:
        """Yields slices with parameters and gradients in memory, to be changed: all of the chunk, or those given.

        All that are in memory anyway come together, and each that is on storage by itself. Close it, or exhaust it.
        """
        lent: list[Slice] = []
        usual: list[Slice] = []
        for each in self.slices if slices is None else slices:
            on_storage = isinstance(each.parameter, SwappedTensor) or isinstance(each.parameter.grad, SwappedTensor)
            (lent if on_storage else usual).append(each)
        if usual:
            yield usual
        for each in lent:
            with _loan_of(each.parameter) as each.loan:
                try:
                    yield [each]
                finally:
                    each.loan = None

    def views(self, memory: torch.Tensor) -> dict[str, torch.Tensor]:
        """Returns the elements of each state in ``memory``, which has the chunk's bytes."""
        found, begin = {}, 0
        for name, dtype in self.regions:
            end = begin + self.elements * dtype.itemsize
            found[name] = memory[begin:end].view(dtype)
            begin = end
        return found

    def backup(self, buffer: torch.Tensor) -> torch.Tensor:
        """Returns the elements of the parameters as they were, in a buffer of the ring, behind the states."""
        return buffer[self.nbytes : self._end_of_backup].view(self.dtype)

    def gradients(self, buffer: torch.Tensor) -> torch.Tensor:
        """Returns the elements of the gradients in float32, for master weights, in a buffer behind the backup."""
        return buffer[self._end_of_backup : self._end_of_backup + self.elements * _MASTER_BYTES].view(torch.float32)

    def key(self, slot: int) -> str:
        """Returns the name of one of the chunk's values in the store."""
        return f"{self.number}/{slot}"


def divide(
    parameters: Sequence[torch.Tensor], group: int, layouts: Mapping[torch.Tensor, tuple[Region, ...]], buffer: int
) -> Iterator[Chunk]:
    """Yields the chunks of a group of parameters, each of which fits with its backup into ``buffer`` bytes.

    Their numbers are to be given by the caller. Raises ValueError for a parameter with gaps in its memory.
    """
    unfinished: dict[tuple[Any, ...], list[Slice]] = {}
    for parameter in parameters:
        values = outline(parameter)
        if not is_dense(values):
            raise ValueError(f"a parameter of shape {tuple(parameter.shape)} has gaps in its memory")
        regions = layouts[parameter]
        kind = (regions, values.dtype, parameter.device)
        each = sum(region.dtype.itemsize for region in regions) + values.dtype.itemsize
        if regions and regions[0].name == MASTER:
            each += _MASTER_BYTES
        most = (buffer - PAGE) // each // _GRAIN * _GRAIN
        begin = 0
        while begin < values.numel():
            slices = unfinished.setdefault(kind, [])
            at = _aligned(slices[-1].place.stop) if slices else 0
            if at >= most:
                yield Chunk(group, *kind, slices)
                slices, at = [], 0
                unfinished[kind] = slices
            end = min(values.numel(), begin + most - at)
            slices.append(Slice(parameter, begin, end, at))
            begin = end
    for kind, slices in unfinished.items():
        yield Chunk(group, *kind, slices)


def _aligned(elements: int) -> int:
    return -(-elements // _GRAIN) * _GRAIN
