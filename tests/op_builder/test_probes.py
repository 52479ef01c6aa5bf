"""The probes: what they find, and the package they name when they do not."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from nvme_ops.op_builder import ALL_OPS, AsyncIOBuilder, GDSBuilder, OpBuilder, machine

FIRST = "async_io requires the dev libaio .so object and headers but these were not found."
LAST = (
    "If libaio is already installed (perhaps from source), try setting the CFLAGS and LDFLAGS environment variables to "
    "where it can be found."
)

AddProgram = Callable[..., None]


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AddProgram:
    """Put a program, one that does what its script says, on a PATH that has no others."""
    folder = tmp_path / "programs"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.delenv("CONDA_PREFIX", raising=False)
    monkeypatch.setattr(sys, "prefix", str(tmp_path))

    def add(name: str, script: str = "exit 0") -> None:
        (folder / name).write_text(f"#!/bin/sh\n{script}\n")
        (folder / name).chmod(0o755)

    return add


@pytest.fixture
def no_libaio(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A compiler that has no header at all, and a cache of its own; returns the compiler."""
    blind = tmp_path / "blind-c++"
    blind.write_text('#!/bin/sh\nPATH=/usr/local/bin:/usr/bin:/bin exec c++ -nostdinc "$@"\n')
    blind.chmod(0o755)
    monkeypatch.setenv("CXX", str(blind))
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "cache"))
    for name in ("CFLAGS", "CXXFLAGS", "CPPFLAGS", "CPATH", "CPLUS_INCLUDE_PATH"):
        monkeypatch.delenv(name, raising=False)
    return blind


HINTS = [
    (["dpkg"], "libaio-dev package with apt"),
    (["pacman"], "libaio package with pacman"),
    (["rpm", "dnf", "yum"], "libaio-devel package with dnf"),
    (["rpm", "yum"], "libaio-devel package with yum"),
    (["rpm", "zypper"], "libaio-devel package with zypper"),
    (["rpm"], "libaio-devel package with dnf"),
]


@pytest.mark.parametrize(("present", "hint"), HINTS, ids=[" ".join(present) for present, _ in HINTS])
def test_the_package_to_install_is_named(
    programs: AddProgram, no_libaio: Path, capfd: pytest.CaptureFixture[str], present: list[str], hint: str
) -> None:
    for name in present:
        programs(name, "echo not installed; echo not installed >&2; exit 1")
    builder = AsyncIOBuilder()
    builder.is_compatible()
    assert builder.warnings == [FIRST, f"async_io: please install the {hint}", LAST]
    assert capfd.readouterr() == ("", "")
    builder.is_compatible(verbose=True)
    expected = "".join(f" [WARNING]  {line}\n" for line in builder.warnings)
    assert capfd.readouterr() == ("", expected)


