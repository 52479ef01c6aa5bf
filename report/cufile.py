"""What the gds op needs: a GPU and its driver, libcufile, nvidia-fs. Only files are looked at.

The cuFile driver is never opened, nor CUDA initialised: opening loops for ever on kernels without modules, needs a CUDA
context, and forbids fork afterwards.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import re
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from .host import Host
from .packages import install_command
from .result import Check, Result, Status, run_checks
from .toolchain import cuda_home

LIBRARY = "libcufile.so.0"  # no package brings an unversioned libcufile.so
OVERRIDE = "NVME_OPS_CUFILE_LIBRARY"
_SYSTEM_FOLDERS = (
    "/usr/lib/x86_64-linux-gnu",
    "/usr/lib/aarch64-linux-gnu",
    "/usr/lib64",
    "/usr/lib",
    "/usr/local/lib",
)
_DRIVER = "/proc/driver/nvidia/version"


def gpus(host: Host) -> list[str]:
    """The models of the NVIDIA GPUs that the kernel's driver lists."""
    models = []
    for file in sorted(host.path("/proc/driver/nvidia/gpus").glob("*/information")):
        found = re.search(r"^Model:\s*(.+)$", file.read_text(errors="replace"), re.MULTILINE)
        models.append(found[1].strip() if found else "unknown model")
    return models


def section(host: Host) -> tuple[Result, ...]:
    """Every part of GPUDirect Storage; without a GPU the rest is only noted, for nothing could use it."""
    gpu, *parts = run_checks(
        [
            Check("GPU", partial(_gpu, host)),
            Check("NVIDIA driver", partial(_driver, host)),
            Check("cuFile library", partial(_library, host)),
            Check("cuFile header", partial(_header, host)),
            Check("nvidia-fs", partial(_nvidia_fs, host)),
            Check("kernel modules", partial(_modules, host)),
            Check("udev data", partial(_udev, host)),
        ]
    )
    if gpu.status is Status.NO:
        parts = [_noted(part) if part.status in (Status.WARNING, Status.NO) else part for part in parts]
    return (gpu, *parts)


def _noted(result: Result) -> Result:
    return Result(result.name, Status.INFO, result.detail, data=result.data)


def _gpu(host: Host) -> Result:
    models = gpus(host)
    data = {"models": models}
    if models:
        names = [f"{models.count(model)} x {model}" for model in dict.fromkeys(models)]
        return Result("GPU", Status.OKAY, ", ".join(names), data=data)
    if host.exists(_DRIVER):
        return Result("GPU", Status.NO, "driver loaded, no GPU visible", "docker run --gpus all ...", data)
    words = "no NVIDIA GPU (only the gds op needs one)"
    return Result(
        "GPU", Status.NO, words, "nvidia-smi  # must list the GPU; in a container: docker run --gpus all ...", data
    )


def _driver(host: Host) -> Result:
    found = re.search(r"Kernel Module.*?(\d+\.\d+(?:\.\d+)?)", host.read_or(_DRIVER))
    if found:
        return Result("NVIDIA driver", Status.OKAY, found[1], data={"version": found[1]})
    return Result("NVIDIA driver", Status.NO, "not loaded", "modprobe nvidia", {"version": None})


def library_candidates(host: Host) -> Iterator[tuple[str, Path]]:
    """Where libcufile is looked for, in the order in which the gds op loads it."""
    named = os.environ.get(OVERRIDE)
    if named:
        yield OVERRIDE, Path(named)
    for line in host.read_or("/proc/self/maps").splitlines():
        if "/libcufile.so" in line:
            yield "already loaded", Path(line.split(maxsplit=5)[-1])
    for folder in _site_packages("lib"):
        yield "site-packages", folder / LIBRARY
    home = cuda_home(host)
    if home:
        for below in ("lib64", "lib", "targets/x86_64-linux/lib", "targets/sbsa-linux/lib"):
            yield "CUDA_HOME", Path(home, below, LIBRARY)
    for place in [*filter(None, os.environ.get("LD_LIBRARY_PATH", "").split(":")), *_SYSTEM_FOLDERS]:
        yield "system", host.path(place) / LIBRARY


