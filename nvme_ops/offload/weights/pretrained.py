"""``from_pretrained``: a transformers model whose weights stay in its safetensors files."""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch.overrides import TorchFunctionMode

from nvme_ops.base.errors import naming
from nvme_ops.base.lifetime import forkable_lock
from nvme_ops.filesystem.publication import open_leased
from nvme_ops.formats import gguf, safetensors_format
from nvme_ops.formats.quantized import KINDS, part_of
from nvme_ops.io.arguments import require_switches
from nvme_ops.io.file import handle_of
from nvme_ops.io.handle import aio_handle
from nvme_ops.io.tensors import collector_paused
from nvme_ops.offload.budgets import budgets_of
from nvme_ops.offload.memory import Memory
from nvme_ops.offload.weights.gguf_model import dtype_of, gguf_weights, scale_frequencies
from nvme_ops.offload.weights.model_files import HUB_OPTIONS, Path, is_hub_name, weight_files
from nvme_ops.offload.weights.stacked import Stacked, with_stacked
from nvme_ops.offload.weights.stored import StoredTensor, Weights, sources_in, stored_in
from nvme_ops.offload.weights.stored_formats import (
    format_words,
    quantization_of,
    require_expanded,
    require_understood,
    with_packed,
    with_scales,
    with_usual_names,
)
from nvme_ops.offload.weights.stream_weights import device_of
from nvme_ops.offload.weights.streamed import stream
from nvme_ops.storage.source import Source, WeightFile

if TYPE_CHECKING:
    from nvme_ops.offload.weights.streamed import Streamed

#: Transformers replaces methods of its own while it makes a model: two threads at once would leave them replaced.
_loading = forkable_lock()
_COMPARED = 16 << 20  # bytes of two weights that are compared at once, each

#: Arguments of transformers' ``from_pretrained`` that are refused, with the values at which they change nothing.
_REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "state_dict": ((None,), "the weights are those of the files; stream_weights streams a model that is in memory"),
    "use_safetensors": ((None, True), "other files cannot be read in place: nvme-checkpoint convert makes safetensors"),
    "quantization_config": (
        (None,),
        "weights are read as they are stored; stream_weights(model, folder, quantize='mxfp4') quantizes them",
    ),
    **dict.fromkeys(
        ("exclude", "quantize"), ((None, ()), "is an argument of stream_weights(model, folder), for a model in memory")
    ),
    **dict.fromkeys(
        ("device_map", "offload_folder", "offload_buffers"),
        (
            (None, False),
            "a streamed model computes on one device=, with its weights in device_budget, host_budget and its files",
        ),
    ),
    **dict.fromkeys(
        ("adapter_kwargs", "adapter_name"),
        (
            (None, {}, "default"),
            "load adapters onto the streamed model, by peft.PeftModel.from_pretrained(model, folder)",
        ),
    ),
}
_IMPLEMENTATIONS = ("attn_implementation", "experts_implementation")
_INTERNAL = ("_from_auto", "_from_pipeline", "_commit_hash")  # given by transformers' own callers
_CODE_OPTIONS = ("trust_remote_code", "code_revision")  # of custom code beside the files


