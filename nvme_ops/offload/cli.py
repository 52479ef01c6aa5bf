"""The command ``nvme-offload``: plans for models larger than memory, and generates text with them."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import shutil
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from nvme_ops import __version__
from nvme_ops.base.command_line import command, command_line, in_flags, positive, say, show
from nvme_ops.base.energy import Meter, total, used
from nvme_ops.base.progress import progress_bar
from nvme_ops.base.text import (
    fitted,
    parse_size,
    printable,
    rate_words,
    rounded,
    seconds_words,
    share_words,
    size_words,
)
from nvme_ops.formats import KINDS

if TYPE_CHECKING:
    import torch

    from nvme_ops.offload.plan.estimate import Sizes

_BATCHES = [1, 4, 16, 64]
_NAMES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "spiece.model", "vocab.json")
_FLAG_OF = {
    **dict.fromkeys(("a memory_budget", "a device_budget", "memory_budget", "device_budget"), "--memory"),
    "host_budget": "--host-memory",
}
_AUTO = "auto"
_MEMORY_HELP = "for weights, where it computes: such as 16G, or auto: what is free, less an eighth ({})"
_HOST_HELP = "for what a GPU has no room for, 0 for none (auto)"
_EPILOG = """\
examples:
  nvme-offload plan Llama-70B --memory 16G                   tokens per second
  nvme-offload plan Llama-70B --memory 16G --folder /mnt/b   on another device
  nvme-offload plan Llama-70B --memory 16G --batch 1 32 256 --watts 350
  nvme-offload plan Llama-8B --memory 32G --train            states on NVMe too
  nvme-offload generate Llama-70B --memory 16G --prompt "Storage is"
  nvme-offload generate Llama-70B --memory 16G --ids 1,2,3 --batch 16 --json

The command plan measures storage and computing for some seconds; it reads a
part of the model and changes nothing.

exit status: 0; 2 for wrong arguments and models that cannot be used; 130 after
Ctrl-C
"""


def parser() -> argparse.ArgumentParser:
    """Returns the parser of the flags."""
    made = command_line(
        "nvme-offload", "Runs transformers models larger than memory, with their weights on NVMe.", _EPILOG
    )
    made.add_argument("--version", action="version", version=f"nvme-offload {__version__}")
    commands = made.add_subparsers(dest="command", required=True, metavar="COMMAND")

    words = "what to expect of a model with limited memory: speed, batch sizes, what limits it"
    command = _command(commands, "plan", words)
    command.add_argument("--memory", type=_size, metavar="SIZE", default=_AUTO, help=_MEMORY_HELP.format(_AUTO))
    command.add_argument("--host-memory", type=_size, metavar="SIZE", default=_AUTO, help=_HOST_HELP)
    command.add_argument("--folder", metavar="DIR", help="on the storage to plan for (that of MODEL)")
    command.add_argument("--batch", type=positive, nargs="+", default=_BATCHES, metavar="N", help="sizes (1 4 16 64)")
    command.add_argument("--prompt-length", type=positive, default=128, metavar="N", help="tokens (128)")
    command.add_argument("--new-tokens", type=positive, default=128, metavar="N", help="after the prompt (128)")
    words = "as stream_weights(quantize=) packs the weights of a model that is not"
    command.add_argument("--quantize", choices=KINDS, help=words)
    words = "in which keys and values are stored, as NvmeCache(dtype=)"
    command.add_argument("--cache-dtype", choices=("int8", "float8"), help=words)
    command.add_argument(
        "--train", action="store_true",
        help="what to expect of training by AdamW on sequences of --prompt-length tokens; memory is for everything",
    )  # fmt: skip
    words = "in which --train stores states, as NvmeOptimizer(state_dtype=)"
    command.add_argument("--state-dtype", choices=("bfloat16", "int8"), help=words)
    command.add_argument("--price-per-hour", type=_amount, metavar="X", help="of the machine, in any currency")
    command.add_argument("--watts", type=_amount, metavar="X", help="power of the machine (measured if possible)")
    command.add_argument("--device", metavar="cpu|cuda", help="where it computes (cuda where there is a GPU)")

    words = "generate text, and compare its speed with what storage and computing allow"
    command = _command(commands, "generate", words)
    args = command.add_mutually_exclusive_group(required=True)
    args.add_argument("--prompt", metavar="TEXT", help="the text to continue")
    args.add_argument("--ids", type=_ids, metavar="1,2,3", help="the prompt as ids of tokens, without a tokenizer")
    command.add_argument("--memory", type=_size, metavar="SIZE", default=4 << 30, help=_MEMORY_HELP.format("4G"))
    command.add_argument("--host-memory", type=_size, metavar="SIZE", default=_AUTO, help=_HOST_HELP)
    command.add_argument("--new-tokens", type=positive, default=32, metavar="N", help="after the prompt (32)")
    command.add_argument("--batch", type=positive, default=1, metavar="N", help="copies of the prompt at once (1)")
    command.add_argument("--sample", action="store_true", help="draw tokens at random instead of the likeliest")
    command.add_argument("--device", metavar="cpu|cuda", help="where it computes (cuda where there is a GPU)")
    return made


@command("nvme-offload")
def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns the exit status."""
    args = parser().parse_args(argv)
    try:
        _silence_transformers()
        return {"plan": _plan, "generate": _generate}[args.command](args)
    except (OSError, ValueError, ImportError, MemoryError, RuntimeError) as error:
        words = in_flags(error, _FLAG_OF)
        say(f"nvme-offload: {' '.join(words.split()) or type(error).__name__}")
        return 2


