"""Hostile files: a FormatError or an OSError that names the file, soon, and without memory for what they claim."""

from __future__ import annotations

import json
import os
import struct
import tarfile
import zlib
from pathlib import Path

import pytest
import torch

import nvme_ops
from nvme_ops.base.errors import FormatError
from nvme_ops.checkpoint.cli import main as nvme_checkpoint
from nvme_ops.data import SampleStore
from tests import prepared
from tests.conftest import MIB, in_child, run_python
from tests.data.samples import index_of
from tests.faults.hostile import little_memory
from tests.faults.hostile_formats import FORMATS

DEEP = b"[" * 100_000 + b"]" * 100_000


@pytest.fixture(autouse=True)
def _same_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Takes back where settings are kept, which two formats change: ops are kept there, too."""
    monkeypatch.setenv("XDG_CACHE_HOME", os.environ.get("XDG_CACHE_HOME", ""))


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMATS)
def test_changed_files(name: str) -> None:
    done = prepared.run("-m", "tests.faults.hostile", name, "120", timeout=1000)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", FORMATS)
def test_something_else_in_the_place_of_a_file(name: str, tmp_path: Path) -> None:
    """A pipe would be waited for, a device or a file of holes read until memory is full."""
    form = FORMATS[name]
    form.make(tmp_path)

    def limited() -> None:
        little_memory(512 * MIB)
        for path in list(tmp_path.glob(form.files)):
            content = path.read_bytes()
            for put in (os.mkfifo, Path.mkdir, lambda path: path.symlink_to("/dev/zero"), holes):
                path.unlink()
                put(path)
                try:
                    form.read(tmp_path)
                except (FormatError, OSError) as error:
                    if str(tmp_path) not in str(error):
                        raise
                path.rmdir() if put is Path.mkdir else path.unlink(missing_ok=True)  # an abandoned claim is removed
                path.write_bytes(content)

    in_child(limited)


def holes(path: Path) -> None:
    path.touch()
    os.truncate(path, 1 << 40)


def test_a_tar_with_names_that_are_not_utf_8_is_read(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "a.tar", "w", format=tarfile.USTAR_FORMAT, encoding="latin-1") as made:
        made.addfile(tarfile.TarInfo("é.txt"))
    assert os.fsencode(SampleStore(tmp_path)[0]["__key__"]) == b"\xe9"


@pytest.mark.parametrize("name", ["owner", "journal", "mds", "claim", "store", "foreign", "sharded", "states", "tuned"])
def test_json_that_is_nested_deeply(name: str, tmp_path: Path) -> None:
    form = FORMATS[name]
    form.make(tmp_path)
    path = max(tmp_path.glob(form.files), key=lambda file: file.name == "index.json" or file.name.startswith("index."))
    if name in ("store", "foreign"):
        text = index_of(DEEP)
    elif name == "journal":
        text = b"%08x %s\n" % (zlib.crc32(DEEP), DEEP)
    elif name == "states":
        header = json.dumps({"__metadata__": {"nvme_ops.optimizer": DEEP.decode()}}).encode()
        text = struct.pack("<Q", len(header)) + header
    else:
        text = DEEP
    path.write_bytes(text)
    if name in ("claim", "tuned", "foreign"):  # where one is as good as none
        form.read(tmp_path)
    else:
        with pytest.raises((FormatError, OSError), match=str(tmp_path)):
            form.read(tmp_path)


def test_what_a_terminal_acts_on_is_escaped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = "a\x1b[31m\u202e\n"
    nvme_ops.save({name: torch.ones(2)}, tmp_path / "a.safetensors", metadata={"x": "\x07"})
    (tmp_path / f"{name}.pt").write_bytes(b"x")
    for path in ("a.safetensors", f"{name}.pt"):
        nvme_checkpoint(["info", str(tmp_path / path)])
        said = "".join(capsys.readouterr())
        assert r"a\x1b[31m\u202e" in said
        assert not {"\x1b", "\u202e", "\x07"} & set(said)


@pytest.mark.parametrize(
    ("module", "words", "unbuffered"), [("report.cli", [], ""), ("checkpoint.cli", ["info", "a.safetensors"], "1")]
)
def test_standard_output_that_is_full(module: str, words: list[str], unbuffered: str, tmp_path: Path) -> None:
    nvme_ops.save({"a": torch.ones(2)}, tmp_path / "a.safetensors")
    program = """
        import os, sys
        os.chdir(sys.argv[1])
        os.dup2(os.open("/dev/full", os.O_WRONLY), 1)
        from nvme_ops.{} import main
        sys.exit(main({!r}))
    """
    done = run_python(program.format(module, words), tmp_path, check=False, fresh=True, PYTHONUNBUFFERED=unbuffered)
    assert done.returncode == 2
    assert "No space left on device" in done.stderr
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr
