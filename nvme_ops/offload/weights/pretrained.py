"""``from_pretrained``: a transformers model whose weights stay in its safetensors files."""

from __future__ import annotations

import contextlib
import copy
import os
import re
from collections.abc import Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from nvme_ops.errors import naming
from nvme_ops.file import shared_handle
from nvme_ops.formats import safetensors_format
from nvme_ops.formats.quantized import KINDS, Mxfp4, Scaled, read_scale, weight_of
from nvme_ops.formats.sharded_index import read_index
from nvme_ops.handle import aio_handle
from nvme_ops.offload.weights.source import WeightFile, concatenated
from nvme_ops.offload.weights.stored import StoredTensor, Weights, stored_in, stored_tensors
from nvme_ops.offload.weights.stream_weights import budget_of, device_of
from nvme_ops.offload.weights.streamed import stream
from nvme_ops.offload.weights.window import read_now
from nvme_ops.storage.publication import open_to_read

Path = str | os.PathLike[str]

_COMPARED = 16 << 20  # bytes of two weights that are compared at once, each
_FILE, _INDEX = "model.safetensors", "model.safetensors.index.json"
#: Keywords by which transformers' ``from_pretrained`` finds a model on the Hub.
_HUB_OPTIONS = ("revision", "token", "cache_dir", "local_files_only", "force_download", "proxies")

_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")


def from_pretrained(
    path: Path | Sequence[Path],
    *,
    memory_budget: int | str,
    device: str | torch.device | None = None,
    dtype: torch.dtype | str | None = None,
    model_class: type[Any] | None = None,
    handle: aio_handle | None = None,
    **kwargs: Any,
) -> Any:
    """Returns a transformers model that reads its weights while it computes, in bounded memory.

        model = nvme_ops.offload.from_pretrained("mistralai/Mixtral-8x7B-v0.1", memory_budget="16G")
        model.generate(**inputs)

    The files stay as and where they are; loading reads only their headers. The model is the one that transformers' own
    ``from_pretrained`` returns, in eval mode, with ``stats()`` and ``close()``, and is a context manager. Its weights
    cannot be trained or changed.

    Args:
        path: a folder of ``save_pretrained``, or its safetensors files, with the configuration beside them unless
            ``config=`` gives it. Or a name on the Hugging Face Hub, found in its cache or downloaded as transformers
            does, with its ``revision``, ``token``, ``cache_dir``, ``local_files_only`` and ``subfolder``.
        memory_budget: bytes for weights, or a size such as ``"4G"``; memory of ``device``. Intermediate results and a
            key-value cache come on top of it.
        device: where the model computes; the CPU when None.
        dtype: in which it computes; that of the files, as transformers chooses it, when None.
        model_class: the class of the model; the one that the configuration names when None.
        handle: reads the files; one for the whole process when None.
        kwargs: for transformers' ``from_pretrained``, such as ``config`` and ``attn_implementation``.

    Raises:
        ImportError: transformers is not installed.
        FileNotFoundError: there is no safetensors file, or no configuration.
        OSError: from transformers, for a name: no such model, no access, or no connection and not in the cache.
        FormatError: a file is damaged.
        ValueError: the budget is too small (the message says what is needed), or weights are missing or of another
            shape than the configuration says.
    """
    try:
        import transformers
    except ImportError as error:
        raise ImportError(
            "nvme_ops.offload.from_pretrained needs transformers: pip install 'nvme-ops[offload]'"
        ) from error
    budget = budget_of(memory_budget)
    target = device_of(device or "cpu")
    if not isinstance(path, str | os.PathLike | Sequence):
        raise TypeError(f"path must be a folder, files or a name on the Hub, not {type(path).__name__}")
    name = path if is_hub_name(path) else ""
    options = {key: kwargs.pop(key) for key in _HUB_OPTIONS if key in kwargs}
    paths = weight_files(path, kwargs.pop("subfolder", ""), **options)
    folder = os.path.dirname(paths[0])
    config = kwargs.pop("config", None)
    if config is None:
        with naming("read of the configuration", folder):
            config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
    chosen: Any = model_class or _class_of(transformers, config)
    weights = Weights(budget)
    with contextlib.ExitStack() as undo:
        files: list[WeightFile] = []
        state: dict[str, StoredTensor] = {}
        for each in paths:
            files.append(WeightFile(open_to_read(each), each, handle or shared_handle()))
            undo.callback(files[-1].close)
            header = safetensors_format.read(files[-1].file.fileno(), files[-1].path)
            state.update(stored_tensors(files[-1], header, weights, target))
        dtypes = (dtype, getattr(config, "dtype", None), torch.bfloat16)
        expanded = next(each for each in dtypes if isinstance(each, torch.dtype))
        state = _with_exponents(_with_scales(state, expanded, _blocks(config)), expanded)
        if any(each._stored_as is not None for each in state.values()) and hasattr(config, "quantization_config"):
            config = copy.deepcopy(config)
            del config.quantization_config  # else transformers would look for kernels of its own
        if "experts_implementation" not in kwargs:
            kwargs["experts_implementation"] = "eager"  # it computes with the selected experts alone
        # Transformers turns gradients on again by a call that comes through the mode, where Ctrl-C can end it.
        undo.callback(torch._C._set_grad_enabled, torch.is_grad_enabled())
        try:
            with _Tying():
                model, info = chosen.from_pretrained(
                    None, config=config, state_dict=state, dtype=dtype or "auto", output_loading_info=True, **kwargs
                )
        except (RuntimeError, MemoryError) as error:  # transformers may only say that it has logged what it was
            if weights.early > budget:
                raise ValueError(f"{folder}: {weights.too_early}") from error
            raise
        _require_complete(info, folder)
        model.name_or_path = model.config.name_or_path = name or folder  # adapters are saved with this name
        with contextlib.suppress(OSError):  # there is none
            if model.can_generate():
                model.generation_config = transformers.GenerationConfig.from_pretrained(folder, local_files_only=True)
        for parameter in model.parameters():
            if stored_in(parameter) is None:  # computed while loading
                parameter.data = parameter.data.to(target)
        for module in model.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None and not isinstance(buffer, StoredTensor):
                    module._buffers[name] = buffer.to(target)
        stream(model, weights, files, budget, target)
        undo.pop_all()
    return model


