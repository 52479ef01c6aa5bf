"""Runs safetensors' own Python tests with its functions replaced by ours, and says what differs from what is expected.

    python tools/safetensors_suite.py               # fetches the tests of the installed version from PyPI
    python tools/safetensors_suite.py --tests DIR   # of a checkout: bindings/python/tests

Replaced are save_file, load_file, save_model, load_model and safe_open; save and load to and from bytes are left alone.
"""

from __future__ import annotations

import argparse
import io
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import urllib.request
from collections.abc import Sequence
from pathlib import Path

import pypi

ROOT = Path(__file__).parent.parent
FILES = ("pt_comparison", "pt_model", "simple", "threadable", "handle", "multithreaded", "pread_backend")

_ERROR = "another type or other words of an error"
_HEADER = "another layout of the header: padded to a page, larger dtypes first"
_FORMAT = "metadata always have format=pt, without which transformers refuses a file"
_GATHERED = "tensors that are not contiguous are saved, gathered"

#: What fails, and why it may.
DIFFERENT = {
    "test_bogus": _ERROR,
    "test_meta_tensor": _ERROR,
    "test_sparse": _ERROR,
    "test_file_not_found": _ERROR,
    "test_get_correctly_dropped": "keys() of a closed file answers, get_tensor raises ValueError",
    "test_numpy_slice": "slices beyond the end are cut short, and lists are indices, as in torch",
    "test_difference_with_torch": _ERROR,
    "test_invalid_backend_string_raises": "backend= has no effect",
    "test_serialization": _HEADER,
    "SliceTestCase::test_deserialization_metadata": _FORMAT,
    "test_save": _FORMAT,
    "test_workaround": _FORMAT,
    "test_safe_open_round_trip": _FORMAT,
    "test_cannot_serialize_a_non_contiguous_tensor": _GATHERED,
    "test_workaround_non_contiguous": _GATHERED,
    "test_difference_torch_odd": "a file that has both of two tied weights fills them, as Module.load_state_dict does",
}

PLUGIN = """
import safetensors
import safetensors.torch

import nvme_ops
import nvme_ops.integrations.safetensors


def save_file(tensors, filename, metadata=None):
    nvme_ops.save(tensors, filename, format="safetensors", metadata=metadata)


def load_file(filename, device="cpu", *, backend=None):
    return nvme_ops.load(filename, map_location=device)


def save_model(model, filename, metadata=None, force_contiguous=True):
    nvme_ops.save(model, filename, format="safetensors", metadata=metadata)


def load_model(model, filename, strict=True, device="cpu", *, backend=None):
    nvme_ops.load(filename, into=model, strict=strict)
    return [], []


for ours in (save_file, load_file, save_model, load_model):
    setattr(safetensors.torch, ours.__name__, ours)
safetensors.safe_open = safetensors.torch.safe_open = nvme_ops.integrations.safetensors.safe_open
"""


def fetch(folder: Path) -> Path:
    """The tests of the installed version, in ``folder``."""
    import safetensors

    name = f"safetensors-{safetensors.__version__}.tar.gz"
    with urllib.request.urlopen(pypi.files("safetensors")[name]) as answer:
        content = answer.read()
    with tarfile.open(fileobj=io.BytesIO(content)) as archive:
        for member in archive:
            place = Path(member.name)
            if place.parent.name == "tests" and place.suffix == ".py" and (file := archive.extractfile(member)):
                (folder / place.name).write_bytes(file.read())
    return folder


def run(tests: Path, plugins: Path) -> tuple[set[str], str]:
    """The tests that failed, and pytest's last line."""
    (plugins / "as_nvme_ops.py").write_text(PLUGIN)
    chosen = [path for name in FILES if (path := tests / f"test_{name}.py").exists()]
    command = ["pytest", "-q", "-p", "as_nvme_ops", "-p", "no:cacheprovider", "--tb=line", "--rootdir", tests, *chosen]
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "tests", "data").mkdir(parents=True)  # where the tests write
        done = subprocess.run(
            [sys.executable, "-m", *map(str, command)],
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(plugins), str(ROOT)])},
            cwd=folder,
            capture_output=True,
            text=True,
        )
    if done.returncode > 1:
        sys.exit(done.stdout + done.stderr)
    failed = set(re.findall(r"^FAILED \S*?test_\w+\.py::(\S+)", done.stdout, re.MULTILINE))
    return failed, done.stdout.strip().splitlines()[-1]


def main(argv: Sequence[str] | None = None) -> int:
    """Status 0 when exactly what is expected differs, else 1."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tests", type=Path, help="folder of the tests")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "tests").mkdir()
        failed, last = run((args.tests or fetch(folder / "tests")).resolve(), folder)
    matched = {test: key for test in failed for key in DIFFERENT if test == key or test.endswith(f"::{key}")}
    for test in sorted(failed):
        print(f"{test}: {DIFFERENT[matched[test]] if test in matched else 'NOT EXPECTED'}")
    for key in sorted(set(DIFFERENT) - set(matched.values())):
        print(f"{key}: passes, and was expected to differ")
    print(last)
    return int(set(matched) != failed)


if __name__ == "__main__":
    sys.exit(main())
