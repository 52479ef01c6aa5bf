"""Optimizers of torch with float32 masters by hand: what ``master_weights=True`` is compared with."""

from __future__ import annotations

import copy
from typing import Any

import torch

from nvme_ops.offload.optimizer.chunks import HALF, MASTER


def with_masters(kind: Any) -> Any:
    """A subclass that updates a copy in float32 of each bfloat16 and float16 parameter, which is one of its states.

    What the program has changed in a parameter since then is changed in the copy too.
    """

    class WithMasters(kind):
        def __init__(self, params: Any, **options: Any) -> None:
            super().__init__(params, **options)
            for each, found in self.state.items():  # of Adagrad
                found.update({name: value.float() for name, value in found.items() if each.dtype in HALF})

        def load_state_dict(self, state_dict: Any) -> None:
            super().load_state_dict(state_dict)
            numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
            for each, number in zip(self._params(), numbers, strict=True):  # which torch casts to the parameter's dtype
                if each.dtype in HALF and number in state_dict["state"]:
                    self.state[each] = copy.deepcopy(state_dict["state"][number])

        def _params(self) -> list[torch.Tensor]:
            return [each for group in self.param_groups for each in group["params"]]

        def step(self, closure: Any = None) -> Any:
            with torch.enable_grad():
                loss = None if closure is None else closure()
            found = [(each, each.data, each.grad) for each in self._params() if each.dtype in HALF]
            before = [(each, values, gradient) for each, values, gradient in found if gradient is not None]
            for each, values, gradient in before:
                master = self.state[each].pop(MASTER, None)
                master = values.float() if master is None else master
                master.copy_(torch.where(values == master.to(values.dtype), master, values.float()))
                each.grad = None
                each.data = master
                each.grad = gradient.float()
            super().step()
            for each, values, gradient in before:
                states = self.state[each]
                first = {name: value for name, value in states.items() if not torch.is_tensor(value) or not value.dim()}
                self.state[each] = {**first, MASTER: each.data, **states}
                each.grad = None
                each.data = values.copy_(each.data)
                each.grad = gradient
            return loss

    return WithMasters
