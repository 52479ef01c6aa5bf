"""The steps of docker/Dockerfile, and what the program that runs them without Docker understands."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

import chroot
import dockerfile
import pytest
import torch

from nvme_ops.base import limits
from tests.conftest import REPOSITORY
from tests.made_up import executable

#: Of which the last stage must have none.
COMPILERS = ("cc", "gcc", "g++", "c++", "clang", "ld", "as")

EXAMPLE = r"""# a comment
ARG PYTHON=3.9
FROM python:${PYTHON}-slim AS build
ARG PYTHON
run echo a && \
    # a comment between the lines

    echo "$b"
FROM build
COPY --from=build /wheels /wheels
"""


def test_a_dockerfile_is_its_stages_and_their_steps_with_variables_put_in() -> None:
    first, last = dockerfile.stages(EXAMPLE, {"PYTHON": "3.11"})
    assert (first.name, first.base, last.name, last.base) == ("build", "python:3.11-slim", "", "build")
    assert [(step.line, step.word, step.rest) for step in first.steps] == [
        (4, "ARG", "PYTHON"),
        (5, "RUN", 'echo a &&     echo "$b"'),
    ]
    declared = dockerfile.declared("PYTHON A=${PYTHON}-1 B", {"B": "2"}, first.arguments, {"PYTHON": "x"})
    assert declared == {"PYTHON": "3.11", "A": "x-1", "B": "2"}
    values = {"A": "1", "EMPTY": ""}
    assert dockerfile.assigned("B=$A C='two words'", values) == {"B": "1", "C": "two words"}
    assert dockerfile.expand(r"$A ${A}b ${EMPTY:-no} ${NONE:-} $NONE \$A", values) == "1 1b no   $A"


def test_what_is_not_understood_is_refused_with_its_line() -> None:
    with pytest.raises(ValueError, match="line 1: nothing stands in for python:"):
        dockerfile.stages("FROM python:3.11-slim-trixie", {})
    with pytest.raises(ValueError, match="line 2: not understood: USER nobody"):
        dockerfile.stages("FROM python:3.11-slim\nUSER nobody", {})


def test_the_context_has_what_a_wheel_is_made_from_and_little_else(tmp_path: Path) -> None:
    dockerfile.copy([".", "/src"], tmp_path, "/", {}, REPOSITORY)
    names = {path.name for path in (tmp_path / "src").iterdir()}
    assert {"setup.py", "pyproject.toml", "README.md", "LICENSE", "nvme_ops", "csrc", "op_builder", "report"} <= names
    assert names & {".git", ".venv", "tests", "docs", "benchmarks", "build", "dist"} == set()
    assert (tmp_path / "src" / "nvme_ops" / "csrc").is_symlink()
    wanted = dockerfile.kept(["# not", "", "/.git", "**/*.so", "build/", "docs/*", "!docs/a?.md", "x/**/y"])
    left_out = [".git/config", "a/b.so", "build/lib", "docs/index.md", "x/y", "x/1/2/y"]
    copied = ["docs", "docs/ab.md", "a/build", "gitk", "a.so.py", "x/yy"]
    assert [path for path in [*left_out, *copied] if wanted(path)] == copied


def test_copies_from_another_stage_never_go_through_a_link_that_leads_out(tmp_path: Path) -> None:
    there, here = tmp_path / "there", tmp_path / "here"
    (there / "wheels").mkdir(parents=True)
    here.mkdir()
    for name in ("a.whl", "b.whl", "c.txt"):
        (there / "wheels" / name).write_text(name)
    dockerfile.copy(["--from=build", "/wheels/*.whl", "to/"], here, "/opt", {"build": there}, tmp_path)
    assert sorted(path.name for path in (here / "opt" / "to").iterdir()) == ["a.whl", "b.whl"]
    (here / "out").symlink_to(tmp_path)
    with pytest.raises(ValueError, match="out/file leads out of"):
        dockerfile.copy(["--from=build", "/wheels/c.txt", "/out/file"], here, "/", {"build": there}, tmp_path)


def test_what_says_where_packages_are_is_handed_on_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "ca.pem").touch()
    listed = f":env:.cert='{tmp_path}/ca.pem'\nglobal.cert='/other'\nglobal.user='true'\n"
    variables, paths = chroot.handed_on({"https_proxy": "http://b:1", "SECRET": "x"}, listed)
    assert variables == {"https_proxy": "http://b:1", "PIP_CERT": f"/run/host{tmp_path}/ca.pem"}
    assert paths == [f"{tmp_path}/ca.pem"]


def started(*words: str, folder: Path, debootstrap: str = "") -> subprocess.Popen[str]:
    """The program, with TMPDIR in ``folder``, and perhaps another ``debootstrap``, whose fourth argument is a place."""
    path = os.environ["PATH"]
    if debootstrap:
        path = f"{executable(folder.parent / 'bin' / 'debootstrap', debootstrap).parent}:{path}"
    environment = {**os.environ, "TMPDIR": str(folder), "PATH": path}
    command = [sys.executable, str(REPOSITORY / "tools" / "chroot.py"), "--build-arg", "PYTHON=3.11", *words]
    return subprocess.Popen(command, env=environment, stdout=-1, stderr=-1, text=True)


needs_root = pytest.mark.skipif(
    os.geteuid() != 0 or any(not shutil.which(name) for name in chroot.PROGRAMS),
    reason=f"needs root and {', '.join(chroot.PROGRAMS)}",
)


@pytest.fixture
def work(tmp_path: Path) -> Path:
    """An empty folder for TMPDIR, where namespaces can be had."""
    if subprocess.run(["unshare", "--mount", "--pid", "--fork", "--mount-proc", "true"], check=False).returncode != 0:
        pytest.skip("unshare makes no namespaces here")
    (tmp_path / "work").mkdir()
    return tmp_path / "work"


@needs_root
@pytest.mark.parametrize("signal", ["TERM", "KILL"])
def test_an_interruption_leaves_no_mount_and_no_process(signal: str, work: Path) -> None:
    mounting = 'mkdir -p "$4/there" && mount -t tmpfs chroot-test "$4/there" && sleep 300'
    process = started(folder=work, debootstrap=mounting)
    assert within(30, lambda: list(work.glob("chroot-*/bookworm/there")))
    subprocess.run(["kill", f"-{signal}", str(process.pid)], check=True)
    process.communicate(timeout=60)
    assert process.returncode != 0
    assert "chroot-test" not in Path("/proc/mounts").read_text()
    assert within(30, lambda: not processes_of(str(work)))
    if signal != "KILL":  # which leaves plain files, in TMPDIR
        assert list(work.iterdir()) == []


@needs_root
def test_a_failure_is_shown_with_what_was_printed(work: Path) -> None:
    process = started(folder=work, debootstrap="echo no such mirror; exit 3")
    assert process.communicate(timeout=60)[1].startswith("chroot.py: no such mirror\nstatus 3: debootstrap --variant")
    assert (process.returncode, list(work.iterdir())) == (1, [])


def within(seconds: float, condition: Callable[[], object]) -> bool:
    """Waits until it is true, so long at most."""
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.05)
    return bool(condition())


def processes_of(word: str) -> list[str]:
    """The command lines with this word in them."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        found += [line] if word in line else []
    return found


