"""Computes with packed experts in the order in which they arrive, where the result is the same."""

from __future__ import annotations

import functools
import hashlib
import inspect
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.nn.modules import module as torch_module

from nvme_ops.base.errors import free_frames
from nvme_ops.offload.experts.experts import Experts
from nvme_ops.offload.weights.stored import StoredTensor, in_window_together, select, stored_together

_AT_ONCE = 16 << 20  # bytes of results that may wait for those of experts before them
_AHEAD = 8  # experts of which any may arrive next


class _Form(NamedTuple):
    """What a function multiplies the tokens of an expert with, and applies to the products."""

    is_transposed: bool = False
    has_bias: bool = False
    has_gate: bool = True
    applies_gate: bool = True  # by the module's own method; else it is the activation of one half times the other
    has_norm: bool = False

    @property
    def up(self) -> str:
        """The name of the first weight."""
        return "gate_up_proj" if self.has_gate else "up_proj"


_PLAIN = _Form(applies_gate=False)
#: Loops over experts in the models of transformers 5.0 to 5.24, by the digest of their source.
_LOOPS = {
    "9d969acc": _PLAIN,
    "c71320fb": _PLAIN,
    "7c9bf122": _Form(),  # DeepSeek-V4
    "10286fa5": _Form(),
    "7c9e7504": _Form(is_transposed=True, applies_gate=False),  # Aria
    "1e4ff1ef": _Form(is_transposed=True, has_bias=True),  # gpt-oss
}
_MOE = "transformers.integrations.moe"


def compute(
    module: Any, forward: Callable[..., torch.Tensor], chosen: torch.Tensor, args: Sequence[Any], kwargs: Any
) -> torch.Tensor | None:
    """Computes what ``forward`` of a module does, with each expert as soon as it has arrived.

    Transformers' "eager" loops over the experts by their number and waits for each. Here those that are in memory are
    first; results are added by number. "grouped_mm" multiplies with a layer's experts at once, which would need all of
    them in memory. Here the products are one after the other, as torch makes them on the CPU.

    Returns None if the module has to compute it itself: any class may have a forward of its own, at any time, so each
    call looks at the function, and at what that calls for each expert.
    """
    if kwargs or len(args) != 3 or chosen is not args[1] or not _are_plain(module, *args):
        return None
    function = _used(module, getattr(forward, "__func__", None))
    if function is None:
        return None
    is_loop = _home(function) != _MOE
    form = _loop(function.__code__) if is_loop else _grouped(module, function)
    if form is None or not _is_known(module, form):
        return None
    numbers = chosen[0].tolist() if len(chosen) == 1 else []
    try:
        if not is_loop:
            return _compute_grouped(module, form, *args)
        if numbers and len(set(numbers)) == len(numbers):
            return _compute_one(module, form, args[0], numbers, args[2])
        return _compute(module, form, *args)
    except BaseException as error:
        free_frames(error)  # which have the values of weights
        raise


def _used(module: Any, function: Any) -> Any:
    """Returns the function by which a class computes that transformers' ``use_experts_implementation`` has changed."""
    if _home(function) != _MOE:
        return None
    names = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    if "original_forward" not in names:
        return None
    original = names["original_forward"].cell_contents
    others = names["experts_interface"].cell_contents if "experts_interface" in names else None
    others = function.__globals__["ALL_EXPERTS_FUNCTIONS"] if others is None else others
    return others.get(getattr(getattr(module, "config", None), "_experts_implementation", None), original)


@functools.lru_cache(maxsize=256)
def _loop(code: Any) -> _Form | None:
    """Returns what a loop over experts computes, if that is known."""
    try:
        source = inspect.getsource(code)
    except (OSError, TypeError):
        return None
    return _LOOPS.get(hashlib.sha256(source.strip().encode()).hexdigest()[:8])


def _grouped(module: Any, function: Any) -> _Form | None:
    """Returns what "grouped_mm" computes by the attributes that a class has, which versions without them know not."""
    if function.__name__ != "grouped_mm_experts_forward" or getattr(module, "_is_expert_parallel", False):
        return None
    named = {
        name: bool(getattr(module, name, name == "has_gate")) for name in ("is_transposed", "has_bias", "has_gate")
    }
    return _Form(**named, applies_gate=True, has_norm=getattr(module, "has_post_expert_norm", False))


def _is_known(module: Any, form: _Form) -> bool:
    """Returns whether the weights are those in the file, and what is applied to products is the same in any order."""
    weights = [module._parameters.get(name) for name in (form.up, "down_proj")]  # reading a parametrized one computes
    if torch_module._has_any_global_hook() or not all(map(_is_stored, weights)):
        return False
    applied = [module.act_fn] if hasattr(module, "act_fn") else []
    if form.has_gate and form.applies_gate:
        applied.append(module._apply_gate)
    if form.has_norm:
        applied.append(module.post_expert_norm)
    return getattr(module, "num_experts", None) == len(weights[1]) and all(map(_is_theirs, applied))


def _is_theirs(function: Any) -> bool:
    """Returns whether a function or module is one of torch or transformers that nobody watches: it keeps no count."""
    if isinstance(function, torch.nn.Module):
        if function._forward_hooks or function._forward_pre_hooks or next(function.children(), None) is not None:
            return False
        function = function.forward
    return _home(getattr(function, "__func__", function)).partition(".")[0] in ("torch", "transformers")


def _home(function: Any) -> str:
    """Returns the name of the module that a function was written in, whatever it was wrapped by."""
    return str(getattr(function, "__globals__", {}).get("__name__", ""))


