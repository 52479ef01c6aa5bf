"""``safe_open``: one safetensors file, opened lazily, with the interface of safetensors' own."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch

from nvme_ops.base.lifetime import Closing
from nvme_ops.base.text import counted, never_raising
from nvme_ops.checkpoint import new_tensors
from nvme_ops.checkpoint.request import missing_error
from nvme_ops.filesystem.publication import open_leased
from nvme_ops.formats import integrity
from nvme_ops.formats import safetensors_format as layout
from nvme_ops.io.file import handle_of
from nvme_ops.io.handle import aio_handle

_TORCH, _NUMPY = ("pt", "torch", "pytorch"), ("np", "numpy")


class safe_open(Closing):  # noqa: N801  (safetensors' name)
    """Opens a safetensors file; reads tensors, and parts of them, on request.

        with safe_open("model.safetensors", framework="pt", device="cuda") as file:
            for name in file.keys():
                tensor = file.get_tensor(name)
            rows = file.get_slice("lm_head.weight")[1000:2000]  # reads these rows only

    Threads may share it. Tensors that were read do not change when the file is closed or changed.

    Args:
        filename: the file.
        framework: ``"pt"``, or ``"np"`` for NumPy's arrays; others are refused.
        device: where the tensors go.
        backend: accepted, as by safetensors, and ignored: the handle reads the file.
        handle: moves the bytes; one for the whole process when None.

    Raises:
        ValueError: another framework.
        FormatError: (a ValueError) the file is damaged, or not a safetensors file.
        OSError: it cannot be opened.
    """

    def __init__(
        self,
        filename: str | os.PathLike[str],
        framework: str = "pt",
        device: str | int | torch.device = "cpu",
        *,
        backend: str | None = None,
        handle: aio_handle | None = None,
    ) -> None:
        del backend
        self._fd = -1
        if framework not in (*_TORCH, *_NUMPY):
            raise ValueError(f"framework must be 'pt' or 'np', not {framework!r}: tensors here are torch's or NumPy's")
        self._numpy = framework in _NUMPY
        self._path = os.fspath(filename)
        self._device = torch.device(device)
        self._handle = handle_of(handle)
        self._fd = open_leased(self._path)
        try:
            self._header = layout.read(self._fd, self._path)
        except BaseException:
            self.close()
            raise

    def keys(self) -> list[str]:
        """Returns the names of the tensors, sorted."""
        return sorted(self._header.entries)

    def offset_keys(self) -> list[str]:
        """Returns the names of the tensors in the order of the file."""
        return sorted(self._header.entries, key=lambda name: self._header.entries[name].start)

    def metadata(self) -> dict[str, str] | None:
        """Returns the strings in the header except those of nvme_ops for ``verify``; None if there are none."""
        metadata = {key: text for key, text in self._header.metadata.items() if key not in integrity.OURS}
        return metadata or None

    def get_tensor(self, name: str) -> Any:
        """Reads a tensor or array. Raises KeyError for an unknown name, OSError or EOFError if reading fails."""
        return self.get_slice(name)[...]

    def get_tensors(self) -> dict[str, Any]:
        """Reads all tensors by name. ``nvme_ops.load`` is faster, as it reads them into one allocation."""
        return {name: self.get_tensor(name) for name in self.offset_keys()}

    def get_slice(self, name: str) -> TensorSlice:
        """Returns a tensor that is read, whole or in part, when it is indexed. Raises KeyError for an unknown name."""
        if name not in self._header.entries:
            raise missing_error(self._path, [name])
        return TensorSlice(self, name)

    def close(self) -> None:
        """Closes the file. Further calls do nothing. Its slices cannot be read any more."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def __del__(self) -> None:
        if getattr(self, "_fd", -1) >= 0 and os is not None:  # at Python's end modules may be gone
            self.close()

    @never_raising
    def __repr__(self) -> str:
        """Returns for example ``<safe_open 'model.safetensors': 291 tensors>``."""
        content = "closed" if self._fd < 0 else counted(len(self._header.entries), "tensor")
        return f"<safe_open {self._path!r}: {content}>"

    def _read(self, start: int, end: int, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
        if self._fd < 0:
            raise ValueError(f"the file is closed: {self._path!r}")
        wanted = [(start, end, (dtype, tuple(shape)))]
        return new_tensors.read(self._handle, self._fd, wanted, self._device)[0]


class TensorSlice:
    """A tensor in a file, indexed like a tensor. Only the rows that are needed (of the first dimension) are read."""

    def __init__(self, file: safe_open, name: str) -> None:
        self._file = file
        self._entry = file._header.entries[name]
        self._dtype, self._shape = self._entry.in_torch(file._path, name)

    @never_raising
    def __repr__(self) -> str:
        """Returns for example ``<TensorSlice: F32, [4096, 4096]>``."""
        return f"<TensorSlice: {self.get_dtype()}, {self.get_shape()}>"

    def get_shape(self) -> list[int]:
        """Returns the shape in the file."""
        return list(self._entry.shape)

    def get_dtype(self) -> str:
        """Returns the format's name of the dtype: ``F32``, ``BF16``, ..."""
        return self._entry.dtype

    def __getitem__(self, index: Any) -> Any:
        """Reads a new, contiguous tensor or array. Raises IndexError; TypeError for a dtype that NumPy lacks."""
        tensor = self._read(index)
        return tensor.numpy() if self._file._numpy else tensor

    def _read(self, index: Any) -> torch.Tensor:
        first, *rest = index if isinstance(index, tuple) and index else (index,)
        rows = self._shape[0] if self._shape else 0
        if isinstance(first, slice) and first.step in (None, 1) and self._shape:
            start, stop, _ = first.indices(rows)
            tensor = self._rows(start, max(start, stop))
            return tensor[(slice(None), *rest)].contiguous() if rest else tensor
        if isinstance(first, int) and not isinstance(first, bool) and self._shape:
            if not -rows <= first < rows:
                raise IndexError(f"index {first} is out of bounds for dimension 0 with size {rows}")
            return self._rows(first % rows, first % rows + 1)[(0, *rest)].contiguous()
        tensor = self._file._read(self._entry.start, self._entry.end, self._dtype, self._shape)
        return tensor if index is Ellipsis or index == () else tensor[index].contiguous()

    def _rows(self, start: int, stop: int) -> torch.Tensor:
        size = (self._entry.end - self._entry.start) // max(1, self._shape[0])
        begin = self._entry.start + start * size
        return self._file._read(begin, begin + (stop - start) * size, self._dtype, (stop - start, *self._shape[1:]))
