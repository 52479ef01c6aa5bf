"""Decoding with a model whose weights are on storage: this package and its peers, against the bound.

Every row decodes greedily with the same random model of Llama's shape, in a process of its own in each round, and must
find the tokens that the model in memory finds. Its files are dropped from the page cache before each forward; the model
that is only mapped runs in a memory cgroup instead. Memory is counted beyond what the process had after importing its
libraries. The bound of a step is the step in memory, or its reads at fio's best rate for the same file in the same run,
whichever is longer.

The group ``experts`` feeds a mixture random tokens one by one; its means are of the second half of the steps, or of
three equal prompts. Rows but that in memory have a cgroup with the budget and 128 MiB (256 for prompts); none drops
the page cache once the model is loaded. Beside them is a plain LRU of experts, computed for the same choices, with
the memory that the budget leaves it: a step in memory, and then the reads of the LRU at fio's best rate.

With ``--device``, "in memory" is in that of the accelerator, budgets are of it and of the host's memory, and no memory
is limited otherwise. The bound of a step is what both budgets leave at fio's rate, what that of the accelerator leaves
at the rate of its bus, or the step in memory. The group ``cache`` has ``--size`` of keys and values.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import itertools
import os
import shutil
import statistics
import time
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks import accelerators, cgroups, command, fio
from benchmarks.accelerators import BUS, Setup
from nvme_ops import offload
from nvme_ops.base.command_line import size
from nvme_ops.base.limits import host_bytes
from nvme_ops.base.text import MIB, size_words
from nvme_ops.measure.files import NotUsable
from nvme_ops.measure.rows import Row, Sample, Unavailable, forget_peak, peak
from nvme_ops.measure.tables import Table

GROUPS = {
    "memory": "the model in memory; always measured",
    "nvme_ops": "from_pretrained and stream_weights",
    "accelerate": "transformers' disk map",
    "diffusers": "its group offloading, from host memory and from disk; for an accelerator",
    "mapped": "from_pretrained alone, which maps the file, with memory for the budget and 128 MiB; needs root",
    "experts": "a mixture of experts, with budgets of one to four fifths of it, nvme_ops and accelerate; needs root",
    "cache": "keys and values beyond the budget: NvmeCache, and transformers' offloading for an accelerator",
}
MEMORY = "in memory"
_COLUMNS = ("step", "first token", "load", "read per step", BUS, "device memory", "peak memory", "while decoding",
            "of the bound")  # fmt: skip
_OF_EXPERTS = ("step", "read per step", "LRU reads", "reads / LRU", BUS, "LRU over the bus", "LRU step", "step / LRU",
               "hits", "guesses right", "guesses wrong", "first token", "device memory", "while decoding")  # fmt: skip
_FIFTHS = (1, 2, 3, 4)  # of a mixture: the budgets
_FEEDS = {"chosen by routers": (16, 64), "chosen by Zipf(1.0)": (16, 64), "prompts": (512, 0)}  # prompt, steps
_FILE = "model.safetensors"
_LARGE = 256 * MIB  # from here on the shape is that of a real model
_LARGE_MIXTURE = 4096 * MIB
_CACHES = 2  # times the weights: keys and values of the group cache
_SPARE = 128 * MIB  # beside the budget, for the process whose memory is limited


def llama(nbytes: int) -> dict[str, Any]:
    """Returns LlamaConfig's arguments for about so many bytes of bfloat16: with as many layers as come closest."""
    hidden, inner, vocabulary = (2048, 5120, 16384) if nbytes >= _LARGE else (256, 640, 2048)
    layer = 2 * (4 * hidden * hidden + 3 * hidden * inner + 2 * hidden)
    layers = max(1, round((nbytes - 4 * vocabulary * hidden) / layer))
    return {"hidden_size": hidden, "intermediate_size": inner, "vocab_size": vocabulary, "num_hidden_layers": layers,
            "num_attention_heads": hidden // 128, "num_key_value_heads": hidden // 128}  # fmt: skip


def mixture(nbytes: int) -> dict[str, Any]:
    """Returns Qwen3MoeConfig's arguments: 1.6 GiB of bfloat16, 3.6 MiB for a small ``nbytes``, or a large one."""
    hidden, inner, count, used, layers = (1024, 512, 64, 4, 8) if nbytes >= _LARGE else (128, 256, 8, 2, 2)
    if nbytes >= _LARGE_MIXTURE:
        hidden, inner = 2048, 1024
        layers = max(1, nbytes // (6 * hidden * inner * count))
    return {"hidden_size": hidden, "moe_intermediate_size": inner, "num_experts": count, "num_experts_per_tok": used,
            "num_hidden_layers": layers, "vocab_size": 8 * hidden, "intermediate_size": 2 * hidden, "head_dim": 128,
            "num_attention_heads": hidden // 128, "num_key_value_heads": max(1, hidden // 256)}  # fmt: skip


def make_model(folder: str, of: str, nbytes: int) -> str:
    """Makes a model, of experts or not; returns its folder. Raises NotUsable without transformers."""
    try:
        from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3MoeConfig
    except ImportError as error:
        raise NotUsable("the model is made by transformers: pip install transformers") from error
    place = os.path.join(folder, of)
    command.show_progress(f"making a model in {place}")
    make, sizes = (Qwen3MoeConfig, mixture) if of == "experts" else (LlamaConfig, llama)
    options: dict[str, Any] = {"max_position_embeddings": 1 << 16, "dtype": "bfloat16", "tie_word_embeddings": False}
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(make(**sizes(nbytes), **options)).to(torch.bfloat16)

    def fill(number: int, weight: torch.nn.Parameter) -> None:  # as many at once as there are cores
        noise = torch.Generator().manual_seed(number)
        weight.data.normal_(0, 0.02, generator=noise) if weight.ndim > 1 else weight.data.fill_(1)

    with ThreadPoolExecutor() as pool:
        list(pool.map(fill, itertools.count(1), model.to_empty(device="cpu").parameters()))
    if of == "experts":  # tokens are so different that routers choose different experts
        model.model.embed_tokens.weight.data.mul_(50)
    model.save_pretrained(place, max_shard_size="1TB")
    return place


class Contender(NamedTuple):
    """A way to load a model. ``imports`` come before the clock; ``{}`` in the name is the memory that it may take.

    ``on``: ``cpu`` alone; of an accelerator with ``few`` budgets, ``host`` memory for all, ``disk`` for all; once.
    """

    name: str
    group: str
    load: Callable[[Namespace], Any]
    imports: tuple[str, ...] = ()
    on: str = ""

    def setups(self, args: Namespace, own: int = 0) -> list[Setup]:
        """Returns the budgets that it is measured with; ``own``: that of the CPU, if not the flag's."""
        if not (every := accelerators.setups(args)):
            return [(own or args.budget, None)] if self.on in ("", "cpu", "few", "once") else []
        few = every[: len(args.host_budget)][-2:]
        only: dict[str, list[Setup]] = {"cpu": [], "few": few, "host": [(0, accelerators.AUTO)], "disk": [(0, 0)]}
        return only.get(self.on, every[:1] if self.on else every)


def work_of(
    contender: Contender, run: command.Run, scratch: str, same: command.Alike, spares: int, **job: Any
) -> dict[str, Any]:
    """Returns what a contender's process has found."""
    for name in contender.imports:
        accelerators.require_peer(run.args, name.partition(".")[0])
    job = {"feed": "", "keep": 0, "load": contender.load.__name__, **job}
    spares *= run.args.device == accelerators.CPU
    with cgroups.limited_memory(job["budget"] + spares * _SPARE) if spares else contextlib.nullcontext("") as group:
        result = command.work("inference", scratch, run.args, group=group, **job)
    same.require(result["tokens"], contender.name == MEMORY)
    return result


def measured(
    run: command.Run, scratch: str, file: str, table: Table, tokens: int, setups: Mapping[str, Setup], nbytes: int
) -> tuple[float, dict[str, float]]:
    """Measures the rows, which make so many tokens in a step, and what bounds them: fio on the model's file, and a bus.

    On an accelerator a step uses ``nbytes``, of which a row's setup says what has to come from where.
    """
    of_file = os.path.getsize(file)
    rest = partial(command.let_the_device_rest, of_file)
    for row in table.rows:
        row.before = rest
    bounds = {
        "read per step": fio.row(f"{fio.NAME}, all weights", "read", lambda: file, of_file, rest, fio.best(of_file))
    }
    if run.args.device == accelerators.CPU:
        return command.bounded(run, table, bounds, tokens)
    bounds |= accelerators.bus_bound(scratch, run.args)

    def needs(row: Row, _: Sample) -> dict[str, int]:
        beyond = (0, 0) if row.name == MEMORY else accelerators.beyond(nbytes, *setups[row.name])
        return dict(zip(bounds, beyond, strict=True))

    return command.bounded(run, table, bounds, tokens, needs)


def rows_of(
    entries: Iterable[Contender], args: Namespace, decode: Callable[[Contender, Setup], Sample], own: int = 0
) -> tuple[list[Row], dict[str, Setup]]:
    """Returns the rows of contenders, and their budgets by name; ``own``: the one of the CPU, if not the flag's."""
    setups, rows = dict[str, Setup](), list[Row]()
    for entry in entries:
        for setup in entry.setups(args, own):
            shown = setup[0] + _SPARE * (entry.group == "mapped")
            rows.append(Row(entry.name.format(accelerators.words_of(shown, setup[1])), partial(decode, entry, setup)))
            setups[rows[-1].name] = setup
    return rows, setups


def figures_of(result: dict[str, Any], names: Sequence[str], mean: Callable[[list[float]], float], first: int) -> Any:
    """Returns the mean step from the ``first`` pass on, and its figures, and those of the whole process by name."""
    step, read, bus = (mean(result[name][first:]) for name in ("seconds", "read", "bus"))
    figures = {"step": step, "read per step": read, **{name: result[name] for name in names}, **result["peak"]}
    return step, figures | ({BUS: bus} if bus else {})


def decode_table(run: command.Run, scratch: str, model: str, batch: int, is_cache: bool) -> Table:
    """Measures one batch size, with weights or with keys and values beyond the budget."""
    args, same, file = run.args, command.Alike("tokens"), os.path.join(model, _FILE)
    what, group, prompt, nbytes = "weights", f"batch {batch}", args.prompt, os.path.getsize(file)
    if is_cache:
        sizes = llama(args.size // _CACHES)
        token = 4 * batch * sizes["num_hidden_layers"] * sizes["hidden_size"]
        what, group, prompt = "keys and values", f"cache, batch {batch}", max(1, args.size // token)
        nbytes = prompt * token

    def decode(contender: Contender, setup: Setup) -> Sample:
        job = {"model": model, "batch": batch, "budget": setup[0], "host": setup[1], "prompt": prompt}
        job["keep"] = int(is_cache)  # the last logits: those of a long prompt are large
        result = work_of(contender, run, scratch, same, contender.group == "mapped", **job)
        names = ("load", "while decoding")
        step, figures = figures_of(result, names, statistics.median, 2)  # some learn before
        figures["first token"] = result["load"] + result["seconds"][0]
        return Sample(step, batch, peak_bytes=max(result["loading"], result["while decoding"]), figures=figures)

    groups = {"memory", "cache"} if is_cache else {"memory", *args.groups} - {"experts", "cache"}
    rows, setups = rows_of((entry for entry in _CONTENDERS if entry.group in groups), args, decode)
    table = Table(group, f"{size_words(nbytes)} of {what}, batch {batch}", "tokens/s", rows, MEMORY, _COLUMNS)
    measured(run, scratch, file, table, batch, setups, nbytes)
    return table


def experts_table(run: command.Run, scratch: str, model: str, feed: str, fifths: int) -> Table:
    """Measures one way to choose experts, with one budget or, on an accelerator, all of its own."""
    same, choices, (prompt, steps) = command.Alike("tokens"), list[Any](), _FEEDS[feed]
    file, first, sizes = os.path.join(model, _FILE), 1 + steps // 2 if steps else 0, mixture(run.args.size)
    nbytes = os.path.getsize(file)
    budget, one = nbytes * fifths // 5, 6 * sizes["hidden_size"] * sizes["moe_intermediate_size"]

    def decode(contender: Contender, setup: Setup) -> Sample:
        more = {"model": model, "feed": feed, "batch": 1, "prompt": prompt, "steps": steps}
        more |= {"budget": setup[0], "host": setup[1]}
        result = work_of(contender, run, scratch, same, (contender.name != MEMORY) * (1 if steps else 2), **more)
        choices[:], count = result["chosen"], len(result["seconds"]) - first
        step, figures = figures_of(result, ("while decoding",), statistics.fmean, first)
        if stats := result["stats"][-1]:
            counted = {name: stats[name] - (result["stats"][first - 1][name] if first else 0) for name in stats}
            figures |= {f"guesses {name}": counted[f"guesses_{name}"] / count for name in ("right", "wrong")}
            figures["hits"] = counted["expert_hits"] / max(1, counted["experts_used"])
        return Sample(step, 1 if steps else prompt, figures={"first token": result["seconds"][0], **figures})

    mixed = _MIXED if fifths == _FIFTHS[0] else _MIXED[:-1]
    rows, setups = rows_of((entry for entry in _CONTENDERS if entry.load in mixed), run.args, decode, budget)
    group, memory = f"experts, {feed}, {fifths} of 5", f"{size_words(budget)} of memory, "
    if run.args.device != accelerators.CPU:
        group, memory = f"experts, {feed}", ""
    title = f"{size_words(nbytes)} of weights, {memory}{feed}"
    table = Table(group, title, "tokens/s", rows, MEMORY, _OF_EXPERTS)
    computing, paces = measured(run, scratch, file, table, 1 if steps else prompt, setups, nbytes)
    count = sizes["num_hidden_layers"] * sizes["num_experts"]
    for row in table.rows[1 : len(setups)] if choices and paces else ():
        beyond = accelerators.beyond(nbytes, *setups[row.name])
        reads, bus = (one * read_by_lru(choices, count - -(-outside // one), first) for outside in beyond)
        step = computing + max(pace * moved for pace, moved in zip(paces.values(), (reads, bus), strict=False))
        for sample in filter(None, row.samples):
            sample.figures.update({"LRU reads": reads, "LRU step": step, "step / LRU": sample.seconds / step})
            sample.figures.update({"reads / LRU": sample.figures["read per step"] / reads} if reads else {})
            sample.figures.update({"LRU over the bus": bus} if len(paces) > 1 else {})
    return table


def read_by_lru(choices: Sequence[Sequence[Sequence[int]]], room: int, first: int) -> float:
    """Returns how many experts, given by step and layer, a step from ``first`` on reads beside the last ``room``."""
    kept, read = dict[tuple[int, int], None](), 0
    for number, layers in enumerate(choices):
        for key in [(layer, expert) for layer, experts in enumerate(layers) for expert in experts]:
            read += key not in kept and number >= first
            kept.pop(key, None)
            kept[key] = None
            if len(kept) > room:
                del kept[next(iter(kept))]
    return read / (len(choices) - first)


def tables(run: command.Run, scratch: str, __: dict[str, Any]) -> Iterator[Table]:
    """Yields a table for each batch size, and of the mixture, for each budget, with prompts for the first."""
    args = run.args
    for group, nbytes in (("weights", args.size), ("cache", args.size // _CACHES)):
        if {*args.groups} - {"experts", "cache"} if group == "weights" else group in args.groups:
            model = make_model(scratch, group, nbytes)
            for batch in args.batch:
                yield decode_table(run, scratch, model, batch, group == "cache")
            shutil.rmtree(model)
    if "experts" in args.groups:
        model, is_cpu = make_model(scratch, "experts", args.size), args.device == accelerators.CPU
        for feed in _FEEDS if is_cpu else list(_FEEDS)[:1]:
            for fifths in _FIFTHS if is_cpu and _FEEDS[feed][1] else _FIFTHS[:1]:
                yield experts_table(run, scratch, model, feed, fifths)


# What follows runs in the row's own process.


@torch.no_grad()
def work(job: Namespace) -> dict[str, Any]:
    """Decodes; returns seconds, bytes read and tokens by pass, and bytes of memory beyond what the imports took."""
    row = next(entry for entry in _CONTENDERS if entry.load.__name__ == job.load)
    kind = "qwen3_moe.modeling_qwen3_moe" if job.feed else "llama.modeling_llama"
    for name in ("transformers", f"transformers.models.{kind}", *row.imports):
        importlib.import_module(name)
    if job.group:
        Path(job.group).write_text("0", encoding="ascii")  # 0 is the writing process
    command.forget(job.model, job.folder)
    before = forget_peak() or peak()
    start = time.perf_counter()
    model = row.load(job)
    load = accelerators.clock(job.device) - start
    shape = (job.batch, job.prompt + (job.steps if job.feed else 0))
    ids = torch.randint(0, model.config.vocab_size, shape, generator=torch.Generator().manual_seed(job.batch))
    parts: list[torch.Tensor | None] = [ids[:, : job.prompt]] * (1 if job.steps else 3)
    parts += ids[:, job.prompt :].split(1, 1) if job.feed and job.steps else [None] * (1 + job.steps) * (not job.feed)
    argument = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"  # before 5.24
    kept: dict[str, Any] = {argument: job.cache} if "cache" in job else {}
    job.counting = [user for user in (*kept.values(), model) if hasattr(user, "stats")]
    chosen, loading, bus = list[list[list[int]]](), 0, [0]  # of the last: in all, up to each pass
    seconds, read, tokens, stats = list[float](), list[int](), list[torch.Tensor](), list[dict[str, float]]()
    for number, layer in enumerate(model.model.layers if job.feed else ()):
        if "Zipf" in job.feed:
            layer.mlp.gate.register_forward_hook(partial(_zipf, torch.Generator().manual_seed(number)))
        layer.mlp.experts.register_forward_pre_hook(lambda _, given: chosen[-1].append(given[1].unique().tolist()))
    if job.feed:
        model.set_experts_implementation("eager")  # it computes with the chosen experts alone
    for part in parts:
        if seconds and not job.group and row.group != "memory":  # a limit on memory does the same
            command.forget(job.model, job.folder)
        chosen.append([])
        bytes_before, begin = command.moved()[0], accelerators.clock(job.device)
        ids = (tokens[-1][:, None] if part is None else part).to(job.device)
        output = model(ids, use_cache=True, logits_to_keep=job.keep, **kept)
        tokens.append(output.logits[:, -1].argmax(-1).cpu())
        seconds.append(accelerators.clock(job.device) - begin)
        read.append(command.moved()[0] - bytes_before)
        stats.append({name: value for user in job.counting for name, value in vars(user.stats()).items()})
        bus.append(accelerators.moved(job)[1])
        kept = {argument: output[argument]} if job.steps else {}
        if len(seconds) == 1:
            loading = peak() - before
            forget_peak()
    result = {"load": load, "seconds": seconds, "read": read, "chosen": chosen, "stats": stats, "loading": loading}
    result["bus"] = [after - before for before, after in itertools.pairwise(bus)]
    return {**result, "while decoding": peak() - before, "tokens": [token.tolist() for token in tokens]}


def _zipf(generator: torch.Generator, _: torch.nn.Module, __: Any, result: tuple[torch.Tensor, ...]) -> Any:
    """Chooses by Zipf's law in place of a router, whatever that would choose, as for a guess."""
    logits, scores, chosen = result
    ranks = torch.randperm(logits.shape[-1], generator=torch.Generator().manual_seed(generator.initial_seed()))
    drawn = torch.multinomial((1 / (1 + ranks)).expand(len(chosen), -1), chosen.shape[-1], generator=generator)
    return logits, torch.full_like(scores, 1 / chosen.shape[-1]), drawn.to(chosen.device)


def _mapped(job: Namespace, **options: Any) -> Any:
    """Loads by ``from_pretrained`` alone: on a CPU the weights are views of the mapped file."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(job.model, **options)


def _memory(job: Namespace) -> Any:
    model = _mapped(job)
    for weight in model.parameters():
        weight.data = weight.data.clone()
    return model.to(job.device)


def _pretrained(job: Namespace) -> Any:
    return offload.from_pretrained(job.model, device=job.device, **accelerators.budgets(offload.from_pretrained, job))


def _without_guesses(job: Namespace) -> Any:
    model = _pretrained(job)
    model._nvme_window.experts.guessing = False
    return model


def _stream_weights(job: Namespace) -> Any:
    return offload.stream_weights(_mapped(job), job.folder, memory_budget=job.budget)


def _disk_map(job: Namespace) -> Any:
    """Keeps as many layers in memory as fit the budgets; the others are read from the safetensors file."""
    own = {"cpu": job.budget} if job.host is None else {job.device.index or 0: job.budget, "cpu": host_bytes(job.host)}
    return _mapped(job, device_map="auto", max_memory=own, offload_folder=job.folder)


def _grouped(job: Namespace, **options: Any) -> Any:
    """Copies the layers from host memory, each while the one before computes."""
    from diffusers.hooks import apply_group_offloading  # type: ignore[import-not-found,unused-ignore]

    model = _mapped(job)
    options = {"num_blocks_per_group": 1, "use_stream": job.device.type == "cuda", **options}
    apply_group_offloading(model.model, job.device, torch.device("cpu"), **options)
    model.lm_head.to(job.device)
    return model


def _grouped_on_disk(job: Namespace) -> Any:
    """Does so from files of its own, in which it first writes the weights."""
    if shutil.disk_usage(job.folder).free < (needed := os.path.getsize(os.path.join(job.model, _FILE))):
        raise Unavailable(f"no room for files of its own: {size_words(needed)}")
    return _grouped(job, offload_to_disk_path=job.folder)


def _nvme_cache(job: Namespace) -> Any:
    job.cache = offload.NvmeCache(job.folder, **accelerators.budgets(offload.NvmeCache, job))
    return _memory(job)


def _offloading_cache(job: Namespace) -> Any:
    """Has all keys and values in host memory but those of two layers."""
    from transformers import DynamicCache

    model = _memory(job)
    job.cache = DynamicCache(config=model.config, offloading=True)
    return model


_CONTENDERS = (
    Contender(MEMORY, "memory", _memory, on="once"),
    Contender("nvme_ops from_pretrained, {}", "nvme_ops", _pretrained),
    Contender("nvme_ops without guesses, {}", "experts", _without_guesses, on="few"),
    Contender("nvme_ops stream_weights, {}", "nvme_ops", _stream_weights, on="cpu"),
    Contender("nvme_ops NvmeCache, {}", "cache", _nvme_cache),
    Contender("transformers, DynamicCache offloading", "cache", _offloading_cache, ("transformers",), "host"),
    Contender("transformers, disk map, {}", "accelerate", _disk_map, ("accelerate",), "few"),
    Contender("from_pretrained alone, limit of {}", "mapped", _mapped, on="cpu"),
    Contender("diffusers, group offloading", "diffusers", _grouped, ("diffusers.hooks",), "host"),
    Contender("diffusers, group offloading, disk", "diffusers", _grouped_on_disk, ("diffusers.hooks",), "disk"),
)
_MIXED = (_memory, _pretrained, _without_guesses, _disk_map)  # rows of the group experts; the last is slow


_FLAGS = {
    **accelerators.FLAGS,
    "--budget": ("memory for weights, on the CPU", "400M", size),
    "--batch": ("sequences at once", [1, 4, 16, 64]),
    "--steps": ("timed steps of each process", 4),
    "--prompt": ("tokens of a prompt", 8),
}
PROGRAM = command.Program(
    GROUPS, tables, lambda args: 3 if args.device == accelerators.CPU else 1, _FLAGS, accelerators.check,
    size="1200M", rounds=3, prepare=accelerators.prepare,
)  # fmt: skip
