"""``use_nvme``: keeps on storage what a ``Trainer`` of transformers or TRL needs in training, by one line.

    trainer = Trainer(model=model, args=TrainingArguments(optim="adamw_torch", ...), train_dataset=texts)
    use_nvme(trainer, "/mnt/nvme")
    trainer.train()

The states of the optimizer that the arguments choose are there, as ``NvmeOptimizer`` keeps them, and the tensors that
autograd saves in forward, by ``save_on_nvme``. Everything else is the trainer's own; the results are the same bits.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from nvme_ops.base.lifetime import Closing
from nvme_ops.base.patches import Patch
from nvme_ops.base.text import bytes_of, never_raising, size_words
from nvme_ops.checkpoint.api import load, save
from nvme_ops.integrations.transformers import installed
from nvme_ops.io.arguments import require_switches
from nvme_ops.offload.activations.save_on_nvme import save_on_nvme
from nvme_ops.offload.budgets import budgets_of, where_it_computes
from nvme_ops.offload.memory import Memory
from nvme_ops.offload.optimizer.chunks import require_elementwise
from nvme_ops.offload.optimizer.nvme_optimizer import MIN_BUDGET, NvmeOptimizer
from nvme_ops.storage.session import Session

Path = str | os.PathLike[str]

#: Methods of the trainer that go through ``NvmeTraining``'s of the same name.
_METHODS = (
    "train",
    "create_optimizer",
    "compute_loss_context_manager",
    "log",
    "_save_optimizer_and_scheduler",
    "_load_optimizer_and_scheduler",
)
_FILES = ("optimizer.pt", "scheduler.pt")  # in a checkpoint
_SAVED = "256M"


def use_nvme(
    trainer: Any,
    folder: Path | Sequence[Path],
    *,
    optimizer_budget: int | str | None = "256M",
    activations_budget: int | str | None = _SAVED,
    device_budget: int | str | None = None,
    host_budget: int | str | None = None,
    memory: Memory | None = None,
    checkpoints: bool = True,
) -> NvmeTraining:
    """Makes a trainer keep optimizer states and activations on storage whenever it trains from now on.

    Every line that it logs meanwhile says what was moved until then: ``nvme_optimizer_bytes_read``,
    ``nvme_optimizer_bytes_written``, and the same for ``nvme_activations``. The files are removed when ``train``
    returns or raises, and ``trainer.optimizer`` is then what it was before. Within ``with use_nvme(...):`` they are
    removed at the end of the block instead: a second ``train`` there continues with the optimizer's states.

    Args:
        trainer: transformers' ``Trainer`` or a subclass, such as TRL's ``SFTTrainer``.
        folder: where they go; several, each on a device of its own, share them. Each rank has its own files.
        optimizer_budget: bytes of host memory, or a size, for optimizer states; None leaves all of them in memory.
        activations_budget: the same, where it computes, for tensors that autograd saves; None leaves them in memory.
        device_budget: another word for that, of an accelerator. This and the next two are ``save_on_nvme``'s.
        host_budget: bytes of page-locked host memory for saved tensors of an accelerator.
        memory: in place of a budget of their own, one that is shared with others.
        checkpoints: also write checkpoints through nvme_ops: what ``save_pretrained`` of a model writes, and
            ``optimizer.pt``. The files are of the same kind, so any ``Trainer`` can resume from them.

    Returns:
        An object whose ``close()`` or ``with`` block ends it; not needed if the trainer trains once.

    Raises:
        TypeError: no ``Trainer``; a budget that is given twice; an optimizer that is not elementwise, which ``train``
            raises, too.
        ValueError: a budget that is no size; FSDP, DeepSpeed, or tensor parallelism; an optimizer that has made steps,
            has a scheduler of its own, or overlaps a backward pass whose gradients are clipped; activations that the
            trainer already moves elsewhere.
        OSError: a folder cannot be created or written.
    """
    if missing := [name for name in _METHODS if not hasattr(trainer, name)]:
        kind = type(trainer).__name__
        raise TypeError(f"trainer must be transformers' Trainer or a subclass of it: {kind} has no {missing[0]}")
    if trainer.is_deepspeed_enabled:
        raise ValueError("DeepSpeed offloads itself: to NVMe with nvme_ops.integrations.deepspeed.install()")
    if trainer.is_fsdp_enabled or any(hasattr(parameter, "device_mesh") for parameter in trainer.model.parameters()):
        raise ValueError(
            "use_nvme is not for models divided over ranks by FSDP or tensor parallelism: use plain torchrun (DDP), or "
            "fully_shard and NvmeOptimizer in a loop of your own"
        )
    require_switches(checkpoints=checkpoints)
    if optimizer_budget is not None:
        optimizer_budget = bytes_of("optimizer_budget", optimizer_budget, MIN_BUDGET)
        if trainer.optimizer is not None:
            _require_movable(trainer, trainer.optimizer)
    budgets: dict[str, Any] = {"device_budget": device_budget, "host_budget": host_budget, "memory": memory}
    if activations_budget is None:
        if any(given is not None for given in budgets.values()):
            raise TypeError("activations_budget=None leaves saved tensors where they are: they have no other budget")
    else:
        if activations_budget != _SAVED:  # else save_on_nvme has it by itself, unless another is given
            budgets["memory_budget"] = bytes_of("activations_budget", activations_budget, least=0)
        where = where_it_computes()
        activations_budget = budgets_of(where, **{"memory_budget": None, **budgets}, default=_SAVED, least=0).nbytes
        if option := _offloading(trainer.args):
            raise ValueError(f"{option} moves activations to the CPU: leave it out, or give activations_budget=None")
    Session(folder, name="trainer").close()  # raises what is wrong with the folder now, not in the first step
    if (before := getattr(trainer, "nvme_training", None)) is not None:
        before.close()
    sizes = {"optimizer": optimizer_budget, "activations": activations_budget}
    return NvmeTraining(trainer, folder, sizes, budgets, checkpoints)


class NvmeTraining(Closing):
    """Replaces methods of a trainer until ``close``."""

    def __init__(
        self, trainer: Any, folder: Path | Sequence[Path], sizes: dict[str, Any], budgets: dict[str, Any], files: bool
    ) -> None:
        self._trainer, self._folder, self._checkpoints = trainer, folder, files
        self._sizes, self._budgets = sizes, budgets  # bytes of each, None in memory; what save_on_nvme is given
        self._optimizer: NvmeOptimizer | None = None
        self._given: Any = None  # the trainer's optimizer before that
        self._saving: save_on_nvme | None = None
        self._undo: contextlib.ExitStack | None = None  # from _begin to _end
        self._in_block = self._ended = False
        self._leave: list[Callable[[], None]] = []
        for name in _METHODS:
            ours = getattr(self, f"_on_{name.strip('_')}")
            self._leave.append(Patch(trainer, name, functools.partial(functools.partial, ours)).take())
        trainer.nvme_training = self

    @never_raising
    def __repr__(self) -> str:
        """Returns for example ``<NvmeTraining in '/mnt/nvme': optimizer 4 GiB, activations in memory>``."""
        words = [f"{name} {'in memory' if size is None else size_words(size)}" for name, size in self._sizes.items()]
        return f"<NvmeTraining in {self._folder!r}: {', '.join(words)}>"

    def __enter__(self) -> NvmeTraining:
        self._in_block = True
        return self

    def close(self) -> None:
        """Removes the files and restores the trainer. Further calls do nothing."""
        if getattr(self._trainer, "nvme_training", None) is not self:
            return
        try:
            del self._trainer.nvme_training
            for leave in self._leave:
                leave()
        finally:
            self._end()

    # Replacements of the trainer's methods; ``own`` is the method that is replaced

    def _on_train(self, own: Any, *args: Any, **kwargs: Any) -> Any:
        """Trains; then removes the files, unless a block does."""
        resumes = args[0] if args else kwargs.get("resume_from_checkpoint")
        if self._ended and not resumes and self._trainer.model_init is None:
            raise RuntimeError(
                "the optimizer's states were removed when the last train() ended: have both calls in a block, "
                "`with use_nvme(trainer, folder):`, resume from a checkpoint that has optimizer.pt, or call use_nvme "
                "again for new states"
            )
        try:
            if self._undo is None:
                self._begin()
            return own(*args, **kwargs)
        finally:
            if not self._in_block:
                self._end()

    def _on_create_optimizer(self, own: Any, *args: Any, **kwargs: Any) -> Any:
        """Makes the trainer's own optimizer and, since that has no states yet, one like it with states on storage."""
        trainer, given = self._trainer, self._trainer.optimizer
        made = own(*args, **kwargs)
        if self._undo is None or self._sizes["optimizer"] is None or _unwrapped(made) is self._optimizer:
            return made
        trainer.optimizer = given  # in case the new one is refused
        _require_movable(trainer, made)
        if not isinstance(_unwrapped(made), NvmeOptimizer):
            self._close_optimizer()
            self._given, self._optimizer = given, self._with_states_on_storage(_unwrapped(made))
            if given is None:
                made.state.clear()  # Adagrad has states from the start
            made = self._optimizer
        trainer.optimizer = made
        return made

    @contextlib.contextmanager
    def _on_compute_loss_context_manager(self, own: Any) -> Iterator[None]:
        """Moves what autograd saves in forward, but not what checkpointed blocks compute again in backward."""
        saving = self._saving if torch.is_grad_enabled() else None
        with own(), saving or contextlib.nullcontext():
            yield

    def _on_log(self, own: Any, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Logs what was moved, too, but does not leave it in ``logs``: metrics of an evaluation may be added up."""
        used = {"optimizer": _nvme_optimizer(self._trainer), "activations": self._saving}
        moved = {
            f"nvme_{name}_bytes_{way}": getattr(part.stats(), f"bytes_{way}")
            for name, part in used.items()
            if part is not None
            for way in ("read", "written")
        }
        logged = {**logs, **moved}
        own(logged, *args, **kwargs)
        logs.update({name: value for name, value in logged.items() if name not in moved})

    def _on_save_optimizer_and_scheduler(self, own: Any, output_dir: str) -> None:
        nvme_optimizer = _nvme_optimizer(self._trainer)

        def write(folder: str) -> None:
            if self._trainer.args.should_save:
                optimizer, scheduler = (os.path.join(folder, name) for name in _FILES)
                save(nvme_optimizer.state_dict(), optimizer)  # type: ignore[union-attr]
                torch.save(self._trainer.lr_scheduler.state_dict(), scheduler)

        if nvme_optimizer is None or not self._checkpoints:
            own(output_dir)
        else:
            _instead_of_base(self._trainer, own, write, output_dir)

    def _on_load_optimizer_and_scheduler(self, own: Any, checkpoint: str | None) -> None:
        """Loads the states chunk by chunk; the trainer would load all at once, each rank to its device."""
        nvme_optimizer = _nvme_optimizer(self._trainer)
        files = [os.path.join(checkpoint, name) for name in _FILES] if checkpoint else []

        def read(_: str | None) -> None:
            nvme_optimizer.load_state_dict(load(files[0], mmap=True))  # type: ignore[union-attr]
            self._trainer.lr_scheduler.load_state_dict(torch.load(files[1], weights_only=True))

        if nvme_optimizer is None or not files or not all(map(os.path.isfile, files)):
            own(checkpoint)
        else:
            _instead_of_base(self._trainer, own, read, checkpoint)

    # Storage

    def _begin(self) -> None:
        with contextlib.ExitStack() as undo:
            if self._checkpoints:
                undo.enter_context(installed())
            if self._sizes["activations"] is not None:
                self._saving = save_on_nvme(self._folder, **self._budgets)
                undo.callback(self._saving.close)
            undo.callback(self._close_optimizer)
            self._undo = undo.pop_all()

    def _with_states_on_storage(self, made: torch.optim.Optimizer) -> NvmeOptimizer:
        known = inspect.signature(type(made)).parameters
        options: dict[str, Any] = {name: value for name, value in made.defaults.items() if name in known}
        groups = [dict(group) for group in made.param_groups]  # schedulers write to them
        options["host_budget"], options["master_weights"] = self._sizes["optimizer"], False  # nor has its own
        return NvmeOptimizer(groups, type(made), self._folder, **options)

    def _close_optimizer(self) -> None:
        if self._optimizer is not None:
            if _nvme_optimizer(self._trainer) is self._optimizer:
                self._trainer.optimizer = self._given
            optimizer, self._optimizer, self._given, self._ended = self._optimizer, None, None, True
            optimizer.close()

    def _end(self) -> None:
        undo, self._undo, self._saving = self._undo, None, None
        if undo is not None:
            undo.close()


def _instead_of_base(trainer: Any, own: Any, ours: Callable[[Any], None], argument: Any) -> None:
    """Calls ``ours`` instead of Trainer's method; if a subclass overrides that, when its method calls it."""
    theirs = getattr(own, "__func__", None)
    name = getattr(theirs, "__name__", "")
    base = next((kind for kind in reversed(type(trainer).__mro__) if name in vars(kind)), None)
    if base is None or vars(base)[name] is theirs:
        ours(argument)
        return
    leave = Patch(base, name, lambda its: lambda one, given: ours(given) if one is trainer else its(one, given)).take()
    try:
        own(argument)
    finally:
        leave()


def _offloading(arguments: Any) -> str:
    """Returns the argument that moves activations elsewhere; empty if there is none."""
    if getattr(arguments, "activation_offloading", False):
        return "activation_offloading=True"
    for name in ("activation_checkpointing_kwargs", "gradient_checkpointing_kwargs"):
        if (getattr(arguments, name, None) or {}).get("offload"):
            return f"{name}={{'offload': True}}"
    return ""


def _unwrapped(optimizer: Any) -> Any:
    """Returns the optimizer inside accelerate's wrapper, if it has one."""
    return getattr(optimizer, "optimizer", optimizer)


def _nvme_optimizer(trainer: Any) -> NvmeOptimizer | None:
    """Returns the trainer's optimizer if it is an ``NvmeOptimizer``, made by ``use_nvme`` or by the user."""
    optimizer = _unwrapped(trainer.optimizer)
    return optimizer if isinstance(optimizer, NvmeOptimizer) else None


def _require_movable(trainer: Any, optimizer: Any) -> None:
    """Raises TypeError or ValueError for an optimizer that cannot be moved, or that would train to other values."""
    inner = _unwrapped(optimizer)
    if isinstance(inner, NvmeOptimizer):
        if inner._overlap and (trainer.args.max_grad_norm or trainer.args.gradient_accumulation_steps > 1):
            raise ValueError(
                'an NvmeOptimizer with overlap="backward" updates before the trainer clips or accumulates gradients: '
                "give TrainingArguments max_grad_norm=0 and gradient_accumulation_steps=1, or leave overlap out"
            )
        return
    try:
        require_elementwise(type(inner))
    except TypeError as error:
        fix = 'optim="adamw_torch", "adamw_torch_fused", "sgd", "adagrad" or "rmsprop"'
        raise TypeError(f"{error}. Choose {fix}, or give use_nvme optimizer_budget=None") from None
    if trainer.lr_scheduler is not None and not trainer._created_lr_scheduler:
        raise ValueError(
            f"the trainer was given a scheduler of its {type(inner).__name__}: give it optimizers=(optimizer, None) "
            "and choose lr_scheduler_type, or make an NvmeOptimizer and a scheduler of that"
        )
    if any(state and state.get("step", 1) != 0 for state in inner.state.values()):  # Adagrad has states from the start
        raise ValueError(
            f"the trainer's {type(inner).__name__} has made steps, and its states would be lost: call use_nvme before "
            "the first train(), of a new trainer with resume_from_checkpoint= if it is to go on"
        )
