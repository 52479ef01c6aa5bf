"""``Chunk``: elements of parameters whose states lie together on storage, and how parameters are divided into these."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from nvme_ops.base.settings import PAGE
from nvme_ops.io.tensors import dense_bytes, is_dense
from nvme_ops.offload.optimizer.records import scalars_from_json
from nvme_ops.offload.parameters.swapped import SwappedTensor

MASTER = "master_weights"  #: the state that has a parameter's value in float32

HALF = (torch.bfloat16, torch.float16)  #: dtypes that get master weights
#: The optimizers of torch.optim that update each element by itself, so that a part of a parameter can be updated.
ELEMENTWISE = ("Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD")

_MASTER_BYTES = torch.float32.itemsize
_GRAIN = 64  # elements to which slices in a chunk are aligned: 64 bytes or a multiple, for any dtype


class Region(NamedTuple):
    """A state with one element for each element of a parameter."""

    name: str
    dtype: torch.dtype


def regions_of(
    optimizer: Callable[..., torch.optim.Optimizer], options: Mapping[str, Any], parameter: torch.Tensor, master: bool
) -> tuple[Region, ...]:
    """Returns the elementwise states that an optimizer keeps of a parameter, found by a step over three elements.

    Args:
        optimizer: a class of ``torch.optim``.
        options: those of the parameter's group.
        parameter: has the dtype and device.
        master: whether the optimizer updates a copy in float32, which is then the first state.
    """
    dtype = torch.float32 if master else parameter.dtype
    sample = torch.zeros(3, dtype=dtype, device=parameter.device)
    sample.grad = torch.ones_like(sample)
    inner = optimizer([{**options_of(options), "params": [sample]}])
    inner.step()
    states = ((name, state) for name, state in inner.state[sample].items() if isinstance(state, torch.Tensor))
    regions = (Region(name, state.dtype) for name, state in states if state.shape == sample.shape)
    return (Region(MASTER, torch.float32), *regions) if master else tuple(regions)


def options_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a copy of a group's options, without its parameters."""
    return {name: copy.copy(value) for name, value in group.items() if name != "params"}


def cloned(value: Any) -> Any:
    """Returns a copy of a scalar state, which an optimizer may change in place."""
    return value.clone() if isinstance(value, torch.Tensor) else value


class Loan(NamedTuple):
    """A parameter and its gradient in memory, while a chunk with them is being updated."""

    values: torch.Tensor
    gradient: torch.Tensor | None


class MemoryLayout(NamedTuple):
    """The order in which a dense parameter's elements lie in memory."""

    shape: torch.Size
    stride: tuple[int, ...]


@dataclass(eq=False)
class Slice:
    """Elements ``begin`` to ``end`` of a parameter, in the order of ``layout``; ``at`` is their start in the chunk."""

    parameter: torch.Tensor
    layout: MemoryLayout  #: of the parameter when the chunk was made
    begin: int
    end: int
    at: int
    loan: Loan | None = None  #: set while parameter or gradient, on storage themselves, are lent
    place: slice = field(init=False)  #: where the elements are in the chunk

    def __post_init__(self) -> None:
        self.place = slice(self.at, self.at + self.end - self.begin)

    def values(self) -> torch.Tensor:
        """Returns these elements of the parameter, lent or in memory, as a view of one dimension."""
        return self.part_of(self.parameter if self.loan is None else self.loan.values, copies=False)

    def part_of(self, tensor: torch.Tensor, copies: bool = True) -> torch.Tensor:
        """Returns these elements of the parameter, its gradient or a state, as a view of one dimension.

        If its strides are not those of ``layout``, the view is one of a copy. Raises RuntimeError for another shape,
        and without ``copies`` for other strides.
        """
        tensor = local(tensor)
        if copies and tensor.shape == self.layout.shape and tensor.stride() != self.layout.stride:
            tensor = torch.empty_strided(*self.layout, dtype=tensor.dtype, device=tensor.device).copy_(tensor)
        if (tensor.shape, tensor.stride()) != self.layout:
            raise RuntimeError(
                f"a parameter of shape {tuple(self.layout.shape)} got another shape or memory layout during a step of "
                "NvmeOptimizer: change it before the backward pass or after step()"
            )
        return tensor.as_strided((self.end - self.begin,), (1,), tensor.storage_offset() + self.begin)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the local shard of a DTensor, and other tensors as they are; detached."""
    tensor = tensor.detach()
    to_local: Any = getattr(tensor, "to_local", None)
    return tensor if to_local is None else to_local()


def outline(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a tensor with shape, strides and dtype of ``local(tensor)``, without fetching values from storage."""
    if isinstance(tensor, SwappedTensor):
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
    return local(tensor)


