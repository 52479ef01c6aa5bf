"""The hooks of running.py, in runs of pytest of their own: a small test file in an empty folder."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY

TWO_PROCESSES = ("-n", "2")
in_one_and_two_processes = pytest.mark.parametrize("processes", [(), TWO_PROCESSES], ids=["one", "two"])


def run(folder: Path, program: str, *arguments: str) -> tuple[int, str]:
    """The exit status and output of pytest over a test file, in a process that ignores Ctrl-C."""
    (folder / "test_small.py").write_text(textwrap.dedent(program))
    (folder / "pytest.ini").write_text("[pytest]\nmarkers = alone\n")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    plugins = ("-p", "tests.running", "-p", "no:cacheprovider", "-p", "no:hypothesispytest")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *plugins, *arguments],
        cwd=folder,
        env={**environment, "PYTHONPATH": str(REPOSITORY)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN),
        timeout=120,
        check=False,
    )
    return done.returncode, done.stdout


@in_one_and_two_processes
def test_ctrl_c_works_and_the_summary_says_each_reason_once(tmp_path: Path, processes: tuple[str, ...]) -> None:
    program = """
    import signal, subprocess, sys
    import pytest

    def test_here():
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)

    def test_in_a_child():
        program = "print('there', flush=True); import time; time.sleep(60)"
        with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
            child.stdout.readline()
            child.send_signal(signal.SIGINT)
            assert b"KeyboardInterrupt" in child.stderr.read()
        assert child.returncode == -signal.SIGINT

    @pytest.mark.parametrize("number", range(7))
    def test_many(number):
        pytest.skip("fio is not\\ninstalled")

    @pytest.mark.skipif(True, reason="there is no GPU")
    def test_one():
        pass

    def test_two():
        pytest.skip("there is no GPU")
    """
    status, output = run(tmp_path, program, *processes)
    assert status == 0, output
    assert "2 passed" in output
    lines = [line for line in output.splitlines() if line]
    first = next(i for i, line in enumerate(lines) if "= 9 skipped =" in line)
    assert lines[first + 1 : first + 3] == ["    7  fio is not installed", "    2  there is no GPU"]


def test_what_is_left_in_the_checkout_fails_the_run(tmp_path: Path) -> None:
    if not shutil.which("git"):
        pytest.skip("git is not installed")
    program = """
    from pathlib import Path

    def test_untidy():
        for name in ("cufile.log", "file", "mine.log", "__pycache__/file.pyc"):
            Path(name).parent.mkdir(exist_ok=True)
            Path(name).touch()
    """
    (tmp_path / "mine.log").touch()
    (tmp_path / ".gitignore").write_text("*.log\n*.pyc\n__pycache__/\n")
    (tmp_path / "outside").mkdir()
    assert run(tmp_path / "outside", program)[0] == 0
    shutil.rmtree(tmp_path / "outside")
    subprocess.run(["git", "init", "--quiet", str(tmp_path)], check=True)
    status, output = run(tmp_path, program)
    assert status == 1, output
    left = [line for line in output.splitlines() if line.startswith("left in the checkout")]
    assert left == ["left in the checkout: cufile.log", "left in the checkout: file"]  # mine.log was there before


def test_a_test_alone_has_the_machine_for_itself(tmp_path: Path) -> None:
    """The others of the two processes start and end before it or after it."""
    program = """
    import os, time
    import pytest

    def say(words):
        file = os.open("said", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(file, (words + "\\n").encode())
        os.close(file)

    @pytest.mark.parametrize("number", range(40))
    def test_beside_others(number):
        say("start")
        time.sleep(0.01)
        say("end")

    @pytest.mark.alone
    @pytest.mark.parametrize("number", range(4))
    def test_alone(number):
        say("alone")
        time.sleep(0.05)
        say("not alone")
    """
    status, output = run(tmp_path, program, *TWO_PROCESSES)
    assert status == 0, output
    said = (tmp_path / "said").read_text().splitlines()
    assert said.count("start") == 40
    places = [i for i, words in enumerate(said) if words == "alone"]
    assert len(places) == 4
    for place in places:
        assert said[place + 1] == "not alone"
        assert said[:place].count("start") == said[:place].count("end")


@in_one_and_two_processes
def test_a_test_that_hangs_fails_and_says_where(tmp_path: Path, processes: tuple[str, ...]) -> None:
    program = """
    import ctypes

    def test_that_hangs():
        stuck_here()

    def stuck_here():
        ctypes.PyDLL(None).pause()  # with the interpreter's lock held

    def test_other():
        pass
    """
    status, output = run(tmp_path, program, *processes, "--timeout", "1")
    assert status != 0
    assert "in stuck_here" in output
    if processes:  # the others go on
        assert "1 failed, 1 passed" in output
        assert "test_small.py::test_that_hangs" in output


def test_an_exception_that_nobody_hears_of_fails_the_test(tmp_path: Path) -> None:
    program = """
    import threading

    class Object:
        def __del__(self):
            assert False, "lost"

    def test_in_a_thread():
        thread = threading.Thread(target=Object.__del__, args=[None])
        thread.start()
        thread.join()

    def test_in_a_callback():
        Object()
    """
    status, output = run(tmp_path, program)
    assert (status, "2 failed" in output) == (1, True), output
