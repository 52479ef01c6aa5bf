"""DeepSpeed's NVMe offload through nvme_ops.

    from nvme_ops.integrations import deepspeed as fast_deepspeed

    fast_deepspeed.install()
    engine, *_ = deepspeed.initialize(model=model, config=config)  # offload to "nvme", as before
    fast_deepspeed.uninstall()

Configurations and programs stay as they are: wherever DeepSpeed loads the op ``async_io``, ``gds`` or ``pin_memory``,
for its swappers of parameters and optimizer states, FastFileWriter, ``ds_io`` or ``ds_nvme_tune``, it gets the op of
this package, and compiles none of its own. ``NVME_OPS_DEEPSPEED=1`` calls ``install`` when nvme_ops is imported. A
program that does not import nvme_ops, and all processes that it starts, get the ops by

    python -m nvme_ops.integrations.deepspeed ds_nvme_tune --nvme_dir /mnt/nvme
"""

from __future__ import annotations

import functools
import importlib
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from packaging.version import Version

from nvme_ops import op_builder
from nvme_ops.base.patches import Patch

_MODULE = "deepspeed.ops.op_builder"
_BUILDERS = ("AsyncIOBuilder", "GDSBuilder", "PinMemoryBuilder")

#: The first release that is supported, and the first one after it that is not.
_KNOWN = ((0, 14), (0, 20))

_installed: list[Callable[[], None]] = []  # what ``uninstall`` calls


def install() -> None:
    """Makes DeepSpeed use the ops of this package from now on. Further calls do nothing.

    It replaces the methods ``load`` and ``is_compatible`` of DeepSpeed's builders for the accelerator at hand, and
    ``_set_dtype`` of ``zero.Init``, which may round parameters in float32. Existing handles stay as they are.

    Raises:
        ModuleNotFoundError: DeepSpeed is not installed.
        RuntimeError: its version is not supported; nothing is changed.
    """
    if _installed:
        return
    version: str = importlib.import_module("deepspeed").__version__
    numbers = Version(version).release[:2]
    builders = importlib.import_module(_MODULE)
    if not _KNOWN[0] <= numbers < _KNOWN[1] or not hasattr(builders, _BUILDERS[0]):
        known = " to before ".join(".".join(map(str, bound)) for bound in _KNOWN)
        raise RuntimeError(f"DeepSpeed {version} is not supported, only versions from {known}")
    for name in _BUILDERS:
        theirs, ours = getattr(builders, name, None), getattr(op_builder, name)
        if not isinstance(theirs, type) or theirs.__name__ != name:  # the accelerator has no such op
            continue
        for method, replacement in (("load", _loader), ("is_compatible", _probe)):
            _installed.append(Patch(theirs, method, functools.partial(replacement, ours)).take())
    classes = importlib.import_module("deepspeed.runtime.zero.partition_parameters")
    theirs = getattr(classes, "InsertPostInitMethodToModuleSubClasses", None)
    if hasattr(theirs, "_set_dtype"):
        _installed.append(Patch(theirs, "_set_dtype", _keeping_dtypes).take())


def uninstall() -> None:
    """Restores what ``install`` replaced, unless somebody else has replaced it since. Further calls do nothing."""
    while _installed:
        _installed.pop()()


def _keeping_dtypes(before: Callable[..., None]) -> Callable[..., None]:
    """Returns a ``_set_dtype`` that makes ZeRO-3 keep parameters on NVMe in the dtype that it is given.

    DeepSpeed's computes ``dtype or float16 if fp16 is supported else bfloat16``, which Python parses as ``(dtype or
    float16) if ...``: without fp16, as on most CPUs, it rounds parameters in float32 to bfloat16.
    """

    def _set_dtype(self: Any, ds_config: Any, dtype: Any) -> None:
        before(self, ds_config, dtype)
        if dtype is not None:
            self.dtype = dtype

    return _set_dtype


def _loader(ours: Any, _: object) -> Callable[..., Any]:
    def load(_self: Any, verbose: bool = True) -> Any:
        """Loads the op of nvme_ops."""
        return ours().load(verbose=verbose)

    return load


def _probe(ours: Any, _: object) -> Callable[..., Any]:
    def is_compatible(_self: Any, verbose: bool = False) -> bool:
        """Returns whether the op of nvme_ops can be built here; with ``verbose``, prints why not."""
        return bool(ours().is_compatible()) or bool(ours().is_compatible(verbose=verbose))

    return is_compatible


def main(argv: Sequence[str]) -> NoReturn:
    """Replaces this process by a program, such as ``ds_io``, with ``install`` in all of its Python processes.

    Args:
        argv: a file, or a program of this environment, and its arguments. A program in Python runs with this Python,
            whatever its first line says; any other, such as a shell script, as it is.

    Raises:
        SystemExit: there is no such program, or it cannot run.
    """
    path = os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", os.defpath)])
    target = argv[0] if os.path.isfile(argv[0]) else shutil.which(argv[0], path=path)
    if target is None:
        raise SystemExit(f"{argv[0]}: no such program")
    site = str(Path(__file__).parent / "at_start")
    environment = {
        **os.environ,
        "PATH": path,
        "PYTHONPATH": os.pathsep.join([site, *filter(None, [os.environ.get("PYTHONPATH")])]),
        "NVME_OPS_DEEPSPEED": "1",
    }
    command = [*([sys.executable] if _is_python(target) else []), os.path.join(".", target), *argv[1:]]
    sys.stdout.flush()
    try:
        os.execve(command[0], command, environment)
    except OSError as error:
        raise SystemExit(f"{target}: {error.strerror}: it is no program in Python, and no other that can run") from None


def _is_python(program: str) -> bool:
    if program.endswith(".py"):
        return True
    with open(program, "rb") as file:
        first = file.readline(200)
    return first.startswith(b"#!") and b"python" in first


if __name__ == "__main__":
    if len(sys.argv) < 2:
        raise SystemExit("usage: python -m nvme_ops.integrations.deepspeed PROGRAM [ARGUMENT ...]")
    main(sys.argv[1:])
