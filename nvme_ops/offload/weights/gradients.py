"""``swap_gradients``: gradients leave memory as they are produced, and come back for the step."""

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

from nvme_ops import ranks
from nvme_ops.future import IoFuture
from nvme_ops.handle import aio_handle
from nvme_ops.offload.weights.residents import Resident, Residents, SwapStats
from nvme_ops.offload.weights.stream_weights import budget_of, device_of_all
from nvme_ops.offload.weights.swapped import SwappedTensor

aten = torch.ops.aten

_LEAVING = 4  # the share of the budget for gradients that are being written

Path = str | os.PathLike[str]


class SwappedGradient(SwappedTensor):
    """The ``grad`` of a parameter, with its values on storage.

    Autograd adds to it, and anybody may, as to any other: there is no other state than these values.
    """

    # Once: nothing is gained by converting it for each use, as a parameter is.
    lazy: ClassVar[dict[Any, Callable[..., Any]]] = {
        func: made for func, made in SwappedTensor.lazy.items() if func is not aten._to_copy.default
    }

    def known_norm(self) -> torch.Tensor:
        """Returns the norm, and remembers it until the values are changed."""
        found = self._resident.norm
        if found is None:
            with self._residents.used(self._resident, "backward") as values:
                found = torch.linalg.vector_norm(values)
            if not self._resident.is_used():  # by who may change them unseen
                self._resident.norm = found
        return found

    def scale_later(self, by: torch.Tensor) -> bool:
        """Has the values multiplied when they arrive the next time. Returns False where it has to be done at once."""
        return not self._is_seen() and self._residents.scale(self._resident, by)

    def zero_later(self) -> bool:
        """Has them be zeros, and reads and writes nothing. Returns False where it has to be done at once."""
        if self._is_seen():
            return False
        self._residents.clear(self._resident)
        return True

    def _is_seen(self) -> bool:
        """Whether somebody has, or is to have, what the values are now."""
        return self._resident.is_used() or any(each() is not None for each in self._resident.copies)

    def _assign(self, value: torch.Tensor) -> None:
        del value
        raise RuntimeError("data of a gradient that is on storage cannot be replaced: assign to grad")


def _zero(tensor: Any) -> Any:
    return tensor if isinstance(tensor, SwappedGradient) and tensor.zero_later() else NotImplemented


def _zero_each(tensors: Sequence[torch.Tensor]) -> None:
    for each in tensors:
        each.zero_()


SwappedGradient.lazy.update({aten.zero_.default: _zero, aten._foreach_zero_.default: _zero_each})


class _Leaving(NamedTuple):
    """A gradient that is being written; its memory is free when that has ended."""

    resident: weakref.ref[Resident]
    nbytes: int
    writing: IoFuture


_of: Any = WeakIdKeyDictionary()  # of parameters; not of what equals one, as a usual dictionary would have it


