"""Imports nvme_ops when Python starts, for ``NVME_OPS_DEEPSPEED``, and the ``sitecustomize`` that this file hides."""

import contextlib
import os
import sys


def start() -> None:
    """Imports both; Python has imported this file as ``sitecustomize``."""
    folder = os.path.dirname(__file__)
    this, before = sys.modules.pop("sitecustomize"), list(sys.path)
    sys.path[:] = [entry for entry in before if entry != folder]
    with contextlib.suppress(ImportError):
        import sitecustomize  # type: ignore[import-not-found,unused-ignore]  # noqa: F401
    sys.path[:] = before
    sys.modules.setdefault("sitecustomize", this)
    root = os.path.dirname(os.path.dirname(os.path.dirname(folder)))
    sys.path.append(root)  # for a checkout that is not installed
    with contextlib.suppress(ImportError):  # in another Python, which a script may start
        import nvme_ops  # noqa: F401
    sys.path.remove(root)


if __name__ == "sitecustomize":
    start()
