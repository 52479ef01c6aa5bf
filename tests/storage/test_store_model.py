"""``TensorStore`` against a dict: any calls in any order, the next session, a kill, and a power failure."""

from __future__ import annotations

import os
import shutil
import tempfile
from contextlib import ExitStack, nullcontext
from pathlib import Path
from unittest import mock

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from nvme_ops.base.settings import PAGE
from nvme_ops.storage import Session, TensorStore, journal, striped
from nvme_ops.storage.slab import Slab
from nvme_ops.storage.store import StoreFuture
from tests.conftest import KIB, MEMORY, pattern
from tests.storage.conftest import same

KEYS = st.sampled_from(["a", "b", "ä\n\ud800"])
SIZES = st.sampled_from([0, 8, 5000, 5000, PAGE, 40 * KIB, 100_000])


class Model(RuleBasedStateMachine):
    """A store in two folders that are not kept, with slabs, stripes and journals so small that much happens."""

    kept = False

    def __init__(self) -> None:
        super().__init__()
        self.small = ExitStack()
        self.small.enter_context(mock.patch.object(striped, "STRIPE", 16 * KIB))
        self.small.enter_context(mock.patch.object(journal, "_LINES", 3))
        self.small.enter_context(mock.patch.object(Slab.__init__, "__defaults__", (64 * KIB,)))
        self.top = Path(tempfile.mkdtemp(dir=MEMORY))
        self.values: dict[str, torch.Tensor] = {}
        self.durable: dict[str, torch.Tensor] = {}  # as of the last sync
        self.reads: list[tuple[StoreFuture, torch.Tensor]] = []
        self.open(self.top)

    def session(self, top: Path) -> Session:
        for name in "ab":
            (top / name).mkdir(exist_ok=True)
        return Session([top / "a", top / "b"], name="job", reuse=self.kept)

    def open(self, top: Path) -> None:
        self.opened = self.session(top)
        self.store = TensorStore(self.opened, checksums=True, weights=[1, 2])

    def teardown(self) -> None:
        self.end_reads()
        self.opened.close()
        if not self.kept:
            assert [*self.top.glob("*/.*")] == [], "leftovers"
        shutil.rmtree(self.top)
        self.small.close()

    @rule(
        key=KEYS, nbytes=SIZES, seed=st.integers(0, 9), turned=st.booleans(), atomic=st.booleans(), asked=st.booleans()
    )
    def put(self, key: str, nbytes: int, seed: int, turned: bool, atomic: bool, asked: bool) -> None:
        value = pattern(nbytes, seed).view(-1, 4)
        value = value.t() if turned else value
        future = self.store.put(key, value, atomic=atomic)
        if asked:
            assert future.result() == nbytes
        self.values.pop(key, None)
        self.values[key] = value

    @rule(key=KEYS, into=st.sampled_from([None, "plain", "turned"]))
    def get(self, key: str, into: str | None) -> None:
        value = self.values.get(key)
        if value is None:
            with pytest.raises(KeyError):
                self.store.get(key)
            return
        plain = torch.zeros_like(value, memory_format=torch.contiguous_format)
        out = {"plain": plain, "turned": plain.t().contiguous().t()}.get(into or "")
        self.reads.append((self.store.get(key, out), value))

    @rule()
    def end_reads(self) -> None:
        """What was read is what was there then, whatever was put since."""
        reads, self.reads = self.reads, []
        for future, value in reads:
            assert future.result() == value.nbytes
            assert same(future.tensor, value)

    @rule(key=KEYS)
    def drop(self, key: str) -> None:
        with nullcontext() if key in self.values else pytest.raises(KeyError):
            self.store.drop(key)
        self.values.pop(key, None)

    @rule()
    def sync_and_trim(self) -> None:
        self.end_reads()
        self.store.sync()
        self.durable = dict(self.values)
        in_use = sum(-(-value.nbytes // PAGE) * PAGE for value in self.values.values())
        assert self.store.bytes_in_use == in_use
        self.store.trim()
        slabs = [os.stat(self.opened.path(number, "slab")) for number in range(2)]
        assert sum(slab.st_blocks * 512 for slab in slabs) <= in_use + 64 * KIB

    @invariant()
    def the_keys_are_those_of_the_dict(self) -> None:
        assert sorted(self.store) == sorted(self.values)
        assert len(self.store) == len(self.values)
        assert all(key in self.store for key in self.values)

    def has(self, top: Path, expected: dict[str, torch.Tensor]) -> None:
        with self.session(top) as session, TensorStore(session, weights=[1, 2]) as store:
            assert sorted(store.keys()) == sorted(expected)
            for key, value in expected.items():
                future = store.get(key)
                future.result()
                assert same(future.tensor, value)
                assert future.tensor.stride() == value.stride() or not value.nbytes
                store.drop(key)
            store.sync()
            assert store.bytes_in_use == 0


class KeptModel(Model):
    """A store that is kept."""

    kept = True

    @rule()
    def reopen(self) -> None:
        self.end_reads()
        self.store.wait()
        self.opened.close()
        self.open(self.top)
        self.durable = dict(self.values)

    @precondition(lambda self: self.values or self.durable)
    @rule(power=st.booleans())
    def end_at_once(self, power: bool) -> None:
        """The files as they are now are what a kill leaves. After a power failure only what was synced counts."""
        self.store.wait()
        with tempfile.TemporaryDirectory(dir=self.top) as place:
            for name in "ab":
                shutil.copytree(self.top / name, Path(place, name))
            with mock.patch("nvme_ops.storage.journal.boot_id", return_value="another") if power else mock.MagicMock():
                self.has(Path(place), self.durable if power else self.values)


TestModel = Model.TestCase
TestKeptModel = KeptModel.TestCase
TestModel.settings = TestKeptModel.settings = settings(max_examples=12, stateful_step_count=30, deadline=None)
