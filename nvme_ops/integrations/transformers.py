"""``from_pretrained``, ``save_pretrained`` and the ``Trainer`` of transformers through nvme_ops.

    from nvme_ops.integrations import transformers as fast_transformers

    fast_transformers.install()
    model = AutoModel.from_pretrained("folder")
    model.save_pretrained("other")
    fast_transformers.uninstall()

The calls, and what they load and save, stay the same; only reading and writing safetensors files changes.

    trainer = Trainer(..., optimizer_cls_and_kwargs=fast_transformers.nvme_optimizer(
        torch.optim.AdamW, "/mnt/nvme", memory_budget="1G", lr=1e-4))
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from nvme_ops.base.patches import Patch
from nvme_ops.checkpoint.api import save
from nvme_ops.integrations.safetensors import safe_open
from nvme_ops.offload.optimizer.nvme_optimizer import NvmeOptimizer

_MODULE = "transformers.modeling_utils"


def _save_file(
    tensors: Mapping[str, torch.Tensor], filename: str | os.PathLike[str], metadata: Mapping[str, str] | None = None
) -> None:
    """Replaces ``safetensors.torch.save_file``."""
    save(tensors, filename, format="safetensors", metadata=metadata)


_OURS: dict[str, Any] = {"safe_open": safe_open, "safe_save_file": _save_file}
_installed: list[Callable[[], None]] = []  # what ``uninstall`` calls


@functools.cache
def _patches() -> list[Patch]:
    module = importlib.import_module(_MODULE)
    return [Patch(module, name, lambda _, ours=ours: ours) for name, ours in _OURS.items()]  # type: ignore[misc]


def _take() -> list[Callable[[], None]]:
    version = importlib.import_module("transformers").__version__
    module = importlib.import_module(_MODULE)
    if missing := [name for name in _OURS if not hasattr(module, name)]:
        raise RuntimeError(f"transformers {version} has no {_MODULE}.{missing[0]}: it is not supported")
    return [patch.take() for patch in _patches()]


def install() -> None:
    """Makes transformers save and load through nvme_ops from now on. Further calls do nothing.

    Raises:
        ModuleNotFoundError: transformers is not installed.
        RuntimeError: its version is not supported; nothing is changed.
    """
    if not _installed:
        _installed.extend(_take())


def uninstall() -> None:
    """Restores what ``install`` replaced, unless somebody else has replaced it since. Further calls do nothing."""
    while _installed:
        _installed.pop()()


@contextlib.contextmanager
def installed() -> Iterator[None]:
    """Does for the block what ``install`` does, whatever else is installed or uninstalled meanwhile."""
    leave = _take()
    try:
        yield
    finally:
        for undo in leave:
            undo()


def nvme_optimizer(
    optimizer: type[torch.optim.Optimizer],
    folder: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    **options: Any,
) -> tuple[type[NvmeOptimizer], dict[str, Any]]:
    """Returns the ``optimizer_cls_and_kwargs`` with which a ``Trainer`` trains by an ``NvmeOptimizer``.

    The arguments are those of ``NvmeOptimizer``; the trainer adds the parameters.
    """

    class Chosen(NvmeOptimizer):
        def __init__(self, params: Iterable[Any], **given: Any) -> None:
            super().__init__(params, optimizer, **given)

    return Chosen, {"folder": folder, **options}