def weight_files(path: Path | Sequence[Path], subfolder: str = "", **options: Any) -> list[str]:
    """Returns the safetensors files of a model, downloaded if need be. Raises OSError if there are none."""
    if not isinstance(path, str | os.PathLike):
        return [os.path.abspath(each) for each in path]
    if is_hub_name(path):
        folder = _local_folder(str(path), subfolder, **options)
    else:
        folder = os.path.abspath(os.path.join(path, subfolder) if subfolder else path)
    if not os.path.isdir(folder):
        os.stat(folder)  # raises if it does not exist
        return [folder]
    index = os.path.join(folder, _INDEX)
    if os.path.exists(index):
        found = read_index(index)
        return sorted(found.shards(found.places))
    single = os.path.join(folder, _FILE)
    if os.path.exists(single):
        return [single]
    raise FileNotFoundError(
        f"{folder} has neither {_FILE} nor {_INDEX}; nvme-checkpoint convert {folder} {folder} makes them of .bin files"
    )


def is_hub_name(path: Any) -> bool:
    """Returns whether a path is no file or folder, but may be a name on the Hub: ``"org/name"``."""
    return isinstance(path, str) and not os.path.exists(path) and _NAME.fullmatch(path) is not None


def _local_folder(name: str, subfolder: str = "", **options: Any) -> str:
    """Returns the cache folder with configuration and safetensors files of a model on the Hub, all of one commit.

    Args:
        name: ``"org/name"``.
        subfolder: where the model's files are in its repository.
        options: some of ``_HUB_OPTIONS``.

    Raises:
        OSError: from transformers: no such model or revision, no access, or no connection and not in the cache.
        FileNotFoundError: the model has no safetensors files.
    """
    from transformers.utils import cached_file
    from transformers.utils.hub import extract_commit_hash, get_checkpoint_shard_files

    options["subfolder"] = subfolder

    def find(file: str, **more: Any) -> str | None:
        found: str | None = cached_file(name, file, **more, **options)
        return found

    optional = {"_raise_exceptions_for_missing_entries": False}
    config = find("config.json")
    options["revision"] = extract_commit_hash(config, None) or options.get("revision")
    weights = find(_FILE, **optional)
    if weights is None:
        weights = find(_INDEX, **optional)
        if weights is None:
            raise FileNotFoundError(
                f"{name} has no safetensors files: download it with 'hf download {name}', then nvme-checkpoint convert"
            )
        shards: Any = get_checkpoint_shard_files
        shards(name, weights, **options)
    find("generation_config.json", **optional)
    return os.path.dirname(weights)


