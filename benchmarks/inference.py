"""Decoding with a model whose weights are on storage: this package and its peers, against the bound.

Every row decodes greedily with the same random model of Llama's shape, in a process of its own in each round, and must
find the tokens that the model in memory finds. Its files are dropped from the page cache before each forward; the model
that is only mapped runs in a memory cgroup instead. Memory is counted beyond what the process had after importing its
libraries. The bound of a step is the step in memory, or its reads at fio's best rate for the same file in the same run,
whichever is longer.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import statistics
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch

from benchmarks import cgroups, command
from benchmarks.command import Program, Run
from nvme_ops.measure import fio
from nvme_ops.measure.files import NotUsable
from nvme_ops.measure.rows import Row, Sample, Unavailable, forget_peak, peak
from nvme_ops.measure.tables import Table
from nvme_ops.text import MIB, size, size_words

GROUPS = {
    "memory": "the model in memory; always measured",
    "nvme_ops": "from_pretrained and stream_weights",
    "accelerate": "transformers' disk map, accelerate.disk_offload",
    "deepspeed": "ZeRO-Inference, parameters on NVMe, weights within the budget kept",
    "mapped": "from_pretrained alone, which maps the file, with memory for the budget and 128 MiB; needs root",
}
MEMORY = "in memory"
_COLUMNS = ("step", "first token", "load", "read per step", "peak memory", "while decoding", "of the bound")
_LARGE = 256 * MIB  # from here on the shape is that of a real model
_SPARE = 128 * MIB  # beside the budget, for the process whose memory is limited


def config(nbytes: int) -> dict[str, Any]:
    """Returns LlamaConfig's arguments for about so many bytes of bfloat16: with as many layers as come closest."""
    hidden, inner, vocabulary = (2048, 5120, 16384) if nbytes >= _LARGE else (256, 640, 2048)
    layer = 2 * (4 * hidden * hidden + 3 * hidden * inner + 2 * hidden)
    return {
        "hidden_size": hidden,
        "intermediate_size": inner,
        "vocab_size": vocabulary,
        "num_hidden_layers": max(1, round((nbytes - 4 * vocabulary * hidden) / layer)),
        "num_attention_heads": hidden // 128,
        "num_key_value_heads": hidden // 128,
        "max_position_embeddings": 2048,
    }


def make_model(folder: str, nbytes: int) -> str:
    """Makes a model; returns its folder. Raises NotUsable without transformers."""
    try:
        from transformers import LlamaConfig, LlamaForCausalLM
    except ImportError as error:
        raise NotUsable("the model is made by transformers: pip install transformers") from error
    place = os.path.join(folder, "model")
    command.show_progress(f"making a model of {size_words(nbytes)} in {place}")
    torch.manual_seed(1)
    model: Any = LlamaForCausalLM(LlamaConfig(**config(nbytes), dtype="bfloat16", tie_word_embeddings=False))
    model.to(torch.bfloat16).save_pretrained(place, max_shard_size="1TB")
    return place


class Contender(NamedTuple):
    """A way to load a model. ``imports`` come before the clock; ``{}`` in the name is the memory that it may take."""

    name: str
    group: str
    load: Callable[[Namespace], Any]
    imports: tuple[str, ...] = ()


def contenders(args: Namespace) -> list[Contender]:
    """Returns the contenders of the chosen groups, in the order of the table."""
    groups = {"memory", *args.groups} - ({"deepspeed"} if args.no_deepspeed else set())
    return [each._replace(name=each.name.format(size_words(args.budget + _SPARE * (each.group == "mapped"))))
            for each in _CONTENDERS if each.group in groups]  # fmt: skip


