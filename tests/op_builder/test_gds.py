"""``GDSBuilder``: what it needs beyond a compiler, found by files only, each missing piece named with its fix.

The machines are made up of files: nothing here says anything about a real GPU.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from nvme_ops.op_builder import GDSBuilder, cufile, machine
from tests.conftest import run_python
from tests.made_up_gpu import EVERYTHING, WITH_GPU, clear_environment, put
from tests.op_builder.tiny_op import REPOSITORY


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The root of a machine to make up, out of sight of this one's libraries, with a torch that has CUDA."""
    clear_environment(monkeypatch, tmp_path)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    return tmp_path


def builder(root: Path, *layers: Mapping[str, str]) -> GDSBuilder:
    """A builder that needs no compiler and sees the machine at ``root``."""
    for layer in layers:
        put(root, layer)
    made = GDSBuilder()
    made.host = machine.Host(root)
    made.is_installed = lambda: True  # type: ignore[method-assign]
    made._libaio_flags = list  # type: ignore[method-assign]
    return made


def without(*names: str) -> dict[str, str]:
    """Everything but the files whose paths contain one of ``names``."""
    return {file: text for file, text in EVERYTHING.items() if not any(name in file for name in names)}


def refusal(made: GDSBuilder) -> str:
    """The one line of a refusal."""
    assert not made.is_compatible()
    assert made.error_log is not None
    (line,) = made.error_log.splitlines()
    assert "; fix: " in line
    return line


def test_with_everything_there_it_is_compatible(root: Path, capfd: pytest.CaptureFixture[str]) -> None:
    made = builder(root, EVERYTHING)
    assert made.is_compatible()
    assert (made.error_log, made.warnings) == (None, [])
    assert capfd.readouterr() == ("", "")


def test_without_anything_every_piece_is_named(root: Path) -> None:
    made = builder(root)
    assert not made.is_compatible()
    assert made.error_log is not None
    lines = made.error_log.splitlines()
    assert len(lines) == 4  # torch has CUDA here
    assert "no NVIDIA GPU" in lines[0]
    assert all("; fix: " in line for line in lines)


def test_what_can_be_done_without_is_a_warning(root: Path) -> None:
    made = builder(root, without("nvidia-fs", "run/udev"))
    assert made.is_compatible()
    nvidia_fs, udev = made.warnings
    assert "modprobe nvidia-fs" in nvidia_fs
    assert "/run/udev" in udev
    assert made.is_compatible()
    assert len(made.warnings) == 2


