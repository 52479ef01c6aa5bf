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
            for param, state in self.state.items():  # of Adagrad
                state.update({name: value.float() for name, value in state.items() if param.dtype in HALF})

        def load_state_dict(self, state_dict: Any) -> None:
            super().load_state_dict(state_dict)
            numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
            for param, number in zip(self._params(), numbers, strict=True):  # torch casts them to its dtype
                if param.dtype in HALF and number in state_dict["state"]:
                    self.state[param] = copy.deepcopy(state_dict["state"][number])

        def _params(self) -> list[torch.Tensor]:
            return [param for group in self.param_groups for param in group["params"]]

        def step(self, closure: Any = None) -> Any:
            with torch.enable_grad():
                loss = None if closure is None else closure()
            halves = [(param, param.data, param.grad) for param in self._params() if param.dtype in HALF]
            before = [(param, values, gradient) for param, values, gradient in halves if gradient is not None]
            for param, values, gradient in before:
                master = self.state[param].pop(MASTER, None)
                master = values.float() if master is None else master
                master.copy_(torch.where(values == master.to(values.dtype), master, values.float()))
                param.grad = None
                param.data = master
                param.grad = gradient.float()
            super().step()
            for param, values, gradient in before:
                states = self.state[param]
                first = {name: value for name, value in states.items() if not torch.is_tensor(value) or not value.dim()}
                self.state[param] = {**first, MASTER: param.data, **states}
                param.grad = None
                param.data = values.copy_(param.data)
                param.grad = gradient
            return loss

    return WithMasters
