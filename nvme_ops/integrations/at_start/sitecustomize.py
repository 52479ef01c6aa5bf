"""Imports nvme_ops when Python starts, for ``NVME_OPS_DEEPSPEED``, and the ``sitecustomize`` that this file hides."""

import contextlib
import os
import sys


def start() -> None:
    """Imports both; Python has imported this file as ``sitecustomize``."""
    folder = os.path.dirname(__file__)
    this, place = sys.modules.pop("sitecustomize"), sys.path.index(folder)
    sys.path[:] = [entry for entry in sys.path if entry != folder]
    with contextlib.suppress(ImportError):
        import sitecustomize  # type: ignore[import-not-found,unused-ignore]  # noqa: F401
    sys.path.insert(place, folder)  # for programs that give it to others; what the other file has added stays
    sys.modules.setdefault("sitecustomize", this)
    root = os.path.dirname(os.path.dirname(os.path.dirname(folder)))
    added = [] if root in sys.path else [root]  # for a checkout that is not installed
    sys.path += added
    with contextlib.suppress(ImportError):  # in another Python, which a script may start
        import nvme_ops  # noqa: F401
    for entry in added:
        sys.path.remove(entry)


if __name__ == "sitecustomize":
    start()
