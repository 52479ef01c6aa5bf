"""The report's checks: tables of what is made up of a machine, and which result and fix follow; and real folders.

What is made of files says nothing about a real GPU. Machines on which a handle fails for real are in test_broken.py.
"""

from __future__ import annotations

import errno
import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from nvme_ops.filesystem.device import Device, Mount, logical_block
from nvme_ops.io.arguments import BACKENDS
from nvme_ops.op_builder import ALL_OPS, GDSBuilder, builder, finished, machine
from nvme_ops.op_builder.finished import BuiltOp
from nvme_ops.op_builder.machine import Host
from nvme_ops.report import gds, kernel, ops, storage, trial
from nvme_ops.report.result import Result, Status
from nvme_ops.report.trial import Attempt
from tests import doubles
from tests.conftest import REPOSITORY, with_mounts
from tests.made_up import EVERYTHING, WITH_GPU, ForAGpu, clear_environment, executable, put, without

OKAY, INFO, WARNING, NO, FAIL = Status.OKAY, Status.INFO, Status.WARNING, Status.NO, Status.FAIL


class Case(NamedTuple):
    """What follows, and from what: files (programs where they begin with #!), variables, what is patched."""

    check: Callable[..., Any]
    status: Status
    detail: str
    fix: str = ""
    files: Mapping[str, str] = {}
    environ: Mapping[str, str] = {}
    patches: Mapping[str, Any] = {}


def fails(code: int) -> Callable[..., int]:
    def fail(*_: object, **__: object) -> int:
        raise OSError(code, os.strerror(code))

    return fail


def uring(code: int, detail: str, fix: str, files: Mapping[str, str] | None = None) -> Case:
    setup = {"nvme_ops.report.kernel.io_uring_setup": fails(code)}
    return Case(kernel.io_uring, NO, f"{detail} [{errno.errorcode[code]}]", fix, files or {}, patches=setup)


def libaio(detail: str, fix: str = "", header: bool = True, name: str | None = "libaio.so.1", code: int = 0) -> Case:
    setup = fails(code) if code else lambda *_: None
    answers = {"ops.would_have_libaio": lambda: header, "kernel.libaio_name": lambda: name, "kernel.io_setup": setup}
    patches = {f"nvme_ops.report.{function}": answer for function, answer in answers.items()}
    return Case(lambda _: kernel.libaio(), NO if fix else OKAY, detail, fix, patches=patches)


def lock(status: Status, detail: str, fix: str = "", soft: int = 0, hard: int = -1, caps: str = "0") -> Case:
    limits = {"resource.getrlimit": lambda _: (soft, hard)}
    return Case(kernel.memlock, status, detail, fix, {STATUS: f"Name:\tx\nCapEff:\t{caps}\n"}, patches=limits)


def compiler(status: Status, detail: str, fix: str, script: str) -> Case:
    return Case(lambda _: ops.compiler(), status, detail, fix, {"cxx": f"#!{script}"}, {"CXX": "ROOT/cxx"})


def on(mounted: Mount | None, devices: list[Device], refusal: str = "", fix: str = "") -> Case:
    check, status = (lambda _: storage.gpudirect(mounted, devices, has_gpu=True)), WARNING if refusal else OKAY
    return Case(check, status, refusal or "supported: ", fix)


def chosen(named: str, usable: str, status: Status, detail: str, fix: str = "") -> Case:
    good, bad = (lambda name: Result(name, OKAY)), (lambda name: Result(name, NO, "why", f"fix {name}"))
    results = [(good if name in usable else bad)(name) for name in BACKENDS]
    return Case(lambda _: kernel.chosen(results), status, detail, fix, environ={"NVME_OPS_BACKEND": named})


def mount(kind: str, *options: str) -> Mount:
    return Mount("/mnt/a place", kind, "/dev/nvme0n1", ("rw", *options))


def device(*stack: str, kind: str = "nvme") -> Device:
    return Device(stack[-1], kind, "", 512, False, stack)