def _blocks(config: Any) -> Sequence[int]:
    """Returns the sizes of the blocks of a matrix that have a factor each, as a configuration names them."""
    found = getattr(config, "quantization_config", None) or {}
    found = found if isinstance(found, dict) else found.to_dict()
    groups = [dict(group.get("weights") or {}) for group in dict(found.get("config_groups") or {}).values()]
    sizes = [found.get("weight_block_size"), *(each.get("block_structure") for each in groups)]  # compressed-tensors
    return next((each for each in sizes if each), ())


def _with_scales(state: dict[str, StoredTensor], dtype: torch.dtype, blocks: Sequence[int]) -> dict[str, StoredTensor]:
    """Joins weights of 8 bits with their scales, which are read; ``dtype`` is that of the expanded weights."""
    weights = {name: weight_of(name) for name in state}
    scales = {name: weight for name, weight in weights.items() if weight in state and state[weight].dtype in KINDS}
    found = {name: each for name, each in state.items() if name not in scales}
    read = read_now([state[name].source for name in scales])
    for (name, weight), values in zip(scales.items(), read, strict=True):
        stored = state[weight]
        scale = Scaled(read_scale(name, values, stored.shape, blocks))
        found[weight] = StoredTensor(stored._weights, stored.source, dtype, stored.device, scale)
    return found


def _with_exponents(state: dict[str, StoredTensor], dtype: torch.dtype) -> dict[str, StoredTensor]:
    """Joins numbers of 4 bits with their exponents, both of which stay where they are: weights in MXFP4."""
    found = dict(state)
    for name in [each.removesuffix("_blocks") for each in state if each.endswith("_blocks")]:
        numbers, exponents = state[f"{name}_blocks"], state.get(f"{name}_scales")
        if exponents is None or (*exponents.shape, 16) != numbers.shape or numbers.dtype != torch.uint8:
            continue
        count, rows, groups = exponents.shape
        source = concatenated([each.source.view((count, each.numel() // count)) for each in (numbers, exponents)], 1)
        if source is not None:
            del found[f"{name}_blocks"], found[f"{name}_scales"]
            found[name] = StoredTensor(numbers._weights, source, dtype, numbers.device, Mxfp4(rows, 32 * groups))
    return found


class _Tying(TorchFunctionMode):
    """Handles operations by which transformers ties weights: there is no window yet, and weights may be large.

    If a file has both names of a tied weight, transformers compares the two. It also pads a bias to as many elements as
    the tied weight has rows, most often by none.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if args and isinstance(args[0], StoredTensor):
            other = args[1] if len(args) > 1 else None
            if func is torch.equal and isinstance(other, StoredTensor):
                return _equal(args[0], other)
            if func is torch.nn.functional.pad and other is not None and not any(other):
                return args[0]
        return func(*args, **(kwargs or {}))


def _equal(one: StoredTensor, other: StoredTensor) -> bool:
    """Compares as ``torch.equal`` does, part by part. Weights with a scale or steps are read as a whole."""
    if one.shape != other.shape or one.source is other.source:
        return one.shape == other.shape
    if one.dim() == 0 or not (one.is_plain() and other.is_plain()):
        return torch.equal(one.to_memory(), other.to_memory())
    rows = max(1, _COMPARED * one.shape[0] // max(1, one.nbytes))
    ranges = [(start, min(start + rows, one.shape[0])) for start in range(0, one.shape[0], rows)]
    return all(
        torch.equal(*(each.like(each.source.rows(*part)).to_memory() for each in (one, other))) for part in ranges
    )


def _class_of(transformers: Any, config: Any) -> Any:
    for name in config.architectures or ():
        if (found := getattr(transformers, name, None)) is not None:
            return found
    found = transformers.MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if found is None:
        raise ValueError(
            f"the configuration, a {type(config).__name__}, names no class that transformers has: give model_class="
        )
    return found[0] if isinstance(found, tuple) else found


def _require_complete(info: Any, folder: str) -> None:
    """Raises ValueError if transformers' loading ``info`` has problems."""
    missing = sorted(info["missing_keys"])
    mismatched = sorted(str(each[0]) for each in info["mismatched_keys"])
    problems = [*info.get("error_msgs", ()), *map(str, dict(info.get("conversion_errors") or {}).values())]
    if missing:
        problems.append(f"weights are missing: {', '.join(missing[:5])}{' ...' if len(missing) > 5 else ''}")
    if mismatched:
        problems.append(f"weights have another shape than the configuration says: {', '.join(mismatched[:5])}")
    if problems:
        raise ValueError(f"{folder}: {'; '.join(problems)}")
