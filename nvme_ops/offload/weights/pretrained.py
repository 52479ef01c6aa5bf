"""``from_pretrained``: a transformers model whose weights stay in its safetensors files."""

from __future__ import annotations

import contextlib
import copy
import os
import re
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from nvme_ops.errors import naming
from nvme_ops.file import shared_handle
from nvme_ops.formats import safetensors_format
from nvme_ops.formats.quantized import KINDS, SCALES
from nvme_ops.formats.sharded_index import read_index
from nvme_ops.handle import aio_handle
from nvme_ops.offload.weights.source import WeightFile
from nvme_ops.offload.weights.stored import StoredTensor, Weights, stored_tensors
from nvme_ops.offload.weights.stream_weights import budget_of, device_of
from nvme_ops.offload.weights.streamed import stream
from nvme_ops.offload.weights.window import read_now
from nvme_ops.storage.publication import open_to_read

Path = str | os.PathLike[str]

_COMPARED = 16 << 20  # bytes of a weight that are compared at once
_FILE, _INDEX = "model.safetensors", "model.safetensors.index.json"
#: What transformers' ``from_pretrained`` takes to find a model.
_OPTIONS = ("revision", "token", "cache_dir", "local_files_only", "force_download", "proxies")

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

    Its files are used as they are and where they are: loading reads their headers alone. The model is what
    transformers' own ``from_pretrained`` returns, in eval mode, with ``stats()`` and ``close()``, and is a context
    manager. Its weights cannot be trained or changed.

    Args:
        path: a folder of ``save_pretrained``, or its safetensors files; the configuration lies beside them, unless
            ``config=`` gives it. Or a name on the Hugging Face Hub, found in its cache or downloaded as transformers
            does, with its ``revision``, ``token``, ``cache_dir``, ``local_files_only`` and ``subfolder``.
        memory_budget: bytes for weights, or a size such as ``"4G"``; memory of ``device``. What the model computes with
            comes on top of it, a key-value cache too.
        device: where it computes; the CPU when None.
        dtype: what it computes in; that of the files, as transformers chooses it, when None.
        model_class: of the model; the one that the configuration names when None.
        handle: reads the files; one for the whole process when None.
        kwargs: for transformers' ``from_pretrained``, such as ``config`` and ``attn_implementation``.

    Raises:
        ImportError: transformers is not installed.
        FileNotFoundError: no safetensors file, or no configuration.
        OSError: transformers' own, for a name: no such model, no access, or no connection and not in the cache.
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
    name = path if is_name(path) else ""
    options = {key: kwargs.pop(key) for key in _OPTIONS if key in kwargs}
    paths = weight_files(path, kwargs.pop("subfolder", ""), **options)
    folder = os.path.dirname(paths[0])
    config = kwargs.pop("config", None)
    if config is None:
        with naming("read of the configuration", folder):
            config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
    chosen: Any = model_class or _class_of(transformers, config)
    weights = Weights()
    with contextlib.ExitStack() as undo:
        files: list[WeightFile] = []
        state: dict[str, StoredTensor] = {}
        for each in paths:
            files.append(WeightFile(open_to_read(each), each, handle or shared_handle()))
            undo.callback(files[-1].close)
            header = safetensors_format.read(files[-1].file.fileno(), files[-1].path)
            state.update(stored_tensors(files[-1], header, weights, target))
        state = _with_scales(state, dtype if isinstance(dtype, torch.dtype) else _dtype_of(config))
        if any(each._scale is not None for each in state.values()):
            config = copy.deepcopy(config)
            if hasattr(config, "quantization_config"):
                del config.quantization_config  # or transformers would look for kernels of its own
        if "experts_implementation" not in kwargs:
            kwargs["experts_implementation"] = "eager"  # which takes the experts that are asked for alone
        with _Tying():
            model, info = chosen.from_pretrained(
                None, config=config, state_dict=state, dtype=dtype or "auto", output_loading_info=True, **kwargs
            )
        _require_complete(info, folder)
        model.name_or_path = model.config.name_or_path = name or folder  # which adapters are saved with
        with contextlib.suppress(OSError):  # where there is none
            if model.can_generate():
                model.generation_config = transformers.GenerationConfig.from_pretrained(folder, local_files_only=True)
        for module in model.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None and not isinstance(buffer, StoredTensor):
                    module._buffers[name] = buffer.to(target)
        stream(model, weights, files, budget, target)
        undo.pop_all()
    return model


