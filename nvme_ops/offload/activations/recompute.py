"""Chooses what autograd saves but is cheaper to compute again than to move, for ``save_on_nvme(policy="auto")``.

An operation takes little time per byte if each element of its result depends on only a few elements of the input. The
result need not be saved where the input is saved anyway, such as GELU's of a linear layer's output. As much is computed
again as balances the time of computation with that of storage, what takes the least time per byte first.
"""

from __future__ import annotations

import functools
import itertools
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_unflatten

from nvme_ops.offload.activations.saved_tensors import (
    Copied,
    Kept,
    Layout,
    Saved,
    SavedValue,
    StoragePart,
    is_changed,
    kept,
    place_of,
    whole_of,
)

aten = torch.ops.aten

#: An operation and the bytes of its result: what takes the same time again.
Kind: TypeAlias = tuple[Any, int]

_ALSO = {aten.native_layer_norm.default, aten._softmax.default, aten._log_softmax.default, aten._to_copy.default}
_BOUND = 0.05  # of the time of a pass; waiting longer means that storage is what limits it


@dataclass(frozen=True)
class Away:
    """A tensor whose bytes may be saved, or computed again."""

    place: StoragePart
    whole: StoragePart
    layout: Layout
    version: int
    origin: StorageWeakRef  #: so that no other storage gets its place


@dataclass(frozen=True)
class Given:
    """A small tensor that an operation was called with. It may have a graph, so nothing in a graph may refer to this.

    It is not detached: below autograd, where operations are seen, the result would not share its version counter.
    """

    tensor: torch.Tensor
    version: int


@dataclass(frozen=True)
class Pass:
    """A forward and a backward pass that is over."""

    seconds: float  #: from the first tensor that was saved to the last that was asked for
    waited: float  #: of these, for storage
    moved: int  #: bytes written and read
    saved: int  #: bytes
    budget: int  #: bytes of these that stay in memory


@dataclass(eq=False)
class TensorRecipe:
    """An operation that made a tensor, and what it was called with, as long as that is there."""

    function: Any
    number: int
    leaves: list[Any]  #: of the arguments, tensors as ``Given`` or ``Away``
    shape: Any  #: of the arguments
    index: int | None  #: of the tensor among several results
    nbytes: int
    origin: StorageWeakRef
    version: int

    @property
    def kind(self) -> Kind:
        """The operation and its size, which determine its time."""
        return self.function, self.nbytes


@dataclass(eq=False)
class Again:
    """A tensor that is computed again when it is needed. It has no ``TensorRecipe``, whose tensors may have graphs."""

    function: Any
    leaves: list[Any]  #: of the arguments, tensors as sources
    shape: Any  #: of the arguments
    index: int | None  #: of the tensor among several results
    nbytes: int
    choice: Choice
    _last: weakref.ref[torch.Tensor] | None = None
    _version: int = 0  # of that
    _lock: threading.RLock = field(default_factory=threading.RLock)

    def value(self) -> torch.Tensor:
        """Computes the tensor unless it is still in memory. Raises what its sources raise."""
        with self._lock:
            known = self._last() if self._last is not None else None
            if known is None or is_changed(known, self._version):
                known = self._compute()
                self._last, self._version = weakref.ref(known), known._version
        self.choice.recent = known  # other users of the same tensor usually ask for it next
        return known

    @torch.no_grad()
    def _compute(self) -> torch.Tensor:
        leaves = [leaf.value() if isinstance(leaf, Kept | Copied | Saved) else leaf for leaf in self.leaves]
        args, kwargs = tree_unflatten(leaves, self.shape)
        device = next(leaf.device.type for leaf in leaves if isinstance(leaf, torch.Tensor))
        begin = time.perf_counter()
        with torch.autocast(device, enabled=False):
            made = self.function(*args, **kwargs)
        self.choice.seconds_of_pass += time.perf_counter() - begin
        self.choice.bytes_again += self.nbytes
        result: torch.Tensor = made if self.index is None else made[self.index]
        return result


