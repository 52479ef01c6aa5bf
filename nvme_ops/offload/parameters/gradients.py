"""``swap_gradients``: gradients leave memory when they are complete, and come back for the step."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, ClassVar, NamedTuple

import torch
from torch.utils.weak import WeakIdKeyDictionary

from nvme_ops.base import ranks
from nvme_ops.base.lifetime import forkable_lock
from nvme_ops.base.native import native
from nvme_ops.base.text import bytes_of
from nvme_ops.io.arguments import require_switches
from nvme_ops.io.future import IoFuture
from nvme_ops.io.handle import aio_handle
from nvme_ops.memory.torch_memory import large_tensors_pooled
from nvme_ops.offload.budgets import budgets_of
from nvme_ops.offload.memory import Memory
from nvme_ops.offload.parameters.residents import Resident, Residents, Swapped
from nvme_ops.offload.parameters.swapped import SwappedTensor
from nvme_ops.offload.residency.entry import tensors_over
from nvme_ops.offload.residency.placement import IN_FLIGHT
from nvme_ops.offload.weights.stream_weights import device_of_all

aten = torch.ops.aten

_LEAVING = 4  # budget / _LEAVING bytes are for gradients that are being written
_SHARED = 16  # and of memory that is shared this part, at most what keeps a device busy

Path = str | os.PathLike[str]


class SwappedGradient(SwappedTensor):
    """The ``grad`` of a parameter, with its values on storage. Autograd and others add to it as to any gradient."""

    # Conversions are done once, as nothing is gained by converting at each use as parameters do.
    lazy: ClassVar[dict[Any, Callable[..., Any]]] = {
        func: made for func, made in SwappedTensor.lazy.items() if func is not aten._to_copy.default
    }

    def known_norm(self) -> torch.Tensor:
        """Returns the 2-norm, which is remembered until the values change."""
        norm = self._resident.norm
        if norm is None:
            with self._residents.used(self._resident, "backward") as values:
                norm = torch.linalg.vector_norm(values)
            if not self._resident.is_used():  # else others may change them unnoticed
                self._resident.norm = norm
        return norm

    def scale_later(self, by: torch.Tensor) -> bool:
        """Has the values multiplied when they arrive the next time. Returns False if the caller has to do it now."""
        return not self._is_observed() and self._residents.scale(self._resident, by)

    def zero_later(self) -> bool:
        """Makes the values zeros without moving any. Returns False if the caller has to do it now."""
        if self._is_observed():
            return False
        self._residents.clear(self._resident)
        return True

    def _is_observed(self) -> bool:
        """Returns whether the current values are in use, or are to be copied."""
        return self._resident.is_used() or any(copy() is not None for copy in self._resident.copies)

    def _assign(self, value: torch.Tensor) -> None:
        del value
        raise RuntimeError("data of a gradient that is on storage cannot be replaced: assign to grad")


def _zero(tensor: Any) -> Any:
    return tensor if isinstance(tensor, SwappedGradient) and tensor.zero_later() else NotImplemented


def _zero_each(tensors: Sequence[torch.Tensor]) -> None:
    for tensor in tensors:
        tensor.zero_()


SwappedGradient.lazy.update({aten.zero_.default: _zero, aten._foreach_zero_.default: _zero_each})


class _Leaving(NamedTuple):
    """A gradient that is being written from its own memory, which is free when that has ended."""

    resident: weakref.ref[Resident]
    nbytes: int
    writing: IoFuture


_owners: Any = WeakIdKeyDictionary()  # SwappedGradients by parameter; an ordinary dictionary would compare values


class SwappedGradients(Swapped):
    """Gradients on storage, from ``swap_gradients``; a context manager that closes them at the end."""

    def __init__(
        self, residents: Residents, every: Sequence[torch.Tensor], large: Sequence[torch.Tensor], most_leaving: int
    ) -> None:
        super().__init__(residents)
        self._most_leaving = most_leaving
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        # Parameters own their hooks, and these own this: it lives as long as any of them, and must not own them.
        self._every, self._large = [weakref.ref(tensor) for tensor in every], [weakref.ref(tensor) for tensor in large]
        self._leaving: deque[_Leaving] = deque()
        self._uses_if_unshared = _uses_by_autograd()
        self._lock = forkable_lock()
        self._adding: dict[int, weakref.ref[torch.Tensor]] = {}  # by thread: the parameter to whose gradient it adds
        self._undo = contextlib.ExitStack()
        self._undo.enter_context(large_tensors_pooled())  # gradients, too
        places = [str(number) for number in range(len(large))]
        residents.foresee([(place, "step") for place in places])
        for parameter, place in zip(large, places, strict=True):
            residents.require_room(Resident(place, parameter))
            _owners[parameter] = self
            self._hooks.append(parameter.register_hook(partial(self._before_accumulate, weakref.ref(parameter))))
            self._hooks.append(parameter.register_post_accumulate_grad_hook(partial(self._after_accumulate, place)))

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Does what ``torch.nn.utils.clip_grad_norm_`` does, to the gradients of all ``params``.

        The norms of gradients on storage are known, and these are scaled when they come back: nothing is read for it.

        Args:
            max_norm: the largest norm that all gradients together may have.
            norm_type: any; with one other than 2.0 the gradients are read.

        Returns:
            The norm of all gradients before, a tensor without dimensions.
        """
        every = [parameter for reference in self._every if (parameter := reference()) is not None]
        if norm_type != 2.0:
            return torch.nn.utils.clip_grad_norm_(every, max_norm, norm_type)
        grads = [parameter.grad for parameter in every if parameter.grad is not None]
        if not grads:
            return torch.tensor(0.0)  # on torch's default device, as torch does
        norms = [
            grad.known_norm() if isinstance(grad, SwappedGradient) else torch.linalg.vector_norm(grad) for grad in grads
        ]
        total: torch.Tensor = torch.linalg.vector_norm(torch.stack(norms))
        scale = torch.clamp(max_norm / (total + 1e-6), max=1.0)
        for grad in grads:
            if isinstance(grad, SwappedGradient) and grad.scale_later(scale):
                torch.autograd.graph.increment_version(grad)
            else:
                grad.mul_(scale)
        return total

    @contextlib.contextmanager
    def gathered(self, params: Iterable[torch.Tensor]) -> Iterator[None]:
        """Puts ordinary tensors in ``grad`` of some parameters, fetched once, for the block to read or change.

        Together they have to fit in the budget. They are written again afterwards.
        """
        with contextlib.ExitStack() as uses:
            for parameter in params:
                grad = parameter.grad
                if isinstance(grad, SwappedGradient):
                    values = uses.enter_context(grad.lent(change=True))  # a write to `data` would go unnoticed
                    uses.callback(_restore_placeholder, parameter, grad, values)
                    parameter.grad = values
            yield

    def close(self) -> None:
        """Removes the files. Gradients on storage are lost, and set to None. Further calls do nothing."""
        for hook in self._hooks:
            hook.remove()
        for reference in self._large:
            parameter = reference()
            if parameter is not None and _owners.get(parameter) is self:
                if isinstance(parameter.grad, SwappedTensor):
                    parameter.grad = None
                del _owners[parameter]
        self._leaving.clear()
        self._undo.close()
        self._residents.close()

    # Hooks of autograd

    def _before_accumulate(self, parameter: weakref.ref[torch.Tensor], _: object) -> None:
        """Notes that autograd is about to add to ``grad``. ``torch.autograd.grad`` calls this too, but adds nothing."""
        with self._lock:
            self._adding[threading.get_ident()] = parameter

    def _after_accumulate(self, place: str, parameter: torch.Tensor) -> None:
        """Writes a gradient that autograd has set or added to, unless other threads are still adding to it.

        The last of these threads does it.
        """
        with self._lock:
            self._adding.pop(threading.get_ident(), None)
            if any(reference() is parameter for reference in self._adding.values()):
                return
            uses = zip(_uses_of_grad(parameter), self._uses_if_unshared, strict=True)
            is_unshared = all(count <= most for count, most in uses)
            grad = parameter.grad
            if isinstance(grad, SwappedGradient):
                grad.known_norm()  # of values that are in memory now
            # A gradient the program still refers to, or one with a graph, stays in memory.
            elif grad is not None and type(grad) is torch.Tensor and is_unshared and not grad.requires_grad:
                self._write_out(place, parameter, grad)
        self._limit_leaving()

    @torch.no_grad()
    def _write_out(self, place: str, parameter: torch.Tensor, grad: torch.Tensor) -> None:
        """Starts to write a gradient from its own memory, and replaces ``grad`` by a tensor on storage."""
        if grad.layout != torch.strided:
            raise RuntimeError("swap_gradients does not support sparse gradients")
        if grad.dtype != parameter.dtype:
            raise RuntimeError(f"a gradient is {grad.dtype}, and its parameter {parameter.dtype}")
        if grad.device != self._residents.device:
            raise RuntimeError(f"a parameter was moved to {grad.device} after swap_gradients, which must come last")
        norm = torch.linalg.vector_norm(grad)
        resident = self._residents.put(place, grad.detach().resolve_conj().resolve_neg())
        resident.norm, writing = norm, resident.leaving
        parameter.grad = SwappedGradient(self._residents, resident)
        if writing is not None:
            self._leaving.append(_Leaving(weakref.ref(resident), resident.nbytes, writing))

    def _limit_leaving(self) -> None:
        """Waits for the oldest writes until the others are within the limit. Raises OSError if a gradient is lost."""
        waiting = tuple(self._leaving)  # other threads may append
        nbytes = sum(gradient.nbytes for gradient in waiting)
        for gradient in waiting:
            if nbytes <= self._most_leaving:
                return
            gradient.writing.exception()  # it leaves the queue only afterwards: Ctrl-C may interrupt this
            with contextlib.suppress(ValueError):  # another thread has waited for it, too
                self._leaving.remove(gradient)
            if (resident := gradient.resident()) is not None:
                self._residents.wait_until_written(resident)  # which lets go of the gradient
            nbytes -= gradient.nbytes
            native().trim_pool(self._most_leaving)


