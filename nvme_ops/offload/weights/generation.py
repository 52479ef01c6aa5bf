"""Generates tokens with a streamed model, and compares the speed with what storage and computing allow."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from nvme_ops.offload.weights.window import WindowStats


@dataclass(frozen=True)
class GenerationStats:
    """Measurements of one generation. Each step makes one token for each sequence; the first token is no step."""

    tokens: list[list[int]]  #: of each sequence, without the prompt
    first_token: float  #: seconds from the call
    steps: int
    seconds: float  #: that all steps took
    waited: float  #: seconds of all steps in which computation waited for weights
    bytes_read: int  #: by all steps
    peak_weights: int  #: bytes
    peak_process: int  #: resident bytes of the whole process, in CPU memory

    def document(self, rate: float, joules: float | None) -> dict[str, Any]:
        """Returns the fields for JSON, with tokens per second of all sequences and two bounds of these.

        ``reading_bound`` is reached if reading is all that takes time, ``computing_bound`` if computation never waits
        for reads. Values that are not known, as without any step, are None.

        Args:
            rate: bytes per second that storage can read.
            joules: used by the machine meanwhile.
        """
        tokens = len(self.tokens) * self.steps

        def per_second(seconds: float) -> float | None:
            return tokens / seconds if tokens and seconds > 0 else None

        speed, reading, computing = map(per_second, (self.seconds, self.bytes_read / rate, self.seconds - self.waited))
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
            "joules_per_1000_tokens": None if joules is None else 1000 * joules / (len(self.tokens) + tokens),
        }


class _Streamer:
    """Receives tokens from transformers' ``generate``, by its interface for streamers."""

    def __init__(self, model: Any, on_token: Callable[[list[int]], object]) -> None:
        self._model, self._on_token = model, on_token
        self._prompt_is_over = False
        self.seen: list[tuple[float, WindowStats]] = []  # at each token

    def put(self, value: torch.Tensor) -> None:
        """Receives the prompt, and then one token of each sequence at a time."""
        if self._prompt_is_over:
            self.seen.append((time.perf_counter(), self._model.stats()))
            self._on_token(value.reshape(-1).tolist())
        self._prompt_is_over = True

    def end(self) -> None:
        """Does nothing; ``generate`` calls it."""


def decoder_config(model: Any) -> Any:
    """Returns the configuration of a model's decoder. Raises ValueError for a model that is more than a decoder."""
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
) -> GenerationStats:
    """Generates several sequences at once from one prompt, with a model of ``from_pretrained``.

    Args:
        model: a decoder that generates text.
        prompt: token ids, at least one.
        batch: how many sequences.
        new_tokens: the most tokens for each sequence.
        sample: draw tokens at random, as the generation configuration says, instead of taking the likeliest.
        on_token: called with one token of each sequence as soon as these are known.

    Raises:
        ValueError: a token of the prompt is not in the vocabulary, or the model is of another kind.
    """
    vocabulary = decoder_config(model).vocab_size
    if wrong := [token for token in prompt if not 0 <= token < vocabulary]:
        raise ValueError(f"token {wrong[0]} is not in the vocabulary of the model, which has {vocabulary}")
    ids = torch.tensor([list(prompt)] * batch, device=model.device)
    streamer = _Streamer(model, on_token)
    end = model.generation_config.eos_token_id
    begin = time.perf_counter()
    sequences = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=new_tokens,
        do_sample=sample,
        num_beams=1,
        pad_token_id=(end[0] if isinstance(end, list) else end) or 0,
        streamer=streamer,
    )
    (first, before), (last, after) = streamer.seen[0], streamer.seen[-1]
    return GenerationStats(
        tokens=sequences[:, len(prompt) :].tolist(),
        first_token=first - begin,
        steps=len(streamer.seen) - 1,
        seconds=last - first,
        waited=after.seconds_waited - before.seconds_waited,
        bytes_read=after.bytes_read - before.bytes_read,
        peak_weights=after.peak_bytes,
        peak_process=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    )
