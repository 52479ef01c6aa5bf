"""``NvmeCache``: a transformers cache of keys and values that may be larger than memory."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Callable, Sequence
from typing import Any, Literal, NoReturn

import torch
from transformers import Cache, DynamicCache
from transformers.cache_utils import (
    DYNAMIC_LAYER_TYPE_MAPPING,
    CacheLayerMixin,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionLayer,
    get_layer_types_and_kwargs,
)

from nvme_ops.base.lifetime import Closing
from nvme_ops.base.text import bytes_of, counted, never_raising
from nvme_ops.io.handle import aio_handle
from nvme_ops.offload.budgets import Budgets, Size, budgets_of, says_what_is_free
from nvme_ops.offload.cache.pager import CacheStats, Pager
from nvme_ops.offload.cache.quantized_layer import DTYPES
from nvme_ops.offload.memory import Memory, budget_of


class NvmeLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """Keys and values of one layer of a model, with the interface of transformers' ``DynamicLayer``."""

    is_croppable = True
    is_sliding = False

    def __init__(self, pager: Pager, number: int, sliding_window: int | None = None) -> None:
        self._pager, self._window = pager, sliding_window
        self._paged = pager.layer(number, sliding_window)
        if sliding_window is not None:
            self.is_sliding = True
            self.sliding_window = sliding_window

    @property
    def is_initialized(self) -> bool:  # type: ignore[override]
        """Whether the shape of the keys and values is known."""
        return self._paged.batch > 0

    @property
    def keys(self) -> torch.Tensor | None:  # type: ignore[override]
        """The keys, ``[batch, heads, tokens, width]``, read if necessary; None before the first."""
        return self._half(0)

    @property
    def values(self) -> torch.Tensor | None:  # type: ignore[override]
        """The values, ``[batch, heads, tokens, width]``, read if necessary; None before the first."""
        return self._half(1)

    def _half(self, half: int) -> torch.Tensor | None:
        return self._pager.half(self._paged, half) if self._paged.batch else None

    @torch.no_grad()
    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Takes the shapes and dtypes of the keys and values, ``[batch, heads, tokens, width]``."""
        self._pager.start(self._paged, key_states, value_states)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Adds tokens; returns all keys and values that attention sees. Starts to read the next layers.

        Raises:
            MemoryError: the layer in use does not fit the budget; the message says how much is needed.
            OSError: the disk is full (ENOSPC), or a file cannot be read or written.
            RuntimeError: gradients are required; the process is a forked child.
            ValueError: the cache is closed; the shape is not that of the tokens before; or with a ``dtype`` tokens that
                are to be quantized, the newest ones excepted, are not finite: the layer is as it was.
        """
        if torch.is_grad_enabled() and (key_states.requires_grad or value_states.requires_grad):
            raise RuntimeError("NvmeCache is for inference: run the model under torch.no_grad()")
        with torch.no_grad():
            return self._pager.append(self._paged, key_states, value_states)

    def get_seq_length(self) -> int:
        """Returns the number of tokens seen so far."""
        return self._paged.tokens

    def get_max_length(self) -> int:
        """Returns the size of the window in tokens, or -1 without one."""
        return -1 if self._window is None else self._window

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Returns how many keys the next ``update`` returns, and which token is the first of them."""
        first = 0 if self._window is None else max(self._paged.tokens - self._window + 1, 0)
        return self._paged.tokens - first + query_length, first

    def activate_past_recording(self) -> None:
        """Keeps tokens that have left the window, until ``crop``."""
        self._paged.recording = True

    def crop(self, tokens_to_remove: int) -> None:
        """Forgets the last ``-tokens_to_remove`` tokens. Moves no data. Raises ValueError for a positive number."""
        if tokens_to_remove > 0:
            raise ValueError(f"the number of tokens to remove is given as a negative one, not {tokens_to_remove}")
        if self._paged.batch:
            self._pager.crop(self._paged, max(0, self._paged.tokens + tokens_to_remove))
        self._pager.require_open()

    def reset(self) -> None:
        """Forgets everything; the space in the files is used again."""
        self._pager.reset(self._paged)

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Reorders the batch. Tokens in the files are not written again, unless the size of the batch changes."""
        with torch.no_grad():
            self._pager.reorder(self._paged, beam_idx.to("cpu"))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeats each row of the batch ``repeats`` times."""
        self.reorder_cache(torch.arange(self._paged.batch, device="cpu").repeat_interleave(repeats))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keeps these rows of the batch: indices or a mask."""
        self.reorder_cache(torch.arange(self._paged.batch, device="cpu")[indices.to("cpu")])

    def offload(self) -> None:
        """Does nothing: the cache itself decides what leaves memory."""

    def prefetch(self) -> None:
        """Does nothing: the cache itself reads ahead."""


