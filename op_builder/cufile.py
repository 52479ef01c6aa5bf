"""NVIDIA's cuFile: where its library may be, and what it requires of the machine.

Only reads files: no library is loaded, cuFile's driver is not opened, CUDA is not initialised.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from .machine import Host, conda_prefix

LIBRARY = "libcufile.so.0"  # no package provides an unversioned libcufile.so
OVERRIDE = "NVME_OPS_CUFILE_LIBRARY"
MODE = "NVME_OPS_GDS"  # auto, require or off
MODULES = "/proc/modules"
DRIVER_VERSION = "/proc/driver/nvidia/version"
_HERE = Host()
_CUDA = "libcuda.so.1"  # the part of NVIDIA's driver that programs load
_SYSTEM_FOLDERS = (
    "/usr/lib/x86_64-linux-gnu",
    "/usr/lib/aarch64-linux-gnu",
    "/usr/lib64",
    "/usr/lib",
    "/usr/local/lib",
    "/usr/local/cuda/lib64",
)
_DRIVER_FOLDERS = ("/usr/local/nvidia/lib64", "/run/opengl-driver/lib")  # on Kubernetes nodes and on NixOS
_IN_A_CONTAINER = "in a container: docker run --gpus all ..."


@dataclass(frozen=True)
class Requirement:
    """One thing that cuFile requires, or works better with."""

    name: str
    found: str = ""  #: what is there; empty when it is missing
    missing: str = ""  #: what is missing, and the consequence
    fix: str = ""
    needed: bool = True  #: False for what it can do without
    data: Mapping[str, str | bool | Sequence[str] | None] = field(default_factory=dict)


def pieces(torch_version: str, torch_cuda: str | None, host: Host = _HERE) -> list[Requirement]:
    """Returns everything that ``gds_handle`` requires, the GPU first, then what is optional."""
    own = [library(torch_cuda, host), modules(host)]
    if os.environ.get(MODE) == "off":  # then it leaves cuFile alone
        own = [replace(piece, needed=False) for piece in own]
    return [gpu(host), driver(host), cuda_build(torch_version, torch_cuda), *own, nvidia_fs(host), udev(host)]


# The library


def wheel_folders(kind: str) -> Iterator[Path]:
    """Yields the ``lib`` or ``include`` folders of NVIDIA's wheels: ``nvidia/cu13``, in old ones ``nvidia/cufile``."""
    for entry in sys.path:
        for pattern in ("cu[0-9]*", "cufile"):
            yield from sorted(Path(entry or ".").glob(f"nvidia/{pattern}/{kind}"), reverse=True)


def candidates(host: Host = _HERE) -> Iterator[tuple[str, Path]]:
    """Yields where the gds op looks for the library, best first, after ``OVERRIDE`` and a copy already loaded."""
    for folder in wheel_folders("lib"):
        yield "site-packages", folder / LIBRARY
    environment = conda_prefix()
    if environment is not None:
        yield "conda", environment / "lib" / LIBRARY
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    if home:
        for below in ("lib64", "lib", "targets/x86_64-linux/lib", "targets/sbsa-linux/lib"):
            yield "CUDA_HOME", Path(home, below, LIBRARY)
    for path in _system_places(LIBRARY, _SYSTEM_FOLDERS, host):
        yield "system", path


def libraries() -> list[str]:
    """Returns the existing ones of ``candidates``, as absolute paths."""
    return [str(path.absolute()) for _, path in candidates() if os.path.isfile(path)]


def find(host: Host = _HERE) -> tuple[str, Path] | None:
    """Returns the library that the gds op would load, and the kind of place where it is; None if there is none."""
    named = os.environ.get(OVERRIDE)
    if named:
        return (OVERRIDE, Path(named)) if os.path.isabs(named) and os.path.isfile(named) else None
    places = [*(("already loaded", path) for path in _mapped("libcufile.so", host)), *candidates(host)]
    return next(((source, path) for source, path in places if os.path.isfile(path)), None)


