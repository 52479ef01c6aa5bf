"""What the tests of the op share: places to write, backends, data, handles, and processes to break things in."""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import gc
import io
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import hypothesis
import pytest
import torch
from hypothesis.internal.conjecture import providers

from nvme_ops import aio_handle
from nvme_ops.base.native import native
from nvme_ops.measure import stop
from nvme_ops.op_builder import ALL_OPS
from tests import prepared

pytest_plugins = ("tests.running", "tests.doubles.fixtures")

REPOSITORY = Path(__file__).parent.parent
BACKENDS = ("io_uring", "libaio", "threads")
KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
MEMORY = "/dev/shm" if os.path.isdir("/dev/shm") else None  # a folder
NOBODY = 65534

# The same sources are tested with the same examples, whatever the load; others: PYTEST_ARGS=--hypothesis-profile=search
hypothesis.settings.register_profile("repeatable", deadline=None, derandomize=True, database=None)
hypothesis.settings.register_profile("search", deadline=None)
hypothesis.settings.load_profile("repeatable")
# Numbers and texts in the modules of ours that are imported by then would be among the examples.
providers._get_local_constants = lambda: providers._local_constants


os.environ["COLUMNS"] = "80"  # whatever terminal the tests run in


def pytest_collection_finish() -> None:
    """Collecting loads no op: it is quick, and works, where none has been compiled yet."""
    if loaded := [name for name, builder in ALL_OPS.items() if builder.is_loaded()]:
        pytest.exit(f"a module of tests loads {', '.join(loaded)} when it is imported", pytest.ExitCode.USAGE_ERROR)


def pattern(size: int, seed: int = 0) -> torch.Tensor:
    """``size`` bytes that tell where they belong."""
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def contents(path: Path) -> torch.Tensor:
    """The file's bytes, by way of the page cache."""
    return torch.frombuffer(bytearray(path.read_bytes() or b"\0"), dtype=torch.uint8)[: path.stat().st_size]


def store(path: Path, data: torch.Tensor) -> Path:
    """Writes a file without the op under test, and asks the page cache to forget it."""
    with path.open("wb") as file:
        file.write(data.numpy().tobytes())
        file.flush()
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return path


def sync_file_system(path: Path) -> None:
    """Makes durable what one file system or device has: ``os.sync`` waits for every disk of the machine."""
    subprocess.run(["sync", *([] if path.is_block_device() else ["-f"]), path], check=True)


def takes_direct_io(folder: Path) -> bool:
    try:
        with tempfile.NamedTemporaryFile(dir=folder) as file:
            os.close(os.open(file.name, os.O_RDWR | os.O_DIRECT))
    except OSError:
        return False
    return True


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """An empty folder on a file system with O_DIRECT."""
    if takes_direct_io(tmp_path):
        yield tmp_path
        return
    for base in ("/var/tmp", str(Path.home()), str(REPOSITORY)):
        if os.access(base, os.W_OK) and takes_direct_io(Path(base)):
            with tempfile.TemporaryDirectory(dir=base) as path:
                yield Path(path)
            return
    pytest.skip(f"neither {tmp_path} nor /var/tmp is on a file system with O_DIRECT")


@pytest.fixture
def quick_folder() -> Iterator[Path]:
    """An empty folder in memory, where there can be one: what is flushed a hundred times takes no time there."""
    with tempfile.TemporaryDirectory(dir=MEMORY) as path:
        yield Path(path)


