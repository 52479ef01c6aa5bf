"""``swap_params``: the parameters of a module are on storage, and in memory while something computes with them."""

from __future__ import annotations

import contextlib
import os
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdRef

from nvme_ops.base.text import bytes_of
from nvme_ops.io.arguments import require_callables, require_switches
from nvme_ops.io.handle import aio_handle
from nvme_ops.memory.tier import in_pages
from nvme_ops.offload.budgets import budgets_of
from nvme_ops.offload.memory import Memory
from nvme_ops.offload.parameters.residents import Resident, Residents, Swapped, Use
from nvme_ops.offload.parameters.saved_entries import STATE_DICTS
from nvme_ops.offload.parameters.swapped import SwappedTensor
from nvme_ops.offload.residency.placement import placements
from nvme_ops.offload.weights.stream_weights import device_of, device_of_all

_NOTHING = "neither reset_parameters nor initialize_weights does"

Path = str | os.PathLike[str]


class SwappedParams(Swapped):
    """Parameters on storage, from ``swap_params``; a context manager that closes them at the end."""

    def __init__(self, module: torch.nn.Module, residents: Residents) -> None:
        super().__init__(residents)
        self._module = module
        self._leave = weakref.finalize(residents, STATE_DICTS.take())

    @contextlib.contextmanager
    def gathered(self, params: Iterable[torch.Tensor], *, change: bool = False) -> Iterator[list[torch.Tensor]]:
        """Yields ordinary tensors with the values of some parameters, in memory until the block ends.

        Args:
            params: of the module, swapped or not; those that are swapped have to fit in the budget together.
            change: whether the block writes to them.
        """
        require_switches(change=change)
        with contextlib.ExitStack() as uses:
            tensors = []
            for parameter in params:
                if isinstance(parameter, SwappedTensor):
                    tensors.append(uses.enter_context(parameter.lent(change)))
                    if change:
                        torch.autograd.graph.increment_version(parameter)
                else:
                    tensors.append(parameter.detach())
            yield tensors

    def restore(self) -> None:
        """Replaces all parameters by ordinary ones in memory, and closes this. Make a new optimizer afterwards."""
        restored: dict[int, torch.nn.Parameter] = {}
        for module, name, parameter in _places(self._module):
            if isinstance(parameter, SwappedTensor):
                if id(parameter) not in restored:
                    restored[id(parameter)] = torch.nn.Parameter(parameter.to_memory(), parameter.requires_grad)
                    restored[id(parameter)].grad = parameter.grad
                setattr(module, name, restored[id(parameter)])
                note_replaced([parameter])
        self.close()

    def close(self) -> None:
        """Removes the files; the parameters cannot be used any more. Further calls do nothing."""
        self._residents.close()
        self._leave()


