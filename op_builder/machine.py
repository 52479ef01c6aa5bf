"""Probes what this machine offers: its files; for a build the compiler, headers, ninja, packages; GPU and cuFile.

A probe returns a value. It prints nothing, raises nothing, writes only to the temporary folder and to the cache of ops,
and touches neither stdout nor stderr of the process, so it works in notebooks, in services without a terminal and in
read-only folders.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from . import trust

#: What is tried when ``CXX`` is not set; ``c++`` first, as torch does.
DEFAULT_COMMANDS = ("c++", "g++", "clang++")

#: A compiler that hangs (a wrapper waiting for a server) must not hang the program that asked.
TIMEOUT_SECONDS = 60

#: The variables from which the compiler takes include directories.
_SEARCH_VARIABLES = ("CPATH", "CPLUS_INCLUDE_PATH", "GCC_EXEC_PREFIX", "SDKROOT")


@dataclass(frozen=True)
class Host:
    """The machine as the kernel shows it: files of /proc and /sys under a root, which tests replace."""

    root: Path = Path("/")  # stands before every absolute path

    def path(self, name: str) -> Path:
        """Returns where ``name`` (an absolute path) is under the root."""
        return self.root / name.lstrip("/")

    def read(self, name: str) -> str:
        """Returns the stripped text of a file; OSError when it cannot be read."""
        return self.path(name).read_text(errors="replace").strip()

    def read_or(self, name: str, default: str = "") -> str:
        """Returns the stripped text of a file, or ``default`` where it cannot be read."""
        try:
            return self.read(name)
        except OSError:
            return default

    def search(self, pattern: str, name: str) -> str | None:
        """Returns what the pattern's group matches in a file, at its first match; None if there is none."""
        match = re.search(pattern, self.read_or(name), re.MULTILINE)
        return match[1] if match else None

    def exists(self, name: str) -> bool:
        """Returns whether the file exists; also False if there is no permission to look."""
        return os.path.exists(self.path(name))


_HERE = Host()


# What compiles ops


def environment_flags(*names: str) -> list[str]:
    """Returns the words in environment variables, for example ``environment_flags("CFLAGS")``.

    Raises:
        ValueError: a quotation has no end.
    """
    words: list[str] = []
    for name in names:
        value = os.environ.get(name, "")
        try:
            words += shlex.split(value)
        except ValueError as error:
            raise ValueError(f"{name}={value!r} cannot be split into words: {error}") from None
    return words


def compile_flags() -> list[str]:
    """Returns the flags that the environment adds to every compilation."""
    return environment_flags("CPPFLAGS", "CFLAGS", "CXXFLAGS")


def link_flags() -> list[str]:
    """Returns the flags that the environment adds to every link."""
    return environment_flags("LDFLAGS")


