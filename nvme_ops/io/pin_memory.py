"""Page-locked CPU tensors, and the one registry of them that all handles of the process share.

``pin_handle`` is DeepNVMe's interface to them, from ``PinMemoryBuilder().load()``; ``aio_handle`` and ``gds_handle``
have the same methods.
"""

from __future__ import annotations

import warnings
import weakref
from typing import TYPE_CHECKING

import torch

from nvme_ops.base.native import native
from nvme_ops.base.text import counted, never_raising
from nvme_ops.io.arguments import one_example
from nvme_ops.io.tensors import pool_buffer

if TYPE_CHECKING:
    from nvme_ops.ops.async_io import Buffer

__all__ = ["pin_handle"]

# By the address of their memory. A buffer is removed with the last tensor over it. There is no lock, which a fork could
# leave held: taking a buffer out of a dictionary is atomic.
_locked: weakref.WeakValueDictionary[int, Buffer] = weakref.WeakValueDictionary()
_freed: weakref.WeakValueDictionary[int, Buffer] = weakref.WeakValueDictionary()  # tensors still refer to their memory


class pin_handle:  # noqa: N801  (DeepNVMe's name)
    """Allocates, frees and recognises page-locked CPU tensors. They outlive the handle; any handle can free them."""

    def new_cpu_locked_tensor(self, num_elem: int, example_tensor: torch.Tensor) -> torch.Tensor:
        """Returns an uninitialized one-dimensional page-locked CPU tensor in huge pages, aligned for direct I/O.

        Args:
            num_elem: number of elements.
            example_tensor: gives the dtype.

        Warns:
            RuntimeWarning: the system refused to lock the pages (RLIMIT_MEMLOCK); the tensor works all the same.
        """
        return new_locked_tensor(num_elem, one_example(example_tensor, None))

    def free_cpu_locked_tensor(self, locked_tensor: torch.Tensor) -> bool:
        """Unlocks the tensor's pages now; its memory is reused once nothing refers to it.

        Returns False for a tensor that no handle made, for a view of part of one, and for one already freed.
        """
        return free_locked_tensor(locked_tensor, "locked_tensor")

    def free_cpu_locked_tensor_by_ptr(self, address: int) -> bool:
        """Does the same for the tensor whose ``data_ptr()`` is ``address``."""
        return free_locked_memory(address)

    def is_pinned(self, buffer: torch.Tensor) -> bool:
        """Returns whether torch pinned ``buffer``, or it is a locked tensor's or ``nvme_ops.empty``'s memory."""
        return is_pinned(buffer)

    @never_raising
    def __repr__(self) -> str:
        """Returns for example ``<pin_handle: 2 page-locked tensors in this process>``."""
        return f"<pin_handle: {counted(len(_locked), 'page-locked tensor')} in this process>"


def new_locked_tensor(num_elem: int, example: torch.Tensor) -> torch.Tensor:
    """Implements ``new_cpu_locked_tensor`` of all handles; the warning points at their caller."""
    if not isinstance(num_elem, int):
        raise TypeError(f"num_elem must be an int, not {type(num_elem).__name__}")
    if num_elem < 0:
        raise ValueError(f"num_elem must not be negative: {num_elem}")
    buffer = pool_buffer(max(1, num_elem) * example.element_size())
    if not buffer.lock():
        warnings.warn(
            "the system refused to lock this tensor's memory; it works but may be swapped out "
            "(fix: ulimit -l unlimited, or docker run --ulimit memlock=-1)",
            RuntimeWarning,
            stacklevel=3,
        )
    tensor = torch.frombuffer(buffer, dtype=example.dtype, count=max(1, num_elem))
    _locked[tensor.data_ptr()] = buffer
    return tensor if num_elem else tensor[:0]


def free_locked_tensor(tensor: torch.Tensor, argument: str) -> bool:
    """Implements ``free_cpu_locked_tensor`` of all handles; ``argument`` is the parameter's name there."""
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{argument} must be a torch.Tensor, not {type(tensor).__name__}")
    if tensor.device.type != "cpu" or tensor.layout != torch.strided:
        return False
    memory = tensor.untyped_storage()
    made_for = tensor.nbytes or tensor.element_size()  # a tensor without elements has memory for one
    return made_for == memory.nbytes() and free_locked_memory(memory.data_ptr())


def free_locked_memory(address: int) -> bool:
    """Implements ``free_cpu_locked_tensor_by_ptr``. Of concurrent calls only one returns True."""
    if isinstance(address, bool) or not hasattr(address, "__index__"):
        raise TypeError(f"address must be an int, not {type(address).__name__}")
    buffer = _locked.pop(address, None)
    if buffer is None:
        return False
    _freed[address] = buffer
    buffer.unlock()
    return True


def is_pinned(buffer: torch.Tensor) -> bool:
    """Implements ``is_pinned`` of all handles for CPU tensors."""
    if native().in_pool(buffer):
        return buffer.untyped_storage().data_ptr() not in _freed
    return bool(buffer.is_pinned())
