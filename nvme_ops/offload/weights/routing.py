"""Finds the experts of a model, and tells ``Experts`` what a router has chosen before it is used."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch

from nvme_ops.offload.experts.experts import Experts
from nvme_ops.offload.weights.derived import Derived, OfModule, derive
from nvme_ops.offload.weights.grouped import compute
from nvme_ops.offload.weights.stored import StoredTensor, stored_in
from nvme_ops.storage.source import Source

_LISTS = (torch.nn.ModuleList, torch.nn.ModuleDict)


class ExpertGroup(NamedTuple):
    """The experts of one layer: packed in the parameters of a module, or a list of modules."""

    module: torch.nn.Module
    experts: list[list[Source]]
    router: torch.nn.Module | None


def groups_of(model: torch.nn.Module) -> list[ExpertGroup]:
    """Returns the groups of a model whose parameters are stored tensors, in the order of its modules."""
    groups: list[ExpertGroup] = []
    parents: dict[torch.nn.Module, list[torch.nn.Module]] = {}
    for module in model.modules():
        for child in dict.fromkeys(module.children()):
            parents.setdefault(child, []).append(module)
    seen = set[Source]()
    for module in model.modules():
        parent = parents[module][-1] if module in parents else None
        is_list = isinstance(module, _LISTS)
        experts = _list_in(module, parent) if is_list else _packed_in(module)
        if experts and seen.isdisjoint(source for sources in experts for source in sources):
            seen.update(source for sources in experts for source in sources)
            router = _router_in(parent, len(experts))
            if is_list and router is not None and len(parents[router]) > 1:
                router = None  # nobody knows for which layer it computes
            groups.append(ExpertGroup(module, experts, router))
    return groups


def is_packed(module: torch.nn.Module, tensor: StoredTensor) -> bool:
    """Returns whether a parameter has the matrices of several experts, one for each index of its first dimension."""
    is_whole = isinstance(module, torch.nn.modules.conv._ConvNd | torch.nn.Bilinear)
    return tensor.has_parts() and tensor.shape[0] > 1 and tensor.numel() > 0 and not is_whole


def _packed_in(module: torch.nn.Module) -> list[list[Source]]:
    """Returns the experts that are packed in a module's own parameters; an index may be in some of these alone."""
    own = [stored_in(tensor) for tensor in [*module._parameters.values(), *module._buffers.values()]]
    packed = dict.fromkeys(tensor.source for tensor in own if tensor is not None and is_packed(module, tensor))
    count = max((pack.shape[0] for pack in packed), default=0)
    return [
        [pack.rows(row, row + 1).view(pack.shape[1:]) for pack in packed if row < pack.shape[0]] for row in range(count)
    ]


def _list_in(module: torch.nn.Module, parent: torch.nn.Module | None) -> list[list[Source]]:
    """Returns the experts that are the modules of a list beside a router; an empty list if it is none."""
    if not isinstance(module, _LISTS) or parent is None or len(module) < 2:
        return []
    children = list(module.children())
    names = [[name for name, _ in child.named_parameters()] for child in children]
    if any(of_child != names[0] for of_child in names) or not _chooses(parent, len(children)):
        return []
    stored = [[stored_in(parameter) for parameter in child.parameters()] for child in children]
    if any(part is None or is_packed(child, part) for child, own in zip(children, stored, strict=True) for part in own):
        return []
    experts = [[part.source for part in own if part is not None and part.numel()] for own in stored]
    return experts if all(experts) else []


def _chooses(parent: torch.nn.Module, count: int) -> bool:
    """Returns whether something beside a list of modules may choose among them: a matrix with a row for each."""
    own = [tensor for tensor in parent._parameters.values() if tensor is not None]
    return _router_in(parent, count) is not None or any(tensor.dim() == 2 and count in tensor.shape for tensor in own)


def _router_in(parent: torch.nn.Module | None, count: int) -> torch.nn.Module | None:
    """Returns the child of a module that chooses among ``count`` experts, if there is one."""
    for child in parent.children() if parent is not None else ():
        own = [tensor for tensor in child._parameters.values() if tensor is not None]
        if any(tensor.dim() == 2 and tensor.shape[0] == count for tensor in own) and not isinstance(
            child, torch.nn.Embedding
        ):
            return child
    return None