SYSCTL, STATUS = "proc/sys/kernel/io_uring_disabled", "proc/self/status"
FILTERED, UNFILTERED = {STATUS: "Name:\tx\nSeccomp:\t2"}, {STATUS: "Seccomp:\t0"}
AIO, USED, OLD = "proc/sys/fs/aio-max-nr", "proc/sys/fs/aio-nr", {"proc/sys/kernel/osrelease": "4.18.0"}
THP, HUGE = "sys/kernel/mm/transparent_hugepage/enabled", "sys/kernel/mm/hugepages/hugepages-2048kB"
RESERVED = {THP: "always madvise [never]\n", f"{HUGE}/nr_hugepages": "64\n", f"{HUGE}/free_hugepages": "60\n"}
SETUP, INCLUDE = "nvme_ops.report.kernel.io_uring_setup", {"sysconfig.get_path": lambda *_: "/no"}
CASES = {
    # io_uring, and who forbids it
    "forbidden to all": uring(errno.EPERM, "io_uring_disabled=2 forbids it to everyone", "sysctl -w", {SYSCTL: "2"}),
    "forbidden to users": uring(errno.EPERM, "to unprivileged processes", "sysctl -w", {SYSCTL: "1"}),
    "seccomp EPERM": uring(errno.EPERM, "(the default of container runtimes)", "seccomp=unconfined", FILTERED),
    "no filter": uring(errno.EPERM, "or a sandbox forbids it", "NVME_OPS_BACKEND=libaio", UNFILTERED),
    "seccomp ENOSYS": uring(errno.ENOSYS, "of container runtimes)", "docker run", {**FILTERED, SYSCTL: "0"}),
    "an old kernel": uring(errno.ENOSYS, "or a sandbox)", "upgrade", {**FILTERED, **OLD}),
    "older than plain reads": Case(kernel.io_uring, NO, "5.6", "upgrade", patches={SETUP: lambda _: 0b111}),
    "sysctl 2": Case(kernel.io_uring_sysctl, WARNING, "2 (forbidden)", "sysctl -w kernel.io_uring", {SYSCTL: "2"}),
    # AIO
    "aio left": Case(kernel.aio_limit, OKAY, "65536, 0 in use", "", {AIO: "65536", USED: "0"}),
    "aio used up": Case(kernel.aio_limit, WARNING, "in use", "sysctl -w fs.aio-max", {AIO: "65536", USED: "65000"}),
    "libaio": libaio("libaio.so.1, io_setup succeeds"),
    "aio EAGAIN": libaio("used up [EAGAIN]", "sysctl -w fs.aio-max-nr=1048576", code=errno.EAGAIN),
    "no library": libaio("libaio.so.1 cannot be loaded", "libaio", name=None),
    "no header": libaio("libaio.h is not found, so the op is compiled without", "libaio", header=False),
    # Memory
    "nothing may be locked": lock(WARNING, "0 B, staging buffers", "ulimit -l 65536"),
    "who may raise it": lock(WARNING, "1 MiB", "docker run --ulimit memlock", 1 << 20, 8 << 20),
    "enough may be locked": lock(OKAY, "64 MiB", "", 64 << 20),
    "no limit": lock(OKAY, "unlimited", "", -1),
    "CAP_IPC_LOCK": lock(OKAY, "not binding (CAP_IPC_LOCK)", caps="0000000000004000"),
    "always": Case(kernel.transparent, OKAY, "always", "", {THP: "[always] madvise never"}),
    "never": Case(kernel.transparent, WARNING, "never: staging", f"echo madvise > /{THP}", RESERVED),
    "no huge pages": Case(kernel.transparent, WARNING, "not in this kernel", "sysctl -w vm.nr_hugepages="),
    "asked for": Case(kernel.transparent, INFO, "the reserved ones serve", "", RESERVED, {"NVME_OPS_HUGETLB": "1"}),
    "some reserved": Case(kernel.reserved, INFO, "60 of 64 free, 2 MiB each", "", RESERVED),
    "no /dev/shm": Case(kernel.shared, WARNING, "No such file", "mount -t tmpfs"),
    # What compiles an op
    "a ninja that hangs": Case(lambda _: ops.ninja(), FAIL, "no answer", "pip install", {"ninja": "#!exec sleep 600"},
        {"PATH": "ROOT:/usr/bin:/bin"}, {"nvme_ops.report.ops.COMMAND_TIMEOUT": 0.1}),
    "gcc 12": compiler(OKAY, "12.2.0", "", "echo 'c++ (Debian 12.2.0-14+deb12u1) 12.2.0'"),
    "gcc 8": compiler(WARNING, "need version 9", "CXX=", "echo 'g++ (GCC) 8.5.0 20210514 (Red Hat 8.5.0-22)'"),
    "no Python headers": Case(lambda _: ops.python_headers(), NO, "no Python.h in /no", "python", patches=INCLUDE),
    "no CUDA_HOME": Case(lambda _: ops.cuda(), WARNING, "is not a folder", "unset", {}, {"CUDA_HOME": "ROOT/gone"}),
    "no CUDA": Case(lambda _: ops.cuda(), INFO, "none (no op needs it)", "", {}, {"CUDA_HOME": "", "PATH": "ROOT"}),
}  # fmt: skip