class Choice(TorchDispatchMode):
    """Sees operations within the block, and chooses whose results are computed again.

    Args:
        least: smaller results, in bytes, do not count.
    """

    def __init__(self, least: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._least = max(1, least)
        self._recipes: dict[int, TensorRecipe] = {}  # by storage
        self._seconds: dict[Kind, float] = {}  # the shortest seen
        self._possible: dict[Kind, int] = {}  # how many of each there were in this pass
        self._again: frozenset[Kind] = frozenset()
        self._made: weakref.WeakValueDictionary[int, Again] = weakref.WeakValueDictionary()  # by recipe's number
        self._numbers = itertools.count()
        self._rate = 0.0  # bytes per second of storage, from passes that waited for it
        self.recent: torch.Tensor | None = None  # computed last
        self.bytes_again, self.seconds_of_pass = 0, 0.0  # computed again; the seconds in this pass
        self._bytes_of_pass = 0

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Lets compiled code run: it is seen as one operation that is not repeated."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Times operations that can be repeated, and records them."""
        kwargs = kwargs or {}
        if not is_repeatable(func):
            made = func(*args, **kwargs)
            if may_write(func):  # versions say nothing: collectives increment none, nor do writes to ``tensor.data``
                for leaf in tree_flatten((args, kwargs))[0]:
                    if isinstance(leaf, torch.Tensor) and leaf.layout == torch.strided and not leaf.is_nested:
                        self._recipes.pop(leaf.untyped_storage()._cdata, None)
            return made
        begin = time.perf_counter()
        made = func(*args, **kwargs)
        seconds = time.perf_counter() - begin
        leaves: list[Any] | None = None
        for index, tensor in enumerate(made) if isinstance(made, tuple | list) else [(None, made)]:
            if isinstance(tensor, torch.Tensor) and place_of(tensor, self._least) is not None:
                if leaves is None:
                    flat, shape = tree_flatten((args, kwargs))
                    if any(isinstance(leaf, torch.Tensor) and leaf.is_inference() for leaf in flat):
                        break  # their changes are not counted
                    leaves = [self._leaf(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in flat]
                origin = StorageWeakRef(tensor.untyped_storage())
                number, version = next(self._numbers), tensor._version
                self._note(TensorRecipe(func, number, leaves, shape, index, tensor.nbytes, origin, version), seconds)
        return made

    def __exit__(self, *about: Any) -> None:
        """Forgets what may hold parameters of a model that is gone."""
        super().__exit__(*about)  # type: ignore[no-untyped-call]
        self._recipes = {}

    def _leaf(self, tensor: torch.Tensor) -> Given | Away:
        place = place_of(tensor, self._least)
        if place is None:
            return Given(tensor, tensor._version)
        origin = StorageWeakRef(tensor.untyped_storage())
        return Away(place, whole_of(tensor), Layout.of(tensor), tensor._version, origin)

    def _note(self, recipe: TensorRecipe, seconds: float) -> None:
        if len(self._recipes) > 64:
            self._recipes = {key: known for key, known in self._recipes.copy().items() if not known.origin.expired()}
        self._recipes[recipe.origin.cdata] = recipe
        self._seconds[recipe.kind] = min(seconds, self._seconds.get(recipe.kind, seconds))

    def source_of(self, place: StoragePart, version: int, saved: Callable[[Away], SavedValue | None]) -> Again | None:
        """Returns how to compute bytes again instead of saving them; None if they are to be saved.

        Args:
            place: of the bytes.
            version: of their tensor.
            saved: returns what another tensor is saved as; None if it is not.
        """
        recipe = self._recipes.get(place.storage)
        if recipe is None or recipe.origin.expired() or recipe.version != version:
            return None
        if (known := self._made.get(recipe.number)) is not None:
            return known
        leaves = []
        for leaf in recipe.leaves:
            if isinstance(leaf, Away):
                leaf = saved(leaf) or self._made_before(leaf)
                if leaf is None:
                    return None
            elif isinstance(leaf, Given):
                if leaf.tensor._version != leaf.version:
                    return None
                leaf = kept(leaf.tensor, self._least)
            leaves.append(leaf)
        self._possible[recipe.kind] = self._possible.get(recipe.kind, 0) + 1
        if recipe.kind not in self._again:
            return None
        made = Again(recipe.function, leaves, recipe.shape, recipe.index, recipe.nbytes, self)
        self._made[recipe.number] = made
        self._bytes_of_pass += recipe.nbytes
        return made

    def _made_before(self, leaf: Away) -> SavedValue | None:
        """Returns how a tensor is computed again, if that was decided before."""
        recipe = self._recipes.get(leaf.place.storage)
        if recipe is None or recipe.version != leaf.version:
            return None
        again = self._made.get(recipe.number)
        return None if again is None else Saved(leaf.layout, again.value)

    def end_pass(self, last: Pass) -> None:
        """Chooses what the next pass computes again, from the last one."""
        waited, moved, seconds = last.waited, last.moved, last.seconds
        saved = max(0, last.saved + self._bytes_of_pass - last.budget)
        if waited > _BOUND * seconds > 0 and moved:
            rate = moved / seconds
            self._rate = (self._rate + rate) / 2 if self._rate else rate
        if self._rate and self._possible:
            computing = max(0.0, seconds - waited - self.seconds_of_pass)
            self._again = frozenset(self._balanced(computing, 2 * saved / self._rate))
        self._possible = {}
        self.seconds_of_pass, self._bytes_of_pass = 0.0, 0
        self.recent = None

    def _balanced(self, computing: float, moving: float) -> Iterator[Kind]:
        for kind in sorted(self._possible, key=lambda kind: self._seconds[kind] / kind[1]):
            count, saves = self._possible[kind], 2 * kind[1] / self._rate
            if computing >= moving or self._seconds[kind] >= saves:
                return
            computing += count * self._seconds[kind]
            moving -= count * saves
            yield kind


def may_write(function: Any) -> bool:
    """Returns whether an operation may write to its arguments: its schema says so, or is not torch's own."""
    schema = getattr(function, "_schema", None)
    return schema is None or schema.is_mutable or function.namespace not in ("aten", "prims")


@functools.cache
def is_repeatable(function: Any) -> bool:
    """Returns whether an operation has the same result each time, changes nothing, and takes little time per byte."""
    tags = getattr(function, "tags", ())
    pointwise = torch.Tag.pointwise in tags or function in _ALSO
    return pointwise and torch.Tag.nondeterministic_seeded not in tags and not function._schema.is_mutable
