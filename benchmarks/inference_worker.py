"""One pass of inference.py, in a process of its own: loads a model, decodes, and prints its figures as a line of JSON.

Imports nothing of this checkout but for this package's own rows: DeepSpeed would take our ``op_builder`` for its own.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

_PAGEOUT = 21  # MADV_PAGEOUT
_PAGE = 4096


@dataclass(frozen=True)
class Job:
    """What a process does; ``inference_rows.Contender`` says which of them takes what."""

    row: str  # of ``LOADS``
    model: str  # folder with config.json and model.safetensors
    scratch: str  # empty folder on the same device, for what a row writes
    budget: int  # bytes of weights in memory
    batch: int
    steps: int  # timed
    prompt: int  # tokens
    cold: bool  # whether the files are dropped from the page cache before each forward
    group: str = ""  # a cgroup's file cgroup.procs to join once everything is imported


def main(words: str) -> None:
    """Prints one line of JSON; see ``_decode`` for its fields."""
    print(json.dumps(_decode(Job(**json.loads(words)))))


@torch.no_grad()
def _decode(job: Job) -> dict[str, Any]:
    """Times in seconds, bytes beyond what the process had once its libraries were imported, tokens by step and row."""
    for name in ("transformers", "transformers.models.llama.modeling_llama", *_IMPORTS.get(job.row, ())):
        importlib.import_module(name)
    if job.group:
        Path(job.group).write_text("0", encoding="ascii")
    _make_cold(job)
    before = _status("VmRSS")
    _reset_peak()
    generator = torch.Generator().manual_seed(job.batch)
    start = time.perf_counter()
    model = LOADS[job.row](job)
    loaded = time.perf_counter()
    ids = torch.randint(0, model.config.vocab_size, (job.batch, job.prompt), generator=generator)
    output = model(ids, use_cache=True)
    cache = "cache" if "cache" in output else "past_key_values"  # before transformers 5.24
    tokens = [_greedy(output)]
    first = time.perf_counter()
    peak = _status("VmHWM") - before
    sync = True
    seconds, read = [], []
    _reset_peak()
    for _ in range(1 + job.steps):  # the first is not timed: some learn the order of the weights up to then
        if job.cold and job.row != "memory":
            _make_cold(job, model, sync)
            sync = False
        bytes_before, begin = _bytes_read(), time.perf_counter()
        output = model(tokens[-1][:, None], use_cache=True, **{cache: output[cache]})
        tokens.append(_greedy(output))
        seconds.append(time.perf_counter() - begin)
        read.append(_bytes_read() - bytes_before)
    decoding = _status("VmHWM") - before
    stats = model.stats() if job.row in ("pretrained", "stream_weights") else None
    return {
        "load": loaded - start,
        "first_token": first - start,
        "steps": seconds[1:],
        "bytes_read": statistics.median(read[1:]),
        "peak_bytes": max(peak, decoding),
        "decoding_bytes": decoding,
        "tokens": [each.tolist() for each in tokens],
        "stats": None if stats is None else vars(stats),
    }


def _greedy(output: Any) -> torch.Tensor:
    found: torch.Tensor = output.logits[:, -1].argmax(-1)
    return found


# What is dropped and counted


def _make_cold(job: Job, model: Any = None, sync: bool = True) -> None:
    """Drops the files from the page cache. Mapped pages stay there unless they are unmapped first."""
    if job.group and model is not None:
        return  # the cgroup's limit does it, once the pages are charged to it
    if job.row == "mapped" and model is not None:
        _page_out(model)
    for folder in (job.model, job.scratch):
        for place, _, names in os.walk(folder):
            for name in names:
                descriptor = os.open(os.path.join(place, name), os.O_RDONLY)
                if sync:
                    os.fsync(descriptor)
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
                os.close(descriptor)


def _page_out(model: Any) -> None:
    """Takes the pages of the weights from this process; they are read from the file when they are used again."""
    libc = ctypes.CDLL(None, use_errno=True)
    for weight in model.parameters():
        begin = -(-weight.data_ptr() // _PAGE) * _PAGE
        end = (weight.data_ptr() + weight.nbytes) // _PAGE * _PAGE
        libc.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(max(0, end - begin)), _PAGEOUT)


def _status(name: str) -> int:
    """A line of /proc/self/status in bytes."""
    with open("/proc/self/status", encoding="ascii", errors="replace") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(name + ":"))


def _reset_peak() -> None:
    """Sets VmHWM to what is resident now: proc_pid_clear_refs(5)."""
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def _bytes_read() -> int:
    """What this process caused to be read from devices, by page faults too."""
    with open("/proc/self/io", encoding="ascii") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("read_bytes:"))


# Those who load


def _mapped(job: Job) -> Any:
    """What ``from_pretrained`` alone does on a CPU: the weights are views of the mapped file."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(job.model)


