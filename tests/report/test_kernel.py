"""The kernel's lines: io_uring and who forbids it, AIO, seccomp, and the choice among the kernel."""

from __future__ import annotations

import ctypes
import errno
import json
import os
import platform
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from nvme_ops.op_builder.machine import Host
from nvme_ops.report import kernel, ops
from nvme_ops.report.result import Result, Status

ROOT = Path(__file__).parents[2]
MakeHost = Callable[..., Host]

# Installs a seccomp filter that answers one system call with one errno, as container runtimes do, then runs a check.
FILTERED = """
import ctypes, json, struct, sys
number, code = int(sys.argv[1]), int(sys.argv[2])
program = b"".join(struct.pack("HBBI", *instruction) for instruction in [
    (0x20, 0, 0, 0),                   # load the system call's number
    (0x15, 0, 1, number),              # is it this one?
    (0x06, 0, 0, 0x00050000 | code),   # then fail with the errno
    (0x06, 0, 0, 0x7fff0000),          # else allow
])
memory = ctypes.create_string_buffer(program)
header = ctypes.create_string_buffer(struct.pack("HxxxxxxP", 4, ctypes.addressof(memory)))
libc = ctypes.CDLL(None, use_errno=True)
assert libc.prctl(38, 1, 0, 0, 0) == 0
if libc.prctl(22, 2, header):
    sys.exit(77)
from nvme_ops.report import kernel
from nvme_ops.op_builder.machine import Host
host = Host()
ring = kernel.io_uring(host)
print(json.dumps([ring.status.value, ring.detail, ring.fix, kernel.seccomp(host).detail, *kernel.aio_context()]))
"""


@pytest.fixture
def make_host(tmp_path: Path) -> MakeHost:
    def make(**files: str) -> Host:
        for name, text in files.items():
            file = tmp_path / "proc" / name.replace("__", "/")
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text + "\n")
        return Host(tmp_path)

    return make


def fail_with(monkeypatch: pytest.MonkeyPatch, call: str, code: int) -> None:
    def fail(*arguments: object) -> int:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(kernel, call, fail)


def complaint(result: Result, status: Status = Status.NO) -> str:
    assert result.status is status, result
    assert result.fix
    return result.detail


def test_io_uring_is_tried_for_real() -> None:
    result = kernel.io_uring(Host())
    try:
        features = kernel.io_uring_setup(1)
    except OSError as error:
        symbol = errno.errorcode[error.errno or 0]
    else:
        assert result.status is Status.OKAY
        assert result.data["features"] == features
        return
    assert symbol in complaint(result)


def test_trying_io_uring_leaves_no_descriptor() -> None:
    before = os.listdir("/proc/self/fd")
    kernel.io_uring(Host())
    assert os.listdir("/proc/self/fd") == before


