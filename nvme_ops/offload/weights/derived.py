"""Modules whose class is, while their weights are streamed, one derived from their own."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from types import MethodType
from typing import Any

import torch


class OfModule:
    """A method by which the modules of a derived class compute, and which the class itself does not show.

    Who asks the class gets the function of the class before, as in memory: that may be called later, when the class
    before has been patched, or be assigned to that class to end a patch. For the same reason a module's method is given
    what the method of the class before is when it is looked up, as its first argument.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    def __set_name__(self, owner: type, name: str) -> None:
        self.owner, self.name = owner, name

    def __get__(self, module: Any, owner: type) -> Any:
        before = getattr(super(self.owner, owner if module is None else module), self.name)
        return before if module is None else MethodType(partial(self.function, before), module)


class Derived(torch.nn.Module):
    """What is the same for all: copies that are in memory are of the class before.

    Attributes of the derived class begin with ``_nvme_``. A copy has none, but may still be of a class derived from it.
    """

    def __reduce_ex__(self, _: Any) -> Any:
        """Pickles a module in memory, of the class that it had before."""
        plain = plain_class(type(self))
        module = plain.__new__(plain)
        module.__dict__ = self._in_memory()
        reduce = object.__reduce_ex__ if isinstance(module, Derived) else type(module).__reduce_ex__
        return reduce(module, 1)  # protocol 2 insists on the class of this one

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.nn.Module:
        """Returns a module in memory, of the class that it had before."""
        plain = plain_class(type(self))
        made = plain.__new__(plain)
        memo[id(self)] = made
        made.__dict__ = deepcopy(self._in_memory(), memo)
        return made

    def _in_memory(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if not name.startswith("_nvme_")}


def plain_class(derived: type) -> type[torch.nn.Module]:
    """Returns the class that a module had before; one that the user, or torch, has derived since is its own."""
    current: Any = derived
    while "_nvme_plain" in vars(current):
        current = current._nvme_plain
    plain: type[torch.nn.Module] = current
    return plain


#: By the class before and the base; no strong reference: torch's class of a parametrized module has that module.
_classes: weakref.WeakKeyDictionary[type, weakref.WeakValueDictionary[type, type]] = weakref.WeakKeyDictionary()


def derive(module: torch.nn.Module, base: type[Derived], **attributes: object) -> None:
    """Gives a module a class derived from ``base`` and its own, always the same one, which ``torch.func`` relies on."""
    plain = type(module)
    known = _classes.setdefault(plain, weakref.WeakValueDictionary())
    derived = known.get(base)
    if derived is None:
        names = {"__module__": plain.__module__, "__qualname__": plain.__qualname__, "_nvme_plain": plain}
        known[base] = derived = type(plain.__name__, (base, plain), names)
    module.__class__ = derived
    module.__dict__.update(attributes)
