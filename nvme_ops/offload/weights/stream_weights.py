"""``stream_weights``: moves the weights of a model in memory to files, and reads them while it computes."""

from __future__ import annotations

import contextlib
import fnmatch
import os
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch

from nvme_ops.filesystem.publication import open_to_read
from nvme_ops.formats import KINDS, Kind
from nvme_ops.formats.quantizing import QuantizationError, packed_as
from nvme_ops.io.arguments import require_switches
from nvme_ops.io.engine import Priority
from nvme_ops.io.file import handle_of
from nvme_ops.io.future import InFlight, IoFuture
from nvme_ops.io.handle import aio_handle
from nvme_ops.io.tensors import is_dense
from nvme_ops.lazy.offloaded import Step, outline_of
from nvme_ops.offload.budgets import budgets_of
from nvme_ops.offload.memory import Memory
from nvme_ops.offload.weights.stored import StoredTensor, Weights
from nvme_ops.offload.weights.streamed import StreamedModel, stream
from nvme_ops.storage.session import Session
from nvme_ops.storage.source import FileExtent, Source, WeightFile
from nvme_ops.storage.store import to_store
from nvme_ops.storage.striped import StripedSlabs

if TYPE_CHECKING:
    from nvme_ops.offload.weights.streamed import Streamed

_WRITES = 8  # transfers of weights that are being written at once
_MIN = 1 << 16  # elements of the smallest matrix that is quantized

Path = str | os.PathLike[str]


def stream_weights(
    model: torch.nn.Module,
    folder: Path | Sequence[Path],
    *,
    device_budget: int | str | None = None,
    host_budget: int | str | None = None,
    memory_budget: int | str | None = None,
    memory: Memory | None = None,
    device: str | torch.device | None = None,
    compute_on_host: bool = False,
    exclude: str | Sequence[str] = (),
    quantize: Kind | None = None,
    handle: aio_handle | None = None,
) -> Streamed:
    """Moves the weights of a model to storage and reads them, in bounded memory, while it computes.

        model = nvme_ops.offload.stream_weights(model, "/mnt/nvme", memory_budget="4G")

    The same model is returned, in eval mode, with ``stats()`` and ``close()``, and is a context manager. The files are
    removed when it is closed, at the latest when the program ends. If anything fails, the model is as it was. They are
    of this process alone, whatever the folder: to have one copy in several, save the model and use ``from_pretrained``.

    Streamed weights take no gradient. If most of the parameters, by bytes, take none already, as after
    ``peft.get_peft_model``, the others stay as they are, in memory and trainable, and the model stays in its mode. A
    model that is trained as a whole is streamed as a whole.

    Args:
        model: any module. Its parameters and buffers are in memory, on one device.
        folder: where the weights go; several folders, one on each device, share them by their measured rates.
        device_budget: bytes for weights on an accelerator, or a size such as ``"4G"``; ``"auto"``, the default there,
            is what is free less an eighth. Inputs, outputs and intermediate results
            come on top of it.
        host_budget: bytes of page-locked host memory for weights that do not stay on an accelerator, and come from
            there faster than from storage; ``"auto"``, the default there, is what is free less an eighth, ``0`` none.
            On the CPU, the memory for weights.
        memory_budget: another word for the budget of where the model computes.
        memory: in place of a budget of its own, one that is shared with others.
        device: where the model computes; where it is now when None.
        compute_on_host: let the CPU compute with experts of few tokens in host memory where that is measured to take
            less time than copying them; values are then those of the CPU's operations, close to the accelerator's. For
            experts that are packed, in the dtype that is computed in.
        exclude: names of parameters and buffers that stay as they are, in memory, or patterns such as ``"lm_head.*"``
            (``fnmatch``). They come on top of the budget, as do parameters that are trained. A tied weight stays if any
            of its names is among them.
        quantize: stores matrices in fewer bits, and expands them when they are used: a model that waits for storage
            gains. ``"int8"``, half the bytes of bfloat16, has a scale for each row, and each value is off by up to
            1/254 of the largest in its row. ``"int4"`` and ``"mxfp4"``, little more than a quarter, have one for each
            32 of a row, of which the number must be a multiple; the head stays as it is then. So do embeddings, vectors
            and small matrices always. ``stats().quantization_error`` has the relative error.
        handle: moves the weights; one for the whole process when None.

    Raises:
        ValueError: the budget is too small (the message says what is needed), the model is on several devices or has no
            weights, it is streamed already, ``exclude`` names nothing, or torch's quantization has packed its weights.
        OSError: the folder cannot be used; ENOSPC: it has not enough room.
    """
    if quantize not in (None, *KINDS):
        raise ValueError(f"quantize must be None or {', '.join(map(repr, KINDS))}, not {quantize!r}")
    require_switches(compute_on_host=compute_on_host)
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, not {type(model).__name__}")
    if any(isinstance(module, StreamedModel) for module in model.modules()):
        raise ValueError("the weights of this model are streamed already")
    kept, training = _kept(model, [exclude] if isinstance(exclude, str) else exclude)
    tensors = {id(tensor): tensor for tensor in [*model.parameters(), *model.buffers()]}
    if not tensors:
        raise ValueError("the model has no weights")
    own = device_of_all(tensors.values(), "the model is")
    if own.type == "meta":
        raise ValueError("the model has no weights: it is on the meta device")
    target = own if device is None else device_of(device)
    budgets = budgets_of(target, memory_budget, memory, device_budget, host_budget)
    tensors = {key: tensor for key, tensor in tensors.items() if key not in kept}
    if not tensors:
        raise ValueError("exclude= leaves nothing to stream")
    with contextlib.ExitStack() as undo:
        session = undo.enter_context(Session(folder, name="weights"))
        slabs = StripedSlabs(session, "weights", handle_of(handle), None)
        undo.callback(slabs.close)
        slabs.measure()
        files = []
        for path, its_handle in zip(slabs.paths, slabs.handles, strict=True):
            fd = open_to_read(path)
            files.append(WeightFile(fd, path, its_handle, checked=False))
            undo.callback(files[-1].close)
        weights = Weights()
        matrices = dict.fromkeys(quantizable(model, quantize), quantize) if quantize else {}
        stored, error = _write(slabs, files, tensors, matrices, weights, target)
        with _restored(model) as before:
            before.callback(_move, kept, own)
            _replace(model, stored)
            choose: Any = getattr(model, "set_experts_implementation", None)
            if choose is not None:
                choose("eager")  # it computes with the selected experts alone
            _move(kept, target)
            stream(model, weights, files, budgets, target, kept, training, compute_on_host)
            before.pop_all()
        opened = undo.pop_all()
    streamed = cast("Streamed", model)
    streamed.on_close(opened.close)
    streamed._nvme_window.note_error(error)
    return streamed


