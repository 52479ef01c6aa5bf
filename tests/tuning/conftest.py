"""What the tests of adaptive and tuned handles share: nothing is known at first."""

from __future__ import annotations

from pathlib import Path

import pytest

from nvme_ops.io.tuning import adaptive
from nvme_ops.op_builder.trust import default_root

OPS = str(default_root().parent)  # with another cache folder the op would be compiled anew


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Nothing is known at first."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", OPS)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv(adaptive.MODE, raising=False)
    adaptive.forget()
    return tmp_path / "cache" / "nvme_ops" / "tune"