class NvmeHybridLayer(LinearAttentionLayer, NvmeLayer):  # type: ignore[override]  # as transformers' own ones
    """Keys and values of a layer that has a recurrent state as well, which stays in memory."""

    is_compileable = False

    def __init__(self, pager: Pager, number: int, sliding_window: int | None = None, number_of_states: int = 1) -> None:
        NvmeLayer.__init__(self, pager, number, sliding_window)
        LinearAttentionLayer.__init__(self, number_of_states=number_of_states)  # type: ignore[no-untyped-call]

    def lazy_initialization(self, *keys_and_values: torch.Tensor, **state: Any) -> None:  # type: ignore[override]
        """Takes the shapes of keys and values, or, by name, those of the state."""
        kind: Any = NvmeLayer if keys_and_values else LinearAttentionLayer
        kind.lazy_initialization(self, *keys_and_values, **state)

    def activate_past_recording(self) -> None:
        """Keeps what is needed for ``crop``."""
        self._both("activate_past_recording")

    def crop(self, tokens_to_remove: int) -> None:
        """Forgets the last ``-tokens_to_remove`` tokens, as transformers does where there is no recurrent state."""
        self._both("crop", tokens_to_remove)

    def reset(self) -> None:
        """Forgets everything."""
        self._both("reset")

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Reorders the batch."""
        self._both("reorder_cache", beam_idx)

    def _both(self, method: str, *arguments: Any) -> None:
        for kind in (LinearAttentionLayer, NvmeLayer):
            getattr(kind, method)(self, *arguments)

    offload = NvmeLayer.offload
    prefetch = NvmeLayer.prefetch


class NvmeCache(Closing, DynamicCache):
    """Keys and values in bounded memory, and beyond it in files, for contexts and batches larger than memory.

        with nvme_ops.offload.NvmeCache("/mnt/nvme", memory_budget="4G") as cache:
            model.generate(**inputs, cache=cache)  # past_key_values= before transformers 5.24

    It is used like transformers' ``DynamicCache``, with any implementation of attention. As many layers as fit stay in
    memory; the others are read while those before them compute. With an accelerator that is its own memory; what leaves
    it goes to page-locked host memory, and to files what does not fit there. The files are removed when the cache is
    closed or gone, at the latest when the program ends. One thread at a time may use it.

    Args:
        folder: where files go; several, each on a device of its own, share the layers by their measured rates.
        memory_budget: an older name of ``host_budget``.
        device_budget: bytes of an accelerator's memory for keys and values, those of the layer in use included, or a
            size such as ``"4G"``; ``"auto"``, and None, is 7/8 of what is free when the first ones come. With 0, or
            None where a device does not say what is free, they stay in ordinary host memory and are copied at each use.
        host_budget: the same of host memory; on an accelerator beside its own, and 0 is none.
        memory: in place of budgets of its own, memory that is shared with others: streamed weights give way.
        config: the model's. With it, layers with a sliding window keep no more than the window, and layers with a
            recurrent state instead of keys and values are supported: their state stays in memory.
        handle: moves the bytes; one for the whole process when None.
        dtype: ``"int8"`` or ``"float8"`` (E4M3): tokens are stored in 8 bits, in memory as in files, keys with a scale
            for each channel and 64 tokens, values with one for each token and head; the newest 64 and up to a page more
            stay as they are. None: all stay as they are.

    Raises:
        TypeError: neither a budget nor ``memory`` is given, or both are.
        ValueError: a budget is no size, there is no such ``dtype``, or the model has layers of a kind that is not
            supported.
        OSError: the folder cannot be used.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        memory_budget: int | str | None = None,
        *,
        device_budget: Size = None,
        host_budget: Size = None,
        memory: Memory | None = None,
        config: Any = None,
        handle: aio_handle | None = None,
        dtype: Literal["int8", "float8"] | None = None,
    ) -> None:
        if dtype not in (None, *DTYPES):
            raise ValueError(f"dtype must be None or {', '.join(map(repr, DTYPES))}, not {dtype!r}")
        given = _budgets(memory_budget, memory, device_budget, host_budget)
        layers = None if config is None else _layers_of(config)
        self._pager = pager = Pager(folder, memory, given, handle, DTYPES[dtype] if dtype else None)
        if layers is not None:
            paged = (NvmeLayer, NvmeHybridLayer)
            Cache.__init__(
                self, layers=[made(pager, **given) if made in paged else made(**given) for made, given in layers]
            )
            return
        numbers = itertools.count()

        Cache.__init__(self, layer_class_to_replicate=lambda: NvmeLayer(pager, next(numbers)))  # type: ignore[arg-type]

    def stats(self) -> CacheStats:
        """Returns the bytes written and read since the cache was made, and those that it holds."""
        return self._pager.stats()

    def explain(self) -> str:
        """Says what was moved and waited for since the last call or the start, and what limits.

        The first call measures the rates of storage and bus. Raises OSError if a folder has no room for 256 MiB.
        """
        return self._pager.account.explain(self.stats(), self._pager.share.device)

    def close(self) -> None:
        """Removes the files and releases the memory. The cache cannot be used any more. Further calls do nothing."""
        self._pager.close()

    def __del__(self) -> None:
        if hasattr(self, "_pager") and contextlib is not None:  # at Python's end its modules may be gone
            with contextlib.suppress(Exception):
                self.close()

    def __deepcopy__(self, _: object) -> NoReturn:
        raise TypeError("an NvmeCache cannot be copied: its content is in files of its own")

    def __reduce__(self) -> NoReturn:
        raise TypeError("an NvmeCache cannot be pickled: its content is in files of its own")

    @never_raising
    def __repr__(self) -> str:
        """Returns for example ``<NvmeCache: 32 layers, 4096 tokens>``."""
        tokens = self.get_seq_length() if self.layers else 0
        content = f"{counted(len(self.layers), 'layer')}, {counted(tokens, 'token')}"
        return f"<NvmeCache: {'closed' if self._pager.closed else content}>"