@collector_paused
def from_pretrained(
    path: Path | Sequence[Path],
    *,
    device_budget: int | str | None = None,
    host_budget: int | str | None = None,
    max_memory: Mapping[int | str, int | str] | None = None,
    memory_budget: int | str | None = None,
    memory: Memory | None = None,
    device: str | torch.device | None = None,
    compute_on_host: bool = False,
    dtype: torch.dtype | str | None = None,
    model_class: type[Any] | None = None,
    handle: aio_handle | None = None,
    **kwargs: Any,
) -> Streamed:
    """Returns a transformers model that reads its weights while it computes, in bounded memory.

        model = nvme_ops.offload.from_pretrained("mistralai/Mixtral-8x7B-v0.1", memory_budget="16G")
        model.generate(**inputs)

    The files stay as and where they are; loading reads only their headers. The model is the one that transformers' own
    ``from_pretrained`` returns, in eval mode, with ``stats()`` and ``close()``, and is a context manager. Its weights
    cannot be trained or changed.

    Args:
        path: a folder of ``save_pretrained``, or its safetensors files, with the configuration beside them unless
            ``config=`` gives it. Or a name on the Hugging Face Hub, found in its cache or downloaded as transformers
            does, with its ``revision``, ``token``, ``cache_dir``, ``local_files_only``, ``subfolder`` and ``variant``.
            Or a GGUF file, the first if there are several; ``gguf_file=`` names one in a folder or on the Hub.
        device_budget: bytes for weights on an accelerator, or a size such as ``"4G"``; ``"auto"``, the default there,
            is what is free less an eighth. Intermediate results and a key-value
            cache come on top of it.
        host_budget: bytes of page-locked host memory for weights that do not stay on an accelerator, and come from
            there faster than from storage; ``"auto"``, the default there, is what is free less an eighth, ``0`` none.
            On the CPU, the memory for weights.
        memory_budget: another word for the budget of where the model computes.
        max_memory: both as accelerate takes them: ``{0: "20GiB", "cpu": "60GiB"}``.
        memory: in place of a budget of its own, one that is shared with others.
        device: where the model computes; when None the current GPU, or the CPU where there is none.
        compute_on_host: let the CPU compute with experts of few tokens in host memory where that is measured to take
            less time than copying them; values are then those of the CPU's operations, close to the accelerator's. For
            experts that are packed, in the dtype that is computed in.
        dtype: in which it computes; that of the files, as transformers chooses it, when None.
        model_class: the class of the model, or an Auto class; the one that the configuration names when None. Layers
            of another class that the files do not have, such as a head for ``num_labels=`` classes, are initialized
            as transformers does; they stay in memory, beside the budget, and can be trained.
        handle: reads the files; one for the whole process when None.
        kwargs: for transformers' ``from_pretrained``, such as ``config``, ``attn_implementation``,
            ``trust_remote_code`` and fields of the configuration.

    Raises:
        ImportError: transformers is not installed, or for GGUF files gguf.
        FileNotFoundError: there is no safetensors file, or no configuration.
        OSError: from transformers, for a name: no such model, no access, or no connection and not in the cache.
        FormatError: a file is damaged.
        ValueError: the budget is too small (the message says what is needed), weights are missing, of another shape
            than the configuration says or in an unknown format, or an argument is one that cannot be obeyed.
    """
    try:
        import transformers
    except ImportError as error:
        words = "nvme_ops.offload.from_pretrained needs transformers: pip install 'transformers>=5'"
        raise ImportError(words) from error
    target = device_of(device)
    require_switches(compute_on_host=compute_on_host)
    budgets = budgets_of(target, memory_budget, memory, device_budget, host_budget, max_memory)
    if not isinstance(path, str | os.PathLike | Sequence):
        raise TypeError(f"path must be a folder, files or a name on the Hub, not {type(path).__name__}")
    if not isinstance(path, str | os.PathLike) and not path:
        raise ValueError("path must name at least one file")
    if model_class is not None and not (hasattr(model_class, "config_class") or hasattr(model_class, "_model_mapping")):
        words = model_class.__name__ if isinstance(model_class, type) else repr(model_class)
        raise TypeError(f"model_class must be a class of transformers' models, not {words}")
    for argument, (neutral, words) in _REFUSED.items():
        value = kwargs.pop(argument, None)
        if value not in neutral and not getattr(value, "dequantize", False):  # which is done anyway
            raise ValueError(f"{argument}={value!r}: {words}")
    dtype = _dtype_of(kwargs.pop("torch_dtype", None) if dtype is None else dtype)
    own = {key: kwargs[key] for key in _IMPLEMENTATIONS if key in kwargs}
    own.setdefault("experts_implementation", "eager")  # it computes with the selected experts alone
    allows_mismatch = bool(kwargs.pop("ignore_mismatched_sizes", False))
    wants_info = kwargs.pop("output_loading_info", False)
    origin = _origin_of(path, kwargs)
    weights = Weights(budgets.nbytes, budgets.name)
    with contextlib.ExitStack() as undo:
        files: list[WeightFile] = []
        sources: dict[str, Source] = {}
        headers: list[gguf.GgufHeader] = []
        for shard in origin.paths:
            files.append(WeightFile(open_leased(shard), shard, handle_of(handle)))
            undo.callback(files[-1].close)
            if origin.gguf:
                headers.append(gguf.read(files[-1].file.fileno(), files[-1].path))
            else:
                header = safetensors_format.read(files[-1].file.fileno(), files[-1].path)
                sources.update(sources_in(files[-1], header))
        config, rest = _configured(transformers, origin, model_class, kwargs)
        config, settings = quantization_of(config)
        chosen: Any = _class_of(transformers, config, model_class, origin, kwargs)
        if not isinstance(config, kind := chosen.config_class or object) and isinstance(config.get_text_config(), kind):
            config = config.get_text_config()  # the model is a part of what the files are of
        sources = with_usual_names(sources)
        usual = dtype_of(headers) if headers else _dtype_in(sources)
        own["dtype"] = computed = dtype or getattr(config, "dtype", None) or usual
        expanded: Any = computed
        if isinstance(computed, dict):  # by part of the model
            expanded = _dtype_of(computed.get("")) or torch.get_default_dtype()
        state: dict[str, Any]
        factors = None
        if headers:
            if any("output.weight" in header.tensors for header in headers):  # of which transformers sees one alone
                config.tie_word_embeddings = False
            state, factors = gguf_weights(files, headers, weights, target, _blank(chosen, config, rest), expanded)
        else:
            joined = with_scales(with_packed(sources, settings), settings)
            require_understood(joined, sources, settings)
            stacked = set[str]()
            if not rest.get("key_mapping"):  # which may rename some experts alone
                joined, stacked = with_stacked(joined, functools.partial(_blank, chosen, config, rest))
            state = {
                name: StoredTensor(weights, source, expanded if form is not None else None, target, form)
                for name, (source, form) in joined.items()
            }
            state |= {name: Stacked(state[name]) for name in stacked}
        model, info = _assembled(chosen, config, state, weights, origin.folder, **own, **rest)
        named = () if model_class is None else config.architectures or ()
        new = _require_complete(info, model, origin.folder, named, allows_mismatch, settings)
        require_expanded(model, settings)
        if factors is not None:
            scale_frequencies(model, factors)
        for module in model.modules():  # adapters are saved with this name
            if getattr(module, "name_or_path", None) == str(None):  # made of this configuration, or of a copy
                module.name_or_path = module.config.name_or_path = origin.name or origin.folder
        if "generation_config" not in rest:
            _configure_generation(model, origin, {key: value for key, value in kwargs.items() if key not in rest})
        for module in model.modules():
            for key, buffer in module._buffers.items():
                if buffer is not None and not isinstance(buffer, StoredTensor):
                    module._buffers[key] = buffer.to(target)
        for parameter in model.parameters():
            if stored_in(parameter) is None:
                parameter.data = parameter.data.to(target)
        kept = {id(weight) for key, weight in model.named_parameters(remove_duplicate=False) if key in new}
        stream(model, weights, files, budgets, target, kept, compute_on_host=compute_on_host)
        undo.pop_all()
    return cast("Streamed", (model, info) if wants_info else model)