@pytest.mark.parametrize(
    ("call", "code"), [("io_uring_setup", errno.EPERM), ("io_uring_setup", errno.ENOSYS), ("io_setup", errno.EPERM)]
)
def test_a_seccomp_filter_is_recognised(call: str, code: int) -> None:
    numbers = kernel._NUMBERS.get(platform.machine())
    if numbers is None:
        pytest.skip(f"no system call numbers for {platform.machine()}")
    command = [sys.executable, "-c", FILTERED, str(numbers[call]), str(code)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    if done.returncode == 77:
        pytest.skip("this kernel or sandbox takes no seccomp filter")
    assert done.returncode == 0, done.stderr
    status, detail, fix, seccomp, aio_reason, aio_fix = json.loads(done.stdout)
    assert seccomp == "filtered"
    if call == "io_setup":
        assert "seccomp" in aio_reason
        assert "seccomp=unconfined" in aio_fix
    else:
        assert status == "NO"
        assert "seccomp" in detail
        assert errno.errorcode[code] in detail
        assert "seccomp=unconfined" in fix


def test_no_descriptor_left_is_recognised() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        result = kernel.io_uring(Host())
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if "EMFILE" not in result.detail:
        pytest.skip(f"io_uring is refused here before it takes a descriptor: {result.detail}")
    assert result.status is Status.NO
    assert result.fix.startswith("ulimit -n")


@pytest.mark.parametrize(
    ("code", "files", "words", "fix"),
    [
        (
            errno.EPERM,
            {"sys__kernel__io_uring_disabled": "2"},
            "io_uring_disabled=2 forbids it to everyone",
            "sysctl -w",
        ),
        (errno.EPERM, {"sys__kernel__io_uring_disabled": "1"}, "to unprivileged processes", "sysctl -w"),
        (errno.EPERM, {"self__status": "Seccomp:\t2"}, "seccomp", "seccomp=unconfined"),
        (errno.EPERM, {"self__status": "Seccomp:\t0"}, "security module", "NVME_OPS_BACKEND=libaio"),
        (errno.EACCES, {}, "security module", "journalctl"),
        (errno.ENOSYS, {"self__status": "Seccomp:\t2", "sys__kernel__io_uring_disabled": "0"}, "seccomp", "docker run"),
        (errno.ENOSYS, {"self__status": "Seccomp:\t2", "sys__kernel__osrelease": "4.18.0"}, "no io_uring", "upgrade"),
        (errno.ENOSYS, {}, "no io_uring", "upgrade the kernel"),
        (errno.ENOMEM, {}, "memlock", "ulimit -l unlimited"),
        (errno.EINVAL, {}, "io_uring_setup fails", "NVME_OPS_BACKEND=libaio"),
    ],
)
def test_who_forbids_io_uring_is_named(
    code: int, files: dict[str, str], words: str, fix: str, make_host: MakeHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_with(monkeypatch, "io_uring_setup", code)
    result = kernel.io_uring(make_host(**files))
    detail = complaint(result)
    assert words in detail
    assert errno.errorcode[code] in detail
    assert fix in result.fix


def test_an_io_uring_older_than_its_plain_reads_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "io_uring_setup", lambda entries: 0b111)
    assert "5.6" in complaint(kernel.io_uring(Host()))


def test_an_unknown_architecture_is_no_crash(monkeypatch: pytest.MonkeyPatch, make_host: MakeHost) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "pdp11")
    complaint(kernel.io_uring(make_host()))
    assert kernel.aio_context()[1]
    with open(__file__, "rb") as file:
        assert kernel.direct_io_alignment(file.fileno()) is None


@pytest.mark.parametrize(
    ("value", "status"), [("0", Status.INFO), ("1", Status.WARNING), ("2", Status.WARNING), ("", Status.INFO)]
)
def test_the_io_uring_sysctl_is_judged(value: str, status: Status, make_host: MakeHost) -> None:
    host = make_host(sys__kernel__io_uring_disabled=value) if value else make_host()
    result = kernel.io_uring_sysctl(host)
    assert result.status is status
    assert bool(result.fix) == (status is Status.WARNING)


@pytest.mark.parametrize(("text", "words"), [("Seccomp:\t0", "no filter"), ("Seccomp:\t1", "strict"), ("", "unknown")])
def test_the_seccomp_mode_is_read(text: str, words: str, make_host: MakeHost) -> None:
    assert words in kernel.seccomp(make_host(self__status=text)).detail


def test_the_kernel_version_is_shown(make_host: MakeHost) -> None:
    assert kernel.version(Host()).detail == platform.release()
    assert kernel.version(make_host(sys__kernel__osrelease="5.4.0-42")).detail == "5.4.0-42"


def test_aio_requests_that_are_nearly_used_up_are_a_warning(make_host: MakeHost) -> None:
    host = make_host(**{"sys__fs__aio-max-nr": "65536", "sys__fs__aio-nr": "65000"})
    assert "65000 in use" in complaint(kernel.aio_limit(host), Status.WARNING)
    host = make_host(**{"sys__fs__aio-max-nr": "65536", "sys__fs__aio-nr": "0"})
    assert kernel.aio_limit(host).status is Status.OKAY


