"""Loading an op through the cache: what builds, what does not, and what survives processes that collide or die."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import stat
import tempfile
import time
from pathlib import Path

import pytest

from nvme_ops.op_builder import cache, jit
from tests.op_builder.tiny_op import Sandbox, TinyBuilder, here, sandbox

ANSWER = "print(TinyBuilder().load().answer())"


def refuse_locks(*_: object) -> None:
    """What ``flock`` does on some network file systems."""
    raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))


def test_a_second_process_starts_no_process(sandbox: Sandbox) -> None:
    assert sandbox.run(ANSWER) == "42"
    assert sandbox.compilations() == 1
    before = sandbox.compiler_calls()
    program = f"""
import subprocess, sys, torch
def refuse(*args, **kwargs): raise AssertionError(f"a warm load started {{args}}")
subprocess.Popen.__init__ = refuse
{ANSWER}
assert "torch.utils.cpp_extension" not in sys.modules
"""
    assert sandbox.run(program) == "42"
    assert sandbox.compiler_calls() == before


def test_a_second_load_in_one_process_gives_the_same_module(sandbox: Sandbox) -> None:
    program = """
import sys
module = TinyBuilder().load()
assert TinyBuilder().load() is module and TinyBuilder().jit_load() is module
assert sys.modules[TinyBuilder().absolute_name()] is module
"""
    sandbox.run(program)
    assert sandbox.compilations() == 1


def test_three_processes_at_once_build_once(sandbox: Sandbox) -> None:
    processes = [sandbox.start(ANSWER, {"TINY_SLOW": "2"}) for _ in range(3)]
    answers = [process.communicate(timeout=300) for process in processes]
    assert [output for output, _ in answers] == ["42\n"] * 3
    assert all(errors.startswith("nvme_ops: compiling") and errors.count("\n") == 1 for _, errors in answers)
    assert sandbox.compilations() == 1


def test_four_threads_at_once_build_once(sandbox: Sandbox) -> None:
    program = """
from concurrent.futures import ThreadPoolExecutor
with ThreadPoolExecutor(4) as pool:
    print(len({id(module) for module in pool.map(lambda _: TinyBuilder().load(), range(4))}))
"""
    assert sandbox.run(program) == "1"
    assert sandbox.compilations() == 1


def test_a_child_forked_during_a_build_loads_too(sandbox: Sandbox) -> None:
    program = """
import os, threading, time, torch
from pathlib import Path
calls = Path(os.environ["TINY_CALLS"])
builder = threading.Thread(target=lambda: TinyBuilder().load())
builder.start()
while not calls.exists() or "tiny.cpp" not in calls.read_text():
    time.sleep(0.05)
