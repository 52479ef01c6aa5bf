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
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import statistics
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from benchmarks import cgroups, command, fio
from nvme_ops.base.command_line import size
from nvme_ops.base.text import MIB, size_words
from nvme_ops.measure.files import NotUsable
from nvme_ops.measure.rows import Row, Sample, Unavailable, forget_peak, peak
from nvme_ops.measure.tables import Table

GROUPS = {
    "memory": "the model in memory; always measured",
    "nvme_ops": "from_pretrained and stream_weights",
    "accelerate": "transformers' disk map, accelerate.disk_offload",
    "deepspeed": "ZeRO-Inference, parameters on NVMe, weights within the budget kept",
    "mapped": "from_pretrained alone, which maps the file, with memory for the budget and 128 MiB; needs root",
    "experts": "a mixture of experts, with budgets of one to four fifths of it, nvme_ops and accelerate; needs root",
}
MEMORY = "in memory"
_COLUMNS = ("step", "first token", "load", "read per step", "peak memory", "while decoding", "of the bound")
_OF_EXPERTS = ("step", "read per step", "LRU reads", "reads / LRU", "LRU step", "step / LRU", "hits", "guesses right",
               "guesses wrong", "first token", "while decoding")  # fmt: skip
_FIFTHS = (1, 2, 3, 4)  # of a mixture: the budgets
_FEEDS = {"chosen by routers": (16, 64), "chosen by Zipf(1.0)": (16, 64), "prompts": (512, 0)}  # prompt, steps
_FILE = "model.safetensors"
_LARGE = 256 * MIB  # from here on the shape is that of a real model
_SPARE = 128 * MIB  # beside the budget, for the process whose memory is limited


