"""Everything works on every kind of file system, also those that have no fallocate."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from nvme_ops.base.native import native
from tests.conftest import MIB, in_child
from tests.contract.suite import failures, judge
from tests.contract.test_refused import PART, PARTS, write_parts

ON_A_DISK = "ext2", "ext4", "xfs", "btrfs"  # without fsync of folders, and without modes: tests/storage/test_files.py


def mount(*words: object) -> None:
    done = subprocess.run(["mount", *map(str, words)], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"cannot mount: {done.stderr.strip()}")


@contextlib.contextmanager
def mounted(kind: str, folder: Path, make_file_system: Callable[..., Path]) -> Iterator[Path]:
    """A file system of this kind."""
    if os.geteuid() != 0:
        pytest.skip("mounts need root")
    if kind in ON_A_DISK:
        yield make_file_system(1000 * MIB, kind=kind)
        return
    place, elsewhere, upper, work = (folder / name for name in ("place", "elsewhere", "upper", "work"))
    for path in (place, elsewhere, upper, work):
        path.mkdir()
    layers = f"lowerdir={elsewhere},upperdir={upper},workdir={work}"
    mount("-t", kind, *(["-o", layers] if kind == "overlay" else []), kind, place)
    try:
        yield place
    finally:
        subprocess.run(["umount", "--lazy", place], check=True)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", [*ON_A_DISK, "ramfs", "tmpfs", "overlay"])
def test_everything_works_there(kind: str, folder: Path, make_file_system: Callable[..., Path]) -> None:
    native()

    def work() -> None:
        torch.set_num_threads(1)
        wrong = [f"{name}: {judge(failure, place)}: {failure!r}" for name, failure in failures(place)]
        wrong += [f"left {path}" for path in place.rglob("*") if ".replaced-" in path.name]
        assert not wrong, "\n\n".join(wrong)

    with mounted(kind, folder, make_file_system) as place:
        for turn in range(5):
            write_parts(place / f"parts {turn}", range(PARTS))
            written = (place / f"parts {turn}").read_bytes()
            assert written == b"".join(bytes([number + 1]) * PART for number in range(PARTS))
            (place / f"parts {turn}").unlink()
        in_child(work, 280)
