"""``Chunk``: elements of parameters whose states lie together on storage, and how parameters are divided into these."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, get_args

import torch

from nvme_ops.base.settings import PAGE
from nvme_ops.base.text import size_words
from nvme_ops.io.tensors import dense_bytes, is_dense
from nvme_ops.offload.optimizer.records import scalars_from_json
from nvme_ops.offload.optimizer.state_dtypes import MASTER, Randomness, Region, StatePacking
from nvme_ops.offload.parameters.swapped import SwappedTensor

HALF = (torch.bfloat16, torch.float16)  #: dtypes that get master weights
#: The optimizers of torch.optim that update each element by itself, so that a part of a parameter can be updated.
ELEMENTWISE = ("Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD")
WHOLE = ("Muon",)  #: those that update whole parameters
Chunks = Literal["elements", "parameter"]

_MASTER_BYTES = torch.float32.itemsize
_SCALARS = (bool, int, float, str, type(None))  # what records in JSON give back as it was
_GRAIN = 64  # elements to which slices in a chunk are aligned: 64 bytes or a multiple, for any dtype


def is_of_torch(optimizer: Callable[..., torch.optim.Optimizer]) -> bool:
    """Returns whether it is a class of ``torch.optim`` that is known, and not one of the user's."""
    return any(optimizer is getattr(torch.optim, name, None) for name in (*ELEMENTWISE, *WHOLE))


def require_elementwise(optimizer: type[torch.optim.Optimizer]) -> type[torch.optim.Optimizer]:
    """Returns the class. Raises TypeError unless it is one of ``ELEMENTWISE``."""
    if not any(optimizer is getattr(torch.optim, name, None) for name in ELEMENTWISE):
        if isinstance(optimizer, torch.optim.Optimizer):
            name = type(optimizer).__name__
            raise TypeError(
                f"an optimizer was given, not its class: NvmeOptimizer(params, torch.optim.{name}, folder, ...)"
            )
        name = getattr(optimizer, "__qualname__", repr(optimizer))
        raise TypeError(f"{name} is not one of torch.optim's elementwise optimizers: {', '.join(ELEMENTWISE)}")
    return optimizer


def needs_whole(optimizer: type[torch.optim.Optimizer], chunks: Chunks | None) -> bool:
    """Returns whether an optimizer gets whole parameters.

    Raises:
        TypeError: neither ``torch.optim`` nor ``chunks`` says so.
        ValueError: ``chunks`` is none of those that there are, or says what is not so.
    """
    if chunks not in (None, *get_args(Chunks)):
        raise ValueError(f"chunks must be None, 'elements' or 'parameter', not {chunks!r}")
    if any(optimizer is getattr(torch.optim, name, None) for name in WHOLE):
        if chunks == "elements":
            raise ValueError(f"{optimizer.__name__} needs whole parameters: chunks='parameter'")
        return True
    if chunks is None or not (isinstance(optimizer, type) and issubclass(optimizer, torch.optim.Optimizer)):
        try:
            require_elementwise(optimizer)
        except TypeError as error:
            if isinstance(optimizer, type):
                note = "chunks='elements' if it updates each element by itself, else chunks='parameter'"
                raise TypeError(f"{error}. For another class give {note}") from None
            raise
    return chunks == "parameter"


def regions_of(
    optimizer: Callable[..., torch.optim.Optimizer],
    defaults: Mapping[str, Any],
    options: Mapping[str, Any],
    parameter: torch.Tensor,
    master: bool,
    whole: bool,
) -> tuple[Region, ...]:
    """Returns the elementwise states that an optimizer keeps of a parameter, found by a step over a few elements.

    Args:
        optimizer: the class.
        defaults: keywords for it.
        options: those of the parameter's group.
        parameter: has the dtype and device.
        master: whether the optimizer updates a copy in float32, which is then the first state.
        whole: whether the optimizer needs parameters of their number of dimensions.

    Raises:
        ValueError: the optimizer keeps states of other shapes, or what is not among those of a parameter.
    """
    dtype = torch.float32 if master else parameter.dtype
    shape = [min(size, 2 + dim) for dim, size in enumerate(parameter.shape)] or [1] if whole else [3]
    sample = torch.zeros(shape, dtype=dtype, device=parameter.device)
    sample.grad = torch.ones_like(sample)
    sample.requires_grad = (is_users := not is_of_torch(optimizer)) and parameter.requires_grad
    inner = optimizer([{**options_of(options), "params": [sample]}], **defaults)
    before = _kept_elsewhere(inner)
    inner.step()
    states = [(name, state) for name, state in inner.state[sample].items() if isinstance(state, torch.Tensor)]
    names = [name for name, state in states if state.shape == sample.shape]
    require_elementwise_states(optimizer, inner.state[sample], sample, names)
    changed = [name for name, value in _kept_elsewhere(inner).items() if before.get(name, inner) is not value]
    if is_users and (changed or len(inner.state) > 1):
        raise ValueError(
            f"{optimizer.__name__}.step changes {', '.join(changed) or 'a state of no parameter'}, and each chunk of "
            "parameters is updated by an optimizer of its own: what a step keeps has to be in state[parameter]"
        )
    regions = (Region(name, state.dtype) for name, state in states if name in names)
    return (Region(MASTER, torch.float32), *regions) if master else tuple(regions)


