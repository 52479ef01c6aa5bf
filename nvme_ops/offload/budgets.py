"""``Budgets``: how much memory of which kind a capability may use, from what its caller says or the machine has."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from nvme_ops.base.limits import free_memory, host_bytes, less_an_eighth
from nvme_ops.base.text import bytes_of
from nvme_ops.memory.tier import PooledTier
from nvme_ops.offload.memory import Memory, budget_of

_AUTO = "auto"

Size = int | str | None


class Budgets(NamedTuple):
    """The memory of one user.

    Attributes:
        own: bytes where it computes, or what it shares with others.
        given: host memory beside that of an accelerator, as its caller says; 0 where it computes on the CPU.
        shared: is that memory, if others use it, too.
        name: of the argument that says what there is where it computes.
    """

    own: int | Memory
    given: Size = 0
    shared: PooledTier | None = None
    name: str = "device_budget"

    @property
    def nbytes(self) -> int:
        """Bytes where it computes."""
        return self.own if isinstance(self.own, int) else self.own.nbytes

    def host(self, there: int = 0) -> int:
        """Returns the bytes of host memory beside that of an accelerator; see ``host_bytes``."""
        return self.shared.nbytes if self.shared is not None else host_bytes(self.given, there)

    def host_tier(self) -> PooledTier:
        """Returns the host memory beside that of an accelerator."""
        return self.shared or PooledTier(self.host())


def budgets_of(
    device: torch.device,
    memory_budget: Size,
    memory: Memory | None,
    device_budget: Size,
    host_budget: Size,
    max_memory: Mapping[int | str, int | str] | None = None,
    *,
    default: str | None = None,
    least: int = 1,
) -> Budgets:
    """Returns the budgets of a user that computes on ``device``.

    Args:
        device: where it computes.
        memory_budget: of where it computes.
        memory: in place of that, one that is shared with others.
        device_budget: of an accelerator.
        host_budget: beside that of an accelerator, ``"auto"`` when None; on the CPU that of where it computes.
        max_memory: both in one, as accelerate takes them: ``{0: "20GiB", "cpu": "60GiB"}``.
        default: of where it computes, when nothing is given; when None ``"auto"`` on an accelerator, none on the CPU.
        least: bytes of where it computes.

    Raises:
        TypeError: what there is to compute in is said twice, or not at all.
        ValueError: a size is none, is too small, or is that of another device.
    """
    if max_memory is not None:
        if any(given is not None for given in (memory_budget, device_budget, host_budget)):
            raise ValueError("max_memory= says what the budgets would: give one or the other")
        device_budget, host_budget = _of_max_memory(device, max_memory)
    if device.type == "cpu":
        if device_budget is not None:
            raise ValueError("device_budget= is memory of an accelerator, and this computes on the CPU: host_budget=")
        if host_budget is not None and memory_budget is not None:
            raise TypeError("host_budget= and memory_budget= are the same on the CPU: give one of them")
        name, given = ("memory_budget", memory_budget) if host_budget is None else ("host_budget", host_budget)
        if given == _AUTO:
            given = less_an_eighth(free_memory())
        return Budgets(budget_of(given, memory, default, least, name), name=name)
    if device_budget is not None and memory_budget is not None:
        raise TypeError("device_budget= and memory_budget= are the same on an accelerator: give one of them")
    name, given = ("memory_budget", memory_budget) if memory_budget is not None else ("device_budget", device_budget)
    if memory is None and (given == _AUTO or (given is None and default is None)):
        given = _free_on(device)
    own = budget_of(given, memory, default, least, name)
    if isinstance(own, Memory) and own.host is not None:
        if host_budget is not None:
            raise TypeError("memory= has host memory already: give host_budget= or Memory(host=)")
        return Budgets(own, shared=own.host, name=name)
    if host_budget not in (None, _AUTO):
        host_budget = bytes_of("host_budget", host_budget, least=0)
    return Budgets(own, host_budget, name=name)


def where_it_computes() -> torch.device:
    """Returns the accelerator that torch uses, or the CPU where there is none."""
    accelerator: Any = getattr(torch, "accelerator", None)  # since torch 2.6
    if accelerator is not None:
        return accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def says_what_is_free(device: torch.device) -> bool:
    """Returns whether there is an "auto" of an accelerator's memory."""
    return hasattr(torch.get_device_module(device), "mem_get_info")


def _free_on(device: torch.device) -> int:
    """Returns the bytes that are free on an accelerator, less an eighth for inputs, results and others."""
    if not says_what_is_free(device):
        raise TypeError(f"{device} does not say how much of its memory is free: give device_budget=")
    module: Any = torch.get_device_module(device)
    return less_an_eighth(int(module.mem_get_info(device)[0]))


def _of_max_memory(device: torch.device, max_memory: Mapping[int | str, int | str]) -> tuple[Size, Size]:
    """Returns the budgets of the device and of the host."""
    own, host = None, None
    for key, size in max_memory.items():
        place = f"{'cuda' if device.type == 'cpu' else device.type}:{key}" if isinstance(key, int) else key
        if place == "cpu":
            host = size
        elif place != "disk" and torch.device(place) == device:
            own = size
        elif place != "disk" and size not in (0, "0"):
            raise ValueError(f"max_memory has memory of {place}, but this computes on {device} alone")
    return own, host if host is not None or device.type == "cpu" else 0
