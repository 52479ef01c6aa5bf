"""Parameters that others have taken the place of: an optimizer that still has them would train nothing."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

_replaced: dict[int, weakref.ref[torch.Tensor]] = {}  # by id: those that still exist
_hooks: list[Any] = []  # of all optimizers, once there is something to look for


def note_replaced(parameters: Iterable[torch.Tensor]) -> None:
    """Has each optimizer raise RuntimeError at its next step if it has any of these parameters, and trains it."""
    for each in parameters:
        key = id(each)
        _replaced[key] = weakref.ref(each, lambda gone, key=key: _forget(key, gone))  # type: ignore[misc]
    if not _hooks:
        _hooks.append(register_optimizer_step_pre_hook(_require_present))


def _forget(key: int, gone: weakref.ref[torch.Tensor]) -> None:
    if _replaced.get(key) is gone:  # else another parameter has its id by now
        del _replaced[key]


def _require_present(optimizer: torch.optim.Optimizer, *_: object) -> None:
    if not _replaced:
        return
    for group in optimizer.param_groups:
        for each in group["params"]:
            found = _replaced.get(id(each))
            old = None if found is None else found()
            if old is not None and old is each and old.requires_grad:
                raise RuntimeError(
                    f"a parameter of shape {tuple(old.shape)} of this {type(optimizer).__name__} is no longer its "
                    "module's: swap_params, or restore() of what it returned, has put another in its place, which this "
                    "optimizer would not train. Make the optimizer after swap_params, and anew after restore()"
                )