def swap_gradients(
    params: Iterable[torch.Tensor],
    folder: Path | Sequence[Path],
    *,
    device_budget: int | str | None = None,
    host_budget: int | str | None = None,
    memory_budget: int | str | None = None,
    memory: Memory | None = None,
    min_bytes: int | str = "1M",
    checksums: bool = False,
    handle: aio_handle | None = None,
) -> SwappedGradients:
    """Moves each gradient to storage when it is complete; ``NvmeOptimizer`` fetches it for its step.

        gradients = nvme_ops.offload.swap_gradients(model.parameters(), "/mnt/nvme")
        loss.backward()
        gradients.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()

    Several backward passes add up, as usual. Meanwhile ``parameter.grad`` is a tensor without memory, which fetches its
    values for each operation and keeps what is written to it: ``GradScaler``, ``torch.nn.utils.clip_grad_norm_`` and
    other optimizers work, but slower than ``clip_grad_norm_`` here and ``NvmeOptimizer``. A gradient to which the
    program has another reference, and one of ``create_graph=True``, stay in memory. If every backward pass is followed
    by a step, ``NvmeOptimizer(overlap="backward", free_gradients=True)`` needs no storage for gradients.

    Args:
        params: parameters of a module; those that ``swap_params`` has made, if it is used.
        folder: where the gradients go; several folders, one on each device, share them by their measured rates.
        device_budget: bytes for gradients on an accelerator that are being moved or used, or a size such as ``"1G"``;
            256 MiB when None.
        host_budget: bytes of page-locked host memory, where gradients of an accelerator are instead of on storage, as
            many as it has room for; ``"auto"``, when None, is what is free less an eighth, ``0`` none.
        memory_budget: another word for the budget of where the gradients are; on the CPU that of the host.
        memory: in place of a budget of its own, one that is shared with others.
        min_bytes: gradients of smaller parameters stay in memory.
        checksums: keep a CRC-32C of each gradient on storage and compare it when it comes back.
        handle: moves the bytes; one for the whole process when None.

    Raises:
        MemoryError: a gradient is larger than three quarters of the budget, or than what others leave of ``memory``.
        ValueError: no parameter is large enough, gradients are swapped already, or there are several ranks, which
            reduce gradients after they are complete.
        TypeError: a parameter is a ``DTensor``.
        OSError: the folder cannot be used. A backward pass raises ENOSPC when the disk is full.
    """
    least = bytes_of("min_bytes", min_bytes)
    require_switches(checksums=checksums)
    if isinstance(params, torch.nn.Module):
        raise TypeError("params must be parameters, not a module: model.parameters()")
    params = list(params)
    if wrong := [parameter for parameter in params if not isinstance(parameter, torch.Tensor)]:
        raise TypeError(f"params must be parameters, not {type(wrong[0]).__name__}: model.parameters()")
    every = [parameter for parameter in params if parameter.requires_grad]
    large = [parameter for parameter in every if parameter.nbytes >= least]
    if not large:
        raise ValueError("there are no parameters that take a gradient, or none of min_bytes or more")
    if any(parameter in _owners for parameter in large):
        raise ValueError("the gradients of these parameters are swapped already")
    if any(hasattr(parameter, "to_local") for parameter in large):
        raise TypeError("gradients of a DTensor cannot be swapped")
    device = device_of_all(large, "the parameters are")
    if several_ranks():
        raise ValueError("gradients of several ranks are reduced after they are complete: they cannot be swapped")
    budgets = budgets_of(device, memory_budget, memory, device_budget, host_budget, default="256M")
    given, host = budgets.own, budgets.host_tier().share()
    leaving = given // _LEAVING if isinstance(given, int) else min(IN_FLIGHT, given.nbytes // _SHARED)
    with contextlib.ExitStack() as undo:
        residents = Residents(
            folder, "gradients", given=given - leaving if isinstance(given, int) else given, device=device, host=host,
            budget_name=budgets.name, checksums=checksums, handle=handle,
        )  # fmt: skip
        undo.callback(residents.close)
        if isinstance(given, Memory):
            residents.borrowed.append(given.lend(leaving))
        made = SwappedGradients(residents, every, large, leaving)
        undo.pop_all()
    return made


