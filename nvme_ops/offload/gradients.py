"""``swap_gradients``: gradients leave memory as they are produced, and come back for the step."""

from __future__ import annotations

import contextlib
import math
import os
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from nvme_ops.handle import aio_handle
from nvme_ops.offload.residents import Resident, Residents, SwapStats
from nvme_ops.offload.stream_weights import budget_of

_LEAVING = 4  # the share of the budget for gradients that are being written

Path = str | os.PathLike[str]


class _Gradient:
    """The gradient of one parameter.

    While it is on storage the parameter's ``grad`` is ``placeholder``: NaN of its shape in the memory of one element.
    So all that asks whether there is a gradient, or resets it, works as usual.
    """

    def __init__(self, owner: SwappedGradients, parameter: torch.Tensor, resident: Resident) -> None:
        self.owner, self.resident = owner, resident
        self.parameter = weakref.ref(parameter)
        self.placeholder = torch.empty(0)
        self.renew()
        self.norm: torch.Tensor | None = None
        self.adds = False  # the next one is to be added to the one on storage

    def renew(self) -> None:
        """Makes another placeholder: another gradient is on storage."""
        nan = torch.full((), math.nan, dtype=self.resident.dtype, device=self.resident.device)
        self.placeholder = nan.expand(self.resident.shape)
        self.version = self.placeholder._version


_of: Any = WeakIdKeyDictionary()  # of parameters; not of what equals one, as a usual dictionary would have it


