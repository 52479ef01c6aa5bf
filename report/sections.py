"""The table of all checks: which section of the report holds which, in the order in which a reader meets them."""

from __future__ import annotations

from functools import partial

from nvme_ops.op_builder import ALL_OPS

from . import aio, backends, cufile, driver, kernel, memory, ops, toolchain, torch_info
from .host import Host
from .result import Check, Result, run_checks


def collect(host: Host, open_driver: bool = False) -> dict[str, tuple[Result, ...]]:
    """Run every check that needs no folder; section name -> results. cuFile is opened only if ``open_driver`` asks."""
    environment = [
        Check("torch", torch_info.torch),
        Check("nvme_ops", torch_info.package),
        Check("ops compiled with", ops.compiled_with),
        Check("C++ compiler", partial(ops.if_needed, toolchain.compiler)),
        Check("Python headers", partial(ops.if_needed, toolchain.python_headers)),
        Check("CUDA", partial(toolchain.cuda, host)),
        Check("kernel", partial(kernel.version, host)),
        Check("io_uring sysctl", partial(kernel.io_uring_sysctl, host)),
        Check("seccomp", partial(kernel.seccomp, host)),
        Check("aio-max-nr", partial(aio.limit, host)),
        Check("memlock limit", partial(memory.memlock, host)),
        Check("huge pages (hugetlb)", partial(memory.reserved, host)),
        Check("transparent huge pages", partial(memory.transparent, host)),
        Check("shared memory (/dev/shm) size", partial(memory.shared, host)),
    ]
    return {
        "build": run_checks([Check("ninja", toolchain.ninja)]),
        "ops": run_checks([Check(name, partial(ops.row, builder)) for name, builder in ALL_OPS.items()]),
        "backends": backends.section(host),
        "cufile": cufile.section(host) + (run_checks([Check("cuFile driver", driver.check)]) if open_driver else ()),
        "environment": run_checks(environment),
    }
