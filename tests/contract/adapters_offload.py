"""Adapters for stores, weights, gradients, states, activations and caches on storage."""

from __future__ import annotations

import contextlib
import copy
import threading
from typing import Any
from unittest import mock

import torch

from nvme_ops.formats.quantizing import quantize
from nvme_ops.offload import (
    Memory,
    NvmeCache,
    NvmeOptimizer,
    from_pretrained,
    save_on_nvme,
    stream_weights,
    swap_gradients,
    swap_params,
)
from nvme_ops.offload.optimizer import states as optimizer_states
from nvme_ops.storage import Session, TensorStore
from tests.contract.adapters import Capability, require, same, tensors
from tests.offload.models import WIDTH as MIXED
from tests.offload.models import mixture

WIDTH = 290  # a layer has 340 KB, and no whole number of pages
_SEED = threading.Lock()


def model(layers: int = 4) -> torch.nn.Sequential:
    with _SEED:
        torch.manual_seed(1)
        return torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(layers)))


def batch(version: int) -> torch.Tensor:
    return torch.rand(64, WIDTH, generator=torch.Generator().manual_seed(version), device="cpu")


def gradients(made: torch.nn.Module, version: int) -> list[torch.Tensor]:
    made.zero_grad()
    made(batch(version)).square().sum().backward()
    return [param.grad.clone() for param in made.parameters() if param.grad is not None]


def equal(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))


class Store(Capability):
    """``TensorStore``, found again by the next session. A system call makes room for what is put."""

    waits = ("write",)
    verified = True
    main = "store"

    def start(self) -> None:
        self.session = Session(self.folder, name="faults", reuse=True)
        self.store = TensorStore(self.session, checksums=True, handle=self.handle)

    def do(self, version: int) -> None:
        for name, tensor in tensors(version).items():
            self.store.put(name, tensor)
        self.store.sync()
        require(same({name: self.get(name) for name in tensors(0)}, tensors(version)), "other tensors than were put")

    def get(self, name: str) -> torch.Tensor:
        future = self.store.get(name)
        future.result()
        return future.tensor

    def close(self) -> None:
        with contextlib.ExitStack() as both:
            both.callback(self.session.close)
            both.callback(self.store.close)

    def check(self) -> None:
        self.close()
        self.start()
        if self.version:
            news = [tensors(self.version + more) for more in (0, 1)]
            right = all(any(torch.equal(self.get(name), new[name]) for new in news) for name in tensors(0))
            require(right, "neither the old nor the new ones")


class Streamed(Capability):
    """``stream_weights``: written, where a system call makes room, and read by forward."""

    waits = ("write",)

    def do(self, version: int) -> None:
        made: Any = model()
        with (
            torch.no_grad(),
            self.ending(stream_weights(made, self.folder, memory_budget="1M", handle=self.handle)) as streamed,
        ):
            output = streamed(batch(version))
        require(torch.equal(output, model()(batch(version))), "another output")


class StreamedOn(Capability):
    """The same model in 8 bits, which are expanded for each use, used on and on."""

    main = "streamed"

    def start(self) -> None:
        made: Any = model()
        with torch.no_grad():
            for layer in made:
                values, scale = quantize(layer.weight)
                layer.weight.copy_(values * scale)
        self.expected = made
        options: Any = {"memory_budget": "600K", "quantize": "int8", "handle": self.handle}
        self.streamed: Any = stream_weights(model(), self.folder, **options)

    def do(self, version: int) -> None:
        with torch.no_grad():
            require(torch.equal(self.streamed(batch(version)), self.expected(batch(version))), "another output")


class Experts(Capability):
    """Experts of a mixture, read as routers choose them, and guessed."""

    main = "streamed"

    def start(self) -> None:
        with _SEED:
            made: Any = mixture("packed")
        self.expected = copy.deepcopy(made)
        self.streamed: Any = stream_weights(made, self.folder, memory_budget="500K", handle=self.handle)

    def do(self, version: int) -> None:
        with torch.no_grad():
            for rows in batch(version)[:6, :MIXED].split(1):
                require(torch.equal(self.streamed(rows), self.expected(rows)), "another output")