class SwappedGradients:
    """What ``swap_gradients`` returns; a context manager that closes it at the end."""

    def __init__(
        self, residents: Residents, every: Sequence[torch.Tensor], large: Sequence[torch.Tensor], most_leaving: int
    ) -> None:
        self._residents, self._every, self._most_leaving = residents, every, most_leaving
        self._gradients: list[_Gradient] = []
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        self._leaving: deque[tuple[Resident, int]] = deque()
        for number, parameter in enumerate(large):
            resident = Resident(str(number), parameter)
            residents.add(resident)
            gradient = _of[parameter] = _Gradient(self, parameter, resident)
            self._gradients.append(gradient)
            self._hooks.append(parameter.register_hook(_coming(gradient)))
            self._hooks.append(parameter.register_post_accumulate_grad_hook(_came))
        residents.foresee([(each.resident.place, "step") for each in self._gradients])

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Does what ``torch.nn.utils.clip_grad_norm_`` does, to the gradients of all ``params``.

        Those on storage are scaled when they come back.

        Args:
            max_norm: of all of them together.
            norm_type: 2.0, the only one that is kept of gradients on storage.

        Returns:
            The norm of all gradients before, a tensor of no dimension.
        """
        if norm_type != 2.0:
            raise ValueError(f"norm_type must be 2.0, not {norm_type}")
        self._residents.settle()  # what was changed in ``gathered``
        norms = []
        for each in self._every:
            if has_swapped_gradient(each):
                norms.append(_of[each].norm)
            elif each.grad is not None:
                norms.append(torch.linalg.vector_norm(each.grad))
        if not norms:
            return torch.tensor(0.0)
        total: torch.Tensor = torch.linalg.vector_norm(torch.stack(norms))
        scale = torch.clamp(max_norm / (total + 1e-6), max=1.0)
        for each in self._every:
            if has_swapped_gradient(each):
                gradient = _of[each]
                before = gradient.resident.scale
                gradient.resident.scale = scale.to(each.dtype) if before is None else before * scale
                gradient.norm = gradient.norm * scale
                self._residents.forget(gradient.resident)
            elif each.grad is not None:
                each.grad.mul_(scale)
        return total

    @contextlib.contextmanager
    def gathered(self, params: Iterable[torch.Tensor]) -> Iterator[None]:
        """Lets the block find, and change, the gradients of some parameters in ``grad``.

        They have to fit the budget at once.
        """
        with contextlib.ExitStack() as uses:
            for each in params:
                gradient = _of.get(each)
                if gradient is not None and _is_on_storage(gradient):
                    each.grad = uses.enter_context(self._residents.used(gradient.resident, "step", change=True))
                    uses.callback(_put_away, each, gradient, each.grad, each.grad._version)
            yield

    def stats(self) -> SwapStats:
        """Returns what was moved until now."""
        return self._residents.stats()

    def close(self) -> None:
        """Removes the files. Gradients that are there are lost, and set to None. Once or more."""
        for hook in self._hooks:
            hook.remove()
        for each in self._gradients:
            parameter = each.parameter()
            if parameter is not None:
                if parameter.grad is each.placeholder:
                    parameter.grad = None
                if _of.get(parameter) is each:
                    del _of[parameter]
        self._gradients.clear()
        self._residents.close()

    def __enter__(self) -> SwappedGradients:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Below

    def _leave(self, gradient: _Gradient, parameter: torch.Tensor) -> None:
        """Writes a gradient that is complete, and lets go of it."""
        grad, resident = parameter.grad, gradient.resident
        if grad is None:
            return
        if grad.layout != torch.strided:
            raise RuntimeError("swap_gradients does not support sparse gradients")
        if grad.dtype != resident.dtype:
            raise RuntimeError(f"a gradient is {grad.dtype}, and its parameter {resident.dtype}")
        with torch.no_grad():
            grad = grad.detach()
            if gradient.adds:
                with self._residents.used(resident, "backward") as before:
                    grad.add_(before)
            gradient.norm = torch.linalg.vector_norm(grad)
            resident.scale = None
            if grad.stride() != resident.stride:
                grad = torch.empty_strided(resident.shape, resident.stride, dtype=grad.dtype, device=grad.device).copy_(
                    grad
                )
            self._residents.replace(resident, grad)
        gradient.adds = False
        gradient.renew()
        parameter.grad = gradient.placeholder
        self._leaving.append((resident, resident.nbytes))
        while sum(nbytes for _, nbytes in self._leaving) > self._most_leaving:
            self._residents.require_written(self._leaving.popleft()[0])


def swap_gradients(
    params: Iterable[torch.Tensor],
    folder: Path | Sequence[Path],
    *,
    memory_budget: int | str = "256M",
    min_bytes: int | str = "1M",
    checksum: bool = False,
    handle: aio_handle | None = None,
) -> SwappedGradients:
    """Moves each gradient to storage when it is complete, from where ``NvmeOptimizer`` fetches it for its step.

        gradients = nvme_ops.offload.swap_gradients(model.parameters(), "/mnt/nvme")
        loss.backward()
        gradients.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()

    Several backward passes add up, as usual. Meanwhile ``parameter.grad`` is a tensor of NaN that takes no memory;
    other optimizers find the gradients in ``gathered``. Where every backward pass is followed by a step,
    ``NvmeOptimizer(overlap="backward", free_gradients=True)`` needs no storage for gradients.

    Args:
        params: of a module; after ``swap_params``, if that is used.
        folder: where the gradients go; several, of one device each, share them by their measured rates.
        memory_budget: bytes for gradients that are on their way, or a size such as ``"256M"``.
        min_bytes: gradients of smaller parameters stay in memory.
        checksum: keep a CRC-32C of each gradient and compare it when it comes back.
        handle: moves the bytes; one for the whole process when None.

    Raises:
        MemoryError: three quarters of the budget are smaller than a gradient.
        ValueError: no parameter that is large enough, gradients that are swapped already, or several ranks: these
            reduce gradients after the backward pass.
        TypeError: a ``DTensor``.
        OSError: what can be wrong with the folder. A backward pass raises ENOSPC when the disk is full.
    """
    budget, least = budget_of(memory_budget), budget_of(min_bytes)
    every = [each for each in params if each.requires_grad]
    large = [each for each in every if each.nbytes >= least]
    if not large:
        raise ValueError("there are no parameters that take a gradient, or none of min_bytes or more")
    if any(each in _of for each in large):
        raise ValueError("the gradients of these parameters are swapped already")
    if any(hasattr(each, "to_local") for each in large):
        raise TypeError("gradients of a DTensor cannot be swapped")
    devices = {each.device for each in large}
    if len(devices) > 1:
        names = ", ".join(sorted(map(str, devices)))
        raise ValueError(f"the parameters are on {len(devices)} devices, not on one: {names}")
    if (
        torch.distributed.is_available()
        and torch.distributed.is_initialized()
        and torch.distributed.get_world_size() > 1
    ):
        raise ValueError("gradients of several ranks are reduced after they are complete: they cannot be swapped")
    leaving = budget // _LEAVING
    residents = Residents(
        folder, "gradients", budget=budget - leaving, device=devices.pop(), checksum=checksum, handle=handle
    )
    try:
        return SwappedGradients(residents, every, large, leaving)
    except BaseException:
        residents.close()
        raise


def several_ranks() -> bool:
    """Whether this process is one of several that train together."""
    there = torch.distributed.is_available() and torch.distributed.is_initialized()
    return there and torch.distributed.get_world_size() > 1


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
    gradient = _of.get(parameter)
    if gradient is None or not _is_on_storage(gradient):
        yield parameter.grad
        return
    with gradient.owner._residents.used(gradient.resident, "step") as values:
        yield values


def has_swapped_gradient(parameter: torch.Tensor) -> bool:
    """Whether the gradient of a parameter is on storage now."""
    gradient = _of.get(parameter)
    return gradient is not None and _is_on_storage(gradient)


def _is_on_storage(gradient: _Gradient) -> bool:
    """Whether the parameter has the placeholder, and nobody has set that to zero."""
    parameter, placeholder = gradient.parameter(), gradient.placeholder
    return parameter is not None and parameter.grad is placeholder and placeholder._version == gradient.version


def _coming(gradient: _Gradient) -> Any:
    """Returns a hook that is called with a gradient which is about to be added to ``grad``."""

    def hook(_: torch.Tensor) -> None:
        parameter = gradient.parameter()
        if parameter is None:
            return
        if _is_on_storage(gradient):
            gradient.adds, parameter.grad = True, None
        elif parameter.grad is gradient.placeholder:
            parameter.grad = parameter.grad.contiguous()

    return hook


def _came(parameter: torch.Tensor) -> None:
    gradient = _of.get(parameter)
    if gradient is not None:
        gradient.owner._leave(gradient, parameter)


def _put_away(parameter: torch.Tensor, gradient: _Gradient, values: torch.Tensor, version: int) -> None:
    if values._version != version:
        gradient.norm = torch.linalg.vector_norm(values.detach())
    if parameter.grad is values:
        parameter.grad = gradient.placeholder
