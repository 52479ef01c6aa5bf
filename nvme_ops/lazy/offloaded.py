"""``OffloadedTensor``: a tensor whose values are on storage, and come into memory when something computes with them.

This class defines which operations need no values, how views are made, and what happens on each way to a tensor's
values that bypasses torch's dispatcher. The classes derived from it define where the values come from: weights in
files, which cannot be changed, and parameters that are trained.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, NoReturn, TypeVar

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from nvme_ops.base.errors import free_frames
from nvme_ops.base.native import native
from nvme_ops.lazy import operators

aten = torch.ops.aten

_NO_MEMORY = "the values of this tensor are on storage, so it has no memory of its own: {instead}"
_MAX_VIEWS = 64  # outlines of views that are cached for one tensor

Made = TypeVar("Made", bound="OffloadedTensor")
Function = TypeVar("Function", bound=Callable[..., Any])


def never_compiled(function: Function) -> Function:
    """Keeps ``torch.compile`` out of a function and all that it calls: guards do not see what storage changes.

    ``torch.compiler.disable`` does the same, but imports the compiler, which takes a second.
    """
    set_callback = torch._C._dynamo.eval_frame.set_eval_frame

    # torch compiles no frame of this name: see _dynamo/convert_frame.py
    def __setattr__(*args: Any, **kwargs: Any) -> Any:  # noqa: N807
        before = set_callback(None)
        try:
            return function(*args, **kwargs)
        finally:
            set_callback(before)

    __setattr__._torchdynamo_disable = True  # type: ignore[attr-defined]  # nor inlined into others
    wrapped: Any = functools.wraps(function)(__setattr__)
    return wrapped  # type: ignore[no-any-return]


class Step(NamedTuple):
    """A view or a conversion, applied to stored values to get those of a tensor."""

    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    part: int | None = None  # the index of the result, if there are several

    def __call__(self, values: torch.Tensor) -> torch.Tensor:
        """Returns the result of this step in memory."""
        result: Any = self.function(values, *self.args, **self.kwargs)
        made: torch.Tensor = result if self.part is None else result[self.part]
        return made


def apply_steps(steps: Iterable[Step], values: torch.Tensor) -> torch.Tensor:
    """Returns ``values`` after all steps in their order."""
    for step in steps:
        values = step(values)
    return values


class OffloadedTensor(torch.Tensor):
    """A tensor with dtype, shape, strides and device, whose values are brought into memory for each operation.

    Operations return ordinary tensors. Views are tensors of this class again: making one reads nothing, and writing to
    it changes what it is a view of.

    docs/training.md has the ways to the values that bypass torch's dispatcher, and what happens on each.
    """

    _outline: torch.Tensor  # on the meta device: shape, strides, offset and dtype
    _steps: tuple[Step, ...]  # from the stored values to those of this tensor

    #: By operator: functions that need no values. Each returns NotImplemented for arguments that it cannot handle.
    lazy: ClassVar[dict[Any, Callable[..., Any]]] = {}
    #: What the user can do instead of asking for the memory of such a tensor: the end of an error message.
    instead: ClassVar[str] = "copy it by to_memory()"

    @classmethod
    def _outlined(cls: type[Made], outline: torch.Tensor, steps: tuple[Step, ...], device: torch.device) -> Made:
        with torch.inference_mode(False):  # torch could not make it a view of one that was made outside of that mode
            made: Made = torch.Tensor._make_wrapper_subclass(
                cls,
                outline.shape,
                strides=outline.stride(),
                storage_offset=int(outline.storage_offset()),
                dtype=outline.dtype,
                device=device,
            )
        with torch._C.DisableTorchFunctionSubclass():
            native().deny_memory(made, cls._denied())
        made._outline, made._steps = outline, steps
        return made

    @classmethod
    @functools.cache
    def _denied(cls) -> str:
        return _NO_MEMORY.format(instead=cls.instead)

    # What derived classes define

    writable: ClassVar[bool]  #: whether operations may change the values

    @property
    def stored_at(self) -> Hashable:
        """A key shared by all tensors that in torch would share memory."""
        raise NotImplementedError

    def _derived(self: Made, outline: torch.Tensor, *steps: Step) -> Made:
        """Returns a tensor over the same values, after further ``steps``, with their ``outline``."""
        raise NotImplementedError

    def _lend(self, uses: contextlib.ExitStack, change: bool) -> torch.Tensor:
        """Returns the values in memory, valid until ``uses`` is closed; with ``change``, to be written to."""
        raise NotImplementedError

    @classmethod
    def _lend_together(cls, lent: Mapping[int, Any], values: dict[int, torch.Tensor]) -> None:
        """Adds to ``values``, by key, those of tensors of this class that cannot be lent one after the other."""

    def _whole(self) -> OffloadedTensor:
        """Returns the tensor that this is a view of, or this one."""
        raise NotImplementedError

    def _copies(self) -> tuple[dict[Any, StorageWeakRef], Any]:
        """Returns weak references to copies of ``_whole()`` in memory, by version, and the current version."""
        raise NotImplementedError

    def _require_writable(self, function: Any) -> None:
        """Raises RuntimeError if an operation cannot change the values."""

    def _assign(self, value: torch.Tensor) -> None:
        """Does what ``self.data = value`` does."""
        raise NotImplementedError

    def _become(self: Made, made: Made) -> None:
        """Becomes another tensor, with its outline and attributes."""
        both = functools.partial(_data.__set__, self, made), functools.partial(vars(self).update, vars(made))
        list(map(functools.partial.__call__, both))  # Ctrl-C cannot interrupt this between the two

    @property
    def place(self) -> Hashable:
        """A key shared by all tensors that are the same view of the same stored values."""
        return self.stored_at, tuple((step.function, repr(step[1:])) for step in self._steps)

    @property
    def nbytes_moved(self) -> int:
        """Bytes in memory while it is copied; writers divide it by this."""
        return self.nbytes

    # Copies

    def to_memory(self) -> torch.Tensor:
        """Returns an ordinary tensor with the values, in memory of its own."""
        with contextlib.ExitStack() as uses:
            return self._lend(uses, False).clone()

    def _parameter_or(self, tensor: torch.Tensor) -> Any:
        """Returns a tensor as a parameter if this is one."""
        return torch.nn.Parameter(tensor, self.requires_grad) if isinstance(self, torch.nn.Parameter) else tensor

    def _ordinary(self) -> torch.Tensor:
        """Returns the same view of a copy in memory of the whole tensor, as torch copies whole storages."""
        made: torch.Tensor = self._parameter_or(apply_steps(self._steps, self._whole().to_memory()))
        return made

    def __copy__(self: Made) -> Made:
        """Returns another tensor over the same values."""
        made: Made = self._parameter_or(self.detach())
        return made

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        """Returns an ordinary tensor, or a parameter if this is one."""
        made = memo[id(self)] = self._ordinary()
        return made

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickles an ordinary tensor. Tensors over the same values share its memory while the first copy exists."""
        copies, version = self._copies()
        known = copies.get(version)
        storage = None if known is None else torch.UntypedStorage._new_with_weak_ptr(known.cdata)
        whole = self._whole()
        if storage is None:
            values = whole.to_memory()
            copies.clear()
            copies[version] = StorageWeakRef(values.untyped_storage())
        else:
            values = torch.empty(0, dtype=whole.dtype, device=whole.device).set_(
                storage, 0, whole.shape, whole.stride()
            )
        return self._parameter_or(apply_steps(self._steps, values)).__reduce_ex__(protocol)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]  # torch declares it without types
        """Returns, for example, ``StoredTensor(shape=(4096, 4096), dtype=torch.bfloat16)``."""
        return f"{type(self).__name__}(shape={tuple(self.shape)}, dtype={self.dtype})"

    # Ways to the values that bypass the dispatcher

    @property
    def data(self) -> torch.Tensor:
        """A tensor over the same values without autograd's history; assigning replaces the values."""
        values: torch.Tensor = _data.__get__(self)
        return values

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        if not isinstance(value, torch.Tensor):
            raise TypeError(f"data must be a torch.Tensor, not {type(value).__name__}")
        self._assign(value)

    def tolist(self) -> Any:
        """Returns the values as Python numbers, in nested lists."""
        return self.to_memory().tolist()

    def numpy(self, *, force: bool = False) -> Any:
        """Returns a copy of the values with ``force``; else raises RuntimeError, since an array cannot share memory."""
        if not force:
            self._refuse("numpy()", "numpy(force=True) returns a copy")
        return self.to_memory().numpy(force=True)

    def __array__(self, *_: Any, **__: Any) -> NoReturn:
        """Raises RuntimeError, see ``numpy``."""
        self._refuse("an array", "numpy(force=True) returns a copy")

    def untyped_storage(self) -> NoReturn:  # methods of a storage without memory crash the process
        """Raises RuntimeError."""
        self._refuse("untyped_storage()", self.instead)

    storage = _typed_storage = untyped_storage

    def is_shared(self) -> bool:
        """Returns False: no other process has the values."""
        return False

    def share_memory_(self) -> NoReturn:
        """Raises RuntimeError."""
        self._refuse("share_memory_()", self.instead)

    def __dlpack__(self, *_: Any, **__: Any) -> NoReturn:
        """Raises RuntimeError."""
        self._refuse("dlpack", self.instead)

    def _refuse(self, what: str, instead: str) -> NoReturn:
        raise RuntimeError(f"{what}: {_NO_MEMORY.format(instead=instead)}")

    # Operations

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    @never_compiled
    def __torch_dispatch__(  # type: ignore[override]  # torch declares it without cls
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if (lazily := cls.lazy.get(func)) is not None:
            result = lazily(*args, **kwargs)
            if result is not NotImplemented:
                return result
        if operators.is_view(func) and args and isinstance(args[0], OffloadedTensor):
            return args[0]._viewed(func, args[1:], kwargs)
        if (count := operators.members(func, args)) > 1:
            _, listed = _written(func, args, kwargs)  # refuses, if it does, before anything is changed
            try:
                return operators.one_by_one(func, count, args, kwargs)
            finally:
                _count_changes(tensor for tensor in listed if not isinstance(tensor, OffloadedTensor))
        return _run_in_memory(func, args, kwargs)

    def _viewed(self: Made, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Made | list[Made]:
        outlines = _outlines(self._outline, func, args, kwargs)
        if func in operators.BITS:
            return self._derived(func(self._outline).resolve_conj().resolve_neg(), Step(operators.BITS[func], (), {}))
        if func is aten.as_strided.default:
            func, args, kwargs = _as_strided, _relative(self._outline, *args, **kwargs), {}
        if isinstance(outlines, torch.Tensor):
            return self._derived(outlines, Step(func, args, kwargs))
        return [self._derived(outline, Step(func, args, kwargs, part)) for part, outline in enumerate(outlines)]


_data: Any = torch._C.TensorBase.data


def outline_of(shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Returns a tensor on the meta device with this shape, these strides and this dtype."""
    return torch.empty_strided(tuple(shape), tuple(stride), dtype=dtype, device="meta")


def _outlines(outline: torch.Tensor, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Returns the outline, or outlines, of a view; they are cached with the ``outline`` that they are made of."""
    if torch.compiler.is_compiling():
        return func(outline, *args, **kwargs)
    known: dict[Any, Any] = vars(outline).setdefault("_nvme_ops_views", {})
    key = (func, *args) if not kwargs else None
    try:
        view = known.get(key)
    except TypeError:  # a list among the arguments
        key = view = None
    if view is None:
        view = func(outline, *args, **kwargs)
        if key is not None and len(known) < _MAX_VIEWS:
            known[key] = view
    return view


def _run_in_memory(func: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
    """Runs an operation on the values in memory; tensors that it writes to change on storage."""
    named = list(kwargs.values())
    lent = {id(leaf): leaf for leaf in operators.leaves((args, named)) if isinstance(leaf, OffloadedTensor)}
    written, listed = _written(func, args, kwargs)
    use_scratch = bool(written) and operators.has_out(func) and not _outputs_fit(func, args, kwargs, written)
    values: dict[int, torch.Tensor] = {}
    targets: dict[int, torch.Tensor] = {}
    try:
        with contextlib.ExitStack() as uses:
            if len(lent) > 1:
                for kind in {type(tensor) for tensor in lent.values()}:
                    kind._lend_together({key: tensor for key, tensor in lent.items() if type(tensor) is kind}, values)
            for key, tensor in lent.items():
                if key not in values:
                    values[key] = tensor._lend(uses, key in written)
                if use_scratch and key in written:
                    targets[key], values[key] = values[key], torch.empty_like(values[key])
            uses.callback(targets.clear)
            uses.callback(values.clear)  # before the values are returned: what is still referred to counts as in use

            def in_memory(value: Any) -> Any:
                return values[id(value)] if isinstance(value, OffloadedTensor) else value

            options = dict(zip(kwargs, operators.mapped(in_memory, named), strict=True))
            result = func(*operators.mapped(in_memory, args), **options)
            if func.namespace in ("c10d", "_c10d_functional"):
                _wait(result)
            for key, tensor in written.items():
                _require_shape(func, values[key], tensor)
                if key in targets:
                    targets[key].copy_(values[key])
            _count_changes(listed)
            back = {id(values[key]): tensor for key, tensor in written.items()}
            return _returned(result, back, {memory.untyped_storage()._cdata for memory in values.values()})
    except BaseException as error:
        free_frames(error)  # torch's own have the values
        if not isinstance(error, Exception):  # Ctrl-C: the operation may have changed them
            _count_changes(written.values())
        elif written and "not resizable" in str(error):
            raise RuntimeError(
                f"{func}: the result has another shape than the tensor on storage that it is for, which cannot be "
                "resized: assign the result to its .data"
            ) from error
        raise
    finally:
        values.clear()  # a traceback would keep them alive
        targets.clear()


def _outputs_fit(func: Any, args: Any, kwargs: Mapping[str, Any], written: dict[int, OffloadedTensor]) -> bool:
    """Raises RuntimeError if an ``out=`` would be resized. Returns False if the shape depends on the values."""
    outlines: dict[int, torch.Tensor] = {}

    def outline(value: Any) -> Any:
        if isinstance(value, torch.Tensor) and id(value) not in outlines:
            outlines[id(value)] = outline_of(value.shape, value.stride(), value.dtype)
        return outlines.get(id(value), value)

    options = dict(zip(kwargs, operators.mapped(outline, list(kwargs.values())), strict=True))
    try:
        func(*operators.mapped(outline, args), **options)
    except Exception:  # an operation may refuse outlines alone; if not, torch raises this for the values too
        return False
    for key, tensor in written.items():
        _require_shape(func, outlines[key], tensor)
    return True


def _require_shape(func: Any, result: torch.Tensor, tensor: OffloadedTensor) -> None:
    if result.shape != tensor.shape:
        raise RuntimeError(
            f"{func}: the result has shape {tuple(result.shape)}; the tensor on storage that it is for cannot be "
            f"resized from {tuple(tensor.shape)}: assign the result to its .data"
        )


def _count_changes(listed: Iterable[torch.Tensor]) -> None:
    """Increments the versions of tensors in lists, which torch does in calls for each that are not made here."""
    for tensor in listed:
        if not tensor.is_inference():
            torch.autograd.graph.increment_version(tensor)


def _wait(result: Any) -> None:
    """Waits for collectives, which use memory that is only lent for the operation."""
    for leaf in operators.leaves((result,)):
        if isinstance(leaf, torch.Tensor):
            if type(leaf) is torch.Tensor:
                torch.ops._c10d_functional.wait_tensor(leaf)
        elif hasattr(leaf, "wait"):
            leaf.wait()


def _returned(result: Any, back: dict[int, OffloadedTensor], memory: set[int]) -> Any:
    """Returns a result with tensors on storage in place of their values; results in lent memory are copied."""
    if isinstance(result, torch.Tensor):
        if id(result) in back:
            return back[id(result)]
        if result.layout is torch.strided and type(result) is torch.Tensor:
            return result.clone() if result.untyped_storage()._cdata in memory else result
        return result
    if isinstance(result, list | tuple):
        items = [_returned(item, back, memory) for item in result]
        return items if type(result) is list else type(result)(items) if type(result) is tuple else result
    return result


def _written(func: Any, args: Any, kwargs: Mapping[str, Any]) -> tuple[dict[int, OffloadedTensor], list[torch.Tensor]]:
    """Returns the tensors on storage that an operation writes to, and those for ``_count_changes``."""
    written: dict[int, OffloadedTensor] = {}
    listed: list[torch.Tensor] = []
    uncounted = not func._schema.name.startswith(("aten::_fused_", "aten::_amp_"))
    for number, name, is_list in operators.writes(func):
        if not operators.writes_now(func, args, kwargs):
            continue
        value = args[number] if number < len(args) else kwargs.get(name)
        for leaf in operators.leaves((value,)):
            if isinstance(leaf, OffloadedTensor):
                if torch.Tag.inplace_view in func.tags or func in operators.SHAPE_CHANGES:
                    raise RuntimeError(
                        f"{func}: a tensor whose values are on storage keeps shape and memory: assign the result to "
                        "its .data, or do it in memory before"
                    )
                leaf._require_writable(func)
                if any(step.function in operators.BITS.values() for step in leaf._steps):
                    raise RuntimeError(f"{func}: cannot write to a conjugated or negated view: change its base")
                written[id(leaf)] = leaf
            if is_list and uncounted and isinstance(leaf, torch.Tensor):
                listed.append(leaf)
    return written, listed


def _relative(outline: torch.Tensor, size: Any, stride: Any, offset: int | None = None) -> tuple[Any, ...]:
    begin = 0 if offset is None else offset - int(outline.storage_offset())
    return size, stride, begin


def _as_strided(values: torch.Tensor, size: Any, stride: Any, begin: int) -> torch.Tensor:
    """Calls ``as_strided`` with an offset that counts from the first element of ``values``."""
    return values.as_strided(size, stride, int(values.storage_offset()) + begin)


# Operations that need no values, for all derived classes


def _same(tensor: OffloadedTensor, *_: Any) -> OffloadedTensor:
    return tensor._derived(tensor._outline)


def _made_like(func: Any) -> Callable[..., Any]:
    def make(tensor: Any, *args: Any, **options: Any) -> Any:
        if not isinstance(tensor, OffloadedTensor):
            return NotImplemented
        like = outline_of(tensor.shape, tensor.stride(), tensor.dtype)
        return func(like, *args, **{**options, "device": options.get("device") or tensor.device})

    return make


_MAKERS = (
    *(aten.empty_like, aten.zeros_like, aten.ones_like, aten.full_like, aten.rand_like, aten.randn_like),
    *(aten.new_empty, aten.new_zeros, aten.new_ones, aten.new_full),
)


def _set(tensor: Any, source: torch.Tensor) -> Any:
    """Replaces the values by those of another tensor, as assigning to ``data`` does."""
    if not isinstance(tensor, OffloadedTensor):
        return NotImplemented
    if source is not tensor:  # torch.nn.utils.parametrize sets a tensor to itself
        tensor._require_writable(aten.set_.source_Tensor)
        tensor._assign(source)
    return tensor


def cat_one_by_one(tensors: Sequence[torch.Tensor], dim: int = 0) -> torch.Tensor:
    """Concatenates tensors, reading one after the other: together they may not fit in memory."""
    outlines = [tensor._outline if isinstance(tensor, OffloadedTensor) else tensor.to("meta") for tensor in tensors]
    outline = torch.cat(outlines, dim)
    made = torch.empty_like(outline, device=tensors[0].device)
    begin = 0
    for tensor in tensors:
        if tensor.shape != (0,):  # torch ignores such, whatever the dimensions of the others
            made.narrow(dim, begin, tensor.shape[dim]).copy_(tensor)
            begin += tensor.shape[dim]
    return made


OffloadedTensor.lazy.update({aten.set_.source_Tensor: _set, aten.cat.default: cat_one_by_one})
OffloadedTensor.lazy.update({maker.default: _made_like(maker.default) for maker in _MAKERS})
OffloadedTensor.lazy.update(dict.fromkeys((aten.detach.default, aten.alias.default, aten.lift_fresh.default), _same))


def offloaded_in(tensor: torch.Tensor) -> OffloadedTensor | None:
    """Returns this tensor, or the local shard of a ``DTensor``, if it is on storage; else None."""
    local = getattr(tensor, "_local_tensor", tensor)
    return local if isinstance(local, OffloadedTensor) else None
