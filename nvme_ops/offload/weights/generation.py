"""Generates tokens with a streamed model, and tells what was reached of what storage and computing allow."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
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
    peak_weights: int  #: bytes
    peak_process: int  #: bytes in CPU memory, of the whole process

    def document(self, rate: float, joules: float | None) -> dict[str, Any]:
        """Returns it for programs, beside two bounds: if reading were all, and if computing never waited for it.

        What one token alone does not have, or what is not known, is None: tokens per second, of all sequences; a bound
        where nothing was read; the share of the lower bound.

        Args:
            rate: bytes per second that storage gives at best.
            joules: of the machine meanwhile.
        """
        made = len(self.tokens) * self.steps

        def each_second(seconds: float) -> float | None:
            return made / seconds if made and seconds > 0 else None

        speed, reading, computing = map(each_second, (self.seconds, self.bytes_read / rate, self.seconds - self.waited))
        bounds = [bound for bound in (reading, computing) if bound is not None]
        return {
            **asdict(self),
            "rate": rate,
            "tokens_per_second": speed,
            "bytes_per_step": self.bytes_read / self.steps if self.steps else 0.0,
            "rate_reached": self.bytes_read / self.seconds if self.steps else 0.0,
            "reading_bound": reading,
            "computing_bound": computing,
            "share_of_bound": speed / min(bounds) if speed is not None and bounds else None,
            "joules_per_1000_tokens": None if joules is None else 1000 * joules / (len(self.tokens) + made),
        }


class _Watch:
    """What ``generate`` tells of its tokens: transformers' interface of streamers."""

    def __init__(self, model: Any, on_token: Callable[[list[int]], object]) -> None:
        self._model, self._on_token = model, on_token
        self._prompt_is_over = False
        self.seen: list[tuple[float, WindowStats]] = []  # at each token

    def put(self, value: torch.Tensor) -> None:
        """Gets the prompt, and then one token of each sequence at a time."""
        if self._prompt_is_over:
            self.seen.append((time.perf_counter(), self._model.stats()))
            self._on_token(value.reshape(-1).tolist())
        self._prompt_is_over = True

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
    sample: bool = False,
    on_token: Callable[[list[int]], object] = lambda _: None,
) -> Reached:
    """Has a model of ``from_pretrained`` generate after the same prompt several times at once.

    Args:
        model: generates text by a decoder.
        prompt: ids of tokens, at least one.
        batch: sequences.
        new_tokens: the most of them for each sequence.
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
    (first, before), (last, after) = watch.seen[0], watch.seen[-1]
    return Reached(
        tokens=found[:, len(prompt) :].tolist(),
        first_token=first - begin,
        steps=len(watch.seen) - 1,
        seconds=last - first,
        waited=after.seconds_waited - before.seconds_waited,
        bytes_read=after.bytes_read - before.bytes_read,
        peak_weights=after.peak_bytes,
        peak_process=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    )
