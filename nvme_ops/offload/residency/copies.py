"""``Copy``: one between an accelerator and host memory, on a stream of its own."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch

from nvme_ops.io.future import IoFuture
from nvme_ops.offload.residency.entry import QueuedWork, current_stream

if TYPE_CHECKING:
    from nvme_ops.ops.async_io import Operation

_PERIOD = 0.001  # seconds between looks whether a copy has ended, where there is a timeout


class CopyStream:
    """A stream of an accelerator for copies, which wait for no other work, and the time that others wait for these.

    Args:
        device: the accelerator.
    """

    def __init__(self, device: torch.device) -> None:
        module: Any = torch.get_device_module(device)
        self.stream: torch.Stream = getattr(module, "Stream", torch.Stream)(device=device)
        self._new_event = partial(getattr(module, "Event", partial(torch.Event, device)), enable_timing=True)
        self._waits = deque[tuple[Any, Any]]()  # events: one waits from the first to the second
        self._seconds = 0.0

    def record(self, stream: torch.Stream) -> Any:
        """Returns an event after what is queued on a stream."""
        event = self._new_event()
        event.record(stream)
        return event

    def note_wait(self, stream: torch.Stream, copied: Any) -> None:
        """Counts the time that a stream will wait for an event of ``record``."""
        self._waits.append((self.record(stream), copied))
        self.seconds_waited()

    def seconds_waited(self) -> float:
        """Returns how long other streams have waited for copies, as far as that is over."""
        with contextlib.suppress(IndexError):
            while all(event.query() for event in self._waits[0]):
                reached, copied = self._waits.popleft()
                self._seconds += max(0.0, reached.elapsed_time(copied) / 1000)
        return self._seconds


class Copy(QueuedWork):
    """A copy that begins after what is queued on the current stream when this is made.

    torch reuses memory of the accelerator in the order of that stream, and knows nothing of the copy: ``release`` is
    called before the memory is freed, unless ``future`` keeps it.

    Args:
        copies: its stream.
    """

    def __init__(self, copies: CopyStream) -> None:
        super().__init__(copies.stream.device)
        self._owner, self._owners_work = self._stream, self._event
        self._copies, self._stream = copies, copies.stream
        self._is_begun = self._is_awaited = False
        self._tensors: tuple[torch.Tensor, ...] = ()
        self._failure: BaseException | None = None

    def begin(self, *moves: tuple[torch.Tensor, torch.Tensor]) -> None:
        """Starts to copy, to the first of two tensors what is in the second. If that fails, nothing of it goes on."""
        self._is_begun = True
        try:
            self._stream.wait_event(self._owners_work)
            module: Any = torch.get_device_module(self._stream.device)
            with getattr(module, "stream", lambda stream: stream)(self._stream):
                for to, source in moves:
                    to.copy_(source, non_blocking=True)
            self._event = self._copies.record(self._stream)
        except BaseException:
            if current_stream(self._stream.device) != self._owner:  # Ctrl-C came as the block ended
                owner: Any = getattr(torch, "accelerator", None) or torch.get_device_module(self._stream.device)
                owner.set_stream(self._owner)
            self.wait(None)
            raise

    def future(self, *tensors: torch.Tensor) -> IoFuture:
        """Returns this as a transfer, which keeps tensors alive until it is known to have ended."""
        self._tensors = tensors
        return IoFuture(cast("Operation", self))

    def before(self, device: torch.device) -> None:
        """Makes the current stream wait for the copy."""
        if not self.done():
            self._copies.note_wait(current_stream(device), self._event)
        super().before(device)
        self._is_awaited = self._is_awaited or current_stream(device) == self._owner

    def release(self) -> None:
        """Waits until it is over, unless the stream does so in whose order the memory is reused."""
        if not self._is_awaited:
            self.wait(None)

    # The operation of a future

    def done(self) -> bool:
        """Returns whether it is over, or was never begun."""
        if self._is_begun and (self._event is self._owners_work or not self._event.query()):
            return False
        self._tensors = ()
        return True

    def wait(self, seconds: float | None) -> bool:
        """Waits until it is over; returns False if ``seconds`` passed first."""
        if seconds is not None:
            deadline = time.monotonic() + seconds
            while not self.done():
                if time.monotonic() >= deadline:
                    return False
                time.sleep(_PERIOD)
            return True
        if self._is_begun:
            try:
                has_event = self._event is not self._owners_work
                self._event.synchronize() if has_event else self._stream.synchronize()
            except RuntimeError as error:  # a device that has failed copies nothing more
                self._failure = error.with_traceback(None)
            self._is_begun = False
        self._tensors = ()
        return True

    def request_cancel(self) -> None:
        """Does nothing: a copy is short."""

    def exception(self) -> BaseException | None:
        """Returns why it failed, once it is over."""
        return self._failure

    def bytes(self) -> int:
        """Returns 0: nothing is moved to or from storage."""
        return 0

    def add_callback(self, callable: Callable[[], object]) -> None:
        """Calls ``callable`` when it is over, which this waits for."""
        with contextlib.suppress(RuntimeError):
            self.wait(None)
        callable()