def _memory(job: Job) -> Any:
    model = _mapped(job)
    for weight in model.parameters():
        weight.data = weight.data.clone()
    return model


def _pretrained(job: Job) -> Any:
    from nvme_ops import offload

    return offload.from_pretrained(job.model, memory_budget=job.budget)


def _stream_weights(job: Job) -> Any:
    from nvme_ops import offload

    return offload.stream_weights(_mapped(job), job.scratch, memory_budget=job.budget)


def _disk_offload(job: Job) -> Any:
    """Everything on disk: a file for each weight, which is mapped when its module runs."""
    import accelerate  # type: ignore[import-not-found,import-untyped,unused-ignore]

    return accelerate.disk_offload(_mapped(job), job.scratch)


def _dispatch(job: Job) -> Any:
    """As many layers in memory as fit the budget; the others are read from the safetensors file, none is written."""
    import accelerate  # type: ignore[import-not-found,import-untyped,unused-ignore]
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(job.model)
    with accelerate.init_empty_weights():
        model = AutoModelForCausalLM.from_config(config, dtype=config.dtype)
    model.tie_weights()
    return accelerate.load_checkpoint_and_dispatch(
        model,
        job.model,
        device_map="auto",
        max_memory={"cpu": job.budget},
        no_split_module_classes=["LlamaDecoderLayer"],
        offload_folder=job.scratch,
    ).eval()


def _disk_map(job: Job) -> Any:
    """The same through transformers."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(
        job.model, device_map="auto", max_memory={"cpu": job.budget}, offload_folder=job.scratch
    )


def _zero(job: Job) -> Any:
    """ZeRO-Inference as its documentation sets it up; every process first writes the weights to files of its own."""
    return _zero_inference(job, {}, {}, {})


def _zero_tuned(job: Job) -> Any:
    """With as many buffers as the budget allows, each of which has to hold the largest weight, and larger requests.

    Weights that persist are left out: on a CPU each of them keeps a buffer for good, and the buffers run out.
    """
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(job.model)
    matrix = config.hidden_size * config.intermediate_size
    largest = max(matrix, config.hidden_size * config.vocab_size)
    buffers = max(4, job.budget // (2 * largest))
    return _zero_inference(
        job,
        {"buffer_count": buffers, "buffer_size": largest},
        {"stage3_prefetch_bucket_size": (buffers - 2) * matrix, "stage3_max_live_parameters": buffers * largest},
        {"block_size": 8 << 20, "queue_depth": 8, "intra_op_parallelism": 2},
    )


def _zero_inference(job: Job, offload: dict[str, int], stage: dict[str, int], aio: dict[str, int]) -> Any:
    """ZeRO stage 3 without an optimizer, its parameters on NVMe, with these settings beside the defaults."""
    os.environ.update(MASTER_ADDR="127.0.0.1", RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
    import deepspeed  # type: ignore[import-not-found,import-untyped,unused-ignore]
    import torch.distributed as dist
    from transformers import AutoModelForCausalLM
    from transformers.integrations import HfDeepSpeedConfig

    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "zero_optimization": {
            "stage": 3,
            "offload_param": {"device": "nvme", "nvme_path": job.scratch, **offload},
            **stage,
        },
        "aio": aio,
    }
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    deepspeed.init_distributed("gloo")
    remembered = HfDeepSpeedConfig(settings)  # which from_pretrained looks for while it is alive
    model = AutoModelForCausalLM.from_pretrained(job.model)
    engine = deepspeed.initialize(model=model, config=settings)[0]
    engine.module.eval()
    del remembered
    return engine.module


LOADS: dict[str, Callable[[Job], Any]] = {
    "memory": _memory,
    "pretrained": _pretrained,
    "stream_weights": _stream_weights,
    "disk_offload": _disk_offload,
    "dispatch": _dispatch,
    "disk_map": _disk_map,
    "zero": _zero,
    "zero_tuned": _zero_tuned,
    "mapped": _mapped,
}
_IMPORTS = {
    "pretrained": ("nvme_ops.offload",),
    "stream_weights": ("nvme_ops.offload",),
    "disk_offload": ("accelerate",),
    "dispatch": ("accelerate",),
    "disk_map": ("accelerate",),
    "zero": ("deepspeed", "deepspeed.ops.op_builder"),
    "zero_tuned": ("deepspeed", "deepspeed.ops.op_builder"),
}

if __name__ == "__main__":
    main(sys.argv[-1])
