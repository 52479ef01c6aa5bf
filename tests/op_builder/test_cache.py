"""Building an op and loading it through the cache: what builds, what is said, what survives collisions and deaths."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import shutil
import signal
import stat
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from nvme_ops.op_builder import finished, jit, machine, recipe, trust
from tests.made_up import executable
from tests.op_builder.tiny_op import ANSWER, SOURCE, Sandbox, TinyBuilder, here, sandbox, workshop


def build() -> finished.CacheEntry:
    return jit.build(TinyBuilder().recipe())


# What builds, and what does not


def test_a_second_process_compiles_nothing_and_starts_no_process(sandbox: Sandbox) -> None:
    first = sandbox.end(f"import os; os.chdir('/proc')\n{ANSWER}", {"PATH": "/usr/bin:/bin"})  # ninja is beside Python
    assert first.stdout == "42\n"
    (said,) = first.stderr.splitlines()
    assert said.startswith("nvme_ops: compiling the tiny op, once for this torch and compiler")
    before = sandbox.compiler_calls()
    program = f"""
import subprocess, sys, torch
def refuse(*args, **kwargs): raise AssertionError(f"a warm load started {{args}}")
subprocess.Popen.__init__ = refuse
{ANSWER}
module = TinyBuilder().load()
assert TinyBuilder().is_loaded() and TinyBuilder().load() is module and TinyBuilder().jit_load() is module
assert sys.modules[TinyBuilder().absolute_name()] is module
assert "torch.utils.cpp_extension" not in sys.modules
"""
    second = sandbox.end(program, {"PATH": "/usr/bin:/bin"})
    assert (second.stdout, second.stderr) == ("42\n", "")
    assert sandbox.compiler_calls() == before
    assert sandbox.run(ANSWER, {"PATH": "/no/such", "CXX": ""}) == "42", "a filled cache needs no compiler"


def test_threads_and_a_forked_child_build_once(sandbox: Sandbox) -> None:
    program = """
import os, time, torch
from concurrent.futures import ThreadPoolExecutor
from collections.abc import Callable
from pathlib import Path
calls = Path(os.environ["TINY_CALLS"])
pool = ThreadPoolExecutor(4)
modules = [pool.submit(lambda: TinyBuilder().load()) for _ in range(4)]
while not calls.exists() or "tiny.cpp" not in calls.read_text():
    time.sleep(0.05)