@contextlib.contextmanager
def _loan_of(parameter: torch.Tensor) -> Iterator[Loan]:
    """Yields a parameter and its gradient in memory, the parameter to be changed if there is a gradient."""
    with contextlib.ExitStack() as uses:
        gradient = values = None
        try:
            gradient = parameter.grad
            if isinstance(gradient, SwappedTensor):
                gradient = uses.enter_context(gradient.lent())
            if isinstance(parameter, SwappedTensor):
                values = uses.enter_context(parameter.lent(change=gradient is not None))
                torch.autograd.graph.increment_version(parameter)
            else:
                values = local(parameter)
            yield Loan(values, gradient)
        finally:
            gradient = values = None  # the traceback of a failure would keep their memory


def sharded(part: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Undoes ``local``: returns the DTensor, sharded as ``like``, whose local shard is ``part``; else ``part``."""
    if not hasattr(like, "to_local"):
        return part
    from torch.distributed.tensor import DTensor  # importing it takes a while

    dtensor: Any = like
    return DTensor.from_local(
        part, dtensor.device_mesh, dtensor.placements, run_check=False, shape=dtensor.shape, stride=dtensor.stride()
    )


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a dense tensor's elements in the order of its memory, as a view of one dimension."""
    return tensor.view(-1) if tensor.is_contiguous() else dense_bytes(tensor).view(tensor.dtype)


IN_MEMORY = -1  #: the slot of states that are not in the store


@dataclass(frozen=True, eq=False)
class Version:
    """The states of a chunk after one step; ``States.current`` has the valid version."""

    slot: int | None = None  #: the place in the store, or ``IN_MEMORY``; None: there are no elementwise states
    #: By slice: the states that are not elementwise, such as ``step``, and None for an elementwise state that the slice
    #: does not have yet. Slices without any states are missing.
    scalars: dict[Slice, dict[str, Any]] = field(default_factory=dict)
    attempt: int = -1  #: the ``States.attempt`` that made it


NOTHING = Version()


@dataclass(eq=False)
class Chunk:
    """Slices of parameters of one group, dtype and device, whose states lie together in the store.

    In a buffer, the states are followed by a backup: the elements of the parameters before the step.
    """

    group: int
    regions: tuple[Region, ...]
    dtype: torch.dtype
    device: torch.device
    slices: Sequence[Slice]
    number: int = -1  #: among all chunks
    elements: int = field(init=False)  #: including gaps between the slices
    nbytes: int = field(init=False)  #: of the states on storage, in whole pages
    updated: list[Slice] = field(default_factory=list)  #: whose parameters are in the backup, and may be new
    scalars: dict[Slice, dict[str, Any]] = field(default_factory=dict)  #: of the version in preparation
    pending: Version | None = None  #: the version that is being written
    stays: bool = False  #: whether its states are to stay in memory
    memory: torch.Tensor | None = None  #: has the new states of one that stays; else the buffer has them

    def __post_init__(self) -> None:
        self.elements = _aligned(self.slices[-1].place.stop)
        size = sum(self.elements * region.dtype.itemsize for region in self.regions)
        self.nbytes = -(-size // PAGE) * PAGE
        self._end_of_backup = self.nbytes + self.elements * self.dtype.itemsize
        #: Shared by all chunks that torch's optimizer could update in one call.
        self.kind = (self.group, self.dtype, self.device)
        #: Whether a copy of the parameters in float32 is among the states.
        self.has_master = bool(self.regions) and self.regions[0].name == MASTER
        #: The states that the optimizer itself keeps of each element.
        self.names = [region.name for region in self.regions if region.name != MASTER]

    def reset(self) -> None:
        """Forgets the last pass over the chunks."""
        self.updated, self.scalars, self.pending, self.memory = [], {}, None, None

    def borrowed(self, slices: Sequence[Slice] | None = None) -> Generator[list[Slice], None, None]:
        """Yields slices with parameters and gradients in memory, to be changed: all of the chunk, or those given.

        Those in memory anyway come together; each on storage comes by itself. Close or exhaust the generator.
        """
        lent: list[Slice] = []
        in_memory: list[Slice] = []
        for part in self.slices if slices is None else slices:
            on_storage = isinstance(part.parameter, SwappedTensor) or isinstance(part.parameter.grad, SwappedTensor)
            (lent if on_storage else in_memory).append(part)
        if in_memory:
            yield in_memory
        for part in lent:
            with _loan_of(part.parameter) as part.loan:
                try:
                    yield [part]
                finally:
                    part.loan = None

    def views(self, memory: torch.Tensor) -> dict[str, torch.Tensor]:
        """Returns the elements of each state, by name, as views of the chunk's bytes in ``memory``."""
        views, begin = {}, 0
        for name, dtype in self.regions:
            end = begin + self.elements * dtype.itemsize
            views[name] = memory[begin:end].view(dtype)
            begin = end
        return views

    def scalars_in(self, described: Sequence[dict[str, Any] | None]) -> dict[Slice, dict[str, Any]]:
        """Returns the scalar states of each slice in a record. Raises ValueError if they are of other slices."""
        slices = self.slices
        if len(described) < len(slices):  # earlier versions left out parameters without elements
            slices = [part for part in slices if part.begin < part.end]
        scalars = {part: scalars_from_json(one, self.device) for part, one in zip(slices, described, strict=True)}
        return {part: one for part, one in scalars.items() if one is not None}

    def state_names(self, scalars: Mapping[str, Any]) -> list[str]:
        """Returns the names of a slice's states, in the order of a state dict, given those in ``Version.scalars``."""
        regions = [region.name for region in self.regions if scalars.get(region.name, region) is not None]
        return [*(name for name in scalars if name not in self.names), *regions]

    def backup(self, buffer: torch.Tensor) -> torch.Tensor:
        """Returns the place in a buffer, behind the states, for the elements of the parameters before the step."""
        return buffer[self.nbytes : self._end_of_backup].view(self.dtype)

    def gradients(self, buffer: torch.Tensor) -> torch.Tensor:
        """Returns the place in a buffer, behind the backup, for gradients in float32, which master weights need."""
        return buffer[self._end_of_backup : self._end_of_backup + self.elements * _MASTER_BYTES].view(torch.float32)


@dataclass(frozen=True, eq=False)
class Division:
    """How the parameters in the groups of an optimizer are divided into chunks."""

    chunks: list[Chunk] = field(default_factory=list)
    identities: list[list[Any]] = field(default_factory=list)  #: by group, of its parameters and their layouts
    made: Any = None  #: describes optimizer, parameters and states, in JSON

    @functools.cached_property
    def parts(self) -> dict[torch.Tensor, list[tuple[Chunk, Slice]]]:
        """The slices of each parameter, with their chunks."""
        parts: dict[torch.Tensor, list[tuple[Chunk, Slice]]] = {}
        for chunk in self.chunks:
            for part in chunk.slices:
                parts.setdefault(part.parameter, []).append((chunk, part))
        return parts


def key_of(number: int, slot: int) -> str:
    """Returns the key in the store of a place of the chunk of this number."""
    return f"{number}/{slot}"


def divide(
    parameters: Mapping[torch.Tensor, tuple[MemoryLayout, tuple[Region, ...]]], group: int, buffer: int
) -> Iterator[Chunk]:
    """Yields the chunks of a group of parameters, each of which fits with its backup into ``buffer`` bytes.

    The caller numbers them. Raises ValueError for a parameter with gaps in its memory.
    """
    unfinished: dict[tuple[Any, ...], list[Slice]] = {}
    for parameter, (layout, regions) in parameters.items():
        values = outline(parameter)
        if not is_dense(values):
            raise ValueError(
                f"a parameter of shape {tuple(parameter.shape)} has gaps in its memory: give it its data.contiguous()"
            )
        kind = (regions, values.dtype, parameter.device)
        per_element = sum(region.dtype.itemsize for region in regions) + values.dtype.itemsize
        if regions and regions[0].name == MASTER:
            per_element += _MASTER_BYTES
        most = (buffer - PAGE) // per_element // _GRAIN * _GRAIN
        begin, is_divided = 0, False
        while not is_divided:  # one without elements, such as an empty shard, has states, too
            slices = unfinished.setdefault(kind, [])
            at = _aligned(slices[-1].place.stop) if slices else 0
            if at >= most and values.numel():
                yield Chunk(group, *kind, slices)
                slices, at = [], 0
                unfinished[kind] = slices
            end = min(values.numel(), begin + most - at)
            slices.append(Slice(parameter, layout, begin, end, at))
            begin, is_divided = end, end == values.numel()
    for kind, slices in unfinished.items():
        yield Chunk(group, *kind, slices)


def _aligned(elements: int) -> int:
    return -(-elements // _GRAIN) * _GRAIN