class SwappedGradients:
    """What ``swap_gradients`` returns; a context manager that closes it at the end."""

    def __init__(
        self, residents: Residents, every: Sequence[torch.Tensor], large: Sequence[torch.Tensor], most_leaving: int
    ) -> None:
        self._residents, self._every, self._most_leaving = residents, every, most_leaving
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        self._parameters = [weakref.ref(each) for each in large]
        self._leaving: deque[_Leaving] = deque()
        self._alone = _uses_by_autograd()
        self._lock = threading.RLock()
        self._adding: dict[int, weakref.ref[torch.Tensor]] = {}  # by thread: to whose gradient it adds now
        places = [str(number) for number in range(len(large))]
        residents.foresee([(place, "step") for place in places])
        for parameter, place in zip(large, places, strict=True):
            residents.require_room(Resident(place, parameter))
            _of[parameter] = self
            self._hooks.append(parameter.register_hook(partial(self._before_accumulate, weakref.ref(parameter))))
            self._hooks.append(parameter.register_post_accumulate_grad_hook(partial(self._after_accumulate, place)))

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Does what ``torch.nn.utils.clip_grad_norm_`` does, to the gradients of all ``params``.

        Of those on storage the norms are known, and they are scaled when they come back: nothing is read for it.

        Args:
            max_norm: of all of them together.
            norm_type: any; 2.0 is the one that is known.

        Returns:
            The norm of all gradients before, a tensor of no dimension.
        """
        if norm_type != 2.0:
            return torch.nn.utils.clip_grad_norm_(self._every, max_norm, norm_type)
        grads = [each.grad for each in self._every if each.grad is not None]
        if not grads:
            return torch.tensor(0.0)  # as torch: where its default is
        norms = [
            each.known_norm() if isinstance(each, SwappedGradient) else torch.linalg.vector_norm(each) for each in grads
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
        """Lets the block find usual tensors in ``grad`` of some parameters, which it may change: fetched once for all.

        They have to fit the budget at once, and are written again.
        """
        with contextlib.ExitStack() as uses:
            for each in params:
                grad = each.grad
                if isinstance(grad, SwappedGradient):
                    values = uses.enter_context(grad.lent(change=True))  # `data` may be written to unseen
                    uses.callback(_restore_placeholder, each, grad, values)
                    each.grad = values
            yield

    def stats(self) -> SwapStats:
        """Returns what was moved so far."""
        return self._residents.stats()

    def close(self) -> None:
        """Removes the files. Gradients that are there are lost, and set to None. Further calls do nothing."""
        for hook in self._hooks:
            hook.remove()
        for reference in self._parameters:
            parameter = reference()
            if parameter is not None and _of.get(parameter) is self:
                if isinstance(parameter.grad, SwappedTensor):
                    parameter.grad = None
                del _of[parameter]
        self._leaving.clear()
        self._residents.close()

    def __enter__(self) -> SwappedGradients:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Below

    def _before_accumulate(self, parameter: weakref.ref[torch.Tensor], _: object) -> None:
        """Is called by autograd before it adds to ``grad``, and for ``torch.autograd.grad``, which does not."""
        with self._lock:
            self._adding[threading.get_ident()] = parameter

    def _after_accumulate(self, place: str, parameter: torch.Tensor) -> None:
        """Is called by autograd when it has set ``grad`` or added to it.

        Other threads may be adding to it at this moment, to where ``grad`` was: the last of them replaces it.
        """
        with self._lock:
            self._adding.pop(threading.get_ident(), None)
            if any(each() is parameter for each in self._adding.values()):
                return
            alone = all(uses <= most for uses, most in zip(_uses_of_grad(parameter), self._alone, strict=True))
            grad = parameter.grad
            if isinstance(grad, SwappedGradient):
                grad.known_norm()  # of values that are in memory now
            # A gradient the program still refers to, or one with a graph, stays in memory.
            elif grad is not None and type(grad) is torch.Tensor and alone and not grad.requires_grad:
                self._leave(place, parameter, grad)
        self._wait_for_some()

    @torch.no_grad()
    def _leave(self, place: str, parameter: torch.Tensor, grad: torch.Tensor) -> None:
        """Writes a gradient from its own memory and replaces ``grad`` by a tensor on storage."""
        if grad.layout != torch.strided:
            raise RuntimeError("swap_gradients does not support sparse gradients")
        if grad.dtype != parameter.dtype:
            raise RuntimeError(f"a gradient is {grad.dtype}, and its parameter {parameter.dtype}")
        if grad.device != self._residents.device:
            raise RuntimeError(f"a parameter was moved to {grad.device} after swap_gradients, which is to come last")
        norm = torch.linalg.vector_norm(grad)
        resident = self._residents.put(place, grad.detach().resolve_conj().resolve_neg())
        resident.norm, writing = norm, resident.writing
        parameter.grad = SwappedGradient(self._residents, resident)
        if writing is not None:
            self._leaving.append(_Leaving(weakref.ref(resident), resident.nbytes, writing))

    def _wait_for_some(self) -> None:
        """Waits for the oldest that are being written, until these are few. Raises OSError for one that is lost."""
        waiting = tuple(self._leaving)  # threads add to it
        nbytes = sum(each.nbytes for each in waiting)
        for each in waiting:
            if nbytes <= self._most_leaving:
                return
            failure = each.writing.exception()  # if interrupted, it is still in the queue
            with contextlib.suppress(ValueError):  # another thread has waited as well
                self._leaving.remove(each)
            nbytes -= each.nbytes
            resident = each.resident()
            if failure is not None and resident is not None and resident.writing is each.writing:
                raise failure


def swap_gradients(
    params: Iterable[torch.Tensor],
    folder: Path | Sequence[Path],
    *,
    memory_budget: int | str = "256M",
    min_bytes: int | str = "1M",
    checksums: bool = False,
    handle: aio_handle | None = None,
) -> SwappedGradients:
    """Moves each gradient to storage when it is complete, from where ``NvmeOptimizer`` fetches it for its step.

        gradients = nvme_ops.offload.swap_gradients(model.parameters(), "/mnt/nvme")
        loss.backward()
        gradients.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()

    Several backward passes add up, as usual. Meanwhile ``parameter.grad`` is a tensor without memory, which fetches its
    values for each operation and keeps what is written to it: ``GradScaler``, ``torch.nn.utils.clip_grad_norm_`` and
    other optimizers work, only slower than ``clip_grad_norm_`` here and ``NvmeOptimizer``. A gradient that the program
    has another reference to, and one of ``create_graph=True``, stay in memory. Where every backward pass is followed
    by a step, ``NvmeOptimizer(overlap="backward", free_gradients=True)`` needs no storage for gradients.

    Args:
        params: of a module; after ``swap_params``, if that is used.
        folder: where the gradients go; several, of one device each, share them by their measured rates.
        memory_budget: bytes for gradients that are on their way, or a size such as ``"256M"``.
        min_bytes: gradients of smaller parameters stay in memory.
        checksums: keep a CRC-32C of each gradient and compare it when it comes back.
        handle: moves the bytes; one for the whole process when None.

    Raises:
        MemoryError: three quarters of the budget are smaller than a gradient.
        ValueError: no parameter that is large enough, gradients that are swapped already, or several ranks: these
            reduce gradients after the backward pass.
        TypeError: a ``DTensor``.
        OSError: what can be wrong with the folder. A backward pass raises ENOSPC when the disk is full.
    """
    budget, least = budget_of(memory_budget), budget_of(min_bytes)
    if isinstance(params, torch.nn.Module):
        raise TypeError("params must be parameters, not a module: model.parameters()")
    every = [each for each in params if each.requires_grad]
    large = [each for each in every if each.nbytes >= least]
    if not large:
        raise ValueError("there are no parameters that take a gradient, or none of min_bytes or more")
    if any(each in _of for each in large):
        raise ValueError("the gradients of these parameters are swapped already")
    if any(hasattr(each, "to_local") for each in large):
        raise TypeError("gradients of a DTensor cannot be swapped")
    device = device_of_all(large, "the parameters are")
    if several_ranks():
        raise ValueError("gradients of several ranks are reduced after they are complete: they cannot be swapped")
    leaving = budget // _LEAVING
    residents = Residents(
        folder, "gradients", budget=budget - leaving, device=device, checksums=checksums, handle=handle
    )
    try:
        return SwappedGradients(residents, every, large, leaving)
    except BaseException:
        residents.close()
        raise


def several_ranks() -> bool:
    """Whether this process is one of several that train together."""
    me = ranks.distributed()
    return me is not None and me.world_size > 1


def require_one_rank(params: Sequence[torch.Tensor]) -> None:
    """Raises ValueError where gradients are reduced later than each is complete: there is no other hook."""
    if several_ranks() and not all(hasattr(each, "to_local") for each in params):
        raise ValueError(
            'overlap="backward" is not for parameters whose gradients several ranks reduce after they are complete, as '
            "DistributedDataParallel does: shard them with fully_shard, or leave it out"
        )


@contextlib.contextmanager
def gradient_of(parameter: torch.Tensor) -> Iterator[torch.Tensor | None]:
    """Lets the block compute with a gradient, which is in ``grad`` or on storage; None without one."""
    grad = parameter.grad
    if not isinstance(grad, SwappedTensor):
        yield grad
        return
    with grad.lent() as values:
        try:
            yield values
        finally:
            del values  # or the traceback of a failure would keep its memory


def _uses_of_grad(parameter: torch.Tensor) -> tuple[int, int, int]:
    """Returns how many use ``grad``: in Python, in C++, and its memory."""
    grad: Any = parameter.grad
    if not _is_usual(grad):
        return 0, 0, 0
    return sys.getrefcount(grad), grad._use_count(), torch._C._storage_Use_Count(grad.untyped_storage()._cdata)


def _is_usual(tensor: object) -> bool:
    return type(tensor) is torch.Tensor and tensor.layout == torch.strided


def _uses_by_autograd() -> tuple[int, int, int]:
    """Returns what ``_uses_of_grad`` is in a hook, of a gradient that nobody else has: each torch has its own."""
    found: list[tuple[int, int, int]] = []
    sample = torch.ones(1, device="cpu", requires_grad=True)
    sample.register_post_accumulate_grad_hook(lambda each: found.append(_uses_of_grad(each)))
    with torch.enable_grad():
        (sample * 2.0).sum().backward()
    return found[0]


def _restore_placeholder(parameter: torch.Tensor, grad: SwappedGradient, values: torch.Tensor) -> None:
    if parameter.grad is values:
        parameter.grad = grad