def _system_places(name: str, folders: Sequence[str], host: Host) -> Iterator[Path]:
    """Yields the paths at which the dynamic linker looks for ``name``."""
    for folder in filter(None, os.environ.get("LD_LIBRARY_PATH", "").split(":")):
        yield host.path(os.path.abspath(folder)) / name
    try:
        cache = host.path("/etc/ld.so.cache").read_bytes()
    except OSError:
        cache = b""
    for entry in re.findall(rb"/[^\0]*/" + re.escape(name.encode()) + rb"(?=\0)", cache):
        yield host.path(os.fsdecode(entry))
    for folder in folders:
        yield host.path(folder) / name


def _mapped(name: str, host: Host) -> Iterator[Path]:
    """Yields the files of this name that this process has loaded."""
    for line in host.read_or("/proc/self/maps").splitlines():
        if f"/{name}" in line:
            yield Path(line.split(maxsplit=5)[-1])


# What nvme-report shows one by one


def gpu(host: Host = _HERE) -> Requirement:
    """Checks for an NVIDIA GPU that this process may use."""
    cards = [file.parent.name for file in sorted(host.path("/proc/driver/nvidia/gpus").glob("*/information"))]
    models = [_model(host.read_or(f"/proc/driver/nvidia/gpus/{card}/information")) for card in cards]
    nodes = sorted(path.name for path in host.path("/dev").glob("nvidia[0-9]*"))
    data = {"models": models, "devices": nodes}
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if nodes and visible is not None and visible.strip().partition(",")[0] in ("", "-1", "NoDevFiles"):
        words, fix = f"CUDA_VISIBLE_DEVICES={visible!r} hides every GPU", "unset CUDA_VISIBLE_DEVICES"
        return Requirement("GPU", "", words, fix, data=data)
    if nodes:
        names = [f"{models.count(model)} x {model}" for model in dict.fromkeys(models)]
        return Requirement("GPU", ", ".join(names) or ", ".join(nodes), data=data)
    if models or host.exists(DRIVER_VERSION):
        words = "NVIDIA's driver is loaded, but no GPU is visible (no /dev/nvidia0)"
        fix = "docker run --gpus all ...  # outside a container: nvidia-modprobe -u -c 0"
        return Requirement("GPU", "", words, fix, data=data)
    words = "no NVIDIA GPU is visible, and only the gds op needs one"
    return Requirement("GPU", "", words, f"nvidia-smi  # must list the GPU; {_IN_A_CONTAINER}", data=data)


def _model(text: str) -> str:
    found = re.search(r"^Model:\s*(.+)$", text, re.MULTILINE)
    return found[1].strip() if found else "unknown model"


def driver(host: Host = _HERE) -> Requirement:
    """Checks for NVIDIA's driver: its kernel module, and the library that comes with it."""
    found = re.search(r"Kernel Module.*?(\d+\.\d+(?:\.\d+)?)", host.read_or(DRIVER_VERSION))
    data = {"version": found[1] if found else None}
    if not found and not host.exists("/dev/nvidiactl"):
        fix = f"modprobe nvidia  # if that finds none: apt-get install nvidia-open; {_IN_A_CONTAINER}"
        return Requirement("NVIDIA driver", "", "NVIDIA's driver is not loaded", fix, data=data)
    places = [*_mapped(_CUDA, host), *_system_places(_CUDA, (*_SYSTEM_FOLDERS, *_DRIVER_FOLDERS), host)]
    if not any(os.path.isfile(path) for path in places):
        fix = "docker run --gpus all ...  # outside a container: install the driver's libraries (libnvidia-compute)"
        return Requirement("NVIDIA driver", "", f"the driver's library {_CUDA} is not found", fix, data=data)
    return Requirement("NVIDIA driver", found[1] if found else "loaded", data=data)


