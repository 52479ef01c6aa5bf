"""How each behaves as an object: its end, what it holds, and where it may lie."""

from __future__ import annotations

import gc
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.contract.adapters import Capability, once
from tests.contract.suite import files, require_no_more, settled

Make = Callable[..., Capability]


MAKES_A_MODEL = {"Activations", "Experts", "Gradients", "Pretrained", "Streamed", "StreamedOn", "SwappedAnew"}


def test_torch_s_default_device_does_not_matter(one: Capability) -> None:
    if type(one).__name__ in MAKES_A_MODEL:
        pytest.skip("the model that it makes would be on that device")
    with torch.device("meta"):
        one.work()
    one.check()


# Its end


def test_an_exception_in_its_block_comes_through_and_closed_it_is_closed(one: Capability) -> None:
    opened = one.opened()
    if opened is None:
        pytest.skip("ends by itself")
    if hasattr(opened, "__enter__"):
        with pytest.raises(RuntimeError, match="of the program"), opened:
            raise RuntimeError("of the program")
    for _ in range(2):
        opened.close()
    if type(one).__name__ in ("Swapped", "Gradients"):
        pytest.skip("its parameters and gradients are in memory again")
    with pytest.raises((ValueError, RuntimeError), match="closed"):
        one.do(one.version + 1)


@pytest.mark.filterwarnings("ignore")
def test_dropped_it_gives_back_what_it_had(kind: type[Capability], folder: Path) -> None:
    if kind.__name__ == "Gradients":
        pytest.skip("parameters have what swaps their gradients until it is closed")
    once(kind, folder / "first")
    before, left = settled(), files(folder / "first")
    (folder / "dropped").mkdir()
    one = kind(folder / "dropped")
    one.work()
    del one
    gc.collect()
    require_no_more(before)
    assert files(folder / "dropped") <= left + kind.more_files


def test_nothing_is_held_by_more_of_it(one: Capability) -> None:
    one.work()
    before, left = settled(), files(one.folder)
    for _ in range(3):
        one.work()
    require_no_more(before, threads=2)
    assert files(one.folder) <= left + one.more_files


def test_behind_a_link_of_an_unusual_name_without_direct_io(kind: type[Capability], tmp_path: Path) -> None:
    link = tmp_path / ("-a b'\"%s{}\n漢字" + os.fsdecode(b"\xff") + "a" * 100)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as shared:
        link.symlink_to(shared)
        once(kind, link)
        assert link.is_symlink()