def _kept_elsewhere(inner: torch.optim.Optimizer) -> dict[str, Any]:
    """Returns the attributes of an optimizer and the options of its first group."""
    attributes = {f"self.{name}": value for name, value in vars(inner).items()}
    return {**attributes, **{f"group[{name!r}]": value for name, value in inner.param_groups[0].items()}}


def require_elementwise_states(
    optimizer: Callable[..., torch.optim.Optimizer],
    states: Mapping[str, Any],
    parameter: torch.Tensor,
    names: Collection[str],
) -> None:
    """Raises ValueError if a state is neither a scalar nor one of those that have the parameter's shape."""
    for name, state in states.items():
        is_elementwise = name in names and isinstance(state, torch.Tensor) and state.shape == parameter.shape
        if not (is_elementwise or is_scalar(state)):
            what = f"of shape {tuple(state.shape)}" if isinstance(state, torch.Tensor) else repr(type(state).__name__)
            raise ValueError(
                f"{getattr(optimizer, '__name__', optimizer)} keeps {name!r} {what} of a parameter of shape "
                f"{tuple(parameter.shape)}: there is room for states of its shape that the first step makes, "
                "and for scalars"
            )


def is_scalar(state: Any) -> bool:
    """Returns whether a state is a number, a text, None or a tensor of one real number without dimensions."""
    if isinstance(state, torch.Tensor):
        return not (state.dim() or state.is_complex())
    return isinstance(state, _SCALARS)


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


class ParameterLayout(NamedTuple):
    """How a parameter is divided: its layout, its states, its number among all, and whether it stays whole."""

    layout: MemoryLayout
    regions: tuple[Region, ...]
    number: int = 0
    whole: bool = False