class RoutedExperts(Derived):
    """What is added to the class of a module with packed experts."""

    _nvme_experts: Experts
    _nvme_group: int
    _nvme_next: torch.nn.Module | None  # the router of the next layer

    @OfModule
    def forward(before: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        """Begins to read the experts that the router has chosen, and computes as before."""
        if "_nvme_experts" in self.__dict__ and not _is_traced():
            chosen = _indices([*args, *kwargs.values()], len(self._nvme_experts.groups[self._nvme_group]))
            if chosen is not None:
                self._expect(chosen, args[0] if args else None)
                result = compute(self, before, chosen, args, kwargs)
                if result is not None:
                    return result
        return before(*args, **kwargs)

    def _expect(self, chosen: torch.Tensor, hidden: Any) -> None:
        experts, group = self._nvme_experts, self._nvme_group
        per_token = chosen.shape[-1] if chosen.dim() > 1 else 1
        numbers, tokens = torch.unique(chosen, return_counts=True)
        counts = dict(zip(numbers.tolist(), tokens.tolist(), strict=True))
        experts.expect(group, counts, chosen.numel() // per_token)
        if self.training or group + 1 == len(experts.groups) or not experts.may_guess(group + 1):
            return
        guessed = None
        if self._nvme_next is not None and isinstance(hidden, torch.Tensor):
            guessed = _choice(self._nvme_next, hidden, len(experts.groups[group + 1]), per_token)
        experts.guess(group + 1, experts.following(group + 1, counts) if guessed is None else guessed)


class ListRouter(Derived):
    """What is added to the class of a router beside lists of experts."""

    _nvme_experts: Experts
    _nvme_groups: Sequence[int]

    @OfModule
    def forward(before: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        """Computes as before, and begins to read the experts that this seems to choose."""
        result = before(*args, **kwargs)
        if "_nvme_experts" in self.__dict__ and not _is_traced():
            for group in self._nvme_groups:
                self._guess(group, result)
        return result

    @torch.no_grad()  # nothing more is saved for backward than in memory
    def _guess(self, group: int, result: Any) -> None:
        experts = self._nvme_experts
        count = len(experts.groups[group])
        chosen = _chosen(result, count, experts.begin_pass(group, _tokens(result, count)))
        if chosen is not None and experts.may_guess(group):
            experts.guess(group, _most_likely_first(chosen))


def _is_traced() -> bool:
    """Returns whether tensors may have no values of their own: in ``torch.compile`` or ``torch.func``."""
    return torch.compiler.is_compiling() or torch._C._functorch.peek_interpreter_stack() is not None


@torch.no_grad()
def _choice(router: torch.nn.Module, hidden: torch.Tensor, count: int, per_token: int) -> list[int] | None:
    """Returns the experts that a router's matrix favours for these tokens; None if that is not to be seen.

    The router itself is the user's, who may count its calls, or have it change its input: it is not called.
    """
    own = [tensor for tensor in router._parameters.values() if tensor is not None]
    matrices = [tensor for tensor in own if tensor.shape == (count, *hidden.shape[-1:])]
    bias = next((tensor for tensor in own if tensor.shape == (count,)), None)
    if len(matrices) != 1 or len(own) - len(matrices) != (bias is not None):
        return None
    try:
        scores = torch.nn.functional.linear(hidden.to(matrices[0].dtype), matrices[0], bias)
        return _most_likely_first(torch.topk(scores, min(per_token, count), dim=-1).indices)
    except Exception:  # such as for weights elsewhere, or in 8 bits: a guess is worth no error
        return None


def _most_likely_first(chosen: torch.Tensor) -> list[int]:
    """Returns the experts of all tokens: the first choices of tokens, by number, then their second ones."""
    experts: dict[int, None] = {}
    for choices in zip(*chosen.reshape(-1, chosen.shape[-1]).tolist(), strict=True):
        experts.update(dict.fromkeys(sorted(set(choices))))
    return list(experts)


def _chosen(result: Any, count: int, per_token: int) -> torch.Tensor | None:
    """Returns the experts that each token uses, by what a router has returned: these, or a score for each."""
    values = result if isinstance(result, tuple | list) else [result]
    indices = _indices(values, count)
    if indices is None and per_token:
        scores = [value for value in values if _are_scores(value, count)]
        indices = torch.topk(scores[0], min(per_token, count), dim=-1).indices if scores else None
    return indices


def _are_scores(value: Any, count: int) -> bool:
    return (
        isinstance(value, torch.Tensor) and value.is_floating_point() and value.dim() > 0 and value.shape[-1] == count
    )


def _tokens(result: Any, count: int) -> int:
    """Returns for how many tokens a router has computed."""
    for value in result if isinstance(result, tuple | list) else [result]:
        if _are_scores(value, count):
            return int(value.numel() // count)
    return 0


def _indices(values: Iterable[Any], count: int) -> torch.Tensor | None:
    """Returns the tensor that says which of ``count`` experts each token uses, if there is one."""
    for value in values:
        if type(value) is torch.Tensor and value.dtype in (torch.int32, torch.int64) and value.dim() and value.numel():
            low, high = torch.stack(torch.aminmax(value)).tolist()
            if low >= 0 and high < count:
                return value
    return None


def route(groups: Sequence[ExpertGroup], experts: Experts) -> None:
    """Changes the classes of the modules that choose, or use, the experts of these groups."""
    choosing: dict[torch.nn.Module, list[int]] = {}
    for number, group in enumerate(groups):
        if not isinstance(group.module, _LISTS):
            following = groups[number + 1] if number + 1 < len(groups) else None
            is_list = following is None or isinstance(following.module, _LISTS)
            router = None if following is None or is_list else following.router
            derive(group.module, RoutedExperts, _nvme_experts=experts, _nvme_group=number, _nvme_next=router)
        elif group.router is not None:
            choosing.setdefault(group.router, []).append(number)
    for router, numbers in choosing.items():
        derive(router, ListRouter, _nvme_experts=experts, _nvme_groups=numbers)
