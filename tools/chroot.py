"""Runs the steps of a Dockerfile without a Docker engine, each stage in a chroot that debootstrap makes.

    sudo python3 tools/chroot.py --build-arg PYTHON=3.11                     # docker/Dockerfile, then its CMD
    sudo python3 tools/chroot.py --build-arg PYTHON=3.11 --run nvme-report   # something else in its image

Needs root, and a Dockerfile of FROM, ARG, ENV, WORKDIR, COPY, RUN and CMD. Its steps run as root: use only a Dockerfile
that you trust. They see the network, and look for packages where pip and apt of this machine do. Mounts and processes
are in namespaces of their own and end with this program, however it ends; what it made is removed.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import posixpath
import pwd
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.parse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import dockerfile

ROOT = Path(__file__).parent.parent
PACKAGES = "python3,python3-venv,libpython3-dev,ca-certificates"
PROGRAMS = ("debootstrap", "unshare", "setpriv", "mount", "chroot")
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
HOST = "run/host"  # what a chroot has of this machine lies there
MIRROR = "http://deb.debian.org/debian"
_PIP = ("cert", "constraint", "extra-index-url", "find-links", "index-url", "no-index", "proxy", "retries", "timeout",
        "default-timeout", "trusted-host")  # fmt: skip
_NETWORK = re.compile(r"(?i:(https?|ftp|all|no)_proxy)|SSL_CERT_FILE|REQUESTS_CA_BUNDLE|CURL_CA_BUNDLE")


@dataclass
class Image:
    """A stage as far as it has been made."""

    root: Path
    environment: dict[str, str] = field(default_factory=lambda: {"PATH": PATH, "HOME": pwd.getpwuid(0).pw_dir})
    folder: str = "/"
    command: list[str] = field(default_factory=lambda: ["python3", "--version"])


def handed_on(environment: Mapping[str, str], pip: str) -> tuple[dict[str, str], list[str]]:
    """Variables that say in a chroot where packages are, as this process's and ``pip config list`` do; their paths."""
    values = {name: value for name, value in environment.items() if _NETWORK.fullmatch(name)}
    for line in sorted(pip.splitlines(), key=lambda line: line.startswith(":env:")):  # which have priority
        found = re.fullmatch(r"(?:global|install|:env:)\.([\w-]+)=(.*)", line)
        if found and found[1] in _PIP:
            values["PIP_" + found[1].upper().replace("-", "_")] = str(ast.literal_eval(found[2]))
    paths: set[str] = set()

    def moved(word: str) -> str:
        path = urllib.parse.unquote(word.removeprefix("file://"))
        if not path.startswith("/") or not os.path.exists(path):
            return word
        paths.add(os.path.dirname(path) if os.path.basename(path) == "simple" else path)  # an index has files beside it
        return word.replace(path, f"/{HOST}{path}")

    return {name: " ".join(map(moved, value.split())) for name, value in values.items()}, sorted(paths)