def _site_packages(kind: str) -> Iterator[Path]:
    """The folders of NVIDIA's wheels: ``nvidia/cu13`` since CUDA 13, ``nvidia/cufile`` before."""
    for entry in sys.path:
        for pattern in ("cu[0-9]*", "cufile"):
            yield from sorted(Path(entry or ".").glob(f"nvidia/{pattern}/{kind}"), reverse=True)


def _library(host: Host) -> Result:
    name = "cuFile library"
    named = os.environ.get(OVERRIDE)
    if named and not (os.path.isabs(named) and os.path.isfile(named)):
        words = f"{OVERRIDE}={named} is not the absolute path of a file"
        return Result(name, Status.NO, words, f"unset {OVERRIDE}", {"path": None})
    for source, path in library_candidates(host):
        if path.is_file():
            return Result(
                name,
                Status.OKAY,
                f"{path} ({source})",
                data={"path": str(path), "source": source, "version": _version(path)},
            )
    return Result(
        name, Status.NO, f"{LIBRARY} not found", f"{sys.executable} -m pip install {_distribution()}", {"path": None}
    )


def _version(path: Path) -> str | None:
    for distribution in ("nvidia-cufile", "nvidia-cufile-cu12") if "site-packages" in path.parts else ():
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(distribution)
    found = re.search(r"\.so\.(\d+\.\d+.*)$", path.resolve().name)
    return found[1] if found else None


def _distribution() -> str:
    cuda = getattr(getattr(sys.modules.get("torch"), "version", None), "cuda", None)
    return "nvidia-cufile-cu12" if str(cuda).startswith("12") else "nvidia-cufile"


def _header(host: Host) -> Result:
    folders = [*_site_packages("include")]
    home = cuda_home(host)
    folders += [Path(home, "include")] if home else []
    for folder in [*folders, host.path("/usr/include")]:
        if (folder / "cufile.h").is_file():
            return Result(
                "cuFile header", Status.OKAY, str(folder / "cufile.h"), data={"path": str(folder / "cufile.h")}
            )
    return Result("cuFile header", Status.INFO, "cufile.h not found (no op needs it)", data={"path": None})


def _nvidia_fs(host: Host) -> Result:
    name = "nvidia-fs"
    found = re.search(r"version:\s*(\S+)", host.read_or("/proc/driver/nvidia-fs/version"))
    if found or host.exists("/proc/driver/nvidia-fs"):
        version = found[1] if found else "loaded"
        return Result(name, Status.OKAY, version, data={"version": version})
    words = "not loaded: cuFile moves data through host memory (compatibility mode)"
    fix = f"{install_command('nvidia-fs')} && modprobe nvidia-fs"
    return Result(name, Status.WARNING, words, fix, {"version": None})


def _modules(host: Host) -> Result:
    name = "kernel modules"
    if host.exists("/proc/modules"):
        return Result(name, Status.OKAY, "/proc/modules is there", data={"proc_modules": True})
    words = "no /proc/modules: opening the cuFile driver would never return, so gds must not"
    return Result(
        name,
        Status.NO,
        words,
        "use a kernel with CONFIG_MODULES=y; aio_handle takes GPU tensors without it",
        {"proc_modules": False},
    )


def _udev(host: Host) -> Result:
    name = "udev data"
    if host.exists("/run/udev/data"):
        return Result(name, Status.OKAY, "/run/udev/data is there", data={"udev": True})
    words = "no /run/udev/data: cuFile refuses file systems it cannot look up"
    fix = "docker run -v /run/udev:/run/udev:ro ...  # or: export CUFILE_EXPERIMENTAL_FS=1"
    return Result(name, Status.WARNING, words, fix, {"udev": False})
