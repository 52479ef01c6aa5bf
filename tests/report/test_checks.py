"""One table of the report's checks: what is faked of a machine, and which result and fix follow.

The machines are made up of files: nothing here says anything about a real GPU. What is not faked is this machine's.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from nvme_ops.filesystem.device import Device, Mount
from nvme_ops.io.arguments import BACKENDS
from nvme_ops.op_builder import machine
from nvme_ops.op_builder.machine import Host
from nvme_ops.report import gds, kernel, ops, storage
from nvme_ops.report.result import Result, Status
from nvme_ops.report.trial import Attempt
from tests.conftest import run_python, with_mounts
from tests.made_up import EVERYTHING, WITH_GPU, clear_environment, executable, put, without

ROOT = Path(__file__).parents[2]
OKAY, INFO, WARNING, NO, FAIL = Status.OKAY, Status.INFO, Status.WARNING, Status.NO, Status.FAIL
CHECKS: dict[str, Callable[[Host], Result | Sequence[Result]]] = {
    "kernel": kernel.version,
    "io_uring": kernel.io_uring,
    "io_uring sysctl": kernel.io_uring_sysctl,
    "seccomp": kernel.seccomp,
    "aio-max-nr": kernel.aio_limit,
    "libaio": lambda _: kernel.libaio(),
    "memlock limit": kernel.memlock,
    "transparent huge pages": kernel.transparent,
    "huge pages (hugetlb)": kernel.reserved,
    "shared memory (/dev/shm) size": kernel.shared,
    "ninja": lambda _: ops.ninja(),
    "C++ compiler": lambda _: ops.compiler(),
    "Python headers": lambda _: ops.python_headers(),
    "CUDA_HOME": ops.cuda,
    "nvcc version": ops.cuda,
}  # all others are in the section of cuFile


@dataclass
class Case:
    """What is faked, by ``files`` of the root, ``programs`` of the PATH, variables and patches; and what follows."""

    check: str
    status: Status
    detail: str = ""
    fix: str = ""
    files: Mapping[str, str] = field(default_factory=dict)
    programs: Mapping[str, str] = field(default_factory=dict)
    environ: Mapping[str, str | None] = field(default_factory=dict)
    patches: Mapping[str, Any] = field(default_factory=dict)
    data: Mapping[str, Any] = field(default_factory=dict)


def result_of(case: Case, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Result:
    put(folder, case.files)
    for name, body in case.programs.items():
        executable(folder / name, body)
    if case.check not in CHECKS:
        clear_environment(monkeypatch, folder)
        monkeypatch.setattr(ops, "torch_build", lambda: ("2.13.0+cu130", "13.0"))
    for name, value in case.environ.items():
        if value is None:
            monkeypatch.delenv(name, raising=False)
        else:
            monkeypatch.setenv(name, value.replace("ROOT", str(folder)))
    for name, value in case.patches.items():
        monkeypatch.setattr(name, value)
    found = CHECKS.get(case.check, gds.section)(Host(folder))
    results = [found] if isinstance(found, Result) else found
    return next(result for result in results if result.name == case.check)


def fails(code: int) -> Callable[..., int]:
    def fail(*_: object, **__: object) -> int:
        raise OSError(code, os.strerror(code))

    return fail


SYSCTL, STATUS = "proc/sys/kernel/io_uring_disabled", "proc/self/status"
FILTERED, UNFILTERED = {STATUS: "Name:\tx\nSeccomp:\t2"}, {STATUS: "Seccomp:\t0"}


def refused(code: int, detail: str, fix: str, files: Mapping[str, str] | None = None) -> Case:
    """``io_uring_setup`` fails with an errno, which is named."""
    setup = {"nvme_ops.report.kernel.io_uring_setup": fails(code)}
    return Case("io_uring", NO, f"{detail} [{errno.errorcode[code]}]", fix, files or {}, patches=setup)


def libaio(detail: str, fix: str = "", header: bool = True, name: str | None = "libaio.so.1", code: int = 0) -> Case:
    """libaio with or without its header, its library and the kernel's part."""
    patches = {
        "nvme_ops.report.ops.would_have_libaio": lambda: header,
        "nvme_ops.report.kernel.libaio_name": lambda: name,
        "nvme_ops.report.kernel.io_setup": fails(code) if code else lambda _: None,
    }
    return Case("libaio", NO if fix else OKAY, detail, fix, patches=patches)