class Pretrained(Capability):
    """``from_pretrained``, from transformers' files."""

    def start(self) -> None:
        from tests.offload.llama import saved_llama

        self.path = saved_llama(self.folder, num_hidden_layers=1)
        with self._made() as made, torch.no_grad():
            self.expected = made(self._words()).logits

    def _made(self) -> Any:
        return from_pretrained(self.path, memory_budget="6M", handle=self.handle)

    def _words(self) -> torch.Tensor:
        return torch.arange(10, device="cpu")[None]

    def do(self, version: int) -> None:
        with self.ending(self._made()) as made, torch.no_grad():
            require(torch.equal(made(self._words()).logits, self.expected), "another output")


class Swapped(Capability):
    """``swap_params``: parameters that are changed, written, and read by forward and backward."""

    verified = True
    main = "swapped"

    def start(self) -> None:
        self.usual, self.module = model(), model()
        options: Any = {"memory_budget": "1M", "min_bytes": "100K", "checksums": True, "handle": self.handle}
        self.swapped = swap_params(self.module, self.folder, **options)

    def do(self, version: int) -> None:
        with torch.no_grad():
            for usual, parameter in zip(self.usual.parameters(), self.module.parameters(), strict=True):
                made = torch.Generator().manual_seed(version)
                usual.copy_(torch.rand(usual.shape, generator=made, device="cpu") / 100)
                with self.swapped.gathered([parameter], change=True) as (values,):
                    values.copy_(usual)
        require(equal(gradients(self.module, version), gradients(self.usual, version)), "other gradients")


class SwappedAnew(Capability):
    """``swap_params`` of a module, for which a system call makes room, and ``restore``."""

    waits = ("write",)
    verified = True

    def do(self, version: int) -> None:
        module = model()
        options: Any = {"memory_budget": "1M", "min_bytes": "100K", "checksums": True, "handle": self.handle}
        with self.ending(swap_params(module, self.folder, **options)) as swapped:
            require(equal(gradients(module, version), gradients(model(), version)), "other gradients")
            module.zero_grad()
            swapped.restore()
        require(equal(list(module.parameters()), list(model().parameters())), "other parameters")


class Gradients(Capability):
    """``swap_gradients``."""

    verified = True
    main = "swapped"

    def start(self) -> None:
        self.module = model()
        options: Any = {"memory_budget": "2M", "min_bytes": "100K", "checksums": True, "handle": self.handle}
        self.swapped = swap_gradients(self.module.parameters(), self.folder, **options)

    def do(self, version: int) -> None:
        require(equal(gradients(self.module, version), gradients(model(), version)), "other gradients")


class Activations(Capability):
    """``save_on_nvme``."""

    verified = True
    main = "saving"

    def start(self) -> None:
        options: Any = {"min_bytes": "50K", "memory_budget": "100K", "checksums": True, "handle": self.handle}
        self.saving = save_on_nvme(self.folder, **options)

    def do(self, version: int) -> None:
        module = model(6)
        with self.saving:
            loss = module(batch(version)).tanh().exp().square().sum()
        loss.backward()
        usual = model(6)
        usual(batch(version)).tanh().exp().square().sum().backward()
        ours, wanted = ([param.grad for param in one.parameters() if param.grad is not None] for one in (module, usual))
        require(equal(ours, wanted), "other gradients")


class Optimizer(Capability):
    """``NvmeOptimizer``: a step that fails is repeated. It ends with what is in flight, so that each chunk is whole."""

    waits = "read", "write"
    keep = False
    verified = True
    main = "optimizer"

    def start(self) -> None:
        self.module, self.usual = model(), model()
        self.reference = torch.optim.AdamW(self.usual.parameters())
        options: Any = {"host_budget": "3M", "reuse": self.keep, "checksums": True, "handle": self.handle}
        with _SEED, mock.patch.object(optimizer_states, "_BUFFER", 128 << 10):  # which holds some of the states
            self.optimizer = NvmeOptimizer(self.module.parameters(), torch.optim.AdamW, self.folder, **options)
        self.stepped = 0

    def do(self, version: int) -> None:
        if self.stepped < version:
            for usual, param in zip(self.usual.parameters(), self.module.parameters(), strict=True):
                usual.grad = torch.rand(usual.shape, generator=torch.Generator().manual_seed(version), device="cpu")
                param.grad = usual.grad.clone()
            self.reference.step()
            self.stepped = version
        if self.optimizer.steps < version:
            self.optimizer.step()
        self.optimizer._states.settle()  # the next step would tell what has become of what makes this one durable
        require(equal(list(self.module.parameters()), list(self.usual.parameters())), "other parameters")
        states, wanted = self.optimizer.state_dict()["state"], self.reference.state_dict()["state"]
        right = all(torch.equal(states[at][key], wanted[at][key]) for at in wanted for key in wanted[at])
        require(right, "other states")