def cufile(status: Status, detail: str, fix: str = "", files: Mapping[str, str] = EVERYTHING, **environ: str) -> Case:
    cuda = environ.pop("cuda", "13.0") or None
    build = {"nvme_ops.report.ops.torch_build": lambda: ("2.13.0", cuda)}
    return Case(gds.section, status, detail, fix, files, environ, build)


#: As NVIDIA's own file: comments of both kinds, between and behind values.
COMMENTED = r"""{ // NOTE: applications can override this file
    "logging": { "dir": "/var//log", /* not here */ "level": "ERROR" },  // a path with two slashes
    "properties": { "use_pci_p2pdma": true, /* the last has a comma too */ "allow_compat_mode": false, },
    "note": "a \"quoted\" // no comment, ]", }"""
FORCED = '{"properties": {"force_compat_mode": true, "use_pci_p2pdma": true}}'
FILES = "cufile.json: allow_compat_mode %s, force_compat_mode %s, use_pci_p2pdma %s"
CONFIG, MULTIPATH = "boot/config-6.8.0-made-up", "sys/module/nvme_core/parameters/multipath"
HIDDEN, SETTINGS = without("nvidia-fs"), "etc/cufile.json"
PEERS = {
    **EVERYTHING,
    "proc/sys/kernel/osrelease": "6.8.0-made-up",
    CONFIG: "CONFIG_PCI=y\nCONFIG_PCI_P2PDMA=y\n",
    "proc/driver/nvidia/params": 'RegistryDwords: "RMForceStaticBar1=1;RmForceDisableIomapWC=1"\n',
    MULTIPATH: "N\n",
    SETTINGS: '{"properties": {"use_pci_p2pdma": true}}',
}
SERVING = {name: text for name, text in PEERS.items() if "nvidia-fs" not in name}
PASSING = {"sys/kernel/iommu_groups/0/x": "", "proc/cmdline": "quiet iommu=pt"}
NOT_OPEN = {"proc/driver/nvidia/version": "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.65.06"}
CRASHING = {"nvme_ops.op_builder.machine.gds_requirements": fails(errno.EIO)}
NO_WAY = {**HIDDEN, SETTINGS: '{"properties": {"allow_compat_mode": false}}'}
CASES |= {
    "no GPU": cufile(NO, "no NVIDIA GPU is visible", "docker run --gpus all", {}),
    "no device": cufile(NO, "no GPU is visible (no /dev/nvidia0)", "docker run --gpus all", without("dev/nvidia")),
    "hidden": cufile(NO, "hides every GPU", "unset CUDA_VISIBLE_DEVICES", WITH_GPU, CUDA_VISIBLE_DEVICES="-1,0"),
    "CUDA_VISIBLE_DEVICES=1": cufile(OKAY, "H200", "", WITH_GPU, CUDA_VISIBLE_DEVICES="1"),
    "a driver": cufile(OKAY, "580.65.06", "", WITH_GPU),
    "no driver's library": cufile(NO, "libcuda.so.1 is not found", "docker run --gpus all", without("libcuda")),
    "no devices": cufile(WARNING, "/dev/nvidia-fs* is not here", "NVIDIA_GDS=enabled", without("dev/nvidia-fs")),
    "no nvidia-fs": cufile(WARNING, "data pass through host memory", "modprobe nvidia-fs", WITH_GPU),
    "peers serve": cufile(INFO, "PCI peer-to-peer does without", "", SERVING),
    "CUDA 11.8": cufile(NO, "not found", "-cu11  # or: apt-get install libcufile-11-8", WITH_GPU, cuda="11.8"),
    "no CUDA in torch": cufile(NO, "2.13.0", "pip install", cuda=""),
    "a relative library": cufile(NO, "=lib.so is not the absolute path", "unset", NVME_OPS_CUFILE_LIBRARY="lib.so"),
    "off needs no library": cufile(INFO, "libcufile.so.0 is not found", "", WITH_GPU, NVME_OPS_GDS="off"),
    "no JSON": cufile(WARNING, "cannot be read as JSON", "correct /etc/cufile.json", {**EVERYTHING, SETTINGS: "{"}),
    "no settings": cufile(WARNING, "/no/such.json: No such file", "unset", CUFILE_ENV_PATH_JSON="/no/such.json"),
    "commented": cufile(INFO, FILES % ("false", "false", "true"), "", {**EVERYTHING, SETTINGS: COMMENTED}),
    "forced": cufile(INFO, FILES % ("true", "true", "true"), "", {**EVERYTHING, SETTINGS: FORCED}),
    "the environment first": cufile(INFO, FILES % ("true", "false", "false"), "", {**EVERYTHING, SETTINGS: FORCED},
        **{gds.FORCED_BY: "false", gds.PEER_TO_PEER_BY: "FALSE"}),
    # Peers
    "peers": cufile(OKAY, "set up, as far as files tell (IOMMU off)", "", PEERS),
    "IOMMU passes": cufile(OKAY, "(IOMMU in pass-through;", "", {**PEERS, **PASSING}),
    "by symbols": cufile(OKAY, "set up", "", {**PEERS, CONFIG: "", "proc/kallsyms": "x p2pdma_pgmap_ops\n"}),
    "a kernel without": cufile(INFO, "no: the kernel lacks CONFIG_PCI_P2PDMA (", "", {**PEERS, CONFIG: "# not set\n"}),
    "proprietary": cufile(INFO, "no: the driver is not NVIDIA's open one, 565 or later (", "", {**PEERS, **NOT_OPEN}),
    "not in the settings": cufile(INFO, "no: use_pci_p2pdma is not set in /etc/cufile", "", {**PEERS, SETTINGS: "{}"}),
    "multipath": cufile(INFO, "no: nvme_core.multipath is on (", "", {**PEERS, MULTIPATH: "Y\n"}),
    # The path
    "direct by peers": cufile(OKAY, "gds where", "", SERVING),
    "not direct": cufile(INFO, "because neither nvidia-fs nor PCI peer-to-peer", "", HIDDEN),
    "required": cufile(NO, "because NVME_OPS_GDS=require", "unset NVME_OPS_GDS", HIDDEN, NVME_OPS_GDS="require"),
    "off": cufile(INFO, "bounce (NVME_OPS_GDS=off)", "", WITH_GPU, NVME_OPS_GDS="off"),
    "unknown": cufile(NO, "NVME_OPS_GDS=maybe is not one of", "unset NVME_OPS_GDS", NVME_OPS_GDS="maybe"),
    "parts are missing": cufile(NO, "for lack of: cuFile library, kernel modules", "NVME_OPS_GDS=off", WITH_GPU),
    "forced by the environment": cufile(INFO, "is set (CUFILE_FORCE_COMPAT_MODE)", CUFILE_FORCE_COMPAT_MODE="true"),
    "a check that crashes": cufile(FAIL, "Input/output error", "report this line")._replace(patches=CRASHING),
    "no way": cufile(NO, "allow_compat_mode is false", "/etc/cufile.json", NO_WAY),
}  # fmt: skip