THP, HUGE = "sys/kernel/mm/transparent_hugepage/enabled", "sys/kernel/mm/hugepages/hugepages-2048kB"
NEVER = {THP: "always madvise [never]\n"}
RESERVED = {**NEVER, f"{HUGE}/nr_hugepages": "64\n", f"{HUGE}/free_hugepages": "60\n"}


def memlock(status: Status, detail: str, fix: str = "", soft: int = 0, hard: int = -1, caps: str = "") -> Case:
    """Limits in bytes, -1 for none, and the mask of capabilities."""
    files = {STATUS: f"Name:\tx\nCapEff:\t{caps}\n"} if caps else {}
    return Case("memlock limit", status, detail, fix, files, patches={"resource.getrlimit": lambda _: (soft, hard)})


def compiler(status: Status, detail: str, fix: str, body: str) -> Case:
    return Case("C++ compiler", status, detail, fix, programs={"cxx": body}, environ={"CXX": "ROOT/cxx"})


PATH = {"PATH": "ROOT/bin:/usr/bin:/bin"}
NO_CUDA = {"CUDA_HOME": None, "CUDA_PATH": None, "PATH": "ROOT"}

CASES = {
    # io_uring, and who forbids it
    "forbidden to all": refused(errno.EPERM, "io_uring_disabled=2 forbids it to everyone", "sysctl -w", {SYSCTL: "2"}),
    "forbidden to users": refused(errno.EPERM, "to unprivileged processes", "sysctl -w", {SYSCTL: "1"}),
    "seccomp EPERM": refused(errno.EPERM, "(the default of container runtimes)", "seccomp=unconfined", FILTERED),
    "no filter": refused(errno.EPERM, "or a sandbox forbids it", "NVME_OPS_BACKEND=libaio", UNFILTERED),
    "seccomp ENOSYS": refused(errno.ENOSYS, "of container runtimes)", "docker run", {**FILTERED, SYSCTL: "0"}),
    "an old kernel": refused(errno.ENOSYS, "or a sandbox)", "upgrade", {**FILTERED,
        "proc/sys/kernel/osrelease": "4.18.0"}),
    "ENOSYS": refused(errno.ENOSYS, "the kernel has no io_uring (5.1 with CONFIG_IO_URING, or a sandbox)", "upgrade"),
    "ENOMEM": refused(errno.ENOMEM, "the memlock limit is too small for a ring", "ulimit -l unlimited"),
    "EMFILE": refused(errno.EMFILE, "no file descriptor is left", "ulimit -n"),
    "EINVAL": refused(errno.EINVAL, "io_uring_setup fails", "NVME_OPS_BACKEND=libaio"),
    "older than its plain reads": Case("io_uring", NO, "5.6", "upgrade",
        patches={"nvme_ops.report.kernel.io_uring_setup": lambda _: 0b111}),
    "unknown architecture": Case("io_uring", NO, "ENOSYS", "upgrade", patches={"platform.machine": lambda: "pdp11"}),
    "sysctl 2": Case("io_uring sysctl", WARNING, "2 (forbidden)", "sysctl -w kernel.io_uring", {SYSCTL: "2"}),
    "no sysctl": Case("io_uring sysctl", INFO, "none (kernels before 6.6)"),
    "seccomp unknown": Case("seccomp", INFO, "unknown"),
    # AIO
    "aio left": Case("aio-max-nr", OKAY, "65536, 0 in use", "", {"proc/sys/fs/aio-max-nr": "65536",
        "proc/sys/fs/aio-nr": "0"}),
    "aio used up": Case("aio-max-nr", WARNING, "65000 in use", "sysctl -w fs.aio-max-nr",
        {"proc/sys/fs/aio-max-nr": "65536", "proc/sys/fs/aio-nr": "65000"}),
    "libaio": libaio("libaio.so.1, io_setup succeeds"),
    "aio ENOSYS": libaio("CONFIG_AIO), or a seccomp filter hides it [ENOSYS]", "CONFIG_AIO=y", code=errno.ENOSYS),
    "aio EPERM": libaio("a seccomp filter forbids io_setup [EPERM]", "seccomp=unconfined", code=errno.EPERM),
    "aio EAGAIN": libaio("used up [EAGAIN]", "sysctl -w fs.aio-max-nr=1048576", code=errno.EAGAIN),
    "no library": libaio("libaio.so.1 cannot be loaded", "libaio", name=None),
    "no header": libaio("libaio.h is not found, so the op is compiled without", "libaio", header=False),
    # Memory
    "nothing may be locked": memlock(WARNING, "0 B, staging buffers", "ulimit -l 65536"),
    "who may raise it": memlock(WARNING, "1 MiB", "docker run --ulimit memlock", 1 << 20, 8 << 20),
    "enough may be locked": memlock(OKAY, "64 MiB", "", 64 << 20),
    "no limit": memlock(OKAY, "unlimited", "", -1),
    "CAP_IPC_LOCK": memlock(OKAY, "not binding (CAP_IPC_LOCK)", caps="0000000000004000"),
    "always": Case("transparent huge pages", OKAY, "always", files={THP: "[always] madvise never"}),
    "never": Case("transparent huge pages", WARNING, "never: staging", f"echo madvise > /{THP}", NEVER),
    "no huge pages": Case("transparent huge pages", WARNING, "not in this kernel", "sysctl -w vm.nr_hugepages="),
    "reserved": Case("transparent huge pages", WARNING, "never", "echo madvise", RESERVED),
    "reserved and asked for": Case("transparent huge pages", INFO, "the reserved ones serve", "", RESERVED,
        environ={"NVME_OPS_HUGETLB": "1"}),
    "some reserved": Case("huge pages (hugetlb)", INFO, "60 of 64 free, 2 MiB each", "", RESERVED),
    "no /dev/shm": Case("shared memory (/dev/shm) size", WARNING, "No such file", "mount -t tmpfs"),
    # What compiles an op
    "no ninja": Case("ninja", FAIL, "not found", "pip install",
        patches={"nvme_ops.op_builder.machine.ninja_directory": lambda: None}),
    "a ninja that fails": Case("ninja", FAIL, "exit status 3: GLIBC_2.99 not found", "pip install", {},
        {"bin/ninja": "echo GLIBC_2.99 not found; exit 3"}, PATH),
    "a ninja that hangs": Case("ninja", FAIL, "no answer", "pip install", {}, {"bin/ninja": "exec sleep 600"}, PATH,
        {"nvme_ops.report.ops.COMMAND_TIMEOUT": 0.1}),
    "no compiler": Case("C++ compiler", NO, "c++, g++, clang++", "g++", environ={"CXX": None, "PATH": "ROOT"}),
    "a compiler that fails": compiler(NO, "exit status 1: licence expired", "unset CXX",
        "echo licence expired; exit 1"),
    "gcc 12": compiler(OKAY, "12.2.0", "", "echo 'c++ (Debian 12.2.0-14+deb12u1) 12.2.0'"),
    "gcc 8": compiler(WARNING, "need version 9", "CXX=", "echo 'g++ (GCC) 8.5.0 20210514 (Red Hat 8.5.0-22)'"),
    "no Python headers": Case("Python headers", NO, "no Python.h in /no", "python",
        patches={"sysconfig.get_path": lambda *_: "/no"}),
    "a CUDA_HOME that is gone": Case("CUDA_HOME", WARNING, "gone is not a folder", "unset CUDA_HOME",
        environ={"CUDA_HOME": "ROOT/gone"}),
    "nvcc": Case("nvcc version", INFO, "12.8, ", "", {}, {"bin/nvcc": "echo 'Cuda tools, release 12.8, V12.8.93'"},
        {"CUDA_HOME": "ROOT"}, data={"version": "12.8"}),
    "an nvcc that fails": Case("nvcc version", INFO, "(no op needs it)", "", {}, {"bin/nvcc": "exit 1"},
        {"CUDA_HOME": "ROOT"}),
    "no CUDA": Case("CUDA_HOME", INFO, "none (no op needs it)", environ=NO_CUDA),
}  # fmt: skip