def outline(folder: Path, state: Mapping[str, StoredTensor], weights: Weights) -> Any:
    """Returns a model of transformers with the tensors of its files in place, of which hardly anything is read.

    Args:
        folder: has the configuration.
        state: the tensors by the names that they have in the files.
        weights: through which these are read; nothing may be computed with them yet.

    Raises:
        ImportError: transformers is not installed.
        OSError: there is no configuration.
        ValueError: the model is quantized already, weights are missing, or transformers does not know the model.
    """
    try:
        import transformers
    except ImportError as error:
        raise ImportError("it takes transformers to know the model: pip install 'transformers>=5'") from error
    origin = _Origin([], os.path.abspath(folder), "", {}, {"local_files_only": True})
    config, settings = quantization_of(_configured(transformers, origin, None, {})[0])
    narrow = next((name for name, tensor in state.items() if tensor.dtype in KINDS), None)
    if settings or narrow is not None:
        words = f"{narrow} is stored as {state[narrow].dtype}" if narrow is not None else "so its configuration says"
        raise ValueError(f"{folder} is quantized already: {words}{format_words(settings)}")
    chosen = _class_of(transformers, config, None, origin, {})
    dtype = getattr(config, "dtype", None) or _dtype_in(state)
    model, info = _assembled(chosen, config, state, weights, origin.folder, dtype=dtype, experts_implementation="eager")
    _require_complete(info, model, origin.folder, (), False, settings)
    return model


