"""``Entry``: what a residency moves between storage and memory, and ``Arrival``, the end of such a move."""

from __future__ import annotations

import traceback
from typing import Any

import torch

from nvme_ops.io.future import IoFuture


def current_stream(device: torch.device) -> torch.Stream:
    """Returns the stream on which this thread queues work for an accelerator."""
    accelerator: Any = getattr(torch, "accelerator", None) or torch.get_device_module(device)  # since torch 2.6
    stream: torch.Stream = accelerator.current_stream(device)
    return stream


class Arrival:
    """The end of a transfer, or of the work queued on a device's current stream.

    Args:
        transfer: what is waited for by the program.
        device: an accelerator, whose streams wait for each other.
    """

    def __init__(self, transfer: IoFuture | None = None, device: torch.device | None = None) -> None:
        self.transfer = transfer
        self._stream = None if device is None else current_stream(device)
        self._event = None if self._stream is None else self._stream.record_event()

    def done(self) -> bool:
        """Returns whether a transfer has ended."""
        return self.transfer is None or self.transfer.done()

    def wait(self) -> BaseException | None:
        """Waits for the end of a transfer; returns why it failed, if it has."""
        return None if self.transfer is None else self.transfer.exception()

    def before(self, device: torch.device) -> None:
        """Makes the current stream of an accelerator wait for the work of another stream before further work."""
        if self._event is not None and (stream := current_stream(device)) != self._stream:
            stream.wait_event(self._event)

    def request_cancel(self) -> None:
        """Ends a transfer early if possible; nobody is to ask how it ended."""
        if self.transfer is not None:
            self.transfer.request_cancel()


class Entry:
    """A tensor, and where its bytes are.

    It is absent while ``memory`` is None, arriving while ``arrival`` has a transfer, leaving while ``leaving`` writes
    it, and dirty while ``changed``.

    Args:
        nbytes: the memory that it takes.
    """

    memory: torch.Tensor | None = None  #: its bytes, complete once a transfer of ``arrival`` has ended
    values: torch.Tensor | None = None  #: the tensor over ``memory``
    own_tensors = 0  #: over this memory, held by the residency itself
    arrival: Arrival | None = None  #: what those who use the values wait for
    leaving: Arrival | None = None  #: the write of these values, or of earlier ones
    changed = False  #: the values in memory are not those on storage
    demanded = False  #: somebody waits for it: this is no prefetch
    rewritten = False  #: the last write failed, and was started again

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes

    def is_used(self) -> bool:
        """Returns whether others hold tensors over its memory: to compute with, to wait for, or perhaps to write to."""
        for each in (self.arrival, self.leaving):
            if each is not None:
                each.done()  # a transfer that has ended releases its tensors when it is asked
        return self.values is not None and tensors_over(self.values) > self.own_tensors

    def is_arriving(self) -> bool:
        """Returns whether its bytes may be on their way."""
        return self.arrival is not None and not self.arrival.done()


def tensors_over(tensor: torch.Tensor) -> int:
    """Returns how many tensors and other holders share the storage of this tensor, itself included."""
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))


def free_frames(error: BaseException) -> None:
    """Clears the frames of a traceback, which would keep tensors alive as long as the exception."""
    traceback.clear_frames(error.__traceback__)