child = os.fork()
if child == 0:
    os._exit(TinyBuilder().load().answer())
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
builder.join()
"""
    assert sandbox.run(program, {"TINY_SLOW": "2"}) == "42"
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


def replace(library: Path, content: bytes) -> None:
    """Gives the path another file: the one there is mapped into this process, which would die of a change."""
    library.unlink()
    library.write_bytes(content)


def test_what_torch_leaves_of_a_killed_build_is_ignored(here: Sandbox) -> None:
    entry = jit.build(TinyBuilder().recipe())
    entry.discard()
    (entry.folder / "lock").touch()  # torch waits for this file to go, for ever
    replace(entry.library, b"half a library")
    assert jit.build(TinyBuilder().recipe()).record() is not None
    assert not (entry.folder / "lock").exists()
    assert here.compilations() == 2


def test_a_truncated_library_is_built_anew(here: Sandbox) -> None:
    entry = jit.build(TinyBuilder().recipe())
    replace(entry.library, entry.library.read_bytes()[:100])
    assert not TinyBuilder().is_cached()
    assert here.run(ANSWER) == "42"


def test_a_library_that_cannot_be_loaded_is_built_anew(here: Sandbox) -> None:
    entry = jit.build(TinyBuilder().recipe())
    replace(entry.library, bytes(entry.library.stat().st_size))
    done = here.end(ANSWER)
    output, errors = done.stdout, done.stderr
    assert output == "42\n", errors
    assert "built anew" in errors
    assert here.compilations() == 2


def test_a_changed_header_source_or_flag_builds_anew(here: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    changes = [
        lambda: here.header.write_text("#define ANSWER 43\n"),
        lambda: here.source.write_text(here.source.read_text() + "// changed\n"),
        lambda: monkeypatch.setenv("TINY_CXX_ARGS", "-DMORE"),
        lambda: monkeypatch.setenv("CFLAGS", "-DEVEN_MORE"),
        lambda: monkeypatch.setenv("LDFLAGS", "-Wl,-O1"),
        lambda: here.compiler.write_text(here.compiler.read_text() + "# another version\n"),
    ]
    keys = {TinyBuilder().recipe().key()}
    for change in changes:
        change()
        keys.add(TinyBuilder().recipe().key())
    assert len(keys) == 1 + len(changes)
    jit.build(TinyBuilder().recipe())
    compiled, linked = here.compiler_calls()[-2:]
    assert "-DMORE -DEVEN_MORE" in compiled
    assert "-Wl,-O1" in linked


@pytest.mark.parametrize("fact", ["torch", "torch_commit", "cxx11_abi", "cuda", "python", "machine"])
def test_another_runtime_has_another_key(here: Sandbox, monkeypatch: pytest.MonkeyPatch, fact: str) -> None:
    from nvme_ops.op_builder import recipe

    key = TinyBuilder().recipe().key()
    other = {**recipe.runtime(), fact: "another"}
    monkeypatch.setattr(recipe, "runtime", lambda: other)
    assert TinyBuilder().recipe().key() != key


def test_a_touched_but_unchanged_source_builds_nothing(here: Sandbox) -> None:
    key = TinyBuilder().recipe().key()
    os.utime(here.source)
    assert TinyBuilder().recipe().key() == key


def test_a_filled_cache_needs_no_compiler(sandbox: Sandbox, tmp_path: Path) -> None:
    sandbox.run(ANSWER)
    (tmp_path / "empty").mkdir()
    assert sandbox.run(ANSWER, {"PATH": str(tmp_path / "empty"), "CXX": ""}) == "42"
    assert sandbox.compilations() == 1


def test_a_compiler_of_several_words_works(here: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", f"'{here.compiler}' -DFROM_CXX")
    assert jit.build(TinyBuilder().recipe()).record() is not None
    assert any("-DFROM_CXX" in call and "tiny.cpp" in call for call in here.compiler_calls())
    assert os.environ["CXX"].startswith("'")


def test_flags_reach_the_compiler_unchanged(here: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CFLAGS", """-I'/a folder' -DTEXT='"$HOME; {a}"'""")
    monkeypatch.setenv("LDFLAGS", "'-Wl,-rpath,$ORIGIN'")
    jit.build(TinyBuilder().recipe())
    compiled, linked = here.compiler_calls()[-2:]
    assert '-I/a folder -DTEXT="$HOME; {a}" -c' in compiled
    assert "-Wl,-rpath,$ORIGIN" in linked


def test_max_jobs_reaches_ninja(here: Sandbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    programs = tmp_path / "programs"
    programs.mkdir()
    ninja = programs / "ninja"
    path = os.environ["PATH"]
    ninja.write_text(f'#!/bin/sh\necho "$*" >> "{tmp_path}/ninja"\nPATH="{path}" exec ninja "$@"\n')
    ninja.chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}{os.pathsep}{path}")
    monkeypatch.setenv("MAX_JOBS", "3")
    jit.build(TinyBuilder().recipe())
    assert "-j 3" in (tmp_path / "ninja").read_text()


def test_ninja_beside_python_is_found_without_activation(sandbox: Sandbox) -> None:
    assert sandbox.run(ANSWER, {"PATH": "/usr/bin:/bin"}) == "42"


def test_the_default_root_is_torchs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from torch.utils import cpp_extension

    monkeypatch.delenv("TORCH_EXTENSIONS_DIR", raising=False)
    for name, value in (("XDG_CACHE_HOME", ""), ("XDG_CACHE_HOME", str(tmp_path)), ("HOME", str(tmp_path))):
        monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
        if value:
            monkeypatch.setenv(name, value)
        assert cache.default_root().parent.resolve() == Path(cpp_extension.get_default_build_root())


def test_a_chosen_root_that_cannot_be_written_is_refused(here: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(here.header / "below a file"))
    with pytest.raises(RuntimeError, match=r"TORCH_EXTENSIONS_DIR cannot be written: .*Not a directory"):
        jit.build(TinyBuilder().recipe())


@pytest.fixture
def no_home(here: Sandbox, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """No folder below HOME can be made; returns the folder that builds then go to."""
    monkeypatch.delenv("TORCH_EXTENSIONS_DIR")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(here.header))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path / f"torch_extensions_{os.geteuid()}"


def test_without_a_home_builds_go_to_a_private_folder(no_home: Path) -> None:
    recipe = TinyBuilder().recipe()
    with pytest.warns(UserWarning, match=r"compiled ops are kept in .*Not a directory"):
        entry = jit.build(recipe)
    assert entry.folder.is_relative_to(no_home)
    assert stat.S_IMODE(no_home.stat().st_mode) == 0o700
    assert cache.find(recipe) == entry


def test_a_fallback_that_others_can_write_to_is_not_trusted(no_home: Path) -> None:
    no_home.mkdir()
    no_home.chmod(0o777)
    assert cache.roots() == [cache.default_root()]
    with pytest.raises(RuntimeError, match="is not private"):
        jit.build(TinyBuilder().recipe())


def test_a_file_system_without_locks_builds_all_the_same(here: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fcntl, "flock", refuse_locks)
    assert jit.build(TinyBuilder().recipe()).record() is not None


def test_without_locks_the_first_of_two_builds_stays(here: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fcntl, "flock", refuse_locks)
    recipe = TinyBuilder().recipe()
    entry = cache.CacheEntry(cache.writable_root() / f"{recipe.name}-{recipe.key()}", recipe.name)
    with cache.building(entry) as slower:
        assert slower is not None
        jit.build(recipe)
        first = entry.library.stat().st_ino
        jit.compile_into(slower, recipe, entry.log)
    assert entry.library.stat().st_ino == first
    assert [path.name for path in entry.folder.parent.iterdir() if path.name.startswith(".")] == []


def test_a_finished_build_can_be_read_by_others(here: Sandbox) -> None:
    old = os.umask(0o022)
    try:
        entry = jit.build(TinyBuilder().recipe())
    finally:
        os.umask(old)
    assert stat.S_IMODE(entry.folder.stat().st_mode) == 0o755


def test_sources_that_cannot_be_united_are_compiled_one_by_one(here: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("first", "second"):
        (here.csrc / f"{name}.cpp").write_text("namespace { [[maybe_unused]] int same = 1; }\n")
    united = [str(here.csrc / f"{name}.cpp") for name in ("first", "second")]
    monkeypatch.setattr(TinyBuilder, "united_sources", lambda _: [united])
    assert jit.build(TinyBuilder().recipe()).record() is not None
    assert any("united1.cpp" in call for call in here.compiler_calls())
    (here.csrc / "second.cpp").write_text("namespace { [[maybe_unused]] int other = 1; }\n")
    jit.build(TinyBuilder().recipe())
    assert sum("second.cpp" in call for call in here.compiler_calls()) == 1
