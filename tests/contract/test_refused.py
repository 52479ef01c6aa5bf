"""System calls that are refused, by a container's filter or a file system: all is right, or an error says which."""

from __future__ import annotations

import errno
import os
import threading
import traceback
from pathlib import Path

import pytest
import torch

import nvme_ops
from nvme_ops.base.native import native
from tests.conftest import MIB, in_child
from tests.contract.adapters import WrongResultError
from tests.contract.suite import NEEDS, failures, judge
from tests.handle.test_environment import forbid, known_system_calls  # noqa: F401  (a fixture)

EVERY = errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP
CALLS = {  # x86_64's numbers, and the errors that are met
    "fallocate": (285, (*EVERY, errno.ENOSPC)), "fchmod": (91, EVERY), "fsync": (74, EVERY), "fdatasync": (75, EVERY),
    "statx": (332, EVERY), "preadv2": (327, EVERY), "flock": (73, EVERY), "link": (86, EVERY),
    **{
        name: (number, (errno.EPERM,))
        for name, number in {
            "ftruncate": 77, "preadv": 295, "pwritev": 296, "pwritev2": 328, "cachestat": 451, "rename": 82,
            "madvise": 28, "mlock": 149, "statfs": 137, "fstatfs": 138, "sched_setaffinity": 203, "io_uring_enter": 426,
            "io_submit": 209, "prlimit64": 302, "utimensat": 280, "getrandom": 318,
        }.items()
    },
}  # fmt: skip
#: What no part of this package can do without: an error names it.
NEEDED = {"fsync", "fdatasync", "ftruncate", "rename", "io_uring_enter", "io_submit"}
QUICK = [("fallocate", errno.EOPNOTSUPP), ("fchmod", errno.EPERM), ("statx", errno.EPERM)]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("call", "error"),
    [
        pytest.param(call, error, id=f"{call}-{errno.errorcode[error]}", marks=[] if quick else pytest.mark.slow)
        for call, (_, errors) in CALLS.items()
        for error in errors
        for quick in [(call, error) in QUICK]
    ],
)
def test_everything_works_or_says_what_is_refused(folder: Path, call: str, error: int) -> None:
    for needed in " ".join(NEEDS.values()).split():
        pytest.importorskip(needed)
    native()

    def refused() -> None:
        torch.set_num_threads(1)
        assert forbid(CALLS[call][0], error)
        wrong = []
        for name, failure in failures(folder):
            if name == "Pretrained" and call == "ftruncate":  # which safetensors calls
                continue
            why = "wrong" if isinstance(failure, WrongResultError) else judge(failure, folder / name)
            if why is not None or (call not in NEEDED and error != errno.ENOSPC):  # nothing that they need is refused
                wrong.append(f"{name}: {why}: {''.join(traceback.format_exception(failure)[-3:])}")
        assert not wrong, "\n\n".join(wrong)

    in_child(refused)


PARTS, PART = 8, 2 * MIB + 77


def write_parts(path: Path, numbers: range) -> None:
    handles = [nvme_ops.aio_handle(), nvme_ops.aio_handle()]
    parts = [torch.full((PART,), number + 1, dtype=torch.uint8) for number in numbers]
    threads = [
        threading.Thread(target=handles[index % 2].sync_pwrite, args=(part, path, number * PART))
        for index, (number, part) in enumerate(zip(numbers, parts, strict=True))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@pytest.mark.parametrize("error", [errno.EOPNOTSUPP, errno.ENOSYS, errno.EINTR, errno.EPERM, 0])
def test_parts_written_at_once_where_nothing_can_be_allocated(folder: Path, error: int) -> None:
    """Threads, handles and processes extend one file: none cuts off what another has written."""
    native()

    def limited() -> None:
        torch.set_num_threads(1)
        assert not error or forbid(CALLS["fallocate"][0], error)
        for turn in range(15):
            path = folder / f"parts {turn}"
            child = os.fork()
            write_parts(path, range(bool(child), PARTS, 2))
            if not child:
                os._exit(0)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
            assert path.read_bytes() == b"".join(bytes([number + 1]) * PART for number in range(PARTS))
            path.unlink()

    in_child(limited)
