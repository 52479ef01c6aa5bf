"""Finds out what a plan needs to know: the sizes of a model, and rates and times that take some seconds to measure.

Computing is timed with a few layers on random weights in memory, which stand for all of them.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import math
import os
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch

from nvme_ops.base.limits import free_memory
from nvme_ops.base.text import MIB, size_words
from nvme_ops.formats import Kind
from nvme_ops.formats.packed import Packed
from nvme_ops.formats.quantized import FEW, Scaled, WeightFormat
from nvme_ops.formats.quantizing import packed_as, packed_bytes
from nvme_ops.io.arguments import cache_mode
from nvme_ops.memory.tier import in_pages
from nvme_ops.offload.cache.quantized_layer import DTYPES, QuantizedLayer
from nvme_ops.offload.experts.expert import experts_of
from nvme_ops.offload.plan.estimate import Computing, Mixture, Rates, Sizes
from nvme_ops.offload.plan.training import TrainedModel
from nvme_ops.offload.weights.derived import plain_class
from nvme_ops.offload.weights.generation import decoder_config
from nvme_ops.offload.weights.routing import groups_of
from nvme_ops.offload.weights.stored import StoredTensor, select, stored_in
from nvme_ops.offload.weights.stream_weights import quantizable
from nvme_ops.offload.weights.streamed import StreamedModel, places_of
from nvme_ops.storage.rates import best_of_two, cached_rate, copy_rate, read_rate, scratch, shortest, synchronize, timed

CPU = torch.device("cpu")
_WEIGHTS = 256 * MIB  # of the layers that are timed: more than processor caches hold
_VOCABULARY, _MIN_VOCABULARY = 1 << 15, 1 << 10
_TOKENS = 256  # the most of a prompt that are timed
_EXPANDED = 2048  # rows and columns of about the matrix whose expanding is timed
_BYTE = 120  # of its numbers and scales, which are ordinary numbers then in any format
_ROUNDS = 3  # after the first one, the last two of them only where a larger batch computes faster


def sizes_of(model: StreamedModel, kind: Kind | None = None) -> tuple[Sizes, dict[str, Any]]:
    """Returns the sizes of a model that ``from_pretrained`` has made, and a description of it.

    With ``kind`` they are those of ``stream_weights(quantize=kind)``. Raises ValueError if it is packed already.
    """
    text = decoder_config(model)
    stored, sliced = places_of(model)
    values = {source: users[0][2].nbytes_expanded for source, users in stored.items() if _is_packed(users[0][2])}
    nbytes = {source: source.nbytes for source in stored}
    if kind is not None:
        if values:
            raise ValueError(f"the weights of this model are packed already, as {_stored_as(model)}")
        matrices = quantizable(model, kind)
        for source, users in stored.items():
            packed = packed_bytes(kind, source.shape) if any(id(user[2]) in matrices for user in users) else None
            if packed is not None:
                values[source], nbytes[source] = source.nbytes, packed
    others = {id(tensor): tensor for tensor in [*model.parameters(), *model.buffers()] if stored_in(tensor) is None}
    resident = sum(tensor.nbytes for tensor in others.values())
    tables = [
        source for source, users in stored.items() if all(isinstance(user[0], torch.nn.Embedding) for user in users)
    ]
    window = model._nvme_window
    routed = experts_of([group.experts for group in groups_of(model)], window.share.device)
    apart = {*tables, *sliced, *(source for group in routed for expert in group for source in expert.places)}
    per_token = getattr(text, "num_experts_per_tok", None) or 1
    width: int = text.hidden_size
    between: int = getattr(text, "intermediate_size", None) or 4 * width
    item = model.dtype.itemsize if isinstance(model.dtype, torch.dtype) else 4
    of_experts = {source for source in apart if source not in tables}
    experts = [source for source in stored if source in of_experts]
    size = sum(expert.nbytes for group in routed for expert in group)
    if kind is not None:
        counts = {source: sliced.get(source, 1) for source in experts}
        size = sum(count * in_pages(nbytes[source] // count) for source, count in counts.items())
    is_short = window.share.device.type == "cpu" and item < torch.float32.itemsize
    sizes = Sizes(
        model=sum(nbytes.values()) + resident,
        resident=resident,
        memory=window.nbytes,
        streamed=tuple(in_pages(nbytes[source]) if kind else source.room for source in stored if source not in apart),
        experts=Mixture(
            sum(len(group) for group in routed),
            sum(min(per_token, len(group)) for group in routed),
            size,
            0 if window.experts is None else min(size, window.experts.share.nbytes),
            sum(values.get(source, 0) for source in experts),
        ),
        tables=tuple((source.shape[0], source.nbytes // source.shape[0]) for source in tables),
        working=(4 * width + 3 * between) * item,
        logits=4 * text.vocab_size,
        host=window.host_bytes,
        layers=text.num_hidden_layers,
        expanded=sum(nbytes for source, nbytes in values.items() if source not in apart),
        multiplied=FEW if is_short else 0,
    )
    about = {
        "model": type(model).__name__,
        "layers": text.num_hidden_layers,
        "dtype": str(model.dtype).removeprefix("torch."),
        "bytes": sizes.model,
        "stored_as": kind or _stored_as(model),
    }
    return sizes, about


def _is_packed(tensor: StoredTensor) -> bool:
    return isinstance(tensor._stored_as, Scaled | Packed)


def _packed_in(model: torch.nn.Module) -> list[StoredTensor]:
    stored = [tensor for tensor in map(stored_in, model.parameters()) if tensor is not None]
    return [tensor for tensor in stored if _is_packed(tensor) and not tensor._steps]


def _stored_as(model: torch.nn.Module) -> str | None:
    """Returns a word for how most of the packed weights of a model are stored; None if it has none."""
    words = Counter[str]()
    for tensor in _packed_in(model):
        words[tensor._stored_as.words if isinstance(tensor._stored_as, Packed) else "8 bits"] += tensor.source.nbytes
    return words.most_common(1)[0][0] if words else None


def expanding_rate(model: StreamedModel, kind: Kind | None, device: torch.device) -> float:
    """Measures how many bytes of values a second packed weights are expanded to; infinity if none is packed."""
    dtype: Any = model.dtype
    if kind is not None and (made := packed_as(kind, torch.randn(_EXPANDED, _EXPANDED, device=device))) is not None:
        (stored, form), out = made, torch.empty(_EXPANDED, _EXPANDED, dtype=dtype, device=device)
    elif packed := sorted(_packed_in(model), key=lambda tensor: abs(tensor.nbytes - 2 * _EXPANDED**2)):
        weight: Any = select(packed[0], 0, 0) if packed[0].has_parts() else packed[0]
        stored = torch.full((weight.source.nbytes,), _BYTE, dtype=torch.uint8, device=device)
        stored = stored.view(weight.source.dtype).view(weight.source.shape)
        form, out = weight._stored_as, torch.empty(weight.shape, dtype=weight.dtype, device=device)
    else:
        return math.inf
    return _rate_of(form, stored, out)


def _rate_of(form: WeightFormat, stored: torch.Tensor, out: torch.Tensor) -> float:
    return out.nbytes / float(shortest(lambda: timed(lambda: form.expand(stored, out), out.device)))


def rates(files: Sequence[str], folder: str | None, device: torch.device) -> Rates:
    """Measures how fast weights come from storage, the page cache, and host memory to an accelerator.

    The page cache is measured only where free memory holds all of the model: then a part of it is there afterwards.

    Args:
        files: those of the model, which are read.
        folder: on the storage to measure: a file is written there unless the model is there, too. None: the model's.
        device: where the model computes.

    Raises:
        OSError: the folder cannot be written, or has no room.
    """
    host_free, cached, cached_noise = free_memory(), None, 0.0
    with contextlib.ExitStack() as stack:
        if folder is not None and os.stat(folder).st_dev != os.stat(files[0]).st_dev:
            measured: Sequence[str] = [stack.enter_context(scratch(folder))]
        else:
            measured = files
        storage, noise = best_of_two(lambda: read_rate(measured))
        if cache_mode(None) != "direct" and sum(map(os.path.getsize, files)) <= host_free:
            cached, cached_noise = best_of_two(lambda: cached_rate(measured, device))
    if device.type == "cpu":
        return Rates(storage, host_free, host_free, None, noise, cached, cached_noise)
    return Rates(storage, free_on(device), host_free, copy_rate(device), noise, cached, cached_noise)


def free_on(device: torch.device) -> int:
    """Returns the bytes that are free where a device computes."""
    module: Any = torch.get_device_module(device)
    return free_memory() if device == CPU else int(module.mem_get_info(device)[0])


def computing_of(
    layers: Layers, batches: Sequence[int], prompt_length: int, context: int, on_batch: Callable[[int], object]
) -> dict[int, Computing]:
    """Returns what each batch computes in, and by how much measurements of its step differ.

    Steps are measured in two rounds over all batches, and where a larger batch computes faster in two more: as a rule
    something else ran meanwhile.
    """
    steps: dict[int, list[float]] = {}
    prompts: dict[int, float] = {}
    for batch in batches:
        on_batch(batch)
        steps[batch] = [layers.step(batch, context)]
        prompts[batch] = layers.prompt(batch, prompt_length)
    again = list(batches)
    for _ in range(_ROUNDS):
        for batch in again:
            steps[batch].append(layers.step(batch, context))
        again = [
            batch for batch in batches if any(min(steps[size]) < min(steps[batch]) for size in batches if size > batch)
        ]

    def computing(batch: int) -> Computing:
        shortest, second, *_ = sorted(steps[batch])
        return Computing(shortest, prompts[batch], second / shortest - 1)

    return {batch: computing(batch) for batch in batches}


class Layers:
    """A few layers of a model on random weights in memory, whose times give that of all layers.

    Args:
        model: only its configuration and the sizes of its layers are used.
        memory: the most bytes that the weights of the few layers take; a single layer may take more.
        device: where they compute.
        free: free bytes of the device, half of which a single layer may take.

    Raises:
        ValueError: one layer takes more memory than there is, or the model has no list of its layers.
    """

    def __init__(self, model: Any, memory: int, device: torch.device, free: int) -> None:
        self._device = device
        text = decoder_config(model)
        self._all, self._vocabulary = text.num_hidden_layers, text.vocab_size
        layer = sum(parameter.nbytes for parameter in _layers(model, self._all)[0].parameters())
        row = 2 * text.hidden_size * model.dtype.itemsize
        most = max(memory, free // 2)
        if layer + row > most:
            raise ValueError(f"a layer takes {size_words(layer)}: too much to time one in {size_words(most)}")
        self._count = max(1, min(self._all, memory * 3 // 4 // layer, _WEIGHTS // layer))
        room = max(0, memory - self._count * layer)
        self._rows = min(self._vocabulary, max(_MIN_VOCABULARY, min(_VOCABULARY, room // row)))
        config = _shortened(model.config, self._all, self._count, self._rows)
        model_class: Any = plain_class(type(model))
        with torch.device(device):
            self._model = model_class._from_config(config, dtype=model.dtype, experts_implementation="eager")
        self._model.eval()
        self._config = config
        self._in_layers = self._begin = 0.0  # seconds
        self._inside = False
        layers = _layers(self._model, self._count)
        layers[0].register_forward_pre_hook(self._note_begin)
        layers[-1].register_forward_hook(self._note_end)
        accepted = inspect.signature(self._model.forward).parameters
        self._last_logits = {"logits_to_keep": 1} if "logits_to_keep" in accepted else {}
        self._cache_name = "cache" if "cache" in accepted else "past_key_values"  # before transformers 5.24

    def cache_sizes(self, dtype: str | None = None) -> dict[str, Any]:
        """Returns what ``Sizes`` has of keys and values, in all layers, that ``NvmeCache(dtype=)`` stores."""
        cached = [(layer.keys, layer.values) for layer in self._forward(1, 1).layers]
        nbytes, stored, page = sum(states.nbytes for pair in cached for states in pair), 0, 1
        if dtype is not None:
            for pair in cached:
                layer = QuantizedLayer(0, None, DTYPES[dtype])
                layer.shape(1, [(states.shape[1], states.shape[3], states.dtype) for states in pair], 0)
                stored, page = stored + layer.stored.token_bytes, max(page, layer.page)
        in_all = {"cache": nbytes, "cache_stored": stored}
        return {**{name: size * self._all // self._count for name, size in in_all.items()}, "cache_page": page}

    def cache_rate(self, dtype: str) -> float:
        """Measures how many bytes of values a second keys in 8 bits are expanded to."""
        stored = torch.zeros(_EXPANDED, _EXPANDED, dtype=torch.int8, device=self._device).view(DTYPES[dtype])
        scale = torch.ones(1, _EXPANDED, device=self._device)
        return _rate_of(Scaled(scale), stored, torch.empty(stored.shape, dtype=self._model.dtype, device=self._device))

    def step(self, batch: int, context: int) -> float:
        """Returns the seconds of a step of ``batch`` sequences of ``context`` tokens each."""
        one = self._forward(batch, 1)
        cache = self._new_cache()
        for number, layer in enumerate(one.layers):
            keys, values = (states.expand(-1, -1, context, -1).contiguous() for states in (layer.keys, layer.values))
            cache.update(keys, values, number)
        return shortest(lambda: self._seconds(batch, 1, cache))

    def prompt(self, batch: int, prompt_length: int) -> float:
        """Returns the seconds of a prompt of ``batch`` sequences of ``prompt_length`` tokens each."""
        length = min(prompt_length, _TOKENS)
        rows = max(1, min(batch, _TOKENS // length))
        sequences = batch / rows
        return shortest(lambda: self._seconds(rows, length, None, sequences * prompt_length / length, sequences))

    def training(self, length: int, parameters: Sequence[torch.Tensor]) -> TrainedModel:
        """Times training steps on sequences of ``length`` tokens, to describe a model with all of ``parameters``."""
        length = min(length, _TOKENS)
        saved, largest = {True: 0, False: 0}, {True: 0, False: 0}  # bytes inside the layers, and after them
        weights = {parameter.untyped_storage().data_ptr() for parameter in self._model.parameters()}
        seen = set(weights)

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in seen:
                seen.add(storage.data_ptr())
                saved[self._inside] += storage.nbytes()
                largest[self._inside] = max(largest[self._inside], storage.nbytes())
            return tensor

        ids = torch.randint(self._rows, (1, length), device=self._device)

        def step() -> None:
            seen.intersection_update(weights)
            saved.update({True: 0, False: 0})
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
                logits = self._model(ids, use_cache=False).logits
                loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), ids.flatten())
            loss.backward()
            self._model.zero_grad()

        self._model.train()
        try:
            seconds, longer = sorted(shortest(lambda: timed(step, self._device)) for _ in range(2))
        finally:
            self._model.eval()
        share = min(1.0, self._in_layers / max(1e-9, timed(lambda: self._forward(1, length), self._device)))
        layer_factor, after_factor = self._all / self._count, self._vocabulary / self._rows  # of the model
        after = saved[False] * after_factor
        return TrainedModel(
            sizes=tuple(parameter.nbytes for parameter in parameters),
            itemsize=self._model.dtype.itemsize,
            activations=round((saved[True] * layer_factor + after) / length),
            of_layer=round(max(saved[True] / self._count, after) / length),
            largest_saved=round(max(largest[True], largest[False] * after_factor) / length),
            seconds=seconds * (share * layer_factor + (1 - share) * after_factor) / length,
            noise=longer / seconds - 1,
        )

    def _seconds(
        self, batch: int, length: int, cache: Any, token_factor: float = 1.0, sequence_factor: float = 1.0
    ) -> float:
        """Returns the seconds of a forward pass of all of the model, from a timed one of the few layers.

        ``token_factor`` and ``sequence_factor``: how many times the timed tokens and sequences it has; only the last
        token of each sequence goes through what follows the layers.
        """
        total = timed(lambda: self._forward(batch, length, cache), self._device)
        after = (total - self._in_layers) * self._vocabulary / self._rows
        return float(self._in_layers * self._all / self._count * token_factor + after * sequence_factor)

    def _forward(self, batch: int, length: int, cache: Any = None) -> Any:
        ids = torch.randint(self._rows, (batch, length), device=self._device)  # as experts are chosen at random
        cache = self._new_cache() if cache is None else cache
        with torch.inference_mode():
            self._model(ids, use_cache=True, **{self._cache_name: cache}, **self._last_logits)
        return cache

    def _new_cache(self) -> Any:
        from transformers import DynamicCache

        return DynamicCache(config=self._config)

    def _note_begin(self, *_: Any) -> None:
        synchronize(self._device)
        self._begin, self._inside = time.perf_counter(), True

    def _note_end(self, *_: Any) -> None:
        synchronize(self._device)
        self._in_layers, self._inside = time.perf_counter() - self._begin, False


def _layers(model: torch.nn.Module, count: int) -> torch.nn.ModuleList:
    for module in model.modules():
        if isinstance(module, torch.nn.ModuleList) and len(module) == count:
            return module
    raise ValueError(f"{type(model).__name__} has no list of {count} layers: none can be timed")


def _shortened(config: Any, layers: int, count: int, vocabulary: int) -> Any:
    """Returns a copy of the configuration with ``count`` layers and ``vocabulary`` tokens."""
    made = copy.deepcopy(config)
    for part in {id(part): part for part in (made, made.get_text_config(decoder=True))}.values():
        for name, value in vars(part).items():
            if isinstance(value, list) and len(value) == layers:  # one entry for each layer
                setattr(part, name, value[:count])
        part.num_hidden_layers, part.vocab_size = count, vocabulary
        part.pad_token_id = None
    return made