def _blank(chosen: Any, config: Any, options: Mapping[str, Any]) -> Any:
    """Returns a model without values, made with those options that its class takes by name."""
    from transformers import initialization

    named = inspect.signature(chosen.__init__).parameters
    as_loaded: Any = getattr(initialization, "meta_device_safe_creation_ops", contextlib.nullcontext)
    with _loading, torch.device("meta"), as_loaded():
        return chosen(copy.deepcopy(config), **{key: value for key, value in options.items() if key in named})


def _assembled(
    chosen: Any, config: Any, state: Mapping[str, StoredTensor], weights: Weights, folder: str, **options: Any
) -> tuple[Any, Any]:
    """Returns a model with these tensors, and what transformers says about those that are missing or do not fit."""
    options |= {"output_loading_info": True, "ignore_mismatched_sizes": True}  # which is refused later
    before = torch.is_grad_enabled()
    try:
        with _loading, _Tying():
            made: tuple[Any, Any] = chosen.from_pretrained(None, config=config, state_dict=state, **options)
    except (RuntimeError, MemoryError) as error:  # transformers may only say that it has logged what it was
        if weights.early > weights.budget:
            raise ValueError(f"{folder}: {weights.too_early}") from error
        raise
    finally:  # transformers turns gradients on again by a call that comes through the mode, where Ctrl-C can end it
        torch._C._set_grad_enabled(before)
    return made


class _Origin(NamedTuple):
    """Where a model's files are."""

    paths: list[str]
    folder: str  # of the first file
    name: str  # on the Hub, or ""
    hub: dict[str, Any]  # given options of the Hub
    options: dict[str, Any]  # those with which the rest is found, in the same commit
    gguf: str = ""  # name of the first file, if they are GGUF files

    @property
    def repository(self) -> str:
        """Where transformers finds the rest."""
        return self.name or self.folder


def _origin_of(path: Path | Sequence[Path], kwargs: dict[str, Any]) -> _Origin:
    """Returns where the files are, after downloading them if need be, and takes the options for that."""
    from transformers.utils.hub import extract_commit_hash

    hub = {key: kwargs.pop(key) for key in HUB_OPTIONS if key in kwargs}
    subfolder, variant = kwargs.pop("subfolder", ""), kwargs.pop("variant", None)
    bars = {"tqdm_class": kwargs.pop("tqdm_class")} if "tqdm_class" in kwargs else {}
    gguf_file = kwargs.pop("gguf_file", None)
    paths = weight_files(path, subfolder, variant, gguf_file, **hub, **bars)
    options: dict[str, Any] = {"local_files_only": True}
    name = str(path) if is_hub_name(path) else ""
    if name:
        options = {**hub, "subfolder": subfolder, "revision": extract_commit_hash(paths[0], hub.get("revision"))}
    is_gguf = gguf_file is not None or paths[0].endswith(".gguf")
    file = gguf_file if name else os.path.basename(paths[0])
    return _Origin(paths, os.path.dirname(paths[0]), name, hub, options, file if is_gguf else "")


