"""What each rank runs: ``python -m tests.offload.ranks "WHAT ARGUMENTS" ...`` prints a line for each of these."""

from __future__ import annotations

import contextlib
import copy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from nvme_ops import dcp
from nvme_ops.offload import NvmeOptimizer, from_pretrained, save_on_nvme, swap_params


def model(way: str) -> Any:
    """The same on each rank: a copy under DDP, or divided by FSDP2."""
    torch.manual_seed(3)
    made = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(96, 96), torch.nn.GELU()) for _ in range(4)))
    if way == "ddp":
        return DistributedDataParallel(made)
    if way == "uneven":
        made.append(torch.nn.Linear(96, 1))  # only one rank gets any of it
    mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in made:
        fully_shard(layer, mesh=mesh)
    return fully_shard(made, mesh=mesh)


def local(tensor: Any) -> torch.Tensor:
    return tensor.detach().to_local() if hasattr(tensor, "to_local") else tensor.detach()


def activations(way: str, folder: str) -> str:
    """Whether gradients are equal, and the bytes that are saved in each step."""
    mine, other = model(way), model(way)
    saving = save_on_nvme(folder, min_bytes=1, memory_budget=0)
    equal = True
    for step in range(3):
        x = torch.randn(32, 96, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
        for module in (mine, other):
            module.zero_grad()
        with saving:
            loss = mine(x).square().mean()
        loss.backward()
        other(x).square().mean().backward()
        pairs = zip(mine.parameters(), other.parameters(), strict=True)
        equal = equal and all(torch.equal(local(one.grad), local(two.grad)) for one, two in pairs)
    return f"{equal}, {saving.stats().bytes_saved // 3} bytes"


def train(module: Any, optimizer: torch.optim.Optimizer, begin: int, end: int) -> None:
    for step in range(begin, end):
        x = torch.randn(8, 96, generator=torch.Generator().manual_seed(step))  # the same on all ranks
        module(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def optimizer(way: str, folder: str, first: str, last: str) -> str:
    """Whether parameters are torch's; from step ``first`` on, of a checkpoint that the run from step 0 has left."""
    begin, end, checkpoint = int(first), int(last), str(Path(folder) / "checkpoint")
    mine, other = model(way), model(way)
    plain = torch.optim.AdamW(other.parameters(), lr=0.01)
    with NvmeOptimizer(mine.parameters(), torch.optim.AdamW, folder, memory_budget="1M", lr=0.01) as ours:
        pairs = {"ours": (mine, ours), "torch's": (other, plain)}

        def states() -> dict[str, Any]:
            return {
                name: {"model": module.state_dict(), "optimizer": get_optimizer_state_dict(module, optimizer)}
                for name, (module, optimizer) in pairs.items()
            }

        if begin:
            loaded = states()
            dcp.load(loaded, checkpoint_id=checkpoint)
            for name, (module, optimizer) in pairs.items():
                module.load_state_dict(loaded[name]["model"])
                set_optimizer_state_dict(module, optimizer, loaded[name]["optimizer"])
        for module, optimizer in pairs.values():
            train(module, optimizer, begin, end)
        both = zip(mine.parameters(), other.parameters(), strict=True)
        equal = all(torch.equal(local(one), local(two)) for one, two in both)
        if not begin and way == "fsdp":
            dcp.save(states(), checkpoint_id=checkpoint)
        dist.barrier()
    return f"{equal}"


def same(one: Any, two: Any) -> bool:
    """Whether state dicts are equal, of which each rank compares its own parts."""
    if isinstance(one, dict):
        return one.keys() == two.keys() and all(same(one[key], two[key]) for key in one)
    if isinstance(one, torch.Tensor):
        return type(one) is type(two) and torch.equal(local(one), local(two))
    return bool(one == two)


def optimizer_states(folder: str) -> str:
    """With which options of torch's functions for state dicts a resumed optimizer differs from torch's: with none."""

    def resumed(ours: bool, options: StateDictOptions) -> tuple[Any, list[torch.Tensor]]:
        """The state dict of a first optimizer, and the parameters after a second one has gone on from it."""
        with contextlib.ExitStack() as stack:

            def optimizer_of(module: Any) -> torch.optim.Optimizer:
                if not ours:
                    return torch.optim.AdamW(module.parameters(), lr=0.01)
                made = NvmeOptimizer(module.parameters(), torch.optim.AdamW, folder, memory_budget="1M", lr=0.01)
                return stack.enter_context(made)

            first, second = model("uneven"), model("uneven")
            train(first, before := optimizer_of(first), 0, 2)
            states = get_optimizer_state_dict(first, before, options=options)
            saved = copy.deepcopy(states)
            second.load_state_dict(first.state_dict())
            set_optimizer_state_dict(second, after := optimizer_of(second), states, options=options)
            train(second, after, 0, 2)
            return saved, [local(param).clone() for param in second.parameters()]

    wrong = []
    for words in (  # with full_state_dict, flatten_optimizer_state_dict is a KeyError in torch
        "", "cpu_offload", "flatten_optimizer_state_dict", "flatten_optimizer_state_dict cpu_offload",
        "full_state_dict", "full_state_dict broadcast_from_rank0", "full_state_dict cpu_offload broadcast_from_rank0",
    ):  # fmt: skip
        chosen: dict[str, Any] = dict.fromkeys(words.split(), True)
        (expected, values), (saved, mine) = (resumed(ours, StateDictOptions(**chosen)) for ours in (False, True))
        if not (same(expected, saved) and all(map(torch.equal, values, mine))):
            wrong.append(words or "none")
    return "; ".join(wrong)


def collectives(folder: str) -> str:
    """Whether collectives over parameters that are on storage do what they do over others."""

    def plain(seed: int) -> Any:
        torch.manual_seed(seed)
        return torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(3)))

    first, second, ours = plain(0), plain(1), plain(dist.get_rank())
    with swap_params(ours, folder, memory_budget="40K", min_bytes=1), torch.no_grad():
        dist.broadcast(ours[0].weight.data, 0)
        work: Any = dist.all_reduce(ours[1].weight.data, async_op=True)
        ours(torch.ones(1, 64))  # the values leave memory
        work.wait()
        gathered = [torch.empty(64, 64) for _ in range(2)]
        dist.all_gather(gathered, ours[2].weight.data)
        right = [
            torch.equal(ours[0].weight + 0, first[0].weight),
            torch.equal(ours[1].weight + 0, first[1].weight + second[1].weight),
            torch.equal(torch.stack(gathered), torch.stack([first[2].weight, second[2].weight])),
        ]
    return f"{all(right)}"