def output_of(*command: str) -> str:
    """What a command prints; nothing where it fails or is missing."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=60).stdout
    except (OSError, subprocess.SubprocessError):
        return ""


def connect(root: Path) -> dict[str, str]:
    """Mounts and copies what a chroot has of this machine. The variables that say where it is."""
    variables, paths = handed_on(os.environ, output_of(sys.executable, "-m", "pip", "config", "list"))
    places = {path: root / (HOST + path) for path in paths}
    places |= {path: root / path.lstrip("/") for path in ("/etc/resolv.conf", "/etc/hosts")}
    for path, place in places.items():
        (place if os.path.isdir(path) else place.parent).mkdir(parents=True, exist_ok=True)
        if os.path.isdir(path):
            quietly("mount", "--bind", "-o", "ro", path, place)
        elif os.path.exists(path):
            shutil.copyfile(path, place)
    apt = re.findall(r"^Acquire::(?:https?|Retries|Check).*;$", output_of("apt-config", "dump"), re.MULTILINE)
    (root / HOST).mkdir(parents=True, exist_ok=True)
    (root / HOST / "apt.conf").write_text("\n".join([*apt, 'Acquire::Languages "none";', ""]))
    quietly("mount", "-t", "proc", "proc", root / "proc")
    quietly("mount", "-t", "sysfs", "-o", "ro", "sysfs", root / "sys")
    return {**variables, "APT_CONFIG": f"/{HOST}/apt.conf"}


def quietly(*command: str | Path, environment: Mapping[str, str] | None = None) -> None:
    """Runs a command, of which only a failure shows what it printed. RuntimeError with it."""
    done = subprocess.run(
        command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    if done.returncode != 0:
        raise RuntimeError(f"{done.stdout}status {done.returncode}: {shlex.join(map(str, command))}")


def inside(image: Image, *command: str) -> list[str]:
    """The command that runs another one in an image."""
    shell = ["/bin/sh", "-c", 'cd "$0" && exec "$@"', image.folder]
    return [shutil.which("chroot") or "chroot", str(image.root), *shell, *command]


def words_of(rest: str) -> list[str]:
    """The command of a RUN or CMD, which is a list or for a shell."""
    return [str(word) for word in json.loads(rest)] if rest.startswith("[") else ["/bin/sh", "-c", rest]


def bootstrap(suite: str, root: Path, mirror: str) -> Image:
    """What python:X.Y-slim is: Debian with ``python`` and ``pip`` in /usr/local, and what makes dpkg quick."""
    quietly("debootstrap", "--variant=minbase", f"--include={PACKAGES}", suite, root, mirror)
    (root / "etc/dpkg/dpkg.cfg.d/fast").write_text("force-unsafe-io\n")
    (root / "usr/sbin/policy-rc.d").write_text("#!/bin/sh\nexit 101\n")  # packages start no services
    (root / "usr/sbin/policy-rc.d").chmod(0o755)
    image = Image(root)
    quietly(*inside(image, "python3", "-m", "venv", "/usr/local"), environment=image.environment)
    return image


def make(stage: dockerfile.Stage, image: Image, images: Mapping[str, Image], args: argparse.Namespace) -> None:
    """Runs the steps of a stage in its image."""
    host, arguments = connect(image.root), dict[str, str]()
    for step in stage.steps:
        began, values = time.monotonic(), {**arguments, **image.environment}
        try:
            if step.word == "ARG":
                arguments |= dockerfile.declared(step.rest, args.build_arg, stage.arguments, values)
            elif step.word == "ENV":
                image.environment |= dockerfile.assigned(step.rest, values)
            elif step.word == "WORKDIR":
                image.folder = posixpath.join(image.folder, dockerfile.expand(step.rest, values))
                dockerfile.path_in(image.root, image.folder).mkdir(parents=True, exist_ok=True)
            elif step.word == "COPY":
                roots = {name: made.root for name, made in images.items()}
                words = shlex.split(dockerfile.expand(step.rest, values))
                dockerfile.copy(words, image.root, image.folder, roots, args.context)
            elif step.word == "RUN":
                quietly(*inside(image, *words_of(step.rest)), environment={**host, **values})
            else:
                image.command = words_of(step.rest)
        except (OSError, RuntimeError, ValueError, shutil.Error) as error:
            raise RuntimeError(f"{args.file}, line {step.line}: {step.word} {step.rest}\n{error}") from error
        print(f"{time.monotonic() - began:5.0f} s  {step.word} {step.rest[:100]}", flush=True)


def build(args: argparse.Namespace) -> int:
    """Makes all stages in folders of ``args.work``, and runs a command in the last. Its status."""
    images: dict[str, Image] = {}
    if args.in_memory:
        quietly("mount", "-t", "tmpfs", "-o", "mode=755", "tmpfs", args.work)
    for number, stage in enumerate(dockerfile.stages(args.file.read_text(), args.build_arg)):
        began, root = time.monotonic(), args.work / str(number)
        if stage.base not in images:
            suite = dockerfile.suite_of(stage.base)
            images[stage.base] = bootstrap(suite, args.work / suite, args.mirror)
        base = images[stage.base]
        quietly("cp", "-ax", base.root, root)
        image = replace(base, root=root, environment=dict(base.environment))
        print(f"{time.monotonic() - began:5.0f} s  FROM {stage.base} {stage.name and 'AS ' + stage.name}", flush=True)
        make(stage, image, images, args)
        images[stage.name or root.name] = image
    command = words_of(args.run) if args.run else image.command
    print(f"         {shlex.join(command)}", flush=True)
    return subprocess.run(inside(image, *command), env=image.environment, stdin=subprocess.DEVNULL).returncode


def isolated(arguments: Sequence[str], seconds: float) -> int:
    """Runs this program with these arguments in namespaces of its own, which end with it. Its status."""
    work = tempfile.mkdtemp(prefix="chroot-")
    unshare = ("setpriv", "--pdeathsig", "KILL", "unshare", "--mount", "--pid", "--kill-child", "--mount-proc")
    process = subprocess.Popen([*unshare, sys.executable, __file__, *arguments, "--work", work])
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        print(f"chroot.py: not done after {seconds:.0f} s (--timeout)", file=sys.stderr)
        return 1
    finally:
        process.kill()
        process.wait()
        for _ in range(50):  # while what was killed ends; here nothing is mounted in it
            if subprocess.run(["rm", "-rf", "--one-file-system", work], stderr=subprocess.DEVNULL).returncode == 0:
                break
            time.sleep(0.1)


def parser() -> argparse.ArgumentParser:
    """Of the command line."""
    files = [Path("/etc/apt/sources.list"), *Path("/etc/apt/sources.list.d").glob("*")]
    sources = "\n".join(path.read_text() for path in files if path.suffix in (".list", ".sources") and path.exists())
    mirror = re.search(r"https?://[^/\s]+/debian(?=/?\s)", sources)
    made = argparse.ArgumentParser("chroot.py", description=(__doc__ or "").partition("\n")[0], allow_abbrev=False)
    made.add_argument("file", nargs="?", type=Path, default=ROOT / "docker/Dockerfile", help="docker/Dockerfile")
    made.add_argument("--build-arg", action="append", default=[], metavar="NAME=VALUE", help="the value of an ARG")
    made.add_argument("--context", type=Path, default=ROOT, help="what COPY copies from: the checkout")
    made.add_argument("--in-memory", action="store_true", help="the chroots are in a tmpfs, not in TMPDIR")
    made.add_argument("--mirror", default=mirror[0] if mirror else MIRROR, help="of Debian: %(default)s")
    made.add_argument("--run", metavar="COMMAND", help="for a shell in the image, in place of its CMD")
    made.add_argument("--timeout", type=float, default=1800, metavar="SECONDS", help="of everything: 1800")
    made.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    return made


def main(arguments: Sequence[str]) -> int:
    """Runs the program. Its status."""
    try:
        args = parser().parse_args(arguments)
        args.build_arg = dict(each.partition("=")[::2] for each in args.build_arg)
        dockerfile.stages(args.file.read_text(), args.build_arg)  # so that what it cannot do is said first
        if missing := [name for name in PROGRAMS if not shutil.which(name)]:
            raise RuntimeError(f"{', '.join(missing)} not found; fix: apt-get install debootstrap util-linux")
        if os.geteuid() != 0:
            raise RuntimeError("only root can make a chroot; fix: sudo")
        if args.work and os.getpid() == 1:  # in namespaces of its own
            return build(args)
        return isolated(arguments, args.timeout)
    except (OSError, RuntimeError, ValueError) as error:
        print(f"chroot.py: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    sys.exit(main(sys.argv[1:]))
