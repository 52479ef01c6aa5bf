"""``GDSBuilder``: what it needs beyond a compiler, found by files only, each missing piece named with its fix.

The machines are made up of files: nothing here says anything about a real GPU. tests/report has each piece of them.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from nvme_ops.op_builder import machine
from tests.conftest import run_python
from tests.made_up import EVERYTHING, ForAGpu, clear_environment, put, without


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The root of a machine to make up, out of sight of this one's libraries, with a torch that has CUDA."""
    clear_environment(monkeypatch, tmp_path)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    return tmp_path


def test_it_is_compatible_unless_a_needed_piece_is_missing(root: Path, capfd: pytest.CaptureFixture[str]) -> None:
    made = ForAGpu(root)
    assert made.is_buildable()
    assert not made.is_compatible()
    lines = str(made.error_log).splitlines()
    assert len(lines) == 4  # torch has CUDA here
    assert "no NVIDIA GPU" in lines[0]
    assert all("; fix: " in line for line in lines)
    put(root, EVERYTHING)
    assert made.is_compatible(verbose=True)
    assert (made.error_log, made.warnings) == (None, [])
    assert capfd.readouterr() == ("", "")


def test_verbose_prints_what_is_missing_and_warns_of_what_is_optional(
    root: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    put(root, without("proc/modules", "nvidia-fs", "run/udev"))
    made = ForAGpu(root)
    assert not made.is_compatible(verbose=True)
    output, errors = capfd.readouterr()
    starts = ("gds: no /proc/modules", "gds: nvidia-fs is not loaded", "gds: no /run/udev/data")
    assert output == ""
    for line, start in zip(errors.splitlines(), starts, strict=True):
        assert line.startswith(f" [WARNING]  {start}")
    monkeypatch.setenv("NVME_OPS_GDS", "off")  # needs neither the library nor modules
    for _ in range(2):
        assert made.is_compatible()
        assert len(made.warnings) == 3


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
        made.find_built = lambda: BuiltOp("prebuilt", Path("op.so"), {})
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


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("compiler", ["", "no-such-compiler"])
def test_a_handle_says_first_that_there_is_no_gpu(tmp_path: Path, compiler: str) -> None:
    program = """
        from nvme_ops.io.gds import gds_handle
        try:
            gds_handle()
        except RuntimeError as error:
            print(error)
    """
    done = run_python(program, TORCH_EXTENSIONS_DIR=str(tmp_path / "ops"), CXX=compiler)
    assert done.stdout.startswith("gds_handle cannot work here: no NVIDIA GPU is visible")
    assert "NVME_OPS_GDS=off" in done.stdout
    assert not list(tmp_path.rglob("*.so"))


# Where the library is looked for

WHEEL, NAMED, LOADED = "site-packages/nvidia/cu13/lib/libcufile.so.0", "named.so", "loaded here/libcufile.so.0"
CACHE = "\0".join(["glibc-ld.so.cache1.1", "libcufile.so.0", "/opt/odd/libcufile.so.0", "/gone/libcufile.so.0", ""])
#: Files from the best place to the worst, with the names of the places.
PLACES = {
    NAMED: machine.CUFILE_OVERRIDE,
    LOADED: "already loaded",
    WHEEL: "site-packages",
    "site-packages/nvidia/cufile/lib/libcufile.so.0": "site-packages",
    "lib/libcufile.so.0": "conda",
    "no-toolkit/lib64/libcufile.so.0": "CUDA_HOME",
    "extra/lib/libcufile.so.0": "system",  # LD_LIBRARY_PATH
    "opt/odd/libcufile.so.0": "system",  # the linker's cache
    "usr/lib/x86_64-linux-gnu/libcufile.so.0": "system",
    "usr/local/cuda/lib64/libcufile.so.0": "system",
}


def test_the_library_is_taken_from_the_best_place_that_has_it(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LD_LIBRARY_PATH", "/extra/lib")
    monkeypatch.setenv(machine.CUFILE_OVERRIDE, str(root / NAMED))
    put(root, {"conda-meta/history": "", "etc/ld.so.cache": CACHE, **dict.fromkeys(PLACES, "")})
    put(root, {"proc/self/maps": f"7f00-7f01 r-xp 0 08:01 12    {root / LOADED}\n7f02-7f03 rw-p 0 00:00 0\n"})
    for file, place in PLACES.items():
        assert machine.find_cufile(machine.Host(root)) == (place, root / file)
        (root / file).unlink()
        monkeypatch.delenv(machine.CUFILE_OVERRIDE, raising=False)
    assert machine.find_cufile(machine.Host(root)) is None


def test_the_op_is_given_absolute_paths_of_files_that_are_there(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(root, {WHEEL: ""})
    monkeypatch.chdir(root)
    monkeypatch.setattr(sys, "path", ["site-packages"])
    assert machine.cufile_libraries()[0] == str(root / WHEEL)
    assert all(Path(path).is_file() and Path(path).is_absolute() for path in machine.cufile_libraries())