def weight_files(path: Path | Sequence[Path], subfolder: str = "", **options: Any) -> list[str]:
    """Returns the safetensors files of a model, which is downloaded if need be. Raises OSError."""
    if not isinstance(path, str | os.PathLike):
        return [os.path.abspath(each) for each in path]
    if is_name(path):
        folder = _local_folder(str(path), subfolder, **options)
    else:
        folder = os.path.abspath(os.path.join(path, subfolder) if subfolder else path)
    if not os.path.isdir(folder):
        os.stat(folder)  # says that it does not exist
        return [folder]
    index = os.path.join(folder, _INDEX)
    if os.path.exists(index):
        return sorted(read_index(index).shards(read_index(index).places))
    single = os.path.join(folder, _FILE)
    if os.path.exists(single):
        return [single]
    raise FileNotFoundError(
        f"{folder} has neither {_FILE} nor {_INDEX}; nvme-checkpoint convert {folder} {folder} makes them of .bin files"
    )


def is_name(path: Any) -> bool:
    """Returns whether it is no file or folder, and may be a name: ``"org/name"``."""
    return isinstance(path, str) and not os.path.exists(path) and _NAME.fullmatch(path) is not None


def _local_folder(name: str, subfolder: str = "", **options: Any) -> str:
    """Returns the folder of the cache that has configuration and safetensors files of a model, all of one commit.

    Args:
        name: of the model: ``"org/name"``.
        subfolder: of the model's files.
        options: some of ``_OPTIONS``.

    Raises:
        OSError: transformers' own: no such model or revision, no access, or no connection and not in the cache.
        FileNotFoundError: it has no safetensors files.
    """
    from transformers.utils import cached_file
    from transformers.utils.hub import extract_commit_hash, get_checkpoint_shard_files

    options["subfolder"] = subfolder

    def find(file: str, **how: Any) -> str | None:
        found: str | None = cached_file(name, file, **how, **options)
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


def _with_scales(state: dict[str, StoredTensor], dtype: torch.dtype) -> dict[str, StoredTensor]:
    """Joins weights of 8 bits with their scales, which come into memory."""
    scales: dict[str, tuple[str, float]] = {}
    for name, each in state.items():
        module, _, last = name.rpartition(".")
        weight = f"{module}.weight"
        if last in SCALES and weight in state and state[weight].dtype in KINDS and each is not state[weight]:
            scales[weight] = name, SCALES[last]
    values = read_now([state[name].source for name, _ in scales.values()])
    found = {name: each for name, each in state.items() if name not in {scale for scale, _ in scales.values()}}
    for (weight, (_, factor)), scale in zip(scales.items(), values, strict=True):
        stored = state[weight]
        found[weight] = StoredTensor(stored._weights, stored.source, dtype, stored.device, scale=scale.float() * factor)
    return found


class _Tying(TorchFunctionMode):
    """Does what transformers does to weights to tie them, without a window, and without whole weights in memory.

    Where a file has both names of a tied weight the two are compared. The bias beside one of them is padded to its
    rows, most often by nothing, and put back.
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
    """Like ``torch.equal``, a part after the other. One with a scale, or transposed, is read as a whole."""
    if one.shape != other.shape or one.source is other.source:
        return one.shape == other.shape
    if one.dim() == 0 or not (one.is_plain() and other.is_plain()):
        return torch.equal(one.to_memory(), other.to_memory())
    rows = max(1, _COMPARED * one.shape[0] // max(1, one.nbytes))
    return all(
        torch.equal(part.to_memory(), its.to_memory())
        for part, its in zip(_in_parts(one, rows), _in_parts(other, rows), strict=True)
    )


def _in_parts(tensor: StoredTensor, rows: int) -> Iterator[StoredTensor]:
    for start in range(0, tensor.shape[0], rows):
        yield tensor.like(tensor.source.rows(start, min(start + rows, tensor.shape[0])))


def _dtype_of(config: Any) -> torch.dtype:
    found = getattr(config, "dtype", None)
    return found if isinstance(found, torch.dtype) else torch.bfloat16


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
    missing = sorted(info["missing_keys"])
    other = sorted(str(each[0]) for each in info["mismatched_keys"])
    problems = [
        *info.get("error_msgs", ()),
        *(str(each) for each in dict(info.get("conversion_errors") or {}).values()),
    ]
    if missing:
        problems.append(f"weights are missing: {', '.join(missing[:5])}{' ...' if len(missing) > 5 else ''}")
    if other:
        problems.append(f"weights have another shape than the configuration says: {', '.join(other[:5])}")
    if problems:
        raise ValueError(f"{folder}: {'; '.join(problems)}")