def test_conda_comes_before_the_systems_manager(
    programs: AddProgram, no_libaio: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    programs("dpkg", "exit 1")
    (tmp_path / "conda" / "conda-meta").mkdir(parents=True)
    monkeypatch.setenv("CONDA_PREFIX", str(tmp_path / "conda"))
    builder = AsyncIOBuilder()
    assert not builder.check_for_libaio_pkg()
    assert builder.warnings == ["async_io: please install the libaio package with conda"]
    (tmp_path / "conda" / "conda-meta" / "libaio-0.3.113-h166bdaf_0.json").touch()
    assert builder.check_for_libaio_pkg()


def test_an_installed_package_or_no_manager_gives_no_hint(programs: AddProgram, no_libaio: Path) -> None:
    builder = AsyncIOBuilder()
    assert not builder.check_for_libaio_pkg()
    assert builder.warnings == []
    programs("dpkg")
    assert builder.check_for_libaio_pkg()
    assert GDSBuilder().check_for_libaio_pkg()
    builder.is_compatible()
    assert builder.warnings == [FIRST, LAST]


def test_missing_libaio_is_a_warning_only(no_libaio: Path) -> None:
    builder = AsyncIOBuilder()
    assert builder.is_compatible(), builder.error_log
    assert FIRST in builder.warnings
    assert not any("LIBAIO" in flag for flag in builder.cxx_args())


def test_libaio_is_found_through_cflags(no_libaio: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "with a space"
    folder.mkdir()
    (folder / "libaio.h").touch()
    monkeypatch.setenv("CFLAGS", f"-I'{folder}'")
    builder = AsyncIOBuilder()
    builder.is_compatible()
    assert builder.warnings == []
    assert "-DNVME_OPS_HAVE_LIBAIO=1" in builder.cxx_args()


def test_libaio_of_a_conda_environment_is_searched_last(
    no_libaio: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in ("conda-meta", "include"):
        (tmp_path / "conda" / folder).mkdir(parents=True)
    (tmp_path / "conda" / "include" / "libaio.h").touch()
    monkeypatch.setenv("CONDA_PREFIX", str(tmp_path / "conda"))
    assert AsyncIOBuilder().cxx_args()[-3:] == [
        "-DNVME_OPS_HAVE_LIBAIO=1", "-idirafter", str(tmp_path / "conda" / "include")
    ]  # fmt: skip


def test_a_header_installed_later_is_found(no_libaio: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CPATH", str(tmp_path))
    assert "-DNVME_OPS_HAVE_LIBAIO=1" not in AsyncIOBuilder().cxx_args()
    (tmp_path / "libaio.h").touch()
    assert "-DNVME_OPS_HAVE_LIBAIO=1" in AsyncIOBuilder().cxx_args()


def test_the_compiler_is_asked_for_its_directories_once(
    no_libaio: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = tmp_path / "asked"
    no_libaio.write_text(f'#!/bin/sh\necho >> "{asked}"\nPATH=/usr/local/bin:/usr/bin:/bin exec c++ "$@"\n')
    for _ in range(3):
        AsyncIOBuilder().cxx_args()
    assert asked.read_text() == "\n"
    monkeypatch.setenv("CPATH", str(tmp_path))  # another question
    AsyncIOBuilder().cxx_args()
    assert asked.read_text() == "\n\n"


def test_has_function(capfd: pytest.CaptureFixture[str]) -> None:
    builder = OpBuilder("any")
    assert builder.has_function("cos", ("m",))
    assert not builder.has_function("no_such_function", ("m",))
    assert not builder.has_function("cos", ("no_such_library",))
    assert capfd.readouterr() == ("", "")
    assert not builder.has_function("no_such_function", ("m",), verbose=True)
    assert "undefined reference" in capfd.readouterr().err


def test_has_function_looks_where_it_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = machine.find_compiler()
    assert found is not None
    source = tmp_path / "own.cpp"
    source.write_text('extern "C" void own_function() {}\n')
    result = found.run("-shared", "-fPIC", str(source), "-o", str(tmp_path / "libown.so"))
    assert result.returncode == 0, result.stdout
    builder = OpBuilder("any")
    assert not builder.has_function("own_function", ("own",))
    assert builder.has_function("own_function", ("own",), library_dirs=[str(tmp_path)])
    monkeypatch.setenv("LDFLAGS", f"-L{tmp_path}")
    assert builder.has_function("own_function", ("own",))


def test_has_function_without_a_compiler_is_false(programs: AddProgram, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    assert not OpBuilder("any").has_function("cos", ("m",))


def test_a_compiler_that_hangs_is_given_up(no_libaio: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    no_libaio.write_text("#!/bin/sh\nexec sleep 600\n")
    monkeypatch.setattr(machine, "TIMEOUT_SECONDS", 0.2)
    builder = AsyncIOBuilder()
    assert not builder.is_compatible()
    assert builder.error_log is not None
    assert "timed out" in builder.error_log


def test_command_exists(programs: AddProgram, capfd: pytest.CaptureFixture[str]) -> None:
    programs("present")
    builder = OpBuilder("any")
    assert builder.command_exists("present")
    assert builder.command_exists("absent | present")
    assert not builder.command_exists("absent")
    assert not builder.command_exists("absent|missing")
    assert capfd.readouterr() == ("", "")


def test_missing_python_headers_are_said_with_the_fix(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("sysconfig.get_path", lambda *_: str(tmp_path))
    problem = machine.python_header()
    assert problem is not None
    assert f"apt-get install python3.{sys.version_info.minor}-dev" in problem


def test_every_builder_probes_without_a_word(capfd: pytest.CaptureFixture[str]) -> None:
    for builder in ALL_OPS.values():
        builder.is_compatible()
    assert capfd.readouterr() == ("", "")
