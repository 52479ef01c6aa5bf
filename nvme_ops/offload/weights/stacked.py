"""Experts that files have one by one and a model in one parameter: stacked before transformers sees them.

transformers copies its converter for each tensor that it stacks: of tens of thousands that takes longer than all else.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch

from nvme_ops.formats.packed import Packed
from nvme_ops.formats.quantized import Scaled
from nvme_ops.offload.weights.stored import concatenated_as_stored
from nvme_ops.offload.weights.stored_formats import Joined

_EXPERT = re.compile(r"(.*\.\d+\..*\.)(\d+)(\..*)")  # of two numbers in its name the last one is its own


class Stacked:
    """Tensors of one shape, in place of the first of them: ``torch.stack`` of it alone returns them stacked.

    transformers takes it for a tensor that is still in a file: of such a one it asks for the whole, then for a dtype.
    """

    def __init__(self, values: Any) -> None:
        self._values = values

    def __getitem__(self, index: Any) -> Stacked:
        """Returns itself, of which ``...`` is all."""
        if index is not ...:
            raise TypeError("a stack has no parts yet")
        return self

    def to(self, *args: Any, **kwargs: Any) -> Stacked:
        """Converts all tensors."""
        return Stacked(self._values.to(*args, **kwargs))

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Knows ``torch.stack`` alone."""
        del cls, types, kwargs
        return args[0][0]._values if func is torch.stack and len(args[0]) == 1 else NotImplemented


def with_stacked(joined: Mapping[str, Joined], blank: Callable[[], Any]) -> tuple[dict[str, Joined], set[str]]:
    """Stacks weights that transformers would stack, and that are stored alike.

    Args:
        joined: weights by the names that they have in the files.
        blank: makes the model without values; called if there may be any such weights.

    Returns:
        the weights, those that are stacked by the name of the first of them, and these names.
    """
    groups: dict[tuple[str, str], list[tuple[int, str]]] = {}
    for name in joined:
        if (match := _EXPERT.fullmatch(name)) is not None:
            groups.setdefault((match[1], match[3]), []).append((int(match[2]), name))
    several = [[name for _, name in sorted(group)] for group in groups.values() if len(group) > 1]
    made, firsts = dict(joined), set[str]()
    is_stacked = _rule(blank()) if several else None
    for names in several:
        if is_stacked is None or not is_stacked(names[0], names[-1]):
            continue
        if (one := _stacked([joined[name] for name in names])) is not None:
            for name in names:
                del made[name]
            made[names[0]] = one
            firsts.add(names[0])
    return made, firsts


def _rule(model: Any) -> Callable[[str, str], bool]:
    """Returns what says whether transformers stacks the first and the last of some weights in the same parameter."""
    from transformers import core_model_loading as loading
    from transformers.conversion_mapping import get_model_conversion_mapping

    conversions = get_model_conversion_mapping(model)
    converters = [one for one in conversions if isinstance(one, loading.WeightConverter)]
    renamings = [one for one in conversions if isinstance(one, loading.WeightRenaming)]
    of_pattern = {pattern: one for one in converters for pattern in one.source_patterns}
    state = model.state_dict()

    def is_stacked(first: str, last: str) -> bool:
        renamed = [
            loading.rename_source_key(name, renamings, converters, model.base_model_prefix, state)
            for name in (first, last)
        ]
        target, pattern = renamed[0]
        if renamed[0] != renamed[1] or pattern is None or target not in state:
            return False
        operation = of_pattern[pattern].operations[0]
        return isinstance(operation, loading.MergeModulelist) and operation.dim == 0

    return is_stacked


def _stacked(parts: Sequence[Joined]) -> Joined | None:
    """Returns weights as one with another dimension in front; None if they are not stored alike."""
    shape, formats = parts[0].source.shape, [part.stored_as for part in parts]
    if not shape or any(part.source.shape != shape for part in parts):
        return None
    if all(isinstance(form, Packed | Scaled) for form in formats):
        formats = [cast("Packed | Scaled", form).unsqueeze(0) for form in formats]
        if None in formats:  # of several matrices each
            return None
    made = concatenated_as_stored([part.source for part in parts], formats, [(1, *shape)] * len(parts), 0)
    return None if made is None else Joined(made[0].view((len(parts), *shape)), made[1])
