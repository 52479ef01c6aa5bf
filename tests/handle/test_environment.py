"""Systems that forbid io_uring or have no aio contexts left: the next backend serves, and the reason is told."""

from __future__ import annotations

import ctypes
import errno
import platform
from pathlib import Path

import pytest
import torch

from nvme_ops import aio_handle
from nvme_ops.base.native import native
from tests.conftest import in_child, round_trip, run_python
from tests.restrictions import IO_SETUP, IO_URING_SETUP, forbid

IO_DESTROY = 207  # x86_64's number


def use_up_aio() -> list[ctypes.c_ulong]:
    """Takes every aio context there is."""
    contexts = []
    for events in (1 << 14, 1 << 10, 1 << 6, 1):
        while ctypes.CDLL(None).syscall(IO_SETUP, events, ctypes.byref(context := ctypes.c_ulong())) == 0:
            contexts.append(context)
    return contexts


@pytest.fixture(scope="module", autouse=True)
def known_system_calls() -> None:
    if platform.machine() != "x86_64":
        pytest.skip("the numbers of the system calls are those of x86_64")


def usable(backend: str) -> None:
    reason = native().backends()[backend]
    if reason is not None:
        pytest.skip(f"{backend}: {reason}")


@pytest.mark.parametrize("error", [errno.EPERM, errno.ENOSYS])
def test_io_uring_forbidden_by_seccomp(folder: Path, error: int) -> None:
    program = f"""
    import os, sys
    from pathlib import Path
    import pytest, nvme_ops
    from tests.conftest import round_trip
    from nvme_ops.base.native import native
    from tests.handle.test_environment import forbid
    if not forbid({IO_URING_SETUP}, {error}):
        sys.exit("no seccomp")
    reason = native().backends()["io_uring"]
    assert "seccomp" in reason, reason
    handle = nvme_ops.aio_handle()
    assert handle.backend in ("libaio", "threads"), handle.backend
    round_trip(handle, Path(sys.argv[1]))
    for arguments in ({{"backend": "io_uring"}}, {{}}):
        with pytest.raises(RuntimeError, match="the io_uring backend is not usable: ") as refused:
            nvme_ops.aio_handle(**arguments)
        assert reason in str(refused.value)
        os.environ["NVME_OPS_BACKEND"] = "io_uring"
    """
    result = run_python(program, folder / "file", check=False, NVME_OPS_BACKEND="")
    if "no seccomp" in result.stderr:
        pytest.skip("the system takes no seccomp filter")
    assert result.returncode == 0, result.stderr


def test_io_uring_forbidden_after_it_was_probed(folder: Path) -> None:
    """A sandbox that closes late: the handle falls back, a backend asked for by name says why not."""
    usable("io_uring")

    def sandboxed() -> None:
        assert forbid(IO_URING_SETUP, errno.EPERM)
        round_trip(aio_handle(intra_op_parallelism=2, backend="auto"), folder / "file")
        named = aio_handle(backend="io_uring")
        for call in (named.sync_pread, lambda *a: named.submit_pread(*a).result()):
            with pytest.raises(PermissionError, match="io_uring_setup"):
                call(torch.zeros(4), folder / "file")

    in_child(sandboxed)


@pytest.mark.alone
def test_aio_contexts_used_up(folder: Path) -> None:
    usable("libaio")
    if int(Path("/proc/sys/fs/aio-max-nr").read_text()) > 1 << 20:
        pytest.skip("fs.aio-max-nr is too large to use up")

    def starved() -> None:
        named = aio_handle(backend="libaio")
        contexts = use_up_aio()
        with pytest.raises(OSError, match=r"fs\.aio-max-nr"):
            named.sync_pread(torch.zeros(4), "/proc/self/exe")
        if forbid(IO_URING_SETUP, errno.EPERM):
            round_trip(aio_handle(backend="auto"), folder / "file")  # on threads
        for context in contexts:
            ctypes.CDLL(None).syscall(IO_DESTROY, context)
        round_trip(named, folder / "file")

    in_child(starved)
    program = """
    import pytest, nvme_ops
    from nvme_ops.base.native import native
    from tests.handle.test_environment import use_up_aio
    contexts = use_up_aio()  # before the probe
    reason = native().backends()["libaio"]
    assert reason and "aio-max-nr" in reason, reason
    with pytest.raises(RuntimeError, match="the libaio backend is not usable") as refused:
        nvme_ops.aio_handle(backend="libaio")
    assert reason in str(refused.value)
    """
    run_python(program)
