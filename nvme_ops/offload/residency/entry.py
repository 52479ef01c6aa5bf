"""``Entry``: what a residency moves between storage and memory."""

from __future__ import annotations

from typing import Any

import torch

from nvme_ops.io.future import IoFuture


def current_stream(device: torch.device) -> torch.Stream:
    """Returns the stream on which this thread queues work for an accelerator."""
    accelerator: Any = getattr(torch, "accelerator", None) or torch.get_device_module(device)  # since torch 2.6
    stream: torch.Stream = accelerator.current_stream(device)
    return stream


class QueuedWork:
    """The end of the work queued on an accelerator's current stream.

    Args:
        device: the accelerator, whose streams wait for each other.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = current_stream(device)
        self._event = self._stream.record_event()

    def before(self, device: torch.device) -> None:
        """Makes the current stream wait for that work before it starts further work."""
        if (stream := current_stream(device)) != self._stream:
            stream.wait_event(self._event)

    def release(self) -> None:
        """Is called before memory is freed that the work uses: torch reuses it in the order of the same stream."""


class Entry:
    """A tensor, and where its bytes are.

    It is absent while ``memory`` is None, arriving while there is an ``arrival``, leaving while ``leaving`` writes it,
    and dirty while ``changed``.

    Args:
        nbytes: the memory that it takes.
    """

    memory: torch.Tensor | None = None  #: its bytes, complete once ``arrival`` has ended
    values: torch.Tensor | None = None  #: the tensor over ``memory``
    own_tensors = 0  #: over this memory, held by the residency itself
    arrival: IoFuture | None = None  #: what those who use the values wait for
    queued: QueuedWork | None = None  #: on a device, what computes the values, or copies them there
    leaving: IoFuture | None = None  #: the write of these values, or of earlier ones
    changed = False  #: the values in memory are not those on storage
    demanded = False  #: somebody waits for it: this is no prefetch
    rewritten = False  #: the last write failed, and was started again

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes

    def is_used(self) -> bool:
        """Returns whether others hold tensors over its memory: to compute with, to wait for, or perhaps to write to."""
        for transfer in (self.arrival, self.leaving):
            if transfer is not None:
                transfer.done()  # a transfer that has ended releases its tensors when it is asked
        return self.values is not None and tensors_over(self.values) > self.own_tensors

    def is_arriving(self) -> bool:
        """Returns whether its bytes may be on their way."""
        return self.arrival is not None and not self.arrival.done()


def tensors_over(tensor: torch.Tensor) -> int:
    """Returns how many tensors and other holders share the storage of this tensor, itself included."""
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))