def swap_params(
    module: torch.nn.Module,
    folder: Path | Sequence[Path],
    *,
    device_budget: int | str | None = None,
    host_budget: int | str | None = None,
    memory_budget: int | str | None = None,
    memory: Memory | None = None,
    device: str | torch.device | None = None,
    min_bytes: int | str = "1M",
    param_init_fn: Callable[[torch.nn.Module], object] | None = None,
    checksums: bool = False,
    handle: aio_handle | None = None,
) -> SwappedParams:
    """Moves the parameters of a module to storage; each is in memory while forward or backward computes with it.

        swapped = nvme_ops.offload.swap_params(model, "/mnt/nvme", memory_budget="1G")
        optimizer = nvme_ops.offload.NvmeOptimizer(model.parameters(), torch.optim.AdamW, "/mnt/nvme", lr=1e-4)

    The module is trained as before. Its parameters are replaced by others: make an optimizer,
    ``DistributedDataParallel`` and hooks of parameters afterwards. The order of uses is learned in the first step; from
    then on the next parameters are read during computation. Optimizers and ``torch.nn.init`` change the values on
    storage; only ``NvmeOptimizer`` does so without having all parameters in memory at once.

    A module larger than memory can be made on the meta device: its submodules then initialize their parameters on
    storage, one after the other, as after ``to_empty``. A model of transformers does so by its ``initialize_weights``.

    Args:
        module: any module; its parameters are on one device, or on the meta device.
        folder: where the parameters go; several folders, one on each device, share them by their measured rates.
        device_budget: bytes for parameters on an accelerator, or a size such as ``"8G"``; ``"auto"``, when None, is
            what is free less an eighth.
        host_budget: bytes of page-locked host memory, where parameters of an accelerator are that do not stay there,
            instead of on storage; ``"auto"``, when None, is what is free less an eighth, ``0`` none.
        memory_budget: another word for the budget of where the parameters are used; on the CPU that of the host.
        memory: in place of a budget of its own, one that is shared with others.
        device: where parameters on the meta device are used; the CPU when None.
        min_bytes: smaller parameters stay in memory, beside the budget.
        param_init_fn: called with each module that has parameters or buffers on the meta device, its own or those of
            its children, once all have memory; children come first, as in ``Module.apply``. When None,
            ``reset_parameters`` of these modules is called, or ``initialize_weights`` of a model of transformers.
        checksums: keep a CRC-32C of each parameter on storage and compare it when it comes back.
        handle: moves the bytes; one for the whole process when None.

    Raises:
        MemoryError: a parameter is larger than the budget.
        ValueError: parameters are on several devices or swapped already, none is large enough, or nothing has given
            values to a parameter or buffer that was on the meta device.
        TypeError: a parameter is a ``DTensor``: swap the parameters of a module that is not sharded.
        OSError: the folder cannot be used; ENOSPC: it has not enough room. The module is then as it was, unless it was
            on the meta device.
    """
    least = bytes_of("min_bytes", min_bytes)
    require_switches(checksums=checksums)
    require_callables(param_init_fn=param_init_fn)
    if not isinstance(module, torch.nn.Module):
        raise TypeError(f"module must be a torch.nn.Module, not {type(module).__name__}")
    every = list(_places(module))
    target = _device_of([parameter for _, _, parameter in every], device)
    large = {id(parameter): parameter for _, _, parameter in every if parameter.nbytes >= least}
    if not large:
        raise ValueError("the module has no parameters, or none of min_bytes or more")
    budgets = budgets_of(target, memory_budget, memory, device_budget, host_budget)
    given, host = budgets.own, budgets.host_tier().share()
    sizes = [(key, 1.0, in_pages(parameter.nbytes)) for key, parameter in large.items()]
    own = given if host.nbytes and isinstance(given, int) else 0  # for what stays, and needs no room in host memory
    kept, in_host = placements(sizes, own, host.nbytes)
    with contextlib.ExitStack() as undo:
        residents = Residents(
            folder,
            "parameters",
            given=given,
            budget_name=budgets.name,
            device=target,
            host=host,
            checksums=checksums,
            handle=handle,
        )
        undo.callback(residents.close)
        made: dict[int, torch.nn.Parameter] = {}
        names = {id(parameter): name for name, parameter in module.named_parameters()}
        for key, parameter in large.items():
            resident = Resident(names[key], parameter, target, key in in_host, key in kept)
            residents.add(resident, None if parameter.is_meta else parameter.detach())
            made[key] = torch.nn.Parameter(SwappedTensor(residents, resident), parameter.requires_grad)
        swapped: list[Any] = list(made.values())
        forward: list[Use] = [(parameter.resident.place, "forward") for parameter in swapped]
        backward: list[Use] = [(parameter.resident.place, "backward") for parameter in reversed(swapped)]
        residents.foresee([*forward, *backward])
        if any(parameter.is_meta for _, _, parameter in every):
            _initialize(module, made, target, param_init_fn)
        else:
            for key, parameter in large.items():
                made[key].grad = parameter.grad
            residents.settle()
            note_replaced(large.values())
            for owner, name, parameter in every:
                if id(parameter) in made:
                    setattr(owner, name, made[id(parameter)])  # not _parameters[name]: an RNN has to notice it
        undo.pop_all()
    return SwappedParams(module, residents)


def _places(module: torch.nn.Module) -> Iterator[tuple[torch.nn.Module, str, torch.nn.Parameter]]:
    """Yields each parameter of a module with its owner and name, a tied one several times."""
    for owner in module.modules():
        for name, parameter in list(owner._parameters.items()):
            if parameter is not None:
                yield owner, name, parameter


def _device_of(parameters: Sequence[torch.Tensor], device: str | torch.device | None) -> torch.device:
    """Returns where the parameters are used. Raises ValueError or TypeError if they cannot be swapped."""
    for parameter in parameters:
        if isinstance(parameter, SwappedTensor):
            raise ValueError("the parameters of this module are swapped already")
        if hasattr(parameter, "to_local"):
            raise TypeError("a DTensor cannot be swapped: swap the parameters of a module that is not sharded")
    own = device_of_all(parameters, "the parameters are")
    if own.type == "meta":
        return device_of(device or "cpu")
    if device is not None and (torch.device(device).type != own.type or device_of(device) != own):
        raise ValueError(f"the parameters are on {own}, not on {device}: move the module there")
    return own


