"""The table of all checks by section, in the order of the report."""

from __future__ import annotations

from functools import partial

from nvme_ops.host import Host
from nvme_ops.op_builder import ALL_OPS

from . import backends, cufile, driver, kernel, memory, ops, toolchain, torch_info
from .result import Checks, Result, run_checks


def collect(host: Host, open_driver: bool = False) -> dict[str, tuple[Result, ...]]:
    """Runs every check that needs no folder; section name -> results. Opens cuFile only if ``open_driver``."""
    environment: Checks = {
        "torch": torch_info.torch,
        "nvme_ops": torch_info.package,
        "ops compiled with": ops.compiled_with,
        "C++ compiler": lambda: ops.if_needed(toolchain.compiler),
        "Python headers": lambda: ops.if_needed(toolchain.python_headers),
        "CUDA": lambda: toolchain.cuda(host),
        "kernel": lambda: kernel.version(host),
        "io_uring sysctl": lambda: kernel.io_uring_sysctl(host),
        "seccomp": lambda: kernel.seccomp(host),
        "aio-max-nr": lambda: kernel.aio_limit(host),
        "memlock limit": lambda: memory.memlock(host),
        "huge pages (hugetlb)": lambda: memory.reserved(host),
        "transparent huge pages": lambda: memory.transparent(host),
        "shared memory (/dev/shm) size": lambda: memory.shared(host),
    }
    return {
        "build": run_checks({"ninja": toolchain.ninja}),
        "ops": run_checks({name: partial(ops.row, builder) for name, builder in ALL_OPS.items()}),
        "backends": backends.section(host),
        "cufile": cufile.section(host) + (run_checks({"cuFile driver": driver.check}) if open_driver else ()),
        "environment": run_checks(environment),
    }
