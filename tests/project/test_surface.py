"""The public names and their signatures are frozen: they are those of ``surface.txt``.

After a change that was agreed on: ``python -m tests.project.test_surface > tests/project/surface.txt``.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Any

from tests.conftest import run_python

PACKAGES = ("", ".data", ".dcp", ".offload", ".op_builder", ".storage")
#: Their keywords are frozen when memories other than the host's are there; until then only their names are.
NAMES_ONLY = "nvme_ops.offload"
FROZEN = Path(__file__).with_name("surface.txt")


def signature(name: str, function: Any) -> str:
    """The call without types, which may become wider, and without what Python itself adds."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:  # an exception's is Python's
        return name
    bare = [
        parameter.replace(annotation=parameter.empty, default=parameter.default if is_plain(parameter.default) else ...)
        for parameter in parameters
        if parameter.name not in ("self", "cls")
    ]
    return f"{name}{inspect.Signature(bare)}"


def is_plain(default: object) -> bool:
    """Whether a default is written alike in every process."""
    return default is inspect.Parameter.empty or isinstance(default, (bool, int, float, str, tuple, type(None)))


def described(name: str, obj: Any) -> Iterator[str]:
    if name.startswith(NAMES_ONLY) or not callable(obj):
        yield name
    elif not inspect.isclass(obj):
        yield signature(name, obj)
    else:
        yield name if issubclass(obj, Enum) else signature(name, obj)
        bases = [base for base in obj.__mro__[1:] if base.__name__ in ("OpBuilder", "aio_handle")]  # are listed too
        more = obj.__mro__[: obj.__mro__.index(bases[0])] if bases else obj.__mro__
        own = [vars(kind) for kind in more if kind.__module__.startswith("nvme_ops")]
        for member in sorted({key for one in own for key in one if not key.startswith("_")}):
            value = inspect.getattr_static(obj, member)
            if isinstance(value, (staticmethod, classmethod)):
                value = value.__func__
            yield "  " + (signature(member, value) if inspect.isfunction(value) else member)


def surface() -> str:
    lines: list[str] = []
    for package in PACKAGES:
        module = importlib.import_module(f"nvme_ops{package}")
        for name in sorted(module.__all__):
            if f".{name}" not in PACKAGES:
                lines += described(f"{module.__name__}.{name}", getattr(module, name))
    return "\n".join(lines) + "\n"


def test_the_surface_is_what_was_frozen() -> None:
    assert surface().splitlines() == FROZEN.read_text().splitlines(), __doc__


def test_packages_need_no_import_of_their_own() -> None:
    lines = [f"assert dir(nvme_ops{package}) == sorted(nvme_ops{package}.__all__)" for package in PACKAGES]
    assert not run_python("\n".join(["import nvme_ops", *lines]), fresh=True).stderr


def public() -> Iterator[tuple[str, Any]]:
    for package in PACKAGES:
        module = importlib.import_module(f"nvme_ops{package}")
        for name in module.__all__:
            obj = getattr(module, name)
            yield name, obj
            for member in dir(obj) if inspect.isclass(obj) and obj.__module__.startswith("nvme_ops") else ():
                if not member.startswith("_"):
                    yield f"{name}.{member}", getattr(obj, member)


if __name__ == "__main__":
    print(surface(), end="")