def test_an_exhausted_aio_max_nr_is_recognised() -> None:
    most = int(Path("/proc/sys/fs/aio-max-nr").read_text())
    if most >= 1 << 21:
        pytest.skip(f"fs.aio-max-nr={most} cannot be exceeded by one context")
    reason, fix = kernel.aio_context(most + 1)
    assert "used up [EAGAIN]" in reason
    assert fix == "sysctl -w fs.aio-max-nr=1048576"


@pytest.mark.parametrize("code", [errno.ENOSYS, errno.EPERM, errno.EACCES, errno.ENOMEM, errno.EAGAIN])
def test_every_failure_of_io_setup_has_a_fix(code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    fail_with(monkeypatch, "io_setup", code)
    reason, fix = kernel.aio_context()
    assert errno.errorcode[code] in reason
    assert fix


def test_libaio_is_looked_for_under_both_its_names(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def load(name: str) -> None:
        asked.append(name)
        raise OSError("not here")

    monkeypatch.setattr(ctypes, "CDLL", load)
    assert kernel.libaio_name() is None
    assert asked == ["libaio.so.1", "libaio.so.1t64"]


@pytest.fixture
def libaio_parts(monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
    """What the libaio check finds, for a test to change; everything is there to begin with."""
    parts: dict[str, object] = {"header": True, "library": "libaio.so.1", "kernel": ("", "")}
    monkeypatch.setattr(ops, "has_libaio", lambda builder, look: parts["header"])
    monkeypatch.setattr(kernel, "libaio_name", lambda: parts["library"])
    monkeypatch.setattr(kernel, "aio_context", lambda: parts["kernel"])
    return parts


def test_libaio_needs_header_library_and_kernel(libaio_parts: dict[str, object]) -> None:
    assert kernel.libaio(ops.built).status is Status.OKAY
    libaio_parts["kernel"] = ("used up", "sysctl")
    assert complaint(kernel.libaio(ops.built)) == "used up"
    libaio_parts["library"] = None
    assert "libaio.so.1 cannot be loaded" in complaint(kernel.libaio(ops.built))
    libaio_parts["header"] = False
    assert "not installed" in complaint(kernel.libaio(ops.built))
    libaio_parts["library"] = "libaio.so.1"
    assert "libaio.h" in complaint(kernel.libaio(ops.built))


def results(io_uring: bool, libaio: bool) -> list[Result]:
    def make(name: str, usable: bool) -> Result:
        return Result(name, Status.OKAY) if usable else Result(name, Status.NO, "why", f"fix {name}")

    return [make("io_uring", io_uring), make("libaio", libaio), make("threads", True)]


@pytest.mark.parametrize(
    ("io_uring", "libaio", "backend"), [(True, True, "io_uring"), (False, True, "libaio"), (True, False, "io_uring")]
)
def test_the_first_usable_backend_is_chosen(
    io_uring: bool, libaio: bool, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NVME_OPS_BACKEND", raising=False)
    result = kernel.chosen(results(io_uring, libaio))
    assert (result.status, result.data["backend"]) == (Status.OKAY, backend)


def test_only_threads_left_is_a_warning_with_the_fix_of_io_uring(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NVME_OPS_BACKEND", "auto")
    result = kernel.chosen(results(io_uring=False, libaio=False))
    assert "threads" in complaint(result, Status.WARNING)
    assert result.fix == "fix io_uring"


def test_the_environment_overrides_the_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NVME_OPS_BACKEND", "threads")
    assert kernel.chosen(results(io_uring=True, libaio=True)).data["backend"] == "threads"


@pytest.mark.parametrize("name", ["libaio", "posix"])
def test_an_override_that_cannot_be_followed_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NVME_OPS_BACKEND", name)
    result = kernel.chosen(results(io_uring=True, libaio=False))
    assert name in complaint(result)
    assert result.fix == "unset NVME_OPS_BACKEND"


def test_the_section_has_every_backend_in_the_order_of_the_engine() -> None:
    source = (ROOT / "csrc" / "backends" / "registry.cpp").read_text()
    order = sorted(kernel.ORDER, key=lambda name: source.index("k" + name.title().replace("_", "")))
    names = [result.name for result in kernel.backends(Host(), ops.built)]
    assert names == [*order, "chosen"] == [*kernel.ORDER, "chosen"]
