"""``ParameterStates``: what ``optimizer.state`` has for a parameter, while the tensors are on storage."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from nvme_ops.offload.optimizer.states import Chunk, Slice, States, cloned, outline, sharded


class ParameterStates(Mapping[str, Any]):
    """The current states of a parameter, by name. A tensor is read from storage, into a copy, when it is looked up.

    Names need no reading: these are what torch.distributed.checkpoint asks for.

    Args:
        states: has the chunks.
        parts: the parameter's slices, with their chunks.
        require_idle: raises an error if nothing can be read now; weak, so that the optimizer can be freed.
    """

    def __init__(
        self,
        states: States,
        parts: Sequence[tuple[Chunk, Slice]],
        require_idle: weakref.WeakMethod[Callable[[], None]],
    ) -> None:
        self._states, self._parts, self._require_idle = states, parts, require_idle

    def __getitem__(self, name: str) -> Any:
        if name not in self._names():
            raise KeyError(name)
        chunk, each = self._parts[0]
        scalars = self._states.current[chunk].scalars[each]
        return cloned(scalars[name]) if name in scalars else self._read(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names())

    def __len__(self) -> int:
        return len(self._names())

    def __repr__(self) -> str:
        """Returns for example ``<ParameterStates step, exp_avg, exp_avg_sq>``."""
        return f"<ParameterStates {', '.join(self)}>"

    def __reduce_ex__(self, _: Any) -> Any:
        """Copies and pickles as a dict of the states, in memory."""
        return dict, (dict(self),)

    def _names(self) -> list[str]:
        chunk, each = self._parts[0]
        scalars = self._states.current[chunk].scalars.get(each)
        return [] if scalars is None else chunk.state_names(scalars)

    def _read(self, name: str) -> torch.Tensor:
        """Reads an elementwise state into a new tensor in host memory, with the parameter's shape and strides."""
        if (require_idle := self._require_idle()) is not None:
            require_idle()
        parameter = self._parts[0][1].parameter
        whole = outline(parameter)
        slices: dict[Chunk, list[Slice]] = {}
        for chunk, each in self._parts:
            slices.setdefault(chunk, []).append(each)
        dtype = next(region.dtype for region in self._parts[0][0].regions if region.name == name)
        elements = torch.zeros(whole.numel(), dtype=dtype)  # a failed first step has made only some of them

        def take(chunk: Chunk, buffer: torch.Tensor) -> None:
            view = chunk.views(buffer)[name]
            for each in slices[chunk]:
                elements[each.begin : each.end].copy_(view[each.place])

        self._states.copy_out(slices, take)
        return sharded(elements.as_strided(whole.shape, whole.stride()), parameter)