def _size(text: str) -> int | str:
    try:
        return _AUTO if text == _AUTO else parse_size(text, zero=True)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _command(commands: Any, name: str, words: str) -> argparse.ArgumentParser:
    made: argparse.ArgumentParser = commands.add_parser(name, help=words, description=words, allow_abbrev=False)
    made.add_argument(
        "model",
        metavar="MODEL",
        help="a folder of save_pretrained, a safetensors file in one, a GGUF file, or org/name",
    )
    made.add_argument("--json", action="store_true", help="one JSON document instead of text")
    return made


class _Planned(NamedTuple):
    """What is to be planned, and where it computes."""

    args: argparse.Namespace
    device: torch.device
    model: Any
    about: dict[str, Any]
    step: Callable[[str], None]  #: names what is measured next


def _plan(args: argparse.Namespace) -> int:
    from nvme_ops.offload.plan.estimate import inference_text
    from nvme_ops.offload.plan.probe import expanding_rate, sizes_of
    from nvme_ops.offload.plan.training import training_text
    from nvme_ops.offload.weights.model_files import weight_files

    device, files = _device(args.device), weight_files(args.model)
    if args.folder is not None and not os.path.isdir(args.folder):
        raise ValueError(f"--folder {args.folder}: no folder")
    if args.state_dtype and not args.train:
        raise ValueError("--state-dtype is for --train")
    if args.train and (args.quantize or args.cache_dtype):
        raise ValueError("--quantize and --cache-dtype are not for --train")
    args.batch = sorted(set(args.batch))
    args.memory, args.host_memory = _budgets(args, device)
    steps = 2 if args.train else 1 + len(args.batch)
    with progress_bar(1 + steps * (1 if device.type == "cpu" else 2)) as step:
        step("sizes")
        with _opened(args, device) as model:
            sizes, about = sizes_of(model, args.quantize)
            parameters, expanding = list(model.parameters()), expanding_rate(model, args.quantize, device)
        _require_context(model.config, args.prompt_length + (0 if args.train else args.new_tokens))
        step("storage")
        planned = _Planned(args, device, model, about, step)
        plan = _training(planned, files, parameters) if args.train else _inference(planned, files, sizes, expanding)
    if args.json:
        print(json.dumps(plan, indent=2))
    else:
        show(training_text(plan) if args.train else inference_text(plan))
    return 0


def _training(planned: _Planned, files: Sequence[str], parameters: Sequence[torch.Tensor]) -> dict[str, Any]:
    from nvme_ops.offload.plan.probe import CPU, Layers, free_on
    from nvme_ops.offload.plan.training import Machine, training_plan
    from nvme_ops.storage.rates import copy_rate, mixed_rate

    args, device, model, about, step = planned
    folder = args.folder or os.path.dirname(os.path.abspath(files[0]))
    rate, noise = mixed_rate(folder)
    machine = Machine(args.memory, rate, shutil.disk_usage(folder).free)
    step("computing")
    with _timing(about):
        trained = Layers(model, args.memory, device, args.memory).training(args.prompt_length, parameters)
        trained = replace(trained, state_dtype=args.state_dtype)
        if device != CPU:
            bus = copy_rate(device)
            step("the CPU")
            by_cpu = Layers(model, args.memory, CPU, args.memory).training(args.prompt_length, parameters).seconds
            machine = replace(machine, host=args.host_memory, bus=bus, on_cpu=by_cpu)
    about["memory_free"] = free_on(device)
    return training_plan(about, trained, machine, noise, args.batch, args.prompt_length)


