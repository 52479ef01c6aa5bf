"""``from_pretrained`` and ``save_pretrained`` of transformers through nvme_ops.

    from nvme_ops.integrations import transformers as fast_transformers

    fast_transformers.install()
    model = AutoModel.from_pretrained("folder")
    model.save_pretrained("other")
    fast_transformers.uninstall()

What is loaded and saved is the same, by the same calls; only safetensors files are concerned.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping
from typing import Any

import torch

from nvme_ops.checkpoint.api import save
from nvme_ops.checkpoint.safe_open import safe_open

_MODULE = "transformers.modeling_utils"
_before: dict[str, Any] = {}


def _save_file(
    tensors: Mapping[str, torch.Tensor], filename: str | os.PathLike[str], metadata: Mapping[str, str] | None = None
) -> None:
    """Stands in the place of ``safetensors.torch.save_file``."""
    save(tensors, filename, format="safetensors", metadata=metadata)


_OURS = {"safe_open": safe_open, "safe_save_file": _save_file}


def install() -> None:
    """Makes transformers save and load through nvme_ops from here on. Once or more.

    Raises:
        ModuleNotFoundError: transformers is not installed.
        RuntimeError: a version of transformers whose way to its files is not known here; nothing is changed.
    """
    version = importlib.import_module("transformers").__version__
    module = importlib.import_module(_MODULE)
    if missing := [name for name in _OURS if not hasattr(module, name)]:
        raise RuntimeError(f"transformers {version} has no {_MODULE}.{missing[0]}: not known here")
    for name, ours in _OURS.items():
        if getattr(module, name) is not ours:
            _before[name] = getattr(module, name)
            setattr(module, name, ours)


def uninstall() -> None:
    """As before ``install``. Once or more; what somebody else has put in the place since stays."""
    module = importlib.import_module(_MODULE)
    for name, ours in _OURS.items():
        if getattr(module, name) is ours:
            setattr(module, name, _before.pop(name))
