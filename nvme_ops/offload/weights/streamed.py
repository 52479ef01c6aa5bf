"""A model whose weights are streamed: its class, the opening of its window, and conversions that it refuses."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Container, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_map

from nvme_ops.base.lifetime import Closing
from nvme_ops.base.patches import Patch
from nvme_ops.base.settings import PAGE
from nvme_ops.base.text import least_words, size_words
from nvme_ops.io.file import shared_handle
from nvme_ops.lazy.offloaded import OffloadedTensor
from nvme_ops.memory.tier import PooledTier, in_pages, tier_on
from nvme_ops.offload.budgets import Budgets
from nvme_ops.offload.experts.expert import experts_of
from nvme_ops.offload.experts.experts import Experts, handle_in_order
from nvme_ops.offload.experts.host_computing import HostComputing
from nvme_ops.offload.experts.host_experts import HostExperts
from nvme_ops.offload.residency.account import Account, rate_of_files
from nvme_ops.offload.residency.host_copies import HostCopies
from nvme_ops.offload.residency.placement import kept_from_the_start, placement, share_of_experts
from nvme_ops.offload.residency.residency import Residency
from nvme_ops.offload.residency.shared_files import shared_files
from nvme_ops.offload.weights.derived import Derived, derive
from nvme_ops.offload.weights.routing import groups_of, is_packed, route
from nvme_ops.offload.weights.stored import StoredTensor, Weights, stored_in
from nvme_ops.offload.weights.window import Window, WindowStats, least_budget, memory_for, read_now
from nvme_ops.storage.page_cache import PageCache
from nvme_ops.storage.source import Source, WeightFile

if TYPE_CHECKING:
    from typing_extensions import Self

_SHARE = 4  # such weights take at most budget / _SHARE bytes


class StreamedModel(Closing, Derived):
    """The methods that ``from_pretrained`` and ``stream_weights`` add to the class of a model.

    As a context manager, the model is closed at the end of the block.
    """

    _nvme_weights: Weights
    _nvme_window: Window
    _nvme_account: Account
    _nvme_undo: contextlib.ExitStack

    def stats(self) -> WindowStats:
        """Returns what was read of the weights, how long computation waited for them, and their memory."""
        return self._nvme_window.stats()

    def explain(self) -> str:
        """Says what was moved and waited for since the last call or the start, and what limits.

        The first call measures the rates of storage and bus. Raises OSError if the files cannot be read.
        """
        return self._nvme_account.explain(self.stats(), self._nvme_window.share.device)

    def close(self) -> None:
        """Ends the streaming: closes the files and frees the memory. The model cannot be used any more."""
        self._nvme_undo.close()

    def on_close(self, function: Callable[[], object]) -> None:
        """Calls ``function`` when the model is closed, before functions given earlier."""
        self._nvme_undo.callback(function)

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        """Like ``Module.requires_grad_``. Raises RuntimeError for True."""
        if requires_grad:
            raise RuntimeError("weights that are streamed from storage cannot be trained")
        return super().requires_grad_(requires_grad)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Like ``Module.state_dict``, with all weights in memory: this takes as much as the whole model.

        If the model is trained, or is a part of another, each weight comes into memory when its values are first used:
        saving an adapter picks a few tensors out of the whole state dict.
        """
        state = super().state_dict(*args, **kwargs)
        lazily = args or kwargs.get("destination") is not None or any(leaf.requires_grad for leaf in self.parameters())
        made: dict[Any, torch.Tensor] = {}  # tied weights stay tied
        for name, value in state.items():
            if isinstance(value, StoredTensor) and not isinstance(value, _Entry):
                if (place := value.place) not in made:
                    made[place] = _Entry.of(value) if lazily else value.to_memory()
                state[name] = made[place]
        return state

    def _load_from_state_dict(
        self, state_dict: Mapping[str, Any], prefix: str, local_metadata: Mapping[str, Any], *args: Any
    ) -> None:
        """Raises RuntimeError before anything is copied; ``assign=True`` is allowed, as it copies nothing."""
        stored = [name for name in self._stored_names() if prefix + name in state_dict]
        if stored and not local_metadata.get("assign_to_params_buffers"):
            raise RuntimeError(
                f"weights that are streamed from storage cannot be loaded into ({prefix}{stored[0]}): load them into "
                "the model before it is streamed"
            )
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *args)

    @property
    def _ddp_params_and_buffers_to_ignore(self) -> list[str]:
        """Names, here and in a model of peft, that ``DistributedDataParallel`` must not broadcast at its start."""
        names = [prefix + name for prefix in ("", "base_model.", "base_model.model.") for name in self._stored_names()]
        return [*names, *self.__dict__.get("_nvme_ignored", ())]

    @_ddp_params_and_buffers_to_ignore.setter
    def _ddp_params_and_buffers_to_ignore(self, names: Sequence[str]) -> None:
        self.__dict__["_nvme_ignored"] = list(names)

    def _stored_names(self) -> list[str]:
        named = [*self.named_parameters(remove_duplicate=False), *self.named_buffers(remove_duplicate=False)]
        return [name for name, value in named if stored_in(value) is not None]

    def __copy__(self) -> Self:
        """Returns another model with the same weights, usable until one of the two is closed."""
        made = type(self).__new__(type(self))
        made.__dict__ = self.__dict__.copy()
        return made