WAY, PEER = "path of GPU tensors", "PCI peer-to-peer"
HIDDEN = without("nvidia-fs")
PEERS = {
    "proc/sys/kernel/osrelease": "6.8.0-made-up",
    "boot/config-6.8.0-made-up": "CONFIG_PCI=y\nCONFIG_PCI_P2PDMA=y\n",
    "proc/driver/nvidia/params": 'RegistryDwords: "RMForceStaticBar1=1;RmForceDisableIomapWC=1"\n',
    "sys/module/nvme_core/parameters/multipath": "N\n",
    "etc/cufile.json": '{"properties": {"use_pci_p2pdma": true}}',
}
SYMBOLS = {**EVERYTHING, **PEERS, "boot/config-6.8.0-made-up": ""}
MODULE = "proc/driver/nvidia/version"


def apart(detail: str, **files: str) -> Case:
    """One thing that keeps peers apart."""
    change = {name.replace("__", "/"): text for name, text in files.items()}
    return Case(PEER, INFO, f"no: {detail}", "", {**EVERYTHING, **PEERS, **change}, data={"possible": False})


def way(
    status: Status,
    detail: str,
    fix: str = "",
    paths: str = "",
    files: Any = EVERYTHING,
    mode: str = "",
    **settings: bool,
) -> Case:
    """Which path GPU tensors take."""
    put_in = {**files, "etc/cufile.json": json.dumps({"properties": settings})} if settings else files
    return Case(WAY, status, detail, fix, put_in, environ={"NVME_OPS_GDS": mode or None}, data={"paths": paths.split()})