def cuda_build(version: str, cuda: str | None) -> Requirement:
    """Checks for a torch with CUDA."""
    if cuda:
        return Requirement("torch with CUDA", f"{version}, CUDA {cuda}", data={"cuda": cuda})
    words = f"torch {version} is built without CUDA, so there are no tensors on a GPU"
    fix = "pip install --force-reinstall torch  # and not one of its CPU or ROCm builds"
    return Requirement("torch with CUDA", "", words, fix, data={"cuda": None})


def library(torch_cuda: str | None, host: Host = _HERE) -> Requirement:
    """Checks for the library, ``libcufile``."""
    name, place = "cuFile library", find(host)
    if place is not None:
        source, path = place
        return Requirement(name, f"{path} ({source})", data={"path": str(path), "source": source})
    data = {"path": None, "source": None}
    named = os.environ.get(OVERRIDE)
    if named:
        words = f"{OVERRIDE}={named} is not the absolute path of a file"
        return Requirement(name, "", words, f"unset {OVERRIDE}", data=data)
    wheel, package = _packages(torch_cuda)
    fix = f"pip install {wheel}  # or: apt-get install {package}"
    return Requirement(name, "", f"{LIBRARY} is not found", fix, data=data)


def _packages(torch_cuda: str | None) -> tuple[str, str]:
    """Returns the wheel and the Debian package with the library, for the CUDA that torch was built with."""
    if not torch_cuda:
        return "nvidia-cufile", "nvidia-gds"
    major, _, minor = torch_cuda.partition(".")
    wheel = f"nvidia-cufile-cu{major}" if major in ("11", "12") else "nvidia-cufile"
    return wheel, f"libcufile-{major}-{minor.partition('.')[0] or 0}"


def modules(host: Host = _HERE) -> Requirement:
    """Checks for the kernel's list of modules."""
    there = host.exists(MODULES)
    data = {"proc_modules": there}
    if there:
        return Requirement("kernel modules", f"{MODULES} is there", data=data)
    words = f"no {MODULES}: cuFile would read it for ever, so its driver is not opened"
    fix = "use a kernel with CONFIG_MODULES=y  # or: export NVME_OPS_GDS=off"
    return Requirement("kernel modules", "", words, fix, data=data)


def nvidia_fs(host: Host = _HERE) -> Requirement:
    """Checks for the kernel module that connects storage and GPU, unless PCI peer-to-peer does."""
    found = re.search(r"version:\s*(\S+)", host.read_or("/proc/driver/nvidia-fs/version"))
    loaded = bool(found) or host.exists("/proc/driver/nvidia-fs")
    data = {"version": found[1] if found else None, "loaded": loaded}
    if not loaded:
        words = "nvidia-fs is not loaded: without it, or PCI peer-to-peer, data pass through host memory"
        fix = "apt-get install nvidia-gds && modprobe nvidia-fs"
        return Requirement("nvidia-fs", "", words, fix, needed=False, data=data)
    if not any(host.path("/dev").glob("nvidia-fs*")):
        words = "nvidia-fs is loaded, but /dev/nvidia-fs* is not here: data pass through host memory"
        fix = "docker run --gpus all -e NVIDIA_GDS=enabled ..."
        return Requirement("nvidia-fs", "", words, fix, needed=False, data=data)
    return Requirement("nvidia-fs", found[1] if found else "loaded", needed=False, data=data)


def udev(host: Host = _HERE) -> Requirement:
    """Checks for udev's data about disks, which cuFile reads when a file is registered."""
    there = host.exists("/run/udev/data")
    data = {"udev": there}
    if there:
        return Requirement("udev data", "/run/udev/data is there", needed=False, data=data)
    words = "no /run/udev/data: cuFile refuses file systems whose disk it cannot look up"
    fix = "docker run -v /run/udev:/run/udev:ro ...  # or: export CUFILE_EXPERIMENTAL_FS=1"
    return Requirement("udev data", "", words, fix, needed=False, data=data)
