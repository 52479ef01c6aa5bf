"""What the suite knows of all adapters: their names, what they need, and what a process holds while they work."""

from __future__ import annotations

import contextlib
import gc
import os
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

from torch.distributed.checkpoint import CheckpointException

from nvme_ops.base.native import native
from tests.contract import adapters, adapters_offload
from tests.contract.adapters import Capability


def named(*modules: ModuleType) -> dict[str, type[Capability]]:
    classes = [value for module in modules for value in vars(module).values() if isinstance(value, type)]
    return {kind.__name__: kind for kind in classes if issubclass(kind, Capability) and kind is not Capability}


ADAPTERS = named(adapters, adapters_offload)
NEEDS = {"Pretrained": "transformers", "KeyValues": "transformers", "KeyValuesIn8Bits": "transformers"}
SLACK = {"memory": 4 << 20}  # bytes that an allocator may keep


def cause_of(failure: BaseException) -> BaseException:
    """Returns what DCP has wrapped, whatever it is, or the exception itself."""
    return next(iter(failure.failures.values()))[0] if isinstance(failure, CheckpointException) else failure


def judge(failure: BaseException, folder: Path, named: bool = True) -> str | None:
    """Returns why this is not what a caller may expect of a device that fails, or None."""
    failure = cause_of(failure)
    if isinstance(failure, AssertionError):  # which DCP made of an OSError of the metadata
        return None if str(folder) in str(failure) and "Errno" in str(failure) else "names no file"
    if not isinstance(failure, OSError):
        return f"{type(failure).__name__} is no OSError"
    if failure.errno is None or not failure.filename:
        return "no errno, or no file"
    if not str(failure.filename).startswith(str(folder)):
        return f"names {failure.filename}"
    operation = str(failure.strerror).replace(os.strerror(failure.errno), "")
    return None if len(operation.strip(" :")) > 2 or not named else "names no operation"


def threads() -> int:
    """Returns how many this process has, without io_uring's: the kernel starts and ends those as it sees fit."""
    names = []
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # it has ended meanwhile
            names.append((task / "comm").read_text())
    return sum(not name.startswith("iou-") for name in names)


def held() -> dict[str, int]:
    gc.collect()
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": threads(),
        "memory": native().pool_statistics()["live_bytes"],
    }


def settled() -> dict[str, int]:
    """Returns the same, once it does not change any more."""
    last, deadline = held(), time.monotonic() + 2
    while time.monotonic() < deadline:
        time.sleep(0.01)
        now = held()
        if now == last:
            break
        last = now
    return last


def require_no_more(before: dict[str, int], descriptors: int = 1, threads: int = 99) -> None:
    """Fails if the process holds more than it did; so many descriptors and threads may have been added."""
    after = settled()
    assert after["descriptors"] <= before["descriptors"] + descriptors
    assert after["threads"] <= before["threads"] + threads
    assert after["memory"] <= before["memory"] + SLACK["memory"]


def failures(folder: Path) -> Iterator[tuple[str, BaseException]]:
    """Has each capability work twice in a folder of its own; yields the names of those that fail, and how they do."""
    for name, kind in ADAPTERS.items():
        if not find_spec(NEEDS.get(name, "torch")):
            continue
        (folder / name).mkdir()
        try:
            one = kind(folder / name)
            for _ in range(2):
                one.work()
            one.check()
            one.close()
        except (Exception, CheckpointException) as failure:
            yield name, failure


def files(folder: Path) -> int:
    return sum(len(names) for _, _, names in os.walk(folder))


def forget_pages(folder: Path) -> None:
    """Has the files read from the device, as far as they are on it."""
    for parent, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                fd = os.open(os.path.join(parent, name), os.O_RDONLY)
                with contextlib.suppress(OSError):
                    os.fsync(fd)
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
                os.close(fd)
