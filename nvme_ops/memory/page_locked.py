"""``PageLocked``: host memory that is registered with CUDA, so that a GPU copies from and to it at full speed.

torch's own allocator rounds up to powers of two. It stays where memory is given to the program, for whose copies it
waits (``nvme_ops/data/loader.py``), and for buffers that come and go in such sizes (``Ring`` without a pool).

CUDA is called in threads that end with the call. No signal handler interrupts these, and an error ends with its thread,
of which it is the last one; torch would take it for the failure of what it does next.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import torch

from nvme_ops.base.lifetime import at_exit, forkable_lock, in_this_process
from nvme_ops.io.tensors import pool_buffer

_PORTABLE = 1  # cudaHostRegisterPortable: for all GPUs
_WIPE_ON_FORK, _KEEP_ON_FORK = 18, 19  # MADV_WIPEONFORK, MADV_KEEPONFORK
_PATIENCE = 10.0  # seconds that who frees memory waits for a GPU that may still use it
_madvise: Any = ctypes.CDLL(None).madvise
_madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)

#: By address: who has the memory, and the memory, which is kept until it is unregistered.
_registered: dict[int, tuple[weakref.ref[PageLocked], torch.Tensor]] = {}
_lock: Any = forkable_lock()  # of the threads that call CUDA
_ending = False


class PageLocked:
    """Memory that is registered until this is freed; ordinary memory if CUDA refuses, which ``warn`` says once.

    A forked child finds zeros in it. Pages that a device uses cannot be shared: the kernel would copy all of them at
    the fork, or, before Linux 5.9, replace the parent's when they are written to, but not those that the GPU uses.

    Args:
        nbytes: bytes, in whole pages.
        shared: with other processes, memory that a forked child has not; new memory when None.
    """

    def __init__(self, nbytes: int, shared: torch.Tensor | None = None) -> None:
        self.nbytes, self.refusal, self.is_shared = nbytes, "no thread can be started", shared is not None
        self.memory = torch.frombuffer(pool_buffer(nbytes), dtype=torch.uint8) if shared is None else shared
        self.user: Callable[[], object] = lambda: None  #: returns what ``lend`` returned, while it is alive
        _settle_in_thread(self)

    def warn(self) -> PageLocked:
        """Says in a RuntimeWarning if CUDA has refused; returns itself."""
        if self.refusal:
            words = f"CUDA refused to page-lock host memory: {self.refusal}; it is used all the same, more slowly"
            fix = "(fix: ulimit -l unlimited, or docker run --ulimit memlock=-1)"
            warnings.warn(f"{words} {fix}", RuntimeWarning, stacklevel=1)  # one place, so it is shown once
        return self

    def lend(self) -> Any:
        """Returns a buffer over the memory, freed with the last tensor over it."""
        user: Any = (ctypes.c_ubyte * self.nbytes).from_address(self.memory.data_ptr())
        user.keeps = self
        self.user = weakref.ref(user)
        return user


def reuse(pieces: list[PageLocked], nbytes: int, room: int) -> tuple[Any | None, list[PageLocked]]:
    """Lends a free piece of ``nbytes``, whose copies the caller has to wait for.

    If there is none, takes others from ``pieces`` until the free ones have at most ``room`` bytes, and returns these.
    """
    free, taken = [piece for piece in pieces if piece.user() is None], list[PageLocked]()
    for piece in free:
        if piece.nbytes == nbytes:
            return piece.lend(), taken
    while sum(piece.nbytes for piece in free) > room:
        taken.append(free.pop(0))
        pieces.remove(taken[-1])
    return None, taken


def wait_for_copies() -> None:
    """Waits for the work of all GPUs: torch waits for copies from and to its own memory alone. Raises RuntimeError."""
    if torch.cuda.is_initialized():  # not in a forked child
        for gpu in _gpus():
            torch.cuda.synchronize(gpu)


def _gpus() -> list[int]:
    """Returns the GPUs that this process uses; a call on another one would take memory there."""
    bindings: Any = torch._C
    return [gpu for gpu in range(torch.cuda.device_count()) if bindings._cuda_hasPrimaryContext(gpu)]


def _settle_in_thread(piece: PageLocked | None, patience: float | None = None) -> None:
    with contextlib.suppress(RuntimeError):  # at the end of the program there may be no new threads
        thread = threading.Thread(target=_settle, args=[piece])
        thread.start()
        thread.join(patience)


def _settle(piece: PageLocked | None = None) -> None:
    """Unregisters memory that nobody has any more, then registers that of ``piece``. Fails in a forked child."""
    with _lock:
        try:
            with torch.cuda.device(next(iter(_gpus()), 0)):
                _unregister()
                refusal = "" if piece is None else _register(piece)
        except Exception as error:
            refusal = str(error)
        if piece is not None:
            piece.refusal = refusal
            if refusal:
                _advise(piece.memory, _KEEP_ON_FORK)


def _unregister() -> None:
    for address, (piece, memory) in list(_registered.items()):
        if piece() is None:
            wait_for_copies()
            if int(torch.cuda.cudart().cudaHostUnregister(address)) == 0:  # else the next call tries again
                _advise(memory, _KEEP_ON_FORK)  # the pool may use it for other tensors
                del _registered[address]


def _register(piece: PageLocked) -> str:
    """Returns the reason if that is refused."""
    is_ours = in_this_process()

    def freed(_: object) -> None:
        if is_ours() and not _ending:
            _settle_in_thread(None, 0 if _lock._is_owned() else _PATIENCE)

    if not piece.is_shared and not _advise(piece.memory, _WIPE_ON_FORK):
        return "a forked child would share it (is NVME_OPS_HUGETLB set?)"
    address, cudart = piece.memory.data_ptr(), torch.cuda.cudart()
    error: Any = cudart.cudaHostRegister(address, piece.nbytes, _PORTABLE)
    if int(error):
        return str(cudart.cudaGetErrorString(error))
    _registered[address] = weakref.ref(piece, freed), piece.memory
    return ""


def unregister(memory: torch.Tensor) -> bool:
    """Returns whether no GPU can use memory that begins where this does, which has been freed."""
    if memory.data_ptr() in _registered:  # the last call has failed
        _settle_in_thread(None, _PATIENCE)
    return memory.data_ptr() not in _registered


def _advise(memory: torch.Tensor, advice: int) -> bool:
    return not _madvise(memory.data_ptr(), memory.nbytes, advice)


def _end() -> None:
    """Leaves to the system what is registered from now on: CUDA may end before the last object of the program."""
    global _ending
    with _lock:
        _ending = True


at_exit(_end)
