"""DeepSpeed itself, from PyPI, with the ops of this package."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from nvme_ops import aio_handle
from nvme_ops.integrations import deepspeed as integration
from tests.conftest import run_python
from tests.launch import run_module


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
    said = run_module("tests.offload.deepspeed_training", what, place, NVME_OPS_DEEPSPEED="1")
    found: list[float] = json.loads(said.rpartition("losses ")[2])
    return found


@pytest.mark.slow
@pytest.mark.usefixtures("builders")
@pytest.mark.parametrize("what", ["optimizer", "parameters", "optimizer and parameters"])
def test_training_with_its_states_on_nvme_has_the_losses_of_memory(folder: Path, what: str) -> None:
    assert losses(what, folder) == losses("nothing", folder)


@pytest.mark.slow
@pytest.mark.usefixtures("builders")
def test_fast_file_writer_writes_what_torch_loads(folder: Path) -> None:
    run_python(
        """
        import os, sys, torch
        os.environ["DS_ACCELERATOR"] = "cpu"
        import nvme_ops
        from deepspeed.io import FastFileWriter, FastFileWriterConfig, fast_file_writer

        class Utils:  # DeepSpeed has its op of helpers for accelerators alone
            load = lambda self: self
            cast_to_byte_tensor = staticmethod(lambda tensors: [each.view(torch.uint8) for each in tensors])

        fast_file_writer.UtilsBuilder = Utils
        from deepspeed.ops.op_builder import AsyncIOBuilder
        Handle = AsyncIOBuilder().load().aio_handle
        assert Handle is nvme_ops.aio_handle
        handle = Handle(1 << 20, 16, False, True, 1)
        memory = handle.new_cpu_locked_tensor(8 << 20, torch.empty(0, dtype=torch.uint8))
        for double in (False, True):
            path = f"{sys.argv[1]}/{double}.pt"
            state = {"a": torch.randn(3_000_001), "b": [torch.arange(10), "text"]}
            writer = FastFileWriter(path, FastFileWriterConfig(handle, memory, double_buffer=double))
            torch.save(state, writer)
            writer.close()
            found = torch.load(path)
            assert torch.equal(found["a"], state["a"])
            assert torch.equal(found["b"][0], state["b"][0])
        """,
        folder,
        NVME_OPS_DEEPSPEED="1",
        fresh=True,
    )


def run_tool(*words: str) -> str:
    """Runs a program of DeepSpeed's in a folder where it takes nothing of ours for its own."""
    return run_module("nvme_ops.integrations.deepspeed", *words, folder=Path("/"), DS_ACCELERATOR="cpu")


@pytest.mark.slow
@pytest.mark.usefixtures("builders")
@pytest.mark.parametrize("direction", ["write", "read"])
def test_ds_io(folder: Path, direction: str) -> None:
    words = ["--folder", str(folder), "--io_size", "16M", "--loops", "2", "--engine", "aio_handle"]
    said = run_tool("ds_io", *words, *(["--read"] if direction == "read" else []))
    assert "E2E" in said or "GB/sec" in said, said


@pytest.mark.slow
@pytest.mark.usefixtures("builders")
def test_ds_nvme_tune(folder: Path) -> None:
    sweep = {"block_size": ["1M"], "queue_depth": [16, 32], "sequential_requests": [False], "single_submit": [False],
             "io_parallel": [1]}  # fmt: skip
    (folder / "sweep.json").write_text(json.dumps(sweep))
    (folder / "nvme").mkdir()
    said = run_tool("ds_nvme_tune", "--nvme_dir", str(folder / "nvme"), "--sweep_config", str(folder / "sweep.json"),
                    "--io_size", "16M", "--log_dir", str(folder / "logs"))  # fmt: skip
    assert '"block_size"' in said, said


@pytest.mark.usefixtures("builders")
def test_a_program_that_is_not_there() -> None:
    with pytest.raises(SystemExit, match="ds_nothing: no such program"):
        integration.main(["ds_nothing"])