def trainer(folder: str) -> str:
    """Whether a Trainer with states and activations on storage, also a resumed one, has torch's bits and moves them."""
    import transformers

    from nvme_ops.integrations.trainer import use_nvme
    from tests.offload.trainer_models import SMALL, take_small_activations, trainer

    def trained(name: str, checkpoint: str | None = None) -> Any:
        made = trainer(Path(folder) / name, gradient_accumulation_steps=2, save_strategy="steps", save_steps=2)
        if name != "plain":
            use_nvme(made, Path(folder) / "nvme", **SMALL)
        transformers.set_seed(dist.get_rank())  # of dropout
        made.train(resume_from_checkpoint=checkpoint)
        dist.barrier()
        return made

    take_small_activations()
    transformers.logging.set_verbosity_error()
    with contextlib.redirect_stdout(sys.stderr):  # where trainers print their logs
        plain, ours = trained("plain"), trained("ours")
        resumed = trained("resumed", f"{folder}/ours/checkpoint-2")
    expected = list(plain.model.parameters())
    equal = all(all(map(torch.equal, run.model.parameters(), expected)) for run in (ours, resumed))
    moved = min(value for name, value in ours.state.log_history[-1].items() if name.startswith("nvme_")) > 0
    return f"{equal}, {moved}"


def pretrained(path: str) -> str:
    """Whether logits of a model that transformers divides among the ranks are close, and the share that is read."""
    import transformers
    from transformers.distributed import DistributedConfig

    ids = torch.tensor([[1, 2, 3, 4]])
    whole = transformers.LlamaForCausalLM.from_pretrained(path)
    size = sum(param.nbytes for param in whole.parameters())
    divided = DistributedConfig(tp_plan="auto")
    with torch.no_grad(), from_pretrained(path, memory_budget="3M", distributed_config=divided) as streamed:
        for _ in range(3):
            logits = streamed(ids).logits
        actual = logits.full_tensor() if hasattr(logits, "full_tensor") else logits
        close = torch.allclose(actual, whole(ids).logits, atol=1e-5)
        return f"{close}, {streamed.stats().bytes_read / 3 / size:.2f} of the bytes"


WHAT: dict[str, Callable[..., str]] = {
    check.__name__: check for check in (activations, optimizer, optimizer_states, collectives, trainer, pretrained)
}

if __name__ == "__main__":
    dist.init_process_group("gloo")
    for what, *words in map(str.split, sys.argv[1:]):
        print(f"rank {dist.get_rank()}: {WHAT[what](*words)}", flush=True)
        dist.barrier()
    dist.destroy_process_group()