@dataclass(eq=False)
class Slice:
    """Elements ``begin`` to ``end`` of a parameter, in the order of ``layout``; ``at`` is their start in the chunk."""

    parameter: torch.Tensor
    layout: MemoryLayout  #: of the parameter when the chunk was made
    begin: int
    end: int
    at: int
    number: int = 0  #: of the parameter among all
    whole: bool = False  #: whether the optimizer gets it in the parameter's shape
    loan: Loan | None = None  #: set while parameter or gradient, on storage themselves, are lent
    place: slice = field(init=False)  #: where the elements are in the chunk

    def __post_init__(self) -> None:
        self.place = slice(self.at, self.at + self.end - self.begin)

    def values(self) -> torch.Tensor:
        """Returns these elements of the parameter, lent or in memory, as a view of one dimension."""
        return self.part_of(self.parameter if self.loan is None else self.loan.values, copies=False)

    def shaped(self, elements: torch.Tensor) -> torch.Tensor:
        """Returns a view of these elements, given in one dimension, as the optimizer gets them."""
        return elements.as_strided(*self.layout, elements.storage_offset()) if self.whole else elements

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

    In a buffer, the states are followed by a backup: the elements of the parameters before the step. Then there is room
    for gradients of parameters with master weights, and for the values of states that are stored in fewer bits.
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
        self.elements = _aligned(self.slices[-1].place.stop, grain_of(self.regions))
        size = sum(region.nbytes(self.elements) for region in self.regions)
        self.nbytes = -(-size // PAGE) * PAGE
        self._end_of_backup = self.nbytes + self.elements * self.dtype.itemsize
        #: Shared by all chunks that torch's optimizer could update in one call.
        self.kind = (self.group, self.dtype, self.device)
        #: Whether a copy of the parameters in float32 is among the states.
        self.has_master = bool(self.regions) and self.regions[0].name == MASTER
        #: The states that the optimizer itself keeps of each element.
        self.names = [region.name for region in self.regions if region.name != MASTER]
        self._begin_of_values = self._end_of_backup + self.elements * _MASTER_BYTES * self.has_master
        #: Bytes that the values of states need which are stored in fewer bits.
        self.bytes_of_values = sum(region.expanded(self.elements) for region in self.regions)

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

    def views(self, memory: torch.Tensor, values: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        """Returns the elements of each state, by name, as views of ``memory``, which begins with the chunk's bytes.

        Those of states that are stored in fewer bits are views of ``values``, by default in ``memory``, a buffer; what
        they have is up to ``expand`` and ``pack``.
        """
        if values is None:
            values = self.values(memory)
        views, begin, used = {}, 0, 0
        for region in self.regions:
            size = region.expanded(self.elements)
            source, at = (values, used) if size else (memory, begin)
            length = self.elements * region.dtype.itemsize
            views[region.name] = source[at : at + length].view(region.dtype)
            begin, used = begin + region.nbytes(self.elements), used + size
        return views

    def values(self, buffer: torch.Tensor) -> torch.Tensor:
        """Returns the place in a buffer, behind all else, for the values of states that are stored in fewer bits."""
        return buffer[self._begin_of_values : self._begin_of_values + self.bytes_of_values]

    def _packed(self, memory: torch.Tensor) -> Iterator[tuple[Region, StatePacking, torch.Tensor]]:
        """Yields the states that are stored in fewer bits, and their bytes."""
        begin = 0
        for region in self.regions:
            end = begin + region.nbytes(self.elements)
            if region.packing is not None:
                yield region, region.packing, memory[begin:end]
            begin = end

    def expand(self, memory: torch.Tensor, views: Mapping[str, torch.Tensor], part: Slice) -> None:
        """Fills the views with the values of a slice's states that are stored in fewer bits."""
        if part.begin < part.end:
            for region, packing, stored in self._packed(memory):
                packing.expand(stored, part.place, views[region.name][part.place])

    def pack(
        self,
        memory: torch.Tensor,
        views: Mapping[str, torch.Tensor],
        part: Slice,
        scalars: Mapping[str, Any],
        random: Callable[[str], Randomness] | None = None,
    ) -> None:
        """Stores the values that a slice's states, but for those in ``scalars``, have in the views in fewer bits.

        Args:
            memory: begins with the chunk's bytes.
            views: of the values.
            part: the slice.
            scalars: its states that are not elementwise, and those that it does not have.
            random: returns the numbers to round a state by; None: by none, see ``StatePacking``.
        """
        if part.begin < part.end:
            for region, packing, stored in self._packed(memory):
                if region.name not in scalars:
                    numbers = None if random is None else random(region.name)
                    packing.pack(views[region.name][part.place], stored, part.place, numbers)

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
    made: Any = None  #: describes optimizer, parameters, states and how these are kept, in JSON

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


def grain_of(regions: Iterable[Region]) -> int:
    """Returns the elements to which slices in a chunk are aligned."""
    return max([_GRAIN, *(region.packing.block for region in regions if region.packing is not None)])


def in_buffer(regions: Sequence[Region], dtype: torch.dtype, elements: int) -> int:
    """Returns the bytes that a chunk of so many elements, whole grains, needs of a buffer, at most."""
    size = sum(region.nbytes(elements) + region.expanded(elements) for region in regions) + elements * dtype.itemsize
    return size + PAGE + elements * _MASTER_BYTES * (bool(regions) and regions[0].name == MASTER)


def divide(parameters: Mapping[torch.Tensor, ParameterLayout], group: int, buffer: int) -> Iterator[Chunk]:
    """Yields the chunks of a group of parameters, each of which fits with its backup into ``buffer`` bytes.

    The caller numbers them. Raises ValueError for a parameter with gaps in its memory, or one that is to be whole and
    is a shard or does not fit.
    """
    unfinished: dict[tuple[Any, ...], list[Slice]] = {}
    for parameter, (layout, regions, number, whole) in parameters.items():
        values = outline(parameter)
        if not is_dense(values):
            raise ValueError(
                f"a parameter of shape {tuple(parameter.shape)} has gaps in its memory: give it its data.contiguous()"
            )
        kind, grain = (regions, values.dtype, parameter.device), grain_of(regions)
        if whole:
            needed = whole_bytes(parameter, regions)
            if needed > buffer:
                raise ValueError(
                    f"a parameter of shape {tuple(parameter.shape)} needs a buffer of {size_words(needed)}, and "
                    f"this optimizer's have {size_words(buffer)}: give it the parameter when it is made"
                )
            yield Chunk(group, *kind, [Slice(parameter, layout, 0, values.numel(), 0, number, whole)])
            continue
        most = (buffer - PAGE) // (in_buffer(regions, values.dtype, grain) - PAGE) * grain
        begin, is_divided = 0, False
        while not is_divided:  # one without elements, such as an empty shard, has states, too
            slices = unfinished.setdefault(kind, [])
            at = _aligned(slices[-1].place.stop, grain) if slices else 0
            if at >= most and values.numel():
                yield Chunk(group, *kind, slices)
                slices, at = [], 0
                unfinished[kind] = slices
            end = min(values.numel(), begin + most - at)
            slices.append(Slice(parameter, layout, begin, end, at, number))
            begin, is_divided = end, end == values.numel()
    for kind, slices in unfinished.items():
        yield Chunk(group, *kind, slices)


def whole_bytes(parameter: torch.Tensor, regions: Sequence[Region]) -> int:
    """Returns the bytes of a buffer that a parameter needs that is to be whole. Raises ValueError for a shard."""
    if hasattr(parameter, "to_local"):
        raise ValueError(
            'chunks="parameter" needs whole parameters, and this one is a DTensor, of which a rank has a part'
        )
    return in_buffer(regions, parameter.dtype, _aligned(parameter.numel(), grain_of(regions)))


def _aligned(elements: int, grain: int) -> int:
    return -(-elements // grain) * grain