CUFILE = {
    "no GPU": Case("GPU", NO, "no NVIDIA GPU is visible", "docker run --gpus all"),
    "no device": Case("GPU", NO, "no GPU is visible (no /dev/nvidia0)", "docker run --gpus all", without("dev/nvidia")),
    **{
        f"CUDA_VISIBLE_DEVICES={value}": Case("GPU", NO, "hides every GPU", "unset CUDA_VISIBLE_DEVICES", WITH_GPU,
            environ={"CUDA_VISIBLE_DEVICES": value})
        for value in ("", "-1,0")
    },
    "CUDA_VISIBLE_DEVICES=1": Case("GPU", OKAY, "H200", files=WITH_GPU, environ={"CUDA_VISIBLE_DEVICES": "1"}),
    "a driver": Case("NVIDIA driver", OKAY, "580.65.06", files=WITH_GPU),
    "no driver": Case("NVIDIA driver", NO, "driver is not loaded", "modprobe nvidia", {"dev/nvidia0": ""}),
    "no driver's library": Case("NVIDIA driver", NO, "libcuda.so.1 is not found", "docker run --gpus all",
        without("libcuda")),
    "nvidia-fs without devices": Case("nvidia-fs", WARNING, "/dev/nvidia-fs* is not here", "NVIDIA_GDS=enabled",
        without("dev/nvidia-fs")),
    **{
        f"CUDA {version}": Case("cuFile library", NO, "not found",
            f"pip install {wheel}  # or: apt-get install {package}",
            WITH_GPU, patches={"nvme_ops.report.ops.torch_build": lambda version=version: ("2.13.0", version)})
        for version, wheel, package in (
            ("13.0", "nvidia-cufile", "libcufile-13-0"),
            ("11.8", "nvidia-cufile-cu11", "libcufile-11-8"),
        )
    },
    **{
        f"the library {name}": Case("cuFile library", NO,
            f"NVME_OPS_CUFILE_LIBRARY={name} is not the absolute path of a file",
            "unset NVME_OPS_CUFILE_LIBRARY", EVERYTHING, environ={"NVME_OPS_CUFILE_LIBRARY": name})
        for name in ("/no/such/libcufile.so", os.path.relpath(__file__))
    },
    "no nvidia-fs": Case("nvidia-fs", WARNING, "data pass through host memory", "modprobe nvidia-fs", WITH_GPU),
    "peers serve": Case("nvidia-fs", INFO, "PCI peer-to-peer does without", files={**HIDDEN, **PEERS}),
    "no modules": Case("kernel modules", NO, "no /proc/modules", "CONFIG_MODULES=y", WITH_GPU),
    "no udev": Case("udev data", WARNING, "no /run/udev/data", "CUFILE_EXPERIMENTAL_FS=1", WITH_GPU),
    "torch without CUDA": Case("torch with CUDA", NO, "2.13.0+cpu", "pip install", EVERYTHING,
        patches={"nvme_ops.report.ops.torch_build": lambda: ("2.13.0+cpu", None)}),
    "a library": Case("cuFile library", OKAY, "libcufile.so.0 (site-packages)", files=EVERYTHING,
        data={"source": "site-packages"}),
    "a header": Case("cuFile header", OKAY, "site-packages/nvidia/cu13/include/cufile.h", files=EVERYTHING),
    "settings that are no JSON": Case("cuFile settings", WARNING, "cannot be read as JSON",
        "correct /etc/cufile.json", {**EVERYTHING, "etc/cufile.json": '{"properties": '}),
    "settings in a folder": Case("cuFile settings", WARNING, "/etc/cufile.json: Is a directory",
        "ls -ld /etc/cufile.json", {**EVERYTHING, "etc/cufile.json/file": ""}),
    "named settings that are gone": Case("cuFile settings", WARNING, "/no/such.json: No such file",
        f"unset {gds.NAMED_BY}", EVERYTHING, environ={gds.NAMED_BY: "/no/such.json"}),
    # Peers
    "peers": Case(PEER, OKAY, "set up, as far as files tell (IOMMU off)", files={**EVERYTHING, **PEERS}),
    "a kernel without": apart("the kernel lacks CONFIG_PCI_P2PDMA (",
        **{"boot/config-6.8.0-made-up": "# CONFIG_PCI_P2PDMA is not set\n"}),
    "proprietary driver": apart("the driver is not NVIDIA's open one, 565 or later (",
        **{MODULE: "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.65.06"}),
    "multipath": apart("nvme_core.multipath is on (", sys__module__nvme_core__parameters__multipath="Y\n"),
    "not in the settings": apart("use_pci_p2pdma is not set in /etc/cufile.json (", **{"etc/cufile.json": "{}"}),
    "by symbols": Case(PEER, OKAY, "set up", files={**SYMBOLS, "proc/kallsyms": "x p2pdma_pgmap_ops\n"}),
    "IOMMU passes": Case(PEER, OKAY, "(IOMMU in pass-through;", files={**EVERYTHING, **PEERS,
        "sys/kernel/iommu_groups/0/x": "", "proc/cmdline": "quiet iommu=pt"}),
    # The path
    "direct by peers": way(OKAY, "gds where", paths="gds bounce", files={**HIDDEN, **PEERS}),
    "not direct": way(INFO, "because neither nvidia-fs nor PCI peer-to-peer", paths="compat bounce", files=HIDDEN),
    "required": way(NO, "RuntimeError, because NVME_OPS_GDS=require", "unset NVME_OPS_GDS", files=HIDDEN,
        mode="require"),
    "off": way(INFO, "bounce (NVME_OPS_GDS=off)", paths="bounce", files=WITH_GPU, mode="off"),
    "off needs no library": Case("cuFile library", INFO, "not found", files=WITH_GPU, environ={"NVME_OPS_GDS": "off"}),
    "unknown": way(NO, "NVME_OPS_GDS=maybe is not one of", "unset NVME_OPS_GDS", mode="maybe"),
    "parts are missing": way(NO, "for lack of: cuFile library, kernel modules", "NVME_OPS_GDS=off", files=WITH_GPU),
    "forced by the environment": Case(WAY, INFO, "is set (CUFILE_FORCE_COMPAT_MODE)", "", EVERYTHING,
        environ={gds.FORCED_BY: "true"}, data={"paths": ["compat", "bounce"]}),
    "no way": way(NO, "allow_compat_mode is false", "/etc/cufile.json", files=HIDDEN, allow_compat_mode=False),
}  # fmt: skip


