"""A model whose weights are streamed: what it can do beside being the model that it was."""

from __future__ import annotations

import contextlib
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from copy import deepcopy
from typing import Any, Self

import torch

from nvme_ops.offload.source import Source, WeightFile
from nvme_ops.offload.stored import StoredTensor, Weights, stored_in
from nvme_ops.offload.window import Window, WindowStats, least_budget, read_now
from nvme_ops.text import size_words

_SMALL = 1 << 20  # bytes up to which a weight stays in memory from the start, if the budget is no less than
_SHARE = 4  # times all of those


class StreamedModel(torch.nn.Module):
    """What ``from_pretrained`` and ``stream_weights`` add to the class of a model.

    As a context manager the model is closed at the end of the block.
    """

    _nvme_window: Window
    _nvme_undo: contextlib.ExitStack

    def stats(self) -> WindowStats:
        """Return what was read of the weights, how long computation waited for them, and what they have of memory."""
        return self._nvme_window.stats()

    def close(self) -> None:
        """Ends the streaming: files are closed and memory is given back. The model cannot be used any more."""
        self._nvme_undo.close()

    def on_close(self, function: Callable[[], object]) -> None:
        """Has ``function`` called when the model is closed, before what it was told of earlier."""
        self._nvme_undo.callback(function)

    def train(self, mode: bool = True) -> Self:
        """Like ``Module.train``. Raises RuntimeError for training, which weights in files are not made for."""
        if mode:
            raise RuntimeError("weights that are streamed from storage cannot be trained: the model stays in eval mode")
        return super().train(mode)

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        """Like ``Module.requires_grad_``. Raises RuntimeError for True."""
        if requires_grad:
            raise RuntimeError("weights that are streamed from storage cannot be trained")
        return super().requires_grad_(requires_grad)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Like ``Module.state_dict``, with all weights in memory: as much of it as the whole model takes."""
        found = super().state_dict(*args, **kwargs)
        made: dict[int, torch.Tensor] = {}  # tied weights stay tied
        for name, value in found.items():
            if isinstance(value, StoredTensor):
                source = id(value.source)
                found[name] = made[source] = made[source] if source in made else value.to_memory()
        return found

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """Like ``Module.to``, for where the model is and what it has already. Raises RuntimeError for anything else."""
        device, dtype, *_ = torch._C._nn._parse_to(*args, **kwargs)
        here = {each.device for each in self.parameters()}
        if dtype not in (None, *(each.dtype for each in self.parameters())) or not here <= {device or next(iter(here))}:
            return self._apply()
        return self

    def cpu(self) -> Self:
        """Like ``Module.cpu``, where the model is there."""
        return self.to("cpu")

    def _apply(self, *_: Any, **__: Any) -> Self:
        raise RuntimeError(
            "a model whose weights are streamed cannot be moved or converted: give device= and dtype= when it is made"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.nn.Module:
        """Returns a model in memory, of the class that it had before."""
        plain = plain_class(type(self))
        made = plain.__new__(plain)
        memo[id(self)] = made
        kept = {name: value for name, value in self.__dict__.items() if not name.startswith("_nvme_")}
        made.__dict__ = deepcopy(kept, memo)
        return made

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def plain_class(streamed: type) -> type[torch.nn.Module]:
    """Returns the class that a streamed model had before."""
    found: type[torch.nn.Module] = streamed.__mro__[2]
    return found


def stream(
    model: torch.nn.Module, weights: Weights, files: Sequence[WeightFile], budget: int, device: torch.device
) -> None:
    """Opens the window of a model whose parameters and buffers are stored tensors, and changes its class.

    Small weights come into memory, where they stay. Raises ValueError for a budget that is too small.
    """
    sliced: dict[Source, int] = {}
    stored: dict[Source, list[tuple[torch.nn.Module, str, StoredTensor]]] = OrderedDict()
    for module in model.modules():
        for name, value in [*module._parameters.items(), *module._buffers.items()]:
            if (found := stored_in(value)) is not None:
                stored.setdefault(found.source, []).append((module, name, found))
                # weights of experts, of which some are used: not those of a convolution
                if found.dim() == 3 and not isinstance(module, torch.nn.modules.conv._ConvNd):
                    sliced[found.source] = found.shape[0]
    others = [source.rows(row, row + 1) for source, rows in sliced.items() for row in range(rows)]
    whole = [source for source in stored if source not in sliced]
    buffers = [source for source in whole if any(name in module._buffers for module, name, _ in stored[source])]
    weights_alone = [source for source in whole if source not in set(buffers)]
    least = least_budget([*weights_alone, *others])
    room = budget - sum(source.nbytes for source in buffers) - least
    if room < 0:
        raise ValueError(
            f"a memory_budget of {size_words(budget)} is too small for this model: at least "
            f"{size_words(budget - room)} are needed, {size_words(least)} of them for its largest weights"
        )
    small = [*buffers, *_small(weights_alone, min(room, budget // _SHARE))]
    total_small = sum(source.nbytes for source in small)
    foreseen = [source for source in whole if source not in set(small)]
    window = Window(budget - total_small, device, foreseen, others)
    try:
        for source, values in zip(small, read_now(small), strict=True):
            for module, name, value in stored[source]:
                _replace(module, name, value.computed(values.to(device)))
    except BaseException:
        window.close()
        raise
    weights.window = window
    model.eval()
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    plain = type(model)

    undo = contextlib.ExitStack()
    for file in files:
        undo.callback(file.close)
    undo.callback(window.close)
    model.__class__ = type(plain.__name__, (StreamedModel, plain), {"__module__": plain.__module__})
    model.__dict__.update(_nvme_window=window, _nvme_undo=undo)
    weakref.finalize(model, undo.close)  # of a model that nobody has closed, at the end of the program at the latest


def _small(sources: Sequence[Source], room: int) -> list[Source]:
    """Returns the smallest weights, as far as there is room for them."""
    found = []
    for source in sorted(sources, key=lambda each: each.nbytes):
        if source.nbytes > min(_SMALL, room):
            break
        found.append(source)
        room -= source.nbytes
    return found


def _replace(module: torch.nn.Module, name: str, tensor: torch.Tensor) -> None:
    there: Any = module._buffers.get(name, module._parameters.get(name))
    if hasattr(there, "_local_tensor"):  # a DTensor
        there._local_tensor = tensor
    elif name in module._buffers:
        module._buffers[name] = tensor
    else:
        module._parameters[name] = torch.nn.Parameter(tensor, False)
