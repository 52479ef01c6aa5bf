"""Converts between tensors and what is stored of them: another dtype, or values of 8 bits with a scale."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

KINDS = (torch.int8, torch.float8_e4m3fn, torch.float8_e5m2)
_MAX = 127  # the values are within -127 and 127
_CHUNK = 1 << 18  # elements that are multiplied at once, in float32

#: How files name the scale of a weight, and the factor to apply to it: compressed-tensors and static FP8; FP8 in blocks
#: as in DeepSeek-V3, whose "inverse" scale is the one to multiply by; bitsandbytes' LLM.int8().
SCALES = {"weight_scale": 1.0, "weight_scale_inv": 1.0, "SCB": 1 / _MAX}


def quantize(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns a tensor as int8, and the scale of each row: its largest absolute value over 127, in float32.

    Each value is off by at most half the scale of its row. Raises ValueError for values that are not finite.
    """
    largest = tensor.detach().abs().amax(dim=-1, keepdim=True).float()
    if not bool(largest.isfinite().all()):
        raise ValueError("a weight that is not finite cannot be quantized")
    scale = (largest / _MAX).clamp(min=torch.finfo(torch.float32).tiny)
    values = torch.empty(tensor.shape, dtype=torch.int8, device=tensor.device)
    for part in _parts(tensor):
        values[part] = (tensor[part].detach().float() / scale[part]).round_().to(torch.int8)
    return values, scale


class WeightFormat(Protocol):
    """Computes the values of a tensor from what is stored of it."""

    def expand(self, parts: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        """Fills ``out``, which has the tensor's shape and dtype, from its stored ``parts``."""


class Cast(WeightFormat):
    """Stored as values in another dtype."""

    def expand(self, parts: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        """Fills ``out`` from one part, the values."""
        out.copy_(parts[0])


class Scaled(WeightFormat):
    """Stored as values of 8 bits and their scale; they are multiplied in float32.

    The scale is one number, one for each row, one for each block of a matrix, or of a shape that broadcasts.
    """

    def expand(self, parts: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        """Fills ``out`` from two parts, the values and the scale."""
        values, scale = parts[0], parts[1].to(out.device)
        if scale.dim() == 1 and scale.numel() == values.shape[0] > 1:
            scale = scale.view(-1, *(1,) * (values.dim() - 1))
        elif scale.dim() == values.dim() and not _broadcasts(scale, values):
            for dim in range(scale.dim()):
                block = -(-values.shape[dim] // scale.shape[dim])
                scale = scale.repeat_interleave(block, dim).narrow(dim, 0, values.shape[dim])
        scale = scale.float().expand(values.shape)
        for rows in _parts(values):
            out[rows] = values[rows].float().mul_(scale[rows])


def expand(values: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Returns ``values`` times ``scale`` in new memory; ``Scaled`` says which scales there are."""
    made = torch.empty(values.shape, dtype=dtype, device=values.device)
    Scaled().expand((values, scale), made)
    return made


def _broadcasts(scale: torch.Tensor, values: torch.Tensor) -> bool:
    return all(one in (1, other) for one, other in zip(scale.shape, values.shape, strict=True))


def _parts(tensor: torch.Tensor) -> list[slice]:
    """Returns slices of the first dimension that have about ``_CHUNK`` elements each."""
    rows = tensor.shape[0]
    step = max(1, _CHUNK * rows // max(1, tensor.numel()))
    return [slice(start, min(start + step, rows)) for start in range(0, rows, step)]