def _inference(planned: _Planned, files: Sequence[str], sizes: Sizes, expanding: float) -> dict[str, Any]:
    from nvme_ops.offload.plan.estimate import estimate, inference_plan
    from nvme_ops.offload.plan.probe import CPU, Layers, computing_of, rates

    args, device, model, about, step = planned
    prompt, new = args.prompt_length, args.new_tokens
    measured = replace(rates(files, args.folder, device), expanding=expanding)
    with _timing(about):
        layers = Layers(model, args.memory, device, measured.device_free)
        sizes = replace(sizes, **layers.cache_sizes(args.cache_dtype))
        if args.cache_dtype:
            about["cache_dtype"] = args.cache_dtype
            measured = replace(measured, expanding_cache=layers.cache_rate(args.cache_dtype))
    fit = [batch for batch in args.batch if sizes.beside(batch, prompt, new) <= measured.device_free]
    joules, begin = _joules_from_now(device), time.perf_counter()
    times = prompt, prompt + new // 2
    computing = computing_of(layers, fit, *times, lambda batch: step(f"batch {batch}"))
    watts = args.watts
    if watts is None and (spent := joules()) is not None:
        watts = spent / (time.perf_counter() - begin)
    by_cpu = {}
    if device != CPU:
        with _timing(about):
            layers = Layers(model, args.memory, CPU, measured.host_free)
        by_cpu = computing_of(layers, fit, *times, lambda batch: step(f"batch {batch}, the CPU"))
    for batch in args.batch:
        if fit and batch not in fit:  # too large to be timed
            computing[batch] = computing[fit[-1]].scaled(batch / fit[-1])
    estimates = [
        estimate(sizes, measured, computing[batch], batch, prompt, new, by_cpu.get(batch))
        for batch in sorted(computing)
    ]
    estimates = [entry for entry in estimates if entry.batch in fit or entry.nvme.fits]
    left_out = sorted({*args.batch} - {entry.batch for entry in estimates})
    return inference_plan(about, sizes, measured, estimates, left_out, args.memory, args.price_per_hour, watts)


@contextlib.contextmanager
def _timing(about: Mapping[str, Any]) -> Iterator[None]:
    """Raises ValueError if the block fails because the layers of the model are built in an unknown way."""
    try:
        yield
    except (AttributeError, TypeError, LookupError) as error:
        raise ValueError(f"no layer of {about['model']} can be timed: {error}") from error


def _generate(args: argparse.Namespace) -> int:
    from nvme_ops.offload.weights.generation import generate
    from nvme_ops.offload.weights.model_files import weight_files
    from nvme_ops.storage.rates import read_rate

    device, files = _device(args.device), weight_files(args.model)
    tokenizer = _tokenizer(args.model, os.path.dirname(files[0]))
    if args.prompt is not None and tokenizer is None:
        raise ValueError(f"{args.model} has no tokenizer: give the prompt as ids of tokens, --ids 1,2,3")
    prompt = args.ids if args.prompt is None else tokenizer(args.prompt)["input_ids"]
    if not prompt:
        raise ValueError("the prompt has no tokens")
    text = _Text(tokenizer, silent=args.json)
    with contextlib.ExitStack() as bar:
        step = bar.enter_context(progress_bar(2 + args.new_tokens))
        step("load the model")
        with _opened(args, device) as model:
            _require_context(model.config, len(prompt) + args.new_tokens)
            step("read the prompt")
            energy = _joules_from_now(device)

            def on_token(tokens: list[int]) -> None:
                if sys.stdout.isatty() and not args.json:
                    bar.close()  # both would be on one line
                else:
                    step("generate")
                text.add(tokens[0])

            reached = generate(model, prompt, args.batch, args.new_tokens, sample=args.sample, on_token=on_token)
            joules = energy()
        document = reached.document(read_rate(files, cached=True), joules)
    text.end()
    texts = None if tokenizer is None else [_decoded(tokenizer, tokens) for tokens in reached.tokens]
    if args.json:
        print(json.dumps({**document, "texts": texts}, indent=2))
        return 0
    if args.sample:
        for sample in (texts or [",".join(map(str, tokens)) for tokens in reached.tokens])[1:]:
            show(sample)
    if tokenizer is None:
        say("no tokenizer in the folder: these are ids of tokens")
    say(fitted(reached_text(document)))
    return 0