@torch.no_grad()
def _initialize(
    module: torch.nn.Module,
    made: dict[int, torch.nn.Parameter],
    device: torch.device,
    param_init_fn: Callable[[torch.nn.Module], object] | None,
) -> None:
    """Gives tensors on the meta device memory, as ``to_empty`` does, and has them initialized, children first."""
    affected = {
        id(owner) for owner in module.modules() if any(one.is_meta for one in [*owner.parameters(), *owner.buffers()])
    }
    places: dict[int, list[tuple[torch.nn.Module, str]]] = {}
    for owner, name, parameter in _places(module):
        note_replaced([parameter])
        tied = places.setdefault(id(parameter), [])
        given = made.get(id(parameter))
        if given is None:
            given = torch.nn.Parameter(_unset(parameter, device), parameter.requires_grad)
        elif tied:  # a tensor of its own until all are initialized, or the values of the last module would remain
            given = torch.nn.Parameter(_another(given, len(tied)), parameter.requires_grad)
        tied.append((owner, name))
        setattr(owner, name, given)
    buffers: dict[int, torch.Tensor] = {}
    empty = [(owner, name) for tied in places.values() for owner, name in tied]
    for owner in module.modules():
        for name, buffer in owner._buffers.items():
            if buffer is not None and buffer.is_meta:
                owner._buffers[name] = buffers.setdefault(id(buffer), _unset(buffer, device))
                empty.append((owner, name))

    def visit(submodule: torch.nn.Module) -> None:
        if id(submodule) not in affected:
            return
        if param_init_fn is None and _is_transformers(submodule):
            submodule.initialize_weights()  # type: ignore[operator]
            return
        for child in submodule.children():
            visit(child)
        reset: Any = getattr(submodule, "reset_parameters", None) or getattr(submodule, "_reset_parameters", None)
        if param_init_fn is not None:
            param_init_fn(submodule)
        elif reset is not None:
            reset()

    visit(module)
    for submodule in module.modules():
        if _is_transformers(submodule):
            submodule.tie_weights()  # type: ignore[operator]  # it knows whose values remain
    for (owner, name), *others in places.values():
        for other, its_name in others:
            setattr(other, its_name, getattr(owner, name))
    _require_set(module, empty, "param_init_fn does not" if param_init_fn else _NOTHING)


def _is_transformers(module: torch.nn.Module) -> bool:
    library: Any = sys.modules.get("transformers.modeling_utils")
    return library is not None and isinstance(module, library.PreTrainedModel)


def _another(parameter: Any, number: int) -> SwappedTensor:
    """Returns another tensor on storage like this one."""
    like = parameter.resident
    resident = Resident(f"{like.key}.tied{number}", parameter._outline, like.device)
    parameter._residents.add(resident)
    return SwappedTensor(parameter._residents, resident)


def _unset(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Returns memory like that of a tensor on the meta device, marked as not initialized."""
    made = torch.empty_like(tensor, device=device)
    _bytes_of(made).fill_(_mark(made))
    return made


def _mark(tensor: torch.Tensor) -> int:
    return 0xFF if tensor.is_floating_point() or tensor.is_complex() else 0xA5  # NaN; no usual integer, and no bool


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


def _require_set(module: torch.nn.Module, empty: Iterable[tuple[torch.nn.Module, str]], reason: str) -> None:
    """Raises ValueError if tensors, by owner and name, were not initialized: torch would compute with garbage."""
    prefixes = {id(owner): f"{prefix}." if prefix else "" for prefix, owner in module.named_modules()}
    missing = []
    for owner, name in empty:
        tensor = getattr(owner, name)
        if isinstance(tensor, SwappedTensor):
            is_set = bool(tensor.resident.changes or tensor.resident.stored)
        else:
            is_set = not tensor.is_meta and not (tensor.numel() and bool((_bytes_of(tensor) == _mark(tensor)).all()))
        if not is_set:
            missing.append(prefixes[id(owner)] + name)
    if missing:
        more = f" and {len(missing) - 1} more tensors" * (len(missing) > 1)
        raise ValueError(
            f"nothing initializes {missing[0]}{more} of this module on the meta device ({reason}): give a "
            "param_init_fn that initializes all parameters and buffers"
        )


# An optimizer made before its parameters were replaced would train nothing

_replaced: set[WeakIdRef] = set()  # replaced parameters that still exist
_hooks: list[Any] = []  # of all optimizers' steps, while there are such parameters


def note_replaced(parameters: Iterable[torch.Tensor]) -> None:
    """Makes an optimizer raise RuntimeError at its next step if it is to train any of these parameters."""
    _replaced.update(WeakIdRef(parameter, _forget) for parameter in parameters)
    _update_hook()


def _forget(gone: WeakIdRef) -> None:
    _replaced.discard(gone)
    _update_hook()


def _update_hook() -> None:
    """Adds or removes the hook. Without a lock: a garbage collection may call this within itself."""
    while bool(_replaced) != bool(_hooks):
        if _replaced:
            _hooks.append(register_optimizer_step_pre_hook(_require_current))
        else:
            _hooks.pop().remove()


def _require_current(optimizer: torch.optim.Optimizer, *_: object) -> None:
    for group in optimizer.param_groups:
        for tensor in group["params"]:
            if tensor.requires_grad and WeakIdRef(tensor) in _replaced:
                raise RuntimeError(
                    f"a parameter of shape {tuple(tensor.shape)} of this {type(optimizer).__name__} is no longer its "
                    "module's: swap_params, or restore() of what it returned, has put another in its place, which this "
                    "optimizer would not train. Make the optimizer after swap_params, and anew after restore()"
                )