def registry_problem(python: str) -> str | None:
    """Why packages cannot be had here, without fetching any."""
    mirror = chroot.parser().get_default("mirror")
    try:
        with urllib.request.urlopen(f"{mirror}/dists/{dockerfile.SUITES[python]}/Release", timeout=20):
            pass
    except OSError as error:
        return f"{mirror}: {error}"
    wanted = ("--dry-run", "--no-deps", "--ignore-installed", "--only-binary", ":all:", "--python-version", python)
    command = [sys.executable, "-m", "pip", "install", *wanted, "--target", "none", f"torch=={torch.__version__}"]
    found = subprocess.run(command, capture_output=True, text=True, timeout=120)
    return found.stderr if found.returncode else None


@needs_root
@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_steps_of_the_dockerfile_make_an_image_that_is_ready(work: Path) -> None:
    """The ops are prebuilt, and nothing in the last stage could compile them. About two minutes of an idle machine."""
    here = f"{sys.version_info.major}.{sys.version_info.minor}"
    python = here if here in dockerfile.SUITES else next(iter(dockerfile.SUITES))
    if not torch.__version__.endswith("+cpu"):
        pytest.skip("torch here is for GPUs: the image would have gigabytes")
    if problem := registry_problem(python):
        pytest.skip(f"packages cannot be had here: {problem}")
    checks = (
        f"for each in {' '.join(COMPILERS)}; do command -v $each; done",
        "find / -xdev -name '*.so' -path '*/nvme_ops/ops/*'",
        "nvme-report",
        'python -c "from nvme_ops.op_builder import AsyncIOBuilder as B; b = B(); b.load(); print(b.jit_mode)"',
    )
    arguments = ["--build-arg", f"PYTHON={python}", "--build-arg", f"TORCH=torch=={torch.__version__}"]
    if limits.free_memory() > 8 << 30:  # of which it takes three
        arguments += ["--in-memory"]
    process = started(*arguments, "--timeout", "900", "--run", "; ".join(checks), folder=work)
    said, complaint = process.communicate(timeout=960)
    if "(--timeout)" in complaint:
        pytest.skip(f"packages come too slowly here: {complaint}")
    assert process.returncode == 0, said + complaint
    steps, _, printed = said.partition("/bin/sh -c")
    assert len(re.findall(r"^ +\d+ s  FROM", steps, re.MULTILINE)) == 2
    found, report = printed.partition("\n")[2].split("nvme_ops ", 1)
    names = sorted(Path(line).name.partition(".")[0] for line in found.splitlines())
    assert names == ["async_io", "gds"], f"not both ops and no compiler: {found}"
    assert "\nready: async_io on " in report, report
    assert report.endswith("\nFalse\n"), report
    assert complaint == ""
    assert list(work.iterdir()) == []
