"""Storage that fails, fills up or answers late: an error that names operation and file, and the same works again."""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import resource
import shutil
import signal
import threading
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from torch.distributed.checkpoint import CheckpointException

from nvme_ops.base.errors import ChecksumError, FormatError
from tests.conftest import KIB, MIB, file_system, limited
from tests.contract.adapters import Capability, SaveAsync, WrongResultError
from tests.contract.faulty import Faulty, failing_calls, flip
from tests.contract.suite import ADAPTERS, cause_of, judge

Make = Callable[..., Capability]
#: What needs room for each of its works.
FILL = (
    "Save", "SaveAsync", "SaveTorch", "SaveSharded", "DcpSave", "Samples", "Log", "Streamed", "SwappedAnew", "KeyValues"
)  # fmt: skip
CALLS = "pread preadv", "pwrite pwritev", "fsync fdatasync", "ftruncate truncate", "replace"


def fails(one: Capability, operation: bool = True) -> BaseException | None:
    """Works; returns what was raised, which must say what (unless it was opened) and where."""
    try:
        one.work()
    except WrongResultError:
        raise
    except (Exception, CheckpointException) as error:
        why = judge(error, one.folder, operation)
        assert why is None, f"{why}: {error!r}"  # noqa: PT017
        traceback.clear_frames(error.__traceback__)  # which would keep graphs, and so what is still to be written
        return cause_of(error).with_traceback(None)
    return None


def works_again(one: Capability) -> None:
    gc.collect()
    one.check()
    one.work()
    one.check()


@pytest.fixture(scope="module")
def mounted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with file_system(tmp_path_factory.mktemp("disk"), 48 * MIB) as mounted:
        yield mounted


@pytest.fixture
def small_disk(mounted: Path) -> Path:
    for entry in mounted.iterdir():
        if entry.name != "lost+found":
            shutil.rmtree(entry)
    return mounted


@contextlib.contextmanager
def full(folder: Path) -> Iterator[None]:
    ballast = folder.parent / "ballast"
    with ballast.open("wb") as file:
        size = 64 * MIB
        while size >= 4 * KIB:
            try:
                os.posix_fallocate(file.fileno(), os.fstat(file.fileno()).st_size, size)
            except OSError:
                size //= 2
    try:
        yield
    finally:
        ballast.unlink()


def test_a_full_disk(make: Make, kind: type[Capability], small_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = make(kind.__name__, small_disk)
    if isinstance(one, SaveAsync):
        monkeypatch.setattr(one, "options", {})  # over the file before the last one it needs no room
    one.work()
    with full(one.folder):
        error = fails(one, operation=False)
    assert getattr(error, "errno", errno.ENOSPC) == errno.ENOSPC
    assert error is not None or kind.__name__ not in FILL
    works_again(one)


def test_a_limit_of_file_sizes(one: Capability) -> None:
    with limited(resource.RLIMIT_FSIZE, 64 * KIB):
        error = fails(one)
    assert getattr(error, "errno", errno.EFBIG) in (errno.EFBIG, errno.ENOSPC)
    works_again(one)


def test_no_descriptors_left(one: Capability) -> None:
    with limited(resource.RLIMIT_NOFILE, 512), contextlib.ExitStack() as used:
        with contextlib.suppress(OSError):
            while True:
                used.callback(os.close, os.open("/dev/null", os.O_RDONLY))
        error = fails(one, operation=False)
    assert error is None or getattr(error, "errno", errno.EMFILE) == errno.EMFILE
    works_again(one)


def test_a_system_call_that_fails(one: Capability) -> None:
    for calls in CALLS:
        with failing_calls(calls.split(), errno.EIO) as met:
            error = fails(one)
        assert met or error is None, calls
        if met:
            works_again(one)


@pytest.mark.parametrize("what", ["read", "write"])
def test_a_transfer_that_fails(make: Make, what: str, folder: Path) -> None:
    handle = Faulty(error=lambda _: OSError(errno.EIO, f"{what} of bytes: Input/output error", str(folder / "work")))
    one = make(handle=handle)
    one.work()
    for do, numbers in (("refuse", None), ("fail", {2})):
        handle.will(what, do, numbers)
        error, met = fails(one), handle.met
        handle.will()
        if met or error:
            works_again(one)


@pytest.mark.usefixtures("lost_unraisable")
@pytest.mark.parametrize("what", ["read", "write"])
def test_ctrl_c_while_the_device_does_not_answer(make: Make, what: str) -> None:
    handle = Faulty()
    one = make(handle=handle)
    one.work()
    handle.will(what, "hold", {1})

    def press() -> None:
        if handle.under_way.wait(20) and not ended.is_set():
            os.kill(os.getpid(), signal.SIGINT)
            ended.wait(0.1)
        handle.go.set()

    ended, helper = threading.Event(), threading.Thread(target=press)
    helper.start()
    try:
        one.work()
    except (KeyboardInterrupt, CheckpointException) as error:
        assert isinstance(cause_of(error), KeyboardInterrupt)  # noqa: PT017
    finally:
        ended.set()
        handle.under_way.set()
        with contextlib.suppress(KeyboardInterrupt):
            helper.join()
        helper.join()
    handle.will()
    works_again(one)


def test_wrong_bytes_are_told(make: Make, kind: type[Capability]) -> None:
    if not kind.verified:
        pytest.skip("without checksums, or read without a look at them")
    handle = Faulty()
    one = make(handle=handle)
    one.work()
    handle.will("read", "flip")
    with pytest.raises((ChecksumError, FormatError, CheckpointException)) as caught:  # noqa: PT012  (one of them reads)
        for _ in range(50):  # what is used again before it is written is not read
            one.work()
            one.check()
    assert isinstance(cause_of(caught.value), (ChecksumError, FormatError))
    assert handle.met
    handle.will()
    works_again(one)


def in_its_place(path: Path) -> None:
    path.unlink()
    path.mkdir()


DAMAGE: dict[str, Callable[[Path], object]] = {
    "a bit at the begin": lambda path: flip(path, 9),
    "a bit in the middle": lambda path: flip(path, path.stat().st_size // 2, 5),
    "nearly all": lambda path: os.truncate(path, int(path.stat().st_size * 0.999)),
    "empty": lambda path: os.truncate(path, 0),
    "gone": lambda path: path.unlink(),
    "a folder": in_its_place,
}


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("name", sorted(name for name, kind in ADAPTERS.items() if kind.kept))
def test_damage_is_told_with_the_file_or_does_not_matter(name: str, damage: str, folder: Path) -> None:
    one = ADAPTERS[name](folder)
    one.work()
    one.close()
    for path in sorted(entry for entry in folder.rglob("*") if entry.is_file() and entry.stat().st_size):
        content = path.read_bytes()
        DAMAGE[damage](path)
        try:
            ADAPTERS[name].found(folder, 1).check()
        except (OSError, ValueError, KeyError, CheckpointException) as error:
            assert isinstance(error, CheckpointException) or str(folder) in str(error), repr(error)  # noqa: PT017
        finally:
            path.rmdir() if path.is_dir() else None
            path.write_bytes(content)
    ADAPTERS[name].found(folder, 1).check()
