"""Builds the ops ahead of time if the environment requests it; everything else is in ``pyproject.toml``.

``NVME_BUILD_OPS=1`` builds every op that this machine can build; ``NVME_BUILD_AIO=1`` and ``NVME_BUILD_GDS=1`` build
one op or fail. Without them nothing is compiled and torch is not needed.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext


def load_op_builder() -> ModuleType:
    """Returns ``nvme_ops.op_builder`` without importing ``nvme_ops``, which needs torch: it may not be installed."""
    folder = Path(__file__).parent / "nvme_ops" / "op_builder"  # an sdist leaves the folder op_builder out
    spec = importlib.util.spec_from_file_location(
        "nvme_ops_op_builder", folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    if spec is None or spec.loader is None:
        sys.exit(f"nvme-ops: {folder} does not exist")
    package = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(package)
    return package


op_builder = load_op_builder()
finished = importlib.import_module("nvme_ops_op_builder.finished")
jit = importlib.import_module("nvme_ops_op_builder.jit")


def requested_ops() -> list[Any]:
    """Returns the builders of the ops to compile; exits with the reason if one that was requested cannot be built."""
    try:
        all_requested = jit.variable(jit.BUILD_ALL)
        requested = {op: jit.variable(op.BUILD_VAR) for op in op_builder.ALL_OPS.values()}
    except ValueError as error:
        sys.exit(f"nvme-ops: {error}")
    wanted = [op for op, own in requested.items() if own or (own is None and all_requested)]
    chosen, problems = [], {}
    for op in wanted:
        problem = jit.obstacle(op)
        if problem is None:
            chosen.append(op)
        else:
            problems[op] = f"nvme-ops: the {op.name} op cannot be built: {problem}"
    for op, text in problems.items():
        if requested[op] or not chosen:
            variable = op.BUILD_VAR if requested[op] else jit.BUILD_ALL
            sys.exit(f"{text}\nWithout {variable}=1 it is built on first use instead.")
        op.warning(f"{text}; left out ({op.BUILD_VAR}=1 makes this an error)")
    return chosen


class BuildOps(build_ext):
    """Compiles the ops exactly as a just-in-time build does, and records beside each what it was made from."""

    def build_extension(self, ext: Extension) -> None:
        """Compiles one op to where setuptools expects it."""
        op = next(op for op in op_builder.ALL_OPS.values() if op.absolute_name() == ext.name)
        try:
            jit.prebuild(op.recipe(), Path(self.get_ext_fullpath(ext.name)))
        except RuntimeError as error:
            sys.exit(f"nvme-ops: {error}")

    def copy_extensions_to_source(self) -> None:
        """Copies the op's record into the checkout, too, in an editable install."""
        super().copy_extensions_to_source()
        for ext in self.extensions:
            built = Path(self.build_lib, self.get_ext_filename(ext.name))
            source = Path(self.get_finalized_command("build_py").get_package_dir("nvme_ops.ops"))
            self.copy_file(str(finished.record_path(built)), str(source))


def urls() -> dict[str, str]:
    """Returns the addresses of the repository's pages, if ``NVME_OPS_HOME`` names the repository."""
    home = os.environ.get("NVME_OPS_HOME", "").rstrip("/")
    pages = {"Homepage": "", "Documentation": "/blob/main/docs/index.md", "Changelog": "/blob/main/CHANGELOG.md",
             "Issues": "/issues"}  # fmt: skip
    return {name: home + page for name, page in pages.items()} if home else {}


setup(project_urls=urls(), ext_modules=[op.builder() for op in requested_ops()], cmdclass={"build_ext": BuildOps})