@dataclass(frozen=True)
class Compiler:
    """A compiler command and its executable."""

    command: tuple[str, ...]  #: as ``CXX`` spells it, split into words
    identity: str  #: path, size and modification time of every word that is a program: changes when one is replaced

    def run(self, *arguments: str, cwd: str | None = None) -> subprocess.CompletedProcess[str]:
        """Runs the compiler with its output captured, in English, whatever this process's streams are."""
        return subprocess.run(
            [*self.command, *arguments],
            cwd=cwd,
            env={**os.environ, "LC_ALL": "C"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=TIMEOUT_SECONDS,
        )


def find_compiler() -> Compiler | None:
    """Returns the compiler that a build would use: ``CXX``, else the first of ``DEFAULT_COMMANDS`` on the PATH."""
    chosen = environment_flags("CXX")
    for command in [chosen] if chosen else map(shlex.split, DEFAULT_COMMANDS):
        if shutil.which(command[0]) is not None:
            return Compiler(tuple(command), "; ".join(filter(None, map(_describe, command))))
    return None


def _describe(word: str) -> str:
    program = shutil.which(word)
    if program is None:
        return word if word.startswith("-") else ""
    path = os.path.realpath(program)
    facts = os.stat(path)
    return f"{path} {facts.st_size} {facts.st_mtime_ns}"


def try_program(compiler: Compiler, program: str, flags: list[str], libraries: list[str]) -> str:
    """Compiles and links ``program``; returns an empty string if both succeed, else the compiler's output."""
    try:
        with tempfile.TemporaryDirectory(prefix="nvme_ops_probe_") as folder:
            source = Path(folder, "probe.cpp")
            source.write_text(program)
            result = compiler.run(*flags, str(source), "-o", str(source.with_suffix("")), *libraries, cwd=folder)
    except (OSError, subprocess.SubprocessError) as error:
        return str(error)
    return "" if result.returncode == 0 else result.stdout.strip() or f"exit status {result.returncode}"


def include_directories(compiler: Compiler) -> list[str]:
    """Returns the directories that the compiler searches for headers, including CFLAGS and CPATH.

    The answer is kept in the cache of ops: asking costs a process, which loading an op must not.
    """
    flags, memory = compile_flags(), trust.roots()
    question = json.dumps([compiler.identity, flags, [*map(os.environ.get, _SEARCH_VARIABLES)]])
    note = f"compiler-{hashlib.sha256(question.encode()).hexdigest()[:20]}.json"
    for folder in memory:
        try:
            if trust.why_not_trusted(folder / note):
                continue
            return list(map(str, json.loads((folder / note).read_text())["include_directories"]))
        except (OSError, ValueError, KeyError, TypeError):
            pass
    answer = _ask_include_directories(compiler, flags)
    facts = {"compiler": compiler.identity, "include_directories": answer}
    if answer:
        any(_remember(folder / note, facts) for folder in memory)
    return answer


def _ask_include_directories(compiler: Compiler, flags: list[str]) -> list[str]:
    try:
        output = compiler.run(*flags, "-E", "-v", "-x", "c++", "/dev/null").stdout
    except (OSError, subprocess.SubprocessError):
        return []
    lines = output.partition("search starts here:")[2].partition("End of search list.")[0].splitlines()
    return [line.strip() for line in lines if line.startswith(" ")]


def _remember(note: Path, facts: Mapping[str, object]) -> bool:
    """Writes ``facts`` as JSON atomically; returns False if nothing can be written."""
    part = note.with_suffix(f".{os.getpid()}")
    try:
        trust.make_folder(note.parent)
        with os.fdopen(trust.replace_file(part), "w") as file:
            json.dump(facts, file, indent=1)
        part.replace(note)
    except OSError:
        return False
    return True


def has_function(function: str, libraries: Sequence[str], library_dirs: Sequence[str] = ()) -> str:
    """Links a program that calls ``function`` from ``libraries``; returns an empty string, or why it does not link.

    Uses CFLAGS and LDFLAGS, which may name the directories of a library that is not in a default one.
    """
    compiler = find_compiler()
    if compiler is None:
        return "no C++ compiler was found"
    program = f'extern "C" void {function}(); int main() {{ {function}(); return 0; }}\n'
    places = [f"-L{directory}" for directory in library_dirs]
    names = [f"-l{library}" for library in libraries]
    return try_program(compiler, program, compile_flags(), [*places, *link_flags(), *names])


def header_flags(header: str, directories: Sequence[str]) -> list[str] | None:
    """Returns the flags with which a compiler that searches ``directories`` finds ``header``; None if it cannot.

    A header that only the active conda environment has is found too, with that folder searched last: the environment's
    other headers must not shadow the system's.
    """
    for directory in directories:
        if os.path.isfile(f"{directory}/{header}"):
            return []
    environment = conda_prefix()
    if environment is not None and Path(environment, "include", header).is_file():
        return ["-idirafter", str(Path(environment, "include"))]
    return None


def conda_prefix() -> Path | None:
    """Returns the conda environment in use: the one this Python is in, else the activated one."""
    for prefix in (sys.prefix, os.environ.get("CONDA_PREFIX", "")):
        if prefix and Path(prefix, "conda-meta").is_dir():
            return Path(prefix)
    return None


def ninja_directory() -> str | None:
    """Returns the folder with the ``ninja`` program, on the PATH or not; None if there is none.

    ``pip install ninja`` puts it beside Python, which is not on the PATH unless the environment was activated.
    """
    places = [
        *os.get_exec_path(),
        sysconfig.get_path("scripts"),
        sysconfig.get_path("scripts", sysconfig.get_preferred_scheme("user")),
        os.path.dirname(sys.executable or ""),
    ]
    package = importlib.util.find_spec("ninja")
    for folder in (package.submodule_search_locations or ()) if package is not None else ():
        places += [str(Path(folder).parent / "bin"), str(Path(folder, "data", "bin"))]  # pip --target; old releases
    places = [place for place in places if os.path.isabs(place)]  # never the current folder, which may be anybody's
    ninja = shutil.which("ninja", path=os.pathsep.join(places))
    return None if ninja is None else str(Path(ninja).parent)


def python_header() -> str | None:
    """Returns why an extension module cannot be compiled for this Python, with the fix; None if it can."""
    include = sysconfig.get_path("include")
    if os.path.isfile(f"{include}/Python.h"):  # a folder that may not be looked into is none
        return None
    package = f"python{sys.version_info.major}.{sys.version_info.minor}-dev"
    return f"Python.h is not in {include}; install the headers of this Python (apt-get install {package})"


def libaio_package() -> tuple[bool, str]:
    """Returns whether libaio's headers are installed, and if not, ``"libaio-dev package with apt"``.

    The text is empty where no package manager is known.
    """
    environment = conda_prefix()
    if environment is not None:
        return any(environment.glob("conda-meta/libaio-[0-9]*.json")), "libaio package with conda"
    for query, package, tools in (
        (("dpkg", "-s"), "libaio-dev", ("apt",)),
        (("pacman", "-Q"), "libaio", ("pacman",)),
        (("rpm", "-q"), "libaio-devel", ("dnf", "yum", "zypper")),
    ):
        if shutil.which(query[0]) is not None:
            tool = next(filter(shutil.which, tools), tools[0])
            return _succeeds([*query, package]), f"{package} package with {tool}"
    return False, ""


def _succeeds(command: list[str]) -> bool:
    try:
        silent = subprocess.DEVNULL
        return subprocess.run(command, stdin=silent, stdout=silent, stderr=silent, timeout=60).returncode == 0
    except (OSError, subprocess.SubprocessError):
        return False


# NVIDIA's GPU, driver and cuFile. Only reads files: no library is loaded, cuFile's driver is not opened, CUDA is not
# initialised.

CUFILE = "libcufile.so.0"  # no package provides an unversioned libcufile.so
CUFILE_OVERRIDE = "NVME_OPS_CUFILE_LIBRARY"
GDS_MODE = "NVME_OPS_GDS"  # auto, require or off
_MODULES = "/proc/modules"
DRIVER_VERSION = "/proc/driver/nvidia/version"
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
    found: str  #: what is there; empty when it is missing
    missing: str  #: what is missing where it is, and the consequence
    fix: str
    needed: bool = True  #: False for what it can do without
    data: Mapping[str, str | bool | Sequence[str] | None] = field(default_factory=dict)


def gds_requirements(torch_version: str, torch_cuda: str | None, host: Host = _HERE) -> list[Requirement]:
    """Returns everything that ``gds_handle`` requires, the GPU first, then what is optional."""
    own = [cufile_library(torch_cuda, host), kernel_modules(host)]
    if os.environ.get(GDS_MODE) == "off":  # then it leaves cuFile alone
        own = [replace(piece, needed=False) for piece in own]
    return [gpu(host), gpu_driver(host), cuda_build(torch_version, torch_cuda), *own, nvidia_fs(host), udev_data(host)]


# The library


def wheel_folders() -> Iterator[Path]:
    """Yields the ``lib`` folders of NVIDIA's wheels: ``nvidia/cu13``, in old ones ``nvidia/cufile``."""
    for entry in sys.path:
        for pattern in ("cu[0-9]*", "cufile"):
            with contextlib.suppress(OSError):  # a folder that this user may not look into
                yield from sorted(Path(entry or ".").glob(f"nvidia/{pattern}/lib"), reverse=True)


def cufile_candidates(host: Host = _HERE) -> Iterator[tuple[str, Path]]:
    """Yields where the gds op looks for cuFile, best first, after ``CUFILE_OVERRIDE`` and a copy already loaded."""
    for folder in wheel_folders():
        yield "site-packages", folder / CUFILE
    environment = conda_prefix()
    if environment is not None:
        yield "conda", environment / "lib" / CUFILE
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    if home:
        for below in ("lib64", "lib", "targets/x86_64-linux/lib", "targets/sbsa-linux/lib"):
            yield "CUDA_HOME", Path(home, below, CUFILE)
    for path in _system_places(CUFILE, _SYSTEM_FOLDERS, host):
        yield "system", path


def cufile_libraries() -> list[str]:
    """Returns the existing ones of ``cufile_candidates``, as absolute paths."""
    return [str(path.absolute()) for _, path in cufile_candidates() if os.path.isfile(path)]


def find_cufile(host: Host = _HERE) -> tuple[str, Path] | None:
    """Returns the library that the gds op would load, and the kind of place where it is; None if there is none."""
    named = os.environ.get(CUFILE_OVERRIDE)
    if named:
        return (CUFILE_OVERRIDE, Path(named)) if os.path.isabs(named) and os.path.isfile(named) else None
    places = [*(("already loaded", path) for path in _mapped("libcufile.so", host)), *cufile_candidates(host)]
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
    files = [f"/proc/driver/nvidia/gpus/{card}/information" for card in cards]
    models = [host.search(r"^Model:\s*(.*\S)", file) or "unknown model" for file in files]
    nodes = sorted(path.name for path in host.path("/dev").glob("nvidia[0-9]*"))
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    hidden = bool(nodes) and visible is not None and visible.strip().partition(",")[0] in ("", "-1", "NoDevFiles")
    words = "no NVIDIA GPU is visible, and only the gds op needs one"
    fix = f"nvidia-smi  # must list the GPU; {_IN_A_CONTAINER}"
    if hidden:
        words, fix = f"CUDA_VISIBLE_DEVICES={visible!r} hides every GPU", "unset CUDA_VISIBLE_DEVICES"
    elif models or host.exists(DRIVER_VERSION):
        words = "NVIDIA's driver is loaded, but no GPU is visible (no /dev/nvidia0)"
        fix = "docker run --gpus all ...  # outside a container: nvidia-modprobe -u -c 0"
    names = [f"{models.count(model)} x {model}" for model in dict.fromkeys(models)] or nodes
    found = ", ".join(names) if nodes and not hidden else ""
    return Requirement("GPU", found, words, fix, data={"models": models, "devices": nodes})


def gpu_driver(host: Host = _HERE) -> Requirement:
    """Checks for NVIDIA's driver: its kernel module, and the library that comes with it."""
    version = host.search(r"Kernel Module.*?(\d+\.\d+(?:\.\d+)?)", DRIVER_VERSION)
    places = [*_mapped(_CUDA, host), *_system_places(_CUDA, (*_SYSTEM_FOLDERS, *_DRIVER_FOLDERS), host)]
    loaded, library = version is not None or host.exists("/dev/nvidiactl"), any(map(os.path.isfile, places))
    if loaded:
        words = f"the driver's library {_CUDA} is not found"
        fix = "docker run --gpus all ...  # outside a container: install the driver's libraries (libnvidia-compute)"
    else:
        words = "NVIDIA's driver is not loaded"
        fix = f"modprobe nvidia  # if that finds none: apt-get install nvidia-open; {_IN_A_CONTAINER}"
    there = (version or "loaded") if loaded and library else ""
    return Requirement("NVIDIA driver", there, words, fix, data={"version": version})


def cuda_build(version: str, cuda: str | None) -> Requirement:
    """Checks for a torch with CUDA."""
    words = f"torch {version} is built without CUDA, so there are no tensors on a GPU"
    fix = "pip install --force-reinstall torch  # and not one of its CPU or ROCm builds"
    found = f"{version}, CUDA {cuda}" if cuda else ""
    return Requirement("torch with CUDA", found, words, fix, data={"cuda": cuda or None})


def cufile_library(torch_cuda: str | None, host: Host = _HERE) -> Requirement:
    """Checks for the library, ``libcufile``."""
    source, path = find_cufile(host) or ("", None)
    data = {"path": None if path is None else str(path), "source": source or None}
    named = os.environ.get(CUFILE_OVERRIDE)
    wheel, package = _packages(torch_cuda)
    words, fix = f"{CUFILE} is not found", f"pip install {wheel}  # or: apt-get install {package}"
    if named:
        words, fix = f"{CUFILE_OVERRIDE}={named} is not the absolute path of a file", f"unset {CUFILE_OVERRIDE}"
    return Requirement("cuFile library", f"{path} ({source})" if path else "", words, fix, data=data)


def _packages(torch_cuda: str | None) -> tuple[str, str]:
    """Returns the wheel and the Debian package with the library, for the CUDA that torch was built with."""
    if not torch_cuda:
        return "nvidia-cufile", "nvidia-gds"
    major, _, minor = torch_cuda.partition(".")
    wheel = f"nvidia-cufile-cu{major}" if major in ("11", "12") else "nvidia-cufile"
    return wheel, f"libcufile-{major}-{minor.partition('.')[0] or 0}"


def kernel_modules(host: Host = _HERE) -> Requirement:
    """Checks for the kernel's list of modules."""
    there = host.exists(_MODULES)
    words = f"no {_MODULES}: cuFile would read it for ever, so its driver is not opened"
    fix = "use a kernel with CONFIG_MODULES=y  # or: export NVME_OPS_GDS=off"
    found = f"{_MODULES} is there" if there else ""
    return Requirement("kernel modules", found, words, fix, data={"proc_modules": there})


def nvidia_fs(host: Host = _HERE) -> Requirement:
    """Checks for the kernel module that connects storage and GPU, unless PCI peer-to-peer does."""
    version = host.search(r"version:\s*(\S+)", "/proc/driver/nvidia-fs/version")
    loaded, devices = host.exists("/proc/driver/nvidia-fs"), any(host.path("/dev").glob("nvidia-fs*"))
    if loaded:
        words = "nvidia-fs is loaded, but /dev/nvidia-fs* is not here: data pass through host memory"
        fix = "docker run --gpus all -e NVIDIA_GDS=enabled ..."
    else:
        words = "nvidia-fs is not loaded: without it, or PCI peer-to-peer, data pass through host memory"
        fix = "apt-get install nvidia-gds && modprobe nvidia-fs"
    found = (version or "loaded") if loaded and devices else ""
    return Requirement("nvidia-fs", found, words, fix, needed=False, data={"version": version, "loaded": loaded})


def udev_data(host: Host = _HERE) -> Requirement:
    """Checks for udev's data about disks, which cuFile reads when a file is registered."""
    there = host.exists("/run/udev/data")
    words = "no /run/udev/data: cuFile refuses file systems whose disk it cannot look up"
    fix = "docker run -v /run/udev:/run/udev:ro ...  # or: export CUFILE_EXPERIMENTAL_FS=1"
    found = "/run/udev/data is there" if there else ""
    return Requirement("udev data", found, words, fix, needed=False, data={"udev": there})