child = os.fork()
if child == 0:
    os._exit(TinyBuilder().load().answer())
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), len({id(each.result()) for each in modules}))
"""
    assert sandbox.run(program, {"TINY_SLOW": "1"}) == "42 1"
    assert sandbox.compilations() == 1


def test_a_killed_build_blocks_nobody(sandbox: Sandbox) -> None:
    process = sandbox.start(ANSWER, {"TINY_SLOW": "60"})
    try:
        while not sandbox.compilations():
            assert process.poll() is None, process.communicate()
            time.sleep(0.05)
        process.kill()
        process.wait()
        assert any(path.name.startswith(".") for path in (sandbox.cache / "nvme_ops").iterdir())
        assert sandbox.run(ANSWER) == "42"
    finally:
        os.killpg(process.pid, signal.SIGKILL)  # ninja and the compiler outlived it
        process.communicate()
    assert not any(path.name.startswith(".") for path in (sandbox.cache / "nvme_ops").iterdir())


@pytest.mark.parametrize("damage", ["cut short", "nonsense"])
def test_a_damaged_entry_is_built_anew(here: Sandbox, damage: str) -> None:
    entry = build()
    whole = entry.library.read_bytes()
    entry.library.unlink()  # the file there is mapped into this process, which would die of a change
    entry.library.write_bytes(bytes(len(whole)) if damage == "nonsense" else whole[:100])
    done = here.end(ANSWER)
    assert done.stdout == "42\n", done.stderr
    assert ("UserWarning: the cached tiny op is built anew" in done.stderr) == (damage == "nonsense")
    assert here.compilations() == 2


def test_a_changed_header_source_or_flag_builds_anew_a_touched_one_not(
    here: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = [
        lambda: here.header.write_text("#define ANSWER 43\n"),
        lambda: here.source.write_text(here.source.read_text() + "// changed\n"),
        lambda: monkeypatch.setenv("TINY_CXX_ARGS", "-DMORE"),
        lambda: monkeypatch.setenv("CFLAGS", """-I'/a folder' -DTEXT='"$HOME; {a}"'"""),
        lambda: monkeypatch.setenv("LDFLAGS", "'-Wl,-rpath,$ORIGIN'"),
        lambda: here.compiler.write_text(here.compiler.read_text() + "# another version\n"),
    ]
    keys = {TinyBuilder().recipe().key()}
    for change in changes:
        change()
        keys.add(TinyBuilder().recipe().key())
    assert len(keys) == 1 + len(changes)
    os.utime(here.source)
    assert TinyBuilder().recipe().key() in keys
    build()
    compiled, linked = here.compiler_calls()[-2:]
    assert '-DMORE -I/a folder -DTEXT="$HOME; {a}" -c' in compiled
    assert "-Wl,-rpath,$ORIGIN" in linked


def test_another_runtime_has_another_key(here: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    here_and_now = recipe.runtime()
    keys = {TinyBuilder().recipe().key()}
    for fact in here_and_now:
        monkeypatch.setattr(recipe, "runtime", lambda fact=fact: {**here_and_now, fact: "another"})
        keys.add(TinyBuilder().recipe().key())
    assert len(keys) == 1 + len(here_and_now)


def test_the_users_compiler_and_ninja_are_used_and_nothing_is_left_changed(
    here: Sandbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch.utils import _cpp_extension_versioner, cpp_extension

    path = os.environ["PATH"]
    noted = f'echo "$*" >> "{tmp_path}/ninja"\nPATH="{path}" exec ninja "$@"'
    ninja = executable(tmp_path / "programs" / "ninja", noted)
    monkeypatch.setenv("PATH", f"{ninja.parent}{os.pathsep}{path}")
    monkeypatch.setenv("MAX_JOBS", "3")
    monkeypatch.setenv("CXX", f"'{here.compiler}' -DFROM_CXX")
    before = dict(os.environ), sys.stdout, sys.stderr
    remembered = cpp_extension.JIT_EXTENSION_VERSIONER.entries  # by torch: DeepSpeed's, which may have our op's name
    theirs = remembered["tiny"] = _cpp_extension_versioner.Entry(0, 1)
    build()
    assert remembered.pop("tiny") is theirs
    assert (dict(os.environ), sys.stdout, sys.stderr) == before
    assert "-j 3" in (tmp_path / "ninja").read_text()
    assert any("-DFROM_CXX" in call and "tiny.cpp" in call for call in here.compiler_calls())


def test_sources_that_cannot_be_united_are_compiled_one_by_one(here: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("first", "second"):
        (here.csrc / f"{name}.cpp").write_text("namespace { [[maybe_unused]] int same = 1; }\n")
    united = [str(here.csrc / f"{name}.cpp") for name in ("first", "second")]
    monkeypatch.setattr(TinyBuilder, "united_sources", lambda _: [united])
    assert build().record() is not None
    assert any("united1.cpp" in call for call in here.compiler_calls())
    (here.csrc / "second.cpp").write_text("namespace { [[maybe_unused]] int other = 1; }\n")
    build()
    assert sum("second.cpp" in call for call in here.compiler_calls()) == 1


# Where


def test_the_default_root_is_torchs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from torch.utils import cpp_extension

    monkeypatch.delenv("TORCH_EXTENSIONS_DIR", raising=False)
    for name, value in (("XDG_CACHE_HOME", ""), ("XDG_CACHE_HOME", str(tmp_path)), ("HOME", str(tmp_path))):
        monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
        if value:
            monkeypatch.setenv(name, value)
        assert trust.default_root().parent.resolve() == Path(cpp_extension.get_default_build_root())


def test_without_a_home_builds_go_to_a_private_folder(
    here: Sandbox, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("TORCH_EXTENSIONS_DIR")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(here.header))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    private = tmp_path / f"torch_extensions_{os.geteuid()}"
    with pytest.warns(UserWarning, match=r"compiled ops are kept in .*Not a directory"):
        entry = build()
    assert entry.folder.is_relative_to(private)
    assert stat.S_IMODE(private.stat().st_mode) == 0o700
    assert finished.find_cached(TinyBuilder().recipe()) == entry
    private.chmod(0o777)
    assert trust.roots() == [trust.default_root()]
    with pytest.raises(RuntimeError, match="is not private"):
        build()


def test_without_locks_the_first_of_two_builds_stays(here: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:  # as on some network file systems
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    made = TinyBuilder().recipe()
    entry = finished.CacheEntry(jit.writable_root() / f"{made.name}-{made.key()}", made.name)
    with jit.building(entry) as slower:
        assert slower is not None
        build()
        first = entry.library.stat().st_ino
        jit.compile_into(slower, made, entry.log)
    assert entry.library.stat().st_ino == first
    assert [path.name for path in entry.folder.parent.iterdir() if path.name.startswith(".")] == []


# What is said


def twice(here: Sandbox) -> None:
    (here.csrc / "more").mkdir()
    shutil.copy(here.source, here.csrc / "more")


BROKEN = SOURCE + "int broken() { return no_such_name; }\n"
UNDEFINED = "#define ANSWER 42\nextern PyObject* no_such_function(long);\n#define PyLong_FromLong no_such_function\n"
#: What is done to the sandbox, and the words of the failure.
FAILURES: dict[str, tuple[Callable[[Sandbox], object], str]] = {
    "source": (lambda here: here.source.write_text(BROKEN),
        r"^Unable to build the tiny op\.\n(.|\n)*error: .no_such_name. was not declared(.|\n)*All output: "),
    "symbol": (lambda here: here.header.write_text(UNDEFINED), "no_such_function"),
    "names": (twice, "two source files of the tiny op have the same name: tiny"),
    "compiler": (lambda here: executable(here.compiler, "echo out of licences; exit 1"),
        "Unable to JIT load the tiny op: .*counting-c.. does not work: out of licences"),
}  # fmt: skip


@pytest.mark.parametrize("name", FAILURES)
def test_a_failure_is_in_the_words_of_its_cause(here: Sandbox, name: str) -> None:
    spoil, words = FAILURES[name]
    spoil(here)
    with pytest.raises(RuntimeError, match=words) as caught:
        TinyBuilder().load()
    message, _, log = str(caught.value).partition("All output: ")
    assert "-isystem" not in message, "the commands only hide what went wrong"
    if name == "source":
        assert "-isystem" in Path(log).read_text()
        here.source.write_text(SOURCE)
        build()  # in the same process


@pytest.mark.parametrize(
    "change", ["sys.stderr = None", "os.close(2)", "sys.stderr = sys.stdout = open('/dev/full', 'w')"]
)
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
    sandbox.end(program)
    assert (tmp_path / "answer").read_text() == "42"


def test_a_verbose_build_says_that_it_ends_and_a_quiet_one_nothing(sandbox: Sandbox) -> None:
    done = sandbox.end("TinyBuilder().load(verbose=True); assert TinyBuilder().is_loaded(); " * 2)
    assert re.fullmatch(r"nvme_ops: compiling the tiny op.*\nTime to build the tiny op: .*\n", done.stderr)
    shutil.rmtree(sandbox.cache)
    done = sandbox.end(ANSWER, {"NVME_OPS_QUIET": "1"})
    assert (done.stdout, done.stderr) == ("42\n", "")
