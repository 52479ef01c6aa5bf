"""The probes: what they find, and the package they name when they do not."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from nvme_ops.op_builder import AsyncIOBuilder, OpBuilder, machine
from tests.made_up import executable, library

AddProgram = Callable[..., Path]


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AddProgram:
    """Put a program, one that does what its script says, on a PATH that has no others."""
    monkeypatch.setenv("PATH", str(tmp_path / "programs"))
    monkeypatch.delenv("CONDA_PREFIX", raising=False)
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    return lambda name, *script: executable(tmp_path / "programs" / name, *script)


@pytest.fixture
def no_libaio(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A compiler that has no header at all and notes its calls, and a cache of its own; returns the compiler."""
    script = f'echo >> "{tmp_path}/asked"\nPATH=/usr/local/bin:/usr/bin:/bin exec c++ -nostdinc "$@"'
    blind = executable(tmp_path / "blind-c++", script)
    monkeypatch.setenv("CXX", str(blind))
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "cache"))
    for name in ("CFLAGS", "CXXFLAGS", "CPPFLAGS", "CPATH", "CPLUS_INCLUDE_PATH"):
        monkeypatch.delenv(name, raising=False)
    return blind


@pytest.fixture
def conda(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], Path]:
    """Activates an environment of conda; returns its ``conda-meta``."""

    def activate() -> Path:
        (tmp_path / "conda" / "conda-meta").mkdir(parents=True)
        monkeypatch.setenv("CONDA_PREFIX", str(tmp_path / "conda"))
        return tmp_path / "conda" / "conda-meta"

    return activate


HINTS = {
    "dpkg": "libaio-dev package with apt",
    "rpm zypper": "libaio-devel package with zypper",
    "rpm": "libaio-devel package with dnf",
    "conda dpkg": "libaio package with conda",
}


@pytest.mark.usefixtures("no_libaio")
@pytest.mark.parametrize(("present", "hint"), HINTS.items(), ids=HINTS)
def test_missing_libaio_is_a_warning_with_the_package_to_install(
    present: str, hint: str, programs: AddProgram, conda: Callable[[], Path], capfd: pytest.CaptureFixture[str]
) -> None:
    for name in present.split():
        programs(name, "echo not installed; echo not installed >&2; exit 1")
    if "conda" in present:
        conda()
    builder = AsyncIOBuilder()
    assert builder.is_compatible(), builder.error_log
    first, second, last = builder.warnings
    assert first == "async_io requires the dev libaio .so object and headers but these were not found."
    assert second == f"async_io: please install the {hint}"
    assert "CFLAGS and LDFLAGS" in last
    assert capfd.readouterr() == ("", "")
    builder.is_compatible(verbose=True)
    assert capfd.readouterr() == ("", "".join(f" [WARNING]  {line}\n" for line in builder.warnings))


def test_an_installed_package_or_no_manager_gives_no_hint(programs: AddProgram, conda: Callable[[], Path]) -> None:
    builder = AsyncIOBuilder()
    assert not builder.check_for_libaio_pkg()
    programs("dpkg")
    assert builder.command_exists("absent | dpkg")
    assert not builder.command_exists("absent|missing")
    assert builder.check_for_libaio_pkg()
    (conda() / "libaio-0.3.113-h166bdaf_0.json").touch()
    assert builder.check_for_libaio_pkg()
    assert builder.warnings == []


@pytest.mark.parametrize("place", ["CFLAGS", "conda"])
def test_libaio_is_found_where_the_environment_says(
    place: str, no_libaio: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "with a space" / "include"
    folder.mkdir(parents=True)
    (folder.parent / "conda-meta").mkdir()
    values = {"CFLAGS": f"-I'{folder}'", "conda": str(folder.parent)}
    monkeypatch.setenv(place.replace("conda", "CONDA_PREFIX"), values[place])
    assert "-DNVME_OPS_HAVE_LIBAIO=1" not in AsyncIOBuilder().cxx_args()
    (folder / "libaio.h").touch()
    builder = AsyncIOBuilder()
    builder.is_compatible()
    assert builder.warnings == []
    flags = ["-DNVME_OPS_HAVE_LIBAIO=1", *(["-idirafter", str(folder)] if place == "conda" else [])]
    assert builder.cxx_args()[-len(flags) :] == flags


def test_the_compiler_is_asked_for_its_directories_once(
    no_libaio: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    no_libaio.write_text(no_libaio.read_text().replace("-nostdinc", ""))
    for _ in range(3):
        AsyncIOBuilder().cxx_args()
    assert (tmp_path / "asked").read_text() == "\n"
    monkeypatch.setenv("CPATH", str(tmp_path))  # another question
    AsyncIOBuilder().cxx_args()
    assert (tmp_path / "asked").read_text() == "\n\n"


def test_has_function_links_a_program_that_calls_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    library(tmp_path / "libown.so", 'extern "C" void own_function() {}\n')
    builder = OpBuilder("any")
    assert not builder.has_function("own_function", ("own",))
    assert builder.has_function("own_function", ("own",), library_dirs=[str(tmp_path)])
    monkeypatch.setenv("LDFLAGS", f"-L{tmp_path}")
    assert builder.has_function("own_function", ("own",))
    assert capfd.readouterr() == ("", "")
    assert not builder.has_function("no_such_function", ("m",), verbose=True)
    assert "undefined reference" in capfd.readouterr().err
    monkeypatch.setenv("CXX", "/no/such")
    assert not builder.has_function("own_function", ("own",))


def test_a_compiler_that_hangs_is_given_up(no_libaio: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    executable(no_libaio, "exec sleep 600")
    monkeypatch.setattr(machine, "TIMEOUT_SECONDS", 0.2)
    builder = AsyncIOBuilder()
    assert not builder.is_compatible()
    assert "timed out" in str(builder.error_log)


def test_missing_python_headers_are_said_with_the_fix(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("sysconfig.get_path", lambda *_: str(tmp_path))
    assert f"apt-get install python3.{sys.version_info.minor}-dev" in str(machine.python_header())
