"""Who this process is among others, and folder names that say so."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from torch.testing._internal.distributed.fake_pg import FakeStore

from nvme_ops.base import ranks
from nvme_ops.base.ranks import Rank
from nvme_ops.storage import Session

HOST = os.uname().nodename


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)


def test_a_name_says_what_the_launcher_has_told(monkeypatch: pytest.MonkeyPatch) -> None:
    template, rest = Path("/{rank}/{local_rank}/{hostname}/{other}/{}"), f"{HOST}/{{other}}/{{}}"
    for rank, size, local in (("", "", ""), ("5", "8", "1")):
        for name, value in (("RANK", rank), ("WORLD_SIZE", size), ("LOCAL_RANK", local)):
            monkeypatch.setenv(name, value)
        assert ranks.expanded(template) == f"/{rank or 0}/{local or 0}/{rest}"
        assert ranks.distributed() is None
        assert ranks.started() == Rank(int(rank or 0), int(size or 1))
    monkeypatch.setenv("RANK", "first")
    assert ranks.expanded("/mnt/nvme") == "/mnt/nvme"
    with pytest.raises(ValueError, match="RANK='first'"):
        ranks.expanded("/mnt/{rank}")


def test_torch_distributed_knows_better_than_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "7")
    torch.distributed.init_process_group("fake", rank=2, world_size=3, store=FakeStore())
    try:
        assert ranks.distributed() == Rank(2, 3)
        assert ranks.expanded("/mnt/{rank}") == "/mnt/2"
        with pytest.raises(ValueError, match=r"LOCAL_RANK is not set, and this is rank 2 of 3"):
            ranks.expanded("/mnt/{local_rank}")
    finally:
        torch.distributed.destroy_process_group()


def test_the_folders_of_a_session_are_those_of_its_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "3")
    with Session([tmp_path / "{local_rank}", f"{tmp_path}/also-{{hostname}}"], name="") as session:
        places = [os.path.basename(os.path.dirname(path)) for path in session.folders]
        assert places == ["3", f"also-{HOST}"]
