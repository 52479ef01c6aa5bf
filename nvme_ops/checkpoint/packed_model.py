"""Packs the weights of a model's folder in 8 or 4 bits, in the layout of compressed-tensors, which other programs load.

Linear layers are packed, and experts that the files have one by one. The head, embeddings, routers and matrices of few
rows stay as they are, as do experts that are stored together, for which the layout has no names.
"""

from __future__ import annotations

import contextlib
import fnmatch
import json
import os
import re
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import itemgetter
from typing import Any

import torch

from nvme_ops.base.errors import FormatError, naming
from nvme_ops.filesystem.files import Lock, make_folder
from nvme_ops.filesystem.publication import publish
from nvme_ops.formats import Kind
from nvme_ops.formats.quantizing import CompressedPart, QuantizationError, fits, settings_of
from nvme_ops.formats.sharded_index import resolved
from nvme_ops.offload.weights.stored import StoredTensor, Weights, stored_in
from nvme_ops.storage.source import Source

_CONFIG = "config.json"
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".onnx", ".gguf", ".index.json")
_LEAST_ROWS = 32  # fewer are the gate of shared experts, say, which other programs expect as it is
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_EXPERTS = re.compile(r"(.*\.experts)\.")
_REPLACED = "Llama4TextExperts"  # transformers has a list of experts in their place if a model is quantized
_DTYPE_NAMES = ("dtype", "torch_dtype")
_EARLY = 256 << 20  # the most bytes of weights that transformers may compute with while it puts a model together