def batch_table(run: Run, scratch: str, model: str, batch: int) -> Table:
    """Measures one batch size."""
    args, same = run.args, command.Alike("tokens")

    def decode(each: Contender) -> Sample:
        for package in ("transformers", *(name.partition(".")[0] for name in each.imports)):
            if importlib.util.find_spec(package) is None:
                raise Unavailable(f"not installed: pip install {package}")
        job = {"load": each.load.__name__, "model": model, "batch": batch}
        with contextlib.ExitStack() as stack:
            if each.group == "mapped":
                job["group"] = stack.enter_context(cgroups.limited_memory(args.budget + _SPARE))
            found = command.work("inference", scratch, args, **job)
        same.require(found["tokens"], each.name == MEMORY)
        figures = {name: found[name] for name in ("first token", "load", "read per step", "while decoding")}
        step = statistics.median(found["steps"])
        return Sample(step, batch, peak_bytes=found["peak_bytes"], figures={"step": step, **figures})

    file = os.path.join(model, "model.safetensors")
    nbytes = os.path.getsize(file)
    rest = partial(command.let_the_device_rest, nbytes)
    rows = [Row(each.name, partial(decode, each), before=rest) for each in contenders(args)]
    title = f"{size_words(nbytes)} of weights, batch {batch}"
    table = Table(f"batch {batch}", title, "tokens/s", rows, MEMORY, _COLUMNS)
    bound = fio.row(f"{fio.NAME}, all weights", "read", lambda: file, nbytes, rest, fio.best(nbytes))
    return command.bounded(run, table, bound, batch, "read per step")


def tables(run: Run, scratch: str, _: dict[str, Any]) -> Iterator[Table]:
    """Yields a table for each batch size."""
    model = make_model(scratch, run.args.size)
    for batch in run.args.batch:
        yield batch_table(run, scratch, model, batch)


# What follows runs in the row's own process.


@torch.no_grad()
def work(job: Namespace) -> dict[str, Any]:
    """Decodes; returns times in seconds, bytes beyond what the imports took, and tokens by step and row."""
    row = next(each for each in _CONTENDERS if each.load.__name__ == job.load)
    for name in ("transformers", "transformers.models.llama.modeling_llama", *row.imports):
        importlib.import_module(name)
    if job.group:
        cgroups.join(job.group)
    command.forget(job.model, job.folder)
    before = forget_peak() or peak()
    generator = torch.Generator().manual_seed(job.batch)
    start = time.perf_counter()
    model = row.load(job)
    loaded = time.perf_counter()
    ids = torch.randint(0, model.config.vocab_size, (job.batch, job.prompt), generator=generator)
    output = model(ids, use_cache=True)
    cache = "cache" if "cache" in output else "past_key_values"  # before transformers 5.24
    tokens = [output.logits[:, -1].argmax(-1)]
    first = time.perf_counter()
    loading = peak() - before
    seconds, read = [], []
    forget_peak()
    for _ in range(1 + job.steps):  # the first is not timed: some learn the order of the weights up to then
        if row.group not in ("memory", "mapped"):  # the limit on memory does the same
            command.forget(job.model, job.folder)
        bytes_before, begin = command.moved()[0], time.perf_counter()
        output = model(tokens[-1][:, None], use_cache=True, **{cache: output[cache]})
        tokens.append(output.logits[:, -1].argmax(-1))
        seconds.append(time.perf_counter() - begin)
        read.append(command.moved()[0] - bytes_before)
    decoding = peak() - before
    return {
        "load": loaded - start,
        "first token": first - start,
        "steps": seconds[1:],
        "read per step": statistics.median(read[1:]),
        "peak_bytes": max(loading, decoding),
        "while decoding": decoding,
        "tokens": [each.tolist() for each in tokens],
    }


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
    Contender("nvme_ops stream_weights, {}", "nvme_ops", _stream_weights, _OURS),
    Contender("transformers, disk map, {}", "accelerate", _disk_map, _THEIRS),
    Contender("from_pretrained alone, limit of {}", "mapped", _mapped),
    Contender("accelerate.disk_offload", "accelerate", _disk_offload, _THEIRS),
    Contender("DeepSpeed ZeRO-Inference, {}", "deepspeed", _zero, _ZERO_IMPORTS),
)


_FLAGS = {
    "--budget": ("memory for weights", "400M", size),
    "--batch": ("sequences at once", [1, 4, 16, 64]),
    "--steps": ("timed steps of each process", 4),
    "--prompt": ("tokens of a prompt", 8),
}
PROGRAM = Program(GROUPS, tables, 3, _FLAGS, size="1200M", rounds=3)
