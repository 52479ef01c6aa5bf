"""Imports nvme_ops when Python starts, for ``NVME_OPS_DEEPSPEED``; and the ``sitecustomize`` that this one hides."""

import contextlib
import os
import sys

_folder = os.path.dirname(__file__)
_this = sys.modules.pop("sitecustomize")
_before = list(sys.path)
sys.path[:] = [entry for entry in _before if entry != _folder]
with contextlib.suppress(ImportError):
    import sitecustomize  # type: ignore[import-not-found,unused-ignore]  # noqa: F401
sys.path[:] = _before
sys.modules.setdefault("sitecustomize", _this)
_root = os.path.dirname(os.path.dirname(os.path.dirname(_folder)))
sys.path.append(_root)  # of a checkout that is not installed
with contextlib.suppress(ImportError):  # another Python, that a script starts
    import nvme_ops  # noqa: F401
sys.path.remove(_root)
