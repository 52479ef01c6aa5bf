"""DeepSpeed with the ops of this package: its own builders, its training and tools, and how programs are started."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from nvme_ops import aio_handle
from nvme_ops.integrations import deepspeed as integration
from tests import prepared
from tests.conftest import REPOSITORY, run_python


def test_without_deepspeed_an_import_says_so_if_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    with pytest.raises(ModuleNotFoundError, match="deepspeed"):
        integration.install()
    program = "import sys; sys.modules['deepspeed'] = None; import nvme_ops"
    for value, works in (("0", True), ("", True), ("1", False)):
        done = run_python(program, NVME_OPS_DEEPSPEED=value, check=False)
        assert (done.returncode == 0) is works, done.stderr


@pytest.fixture
def builders() -> Any:
    pytest.importorskip("deepspeed")
    import deepspeed.ops.op_builder as theirs  # type: ignore[import-not-found,import-untyped,unused-ignore]

    yield theirs
    integration.uninstall()


def test_its_builders_load_our_ops_until_it_is_uninstalled(builders: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    before = dict(builders.AsyncIOBuilder.__dict__)
    for _ in range(2):
        integration.install()
    assert builders.AsyncIOBuilder().load().aio_handle is aio_handle
    assert builders.AsyncIOBuilder().is_compatible()
    for _ in range(2):
        integration.uninstall()
    monkeypatch.setattr("deepspeed.__version__", "1.0.0")
    with pytest.raises(RuntimeError, match=r"DeepSpeed 1\.0\.0 is not supported.* from 0\.14 to before 0\.20"):
        integration.install()
    assert dict(builders.AsyncIOBuilder.__dict__) == before


def losses(what: str, place: Path) -> list[float]:
    command = [sys.executable, "-m", "tests.offload.deepspeed_training", what, str(place)]
    result = subprocess.run(
        command, cwd=REPOSITORY, env={**os.environ, "NVME_OPS_DEEPSPEED": "1"},
        capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-5000:]
    values: list[float] = json.loads(result.stdout.rpartition("losses ")[2])
    return values


@pytest.mark.slow
@pytest.mark.usefixtures("builders")
def test_training_with_its_states_on_nvme_has_the_losses_of_memory(folder: Path) -> None:
    assert losses("optimizer and parameters", folder) == losses("nothing", folder)


# ``python -m nvme_ops.integrations.deepspeed PROGRAM``: whatever it is, DeepSpeed in it has our ops

FAKE = {
    "site/deepspeed/__init__.py": "__version__ = '0.19.8'\n",
    "site/deepspeed/ops/__init__.py": "",
    "site/deepspeed/ops/op_builder/__init__.py": """
class AsyncIOBuilder:
    def is_compatible(self, verbose=False):
        print("please install libaio-dev")
    def load(self, verbose=True):
        return "its own"
""",
    "site/deepspeed/runtime/__init__.py": "",
    "site/deepspeed/runtime/zero/__init__.py": "",
    "site/deepspeed/runtime/zero/partition_parameters.py": "",
}
PROGRAM = """
import sys
from deepspeed.ops.op_builder import AsyncIOBuilder
print(AsyncIOBuilder().load().__name__, AsyncIOBuilder().is_compatible(verbose=True), *sys.argv[1:])
"""
WORK = {
    "program.py": PROGRAM,
    "entry": f"#!/no/such/python3\n{PROGRAM}",
    "script.sh": '#!/bin/sh\npython program.py "$@"\n',
    "data": "no program",
}


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a DeepSpeed that is made up, and programs that use it, among which we are."""
    for name, text in {**FAKE, **{f"work/{name}": text for name, text in WORK.items()}}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "work" / "script.sh").chmod(0o755)
    # PYTHONPATH has the checkout, whose op_builder DeepSpeed must not take for its own
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path / "site"), str(REPOSITORY)]))
    monkeypatch.chdir(tmp_path / "work")
    return tmp_path


def start(*words: str) -> tuple[int, str, str]:
    done = prepared.run("-m", "nvme_ops.integrations.deepspeed", *words)
    return done.returncode, done.stdout, done.stderr


def test_a_script_and_the_programs_that_it_starts_have_our_ops(place: Path) -> None:
    (place / "site" / "sitecustomize.py").write_text("print('the environments own one')\n")  # still runs
    status, said, errors = start("./script.sh", "a", "b c")
    assert (status, said.splitlines()[-1], errors) == (0, "nvme_ops.ops.async_io True a b c", "")
    assert "the environments own one" in said
    assert start("sh", "-c", "kill -9 $$")[0] == -signal.SIGKILL, "it becomes the program"


def test_the_order_in_which_python_looks_for_packages_stays(tmp_path: Path) -> None:
    """The folder where the package is installed went to the end, so that the system's packages won over its own."""
    own, system = tmp_path / "own", tmp_path / "system"
    at_start = own / "nvme_ops" / "integrations" / "at_start"
    at_start.mkdir(parents=True)
    shutil.copy(Path(integration.__file__).parent / "at_start" / "sitecustomize.py", at_start)
    (own / "nvme_ops" / "__init__.py").write_text("imported = True\n")
    system.mkdir()
    (system / "sitecustomize.py").write_text("import sys; sys.path.append('/added by another')\n")
    program = "import sys; print(sys.modules['nvme_ops'].imported, *sys.path[1:], sep='|')"
    for folders in ([at_start, own, system], [at_start, system]):  # installed there, and a checkout that is not
        done = run_python(program, fresh=True, PYTHONPATH=os.pathsep.join(map(str, folders)))
        imported, *entries = done.stdout.strip().split("|")
        assert imported == "True"
        assert entries[: len(folders)] == [str(folder) for folder in folders]
        assert entries[-1] == "/added by another"
        assert entries.count(str(own)) == folders.count(own)


@pytest.mark.usefixtures("place")
def test_programs_in_python_run_with_this_one(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Any] = []
    monkeypatch.setattr(os, "execve", lambda *given: started.append(given))
    monkeypatch.setenv("PATH", os.defpath)
    main: Any = integration.main
    main(["sh", "c"])
    assert started[-1][1][0].endswith("/sh")
    for words in (["program.py", "a b"], ["./entry"], ["entry"], ["ds_io", "c"]):
        if words[0] == "ds_io":
            pytest.importorskip("deepspeed")
        main(words)
        program, command, environment = started[-1]
        assert program == command[0] == sys.executable
        assert command[2:] == words[1:]
        assert Path(command[1]).is_file()
        assert environment["PATH"].startswith(os.path.dirname(sys.executable))


@pytest.mark.usefixtures("place")
@pytest.mark.parametrize(
    ("words", "said"),
    [(["missing"], "missing: no such program"), (["data"], "data: Permission denied: "), ([], "usage: ")],
)
def test_what_cannot_be_started_is_one_line(words: list[str], said: str) -> None:
    status, _, errors = start(*words)
    assert (status, len(errors.splitlines())) == (1, 1)
    assert errors.startswith(said)