def several_ranks() -> bool:
    """Returns whether this process is one of several that train together."""
    me = ranks.distributed()
    return me is not None and me.world_size > 1


def require_one_rank(params: Sequence[torch.Tensor]) -> None:
    """Raises ValueError if ranks reduce gradients after each is complete, for which torch has no hook."""
    if several_ranks() and not all(hasattr(parameter, "to_local") for parameter in params):
        raise ValueError(
            'overlap="backward" is not for parameters whose gradients several ranks reduce after they are complete, as '
            "DistributedDataParallel does: shard them with fully_shard, or leave overlap out"
        )


def _uses_of_grad(parameter: torch.Tensor) -> tuple[int, int, int]:
    """Returns the reference counts of ``grad``: in Python, in C++ and of its storage; zeros if it is not dense."""
    grad = parameter.grad
    if type(grad) is not torch.Tensor or grad.layout != torch.strided:
        return 0, 0, 0
    memory = tensors_over(grad)
    return sys.getrefcount(grad), grad._use_count(), memory  # type: ignore[attr-defined]


def _uses_by_autograd() -> tuple[int, int, int]:
    """Returns ``_uses_of_grad`` in a hook for a gradient that nobody else refers to; it depends on torch's version."""
    uses: list[tuple[int, int, int]] = []
    sample = torch.ones(1, device="cpu", requires_grad=True)
    sample.register_post_accumulate_grad_hook(lambda parameter: uses.append(_uses_of_grad(parameter)))
    with torch.enable_grad():
        (sample * 2.0).sum().backward()
    return uses[0]


def _restore_placeholder(parameter: torch.Tensor, grad: SwappedGradient, values: torch.Tensor) -> None:
    if parameter.grad is values:
        parameter.grad = grad