class PackedModel:
    """Describes the tensors of a model's folder when they are packed.

    Args:
        folder: of the model, with its configuration.
        state: its tensors by name.
        weights: through which they are read, later.
        kind: in which they are packed.
        exclude: names of tensors that stay as they are, or patterns (``fnmatch``).

    Raises:
        ImportError: transformers is not installed.
        OSError: there is no configuration.
        ValueError: the model is quantized already, is none that transformers has, or has nothing to be packed;
            ``exclude`` names nothing; transformers expects experts one by one that are stored together.
    """

    def __init__(
        self, folder: str, state: Mapping[str, torch.Tensor], weights: Weights, kind: Kind, exclude: Sequence[str]
    ) -> None:
        from nvme_ops.offload.weights.pretrained import outline

        for pattern in exclude:
            if not fnmatch.filter(state, pattern):
                raise ValueError(f"exclude: {folder} has no tensor {pattern!r}")
        stored = {name: tensor for name, tensor in state.items() if isinstance(tensor, StoredTensor)}
        weights.budget = _EARLY
        model = outline(folder, stored, weights)
        packed = _packable(model, stored, kind, exclude)
        if not packed:
            raise ValueError(f"{folder} has no matrix that can be packed")
        self._error = QuantizationError()
        for name, module in model.named_modules():
            if type(module).__name__ == _REPLACED:
                raise ValueError(
                    f"{folder} has experts of {_REPLACED}, {name}, which in a model that is quantized transformers "
                    "expects one by one: they cannot stay stacked"
                )
        matrices = {name: tensor for name, tensor in state.items() if tensor.dim() > 1 and name not in packed}
        self.kept = {name: tensor.nbytes for name, tensor in matrices.items()}  #: matrices that stay, and their bytes
        linear = {name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
        named = {name.removesuffix(".weight") for name in matrices if name.endswith(".weight")}
        together = {found[1] for found in map(_EXPERTS.match, self.kept) if found}  # by names that vLLM gives them
        ignored = (linear - set(packed.values())) | named | {rf"re:{re.escape(name)}\..*" for name in together}
        self.settings = settings_of(kind, sorted(ignored))
        self.tensors: dict[str, torch.Tensor] = {}  #: what is to be written, by name
        for name, tensor in state.items():
            if name not in packed:
                self.tensors[name] = tensor
                continue
            for end in CompressedPart.ENDS:
                part = CompressedPart(kind, end, name, self._error)
                source = Source(stored[name].source.extents, tensor.dtype, tensor.shape)
                self.tensors[name + end] = StoredTensor(weights, source, part.dtype, None, part)
            if kind != "mxfp4":
                self.tensors[f"{name}_shape"] = torch.tensor(tensor.shape)

    @property
    def error(self) -> float:
        """The relative root mean square error of all that was packed, once it is written."""
        return self._error.relative


def _packable(
    model: Any, stored: Mapping[str, StoredTensor], kind: Kind, exclude: Sequence[str]
) -> dict[str, str | None]:
    """Returns the names of tensors that are packed, each with that of its linear layer, or None for an expert's."""
    from nvme_ops.offload.weights.routing import groups_of, is_packed

    starts: dict[str, list[tuple[int, str]]] = {}
    for name, tensor in stored.items():
        for file, start, _ in tensor.source.extents:
            starts.setdefault(file.path, []).append((start, name))
    for of_file in starts.values():
        of_file.sort()

    def fit(names: Iterable[str]) -> bool:
        return all(
            fits(kind, stored[name].shape)
            and stored[name].shape[0] >= _LEAST_ROWS
            and stored[name].dtype in _DTYPES
            and name.endswith(".weight")
            and not any(fnmatch.fnmatchcase(name, pattern) for pattern in exclude)
            for name in names
        )

    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    routers = {group.router for group in groups_of(model)}
    packed: dict[str, str | None] = {}
    others: set[str] = set()  # used by something else, such as an embedding that is tied to the head
    for path, module in model.named_modules():
        own = [tensor for tensor in map(stored_in, module.parameters(recurse=False)) if tensor is not None]
        is_layer = isinstance(module, torch.nn.Linear) and module is not head and module not in routers
        together = [tensor for tensor in own if is_packed(module, tensor)]  # of which programs expect all or none
        for tensors in filter(None, (together, *([tensor] for tensor in own if not is_packed(module, tensor)))):
            names = [name for tensor in tensors for name in _names_in(tensor.source, starts)]
            is_whole = sum(tensor.source.nbytes for tensor in tensors) == sum(stored[name].nbytes for name in names)
            is_one = is_layer and len(names) == 1 and tensors[0].dim() == 2
            if (tensors is together or is_one) and is_whole and all(t.is_plain() for t in tensors) and fit(names):
                packed |= dict.fromkeys(names, path if is_one else None)
            else:
                others |= set(names)
    return {name: path for name, path in packed.items() if name not in others}


def _names_in(source: Source, starts: Mapping[str, Sequence[tuple[int, str]]]) -> Iterator[str]:
    """Yields the names of the tensors in files of which a source has bytes."""
    for file, start, nbytes in source.extents:
        known = starts[file.path]
        first = bisect_right(known, start, key=itemgetter(0)) - 1
        for begin, name in known[max(0, first) :]:
            if begin >= start + nbytes:
                break
            yield name


@contextlib.contextmanager
def beside(source: str, target: str) -> Iterator[Callable[[Mapping[str, Any]], None]]:
    """Yields a function that copies what a model's folder has beside its weights, given the settings of quantization.

    What was copied is removed if the block fails. While it runs, no other one writes to this folder.

    Raises:
        OSError: a file cannot be copied.
        ValueError: the target has a model already, or other files of the same names; the source has no configuration.
    """
    if not os.path.isfile(os.path.join(source, _CONFIG)):
        raise ValueError(f"{source} is no folder of a model: it has no {_CONFIG}")
    with contextlib.ExitStack() as undo:

        def make(folder: str) -> None:
            if not os.path.isdir(folder):
                make_folder(folder, True)
                undo.callback(_remove, os.rmdir, folder)

        def write(name: str, content: bytes) -> None:
            path = os.path.join(target, name)
            make(os.path.dirname(path))
            if not os.path.lexists(path):
                undo.callback(_remove, os.unlink, path)
            elif name != _CONFIG and _content(path) != content:  # a killed conversion has left the same, or a _CONFIG
                raise ValueError(f"{path} is there already, and is not the source's: name another folder")
            publish(path, content)

        make(target)
        with Lock(os.path.join(target, _CONFIG)):
            with contextlib.suppress(FormatError):
                raise ValueError(f"{resolved(target)} is a model already: name another folder")

            def copy(settings: Mapping[str, Any]) -> None:
                for name in _beside(source, target):
                    write(name, _content(os.path.join(source, name)))
                document = json.loads(_content(os.path.join(source, _CONFIG)))
                if settings["format"].startswith("mxfp4"):  # compressed-tensors expands it to bfloat16 only
                    document = _in_bfloat16({"dtype": "", **document})
                document |= {"quantization_config": settings}
                write(_CONFIG, (json.dumps(document, indent=2) + "\n").encode())

            yield copy
            undo.pop_all()


def _in_bfloat16(settings: dict[str, Any]) -> dict[str, Any]:
    """Returns the configuration of a model, and those of its parts, with another dtype."""
    return {
        name: "bfloat16" if name in _DTYPE_NAMES else _in_bfloat16(value) if isinstance(value, dict) else value
        for name, value in settings.items()
    }


def _remove(remove: Callable[[str], None], path: str) -> None:
    with contextlib.suppress(OSError):
        remove(path)


def _content(path: str) -> bytes:
    with naming("read", path), open(path, "rb") as file:
        return file.read()


def _beside(folder: str, target: str) -> Iterator[str]:
    """Yields the files of a model, but its weights and the target, by their names in its folder."""
    for place, folders, names in os.walk(folder):
        inner = [name for name in folders if not name.startswith(".")]
        folders[:] = [name for name in inner if not os.path.samefile(os.path.join(place, name), target)]
        for name in names:
            if not name.startswith(".") and not name.endswith(_WEIGHTS):
                yield os.path.relpath(os.path.join(place, name), folder)
