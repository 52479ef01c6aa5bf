"""``gds_handle``: DeepNVMe's interface for GPU tensors, through cuFile where that is the fastest path.

The native module ``gds`` re-exports everything in ``__all__``.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import torch

from nvme_ops.io.arguments import one_example
from nvme_ops.io.handle import aio_handle
from nvme_ops.op_builder import GDSBuilder

if TYPE_CHECKING:
    from nvme_ops.ops.async_io import Engine, Operation

# The native module takes the place of the package nvme_ops.ops.gds, from which programs import the builder
__all__ = ["GDSBuilder", "gds_handle"]

_WITHOUT = "(aio_handle, or NVME_OPS_GDS=off, moves tensors without cuFile)"
_PAGE = 4096  # bytes: cuFile's direct path requires addresses and offsets that are multiples of it


def is_ready() -> bool:
    """Returns whether the gds op can be loaded without being compiled."""
    builder = GDSBuilder()
    return builder.is_loaded() or builder.find_built() is not None


def opened() -> Any:
    """Returns the native module with cuFile's driver open, or not opened if ``NVME_OPS_GDS`` is ``off``.

    Raises:
        ValueError: ``NVME_OPS_GDS`` is not ``auto``, ``require`` or ``off``.
        RuntimeError: cuFile cannot work here, which is found before compiling; or not as ``NVME_OPS_GDS`` requires.
    """
    from nvme_ops.op_builder import machine

    mode = os.environ.get("NVME_OPS_GDS") or "auto"
    if mode not in ("auto", "require", "off"):
        raise ValueError(f"NVME_OPS_GDS={mode!r} is not one of auto, require, off")
    builder = GDSBuilder()
    if mode != "off" and not os.environ.get(machine.CUFILE_OVERRIDE):  # a library that the user names is not checked
        gpu = machine.gpu(builder.host)
        if not (gpu.found or torch.cuda.is_available()):
            raise RuntimeError(f"gds_handle cannot work here: {gpu.missing}; fix: {gpu.fix}\n{_WITHOUT}")
        if not is_ready() and not builder.is_compatible():
            raise RuntimeError(
                f"gds_handle cannot work here, so the gds op is not compiled:\n{builder.error_log}\n{_WITHOUT}"
            )
    module: Any = builder.load()
    if mode != "off":
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # a CUDA context must exist before the driver is opened, once per process
        driver = module.open_driver(machine.cufile_libraries())
        if mode == "require" and driver["why_not_direct"]:
            raise RuntimeError(f"NVME_OPS_GDS=require, but {driver['why_not_direct']}")
    return module


class gds_handle(aio_handle):  # noqa: N801  (DeepNVMe's name)
    """An ``aio_handle`` whose accelerator tensors move directly between storage and device where the machine can.

    CPU tensors are handled as by ``aio_handle``. For the others each transfer chooses a path: GPUDirect Storage
    (``"gds"``) if cuFile can reach the GPU directly; if not, cuFile's compatibility mode (``"compat"``) or page-locked
    staging memory (``"bounce"``), whichever has been faster so far. ``last_path`` and ``path_statistics`` say which it
    was.

    The environment variable ``NVME_OPS_GDS``, read when a handle is made, limits the choice: ``auto``; ``require``
    raises RuntimeError, with the reason, instead of using any path but GPUDirect Storage; ``off`` never uses cuFile.
    Parts of a transfer outside whole pages of the file (4096 bytes) always go through staging memory.

    Args:
        block_size: bytes of one cuFile call, and of one request on the other paths.
        intra_op_parallelism: concurrent cuFile calls, each on a slice of the tensor, and lanes of the other paths.
        queue_depth: as for ``aio_handle``, like all that follow; cuFile uses none of them.
        single_submit: as for ``aio_handle``.
        overlap_events: as for ``aio_handle``.
        num_threads: as for ``aio_handle``.
        backend: as for ``aio_handle``.
        cache: as for ``aio_handle``; ``"buffered"`` rules cuFile out.

    Raises:
        ValueError: as ``aio_handle``; an unknown value of ``NVME_OPS_GDS``.
        RuntimeError: cuFile cannot work here, and ``NVME_OPS_GDS`` is not ``off``; the message says why.
    """

    _way = "gds"

    def _make_engine(self) -> Engine:
        self._gds = opened()
        return cast("Engine", Engines(super()._make_engine(), self._native_engine(self._gds)))

    @property
    def last_path(self) -> str | None:
        """The path of the last transfer of an accelerator tensor: ``"gds"``, ``"compat"`` or ``"bounce"``."""
        return cast("str | None", self.path_statistics()["last"])

    def path_statistics(self) -> dict[str, Any]:
        """Returns ``last``, the last path; ``why`` it was chosen; and ``uses``: ``transfers`` and ``bytes`` by path."""
        return self._engine.paths()

    # Memory of an accelerator registered with cuFile

    def new_pinned_device_tensor(
        self, num_elem: int, example_tensor: torch.Tensor | None = None, *, example_tenosr: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Returns an uninitialized one-dimensional tensor on the device of ``example_tensor``, aligned and pinned.

        It stays pinned, and its memory allocated, until ``free_pinned_device_tensor``. DeepNVMe spells the keyword
        ``example_tenosr``.

        Raises:
            ValueError: ``example_tensor`` is on the CPU, or ``num_elem`` is below 1.
            OSError: cuFile refused; ``errno`` is its code.
        """
        example_tensor = one_example(example_tensor, example_tenosr)
        if example_tensor.device.type == "cpu":
            raise ValueError("example_tensor must be on an accelerator; for CPU memory call new_cpu_locked_tensor")
        if num_elem < 1:
            raise ValueError(f"num_elem must be at least 1, not {num_elem}")
        size = num_elem * example_tensor.element_size()
        whole = torch.empty(math.ceil(size / _PAGE) * _PAGE + _PAGE, dtype=torch.uint8, device=example_tensor.device)
        start = -whole.data_ptr() % _PAGE
        tensor = whole[start : start + size].view(example_tensor.dtype)
        self.pin_device_tensor(tensor)
        return tensor

    def free_pinned_device_tensor(self, tensor: torch.Tensor) -> bool:
        """Unpins a tensor of ``new_pinned_device_tensor``; its memory is freed once nothing refers to it."""
        return self.unpin_device_tensor(tensor)

    def pin_device_tensor(self, tensor: torch.Tensor) -> bool:
        """Registers a contiguous tensor's memory with cuFile, which pays off when it is used repeatedly. Returns True.

        Pinning it twice, or a view of it, changes nothing. The memory stays allocated until it is unpinned.

        Raises:
            ValueError: a tensor on the CPU, without elements, or not contiguous.
            OSError: cuFile refused; ``errno`` is its code, 5016 when the limit on pinned memory is exceeded.
        """
        return bool(self._gds.pin(tensor))

    def unpin_device_tensor(self, tensor: torch.Tensor) -> bool:
        """Undoes ``pin_device_tensor``, once the transfers that use the memory have ended.

        Returns False for a tensor that was not pinned itself, for example a view of one that was.
        """
        return bool(self._gds.unpin(tensor))

    def is_pinned(self, buffer: torch.Tensor) -> bool:
        """Returns whether ``buffer`` is pinned: on the CPU by torch or a handle, else all of it by cuFile."""
        if isinstance(buffer, torch.Tensor) and buffer.device.type not in ("cpu", "meta"):
            return bool(self._gds.is_pinned(buffer))
        return super().is_pinned(buffer)