@pytest.fixture
def no_collection() -> Iterator[None]:
    """No garbage is collected meanwhile: what a signal handler raises while Python runs a ``__del__`` is lost."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    """Each backend in turn."""
    reason = native().backends()[request.param]
    if reason is not None:
        pytest.skip(f"{request.param}: {reason}")
    return str(request.param)


def round_trip(handle: aio_handle, path: Path, size: int = 3 * MIB + 5) -> None:
    """Fails unless the handle writes and reads, blocking and asynchronous."""
    data = pattern(size)
    back = torch.zeros_like(data)
    assert handle.sync_pwrite(data, path) == 1
    assert handle.sync_pread(back, path) == 1
    assert torch.equal(back, data)
    back.zero_()
    assert handle.submit_pread(back, path).result() == size
    assert torch.equal(back, data)


def in_threads(work: Callable[[int], object], count: int) -> None:
    """``work(number)`` for each number at once; raises what one of them raised."""
    errors: list[BaseException] = []

    def run(number: int) -> None:
        try:
            work(number)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=[number]) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


HandleFactory = Callable[..., aio_handle]


@pytest.fixture
def make_handle(backend: str) -> HandleFactory:
    """``aio_handle`` for each backend in turn."""
    return functools.partial(aio_handle, backend=backend)


@pytest.fixture
def handle(make_handle: HandleFactory) -> aio_handle:
    """A handle as it comes, for each backend in turn."""
    return make_handle()


def watched(patch: pytest.MonkeyPatch, owner: Any, name: str, note: Callable[..., Any]) -> list[Any]:
    """Returns a list, to which each call of a function from now on adds what ``note`` makes of its arguments."""
    noted: list[Any] = []
    real = getattr(owner, name)

    def call(*given: Any, **options: Any) -> Any:
        noted.append(note(*given, **options))
        return real(*given, **options)

    patch.setattr(owner, name, call)
    return noted


def run_python(
    program: str, *arguments: object, check: bool = True, fresh: bool = False, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Runs a program in a process of its own; in a ``fresh`` one nothing has been imported yet."""
    words = ["-c", textwrap.dedent(program), *map(str, arguments)]
    if fresh:
        result = subprocess.run(
            [sys.executable, *words],
            env={**os.environ, "PYTHONPATH": str(REPOSITORY), **environment},
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
    else:
        result = prepared.run(*words, environment=environment)
    if check:
        assert result.returncode == 0, result.stdout + result.stderr
    return result


def with_mounts(mounts: str, *command: object, **environment: str) -> str:
    """What a command prints after ``mounts``, one line of shell, in a mount namespace that ends with it.

    Skips the test where there can be none.
    """
    if shutil.which("unshare") is None:
        pytest.skip("unshare is not installed")
    # one who is not root becomes it in a user namespace, where the kernel allows that
    unshare = ["unshare", "-m" if os.geteuid() == 0 else "-rm", "sh", "-c", f'({mounts}) || exit 77; exec "$@"', "sh"]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), **environment}
    done = subprocess.run([*unshare, *map(str, command)], env=environment, capture_output=True, text=True, timeout=60)
    if done.returncode == 77 or done.stderr.startswith("unshare:"):
        pytest.skip(f"cannot be mounted here: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr
    return done.stdout


def refusal(main: Callable[[list[str]], int], words: list[str]) -> tuple[int, str]:
    """The status of a command given wrong arguments and what it says of them, without the seconds of a new process."""
    errors = io.StringIO()
    with contextlib.redirect_stderr(errors):
        try:
            status = main(words)
        except SystemExit as end:
            status = end.code if isinstance(end.code, int) else 1
    return status, errors.getvalue()


def _serve_child(body: Callable[[], object], report: int, limit: int = 60) -> NoReturn:
    try:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        faulthandler.register(signal.SIGALRM, file=report, chain=True)
        signal.alarm(limit)  # a child that hangs ends too, and says where
        torch.set_num_threads(1)  # OpenMP's threads are the parent's
        body()
    except BaseException:
        os.write(report, traceback.format_exc().encode())
        os._exit(1)
    os._exit(0)


def in_child(body: Callable[[], object], limit: int = 60) -> None:
    """Runs ``body`` in a forked child, where limits, rights and filters can be given up; fails with its traceback."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        _serve_child(body, writing, limit)
    os.close(writing)
    with open(reading, "rb") as pipe:
        report = pipe.read().decode()
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0, report or f"the child ended with status {status}"


@contextlib.contextmanager
def living(body: Callable[[], object] = str) -> Iterator[tuple[int, Any]]:
    """Forks a child that does ``body``, and is killed at the end of the block: its number, and what ``body`` returned.

    What that is lives as long in the child; the parent has it as a string.
    """
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            torch.set_num_threads(1)
            made = body()
            os.write(writing, b"." + str(made).encode())
            signal.pause()
        finally:
            os._exit(1)
    os.close(writing)
    try:
        with open(reading, "rb", buffering=0) as pipe:
            told = pipe.read(4096).decode()
        assert told, "the child did not come so far"
        yield child, told[1:]
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def killed_in(body: Callable[[], object]) -> None:
    """Kills a forked child, with SIGKILL, once it has done ``body``."""
    with living(body):
        pass


@contextlib.contextmanager
def forked(count: int, body: Callable[[int], object]) -> Iterator[Callable[[], bool]]:
    """``body(number)`` in so many forked children at once; tells whether one still runs. All end well, or it fails."""
    children = []
    for number in range(count):
        child = os.fork()
        if child == 0:
            _serve_child(lambda number=number: body(number), 2, 240)  # type: ignore[misc]
        children.append(child)
    ended: dict[int, int] = {}

    def running() -> bool:
        for child in children:
            if child not in ended:
                pid, status = os.waitpid(child, os.WNOHANG)
                ended.update({pid: status} if pid else {})
        return len(ended) < count

    try:
        yield running
    finally:
        for child in children:
            if child not in ended:
                ended[child] = os.waitpid(child, 0)[1]
    assert set(ended.values()) <= {0}


@contextlib.contextmanager
def limited(which: int, value: int) -> Iterator[None]:
    """A soft limit of this process until the end of the block."""
    before = resource.getrlimit(which)
    resource.setrlimit(which, (value, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(which, before)


def give_up_root() -> None:
    """Becomes nobody, without any capability. Does nothing without root."""
    if os.geteuid() == 0:
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)


def open_to_all(path: Path) -> None:
    """Lets other users come to ``path``: pytest's folders are private."""
    path.chmod(0o777)
    roots = {Path(tempfile.gettempdir()), Path(os.environ.get("PYTEST_DEBUG_TEMPROOT") or tempfile.gettempdir())}
    for parent in path.parents:
        if roots.intersection(parent.parents):
            parent.chmod(parent.stat().st_mode | 0o011)


def _command(*words: object) -> str:
    return subprocess.run([str(word) for word in words], check=True, capture_output=True, text=True).stdout.strip()


class LoopDevice:
    """A block device over a new file, for a file system of this kind or none. Skips where there can be none."""

    def __init__(self, folder: Path, size: int, sector: int = 512, kind: str = "ext4") -> None:
        if os.geteuid() != 0:
            pytest.skip("loop devices need root")
        for tool in ("losetup", f"mkfs.{kind}", "mount", "umount"):
            if shutil.which(tool) is None:
                pytest.skip(f"{tool} is not installed")
        self.image = folder / f"device{len(list(folder.iterdir()))}"
        with self.image.open("wb") as file:
            file.truncate(size)
        try:
            self.path = Path(_command("losetup", "--find", "--show", "--sector-size", sector, self.image))
        except subprocess.CalledProcessError as error:
            pytest.skip(f"no loop device: {error.stderr.strip()}")

    def close(self) -> None:
        _command("losetup", "--detach", self.path)
        self.image.unlink()


#: File systems; ext4 without a journal and a reserve: a small device is for the test's data.
MAKE = {
    "ext2": "mkfs.ext2 -q -F -m 0 -b 4096",
    "ext4": "mkfs.ext4 -q -F -m 0 -b 4096 -O ^has_journal",
    "xfs": "mkfs.xfs -q -f -m reflink=1",
    "btrfs": "mkfs.btrfs -q -f",
}


@pytest.fixture
def make_device(folder: Path) -> Iterator[Callable[..., LoopDevice]]:
    """Makes loop devices: ``make_device(size, sector=512)``. Needs root."""
    with contextlib.ExitStack() as stack:
        yield lambda *given: stack.enter_context(contextlib.closing(LoopDevice(folder, *given)))


@contextlib.contextmanager
def file_system(folder: Path, size: int, sector: int = 512, kind: str = "ext4") -> Iterator[Path]:
    """A small file system on a loop device."""
    with contextlib.closing(LoopDevice(folder, size, sector, kind)) as device:
        mounted = folder / f"mounted{device.path.name}"
        mounted.mkdir()
        _command(*MAKE[kind].split(), device.path)
        try:
            _command("mount", device.path, mounted)
        except subprocess.CalledProcessError as error:
            pytest.skip(f"cannot mount: {error.stderr.strip()}")
        try:
            yield mounted
        finally:
            _command("umount", mounted)


@pytest.fixture
def make_file_system(folder: Path) -> Iterator[Callable[..., Path]]:
    """Makes and mounts small file systems: ``make_file_system(size, sector=512, kind="ext4")``. Needs root."""
    with contextlib.ExitStack() as stack:
        yield lambda *given, **options: stack.enter_context(file_system(folder, *given, **options))


@pytest.fixture
def eager_switches() -> Iterator[None]:
    """Lets threads take turns as often as they can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """torch computes with one thread: of small tensors more would wait for each other, on a machine with other work."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def quiet_transformers() -> Iterator[None]:
    """transformers says errors alone."""
    logging: Any = pytest.importorskip("transformers").logging
    before = logging.get_verbosity()
    logging.set_verbosity_error()
    yield
    logging.set_verbosity(before)


@pytest.fixture
def unraisable(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The exceptions that went to ``sys.unraisablehook``."""
    caught: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda event: caught.append(event.exc_value))
    return caught


@pytest.fixture(autouse=True)
def _quick_collection() -> None:
    """``gc.collect()`` in a test looks through what the test made: all of torch takes it 0.1 to 0.3 s."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _no_device_for_dcp(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other tests of this process may have registered the simulated device, which DCP's own writer takes for a GPU."""
    device = getattr(torch, torch._C._get_privateuse1_backend_name(), None)
    saves = hasattr(request.module, "dcp") or request.module.__name__ == "tests.benchmarks.test_programs"
    if device is not None and saves:
        monkeypatch.setattr(device, "is_available", lambda: False)


@pytest.fixture(autouse=True)
def _wide_terminal(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests of what tables say look for lines as wide as they like."""
    if request.module.__name__.startswith(("tests.bench.", "tests.benchmarks.", "tests.offload.test_cli")):
        monkeypatch.setenv("COLUMNS", "400")


@pytest.fixture(autouse=True)
def _same_signals() -> Iterator[None]:
    """Takes back what a command does that is called here: a forked child would inherit it."""
    before = {number: signal.getsignal(number) for number in stop.SIGNALS}
    yield
    for number, handler in before.items():
        if signal.getsignal(number) is not handler:
            signal.signal(number, handler)
