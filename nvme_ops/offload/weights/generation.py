"""Generates tokens with a streamed model, and tells what was reached of what storage and computing allow."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from nvme_ops.offload.weights.window import WindowStats


@dataclass(frozen=True)
class Reached:
    """What a generation took. ``steps`` are those after the first token, each of which makes one for each sequence."""

    tokens: list[list[int]]  #: of each sequence, without the prompt
    first_token: float  #: seconds from the call
    steps: int
    seconds: float  #: of all steps
    waited: float  #: seconds of these in which computing waited for weights
    bytes_read: int  #: by these
    rate: float  #: bytes per second that storage gives at best
    peak_weights: int  #: bytes
    peak_process: int  #: bytes in CPU memory, of the whole process

    @property
    def count(self) -> int:
        """New tokens of all sequences."""
        return len(self.tokens) * (1 + self.steps)

    @property
    def tokens_per_second(self) -> float | None:
        """Of all sequences; None when there was one token alone."""
        return self._each_second(self.seconds)

    @property
    def bytes_per_step(self) -> float:
        """Bytes that were read for one token of each sequence."""
        return self.bytes_read / self.steps if self.steps else 0.0

    @property
    def rate_reached(self) -> float:
        """Bytes per second."""
        return self.bytes_read / self.seconds if self.steps else 0.0

    @property
    def reading_bound(self) -> float | None:
        """Tokens per second if reading were all; None when nothing was read."""
        return self._each_second(self.bytes_read / self.rate)

    @property
    def computing_bound(self) -> float | None:
        """Tokens per second if computing never waited for weights."""
        return self._each_second(self.seconds - self.waited)

    @property
    def share(self) -> float | None:
        """What was reached of the lower of the two bounds."""
        bounds = [bound for bound in (self.reading_bound, self.computing_bound) if bound is not None]
        reached = self.tokens_per_second
        return reached / min(bounds) if reached is not None and bounds else None

    def _each_second(self, seconds: float) -> float | None:
        return len(self.tokens) * self.steps / seconds if self.steps and seconds > 0 else None


class _Watch:
    """What ``generate`` tells of its tokens: transformers' interface of streamers."""

    def __init__(self, model: Any, on_token: Callable[[list[int]], object]) -> None:
        self._model, self._on_token = model, on_token
        self._prompt_is_over = False
        self.count = 0
        self.first = self.last = 0.0
        self.at_first: WindowStats = model.stats()
        self.at_last = self.at_first

    def put(self, value: torch.Tensor) -> None:
        """Gets the prompt, and then one token of each sequence at a time."""
        if not self._prompt_is_over:
            self._prompt_is_over = True
            return
        self.last, self.at_last = time.perf_counter(), self._model.stats()
        if not self.count:
            self.first, self.at_first = self.last, self.at_last
        self.count += 1
        self._on_token(value.reshape(-1).tolist())

    def end(self) -> None:
        """Nothing is left to do at the end."""


def decoder_config(model: Any) -> Any:
    """Returns the configuration of its decoder. Raises ValueError for a model that has none, or an encoder too."""
    if not model.can_generate() or model.config.is_encoder_decoder:
        raise ValueError(f"{type(model).__name__} is not supported: only models that generate by a decoder alone are")
    return model.config.get_text_config(decoder=True)


def generate(
    model: Any,
    prompt: Sequence[int],
    batch: int,
    new_tokens: int,
    *,
    rate: float,
    sample: bool = False,
    on_token: Callable[[list[int]], object] = lambda _: None,
) -> Reached:
    """Has a model of ``from_pretrained`` generate after the same prompt several times at once.

    Args:
        model: generates text by a decoder.
        prompt: ids of tokens, at least one.
        batch: sequences.
        new_tokens: the most of them for each sequence.
        rate: bytes per second that the model's storage gives.
        sample: draw tokens at random, as the generation's configuration says, instead of taking the likeliest.
        on_token: called with one token of each sequence as soon as it is known.

    Raises:
        ValueError: a token of the prompt is not in the vocabulary, or the model is of another kind.
    """
    vocabulary = decoder_config(model).vocab_size
    if wrong := [token for token in prompt if not 0 <= token < vocabulary]:
        raise ValueError(f"token {wrong[0]} is not in the vocabulary of the model, which has {vocabulary}")
    ids = torch.tensor([list(prompt)] * batch, device=model.device)
    watch = _Watch(model, on_token)
    end = model.generation_config.eos_token_id
    begin = time.perf_counter()
    found = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=new_tokens,
        do_sample=sample,
        num_beams=1,
        pad_token_id=(end[0] if isinstance(end, list) else end) or 0,
        streamer=watch,
    )
    return Reached(
        tokens=found[:, len(prompt) :].tolist(),
        first_token=watch.first - begin,
        steps=watch.count - 1,
        seconds=watch.last - watch.first,
        waited=watch.at_last.seconds_waited - watch.at_first.seconds_waited,
        bytes_read=watch.at_last.bytes_read - watch.at_first.bytes_read,
        rate=rate,
        peak_weights=model.stats().peak_bytes,
        peak_process=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    )