def test_only_the_gpu_is_complained_about_where_there_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for files, expected in (({}, ["GPU"]), (EVERYTHING, [])):
        result_of(Case("GPU", OKAY, files=files), tmp_path, monkeypatch)
        assert [each.name for each in gds.section(Host(tmp_path)) if each.status.needs_fix] == expected


@pytest.mark.parametrize("case", [*CASES.values(), *CUFILE.values()], ids=[*CASES, *CUFILE])
def test_a_made_up_machine_has_its_result_and_fix(case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = result_of(case, tmp_path, monkeypatch)
    assert result.status is case.status, result
    assert case.detail in result.detail
    assert case.fix in result.fix
    assert bool(result.fix) == result.status.needs_fix
    assert {name: result.data[name] for name in case.data} == case.data


def test_the_version_of_the_library_is_that_of_the_file_that_a_link_points_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(tmp_path, {"no-toolkit/lib64/libcufile.so.1.15.1": ""})
    (tmp_path / "no-toolkit/lib64/libcufile.so.0").symlink_to("libcufile.so.1.15.1")
    assert result_of(Case("cuFile library", OKAY), tmp_path, monkeypatch).detail.startswith("1.15.1, ")


def test_looking_loads_no_library_starts_no_process_and_leaves_cuda_alone() -> None:
    program = """
        import os, subprocess, torch
        from pathlib import Path
        from nvme_ops.op_builder import GDSBuilder
        from nvme_ops.op_builder.finished import BuiltOp
        from nvme_ops.report import gds
        def refuse(*args, **kwargs): raise AssertionError(args)
        def loaded(): return {line.split()[-1] for line in open("/proc/self/maps") if "libcu" in line}
        made = GDSBuilder()
        made._find_built = lambda: BuiltOp("prebuilt", Path("op.so"), {})
        made.check_for_libaio_pkg = lambda: True  # else asks a package manager, where the header is missing
        made.is_compatible()  # asks the compiler, once, where libaio is
        before = loaded(), dict(os.environ)
        subprocess.Popen.__init__ = refuse
        gds.section(gds.Host())
        made.is_compatible()
        assert (loaded(), dict(os.environ)) == before
        assert not torch.cuda.is_initialized()
    """
    run_python(program)


# cuFile's settings

# As NVIDIA's own file: comments of both kinds, between and behind values.
COMMENTED = """
{
    // NOTE: applications can override this file
    "logging": { "dir": "/var//log", /* not here */ "level": "ERROR" },  // a path with two slashes
    "properties": {
        "use_pci_p2pdma": true, // the last has a comma too
        "allow_compat_mode": false,
    },
    "note": "a \\"quoted\\" // no comment, ]",
}
"""
FORCED = '{"properties": {"force_compat_mode": true, "use_pci_p2pdma": true}}'
SYSTEMS, Settings = "/etc/cufile.json", gds.CuFileSettings
#: What the system's file has, what one named mine.json has, the environment, and what follows.
SETTINGS: list[tuple[str | None, str | None, dict[str, str], gds.CuFileSettings]] = [
    (COMMENTED, None, {}, Settings(SYSTEMS, False, False, SYSTEMS, True)),
    (COMMENTED, FORCED, {gds.NAMED_BY: "/mine.json"}, Settings("/mine.json", True, True, "/mine.json", True)),
    (FORCED, None, {gds.FORCED_BY: "false", gds.PEER_TO_PEER_BY: "FALSE"}, Settings(SYSTEMS, forced_by=SYSTEMS)),
    ("[]", None, {}, Settings(SYSTEMS, forced_by=SYSTEMS)),
    ('{"properties": []}', None, {}, Settings(SYSTEMS, forced_by=SYSTEMS)),
]  # fmt: skip


@pytest.mark.parametrize(("systems", "mine", "environ", "expected"), SETTINGS)
def test_the_settings_in_force_are_the_environments_then_the_files(
    systems: str | None, mine: str | None, environ: dict[str, str], expected: gds.CuFileSettings,
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    put(tmp_path, {name: text for name, text in (("etc/cufile.json", systems), ("mine.json", mine)) if text})
    clear_environment(monkeypatch, tmp_path)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert gds.read_settings(Host(tmp_path)) == expected


# GPUDirect Storage by file system


def mount(kind: str, *options: str) -> Mount:
    return Mount("/mnt/a place", kind, "/dev/nvme0n1", ("rw", *options))


def device(*stack: str, kind: str = "nvme") -> Device:
    return Device(stack[-1], kind, "", 512, False, stack)


NVME = device("nvme0n1p1", "nvme0n1")
STORAGE: dict[str, tuple[Mount | None, list[Device], str]] = {  # "": supported
    "ext4": (mount("ext4", "data=ordered"), [NVME], ""),
    "xfs on a RAID": (mount("xfs"), [device("md0", name) for name in ("nvme0n1", "nvme1n1")], ""),
    "nfs over rdma": (mount("nfs4", "proto=rdma"), [], ""),
    "lustre": (mount("lustre"), [], ""),
    "no mount": (None, [NVME], "not known"),
    "ext4 by default": (mount("ext4"), [NVME], "do not show data=ordered"),
    "ext4 with its data in the journal": (mount("ext4", "data=journal"), [NVME], "data=journal"),
    "xfs on sata": (mount("xfs"), [device("sda1", "sda", kind="ssd")], "sda is not an NVMe device (ssd)"),
    "tmpfs": (mount("tmpfs"), [], "tmpfs is not among"),
    "nfs over tcp": (mount("nfs4", "proto=tcp"), [], "without proto=rdma"),
    "overlay": (mount("overlay"), [], "container"),
    "xfs on LVM": (mount("xfs"), [device("dm-0", "nvme0n1")], "it lies on dm-0"),
    "xfs on both": (mount("xfs"), [NVME, device("sda", kind="ssd")], "sda is not an NVMe device"),
    "xfs on nothing known": (mount("xfs"), [], "device under the file system is not known"),
}


@pytest.mark.parametrize(("mounted", "found", "refusal"), STORAGE.values(), ids=STORAGE)
def test_file_systems_are_judged_by_nvidias_list(mounted: Mount | None, found: list[Device], refusal: str) -> None:
    result = storage.gpudirect(mounted, found, has_gpu=True)
    assert (result.status, result.data["supported"]) == ((WARNING, False) if refusal else (OKAY, True))
    assert refusal in result.detail
    assert storage.gpudirect(mounted, found, has_gpu=False).status is INFO


def test_the_mount_to_change_is_named() -> None:
    fix = storage.gpudirect(mount("ext4"), [NVME], has_gpu=True).fix
    assert fix == "umount '/mnt/a place' && mount -o data=ordered /dev/nvme0n1 '/mnt/a place'"


# The backends


@pytest.mark.parametrize(
    ("override", "usable", "status", "backend", "fix"),
    [
        (None, "io_uring libaio", OKAY, "io_uring", ""),
        ("auto", "", WARNING, "threads", "fix io_uring"),
        ("threads", "io_uring libaio", OKAY, "threads", ""),
        ("libaio", "io_uring", NO, None, "unset NVME_OPS_BACKEND"),
        ("posix", "io_uring", NO, None, "unset NVME_OPS_BACKEND"),
    ],
)
def test_the_first_usable_backend_is_chosen_unless_the_environment_names_one(
    override: str | None, usable: str, status: Status, backend: str | None, fix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NVME_OPS_BACKEND", raising=False)
    if override is not None:
        monkeypatch.setenv("NVME_OPS_BACKEND", override)
    there = f"{usable} threads".split()
    results = [Result(name, OKAY) if name in there else Result(name, NO, "why", f"fix {name}") for name in BACKENDS]
    result = kernel.chosen(results)
    assert (result.status, result.data["backend"], result.fix) == (status, backend, fix)
    assert (override or backend or "") in result.detail or override == "auto"


def test_the_section_has_every_backend_in_the_order_of_the_engine() -> None:
    source = (ROOT / "csrc" / "backends" / "registry.cpp").read_text()
    order = sorted(BACKENDS, key=lambda name: source.index("k" + name.title().replace("_", "")))
    names = [result.name for result in kernel.backends(Host(), None)]
    assert names == [*order, "chosen"] == [*BACKENDS, "chosen"]


def test_what_the_op_itself_says_of_a_backend_counts() -> None:
    lacking = "built without libaio's headers (apt install libaio-dev)"
    tried = Attempt(
        loaded=True, backend="threads", backends={"io_uring": "no ring", "libaio": lacking, "threads": None}
    )
    found = {result.name: result for result in kernel.backends(Host(), tried)}
    assert [result.status for result in found.values()] == [NO, NO, OKAY, WARNING]
    assert found["libaio"].detail == "built without libaio's headers"
    assert found["libaio"].fix.startswith("NVME_BUILD_AIO=1 "), "the library is of no use to this op"
    assert "a wheel that was made where libaio.h is" in found["libaio"].fix
    assert found["chosen"].data["backend"] == "threads"
    tried = Attempt(loaded=True, backends=dict.fromkeys(BACKENDS))
    assert {result.status for result in kernel.backends(Host(), tried)} == {OKAY}


# This machine's kernel


def test_io_uring_is_tried_for_real_and_leaves_no_descriptor() -> None:
    before = os.listdir("/proc/self/fd")
    result = kernel.io_uring(Host())
    assert os.listdir("/proc/self/fd") == before
    with contextlib.suppress(OSError):
        assert (result.status, result.data["features"]) == (OKAY, kernel.io_uring_setup(1))


def test_small_shared_memory_is_a_warning() -> None:
    script = "from nvme_ops.report.kernel import Host, shared; print(shared(Host()))"
    said = with_mounts("mount -t tmpfs -o size=64m none /dev/shm", sys.executable, "-c", script)
    assert all(words in said for words in ("WARNING", "64 MiB, too small", "--shm-size=1g"))


# torch, this package, and the command that installs what is missing


def test_a_torch_that_is_too_old_is_a_warning() -> None:
    assert [ops.torch_version(each).status for each in ("2.4.0a0+git", "2.3.1")] == [INFO, WARNING]


COMMANDS = {
    "apt-get": "apt-get install -y libaio-dev",
    "dnf": "dnf install -y libaio-devel",
    "conda": "conda install -y -c conda-forge libaio",
    "": "install libaio-devel (libaio-dev on Debian) with the system's package manager",
}


@pytest.mark.parametrize("manager", COMMANDS)
def test_the_command_is_that_of_the_package_manager_at_hand(
    manager: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "conda_prefix", lambda: tmp_path if manager == "conda" else None)
    monkeypatch.setenv("PATH", str(tmp_path))
    if manager:
        (tmp_path / manager).touch(0o755)
    assert ops.install_command("libaio") == COMMANDS[manager]
    assert all(map(ops.install_command, ("compiler", "python headers", "nvidia-gds")))
