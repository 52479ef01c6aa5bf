"""One table of trainings: with any of their tensors on storage, on any device, they see the bits of plain torch.

A case is trained twice: as it is, and with its parameters (``swap_params``), gradients (``swap_gradients``), states
(``NvmeOptimizer``) or activations (``save_on_nvme``) on storage. What both see has to be the same: each loss, norm,
gradient and parameter of each step, and the states at the end. What moved is then within its budget, and gone.
"""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from nvme_ops.offload import NvmeOptimizer, save_on_nvme, swap_gradients, swap_params
from tests.conftest import MIB, run_python
from tests.contract.faulty import Faulty
from tests.device.kinds import SIMULATED, on_a_gpu
from tests.doubles import private_device
from tests.offload.elsewhere import alone, same
from tests.offload.training import KIB, MODELS, settled, states, take_few_in_flight

pytestmark = pytest.mark.usefixtures("one_thread", "few_in_flight")
STEPS = 3


@dataclass(frozen=True)
class Case:
    """What is trained, what of it is on storage, and how.

    Args:
        moves: any of ``params``, ``gradients``, ``states``, ``activations``, ``auto`` (with that policy).
        how: any of ``autocast``, ``scaled``, ``clipped``, ``accumulated``, ``checkpointed``, ``reentrant``,
            ``compiled``, ``slow``, ``checksums``, ``overlap``, ``free``, and on an accelerator ``hosted`` (all that
            has no room there has some in host memory) or ``halved`` (some of it has).
        budget: of parameters and activations.
    """

    moves: str
    model: str = "sentences"
    how: str = ""
    budget: int = 80 * KIB
    dtype: torch.dtype = torch.float32
    optimizer: str = "AdamW"
    options: dict[str, Any] = field(default_factory=dict)
    steps: int = STEPS

    def __str__(self) -> str:
        words = [self.moves, self.model, self.how, str(self.budget), str(self.dtype)[6:], self.optimizer, *self.options]
        return "-".join(word.replace(" ", "+") for word in words if word)


