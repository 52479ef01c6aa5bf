"""``aio_handle``: DeepNVMe's interface to asynchronous tensor I/O, extended with futures.

The native module ``async_io`` re-exports everything in ``__all__``.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, cast

import torch

from nvme_ops.base.lifetime import Closing
from nvme_ops.base.native import native
from nvme_ops.base.text import never_raising
from nvme_ops.io import pin_memory
from nvme_ops.io.arguments import asynchronous, cache_mode, flag, one_example, one_file, require_usable_names
from nvme_ops.io.engine import AUTOMATIC, ClosedEngine, Op, Priority, Statistics, statistics_of
from nvme_ops.io.future import IoFuture

if TYPE_CHECKING:
    from typing import TypeAlias

    from _typeshed import ReadableBuffer, WriteableBuffer
    from typing_extensions import Self

    from nvme_ops.io.arguments import FileName
    from nvme_ops.io.tuning.adaptive import Learner, TransferClass
    from nvme_ops.ops.async_io import Engine, Pending

    Way: TypeAlias = Literal["cpu", "gpu", "gds"]
    Source: TypeAlias = torch.Tensor | ReadableBuffer
    Target: TypeAlias = torch.Tensor | WriteableBuffer

__all__ = ["IoFuture", "aio_handle", "aio_read", "aio_write", "deepspeed_memcpy"]

_SECTOR = 512  # bytes: what DeepNVMe aligns to


class aio_handle(Closing):  # noqa: N801  (DeepNVMe's name)
    """Reads tensors from files and writes them to files, asynchronously and bypassing the page cache.

    Any size, offset, dtype and alignment is accepted, on the CPU and on accelerators. A ``buffer`` is a tensor, all of
    which is filled (``read``) or stored (``write``); a buffer to be filled must be contiguous. On the CPU it can be
    anything with the buffer protocol. A ``filename`` is a path or an open file descriptor, which stays open.

    ``file_offset`` is in bytes. A write without it makes the tensor the whole file, truncating a longer one. With a
    ``file_offset``, even 0, or a file descriptor, the rest of the file is left unchanged.

    Args:
        block_size: bytes of one request to the device. Larger blocks cost less CPU, smaller ones fill a queue more
            evenly. Rounded to what direct I/O allows; through staging memory at most 2 MiB.
        queue_depth: requests in flight at once, for each lane.
        single_submit: submit every request by a system call of its own, as soon as it is ready, instead of in batches:
            the first request starts earlier, at a higher CPU cost.
        overlap_events: refill the queue after every completion, instead of after an eighth of the queue: the queue
            stays fuller, at a higher CPU cost. It never drains either way.
        intra_op_parallelism: number of lanes, each with its own queue and thread, among which a transfer is divided.
            None, automatic: two for a read of 64 MiB or more that the page cache has, up to four for a read of any
            size that it has for an accelerator, otherwise one.
        num_threads: another name for ``intra_op_parallelism``.
        backend: ``"io_uring"``, ``"libaio"`` or ``"threads"``; by default ``NVME_OPS_BACKEND``, else the first of
            these that works here.
        cache: ``"auto"`` reads what is in the page cache from there and bypasses it for the rest, ``"direct"``
            bypasses it for all reads, ``"buffered"`` reads and writes through it. Partial pages at either end of a
            write always go through it. By default ``NVME_OPS_CACHE``, else ``"auto"``.

    Raises:
        ValueError: a size or number below 1, an unknown backend or cache mode, two different thread counts.
        TypeError: a size that is not an int, a switch that is not a bool.
        RuntimeError: the backend asked for by name does not work here; the message says why.
    """

    _way = "cpu"  # how tensors are reached, as nvme-tune names it
    _learner: Learner | None = None  # of an adaptive handle
    _adaptive_arguments: dict[str, Any]  # the arguments of ``adaptive``

    def __init__(
        self,
        block_size: int = 1048576,
        queue_depth: int = 128,
        single_submit: bool = False,
        overlap_events: bool = False,
        intra_op_parallelism: int | None = None,
        *,
        num_threads: int | None = None,
        backend: str | None = None,
        cache: Literal["auto", "direct", "buffered"] | None = None,
    ) -> None:
        if None not in (intra_op_parallelism, num_threads) and intra_op_parallelism != num_threads:
            raise ValueError(
                f"intra_op_parallelism={intra_op_parallelism} and num_threads={num_threads} are two names for one "
                "number: give one of them"
            )
        lanes = num_threads if intra_op_parallelism is None else intra_op_parallelism
        numbers = {"block_size": block_size, "queue_depth": queue_depth}
        for name, value in (numbers if lanes is None else {**numbers, "intra_op_parallelism": lanes}).items():
            if isinstance(value, bool) or not hasattr(value, "__index__"):
                raise TypeError(f"{name} must be an int, not {type(value).__name__}")
            if not 1 <= value < 2**63:
                raise ValueError(f"{name} must lie between 1 and 2**63 - 1, not {value}")
        for name, word in (("backend", backend), ("cache", cache)):
            if word is not None and not isinstance(word, str):
                raise TypeError(f"{name} must be a str, not {type(word).__name__}")
        require_usable_names(backend)
        self._settings: dict[str, Any] = {
            "block_size": block_size,
            "queue_depth": queue_depth,
            "single_submit": flag("single_submit", single_submit),
            "overlap_events": flag("overlap_events", overlap_events),
            "intra_op_parallelism": lanes,
            "backend": backend,
            "cache": cache_mode(cache),
        }
        self._engine: Engine = self._make_engine()
        self._backend = self._engine.backend()  # kept: in a forked child the engine is made anew to answer
        self._pending: Pending = native().Pending()

    @classmethod
    def tuned(cls, path: str | os.PathLike[str], *, way: Way | None = None, **given: Any) -> Self:
        """Returns a handle with the settings that ``nvme-tune`` found for the device of ``path``, else the defaults.

        Args:
            path: a file or folder on the device. It need not exist yet, but its parent folder must. It only identifies
                the device: the handle reads and writes any file.
            way: what was tuned: ``"cpu"``; ``"gpu"`` or ``"gds"`` for what ``nvme-tune --gpu`` and ``--gds`` found.
                None: ``"gds"`` for a ``gds_handle``, else ``"cpu"``.
            given: arguments of the handle; they take precedence over what was found.

        Raises:
            FileNotFoundError: the parent folder of ``path`` is missing.
            ValueError: as for the arguments.

        Warns:
            RuntimeWarning: the stored settings are damaged, or others can change them; they are ignored.
        """
        from nvme_ops.io.tuning import store

        return store.tuned(cls, path, way or cls._way, given)

    @classmethod
    def adaptive(cls, path: str | os.PathLike[str], *, way: Way | None = None, **given: Any) -> Self:
        """Returns a ``tuned`` handle that learns, for each class of transfers, which of several tools is the fastest.

        A class is a direction, a size (powers of 4 from 4 KiB to 1 GiB), a place in memory (pageable, aligned, huge or
        page-locked pages, an accelerator), whether the page cache has the bytes, and how much else is in flight. The
        tools of a class differ from the handle's settings in one respect each: block size, queue depth, lanes, staged
        or in place, the page cache, with a ``gds_handle`` page-locked memory instead of cuFile. All of them move the
        same bytes.

        The first 20 transfers or so of a class try its tools and drop the worst first; later ones use the best. The
        tools are tried again when the best one's cost rises or falls by a factor of 1.5, and after 1024 transfers in
        any case. Nothing is transferred that the program does not ask for. The handles of a process that use the same
        device with the same settings learn together; a forked child continues from there, any other process begins
        anew. ``explain`` describes what was learned, ``freeze`` ends learning.

        With the environment variable ``NVME_OPS_ADAPTIVE=off``, read when a handle is made, it is a ``tuned`` handle.

        Args:
            path: as for ``tuned``.
            way: as for ``tuned``.
            given: arguments of the handle, which are never changed.

        Raises:
            FileNotFoundError: the parent folder of ``path`` is missing.
            ValueError: as for the arguments; an unknown value of ``NVME_OPS_ADAPTIVE``.
        """
        from nvme_ops.io.tuning.adaptive import learner_of

        handle = cls.tuned(path, way=way, **given)
        handle._learner = learner_of(path, way or cls._way, handle.backend, handle._settings, given)
        if handle._learner is not None:
            handle._adaptive_arguments = {"path": os.path.abspath(os.fspath(path)), "way": way, **given}
            handle._engine = handle._make_engine()
        return handle

    def learned(self) -> list[TransferClass]:
        """Returns what was learned about each class of transfers on the device; [] if the handle is not adaptive."""
        if self._learner is None:
            return []
        if not self.closed:
            self._engine.sweep()  # what has ended counts
        return self._learner.learned()

    def explain(self) -> str:
        """Describes what was ``learned``: for each class the tool in use, its speed, and the others that were tried."""
        if self._learner is None:
            return "not adaptive, or NVME_OPS_ADAPTIVE=off: every transfer uses the handle's settings"
        return self._learner.explain(self.learned())

    def freeze(self) -> None:
        """Ends learning, here and in all handles that learn together with this one: the choice of tools stays as it is.

        From then on the tool depends on the call alone: only a call with many tensors is of the class ``crowd``, and
        a read uses the tool of most reads of its kind before, whether cached or not. A class whose tools were never
        tried to the end uses the handle's settings. Does nothing if the handle is not adaptive.
        """
        if self._learner is not None:
            self._learner.freeze()

    def _make_engine(self) -> Engine:
        return self._native_engine(native())

    def _native_engine(self, module: Any) -> Engine:
        experience = None if self._learner is None else self._learner.experience(module)
        *sizes, lanes, backend, cache = self._settings.values()
        lanes = AUTOMATIC if lanes is None else lanes
        return cast("Engine", module.Engine(*sizes, lanes, backend or "", cache, experience))

    def close(self) -> None:
        """Waits for pending operations, raising as ``wait`` does, and releases lanes and memory. Safe to call again.

        Any later use raises ValueError. A handle that is dropped is closed as well, without raising.
        """
        try:
            if not self.closed:
                self.wait()
        finally:
            self._engine = cast("Engine", ClosedEngine())

    @property
    def closed(self) -> bool:
        """True after ``close``."""
        return isinstance(self._engine, ClosedEngine)

    @never_raising
    def __repr__(self) -> str:
        """Returns for example ``aio_handle(block_size=1048576, ..., backend='io_uring', cache='auto')``."""
        settings = {**self._settings, "backend": self._backend}
        words = ", ".join(f"{name}={value!r}" for name, value in settings.items())
        return f"{type(self).__name__}({words})" + (" closed" if self.closed else "")

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles the handle's settings: unpickling makes a new handle with the same ones, adaptive if this one is."""
        if self._learner is not None:
            return functools.partial(type(self).adaptive, **self._adaptive_arguments), ()
        return functools.partial(type(self), **self._settings), ()

    def get_block_size(self) -> int:
        """Returns the constructor's ``block_size``, in bytes."""
        return cast("int", self._settings["block_size"])

    def get_queue_depth(self) -> int:
        """Returns the constructor's ``queue_depth``."""
        return cast("int", self._settings["queue_depth"])

    def get_single_submit(self) -> bool:
        """Returns the constructor's ``single_submit``."""
        return cast("bool", self._settings["single_submit"])

    def get_overlap_events(self) -> bool:
        """Returns the constructor's ``overlap_events``."""
        return cast("bool", self._settings["overlap_events"])

    def get_intra_op_parallelism(self) -> int:
        """Returns the constructor's ``intra_op_parallelism``; if that is automatic, 1, which is DeepNVMe's default."""
        return self._settings["intra_op_parallelism"] or 1

    def get_thread_count(self) -> int:
        """Returns the same as ``get_intra_op_parallelism``."""
        return self.get_intra_op_parallelism()

    def get_alignment(self) -> int:
        """Returns the bytes to which DeepNVMe's callers pad, 512 for each lane. Padding is never required here."""
        return _SECTOR * self.get_intra_op_parallelism()

    @property
    def backend(self) -> str:
        """The backend in use: ``io_uring``, ``libaio`` or ``threads``."""
        return self._engine.backend()

    # Blocking, on the caller's thread

    def read(self, buffer: Target, filename: FileName, validate: bool = False, file_offset: int | None = None) -> int:
        """Fills ``buffer`` from the file with one lane; returns 0. ``validate`` reads again and compares.

        Raises:
            OSError: the kernel reported an error, or validation found a difference (errno EIO).
            EOFError: the file ends before the buffer is full; nothing has been read.
            ValueError: negative offset, or a buffer that cannot be filled in place.
            TypeError: not a tensor, not a file, not a bool.
        """
        validate = flag("validate", validate)
        self._engine.run(Op.READ, buffer, filename, file_offset, validate)
        return 0

    def write(self, buffer: Source, filename: FileName, validate: bool = False, file_offset: int | None = None) -> int:
        """Stores ``buffer`` in the file with one lane; returns 0. Raises as ``read`` does."""
        validate = flag("validate", validate)
        self._engine.run(Op.WRITE, buffer, filename, file_offset, validate)
        return 0

    # All lanes

    def pread(
        self,
        buffer: Target,
        filename: FileName,
        validate: bool = False,
        async_op: bool | None = None,
        file_offset: int | None = None,
        **others: bool,
    ) -> int:
        """Fills ``buffer``: ``async_pread`` if ``async_op``, else ``sync_pread``.

        DeepNVMe's keyword is ``async``, now reserved in Python: ``pread(..., **{"async": True})`` works too.
        """
        validate, async_op = flag("validate", validate), asynchronous("pread", async_op, others)
        return self._transfer(Op.READ, buffer, filename, file_offset, validate, async_op)

    def pwrite(
        self,
        buffer: Source,
        filename: FileName,
        validate: bool = False,
        async_op: bool | None = None,
        file_offset: int | None = None,
        **others: bool,
    ) -> int:
        """Stores ``buffer``: ``async_pwrite`` if ``async_op``, else ``sync_pwrite``; otherwise like ``pread``."""
        validate, async_op = flag("validate", validate), asynchronous("pwrite", async_op, others)
        return self._transfer(Op.WRITE, buffer, filename, file_offset, validate, async_op)

    def sync_pread(self, buffer: Target, filename: FileName, file_offset: int | None = None) -> int:
        """Fills ``buffer`` and waits, also for earlier asynchronous operations; returns the number of operations."""
        return self._transfer(Op.READ, buffer, filename, file_offset, False, False)

    def sync_pwrite(self, buffer: Source, filename: FileName, file_offset: int | None = None) -> int:
        """Stores ``buffer`` and waits, also for earlier asynchronous operations; returns the number of operations."""
        return self._transfer(Op.WRITE, buffer, filename, file_offset, False, False)

    def async_pread(self, buffer: Target, filename: FileName, file_offset: int | None = None) -> int:
        """Starts to fill ``buffer`` and returns 0. Do not use the buffer until ``wait``.

        The file is opened when the transfer starts: any error from that, a missing file included, is raised by
        ``wait``.
        """
        return self._transfer(Op.READ, buffer, filename, file_offset, False, True)

    def async_pwrite(
        self, buffer: Source, filename: FileName | None = None, file_offset: int | None = None, *, fd: int | None = None
    ) -> int:
        """Starts to store ``buffer`` and returns 0. Do not change the buffer until ``wait``; like ``async_pread``.

        ``fd`` is DeepNVMe's keyword for an open descriptor in place of ``filename``.
        """
        filename = one_file("async_pwrite", filename, fd)
        return self._transfer(Op.WRITE, buffer, filename, file_offset, False, True)

    def wait(self) -> int:
        """Waits for every asynchronous operation since the last ``wait`` and returns how many there were.

        Futures do not count. If operations failed, all are waited for; then the first failure is raised, whose
        attribute ``failures`` lists all of them, itself included.
        """
        self._engine.sweep()
        return self._pending.wait()

    def _transfer(
        self, op: Op, buffer: object, filename: FileName, file_offset: int | None, validate: bool, async_op: bool
    ) -> int:
        if async_op:
            self._engine.submit(op, buffer, filename, file_offset, validate, True, Priority.DEMAND, self._pending)
            return 0
        self._engine.run(op, buffer, filename, file_offset, validate, self.get_intra_op_parallelism() > 1)
        return 1 + (self._pending.wait() if self._pending else 0)

    # Futures

    def submit_pread(
        self,
        tensor: Target,
        file: FileName,
        file_offset: int | None = None,
        *,
        priority: Priority = Priority.DEMAND,
    ) -> IoFuture:
        """Starts to fill ``tensor`` from ``file``; the future's result is the bytes moved. ``wait`` does not count it.

        Wrong arguments raise at once. The file is opened when the transfer starts: any error from that, a missing file
        included, comes from the future. Do not rename or remove the file before the transfer has ended.

        Args:
            tensor: all of it is filled.
            file: a path, an open file descriptor, or a file of ``nvme_ops.open``, which is not opened again.
            file_offset: in bytes.
            priority: ``nvme_ops.Priority``. More urgent transfers of this process overtake less urgent ones.
        """
        return IoFuture(self._engine.submit(Op.READ, tensor, file, file_offset, False, True, priority))

    def submit_pwrite(
        self,
        tensor: Source,
        file: FileName,
        file_offset: int | None = None,
        *,
        priority: Priority = Priority.DEMAND,
    ) -> IoFuture:
        """Starts to store ``tensor`` in ``file``; otherwise like ``submit_pread``."""
        return IoFuture(self._engine.submit(Op.WRITE, tensor, file, file_offset, False, True, priority))

    def submit_preadv(
        self,
        tensors: Sequence[Target] | torch.Tensor,
        files: FileName | Sequence[FileName],
        file_offsets: Sequence[int] | torch.Tensor | None = None,
        *,
        priority: Priority = Priority.DEMAND,
    ) -> IoFuture:
        """Starts many reads in one call; the future's result is the total number of bytes moved.

        Args:
            tensors: one for each read; a contiguous CPU tensor stands for its rows along the first dimension.
            files: one for all reads, or one for each. A file named several times is opened once. There may be more of
                them than the process can have open.
            file_offsets: one for each read, in bytes. None: offset 0 of each file.
            priority: as in ``submit_pread``.
        """
        return IoFuture(self._engine.submit_many(Op.READ, tensors, files, _as_list(file_offsets), priority))

    def submit_pwritev(
        self,
        tensors: Sequence[Source] | torch.Tensor,
        files: FileName | Sequence[FileName],
        file_offsets: Sequence[int] | torch.Tensor | None = None,
        *,
        priority: Priority = Priority.DEMAND,
    ) -> IoFuture:
        """Starts many writes in one call; like ``submit_preadv``. Without offsets each tensor is its whole file."""
        return IoFuture(self._engine.submit_many(Op.WRITE, tensors, files, _as_list(file_offsets), priority))

    def statistics(self) -> Statistics:
        """Returns what this handle has moved, and how, since it was made. Costs a few nanoseconds for each request.

        A forked child starts from zero. ``gds_handle.path_statistics`` counts what goes through cuFile.
        """
        return statistics_of(self._engine.statistics())

    # Page-locked memory

    def new_cpu_locked_tensor(
        self, num_elem: int, example_tensor: torch.Tensor | None = None, *, example_tenosr: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Returns an uninitialized one-dimensional page-locked CPU tensor in huge pages, aligned for direct I/O.

        Args:
            num_elem: number of elements.
            example_tensor: gives the dtype.
            example_tenosr: DeepNVMe's spelling of ``example_tensor``.

        Warns:
            RuntimeWarning: the system refused to lock the pages (RLIMIT_MEMLOCK); the tensor works all the same.
        """
        return pin_memory.new_locked_tensor(num_elem, one_example(example_tensor, example_tenosr))

    def free_cpu_locked_tensor(self, tensor: torch.Tensor) -> bool:
        """Unlocks the tensor's pages now; its memory is reused once nothing refers to it.

        Returns False for a tensor that no handle made, for a view of part of one, and for one already freed.
        """
        return pin_memory.free_locked_tensor(tensor, "tensor")

    def is_pinned(self, buffer: torch.Tensor) -> bool:
        """Returns whether torch pinned ``buffer``, or it is from ``new_cpu_locked_tensor`` or ``nvme_ops.empty``.

        Any handle of the process may have made it. False once it was freed.
        """
        return pin_memory.is_pinned(buffer)


def aio_read(
    tensor: torch.Tensor,
    filename: FileName,
    block_size: int,
    queue_depth: int,
    single_submit: bool,
    overlap_events: bool,
    validate: bool,
) -> int:
    """Makes a handle and calls its ``read``; returns 0."""
    return aio_handle(block_size, queue_depth, single_submit, overlap_events).read(tensor, filename, validate)


def aio_write(
    tensor: torch.Tensor,
    filename: FileName,
    block_size: int,
    queue_depth: int,
    single_submit: bool,
    overlap_events: bool,
    validate: bool,
) -> int:
    """Makes a handle and calls its ``write``; returns 0."""
    return aio_handle(block_size, queue_depth, single_submit, overlap_events).write(tensor, filename, validate)


def deepspeed_memcpy(dest: torch.Tensor, src: torch.Tensor) -> int:
    """Copies ``src`` into ``dest``, of any dtype and shape with the same number of bytes; returns 0.

    Raises:
        ValueError: sizes differ, or ``dest`` is not contiguous while its shape or dtype differs from that of ``src``.
        TypeError: one of them is not a tensor.
    """
    for name, tensor in (("dest", dest), ("src", src)):
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, not {type(tensor).__name__}")
    if dest.nbytes != src.nbytes:
        raise ValueError(f"dest has {dest.nbytes} bytes and src has {src.nbytes}")
    with torch.no_grad():
        if dest.shape == src.shape and dest.dtype == src.dtype:
            dest.copy_(src)
        elif dest.is_contiguous():
            dest.view(-1).view(torch.uint8).copy_(src.contiguous().view(-1).view(torch.uint8))
        else:
            raise ValueError("dest must be contiguous where its shape or dtype differs from src's")
    return 0


def _as_list(offsets: Sequence[int] | torch.Tensor | None) -> Sequence[int] | None:
    return offsets.tolist() if isinstance(offsets, torch.Tensor) else offsets