if TYPE_CHECKING:

    class Streamed(StreamedModel, Any):  # type: ignore[misc]  # Any is meant
        """A streamed model as the caller knows it: with these methods, and accepted as the model that was given.

        It is a ``StreamedModel`` and its class before; Python has no type for both.
        """

        _nvme_window: Any

        def __getattr__(self, name: str) -> Any: ...  # those of the class before


class _Entry(StoredTensor):
    """A weight in a state dict: it comes into memory when its values are first needed, and stays there."""

    _made: torch.Tensor | None = None

    @staticmethod
    def of(tensor: StoredTensor) -> _Entry:
        """Returns an entry for a weight."""
        same = (tensor._weights, tensor.source, tensor._converted, tensor.device, tensor._stored_as)
        return _Entry(*same, tensor._outline, tensor._steps)

    _lend_together = OffloadedTensor._lend_together  # they have memory of their own

    def to_memory(self) -> torch.Tensor:
        """Returns the values, the same tensor each time."""
        if self._made is None:
            with torch._C.DisableTorchFunctionSubclass():
                self._made = super().to_memory()
        return self._made

    def in_window(self, stored: torch.Tensor | None = None) -> torch.Tensor:
        """Returns the same."""
        del stored
        return self.to_memory()

    def untyped_storage(self) -> torch.UntypedStorage:  # type: ignore[override]  # others refuse
        """Returns the storage of the values, by which ``save_pretrained`` finds tied weights."""
        return self.to_memory().untyped_storage()

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickles the values, so that all tensors that share their memory are pickled once."""
        return self.to_memory().__reduce_ex__(protocol)

    @classmethod
    def __torch_function__(  # type: ignore[override]  # see StoredTensor
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func not in _WITHOUT_VALUES:
            args, kwargs = tree_map(_values_of, (tuple(args), dict(kwargs or {})))
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


def _values_of(value: Any) -> Any:
    return value.to_memory() if isinstance(value, _Entry) else value


#: Properties and methods that need no values of an entry.
_WITHOUT_VALUES = {
    *(getattr(torch.Tensor, name).__get__ for name in ("shape", "dtype", "device", "layout", "ndim", "nbytes")),
    *(getattr(torch.Tensor, name).__get__ for name in ("itemsize", "requires_grad", "is_meta", "is_cuda", "is_sparse")),
    *(getattr(torch.Tensor, name) for name in ("size", "dim", "numel", "nelement", "element_size", "is_contiguous")),
    *(getattr(torch.Tensor, name) for name in ("is_floating_point", "is_complex", "stride", "__len__")),
}  # fmt: skip


def places_of(
    model: torch.nn.Module,
) -> tuple[dict[Source, list[tuple[torch.nn.Module, str, StoredTensor]]], dict[Source, int]]:
    """Returns the places of each stored tensor, in order, and how many experts are packed in those that have any."""
    sliced: dict[Source, int] = {}
    stored: dict[Source, list[tuple[torch.nn.Module, str, StoredTensor]]] = {}
    for module in model.modules():
        for name, value in [*module._parameters.items(), *module._buffers.items()]:
            if (tensor := stored_in(value)) is not None:
                stored.setdefault(tensor.source, []).append((module, name, tensor))
                if is_packed(module, tensor):
                    sliced[tensor.source] = tensor.shape[0]
    return stored, sliced


def stream(
    model: torch.nn.Module,
    weights: Weights,
    files: Sequence[WeightFile],
    budgets: Budgets,
    device: torch.device,
    kept: Container[int] = (),
    training: bool = False,
    compute_on_host: bool = False,
) -> None:
    """Opens the window of a model whose parameters and buffers are stored tensors, and changes its class.

    Small weights come into memory and stay there. Parameters whose id is in ``kept`` are left as they are; the others
    take no gradient, and count towards the budget of where it computes if they are in memory already. Without
    ``training`` the model is set to eval mode. With ``compute_on_host`` the CPU may compute with experts.
    Raises ValueError if the budget is too small.
    """
    memory = None if isinstance(budgets.own, int) else budgets.own
    total = budgets.nbytes
    stored, sliced = places_of(model)
    in_memory = [tensor for tensor in model.parameters() if id(tensor) not in kept and stored_in(tensor) is None]
    beside = sum(tensor.nbytes for tensor in in_memory)
    budget = total - beside
    groups = groups_of(model)
    routed = experts_of([group.experts for group in groups], device)
    parts = {source for group in groups for expert in group.experts for source in expert}
    whole = [source for source in stored if source not in sliced and source not in parts]
    buffers = [source for source in whole if any(name in module._buffers for module, name, _ in stored[source])]
    weights_alone = [source for source in whole if source not in set(buffers)]
    rows = [source.rows(row, row + 1) for source, count in sliced.items() for row in range(count)]
    unrouted = [row for row in rows if row.view(row.shape[1:]) not in parts]
    others = [*rows, *(parts & stored.keys())]
    rooms = {source: _room_to_expand(places[0][2], source in sliced) for source, places in stored.items()}
    at_once = _recurrent(stored, device)
    expanding = max([*rooms.values(), *(sum(rooms[source] for source in used) for used in at_once)], default=0)
    at_once_stored = max((sum(source.room for source in used) for used in at_once), default=0)
    least = max(least_budget([*weights_alone, *others]), at_once_stored) + expanding
    room = budget - sum(source.nbytes for source in buffers) - least
    if room < 0:
        raise ValueError(
            f"a {budgets.name} of {size_words(total)} is too small for this model: at least "
            f"{least_words(total - room)} are needed, {size_words(least)} of them for its largest weights"
        )
    at_start = kept_from_the_start([source.nbytes for source in weights_alone], min(room, budget // _SHARE))
    small = [*buffers, *(weights_alone[place] for place in at_start)]
    total_small = sum(source.nbytes for source in small)
    alone = [source for source in whole if source not in set(small)]
    left = budget - total_small - expanding
    fits = left >= sum(source.room for source in [*alone, *others])  # tables, too, whose rows are then read once
    tables = [source for source in alone if not fits and all(_is_table(module) for module, _, _ in stored[source])]
    foreseen = [source for source in alone if source not in tables]
    others += tables
    certain = max(least_budget([*alone, *unrouted]), at_once_stored)

    expert_sizes = [expert.nbytes for group in routed for expert in group]
    foreseen_size = sum(source.room for source in foreseen)
    share_for = functools.partial(share_of_experts, certain, foreseen_size, expert_sizes)
    if share := share_for(left):
        others, left = [*unrouted, *tables], left - share
        for file in files:
            if file.handle is shared_handle():
                file.handle = handle_in_order()
    host, host_experts = None, None
    shared = shared_files(files, budgets.host) if not fits and budgets.given != 0 and budgets.shared is None else None
    host_bytes = 0 if fits else budgets.host() if shared is None else shared.tier.nbytes
    if host_bytes:
        host_tier, below = budgets.shared or (PooledTier(host_bytes) if shared is None else shared.tier), host_bytes
        if share:  # what every token uses comes first
            stay = placement([(source, 1.0, source.room) for source in foreseen], left)
            below = min(below, sum(source.room for source in foreseen if source not in stay))
            computing = HostComputing() if compute_on_host else None
            in_common = shared if sum(expert_sizes) <= host_bytes - below else None
            tier_below = host_tier if in_common is shared else PooledTier(host_bytes)
            host_experts = HostExperts(device, tier_below.share(host_bytes - below), computing, in_common)
        host = HostCopies(device, host_tier.share(below), shared)
    if host is None and (not fits or memory is not None):
        cache = PageCache(sum(file.size for file in files))
        for file in files:
            file.cache = cache
    packed = {source for source in sliced if source.rows(0, 1) not in unrouted}
    nbytes = memory_for(left, [*foreseen, *others])
    undo = contextlib.ExitStack()
    if memory is None:
        residency, tier = Residency(), tier_on(device, nbytes + share)
        shares = tier.share(nbytes), tier.share(share)
    else:
        residency, shares = memory.residency, (memory.share(device), memory.share(device))
        taken = in_pages(beside + total_small + expanding)
        lent = [memory.lend(taken)] if taken else []
    experts = Experts(residency, shares[1], routed, host_experts) if share else None
    window = Window(residency, shares[0], foreseen, expanding, experts, packed, share_for, host, budgets.name)
    if memory is not None:
        smallest = max(expert_sizes, default=0) if share else 0
        window.set_needs(in_pages(certain + smallest), nbytes + share)
        memory.join(window)
        undo.callback(memory.leave, window)
        undo.callback(lent.clear)  # first, so that others get it
    for file in files:
        undo.callback(file.close)
    if host is not None:
        undo.callback(host.close)
    undo.callback(window.close)
    if experts is not None:
        undo.callback(experts.close)
    try:
        made: dict[int, torch.Tensor] = {}  # tied ones stay tied
        for source, values in zip(small, read_now(small), strict=True):
            for module, name, value in stored[source]:
                _replace(module, name, value, values.to(device), made)
        weights.window = window
        if not training:
            model.eval()
        for parameter in model.parameters():
            if id(parameter) not in kept:
                parameter.requires_grad_(False)
        if experts is not None:
            route(groups, experts)
        account = Account(rate_of_files([file.path for file in files]))
        derive(model, StreamedModel, _nvme_weights=weights, _nvme_window=window, _nvme_account=account, _nvme_undo=undo)
        undo.callback(_CONVERSIONS.take())
    except BaseException:
        undo.close()
        raise
    # if nobody has closed it: with the last of the model, its copies, its parts and its weights, at exit at the latest
    weakref.finalize(weights, undo.close)


def _recurrent(
    stored: Mapping[Source, Sequence[tuple[torch.nn.Module, str, StoredTensor]]], device: torch.device
) -> list[list[Source]]:
    """Returns the weights that one operation of a recurrent network uses: those of a layer; on accelerators, all."""
    layers: dict[tuple[torch.nn.Module, str], list[Source]] = {}
    for source, places in stored.items():
        for module, name, _ in places:
            if isinstance(module, torch.nn.RNNBase | torch.nn.modules.rnn.RNNCellBase):
                layer = name.partition("_l")[2] if device.type == "cpu" else ""  # weight_ih_l0_reverse
                layers.setdefault((module, layer), []).append(source)
    return list(layers.values())


def _is_table(module: torch.nn.Module) -> bool:
    """Returns whether a token needs one row of the module's weight."""
    return isinstance(module, torch.nn.Embedding)