class Engines:
    """The ``Engine`` of a ``gds_handle``: that of ``async_io`` moves host memory, that of ``gds`` all other memory."""

    def __init__(self, host: Engine, device: Engine) -> None:
        self._host, self._device = host, device
        self.backend = host.backend
        self.staging_bytes = host.staging_bytes
        self.paths = device.paths

    def _of(self, memory: object) -> Engine:
        on_device = isinstance(memory, torch.Tensor) and memory.device.type != "cpu"
        return self._device if on_device else self._host

    def run(self, op: int, memory: object, *rest: Any) -> int:
        return self._of(memory).run(op, memory, *rest)

    def submit(self, op: int, memory: object, *rest: Any) -> Operation:
        return self._of(memory).submit(op, memory, *rest)

    def submit_many(self, op: int, memories: Sequence[object] | torch.Tensor, *rest: Any) -> Operation:
        several = [memories] if isinstance(memories, torch.Tensor) else memories
        engine = self._device if any(self._of(one) is self._device for one in several) else self._host
        return engine.submit_many(op, memories, *rest)

    def statistics(self) -> dict[str, int]:
        host, device = self._host.statistics(), self._device.statistics()
        merged = {name: host[name] + device[name] for name in host}
        return {**merged, "in_flight_max": max(host["in_flight_max"], device["in_flight_max"])}

    def sweep(self) -> None:
        self._host.sweep()
        self._device.sweep()