class KeptOptimizer(Optimizer):
    """The same, its states for the next program."""

    keep = True


class Training(Capability):
    """Parameters, gradients, what autograd saves, and an optimizer in one ``Memory``. A step that fails is repeated."""

    waits = "read", "write"
    verified = True
    main = "optimizer"

    def start(self) -> None:
        self.module, self.usual, memory = model(), model(), Memory("4M")
        options: Any = {"memory": memory, "checksums": True, "handle": self.handle}
        swapped = swap_params(self.module, self.folder, min_bytes="100K", **options)
        grads = swap_gradients(self.module.parameters(), self.folder, min_bytes="100K", **options)
        self.saving = save_on_nvme(self.folder, min_bytes="50K", **options)
        self.others = grads, self.saving, swapped
        parameters = list(self.module.parameters())
        self.optimizer = NvmeOptimizer(parameters, torch.optim.AdamW, self.folder, **options)
        self.reference = torch.optim.AdamW(self.usual.parameters())
        self.computed = self.stepped = 0

    def do(self, version: int) -> None:
        if self.computed < version:
            self.module.zero_grad()
            with self.saving:
                loss = self.module(batch(version)).tanh().square().sum()
            loss.backward()
            self.computed = version
        if self.stepped < version:
            self.usual.zero_grad()
            self.usual(batch(version)).tanh().square().sum().backward()
            self.reference.step()
            self.stepped = version
        if self.optimizer.steps < version:
            self.optimizer.step()
        self.optimizer._states.settle()
        with torch.no_grad():
            require(torch.equal(self.module(batch(0)), self.usual(batch(0))), "other parameters")

    def close(self) -> None:
        super().close()
        for one in self.others:
            one.close()


def keys_and_values(cache: NvmeCache, version: int, error: float = 0.0) -> None:
    made = torch.Generator().manual_seed(version)
    parts = [torch.rand(1, 4, 200, 64, generator=made, device="cpu") for _ in range(8)]
    for number, part in enumerate(parts):
        cache.update(part, part + 1, number)
    for number, part in enumerate(parts):
        more = part[:, :, :1]
        keys, values = cache.update(more, more + 1, number)
        off = max(float((keys[:, :, :200] - part).abs().max()), float((values[:, :, :200] - (part + 1)).abs().max()))
        require(off <= error, "other keys and values")
        del keys, values  # their memory is needed


class KeyValues(Capability):
    """``NvmeCache``."""

    def do(self, version: int) -> None:
        with self.ending(NvmeCache(self.folder, "1500K", handle=self.handle)) as cache:
            keys_and_values(cache, version)


class KeyValuesIn8Bits(Capability):
    """``NvmeCache`` with a dtype."""

    def do(self, version: int) -> None:
        with self.ending(NvmeCache(self.folder, "3M", handle=self.handle, dtype="int8")) as cache:
            keys_and_values(cache, version, error=0.51 * 2 / 127)


class OneMemory(Capability):
    """Swapped parameters that give way to a cache in the same ``Memory``, and come back."""

    waits = ("write",)
    main = "swapped"

    def start(self) -> None:
        self.usual, self.module, self.memory = model(), model(), Memory("2M")
        options: Any = {"memory": self.memory, "min_bytes": "100K", "checksums": True, "handle": self.handle}
        self.swapped = swap_params(self.module, self.folder, **options)

    def do(self, version: int) -> None:
        right = gradients(self.usual, version)
        require(equal(gradients(self.module, version), right), "other gradients")
        with self.ending(NvmeCache(self.folder, memory=self.memory, handle=self.handle)) as cache:
            keys_and_values(cache, version)
            require(equal(gradients(self.module, version), right), "other gradients beside a cache")
        require(equal(gradients(self.module, version), right), "other gradients after a cache")