NVME = device("nvme0n1p1", "nvme0n1")
ORDERED = "umount '/mnt/a place' && mount -o data=ordered /dev/nvme0n1 '/mnt/a place'"
CASES |= {
    "ext4": on(mount("ext4", "data=ordered"), [NVME]),
    "xfs on a RAID": on(mount("xfs"), [device("md0", name) for name in ("nvme0n1", "nvme1n1")]),
    "nfs over rdma": on(mount("nfs4", "proto=rdma"), []),
    "lustre": on(mount("lustre"), []),
    "no mount": on(None, [NVME], "not known"),
    "ext4 by default": on(mount("ext4"), [NVME], "do not show data=ordered", ORDERED),
    "ext4 with its data in the journal": on(mount("ext4", "data=journal"), [NVME], "data=journal"),
    "tmpfs": on(mount("tmpfs"), [], "tmpfs is not among"),
    "nfs over tcp": on(mount("nfs4", "proto=tcp"), [], "without proto=rdma"),
    "overlay": on(mount("overlay"), [], "container"),
    "xfs on LVM": on(mount("xfs"), [device("dm-0", "nvme0n1")], "it lies on dm-0"),
    "xfs on both": on(mount("xfs"), [NVME, device("sda", kind="ssd")], "sda is not an NVMe device (ssd)"),
    "xfs on nothing known": on(mount("xfs"), [], "device under the file system is not known"),
    "the first": chosen("", "io_uring libaio threads", OKAY, "io_uring"),
    "the last": chosen("auto", "threads", WARNING, "threads: neither of the faster ones is usable", "fix io_uring"),
    "one that is named": chosen("threads", "io_uring threads", OKAY, "threads (NVME_OPS_BACKEND)"),
    "a named one that is not usable": chosen("libaio", "threads", NO, "is not usable here", "unset NVME_OPS_BACKEND"),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_made_up_machine_has_its_result_and_fix(case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in case.files.items():
        executable(tmp_path / name, text[2:]) if text.startswith("#!") else put(tmp_path, {name: text})
    if case.check is gds.section:
        clear_environment(monkeypatch, tmp_path)
    for name, value in case.environ.items():
        monkeypatch.setenv(name, value.replace("ROOT", str(tmp_path)))
    for name, value in case.patches.items():
        monkeypatch.setattr(name, value)
    result = case.check(Host(tmp_path))
    results = [result] if isinstance(result, Result) else result
    meant = [item for item in results if item.status is case.status and case.detail in item.detail]
    assert [item for item in meant if case.fix in item.fix and bool(item.fix) == item.status.needs_fix], results
    if case.check is gds.section and not case.files:
        assert [item.name for item in results if item.status.needs_fix] == ["GPU"]


def test_what_the_op_itself_says_of_a_backend_counts() -> None:
    registry = (REPOSITORY / "csrc" / "backends" / "registry.cpp").read_text()
    order = sorted(BACKENDS, key=lambda name: registry.index("k" + name.title().replace("_", "")))
    lacking = "built without libaio's headers (apt install libaio-dev)"
    tried = Attempt(loaded=True, backends={"io_uring": "no ring", "libaio": lacking, "threads": None})
    results = {result.name: result for result in kernel.backends(Host(), tried)}
    assert list(results) == [*order, "chosen"]
    assert [result.status for result in results.values()] == [NO, NO, OKAY, WARNING]
    assert results["libaio"].fix.startswith("NVME_BUILD_AIO=1 "), "the library is of no use to this op"
    tried = Attempt(loaded=True, backends=dict.fromkeys(BACKENDS))
    assert {result.status for result in kernel.backends(Host(), tried)} == {OKAY}


def test_io_uring_and_shared_memory_are_looked_at_for_real() -> None:
    before = os.listdir("/proc/self/fd")
    result = kernel.io_uring(Host())
    assert os.listdir("/proc/self/fd") == before
    assert result.status is NO or result.data["features"] == kernel.io_uring_setup(1)
    script = "from nvme_ops.report.kernel import Host, shared; print(shared(Host()))"
    said = with_mounts("mount -t tmpfs -o size=64m none /dev/shm", sys.executable, "-c", script)
    assert all(words in said for words in ("WARNING", "64 MiB, too small", "--shm-size=1g"))


def test_the_command_is_that_of_the_package_manager_at_hand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(machine, "conda_prefix", lambda: None)
    general = "install libaio-devel (libaio-dev on Debian) with the system's package manager"
    assert ops.install_command("libaio") == general
    for manager, command in (("dnf", "dnf install -y libaio-devel"), ("apt-get", "apt-get install -y libaio-dev")):
        (tmp_path / manager).touch(0o755)
        assert ops.install_command("libaio") == command
    monkeypatch.setattr(machine, "conda_prefix", lambda: tmp_path)
    assert ops.install_command("libaio") == "conda install -y -c conda-forge libaio"


LACKS, UNLOADABLE = "libcufile.so.0 is not found; no /proc/modules", {"ops/gds.abi3.so": "not a library"}


@pytest.mark.parametrize(
    ("files", "status", "words", "fix", "expected"),
    [
        ({}, NO, "no NVIDIA GPU is visible", "docker run --gpus all", False),
        (WITH_GPU, NO, LACKS, "pip install nvidia-cufile", True),
        (without("udev"), WARNING, "no /run/udev/data", "docker run -v /run/udev", True),
        ({**EVERYTHING, **UNLOADABLE}, WARNING, "gds.abi3.so", "NVME_BUILD_GDS=1 ", True),  # the linker's words
    ],
)
def test_gds_is_expected_where_there_is_a_gpu(
    files: dict[str, str], status: Status, words: str, fix: str, expected: bool, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    clear_environment(monkeypatch, tmp_path)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(finished, "OPS", tmp_path / "ops")
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(builder, "_loaded", {})  # by another test
    put(tmp_path, files)
    made = ForAGpu(tmp_path)
    if "ops/gds.abi3.so" in files:
        finished.record_path(tmp_path / "ops/gds.abi3.so").write_text(json.dumps(made.recipe().facts()))
    result = ops.row(made)
    assert (result.status, result.data["compatible"], result.data["expected"]) == (status, status is not NO, expected)
    assert all(part in result.detail for part in words.split("; "))
    assert fix in result.fix
    assert ops.unusable([result]) == ([result] if status is NO and expected else [])
    assert ops.unusable([result], ["gds"]) == ([result] if status is NO else [])


def test_a_missing_compiler_is_no_complaint_where_all_ops_are_built() -> None:
    missing = Result("C++ compiler", NO, "not found", "apt-get install g++")
    built = {name: BuiltOp("prebuilt", Path("op.so"), {"torch": "2.13.0"}) for name in ALL_OPS}
    assert ops.if_needed(lambda: missing, {"gds": built["gds"]}) == missing
    assert ops.if_needed(lambda: missing, built).status is INFO
    assert [result.detail for result in ops.compiled_with(built)] == ["torch 2.13.0, CUDA none, prebuilt"] * len(built)


@pytest.mark.parametrize(
    ("opens", "status", "words"),
    [
        (
            lambda: (os.write(1, b"out of luck"), os._exit(3)),
            NO,
            "ended with status 3: out of luck",
        ),
        (lambda: time.sleep(600), NO, "did not end in 0 s"),
        (lambda: {"version": 1150, "path": "lib.so"}, OKAY, "opens: 1.15, lib.so; GPUDirect Storage is available"),
        (None, WARNING, "a test double that says nothing about this machine; no GPUDirect Storage: cuFile opens in"),
    ],
)
def test_what_the_driver_does_is_said(
    opens: Callable[[], object] | None, status: Status, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    GDSBuilder().load()
    monkeypatch.setattr(gds, "LIMIT", 0.2 if "did not end" in words else 240.0)
    monkeypatch.setattr(gds, "_open", opens or gds._open)
    monkeypatch.setenv("NVME_OPS_CUFILE_LIBRARY", str(doubles.build("cufile")))
    result = gds.open_driver()
    assert (result.status, result.data["opened"]) == (status, status is not NO), result
    assert words in result.detail
    monkeypatch.setattr(trial, "in_another_process", lambda *_: pytest.fail("a process was started"))
    monkeypatch.setattr(GDSBuilder, "find_built", lambda _: None)
    assert "GDSBuilder().load(" in gds.open_driver().fix


def test_a_folder_is_inspected_and_left_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def inspected(folder: Path = tmp_path) -> dict[str, Result]:
        return {result.name: result for result in storage.inspect(Host(), str(folder))}

    (tmp_path / "file").write_text("x")
    names = ["directory", "file system", "O_DIRECT", "alignment", "device", "GPUDirect Storage", "free space"]
    assert list(inspected()) == names
    assert inspected(tmp_path / "file" / "below")["directory"].fix.startswith("namei -l ")
    assert inspected(tmp_path / "file")["directory"].fix == f"nvme-report --folder {tmp_path}"
    shared = inspected(Path("/dev/shm"))
    assert shared["device"].data["kind"] == "memory" or shared["file system"].data["type"] != "tmpfs"
    rotating = Device("sda", "rotational", "", 512, True, ("dm-0", "md0", "sda"))
    monkeypatch.setattr(storage, "devices_under", lambda *_: [NVME, rotating])
    assert "sda, rotational (through dm-0, md0)" in inspected()["device"].detail
    assert inspected()["device"].fix.startswith("lsblk")
    assert os.listdir(tmp_path) == ["file"]


def test_direct_io_is_tried_and_its_alignment_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def direct(code: int = 0) -> tuple[Status, Any, str]:
        if code:
            monkeypatch.setattr(storage, "_refusal", lambda _: OSError(code, "made up"))
        results = {result.name: result for result in storage.inspect(Host(), str(tmp_path))}
        return results["O_DIRECT"].status, results["alignment"].data["offset"], results["alignment"].detail

    status, offset, _ = direct()
    assert bool(offset) == (status is OKAY)
    monkeypatch.setattr(kernel, "direct_io_alignment", lambda _: None)  # as before Linux 6.1
    block = logical_block(Host(), os.stat(tmp_path).st_dev) if status is OKAY else None
    assert direct()[:2] == (status, block)
    assert direct(errno.EINVAL) == (WARNING, None, "none needed")
    assert direct(errno.ENOSPC)[0] is NO