def _room_to_expand(tensor: StoredTensor, is_sliced: bool) -> int:
    """Returns the bytes, in whole pages, that a weight takes beside its stored values while it is in use."""
    nbytes = tensor.nbytes_expanded // (tensor.shape[0] if is_sliced else 1)
    return -(-nbytes // PAGE) * PAGE


def _replace(
    module: torch.nn.Module, name: str, value: StoredTensor, stored: torch.Tensor, made: dict[int, torch.Tensor]
) -> None:
    """Replaces a stored tensor by one with memory of its own; ``made`` has those made before, for tied weights."""
    places: dict[str, Any] = module._buffers if name in module._buffers else module._parameters
    old = places[name]
    if id(old) not in made:
        tensor = value.expanded(stored)
        # a view would be saved with all of its storage, and torch refuses detach_() of one
        if tensor.untyped_storage().nbytes() != tensor.nbytes or tensor._is_view():
            tensor = tensor.clone()
        made[id(old)] = torch.nn.Parameter(tensor, False) if isinstance(old, torch.nn.Parameter) else tensor
    if old is not value and hasattr(old, "_local_tensor"):  # a DTensor
        old._local_tensor = made[id(old)].detach()
    else:
        places[name] = made[id(old)]


class _Checked(functools.partial[torch.Tensor]):
    """A function given to ``Module._apply`` that is known to leave streamed tensors as they are."""


def _checking(original: Any) -> Callable[..., torch.nn.Module]:
    """Returns a ``Module._apply`` with which ``to`` and the like refuse streamed weights before they change anything.

    A streamed model may be a part of another, whose other parts are moved or converted first: only a method common to
    all modules can check in time. For modules without streamed weights torch's own method is called.
    """

    @functools.wraps(original)
    def apply(self: torch.nn.Module, fn: Any, recurse: bool = True) -> torch.nn.Module:
        if not isinstance(fn, _Checked):
            with torch.no_grad():
                beside = [_beside_stored(module) for module in (self.modules() if recurse else [self])]
                if any(_changes(fn, tensor) for tensors in beside for tensor in tensors):
                    raise RuntimeError(
                        "a model whose weights are streamed cannot be moved, converted or shared: give device= and "
                        "dtype= when it is made"
                    )
            fn = _Checked(fn)
        if not _beside_stored(self):
            return original(self, fn, recurse)  # type: ignore[no-any-return]
        for child in self.children() if recurse else ():
            child._apply(fn)
        return self

    return apply


_CONVERSIONS = Patch(torch.nn.Module, "_apply", _checking)  # for streamed models that are open


def _changes(function: Callable[[torch.Tensor], torch.Tensor], tensor: torch.Tensor) -> bool:
    """Returns whether a function for ``Module._apply`` would move or convert a tensor, or share its memory."""
    if stored_in(tensor) is not None:
        small = torch.empty((2,) * tensor.dim(), dtype=tensor.dtype, device=tensor.device)  # to read nothing
        if function(small) is not small or (small.device.type == "cpu" and small.is_shared()):
            return True
    return function(tensor) is not tensor


def _beside_stored(module: torch.nn.Module) -> list[torch.Tensor]:
    """Returns the own tensors of a module that has stored ones, these first; else an empty list."""
    own = [tensor for tensor in [*module._parameters.values(), *module._buffers.values()] if tensor is not None]
    stored = [tensor for tensor in own if stored_in(tensor) is not None]
    return [*stored, *(tensor for tensor in own if stored_in(tensor) is None)] if stored else []