def test_off_needs_neither_the_library_nor_modules(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NVME_OPS_GDS", "off")
    assert builder(root, without("libcufile", "proc/modules")).is_compatible()
    assert not builder(root / "elsewhere", without("dev/nvidia")).is_compatible()


def test_an_op_that_cannot_be_built_is_not_compatible(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = builder(root, EVERYTHING)
    monkeypatch.delattr(made, "is_installed")
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(root / "cache"))
    monkeypatch.setattr(machine, "find_compiler", lambda: None)
    assert "no C++ compiler was found" in refusal(made)


def test_it_can_be_built_where_it_cannot_be_used(root: Path) -> None:
    made = builder(root)
    assert made.is_buildable()
    assert made.error_log is None


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_handle_compiles_nothing_where_cufile_cannot_work(tmp_path: Path) -> None:
    program = """
        from nvme_ops.gds import gds_handle
        try:
            gds_handle()
        except RuntimeError as error:
            print(error)
    """
    done = run_python(program, TORCH_EXTENSIONS_DIR=str(tmp_path / "ops"), NVME_BUILD_GDS="0")
    assert "so the gds op is not compiled:\nno NVIDIA GPU is visible" in done.stdout
    assert "NVME_OPS_GDS=off" in done.stdout
    assert "compiling" not in done.stderr
    assert not list(tmp_path.rglob("*.so"))


def test_verbose_prints_what_is_missing(root: Path, capfd: pytest.CaptureFixture[str]) -> None:
    made = builder(root, without("proc/modules", "nvidia-fs"))
    assert not made.is_compatible(verbose=True)
    output, errors = capfd.readouterr()
    assert output == ""
    modules, nvidia_fs = errors.splitlines()
    assert modules.startswith(" [WARNING]  gds: no /proc/modules")
    assert nvidia_fs.startswith(" [WARNING]  gds: nvidia-fs is not loaded")


def test_asking_starts_no_process_loads_no_library_and_leaves_cuda_alone(root: Path, tmp_path: Path) -> None:
    program = f"""
import os, subprocess
from pathlib import Path
import torch
from nvme_ops.op_builder import GDSBuilder
from nvme_ops.op_builder.machine import Host
torch.version.cuda = "13.0"
def refuse(*args, **kwargs): raise AssertionError(args)
def loaded(): return {{line.split()[-1] for line in open("/proc/self/maps") if "libcu" in line}}
before = loaded(), dict(os.environ)
made = GDSBuilder()
made.host = Host(Path({str(root)!r}))
made.is_installed = lambda: True
subprocess.Popen.__init__ = refuse
assert made.is_compatible(), made.error_log
assert (loaded(), dict(os.environ)) == before
assert not torch.cuda.is_initialized()
"""
    put(root, EVERYTHING)
    site = str(root / "site-packages")
    environment = {"PYTHONPATH": f"{REPOSITORY}:{site}", "PATH": "", "HOME": str(tmp_path)}
    files = sorted(tmp_path.rglob("*"))
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, cwd=tmp_path, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert sorted(tmp_path.rglob("*")) == files


# Where the library is looked for


def test_the_library_is_looked_for_in_the_order_in_which_it_is_loaded(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LD_LIBRARY_PATH", "/extra/lib")
    put(root, {"site-packages/nvidia/cu13/lib/x": "", "conda-meta/history": ""})
    sources = [source for source, _ in cufile.candidates(machine.Host(root))]
    assert list(dict.fromkeys(sources)) == ["site-packages", "conda", "CUDA_HOME", "system"]
    assert dict(reversed(list(cufile.candidates(machine.Host(root)))))["system"] == root / "extra/lib/libcufile.so.0"


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("site-packages/nvidia/cu13/lib/libcufile.so.0", "site-packages"),
        ("site-packages/nvidia/cufile/lib/libcufile.so.0", "site-packages"),
        ("no-toolkit/lib64/libcufile.so.0", "CUDA_HOME"),
        ("usr/lib/x86_64-linux-gnu/libcufile.so.0", "system"),
        ("usr/local/cuda/lib64/libcufile.so.0", "system"),
    ],
)
def test_the_library_is_found_wherever_it_lies(root: Path, file: str, source: str) -> None:
    put(root, {file: ""})
    assert cufile.find(machine.Host(root)) == (source, root / file)


def test_the_library_of_a_conda_environment_is_found(root: Path) -> None:
    put(root, {"conda-meta/history": "", "lib/libcufile.so.0": ""})
    assert cufile.find(machine.Host(root)) == ("conda", root / "lib/libcufile.so.0")


def test_the_library_is_found_through_the_linkers_cache(root: Path) -> None:
    put(root, {"opt/odd place/libcufile.so.0": ""})
    entries = [b"glibc-ld.so.cache1.1", b"libcufile.so.0", b"/opt/odd place/libcufile.so.0", b"/gone/libcufile.so.0"]
    (root / "etc").mkdir()
    (root / "etc/ld.so.cache").write_bytes(b"\0".join([*entries, b""]))
    assert cufile.find(machine.Host(root)) == ("system", root / "opt/odd place/libcufile.so.0")


def test_a_library_that_is_loaded_comes_before_all_others(root: Path) -> None:
    put(root, {"loaded here/libcufile.so.0": "", "site-packages/nvidia/cu13/lib/libcufile.so.0": ""})
    line = f"7f00-7f01 r-xp 0 08:01 12    {root}/loaded here/libcufile.so.0\n7f02-7f03 rw-p 0 00:00 0\n"
    put(root, {"proc/self/maps": line})
    assert cufile.find(machine.Host(root)) == ("already loaded", root / "loaded here/libcufile.so.0")


def test_the_override_comes_first(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(root, {"named.so": "", "site-packages/nvidia/cu13/lib/libcufile.so.0": ""})
    monkeypatch.setenv(cufile.OVERRIDE, str(root / "named.so"))
    assert cufile.find(machine.Host(root)) == (cufile.OVERRIDE, root / "named.so")


def test_the_op_is_given_absolute_paths_of_files_that_are_there(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(root, {"site-packages/nvidia/cu13/lib/libcufile.so.0": ""})
    monkeypatch.chdir(root)
    monkeypatch.setattr(sys, "path", ["site-packages"])
    assert cufile.libraries()[0] == str(root / "site-packages/nvidia/cu13/lib/libcufile.so.0")
    assert all(Path(path).is_file() and Path(path).is_absolute() for path in cufile.libraries())
