"""``Memory``: one budget for several users of memory; ``Buffers`` that are leased from it."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch

from nvme_ops.base.lifetime import Usable
from nvme_ops.base.limits import host_bytes
from nvme_ops.base.settings import PAGE
from nvme_ops.base.text import bytes_of, least_words, never_raising, size_words
from nvme_ops.memory.pool import AwaitedPool, Lease, charge_of
from nvme_ops.memory.tier import PooledTier, Share, Tier, in_pages, tier_on
from nvme_ops.offload.residency.entry import Entry
from nvme_ops.offload.residency.placement import room_beside_buffers
from nvme_ops.offload.residency.policy import Policy, Stats
from nvme_ops.offload.residency.residency import Residency

_STEP = 64  # parts of the memory in which a share grows
_PASSING = 16  # parts of host memory, one of which is for buffers of those who could not work without


class _Outside(Policy[Entry]):
    """Fills its memory by itself: none of it leaves for others."""

    def __init__(self, residency: Residency, share: Share) -> None:
        super().__init__(residency.lock, share, None, Stats())
        share.at_end = True  # others do not lie beyond what gives way to it

    def victims(self, after: int) -> Iterable[Entry]:
        """Returns none."""
        del after
        return ()

    def out_of_memory(self, entry: Entry) -> MemoryError:
        """Returns the error to raise when others use all memory."""
        return MemoryError(f"others use all memory: {size_words(entry.nbytes)} in one piece are needed")


class HostBuffers(AwaitedPool):
    """Leases buffers of host memory to optimizers. One that need not wait for more of them leaves one to each other."""

    def __init__(self, budget: int) -> None:
        super().__init__(budget)
        self.users: weakref.WeakSet[Any] = weakref.WeakSet()  #: the optimizers' states

    def lease(self, nbytes: int | str, timeout: float | None = None) -> Lease:
        """Leases ``nbytes`` bytes; see ``Pool``."""
        nbytes = bytes_of("nbytes", nbytes)
        if timeout == 0 and self.bytes_in_use + len(self.users) * charge_of(nbytes) > self.budget:
            raise TimeoutError("what is free is left to others")  # one may wait for gradients of this one's step
        return super().lease(nbytes, timeout)


class Memory(Usable):
    """A budget that all of ``nvme_ops.offload`` can share.

        memory = nvme_ops.offload.Memory("20G")
        model = nvme_ops.offload.from_pretrained("Qwen/Qwen2.5-72B", memory=memory)
        cache = nvme_ops.offload.NvmeCache("/mnt/nvme", memory=memory)
        model.generate(**inputs, cache=cache)  # past_key_values= before transformers 5.24

    Keys and values, and what autograd saves, come first, as they would have to be written as well: weights, parameters
    and gradients give way to them while there are more of them, and come back. So they do for the buffers of an
    optimizer's step. It belongs to the device of its first user, and is freed with the last one. Of an accelerator, an
    optimizer takes host memory only: a sixteenth of it, at most 256 MiB, is kept for its states on their way.

    Args:
        nbytes: bytes, or a size such as ``"20G"``.
        device: the same, of an accelerator.
        host: bytes of page-locked host memory below that of an accelerator, which all users of it share, first come,
            first served, but that weights give way to keys and values; ``"auto"`` is what is free less an eighth. When
            None each has its own ``host_budget``.

    Raises:
        ValueError: ``nbytes`` is no size, or less than a page.
        TypeError: neither ``nbytes`` nor ``device`` is given, or both.
    """

    _closed_error = "this Memory was closed"
    _forked_error = "this Memory is the parent process's: make one in this process"

    def __init__(
        self, nbytes: int | str | None = None, *, device: int | str | None = None, host: int | str | None = None
    ) -> None:
        super().__init__()
        name, given = ("nbytes", nbytes) if device is None else ("device", device)
        if given is None or (nbytes is not None and device is not None):
            raise TypeError("either nbytes or device= says how much memory there is")
        self.nbytes = bytes_of(name, given) // PAGE * PAGE  #: bytes, in whole pages
        if not self.nbytes:
            raise ValueError(f"{name} must be at least {PAGE}, a page")
        self.is_of_accelerator = device is not None or host is not None
        below = 0 if host is None else host_bytes(host)
        buffers = below // _PASSING
        buffers -= room_beside_buffers(buffers)
        self.host = None if host is None else PooledTier(below - buffers)  #: below an accelerator
        self.host_buffers = HostBuffers(max(1, buffers))  #: beside that, for what only passes through
        self.residency = Residency()
        self._tier: Tier | None = None
        self._lender: _Outside  # has what users take besides their shares
        self._users: weakref.WeakSet[Policy[Any]] = weakref.WeakSet()

    def share(self, device: torch.device) -> Share:
        """Returns a share for a new user, on the device where it needs memory; ``balance`` sets its size.

        Raises:
            ValueError: the memory is another device's; it was closed.
            RuntimeError: in a forked child.
        """
        self.require_open()
        if device.type == "cpu" and self.is_of_accelerator:
            raise ValueError("this Memory is memory of an accelerator, and memory of cpu is needed: make one for each")
        with self.residency.lock:
            if self._tier is None:
                self._tier = tier_on(device, self.nbytes, two_ended=True)
                self._lender = _Outside(self.residency, self._tier.share())
                self.residency.join(self._lender)
            elif self._tier.device != device:
                raise ValueError(
                    f"this Memory is memory of {self._tier.device}, and memory of {device} is needed: make one for each"
                )
            return self._tier.share(0)

    @property
    def is_on_cpu(self) -> bool:
        """Whether it is host memory; so is one that says nothing of an accelerator, before its first user."""
        return not self.is_of_accelerator and (self._tier is None or self._tier.device.type == "cpu")

    def lend(self, nbytes: int) -> object:
        """Gives up memory that a user takes besides its share; it is back with the last reference to the result.

        Waits while others write what has to leave.

        Raises:
            ValueError: others need it at least.
            MemoryError: others use all of it.
        """
        if not self.has_room(self._lender, nbytes):
            raise ValueError(f"{self!r} has no {size_words(nbytes)} left beside what these need at least")
        lent = self.residency.borrow(self._lender, nbytes, patient=True)
        self.balance()
        return lent

    def join(self, user: Policy[Any]) -> None:
        """Adds a user. Raises ValueError, naming all users and what they need, if the memory is too small for them."""
        with self.residency.lock:
            needs = [(member.name, member.least()) for member in (*self._users, user)]
            least = sum(nbytes for _, nbytes in needs)
            if least > self._free():
                parts = ", ".join(f"{size_words(nbytes)} for {name}" for name, nbytes in needs)
                raise ValueError(
                    f"a Memory of {size_words(self.nbytes)} is too small: at least "
                    f"{least_words(least + self.nbytes - self._free())} are needed, {parts}"
                )
            self._users.add(user)
            self.balance()

    def has_room(self, user: Policy[Any], nbytes: int) -> bool:
        """Returns whether a user could have so many bytes beside what others need at least."""
        with self.residency.lock:
            return nbytes <= self._free() - sum(other.least() for other in self._users if other is not user)

    def leave(self, user: Policy[Any]) -> None:
        """Removes a user; others get its memory."""
        with self.residency.lock:
            self._users.discard(user)
            self.balance()

    def balance(self) -> None:
        """Sets anew how much each user has."""
        with self.residency.lock:
            users = sorted(self._users, key=lambda user: user.gives_way)
            free, least = self._free(), sum(user.least() for user in users)
            for number, user in enumerate(users):
                least -= (own := user.least())
                wanted = min(free - least, max(own, _rounded(user.wanted(), self.nbytes)))
                if user.gives_way:  # several get equal parts of what is left
                    wanted = min(wanted, max(own, free // (len(users) - number)))
                user.resize(wanted // PAGE * PAGE)
                free -= wanted
            if self.host is not None:
                taken = sum(user.wanted_below() for user in users)
                left = max(0, self.host.nbytes - _rounded(taken, self.host.nbytes))
                for user in users:
                    user.resize_below(left)
            if self._tier is not None:
                self._tier.boundary = self._free() - sum(user.share.nbytes for user in users if user.share.at_end)

    def _free(self) -> int:
        return self.nbytes - self._lender.share.bytes_in_use

    @property
    def step(self) -> int:
        """Bytes in which shares grow."""
        return _step_of(self.nbytes)

    def close(self) -> None:
        """Has new users refused. Raises ValueError while it has users: close these first."""
        with self.residency.lock:
            if names := [*(user.name for user in self._users), *["an optimizer"] * len(self.host_buffers.users)]:
                raise ValueError(f"this Memory is in use by {', '.join(names)}: close these first")
            self._closed, self._tier = True, None

    @never_raising
    def __repr__(self) -> str:
        """Returns for example ``<Memory of 20 GiB: the weights of LlamaForCausalLM, NvmeCache>``."""
        return f"<Memory of {size_words(self.nbytes)}: {', '.join(user.name for user in self._users)}>"


def _step_of(memory: int) -> int:
    return max(PAGE, memory // _STEP // PAGE * PAGE)


def _rounded(nbytes: int, memory: int) -> int:
    return -(-nbytes // (step := _step_of(memory))) * step


class Buffer(NamedTuple):
    """Memory that ``Buffers`` have leased; it is back with the last tensor over it."""

    tensor: torch.Tensor


class Buffers(_Outside):
    """Leases buffers like a ``Pool``, but of a ``Memory``: others give way to them.

    Args:
        memory: has them.
        name: names their user in messages.
        largest: the most bytes of one.

    Raises:
        ValueError: the memory is too small, another device's, or was closed.
    """

    _closed_error = "these buffers were given back"
    _forked_error = "these buffers are the parent process's"

    def __init__(self, memory: Memory, name: str, largest: int) -> None:
        self._memory, self.name, self.largest = memory, name, largest
        self._wanted = 0
        super().__init__(memory.residency, memory.share(torch.device("cpu")))
        memory.join(self)
        memory.residency.join(self)

    def least(self) -> int:
        """Returns the bytes of one buffer."""
        return in_pages(self.largest)

    def wanted(self) -> int:
        """Returns the bytes of those that are leased or asked for."""
        return self._wanted

    @property
    def peak(self) -> int:
        """The most bytes that were leased at once."""
        return self.share.peak

    def lease(self, nbytes: int, timeout: float | None = None) -> Buffer:
        """Leases a buffer; without a ``timeout``, which is 0, it waits for memory that others use.

        Raises:
            MemoryError: others use all of it.
            ValueError: it was closed.
        """
        entry = Entry(nbytes)
        with self.lock:
            self.require_open()
            self._wanted = self.share.bytes_in_use + in_pages(nbytes)
            self._memory.balance()
            memory = self._memory.residency.memory_for(self, entry, -1)
        if memory is None and timeout is not None:
            raise self.out_of_memory(entry)
        return Buffer(self._memory.residency.room(self, entry, -1) if memory is None else memory)

    def end(self) -> None:
        """Gives others what is no longer leased."""
        with self.lock:
            self._wanted = 0
            self._memory.balance()

    def out_of_memory(self, entry: Entry) -> MemoryError:
        """Returns the error to raise when others use all memory."""
        return MemoryError(f"{self._memory!r} has no {size_words(entry.nbytes)} in one piece left for {self.name}")

    def close(self) -> None:
        """Leaves the memory to others. Further calls do nothing."""
        super().close()
        if self._is_ours():
            self._memory.leave(self)


def budget_of(
    memory_budget: int | str | None,
    memory: Memory | None,
    default: str | None = None,
    least: int = 1,
    name: str = "memory_budget",
) -> int | Memory:
    """Returns the budget that a user was given as ``name``, in bytes or shared.

    Raises TypeError unless it is one of both, or neither and there is a ``default``.
    """
    if memory is None and (given := default if memory_budget is None else memory_budget) is not None:
        return bytes_of(name, given, least=least)
    if memory is None or memory_budget is not None:
        raise TypeError("either memory_budget= or memory= says how much memory there is")
    if not isinstance(memory, Memory):
        raise TypeError(f"memory must be a Memory, not {type(memory).__name__}")
    memory.require_open()
    return memory
