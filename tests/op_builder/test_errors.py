"""What the user is told when an op cannot be built, and that nothing breaks where there is nowhere to write."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import sys
import venv
from pathlib import Path

import pytest
import torch

from nvme_ops.op_builder import OpBuilder, jit
from tests.op_builder.tiny_op import Sandbox, TinyBuilder, here, sandbox

ANSWER = "print(TinyBuilder().load().answer())"
INCOMPATIBLE = "Unable to JIT load the {} op due to it not being compatible due to hardware/software issue. {}"


def test_a_failed_build_shows_the_compilers_words(here: Sandbox) -> None:
    here.source.write_text(here.source.read_text() + "int broken() { return no_such_name; }\n")
    with pytest.raises(RuntimeError) as caught:
        TinyBuilder().load()
    message = str(caught.value)
    assert message.startswith("Unable to build the tiny op.")
    assert re.search("error: .no_such_name. was not declared", message)
    assert "-isystem" not in message, "the commands only hide what went wrong"
    log = Path(message.rpartition("All output: ")[2])
    assert "-isystem" in log.read_text()


def test_a_failed_link_shows_the_linkers_words(here: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LDFLAGS", "-lno_such_library")
    with pytest.raises(RuntimeError, match="cannot find -lno_such_library"):
        jit.build(TinyBuilder().recipe())


def test_an_undefined_symbol_is_named(here: Sandbox) -> None:
    here.source.write_text(here.source.read_text().replace("PyLong_FromLong(", "no_such_function("))
    here.header.write_text("#define ANSWER 42\nextern PyObject* no_such_function(long);\n")
    with pytest.raises(RuntimeError, match="no_such_function"):
        TinyBuilder().load()


def test_a_repaired_source_builds_in_the_same_process(sandbox: Sandbox) -> None:
    program = f"""
from pathlib import Path
source = Path({str(sandbox.source)!r})
good = source.read_text()
source.write_text("nonsense")
try:
    TinyBuilder().load()
except RuntimeError as error:
    assert "nonsense" in str(error), error
source.write_text(good)
{ANSWER}
"""
    assert sandbox.run(program) == "42"


def test_two_sources_of_one_name_are_refused(here: Sandbox) -> None:
    (here.csrc / "more").mkdir()
    shutil.copy(here.source, here.csrc / "more")
    with pytest.raises(RuntimeError, match="two source files of the tiny op have the same name: tiny"):
        jit.build(TinyBuilder().recipe())


def test_no_compiler_is_said_with_the_fix(here: Sandbox, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX")
    builder = TinyBuilder()
    assert not builder.is_compatible()
    assert builder.error_log is not None
    assert "no C++ compiler was found (c++, g++, clang++); fix: install one" in builder.error_log
    with pytest.raises(RuntimeError) as caught:
        builder.load()
    assert str(caught.value) == INCOMPATIBLE.format("tiny", builder.error_log)


def test_a_compiler_that_fails_is_quoted(here: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    here.compiler.write_text("#!/bin/sh\necho out of licences; exit 1\n")
    with pytest.raises(RuntimeError, match=r"counting-c.. does not work: out of licences"):
        TinyBuilder().load()


def test_missing_ninja_is_said(sandbox: Sandbox, tmp_path: Path) -> None:
    # a Python without ninja beside it, and a PATH with the compiler's programs only
    venv.create(tmp_path / "environment", symlinks=True)
    python = tmp_path / "environment" / "bin" / "python"
    site = Path(torch.__file__).parent.parent
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    (tmp_path / "environment" / "lib" / version / "site-packages" / "all.pth").write_text(f"{site}\n")
    programs = tmp_path / "programs"
    programs.mkdir()
    for name in ("c++", "as", "ld", "sh", "sleep"):
        (programs / name).symlink_to(str(shutil.which(name)))
    program = """
try:
    TinyBuilder().load()
except RuntimeError as error:
    print(error)
"""
    sandbox.python = str(python)
    process = sandbox.start(program, {"PATH": str(programs), "HOME": str(tmp_path)})
    said, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    assert said.startswith("Unable to JIT load the tiny op due to ninja not being installed.")
    assert said.strip().endswith("fix: pip install ninja")


NO_STDERR = {
    "none": "sys.stderr = None",
    "closed": "sys.stderr.close()",
    "closed descriptor": "os.close(2)",
    "both none": "sys.stdout = sys.stderr = None",
    "full device": "sys.stderr = open('/dev/full', 'w')",
}


@pytest.mark.parametrize("change", NO_STDERR.values(), ids=NO_STDERR.keys())
def test_a_verbose_build_needs_no_stderr(sandbox: Sandbox, tmp_path: Path, change: str) -> None:
    program = f"""
import os, sys
{change}
builder = TinyBuilder()
builder.warning("nobody reads this")
answer = builder.load(verbose=True).answer()  # before a file is opened that could become descriptor 2
open({str(tmp_path / "answer")!r}, "w").write(str(answer))
sys.stdout = sys.stderr = None
os._exit(0)  # what Python itself says of its streams at exit is not the subject
"""
    process = sandbox.start(program)
    process.communicate(timeout=300)
    assert (tmp_path / "answer").read_text() == "42"


def test_a_warning_survives_a_closed_stderr(capfd: pytest.CaptureFixture[str]) -> None:
    OpBuilder("any").warning("words")
    assert capfd.readouterr() == ("", " [WARNING]  words\n")


def test_a_build_says_at_once_in_one_line_what_takes_long(sandbox: Sandbox) -> None:
    done = sandbox.end(ANSWER)
    assert done.stdout == "42\n"
    (said,) = done.stderr.splitlines()
    assert said.startswith("nvme_ops: compiling the tiny op, once for this torch and compiler")
    done = sandbox.end(ANSWER)  # it is compiled now
    assert (done.stdout, done.stderr) == ("42\n", "")


def test_a_build_is_silent_when_that_is_asked_for(sandbox: Sandbox) -> None:
    done = sandbox.end(ANSWER, {"NVME_OPS_QUIET": "1"})
    assert (done.stdout, done.stderr) == ("42\n", "")


def test_on_a_terminal_the_seconds_are_counted(sandbox: Sandbox) -> None:
    terminal, line = os.openpty()
    program = f"import os; os.dup2({line}, 2)\n{ANSWER}"
    process = sandbox.start(program, pass_fds=[line])
    process.communicate(timeout=300)
    os.close(line)
    said = b""
    with contextlib.suppress(OSError), open(terminal, "rb", buffering=0) as file:
        while part := file.read(1000):
            said += part
    assert re.search(rb"compiling the tiny op.*\r\d+ s .*\r\x1b\[K", said, re.DOTALL), said


def test_a_verbose_build_says_that_it_begins_and_ends_once(sandbox: Sandbox) -> None:
    program = "TinyBuilder().load(verbose=True); TinyBuilder().load(verbose=True)"
    done = sandbox.end(program)
    assert done.stdout == ""
    begins, ends = done.stderr.splitlines()
    assert begins.startswith("nvme_ops: compiling the tiny op")
    assert ends.startswith("Time to build the tiny op: ")


def test_a_working_directory_that_cannot_be_written_is_no_matter(sandbox: Sandbox) -> None:
    assert sandbox.run(f"import os; os.chdir('/proc')\n{ANSWER}") == "42"


def test_the_environment_is_left_as_it_was(here: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX")
    before = dict(os.environ)
    streams = sys.stdout, sys.stderr
    jit.build(TinyBuilder().recipe())
    assert dict(os.environ) == before
    assert (sys.stdout, sys.stderr) == streams
