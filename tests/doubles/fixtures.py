"""A pytest plugin: a test that asks for ``cufile`` runs in a forked child, where cuFile's driver is still to be opened.

So each test meets a fresh library, whatever it does to it, and pytest's own process never opens cuFile. When the test
has ended, the op is shut down; then nothing may be registered any more, and nothing may have been misused.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import os
from collections.abc import Callable

import pytest
import torch

from nvme_ops.base.native import native
from nvme_ops.op_builder import GDSBuilder, machine
from tests.conftest import in_child
from tests.doubles import NVIDIA_FS, FakeCuFile, PrivateDevice, build, private_device


@pytest.fixture(scope="session")
def ops() -> None:
    """Loads the ops and has them look for what the kernel offers, which every child would do anew."""
    native().backends()
    GDSBuilder().load().Engine(4096, 1, False, False, 1, "", "auto")


@pytest.fixture(scope="session")
def the_device() -> PrivateDevice:
    """The simulated accelerator, unless the machine has a real one or no compiler."""
    if private_device.cache_info().currsize > 0:  # by another test: torch counts it as an accelerator
        return private_device()
    if torch.cuda.is_available() or (hasattr(torch, "accelerator") and torch.accelerator.is_available()):
        pytest.skip("torch has a real accelerator, and only one can page-lock memory in a process")
    if machine.find_compiler() is None:
        pytest.skip("no C++ compiler, which builds the simulated accelerator")
    # autograd would start a thread for the device, and refuses backward passes in forked children then
    torch.ones(1, requires_grad=True).sum().backward()
    return private_device()


@pytest.fixture
def cufile(the_device: PrivateDevice, ops: None) -> FakeCuFile:
    """The library that this test's ``gds_handle`` loads; nvidia-fs is there unless it ``offer``s something else."""
    return FakeCuFile(build("cufile"))


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Runs the test in a child, for its fixture ``cufile``, or a ``device`` that has one."""
    cufile = pyfuncitem.funcargs.get("cufile") or getattr(pyfuncitem.funcargs.get("device"), "cufile", None)
    if not isinstance(cufile, FakeCuFile):
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
    in_child(functools.partial(_run, pyfuncitem.obj, cufile, arguments))
    return True


def _run(test: Callable[..., None], cufile: FakeCuFile, arguments: dict[str, object]) -> None:
    gc.freeze()  # what the child inherited, it need not look through
    for name in [name for name in os.environ if name.startswith(("CUFILE_", "NVME_OPS_GDS"))]:
        del os.environ[name]
    os.environ["NVME_OPS_CUFILE_LIBRARY"] = str(cufile.path)
    os.chdir(cufile.path.parent)  # where the library, which is like NVIDIA's in this, writes cufile.log
    cufile.offer(nvidia_fs=NVIDIA_FS)
    device = next((value for value in arguments.values() if isinstance(value, PrivateDevice)), None)
    with device.left_as_found() if device else contextlib.nullcontext():
        test(**arguments)
        gc.collect()
        assert cufile.violations() == ""
        assert cufile.now.files == 0
        GDSBuilder().load().shut_down()
        cufile.check_idle(0)
