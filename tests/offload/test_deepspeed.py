"""DeepSpeed itself, from PyPI, with the ops of this package."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from nvme_ops import aio_handle
from nvme_ops.integrations import deepspeed as integration
from tests.conftest import REPOSITORY, run_python


def test_without_deepspeed_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    with pytest.raises(ModuleNotFoundError, match="deepspeed"):
        integration.install()


def test_the_variable_asks_for_it_at_import() -> None:
    run_python(
        """
        import importlib, os, sys
        sys.modules["deepspeed"] = None
        for value, works in (("0", True), ("", True), ("1", False)):
            os.environ["NVME_OPS_DEEPSPEED"] = value
            for name in [name for name in sys.modules if name.split(".")[0] == "nvme_ops"]:
                del sys.modules[name]
            try:
                importlib.import_module("nvme_ops")
            except ModuleNotFoundError:
                assert not works
            else:
                assert works, value
        """,
        fresh=True,
    )


@pytest.fixture
def builders() -> Any:
    pytest.importorskip("deepspeed")
    import deepspeed.ops.op_builder as found  # type: ignore[import-not-found,import-untyped,unused-ignore]

    yield found
    integration.uninstall()


def test_its_builders_load_our_ops_until_it_is_uninstalled(builders: Any) -> None:
    before = dict(builders.AsyncIOBuilder.__dict__)
    integration.install()
    integration.install()
    assert builders.AsyncIOBuilder().load().aio_handle is aio_handle
    assert builders.AsyncIOBuilder().is_compatible()
    integration.uninstall()
    integration.uninstall()
    assert dict(builders.AsyncIOBuilder.__dict__) == before


def test_an_unknown_release_is_refused(builders: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    before = dict(builders.AsyncIOBuilder.__dict__)
    monkeypatch.setattr("deepspeed.__version__", "1.0.0")
    with pytest.raises(RuntimeError, match=r"DeepSpeed 1\.0\.0 is not known here: 0\.14 up to before 0\.20 is"):
        integration.install()
    assert dict(builders.AsyncIOBuilder.__dict__) == before


def losses(what: str, place: Path) -> list[float]:
    result = subprocess.run(
        [sys.executable, "-m", "tests.offload.deepspeed_training", what, str(place)],
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), "NVME_OPS_DEEPSPEED": "1"},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-5000:]
    found: list[float] = json.loads(result.stdout.rpartition("losses ")[2])
    return found


@pytest.mark.slow
@pytest.mark.usefixtures("builders")
@pytest.mark.parametrize("what", ["optimizer", "parameters", "optimizer and parameters"])
def test_training_with_its_states_on_nvme_has_the_losses_of_memory(folder: Path, what: str) -> None:
    assert losses(what, folder) == losses("nothing", folder)
