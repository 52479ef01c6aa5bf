"""``QuantizedLayer``: the keys and values of one layer in 8 bits, beside the newest ones as they are."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from nvme_ops.formats.quantized import Scaled
from nvme_ops.formats.quantizing import quantize
from nvme_ops.memory.tier import in_pages
from nvme_ops.offload.cache.layer import Kind, PagedLayer, PageLayout

#: What is stored, by its name.
DTYPES = {"int8": torch.int8, "float8": torch.float8_e4m3fn}

_GROUP = 64  # tokens whose keys share a scale in each channel; values have one for each token and head
_FLOAT = torch.float32.itemsize  # bytes of a scale
_AT_ONCE = 4 << 20  # bytes that are quantized at once


class QuantizedLayer(PagedLayer):
    """A layer of which full pages are quantized, all but the newest one: that and the incomplete one are in the tail.

    Whole pages are quantized in their order, of a size that no budget changes: the values are the same wherever they
    lie. A third part beside numbers of keys and values has their scales: those of a page and a row of the batch
    together, padded to whole pages of memory. Attention sees none of it: it is expanded to other memory for each use.

    Args:
        number: as above.
        window: as above.
        dtype: of what is stored.
    """

    def __init__(self, number: int, window: int | None, dtype: torch.dtype) -> None:
        super().__init__(number, window)
        self._dtype = dtype

    def clear(self) -> None:
        """Forgets everything; see ``PagedLayer``."""
        super().clear()
        self._quantized = 0  # tokens before this one are quantized; a multiple of a page

    def shape(self, batch: int, kinds: Sequence[Kind], page_bytes: int) -> None:
        """Sets how many rows there are, and the kinds of the keys and of the values; no budget sets the page."""
        super().shape(batch, kinds, page_bytes)
        numbers: list[Kind] = [(heads, width, torch.int8) for heads, width, _ in kinds]
        self.page = max(_GROUP, PageLayout(batch, numbers).aligned)  # both are powers of two
        (heads, width, _), (of_values, _, _) = kinds
        self._scales_of_keys = heads * (self.page // _GROUP) * width  # in a page of a row
        self._scales_of_values = of_values * self.page
        nbytes = in_pages(_FLOAT * (self._scales_of_keys + self._scales_of_values))
        self.stored = PageLayout(batch, [*numbers, (1, nbytes // self.page, torch.uint8)])
        self.tail_bytes = 2 * self.page * self.layout.token_bytes

    @property
    def bytes_cached(self) -> int:
        """Bytes of the needed tokens as they are stored, and of the newest ones as they are."""
        if not self.batch:
            return 0
        stored = max(0, self._stop - self._first) * self.stored.token_bytes
        return stored + max(0, self.tokens - max(self._first, self._quantized)) * self.layout.token_bytes

    def expanded_bytes(self, nbytes: int) -> int:
        """Returns the bytes of the memory that ``expand`` fills, if its own has ``nbytes``."""
        return nbytes // self.stored.token_bytes * self.layout.token_bytes

    def expand(self, memory: torch.Tensor) -> None:
        """Fills other memory with keys and values as attention sees them."""
        self._cut(self._page_floor(self.tokens))  # if Ctrl-C has left pages of tokens that were not added
        if self._base < self._quantized:
            self._expand(self._base, self._base + self._capacity, memory)
        first = max(self._base, self._quantized)
        slots = self._slots(first, self.tokens)
        for part, tail in zip(self.layout.parts_in(memory, self._capacity), self._tail_parts(), strict=True):
            part[:, :, first - self._base : self.tokens - self._base].copy_(tail.index_select(2, slots))

    def content(self) -> list[torch.Tensor]:
        """Returns all that it has of the needed tokens, and the tail."""
        return [*self.pages(), *self._tail_parts()]

    # Below

    @property
    def _stop(self) -> int:
        return min(self._quantized, self._page_ceil(self.tokens))

    def _slots(self, first: int, last: int) -> torch.Tensor:
        """Returns where in the tail, a ring of two pages, tokens are."""
        tail = self._tail()
        return torch.arange(first, last, device=tail.device) % (2 * self.page)

    def _tail(self) -> torch.Tensor:
        if self.tail is None:
            raise RuntimeError(f"layer {self.number} has no shape")
        return self.tail

    def _tail_parts(self) -> list[torch.Tensor]:
        return self.layout.parts_in(self._tail(), 2 * self.page)

    def _keep(self, before: int, after: int, parts: Sequence[torch.Tensor]) -> None:
        """Quantizes the pages that are no longer the newest, and keeps the others in the tail.

        Raises ValueError for a value that is not finite; the layer is as it was.
        """
        first = self._first if self.recording else max(self._first, self._first_seen(after))
        begin = max(self._quantized, self._page_floor(first))
        end = max(begin, self._page_floor(after) - self.page)
        step = self.page * max(1, _AT_ONCE // (self.page * self.layout.token_bytes))
        for at in range(begin, end, step):
            self._quantize(at, min(end, at + step), parts)
        self._quantized, before = end, max(before, end)
        slots = self._slots(before, after)
        for part, tail in zip(parts, self._tail_parts(), strict=True):
            tail.index_copy_(2, slots, part[:, :, before - self._base : after - self._base])

    def _quantize(self, first: int, last: int, parts: Sequence[torch.Tensor]) -> None:
        """Fills whole pages in its memory with what ``parts`` have of them."""
        *numbers, scales = (part[:, :, first - self._base : last - self._base] for part in self._parts())
        keys, values = (part[:, :, first - self._base : last - self._base] for part in parts)
        grouped = keys.unflatten(2, (-1, self.page // _GROUP, _GROUP)), values.unflatten(2, (-1, self.page))
        for states, dim, to, scale in zip(grouped, (-2, -1), numbers, self._scales(scales), strict=True):
            made, factor = quantize(states, self._dtype, dim, f"layer {self.number}: a key or value")
            to.copy_(made.view(torch.int8).view(to.shape))
            scale.copy_(factor)

    def _expand(self, first: int, last: int, memory: torch.Tensor) -> None:
        """Fills memory that has room for these tokens with what is stored of them, in whole pages of its own."""
        *numbers, scales = (part[:, :, first - self._base : last - self._base] for part in self._parts())
        for out, number, scale in zip(
            self.layout.parts_in(memory, last - first), numbers, self._scales(scales), strict=True
        ):
            stored = number.reshape(-1, number.shape[-1]).view(self._dtype)
            Scaled(scale.reshape(-1, scale.shape[-1])).expand(stored, out.view(stored.shape))

    def _scales(self, part: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns scales: of keys ``[batch, heads, pages, groups, 1, width]``, of values ``[..., pages, page, 1]``."""
        count = self._scales_of_keys + self._scales_of_values
        pages = part.view(self.batch, -1, self.page * part.shape[-1])[:, :, : _FLOAT * count].view(torch.float32)
        (heads, width, _), (of_values, _, _) = self.layout.kinds
        keys, values = pages.split([self._scales_of_keys, self._scales_of_values], dim=-1)
        return (
            keys.unflatten(-1, (heads, -1, 1, width)).transpose(1, 2),
            values.unflatten(-1, (of_values, self.page, 1)).transpose(1, 2),
        )

    def _cut(self, tokens: int) -> None:
        """Forgets the files from token ``tokens`` on, where the incomplete page begins; its tokens go to the tail."""
        if self.tokens < self._quantized:
            if tokens < self.tokens:
                page = torch.empty(self.page * self.layout.token_bytes, dtype=torch.uint8, device=self._tail().device)
                self._expand(tokens, tokens + self.page, page)
                slots = self._slots(tokens, tokens + self.page)
                for part, tail in zip(self.layout.parts_in(page, self.page), self._tail_parts(), strict=True):
                    tail.index_copy_(2, slots, part)
            self._quantized = tokens
        super()._cut(tokens)

    def _copy_rest(self, from_tail: bool) -> None:
        """Does nothing: the tail has what is in no file."""

    def _reorder_tail(self, rows: torch.Tensor) -> None:
        self.layout.reorder(self._tail(), 2 * self.page, 0, 2 * self.page, rows)

    def _leave_window(self) -> None:
        super()._leave_window()
        self._quantized = max(self._quantized, self._page_floor(self._first))