class Training:
    """A case that is trained, with what is on storage as ``moves`` says."""

    def __init__(self, case: Case, device: torch.device, folder: Path, moves: str) -> None:
        self.case, self.device, self.folder = case, device, folder
        self.moves, self.how = moves.split(), case.how.split()
        self.seen: list[Any] = []
        self.figures: dict[str, Any] = {}
        self.ends = contextlib.ExitStack()
        self.given = MODELS[case.model]
        self.model: Any = self.given.make().to(device, case.dtype)
        common: dict[str, Any] = {
            "checksums": "checksums" in self.how,
            "handle": Faulty("write", "slow", seconds=0.015) if "slow" in self.how else None,
        }
        size = "64M" if "hosted" in self.how else 144 * KIB if "halved" in self.how else 0
        host: dict[str, Any] = {} if device.type == "cpu" else {"host_budget": size}
        large = {**common, **host, "min_bytes": 4 * KIB}
        if "params" in self.moves:
            made: Any = swap_params(self.model, folder, memory_budget=case.budget, **large)
            self.figures["params"] = self.ends.enter_context(made)
        if "gradients" in self.moves:
            made = swap_gradients(self.model.parameters(), folder, memory_budget=100 * KIB, **large)
            self.figures["gradients"] = self.ends.enter_context(made)
        self.optimizer = self._optimizer(common)
        self.saving: Any = contextlib.nullcontext()
        if saved := [move for move in self.moves if move in ("activations", "auto")]:
            policy: Any = "auto" if saved == ["auto"] else "nvme"
            self.budget = 0 if "params" in self.moves else case.budget
            self.saving = save_on_nvme(folder, min_bytes=1, memory_budget=self.budget, policy=policy, **host, **common)
            self.figures["activations"] = self.saving
        self.forward: Any = torch.compile(self.model, backend="aot_eager") if "compiled" in self.how else self._forward
        self.scaler = torch.amp.GradScaler(device.type, init_scale=1024.0, enabled="scaled" in self.how)

    def _optimizer(self, common: dict[str, Any]) -> Any:
        kind, options = getattr(torch.optim, self.case.optimizer), {"foreach": False, **self.case.options}
        if "fused" in options:
            del options["foreach"]
        if "states" not in self.moves:
            made = kind(self.model.parameters(), **options)
            if "free" in self.how:
                made.register_step_post_hook(lambda optimizer, *_: optimizer.zero_grad())
            return made
        ours: dict[str, Any] = {"overlap": "backward" if "overlap" in self.how else None, "memory_budget": "1M"}
        ours |= {"free_gradients": "free" in self.how, "master_weights": False, **common}
        made = NvmeOptimizer(self.model.parameters(), kind, self.folder, **ours, **options)
        self.figures["states"] = self.ends.enter_context(made)
        return made

    def _forward(self, x: torch.Tensor) -> torch.Tensor:
        """Layer by layer, so that each can be computed again."""
        if not {"checkpointed", "reentrant"} & {*self.how}:
            return torch.as_tensor(self.model(x))
        for number, layer in enumerate(self.model):
            again = partial(checkpoint, layer, use_reentrant="reentrant" in self.how)
            x = again(x) if number else layer(x)
        return x

    def loss(self, number: int) -> torch.Tensor:
        """Computes one."""
        torch.manual_seed(number)  # of dropout
        x = self.given.batch(number).to(self.device)
        x = x if self.given.of_words else x.to(self.case.dtype)
        with self.saving, torch.autocast(self.device.type, torch.bfloat16, enabled="autocast" in self.how):
            return self.forward(x).float().square().mean()

    def see(self, *values: Any) -> None:
        """Notes what is seen."""
        self.seen += [value.detach().clone() if isinstance(value, torch.Tensor) else value for value in values]

    def step(self, number: int) -> None:
        """Takes a step, and looks at all of it."""
        self.optimizer.zero_grad()
        if "accumulated" in self.how:
            more = self.optimizer.accumulate() if "states" in self.moves else contextlib.nullcontext()
            with more:
                self.loss(number + 100).backward()
        loss = self.loss(number) * (math.inf if "scaled" in self.how and number == 1 else 1.0)
        self.scaler.scale(loss).backward()
        if "clipped" in self.how:
            self.scaler.unscale_(self.optimizer)
            if "gradients" in self.moves:
                self.see(self.figures["gradients"].clip_grad_norm_(0.1))
            else:
                self.see(torch.nn.utils.clip_grad_norm_(self.model.parameters(), 0.1, foreach=False))
        if "overlap" not in self.how:
            self.see(*(param.grad for param in self.model.parameters()))
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.see(loss, self.scaler.get_scale(), *self.model.parameters())
        if "free" in self.how:
            self.see(*(param.grad for param in self.model.parameters()))

    def run(self) -> list[Any]:
        """Returns all that was seen, once what moved is gone."""
        with self.ends:
            for number in range(self.case.steps):
                self.step(number)
            for state in states(self.optimizer):
                self.see(state.cpu() if isinstance(state, torch.Tensor) else state)  # ours are there
            self.check()
        return self.seen

    def check(self) -> None:
        """Fails unless what was to be on storage was there, within its budget."""
        limits = {"params": self.case.budget, "gradients": 75 * KIB, "states": MIB}  # of gradients, a quarter leaves
        for name in self.figures.keys() - {"activations"}:
            stats = self.figures[name].stats()
            assert 0 < stats.peak_bytes <= limits[name]
            if self.case.budget <= MIB and len(states(self.optimizer)) > 1:
                assert stats.bytes_written + stats.bytes_to_host > 0
            if name != "states" and self.case.budget <= MIB:
                assert (stats.bytes_written == 0) == ("hosted" in self.how)
                assert (stats.bytes_from_host > 0) == bool({"hosted", "halved"} & {*self.how})
        if "states" in self.figures:
            assert self.optimizer.steps == self.case.steps - ("scaled" in self.how)
            assert 0 < self.optimizer.stats().seconds_waited <= self.optimizer.stats().seconds
        if "activations" in self.figures:
            stats = settled(self.saving)
            assert stats.bytes_saved > 0
            assert stats.bytes_stored == 0, "nothing is left once the graphs are gone"
            assert (stats.bytes_written + stats.bytes_to_host > 0) == (self.budget < 64 * MIB)
            assert (stats.bytes_to_host > 0) == bool({"hosted", "halved"} & {*self.how})
            self.saving.close()


def require_parity(case: Case, device: torch.device, folder: Path) -> None:
    """Fails where a training sees something else with its tensors on storage, or leaves something there."""
    wanted = Training(case, device, folder, "").run()
    actual = Training(case, device, folder, case.moves).run()
    for place, (one, other) in enumerate(zip(actual, wanted, strict=True)):
        assert same(one, other) == "", f"{case}: {place} of {len(wanted)} differs"
    assert list(folder.iterdir()) == []


