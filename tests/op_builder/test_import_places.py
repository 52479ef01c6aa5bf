"""Where programs for DeepSpeed import the builders from, before and after the ops are loaded, prebuilt or not."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import run_python

BUILDERS = {"aio": "AsyncIOBuilder", "gds": "GDSBuilder", "pin_memory": "PinMemoryBuilder"}


@pytest.mark.parametrize("place", BUILDERS)
@pytest.mark.parametrize("order", ["import first", "load first"])
def test_deepspeeds_import_places(place: str, order: str) -> None:
    """The native gds op has the name of one of these packages, and takes its place when it is loaded."""
    program = f"""
import sys
first = {order == "import first"}
if first:
    from nvme_ops.ops.{place} import {BUILDERS[place]}
from nvme_ops import op_builder
native = op_builder.{BUILDERS[place]}().load()
handle = next(name for name in ("pin_handle", "gds_handle", "aio_handle") if hasattr(native, name))
from nvme_ops.ops.{place} import {BUILDERS[place]}
import nvme_ops.ops.{place} as module
assert {BUILDERS[place]} is module.{BUILDERS[place]} is op_builder.{BUILDERS[place]}
assert {BUILDERS[place]}().load() is native
print(handle)
"""
    assert run_python(program, fresh=True).stdout == f"{'pin' if place == 'pin_memory' else place}_handle\n"


def test_importing_a_builder_loads_nothing() -> None:
    program = "import sys; from nvme_ops.ops import aio, gds, pin_memory; print('torch' in sys.modules)"
    assert run_python(program, fresh=True).stdout == "False\n"


def test_the_package_is_found_before_a_prebuilt_op(tmp_path: Path) -> None:
    """Python's finder prefers a package to an extension module of the same name, and that to a plain module."""
    program = """
import importlib.machinery, pathlib, sys
place = pathlib.Path(sys.argv[1])
(place / f"gds{importlib.machinery.EXTENSION_SUFFIXES[0]}").write_bytes(b"a prebuilt op")
import nvme_ops.ops
package = pathlib.Path(nvme_ops.ops.__path__[0])
(place / "gds").symlink_to(package / "gds")
nvme_ops.ops.__path__[:] = [str(place)]
from nvme_ops.ops.gds import GDSBuilder
print(GDSBuilder.__name__)
"""
    assert run_python(program, tmp_path).stdout == "GDSBuilder\n"