def _move(tensors: dict[int, torch.Tensor], device: torch.device) -> None:
    """Moves tensors in place: an optimizer may refer to these objects already."""
    for old in tensors.values():
        if old.device != device:
            gradient, old.grad = old.grad, None
            moved = old.detach().to(device)
            if torch._has_compatible_shallow_copy_type(old, moved):
                old.data = moved
            else:  # devices that are not part of torch
                is_parameter = isinstance(old, torch.nn.Parameter)
                torch.utils.swap_tensors(old, torch.nn.Parameter(moved, old.requires_grad) if is_parameter else moved)
            old.grad = None if gradient is None else gradient.to(device)


def device_of_all(tensors: Iterable[torch.Tensor], they_are: str) -> torch.device:
    """Returns the device of tensors, by default the CPU. Raises ValueError, begun by ``they_are``, for several."""
    devices = {tensor.device for tensor in tensors}
    if len(devices) > 1:
        raise ValueError(f"{they_are} on {len(devices)} devices, not on one: {', '.join(sorted(map(str, devices)))}")
    return next(iter(devices), torch.device("cpu"))


def device_of(device: str | torch.device | None) -> torch.device:
    """Returns a device with its index, as tensors have it; for None the current GPU, or the CPU where there is none."""
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.empty(0, device=device).device


def _kept(model: torch.nn.Module, exclude: Sequence[str]) -> tuple[dict[int, torch.Tensor], bool]:
    """Returns the tensors that stay in memory, by id, and whether some of these are trained."""
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    packed = _packed(model)
    for pattern in exclude:
        if not fnmatch.filter([*packed, *(name for name, _ in named)], pattern):
            raise ValueError(f"exclude: the model has no parameter or buffer {pattern!r}")
    if left := [name for name in packed if not _matches(name, exclude)]:
        raise ValueError(
            f"torch's quantization has packed the weights of this model ({left[0]}), which cannot be streamed then: "
            "stream the model that it was made of, with quantize='int8', or exclude= them"
        )
    kept = {id(tensor): tensor for name, tensor in named if _matches(name, exclude)}
    trained = {id(tensor): tensor for tensor in model.parameters() if tensor.requires_grad and id(tensor) not in kept}
    frozen = [tensor for tensor in model.parameters() if not tensor.requires_grad]
    training = 0 < sum(tensor.nbytes for tensor in trained.values()) < sum(tensor.nbytes for tensor in frozen)
    if training:
        kept |= trained
    elif trained and frozen:
        warnings.warn(
            f"{len(trained)} parameters require a gradient, {len(frozen)} do not, and all are frozen, since the first "
            "are the larger part: name in exclude= what is to be trained, or call requires_grad_(False)",
            stacklevel=3,
        )
    if kept:  # and tensors in the same memory, which change with them
        memory = {tensor.untyped_storage()._cdata for tensor in kept.values()}
        kept |= {id(tensor): tensor for _, tensor in named if tensor.untyped_storage()._cdata in memory}
    return kept, training


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def _packed(model: torch.nn.Module) -> list[str]:
    """Returns the names of packed weights, which are no tensors of their modules and would stay in memory unnoticed."""
    return [
        f"{name}.{attribute}".removeprefix(".")
        for name, module in model.named_modules()
        for attribute, value in vars(module).items()
        if isinstance(value, torch.ScriptObject) and not isinstance(value, torch._C.ScriptModule)
    ]


