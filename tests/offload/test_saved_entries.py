"""Swapped models are saved by the usual ways: safetensors', the Hub's, transformers', accelerate's and torch's own."""

from __future__ import annotations

import errno
import filecmp
import mmap
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from nvme_ops import load, save
from nvme_ops.offload import swap_params
from tests.conftest import run_python
from tests.contract.faulty import Faulty
from tests.offload.training import KIB

safetensors: Any = pytest.importorskip("safetensors.torch")


class Odd(torch.nn.Module):
    """Has tied weights, weights that are not contiguous, small ones, and integers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.words = torch.nn.Embedding(60, 64)
        self.image = torch.nn.Conv2d(8, 8, 3)
        self.image.weight.data = self.image.weight.data.contiguous(memory_format=torch.channels_last)
        self.turned = torch.nn.Parameter(torch.randn(64, 90).t())
        self.small = torch.nn.LayerNorm(64)
        self.head = torch.nn.Linear(64, 60, bias=False)
        self.head.weight = self.words.weight
        self.register_buffer("counts", torch.arange(70))


def by_the_hub(model: Any, folder: Path) -> None:
    pytest.importorskip("huggingface_hub").save_torch_model(model, folder, max_shard_size="20KB")


def by_accelerate(model: Any, folder: Path, method: str) -> None:
    accelerator = pytest.importorskip("accelerate").Accelerator(cpu=True)
    accelerator.prepare(model)
    getattr(accelerator, method)(*([] if method == "save_state" else [model]), folder)


def converted(model: Any, folder: Path) -> None:
    state = {name: tensor.to(torch.bfloat16).contiguous() for name, tensor in model.state_dict().items()}
    safetensors.save_file(state, folder / "converted.safetensors")


WAYS: dict[str, Callable[[Any, Path], object]] = {  # save_pretrained: test_architectures.py
    "save_model": lambda model, folder: safetensors.save_model(model, folder / "model.safetensors"),
    "converted": converted,
    "torch.save": lambda model, folder: torch.save(model.state_dict(), folder / "model.pt"),
    "hub": by_the_hub,
    "accelerate, save_model": lambda model, folder: by_accelerate(model, folder, "save_model"),
    "accelerate, save_state": lambda model, folder: by_accelerate(model, folder, "save_state"),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_swapped_model_is_saved_as_one_in_memory(folder: Path, tmp_path: Path, way: str) -> None:
    """Each raised RuntimeError: the values are on storage."""
    mine, other = Odd(), Odd()
    with swap_params(mine, folder, memory_budget=100 * KIB, min_bytes=1 * KIB):
        for model, name in ((mine, "mine"), (other, "other")):
            (tmp_path / name).mkdir()
            WAYS[way](model, tmp_path / name)
    names = [sorted(path.name for path in (tmp_path / name).iterdir()) for name in ("mine", "other")]
    assert names[0] == names[1] != []
    for file in names[0]:
        assert filecmp.cmp(tmp_path / "mine" / file, tmp_path / "other" / file, shallow=False), file


def test_an_entry_of_a_state_dict_is_the_parameter_also_by_its_address(folder: Path, tmp_path: Path) -> None:
    model, file = torch.nn.Linear(64, 64, bias=False), tmp_path / "model.safetensors"
    with swap_params(model, folder, memory_budget=100 * KIB, min_bytes=1), torch.no_grad():
        weight: Any = model.weight
        assert model.state_dict(keep_vars=True)["weight"] is weight
        state = model.state_dict()
        entry = state["weight"]
        for number in (1.0, 2.0):
            weight.fill_(number)
            assert entry.data_ptr() == entry.data_ptr() == model.state_dict()["weight"].data_ptr()
            assert entry[1].data_ptr() == entry.data_ptr() + 64 * 4
            safetensors.save_file(state, file)
            assert torch.equal(load(file)["weight"], torch.full((64, 64), number))
        version = weight._version
        entry[1].fill_(3)
        assert weight._version == version + 1
        assert weight[:3, 0].tolist() == [2, 3, 2]
        save(state, file)
        assert load(file)["weight"][1, 0] == 3
        weight.data = torch.zeros(64, 64)
        assert entry.sum().item() == 64 * 64 * 2 + 64, "as in memory, where it has the old memory"
        with pytest.raises(RuntimeError, match="has no memory of its own"):
            weight.data_ptr()
        with pytest.raises(RuntimeError, match="has no memory of its own"):
            weight.detach().data_ptr()


def test_saving_takes_no_memory_for_the_model(folder: Path) -> None:
    """96 MiB of parameters, and room for 40 in memory that is not a file's."""
    program = """
        import resource, sys
        import safetensors.torch, torch
        from nvme_ops.offload import swap_params

        with torch.device("meta"):
            model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024, bias=False) for _ in range(24)))
        with swap_params(model, sys.argv[1], memory_budget="8M"):
            safetensors.torch.save_model(torch.nn.Linear(9, 9), sys.argv[1] + "/small.safetensors")
            used = int(open("/proc/self/status").read().split("VmData:")[1].split()[0]) << 10
            resource.setrlimit(resource.RLIMIT_DATA, (used + (40 << 20), resource.RLIM_INFINITY))
            safetensors.torch.save_model(model, sys.argv[1] + "/model.safetensors")
            torch.save(model.state_dict(), sys.argv[1] + "/model.pt")
            turned = {name: each.t().contiguous() for name, each in model.state_dict().items()}
            safetensors.torch.save_file(turned, sys.argv[1] + "/turned.safetensors")
    """
    run_python(program, folder, OMP_NUM_THREADS="1")
    assert torch.equal(
        load(folder / "model.safetensors")["3.weight"].t(), load(folder / "turned.safetensors")["3.weight"]
    )
    assert (folder / "model.pt").stat().st_size > 96 << 20


def test_a_copy_that_fails_to_be_written_is_an_error_of_the_save(folder: Path, tmp_path: Path) -> None:
    model, handle = torch.nn.Linear(64, 64), Faulty()
    before = model.weight.detach().clone()
    with swap_params(model, folder, memory_budget=100 * KIB, min_bytes=1 * KIB, handle=handle):
        handle.will("write", "fail")
        with pytest.raises(OSError, match="Input/output error"):
            safetensors.save_model(model, tmp_path / "model.safetensors")
        handle.will()
        safetensors.save_model(model, tmp_path / "model.safetensors")
        assert torch.equal(load(tmp_path / "model.safetensors")["weight"], before)


def test_a_mount_without_shared_mappings_is_enough(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def private_only(fd: int, length: int, **options: Any) -> Any:
        if not options:
            raise OSError(errno.ENODEV, os.strerror(errno.ENODEV))
        return shared(fd, length, **options)

    model, shared = torch.nn.Linear(64, 64), mmap.mmap
    with swap_params(model, folder, memory_budget=100 * KIB, min_bytes=1 * KIB), monkeypatch.context() as patch:
        patch.setattr("mmap.mmap", private_only)
        safetensors.save_model(model, tmp_path / "model.safetensors")
        assert torch.equal(load(tmp_path / "model.safetensors")["weight"], model.weight + 0)