def reached_text(document: Mapping[str, Any]) -> str:
    """Returns a ``GenerationStats.document`` as a few lines of text."""

    def bound(which: str) -> str:
        return "no limit" if document[which] is None else rounded(document[which], 3)

    lines = [f"first token after {seconds_words(document['first_token'])}"]
    if document["tokens_per_second"] is not None:
        lines += [
            f"{rounded(document['tokens_per_second'], 3)} tokens/s, "
            f"{share_words(document['share_of_bound'] or 0)} of what is possible: "
            f"{bound('reading_bound')} if reading were all, {bound('computing_bound')} if computing were",
            f"{size_words(round(document['bytes_per_step'] / len(document['tokens'])))} read for each token, at "
            f"{rate_words(document['rate_reached'])} of {rate_words(document['rate'])}",
        ]
    if document["joules_per_1000_tokens"] is not None:
        lines.append(f"{rounded(document['joules_per_1000_tokens'], 3)} J for 1,000 tokens")
    weights, process = size_words(document["peak_weights"]), size_words(document["peak_process"])
    return "\n".join([*lines, f"peak memory: weights {weights}, process {process}"])


def _joules_from_now(device: torch.device) -> Callable[[], float | None]:
    """Returns a function that returns the joules of the machine since this call; None without readable counters."""
    meter = Meter([] if device.type == "cpu" else [device.index or 0])
    before = meter.read()

    def joules() -> float | None:
        spent = used(before, meter.read())
        return total(spent) if spent else None

    return joules


class _Text:
    """Prints text as it grows, or ids of tokens if there is no tokenizer."""

    def __init__(self, tokenizer: Any, silent: bool) -> None:
        self._tokenizer, self._silent = tokenizer, silent
        self._tokens: list[int] = []
        self._shown = ""

    def add(self, token: int) -> None:
        """Adds a token; prints the text so far unless its last character is incomplete: it may take several tokens."""
        self._tokens.append(token)
        if not (text := self._text()).endswith("\N{REPLACEMENT CHARACTER}"):
            self._print(text)

    def end(self) -> None:
        """Prints the rest."""
        self._print(self._text() + "\n")

    def _text(self) -> str:
        return ",".join(map(str, self._tokens)) if self._tokenizer is None else _decoded(self._tokenizer, self._tokens)

    def _print(self, text: str) -> None:
        if not self._silent:
            print(printable(text[len(self._shown) :], lines=True), end="", flush=True)
        self._shown = text


def _decoded(tokenizer: Any, tokens: Sequence[int]) -> str:
    return str(tokenizer.decode(tokens, skip_special_tokens=True))


def _tokenizer(model: str, folder: str) -> Any:
    from transformers import AutoTokenizer

    from nvme_ops.offload.weights.model_files import is_hub_name

    named = {"gguf_file": os.path.basename(model)} if model.endswith(".gguf") else {}
    if named or is_hub_name(model):
        try:
            return AutoTokenizer.from_pretrained(folder if named else model, **named)
        except (OSError, ValueError, KeyError):  # it has none
            return None
    if not any(os.path.exists(os.path.join(folder, name)) for name in _NAMES):
        return None
    return AutoTokenizer.from_pretrained(folder, local_files_only=True)


def _silence_transformers() -> None:
    """Turns off transformers' warnings and progress bars. Raises ImportError if it is not installed."""
    try:
        import transformers
    except ImportError as error:
        raise ImportError("transformers is not installed: pip install 'transformers>=5'") from error
    logging: Any = transformers.utils.logging
    logging.set_verbosity_error()
    importlib.import_module("huggingface_hub.utils.logging").set_verbosity_error()  # it says each attempt
    logging.disable_progress_bar()


def _opened(args: argparse.Namespace, device: torch.device) -> Any:
    from nvme_ops.offload.weights.pretrained import from_pretrained

    host = None if device.type == "cpu" else args.host_memory
    return from_pretrained(args.model, memory_budget=args.memory, host_budget=host, device=device)


def _budgets(args: argparse.Namespace, device: torch.device) -> tuple[int, int]:
    """Returns the bytes where it computes, and of host memory beside an accelerator's."""
    from nvme_ops.offload.budgets import budgets_of

    with warnings.catch_warnings(record=True) as less:
        warnings.simplefilter("always")
        budgets = budgets_of(device, args.memory, None, None, None if device.type == "cpu" else args.host_memory)
        host = budgets.host()
    for warning in less:
        say(f"nvme-offload: {in_flags(warning.message, _FLAG_OF)}")
    return budgets.nbytes, host


def _device(name: str | None) -> torch.device:
    from nvme_ops.offload.weights.stream_weights import device_of

    try:
        return device_of(name)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise ValueError(f"--device {name}: {str(error).splitlines()[0]}") from None


def _require_context(config: Any, tokens: int) -> None:
    most = getattr(config.get_text_config(decoder=True), "max_position_embeddings", None)
    if most and tokens > most:
        raise ValueError(f"prompt and new tokens are {tokens} together, and the model takes {most}")


def _ids(text: str) -> list[int]:
    try:
        return [int(number) for number in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of ids; example: 1,2,3") from None


def _amount(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return value


if __name__ == "__main__":
    sys.exit(main())