def quantizable(model: torch.nn.Module, kind: Kind) -> set[int]:
    """Returns the ids of the parameters that may be quantized."""
    find: Any = getattr(model, "get_output_embeddings", lambda: None)
    head = None if kind == "int8" else find()
    embeddings = {
        id(tensor)
        for module in model.modules()
        if isinstance(module, torch.nn.Embedding | torch.nn.EmbeddingBag)
        for tensor in module.parameters(recurse=False)
    }
    embeddings |= {id(tensor) for tensor in (() if head is None else head.parameters())}
    return {
        id(tensor)
        for tensor in model.parameters()
        if tensor.dim() > 1 and tensor.is_floating_point() and tensor.numel() >= _MIN and id(tensor) not in embeddings
    }


def _write(
    slabs: StripedSlabs,
    files: Sequence[WeightFile],
    tensors: dict[int, torch.Tensor],
    matrices: Mapping[int, Kind],
    weights: Weights,
    device: torch.device,
) -> tuple[dict[int, StoredTensor], float]:
    """Writes tensors in their order; returns them as stored ones, by id, and the relative error of quantization."""
    stored: dict[int, StoredTensor] = {}
    error = QuantizationError()
    with InFlight(_WRITES, abandon=True) as in_flight:
        for key, tensor in tensors.items():
            dtype, stored_as = tensor.dtype, None
            if key in matrices and (packed := packed_as(matrices[key], tensor)) is not None:
                values, stored_as = packed
                error.add(tensor, values, stored_as)
                tensor = values
            pieces = slabs.allocate(tensor.nbytes)
            transfers: list[IoFuture] = []
            slabs.move(pieces, to_store(tensor), transfers, write=True, priority=Priority.WRITEBACK)
            for transfer in transfers:
                in_flight.add(transfer)
            extents = [FileExtent(files[piece.folder], piece.extent.start, piece.nbytes) for piece in pieces]
            if tensor.is_contiguous() or not is_dense(tensor):
                source = Source(extents, tensor.dtype, tensor.shape)
                stored[key] = StoredTensor(weights, source, dtype, device, stored_as)
            else:  # stored in the order of its memory
                outline = outline_of(tensor.shape, tensor.stride(), dtype)
                step = Step(torch.ops.aten.as_strided.default, (outline.shape, outline.stride()), {})
                source = Source(extents, tensor.dtype, (tensor.numel(),))
                stored[key] = StoredTensor(weights, source, dtype, device, stored_as, outline, (step,))
    for file in files:
        file.note_size()
    return stored, error.relative


def _replace(model: torch.nn.Module, stored: dict[int, StoredTensor]) -> None:
    """Replaces tensors in memory by stored ones."""
    made: dict[int, Any] = {}  # by id, so that tied ones stay tied
    for module in model.modules():
        places: dict[str, Any]
        for places in (module._parameters, module._buffers):
            for name, value in places.items():
                if value is not None and id(value) in stored:
                    put = stored[id(value)]
                    is_parameter = isinstance(value, torch.nn.Parameter)  # a buffer may be one as well
                    places[name] = made.setdefault(id(value), torch.nn.Parameter(put, False) if is_parameter else put)


def _restored(model: torch.nn.Module) -> contextlib.ExitStack:
    """Returns what gives all modules, when it is closed, the classes, attributes and tensors that they have now."""
    undo = contextlib.ExitStack()
    name = "_experts_implementation_internal"  # of a configuration of transformers, or of one in that
    for module in model.modules():
        undo.callback(object.__setattr__, module, "__dict__", dict(vars(module)))
        undo.callback(object.__setattr__, module, "__class__", type(module))
        own: list[dict[str, Any]] = [module._parameters, module._buffers]
        for places in own:
            undo.callback(places.update, dict(places))
        config = getattr(module, "config", None)
        for part in (config, *getattr(config, "__dict__", {}).values()):
            if name in getattr(part, "__dict__", ()):
                undo.callback(setattr, part, name, getattr(part, name))
    return undo