def _are_plain(module: Any, hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> bool:
    """Returns whether these are tokens with their experts, without a gradient or conversion by autocast."""
    return (
        type(hidden) is type(weights) is torch.Tensor
        and hidden.dim() == 2
        and chosen.dim() == 2
        and weights.shape == chosen.shape
        and not (
            torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (hidden, weights, *module.parameters()))
        )
        and not torch.is_autocast_enabled(hidden.device.type)
    )


def _compute(
    module: Any, form: _Form, hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    result = torch.zeros_like(hidden)
    numbers = sorted(set(chosen.flatten().tolist()))
    waiting: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    left = iter(numbers)
    following = next(left)
    reordered = chosen.numel() * hidden.shape[1] * hidden.itemsize <= _AT_ONCE
    for number in _as_they_arrive(module._nvme_experts, module._nvme_group, numbers) if reordered else numbers:
        places, tokens = torch.where(chosen.T.eq(number))
        values = _one(module, form, number, hidden[tokens]) * weights[tokens, places, None]
        waiting[number] = tokens, values.to(result.dtype)
        while following in waiting:
            result.index_add_(0, *waiting.pop(following))
            following = next(left, -1)
    return result


def _compute_one(
    module: Any, form: _Form, hidden: torch.Tensor, chosen: Sequence[int], weights: torch.Tensor
) -> torch.Tensor:
    """Computes with one token, which takes half the operations."""
    made = {
        number: (_one(module, form, number, hidden) * weights[:, chosen.index(number), None]).to(hidden.dtype)
        for number in _as_they_arrive(module._nvme_experts, module._nvme_group, sorted(chosen))
    }
    result = torch.zeros_like(hidden)
    for number in sorted(chosen):
        result += made[number]
    return result


def _compute_grouped(
    module: Any, form: _Form, hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """Computes with the tokens of an expert side by side, and adds what the experts of a token have made."""
    by_expert, order = torch.sort(chosen.reshape(-1))
    inputs = hidden[order // chosen.shape[1]]
    outputs = torch.empty_like(inputs)
    numbers, counts = torch.unique_consecutive(by_expert, return_counts=True)
    ends = dict(zip(numbers.tolist(), counts.cumsum(0).tolist(), strict=True))
    begins = dict(zip(ends, [0, *ends.values()], strict=False))
    for number in _as_they_arrive(module._nvme_experts, module._nvme_group, list(ends)):
        part = slice(begins[number], ends[number])
        outputs[part] = _one(module, form, number, inputs[part])
    outputs = outputs * weights.reshape(-1)[order].unsqueeze(-1)
    by_token = torch.empty_like(outputs)
    by_token[order] = outputs
    return by_token.view(*chosen.shape, -1).sum(dim=1).to(hidden.dtype)


def _as_they_arrive(experts: Experts, group: int, numbers: Sequence[int]) -> Iterator[int]:
    """Yields the experts that are in memory first, each time one is asked for; others arrive about in order."""
    left = sorted(numbers, key=lambda number: (not experts.in_memory(group, number), experts.is_on_host(group, number)))
    while left:
        at = next((at for at, number in enumerate(left[:_AHEAD]) if experts.in_memory(group, number)), 0)
        yield left.pop(at)


def _is_stored(weight: Any) -> bool:
    """Returns whether a weight is still the packed one in the file: any can be replaced by assignment."""
    return isinstance(weight, StoredTensor) and not weight._steps


def _one(module: Any, form: _Form, number: int, values: torch.Tensor) -> torch.Tensor:
    """Returns what one expert makes of its tokens."""
    parts, experts, device = _parts(module, form, number), module._nvme_experts, values.device
    on_host = None
    if experts.host is not None and all(part.is_plain() and not part.nbytes_expanded for part in parts):
        on_host = experts.on_host([part.source for part in parts])
    stored = on_host is None and all(part.may_multiply(values) for part in parts)
    weights = stored_together(parts) if stored else in_window_together(parts) if on_host is None else iter(on_host)
    if on_host is not None:
        values = values.cpu()
    begin = time.perf_counter()
    values = _multiplied(module, form, values, next(weights), number, form.up, parts[0] if stored else None)
    if form.has_gate and form.applies_gate:
        values = module._apply_gate(values)
    elif form.has_gate:
        gate, up = values.chunk(2, dim=-1)
        values = module.act_fn(gate) * up
    else:
        values = module.act_fn(values)
    values = _multiplied(module, form, values, next(weights), number, "down_proj", parts[1] if stored else None)
    if on_host is not None:
        experts.computed(parts[0].source, len(values), time.perf_counter() - begin)
        values = values.to(device)
    return module.post_expert_norm(values) if form.has_norm else values


def _multiplied(
    module: Any,
    form: _Form,
    values: torch.Tensor,
    weight: torch.Tensor,
    number: int,
    name: str,
    part: StoredTensor | None,
) -> torch.Tensor:
    """Multiplies with a weight, or with what is stored of a part in fewer bits."""
    made = None if part is None else part.product(weight, values, form.is_transposed)
    if made is None:
        weight = weight if part is None else part.in_window(weight)
        made = values @ weight if form.is_transposed else torch.nn.functional.linear(values, weight)
    values = made
    if not form.has_bias:
        return values
    bias: torch.Tensor = getattr(module, f"{name}_bias")[number]
    return values + (bias if bias.device == values.device else bias.to(values.device))


def _parts(module: Any, form: _Form, number: int) -> list[StoredTensor]:
    """Returns the weights of one expert."""
    weights = getattr(module, form.up), module.down_proj
    parts: dict[Any, list[StoredTensor]] = module.__dict__.setdefault("_nvme_parts", {})
    key = number, *((weight._source, weight._converted) for weight in weights)  # which change where others are assigned
    if key not in parts:
        with torch.inference_mode(False):
            parts[key] = [select(weight, 0, number) for weight in weights]
    return parts[key]
