"""``usual_cache``: what ``NvmeCache`` must return, from tensors in memory; with a dtype by its definition."""

from __future__ import annotations

import math
from typing import Any

import torch
from transformers import Cache, DynamicCache
from transformers.cache_utils import DynamicLayer


def rounded(states: torch.Tensor, dim: int, dtype: str) -> torch.Tensor:
    """Values in 8 bits whose scale is that of the largest one along ``dim``."""
    values = states.float()
    most = 127 if dtype == "int8" else 448
    scale = (values.abs().amax(dim, keepdim=True) / most).clamp(min=torch.finfo(torch.float32).tiny)
    made = (values / scale).round() if dtype == "int8" else (values / scale).to(torch.float8_e4m3fn).float()
    return (made * scale).to(states.dtype)


class RoundedLayer(DynamicLayer):
    """Full pages are rounded, all but the newest one."""

    def __init__(self, dtype: str, window: int | None) -> None:
        super().__init__()
        self.dtype, self.window, self.done = dtype, window, 0
        self.is_sliding = window is not None

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        before = self.get_seq_length()
        seen = [states.clone() for states in super().update(key_states, value_states)]
        assert self.keys is not None
        assert self.values is not None
        page = max(64, *(4096 // math.gcd(states.shape[-1], 4096) for states in seen))
        self.done = min(self.done, before // page * page)
        for at in range(self.done, (before + key_states.shape[2]) // page * page - page, page):
            self.done = at + page
            for group in range(at, at + page, 64):
                part = self.keys[:, :, group : group + 64]
                part.copy_(rounded(part, -2, self.dtype))
            part = self.values[:, :, at : at + page]
            part.copy_(rounded(part, -1, self.dtype))
        first = 0 if self.window is None else max(0, before - self.window + 1)
        return seen[0][:, :, first:], seen[1][:, :, first:]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        length = self.get_seq_length()
        first = 0 if self.window is None else max(0, length - self.window + 1)
        return length - first + query_length, first

    def activate_past_recording(self) -> None:
        """All is kept."""


def usual_cache(config: Any, dtype: str | None = None) -> Any:
    if dtype is None:
        return DynamicCache(config=config)
    kinds = config.layer_types
    return Cache(layers=[RoundedLayer(dtype, config.sliding_window if "sliding" in kind else None) for kind in kinds])