def _configure_generation(model: Any, origin: _Origin, fields: dict[str, Any]) -> None:
    """Sets ``generation_config`` as transformers does, by the model's files and ``fields`` of the configuration."""
    if not model.can_generate() or not hasattr(model, "adjust_generation_fn"):
        return
    others = (*_INTERNAL, *_IMPLEMENTATIONS, "code_revision")
    fields = {key: value for key, value in fields.items() if key not in others}
    options = {**dict.fromkeys((*HUB_OPTIONS, "trust_remote_code")), "subfolder": "", **origin.options, **fields}
    with contextlib.suppress(OSError, TypeError):  # there is none; nor a configuration, beside a GGUF file
        model.adjust_generation_fn(None, False, None, origin.repository, **options)


def _dtype_of(dtype: Any) -> Any:
    """Returns a dtype that was given as such or as text, or None for "auto". Raises ValueError for anything else."""
    resolved = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if dtype in (None, "auto"):
        return None
    if not isinstance(resolved, torch.dtype | dict):
        raise ValueError(f"dtype must be a torch.dtype, its name or 'auto', not {dtype!r}")
    return resolved


def _dtype_in(state: Mapping[str, StoredTensor | Source]) -> torch.dtype:
    """Returns the first dtype of files that a model can have, as transformers does."""
    dtypes = (tensor.dtype for name, tensor in state.items() if not part_of(name)[0])
    return next((dtype for dtype in dtypes if dtype.is_floating_point and dtype.itemsize > 1), torch.bfloat16)