def _budgets(
    memory_budget: Size, memory: Memory | None, device_budget: Size, host_budget: Size
) -> Callable[[torch.device], tuple[torch.device, Budgets]] | None:
    """Returns what says for a device where its keys and values are, and the budgets there; None: in ``memory``.

    Raises TypeError or ValueError for what no device could have.
    """
    if host_budget is not None and memory_budget is not None:
        raise TypeError("host_budget= and memory_budget= are the same: give one of them")
    for name, size, least in (
        ("memory_budget", memory_budget, 1),
        ("device_budget", device_budget, 0),
        ("host_budget", host_budget, 0),
    ):
        if size not in (None, "auto"):
            bytes_of(name, size, least)
    host = memory_budget if host_budget is None else host_budget
    if memory is not None and device_budget is memory_budget is None:
        budget_of(None, memory)
        if not memory.is_on_cpu:
            return lambda device: (device, budgets_of(device, None, memory, None, host_budget))
    if memory is not None or (host is None and device_budget is None):
        budget_of(host if device_budget is None else device_budget, memory)
        return None

    def budgets(device: torch.device) -> tuple[torch.device, Budgets]:
        if device_budget in (None, "auto"):
            is_there = device_budget == "auto" or device.type == "cpu" or says_what_is_free(device)
        else:
            is_there = bytes_of("device_budget", device_budget, least=0) > 0
        if is_there and device.type != "cpu":
            return device, budgets_of(device, None, None, device_budget, host)
        device, there = torch.device("cpu"), device_budget if is_there else None
        return device, budgets_of(device, memory_budget, None, there, "auto" if host is None else host_budget)

    return budgets


def _layers_of(config: Any) -> list[tuple[Any, dict[str, Any]]]:
    """Returns each layer's class and arguments. Raises ValueError for an unsupported one, TypeError for no config."""
    layers: list[tuple[Any, dict[str, Any]]] = []
    if not hasattr(config, "get_text_config"):
        raise TypeError(f"config must be a model's configuration (model.config), not {type(config).__name__}")
    kinds, arguments = get_layer_types_and_kwargs(config.get_text_config(decoder=True))
    for number, (kind, given) in enumerate(zip(kinds, arguments, strict=True)):
        made = DYNAMIC_LAYER_TYPE_MAPPING[kind]
        if made in (DynamicLayer, DynamicSlidingWindowLayer):
            layers.append((NvmeLayer, {"number": number, "sliding_window": given.get("sliding_window")}))
        elif made in (LinearAttentionAndFullAttentionLayer, LinearAttentionAndSlidingWindowAttentionLayer):
            layers.append((NvmeHybridLayer, {"number": number, **given}))
        elif kind == "dummy" or made is LinearAttentionLayer:
            layers.append((made, given))
        else:
            raise ValueError(f"NvmeCache does not support layer {number} of this model, of type {kind!r}")
    return layers
