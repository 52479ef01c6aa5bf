"""Converts between tensors and what is stored of them: another dtype, or values of 8 bits with a scale."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import torch

KINDS = (torch.int8, torch.float8_e4m3fn, torch.float8_e5m2)
_MAX = 127  # the values are within -127 and 127
_CHUNK = 1 << 18  # elements that are multiplied at once, in float32

#: How names of a scale end, after the name of its weight: in compressed-tensors and static FP8; in FP8 in blocks as in
#: DeepSeek-V3, whose "inverse" scale is the one to multiply by.
_SCALES = ("_scale", "_scale_inv")


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


def weight_of(scale: str) -> str | None:
    """Returns the name of the weight whose scale may have this name."""
    module, _, last = scale.rpartition(".")
    if last == "SCB":  # bitsandbytes' LLM.int8()
        return f"{module}.weight"
    return next((scale.removesuffix(each) for each in _SCALES if scale.endswith(each)), None)


def read_scale(name: str, stored: torch.Tensor, shape: Sequence[int], blocks: Sequence[int] = ()) -> torch.Tensor:
    """Returns what a stored scale says, in float32, with as many dimensions as its weight; its sizes divide those.

    Args:
        name: of the scale.
        stored: one factor for all, one for each row, or one for each block of the weight, of which the last ones may be
            short. As uint8 it holds exponents (E8M0: 127 stands for 1).
        shape: of the weight.
        blocks: sizes of the blocks, in the last dimensions, that the configuration names. Those of which the scale has
            another number are inferred: blocks of equal size, else of a power of two.

    Raises:
        ValueError: there are no such blocks.
    """
    scale = torch.exp2(stored.float() - 127) if stored.dtype == torch.uint8 else stored.float()
    if name.endswith("SCB"):
        scale = scale / _MAX
    if scale.numel() == 1:
        return scale.reshape((1,) * len(shape))
    if scale.dim() == 1 and len(scale) == shape[0]:
        return scale.reshape(-1, *(1,) * (len(shape) - 1))
    fits = scale.dim() == len(shape)
    for dim, size in enumerate(shape if fits else ()):
        count = scale.shape[dim]
        named = blocks[dim - len(shape) :][:1] if len(shape) - dim <= len(blocks) else ()
        likely = [*named, max(1, size // max(1, count)), *(1 << power for power in range(16))]
        block = next((each for each in likely if -(-size // each) == count), 0)
        if block == 0:
            fits = False
            break
        step = math.gcd(size, block)
        scale = scale.repeat_interleave(block // step, dim).narrow(dim, 0, size // step)
    if not fits:
        raise ValueError(f"{name}: a scale of shape {tuple(stored.shape)} fits no weight of shape {tuple(shape)}")
    return scale


def joined_scales(scales: Sequence[torch.Tensor], shapes: Sequence[Sequence[int]], dim: int) -> torch.Tensor:
    """Returns the scale of the weights of these shapes when they are concatenated."""
    steps = [shape[dim] // scale.shape[dim] for scale, shape in zip(scales, shapes, strict=True)]
    found = []
    for scale, step in zip(scales, steps, strict=True):
        scale = scale.repeat_interleave(step // math.gcd(*steps), dim)
        for other in range(scale.dim()):
            if other != dim:
                count = math.lcm(*(each.shape[other] for each in scales))
                scale = scale.repeat_interleave(count // scale.shape[other], other)
        found.append(scale)
    return torch.cat(found, dim)


class Scaled(WeightFormat):
    """Stored as values of 8 bits and their scale, as ``read_scale`` returns it; they are multiplied in float32."""

    def expand(self, parts: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        """Fills ``out`` from two parts, the values and the scale."""
        values, scale = parts[0], parts[1].to(out.device)
        for dim in range(scale.dim()):
            if scale.shape[dim] > 1:
                scale = scale.repeat_interleave(values.shape[dim] // scale.shape[dim], dim)
        scale = scale.expand(values.shape)
        for rows in _parts(values):
            out[rows] = values[rows].float().mul_(scale[rows])


def expand(values: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Returns ``values`` times ``scale``, as ``Scaled`` does, in new memory."""
    made = torch.empty(values.shape, dtype=dtype, device=values.device)
    Scaled().expand((values, scale), made)
    return made


def _parts(tensor: torch.Tensor) -> list[slice]:
    """Returns slices of the first dimension that have about ``_CHUNK`` elements each."""
    rows = tensor.shape[0]
    step = max(1, _CHUNK * rows // max(1, tensor.numel()))
    return [slice(start, min(start + step, rows)) for start in range(0, rows, step)]