OPTIMIZERS: list[tuple[str, dict[str, Any]]] = [  # the others: random_optimizers.py
    ("RAdam", {}), ("Adam", {"maximize": True}), ("AdamW", {"fused": True}), ("AdamW", {"foreach": True}),
    ("SGD", {"momentum": 0.9, "nesterov": True}), ("SGD", {"fused": True, "momentum": 0.5}),
    ("AdamW", {"lr": torch.tensor(0.01)}),
]  # fmt: skip
LOW = torch.bfloat16
CASES = [
    *(Case("states", "network", optimizer=name, options=options, steps=7 if name == "RAdam" else STEPS)
      for name, options in OPTIMIZERS),
    Case("states", "network", dtype=LOW),
    Case("states", "network", "overlap free slow"),
    Case("states", "network", "overlap accumulated"),
    Case("states", "network", "clipped scaled checksums"),
    Case("params"), Case("params", budget=200 * KIB, dtype=LOW), Case("params", budget=4 * MIB),
    *(Case("params states", "odd", budget=budget, optimizer="SGD", options={"lr": 0.001, "momentum": 0.9})
      for budget in (256 * KIB, 4 * MIB)),
    Case("params states", dtype=LOW), Case("params states", how="overlap free"),
    Case("params states", how="overlap slow", steps=2),
    *(Case("params", how=how, optimizer="SGD", options={"lr": 0.1})
      for how in ("checkpointed", "autocast", "checksums")),
    Case("gradients states", how="accumulated clipped", dtype=LOW),
    Case("params gradients states", how="accumulated clipped"),
    Case("gradients states", how="scaled clipped"),
    Case("gradients", how="checkpointed slow", steps=2),
    *(Case(moves, model, budget=0) for moves in ("activations", "auto") for model in ("perceptron", "attention")),
    Case("activations", "attention", budget=200 * KIB),
    Case("auto", "attention", budget=64 * MIB),
    *(Case("activations", "perceptron", how, 0) for how in ("reentrant", "autocast", "checksums")),
    *(Case("auto", "perceptron", how, 0) for how in ("checkpointed", "autocast", "compiled")),
    *(Case("auto", model, "slow", 0, steps=4) for model in ("perceptron", "attention")),
    Case("params activations", "perceptron", budget=160 * KIB), Case("states activations", "perceptron", "free"),
    *(Case(f"params gradients states {saved}", how="accumulated clipped scaled autocast checksums", dtype=torch.float32)
      for saved in ("activations", "auto")),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_bits_are_those_of_torch(case: Case, folder: Path) -> None:
    require_parity(case, torch.device("cpu"), folder)


SMALL = 160 * KIB
ON_DEVICE = [
    *(Case("states", "perceptron", dtype=dtype, options=options)
      for dtype, options in ((torch.float32, {}), (LOW, {"foreach": True}), (LOW, {"fused": True}))),
    Case("states", "perceptron", "overlap free"), Case("states", "perceptron", "clipped", optimizer="SGD"),
    Case("params", "sentences"), Case("params", "perceptron", budget=4 * MIB),
    Case("gradients states", "perceptron", "accumulated clipped"),
    Case("params gradients states", "perceptron", budget=SMALL, dtype=LOW),
    Case("activations", "perceptron", budget=64 * MIB),
    *(Case(moves, "attention", how, 0) for moves in ("activations", "auto") for how in ("", "hosted")),
    Case("activations", "perceptron", "checkpointed", 0), Case("activations", "perceptron", "hosted", 40 * KIB),
    *(Case("params gradients states activations", "perceptron", how, SMALL) for how in ("", "hosted", "halved")),
    *(Case("params states", "sentences", how) for how in ("hosted", "halved")),
    Case("gradients states", "perceptron", "accumulated clipped scaled halved"),
    Case("params gradients states", "perceptron", "clipped hosted", dtype=LOW),
]  # fmt: skip


@pytest.mark.timeout(600)  # it may have to be compiled
@SIMULATED
@pytest.mark.parametrize("seeds", [1, pytest.param(100, marks=[pytest.mark.nightly, pytest.mark.timeout(3600)])])
@alone
def test_the_bits_are_those_of_torch_on_a_device_made_of_host_memory(folder: Path, seeds: int) -> None:
    """What is not waited for there shows as other bits. Autograd knows the devices that are there when it begins."""
    simulated = private_device()
    take_few_in_flight(setattr)  # else backward may begin before any write has ended, and call all of them off
    torch.set_num_threads(1)
    for number, case in enumerate(ON_DEVICE):
        if "fused" not in case.options:
            for seed in (0, *range(1 + number, 1 + seeds * len(ON_DEVICE), len(ON_DEVICE))):
                with simulated.left_as_found(), simulated.computing(), simulated.in_random_order(seed):
                    require_parity(case, simulated.device(), folder)


@pytest.mark.parametrize("case", ON_DEVICE, ids=str)
@pytest.mark.parametrize("device", [pytest.param("cuda", marks=on_a_gpu)])
def test_the_bits_are_those_of_torch_on_a_gpu(case: Case, device: str, folder: Path) -> None:
    require_parity(case, torch.device(device), folder)


# Random programs compute the same, or are refused in a sentence

PROGRAM = """
    import sys
    from tests.offload.random_programs import CAPABILITIES, run_many
    count, folder = int(sys.argv[1]), sys.argv[2]
    for capability in CAPABILITIES:
        # of what streams, the last bits of what torch folds differ: see StoredTensor.__torch_function__
        without = ["folded"] if capability == "stream_weights" else []
        failures, equal = run_many(capability, range(count), folder, without)
        assert not failures, "\\n".join(failures[:3])
        assert equal > 10 * count, f"the programs of {capability} are trivial: {equal}"
"""


@pytest.mark.parametrize("count", [10, pytest.param(100, marks=pytest.mark.nightly)])
def test_equal_or_refused(folder: Path, count: int) -> None:
    run_python(PROGRAM, count, folder)