def llama(nbytes: int) -> dict[str, Any]:
    """Returns LlamaConfig's arguments for about so many bytes of bfloat16: with as many layers as come closest."""
    hidden, inner, vocabulary = (2048, 5120, 16384) if nbytes >= _LARGE else (256, 640, 2048)
    layer = 2 * (4 * hidden * hidden + 3 * hidden * inner + 2 * hidden)
    layers = max(1, round((nbytes - 4 * vocabulary * hidden) / layer))
    return {"hidden_size": hidden, "intermediate_size": inner, "vocab_size": vocabulary, "num_hidden_layers": layers,
            "num_attention_heads": hidden // 128, "num_key_value_heads": hidden // 128}  # fmt: skip


def mixture(nbytes: int) -> dict[str, Any]:
    """Returns Qwen3MoeConfig's arguments: 1.6 GiB of bfloat16, or 3.6 MiB for a small ``nbytes``."""
    hidden, inner, count, used, layers = (1024, 512, 64, 4, 8) if nbytes >= _LARGE else (128, 256, 8, 2, 2)
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
    torch.manual_seed(1)
    make, sizes = (Qwen3MoeConfig, mixture) if of == "experts" else (LlamaConfig, llama)
    options: dict[str, Any] = {"max_position_embeddings": 2048, "dtype": "bfloat16", "tie_word_embeddings": False}
    model: Any = AutoModelForCausalLM.from_config(make(**sizes(nbytes), **options)).to(torch.bfloat16)
    if of == "experts":  # tokens are so different that routers choose different experts
        model.model.embed_tokens.weight.data.mul_(50)
    model.save_pretrained(place, max_shard_size="1TB")
    return place


class Contender(NamedTuple):
    """A way to load a model. ``imports`` come before the clock; ``{}`` in the name is the memory that it may take."""

    name: str
    group: str
    load: Callable[[Namespace], Any]
    imports: tuple[str, ...] = ()


def work_of(
    contender: Contender, run: command.Run, scratch: str, same: command.Alike, spares: int, **job: Any
) -> dict[str, Any]:
    """Returns what a contender's process has found."""
    for package in ("transformers", *(name.partition(".")[0] for name in contender.imports)):
        if importlib.util.find_spec(package) is None:
            raise Unavailable(f"not installed: pip install {package}")
    job = {"budget": run.args.budget, "feed": "", "load": contender.load.__name__, **job}
    with cgroups.limited_memory(job["budget"] + spares * _SPARE) if spares else contextlib.nullcontext("") as group:
        result = command.work("inference", scratch, run.args, group=group, **job)
    same.require(result["tokens"], contender.name == MEMORY)
    return result


def measured(run: command.Run, file: str, table: Table, tokens: int) -> Table:
    """Measures the rows, which make so many tokens in a step, and fio on the model's file."""
    nbytes = os.path.getsize(file)
    table.title = f"{size_words(nbytes)} of weights, {table.title}"
    rest = partial(command.let_the_device_rest, nbytes)
    for row in table.rows:
        row.before = rest
    bound = fio.row(f"{fio.NAME}, all weights", "read", lambda: file, nbytes, rest, fio.best(nbytes))
    return command.bounded(run, table, bound, tokens, "read per step")


def batch_table(run: command.Run, scratch: str, model: str, batch: int) -> Table:
    """Measures one batch size."""
    same = command.Alike("tokens")

    def decode(contender: Contender) -> Sample:
        result = work_of(contender, run, scratch, same, contender.group == "mapped", model=model, batch=batch)
        step, read = (statistics.median(result[name][2:]) for name in ("seconds", "read"))  # some learn before
        figures = {name: result[name] for name in ("load", "while decoding")}
        figures |= {"step": step, "read per step": read, "first token": result["load"] + result["seconds"][0]}
        return Sample(step, batch, peak_bytes=max(result["loading"], result["while decoding"]), figures=figures)

    args = run.args
    groups = {"memory", *args.groups} - {"experts", "deepspeed" if args.no_deepspeed else ""}
    rows = [Row(entry.name.format(size_words(args.budget + _SPARE * (entry.group == "mapped"))), partial(decode, entry))
            for entry in _CONTENDERS if entry.group in groups]  # fmt: skip
    table = Table(f"batch {batch}", f"batch {batch}", "tokens/s", rows, MEMORY, _COLUMNS)
    return measured(run, os.path.join(model, _FILE), table, batch)


def experts_table(run: command.Run, scratch: str, model: str, feed: str, fifths: int) -> Table:
    """Measures one way to choose experts, with one budget."""
    same, choices, (prompt, steps) = command.Alike("tokens"), list[Any](), _FEEDS[feed]
    file, first, sizes = os.path.join(model, _FILE), 1 + steps // 2 if steps else 0, mixture(run.args.size)
    nbytes = os.path.getsize(file)
    budget, one = nbytes * fifths // 5, 6 * sizes["hidden_size"] * sizes["moe_intermediate_size"]

    def decode(contender: Contender) -> Sample:
        more = {"model": model, "budget": budget, "feed": feed, "batch": 1, "prompt": prompt, "steps": steps}
        result = work_of(contender, run, scratch, same, (contender.name != MEMORY) * (1 if steps else 2), **more)
        choices[:], count = result["chosen"], len(result["seconds"]) - first
        step, read = (statistics.fmean(result[name][first:]) for name in ("seconds", "read"))
        figures = {"step": step, "read per step": read, "while decoding": result["while decoding"]}
        if stats := result["stats"][-1]:
            counted = {name: stats[name] - (result["stats"][first - 1][name] if first else 0) for name in stats}
            figures |= {f"guesses {name}": counted[f"guesses_{name}"] / count for name in ("right", "wrong")}
            figures["hits"] = counted["expert_hits"] / max(1, counted["experts_used"])
        return Sample(step, 1 if steps else prompt, figures={"first token": result["seconds"][0], **figures})

    title, words = f"{size_words(budget)} of memory, {feed}", size_words(budget)
    mixed = _MIXED if fifths == _FIFTHS[0] else _MIXED[: -len(_SLOW)]
    rows = [Row(entry.name.format(words), partial(decode, entry)) for entry in _CONTENDERS if entry.load in mixed]
    table = Table(f"experts, {feed}, {fifths} of 5", title, "tokens/s", rows, MEMORY, _OF_EXPERTS)
    measured(run, file, table, 1 if steps else prompt)
    room = sizes["num_hidden_layers"] * sizes["num_experts"] - -(-(nbytes - budget) // one)
    reads = one * read_by_lru(choices, room, first) if choices else 0.0
    means = [[sample.seconds for sample in row.samples if sample] for row in (table.rows[0], table.rows[-1])]
    for sample in [sample for row in table.rows[1:-1] for sample in row.samples if sample and all(means)]:
        step = statistics.median(means[0]) + statistics.median(means[1]) * reads / nbytes
        sample.figures.update({"LRU reads": reads, "LRU step": step, "step / LRU": sample.seconds / step})
        sample.figures.update({"reads / LRU": sample.figures["read per step"] / reads} if reads else {})
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
    if {*run.args.groups} - {"experts"}:
        model = make_model(scratch, "model", run.args.size)
        for batch in run.args.batch:
            yield batch_table(run, scratch, model, batch)
    if "experts" in run.args.groups:
        model = make_model(scratch, "experts", run.args.size)
        for feed, (_, steps) in _FEEDS.items():
            for fifths in _FIFTHS if steps else _FIFTHS[:1]:
                yield experts_table(run, scratch, model, feed, fifths)


# What follows runs in the row's own process.


@torch.no_grad()
def work(job: Namespace) -> dict[str, Any]:
    """Decodes; returns seconds, bytes read and tokens by pass, and bytes of memory beyond what the imports took."""
    row = next(entry for entry in _CONTENDERS if entry.load.__name__ == job.load)
    kind = "qwen3_moe.modeling_qwen3_moe" if job.feed else "llama.modeling_llama"
    for name in ("transformers", f"transformers.models.{kind}", *row.imports):
        importlib.import_module(name)
    is_late = bool(job.feed) and row.load is _disk_offload  # it begins with the whole mixture in memory
    if job.group and not is_late:
        cgroups.join(job.group)
    command.forget(job.model, job.folder)
    before = forget_peak() or peak()
    start = time.perf_counter()
    model = row.load(job)
    load = time.perf_counter() - start
    if job.group and is_late:
        cgroups.join(job.group)
        command.forget(job.model, job.folder)
    shape = (job.batch, job.prompt + (job.steps if job.feed else 0))
    ids = torch.randint(0, model.config.vocab_size, shape, generator=torch.Generator().manual_seed(job.batch))
    parts: list[torch.Tensor | None] = [ids[:, : job.prompt]] * (1 if job.steps else 3)
    parts += ids[:, job.prompt :].split(1, 1) if job.feed and job.steps else [None] * (1 + job.steps) * (not job.feed)
    chosen, loading, kept = list[list[list[int]]](), 0, dict[str, Any]()
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
        bytes_before, begin = command.moved()[0], time.perf_counter()
        output = model(tokens[-1][:, None] if part is None else part, use_cache=True, **kept)
        tokens.append(output.logits[:, -1].argmax(-1))
        seconds.append(time.perf_counter() - begin)
        read.append(command.moved()[0] - bytes_before)
        stats.append(vars(model.stats()) if row.group in ("nvme_ops", "experts") else {})
        cache = "cache" if "cache" in output else "past_key_values"  # before transformers 5.24
        kept = {cache: output[cache]} if job.steps else {}
        if len(seconds) == 1:
            loading = peak() - before
            forget_peak()
    result = {"load": load, "seconds": seconds, "read": read, "chosen": chosen, "stats": stats, "loading": loading}
    return {**result, "while decoding": peak() - before, "tokens": [token.tolist() for token in tokens]}


def _zipf(generator: torch.Generator, _: torch.nn.Module, __: Any, result: tuple[torch.Tensor, ...]) -> Any:
    """Chooses by Zipf's law in place of a router, whatever that would choose, as for a guess."""
    logits, scores, chosen = result
    ranks = torch.randperm(logits.shape[-1], generator=torch.Generator().manual_seed(generator.initial_seed()))
    drawn = torch.multinomial((1 / (1 + ranks)).expand(len(chosen), -1), chosen.shape[-1], generator=generator)
    return logits, torch.full_like(scores, 1 / chosen.shape[-1]), drawn


def _mapped(job: Namespace) -> Any:
    """Loads by ``from_pretrained`` alone: on a CPU the weights are views of the mapped file."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(job.model)


def _memory(job: Namespace) -> Any:
    model = _mapped(job)
    for weight in model.parameters():
        weight.data = weight.data.clone()
    return model


def _pretrained(job: Namespace) -> Any:
    from nvme_ops import offload

    return offload.from_pretrained(job.model, memory_budget=job.budget)


def _without_guesses(job: Namespace) -> Any:
    model = _pretrained(job)
    model._nvme_window.experts.guessing = False
    return model


def _stream_weights(job: Namespace) -> Any:
    from nvme_ops import offload

    return offload.stream_weights(_mapped(job), job.folder, memory_budget=job.budget)


def _disk_offload(job: Namespace) -> Any:
    """Puts everything on disk: a file for each weight, which is mapped when its module runs."""
    import accelerate  # type: ignore[import-not-found,import-untyped,unused-ignore]

    return accelerate.disk_offload(_mapped(job), job.folder)


def _disk_map(job: Namespace) -> Any:
    """Keeps as many layers in memory as fit the budget; the others are read from the safetensors file."""
    from transformers import AutoModelForCausalLM

    options: dict[str, Any] = {"max_memory": {"cpu": job.budget}, "offload_folder": job.folder}
    return AutoModelForCausalLM.from_pretrained(job.model, device_map="auto", **options)


def _zero(job: Namespace) -> Any:
    """Sets up ZeRO-Inference as its documentation does: every process first writes the weights to its own files.

    It has as many buffers of the largest weight's size as the budget allows, large requests, and no persistent weights:
    on a CPU each of them keeps a buffer for good, and the buffers run out.
    """
    from transformers import AutoConfig
    from transformers.integrations import HfDeepSpeedConfig

    model = AutoConfig.from_pretrained(job.model)
    matrix = model.hidden_size * model.intermediate_size
    largest = max(matrix, model.hidden_size * model.vocab_size)
    count = max(4, job.budget // (2 * largest))
    place = {"device": "nvme", "nvme_path": job.folder, "buffer_count": count, "buffer_size": largest}
    bounds = {"stage3_prefetch_bucket_size": (count - 2) * matrix, "stage3_max_live_parameters": count * largest}
    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 3, "offload_param": place, **bounds},
        "aio": {"block_size": 8 << 20, "queue_depth": 8, "intra_op_parallelism": 2},
    }
    deepspeed = command.deepspeed_alone()
    remembered = HfDeepSpeedConfig(settings)  # which from_pretrained looks for while it is alive
    engine = deepspeed.initialize(model=_mapped(job), config=settings)[0]
    engine.module.eval()
    del remembered
    return engine.module


_OURS, _THEIRS, _ZERO_IMPORTS = ("nvme_ops.offload",), ("accelerate",), ("deepspeed", "deepspeed.ops.op_builder")
_CONTENDERS = (
    Contender(MEMORY, "memory", _memory),
    Contender("nvme_ops from_pretrained, {}", "nvme_ops", _pretrained, _OURS),
    Contender("nvme_ops without guesses, {}", "experts", _without_guesses, _OURS),
    Contender("nvme_ops stream_weights, {}", "nvme_ops", _stream_weights, _OURS),
    Contender("transformers, disk map, {}", "accelerate", _disk_map, _THEIRS),
    Contender("from_pretrained alone, limit of {}", "mapped", _mapped),
    Contender("accelerate.disk_offload", "accelerate", _disk_offload, _THEIRS),
    Contender("DeepSpeed ZeRO-Inference, {}", "deepspeed", _zero, _ZERO_IMPORTS),
)
_SLOW = (_disk_map, _disk_offload)  # a second a token or more: measured with the least budget alone
_MIXED = (_memory, _pretrained, _without_guesses, *_SLOW)  # rows of the group experts


_FLAGS = {
    "--budget": ("memory for weights", "400M", size),
    "--batch": ("sequences at once", [1, 4, 16, 64]),
    "--steps": ("timed steps of each process", 4),
    "--prompt": ("tokens of a prompt", 8),
}
PROGRAM = command.Program(GROUPS, tables, 3, _FLAGS, size="1200M", rounds=3)