class _Tying(TorchFunctionMode):
    """Handles operations by which transformers ties weights: there is no window yet, and weights may be large.

    If a file has both names of a tied weight, transformers compares the two. It also pads a bias to as many elements as
    the tied weight has rows, most often by none. Some classes set a part of a weight whenever they are loaded, such as
    the row of an embedding that is for padding.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if args and isinstance(args[0], StoredTensor):
            other = args[1] if len(args) > 1 else None
            if func is torch.equal and isinstance(other, StoredTensor):
                return _equal(args[0], other)
            if func is torch.nn.functional.pad and other is not None and not any(other):
                return args[0]
            if func is torch.Tensor.zero_ and args[0].dim() < 2:
                return _require_equal(args[0], 0)
            if func is torch.Tensor.__setitem__ and (part := args[0][other]).dim() < 2:
                return _require_equal(part, args[2])
        return func(*args, **(kwargs or {}))


def _require_equal(part: Any, value: Any) -> Any:
    """Returns a part of a weight that is to become ``value``. Raises RuntimeError if it has other values."""
    if not bool((part.to_memory() == value).all()):
        raise RuntimeError(
            "transformers changes a part of a weight whenever it loads this model, but the files have other values: "
            "load it by transformers and save it by save_pretrained, once"
        )
    return part


def _equal(one: StoredTensor, other: StoredTensor) -> bool:
    """Compares as ``torch.equal`` does, part by part. Weights with a scale or steps are read as a whole."""
    if one.shape != other.shape or one.source is other.source:
        return one.shape == other.shape
    if one.dim() == 0 or not (one.is_plain() and other.is_plain()):
        return torch.equal(one.to_memory(), other.to_memory())
    rows = max(1, _COMPARED * one.shape[0] // max(1, one.nbytes))
    ranges = [(start, min(start + rows, one.shape[0])) for start in range(0, one.shape[0], rows)]
    return all(
        torch.equal(*(side.like(side.source.rows(*part)).to_memory() for side in (one, other))) for part in ranges
    )


def _configured(
    transformers: Any, origin: _Origin, model_class: Any, kwargs: dict[str, Any]
) -> tuple[Any, dict[str, Any]]:
    """Returns the configuration, with those of the keywords that are its fields, and the others."""
    config = kwargs.pop("config", None)
    rest = {key: value for key, value in kwargs.items() if key not in (*_CODE_OPTIONS, *_IMPLEMENTATIONS)}
    if isinstance(config, transformers.PreTrainedConfig):
        return config, rest  # all are for the model, as in transformers
    is_auto = model_class is None or hasattr(model_class, "_model_mapping")
    kind = (None if is_auto else model_class.config_class) or transformers.AutoConfig
    place, options = (origin.repository, origin.options) if config is None else (config, origin.hub)
    with naming("read of the configuration", origin.folder):
        try:
            fields = {key: value for key, value in kwargs.items() if is_auto or key not in _CODE_OPTIONS}
            if origin.gguf and config is None:
                fields["gguf_file"] = origin.gguf
            config, unused = kind.from_pretrained(place, return_unused_kwargs=True, **options, **fields)
        except (AttributeError, TypeError) as error:  # a field of another kind
            raise ValueError(f"{place}: transformers cannot read the configuration: {error}") from error
    return config, {key: value for key, value in unused.items() if key in rest}


def _class_of(transformers: Any, config: Any, given: Any, origin: _Origin, code: dict[str, Any]) -> Any:
    """Returns the class of the model: the given one, or that which an Auto class chooses or the configuration names."""
    if given is not None and not hasattr(given, "_model_mapping"):
        return given
    from transformers.dynamic_module_utils import get_class_from_dynamic_module, resolve_trust_remote_code
    from transformers.models.auto import auto_factory as factory

    auto: Any = factory
    names, custom = config.architectures or (), getattr(config, "auto_map", None) or {}
    mapping = (given or transformers.AutoModelForCausalLM)._model_mapping
    chosen = None
    if given is None:
        chosen = next((getattr(transformers, name) for name in names if hasattr(transformers, name)), None)
        # in custom code, the entry that has a class of this name
        ends = {str(entry).rpartition(".")[2]: key for key, entry in custom.items() if key.startswith("AutoModel")}
        key = next((ends[name] for name in names if name in ends), "AutoModelForCausalLM")
    else:
        key = given.__name__
    if chosen is None and type(config) in mapping:
        chosen = auto._get_model_class(config, mapping)
    if key in custom and (chosen is None or chosen.__module__.startswith("transformers.")):
        trusted: Any = resolve_trust_remote_code
        if trusted(code.get("trust_remote_code"), origin.repository, chosen is not None, True):
            load: Any = get_class_from_dynamic_module
            chosen = load(custom[key], origin.repository, code_revision=code.get("code_revision"), **origin.options)
            chosen = auto.add_generation_mixin_to_remote_model(chosen)
    if chosen is None:
        raise ValueError(
            f"the configuration, a {type(config).__name__}, names no class that transformers has: give model_class="
        )
    return chosen


def _require_complete(
    info: Any, model: Any, folder: str, named: Sequence[str], mismatch: bool, settings: dict[str, Any]
) -> set[str]:
    """Returns the names of weights that transformers has initialized, since the files do not have them.

    These are layers of a model of another class than the files are of, as ``named`` in their configuration: a head that
    is to be trained. With ``mismatch`` also weights of another shape. Raises ValueError for others that are missing.
    """
    missing, mismatched = sorted(info["missing_keys"]), sorted(str(entry[0]) for entry in info["mismatched_keys"])
    new = set(mismatched if mismatch else ())
    if named and type(model).__name__ not in named:
        loaded = model.state_dict().keys() - set(missing)
        new |= {name for name in missing if _is_new(model, name, loaded)}
    problems = [*info.get("error_msgs", ()), *map(str, dict(info.get("conversion_errors") or {}).values())]
    for words, names in (
        ("weights are missing", missing),
        ("weights have another shape than the configuration says (ignore_mismatched_sizes=True?)", mismatched),
    ):
        if wrong := [name for name in names if name not in new]:
            problems.append(f"{words}: {', '.join(wrong[:5])}{' ...' if len(wrong) > 5 else ''}")
    if problems:
        raise ValueError(f"{folder}: {'; '.join(problems)}{format_words(settings)}")
    return new


def _is_new(model: Any, name: str, loaded: Iterable[str]) -> bool:
    """Returns whether the files have nothing of the child of the model, or of its base model, that has this weight."""
    base = next((f"{key}." for key, module in model.named_children() if module is model.base_model), "")
    if not name.startswith(base):
        base = ""
    elif re.search(r"\.\d+\.", name):
        return False  # one of its layers
    child = base + name[len(base) :].partition(".")[0]
    return not any(key.startswith(f"{child}.") for key in loaded)
