"""``ParameterStates``: what ``optimizer.state`` has for a parameter, while the tensors are on storage."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

import torch

from nvme_ops.offload.optimizer.chunks import Chunk, Slice, Version, cloned, flat, sharded
from nvme_ops.offload.optimizer.states import States
from nvme_ops.offload.residency.entry import tensors_over


class ParameterStates(MutableMapping[str, Any]):
    """The current states of a parameter, by name, to be read, changed and deleted as in a dict.

    A tensor is read from storage when it is looked up, which names are not. As with torch's optimizers it is the one
    that a step updates, for as long as the program refers to it. What was looked up or set is compared with what is on
    storage before the next step, and written there if it differs.

    Args:
        states: has the chunks.
        parameter: one that has states.
        require_idle: raises an error if nothing can be read now; weak, so that the optimizer can be freed.
        given: tensors with the current values, to which the program may refer.
    """

    def __init__(
        self,
        states: States,
        parameter: torch.Tensor,
        require_idle: weakref.WeakMethod[Callable[[], None]],
        given: Mapping[str, Any],
    ) -> None:
        self.parameter = parameter
        self.states: States | None = states  #: None: they were taken out, and all is in _values, as in a dict
        self._require_idle = require_idle
        self._values: dict[str, Any] = dict(given)  # looked up or set
        self._versions: dict[str, int] = {}  # of tensors, when they were looked up
        self._deleted: set[str] = set()
        self._of: list[Version] = []  # what the above belongs to

    def __getitem__(self, name: str) -> Any:
        if name not in self._names():
            raise KeyError(name)
        if self.states is not None and name not in self._values:
            self._values[name] = self._read(self.states, name)
            self._note(name)
        return self._values[name]

    def __setitem__(self, name: str, value: Any) -> None:
        self._names()
        self._values[name] = value
        self._deleted.discard(name)
        self._versions.pop(name, None)

    def __delitem__(self, name: str) -> None:
        if name not in self._names():
            raise KeyError(name)
        self._values.pop(name, None)
        self._deleted.add(name)

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

    def may_differ(self) -> bool:
        """Returns whether the program may have changed something."""
        if self._values or self._deleted:
            self._names()
        return bool(self._values or self._deleted)

    def differs(self) -> bool:
        """Returns whether the program has changed something, other than through ``data``; also within a step."""
        return bool(self._deleted) or any(
            _version_of(value) != self._versions.get(name) for name, value in self._values.items()
        )

    def detach(self, states: Mapping[str, Any] | None = None) -> None:
        """Becomes a dict in memory: of ``states``, or those on storage, with what the program has changed."""
        if self.states is not None:
            names = list(self._names())
            values = {name: self[name] if states is None else self._values.get(name, states[name]) for name in names}
            self._values, self._deleted, self.states = values, set(), None

    @torch.no_grad()
    def renew(self, anew: bool = False) -> None:
        """Forgets what belongs to earlier states; tensors that the program refers to get the values of a new step.

        With ``anew`` they are left alone.
        """
        if self.states is None or not (self._values or self._deleted):
            return
        values, self._values, self._deleted, self._versions = self._values, {}, set(), {}
        self._of = [self.states.current[chunk] for chunk, _ in self._parts()]
        for name in list(values):
            value = values.pop(name)
            if not anew and isinstance(value, torch.Tensor) and _is_shared(value) and name in self._stored():
                value.copy_(self._read(self.states, name))
                self._values[name] = value
                self._note(name)

    def _note(self, name: str) -> None:
        self._versions[name] = _version_of(self._values[name])

    def _parts(self) -> list[tuple[Chunk, Slice]]:
        return [] if self.states is None else self.states.division.parts.get(self.parameter, [])

    def _stored(self) -> list[str]:
        """Returns the names of the states on storage."""
        for chunk, part in self._parts():
            if self.states is not None and part in (scalars := self.states.current[chunk].scalars):
                return chunk.state_names(scalars[part])
        return []

    def _names(self) -> list[str]:
        if self.states is not None:
            now = [self.states.current[chunk] for chunk, _ in self._parts()]
            if not (self._values or self._deleted):
                self._of = now
            elif now != self._of:
                self.renew()  # a step has ended, or failed after some chunks
        names = dict.fromkeys([*self._stored(), *self._values])
        return [name for name in names if name not in self._deleted]

    def _read(self, states: States, name: str) -> Any:
        """Reads a state; an elementwise one into a new tensor in host memory, with the parameter's layout."""
        if (require_idle := self._require_idle()) is not None:
            require_idle()
        with_states = [(chunk, part) for chunk, part in self._parts() if part in states.current[chunk].scalars]
        chunk, first = with_states[0]  # a failed first step has made only some of them
        scalars = states.current[chunk].scalars[first]
        if name in scalars:
            return cloned(scalars[name])
        slices: dict[Chunk, list[Slice]] = {}
        for one, part in with_states:
            slices.setdefault(one, []).append(part)
        dtype = next(region.dtype for region in chunk.regions if region.name == name)
        whole = torch.empty_strided(*first.layout, dtype=dtype).zero_()  # no view: see _is_shared
        elements = flat(whole)

        def take(chunk: Chunk, buffer: torch.Tensor) -> None:
            views = chunk.views(buffer)
            for part in slices[chunk]:
                chunk.expand(buffer, views, part)
                elements[part.begin : part.end].copy_(views[name][part.place])

        states.copy_out(slices, take)
        return sharded(whole, self.parameter)


def _version_of(value: Any) -> int:
    return value._version if isinstance(value, torch.Tensor) else 0


def _is_shared(tensor: torch.Tensor) -> bool:
    """Returns whether there are other references to a tensor, or to its memory, than the caller's only one."""
    return any(uses > alone for uses, alone in zip(_uses(tensor), _UNSHARED, strict=True))


def _uses(tensor: torch.Tensor) -> tuple[int, int]:
    return sys.getrefcount(tensor), 0 if hasattr(tensor, "to_local") else tensors_over(tensor)


def _uses_if_unshared() -> tuple[int, int]:
    def is_shared(tensor: torch.Tensor) -> tuple[int, int]:
        return _uses(tensor)

    alone = torch.zeros(1, device="cpu")
    return is_shared(alone)


_UNSHARED = _uses_if_unshared()
