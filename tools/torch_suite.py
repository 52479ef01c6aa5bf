"""Runs torch's own tests of autograd as they are, within ``save_on_nvme``, and says what differs from what is expected.

    python tools/torch_suite.py pytorch/test  # of a checkout, or Debian's: apt-get source pytorch
    python tools/torch_suite.py pytorch/test -k TestAutograd

Every tensor that autograd saves goes to storage (``min_bytes=1, memory_budget=0``), with both policies. What fails
without that, where tests and torch are of different versions, does not count.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parent.parent
FILES = ("test_autograd.py", "autograd/test_functional.py", "autograd/test_complex.py")
IDLE = {"nvme": "hooks", "auto": "mode"}  # by policy: what it installs, doing nothing

#: What fails, as a pattern, and why it may, beside what fails with hooks, or a
#: dispatch mode, that do nothing: tests that install their own.
DIFFERENT: dict[str, str] = {
    "test_hook_closure_cycle_use_custom_function_True": "auto keeps arguments until the block ends",
    "test_checkpointing_without_reentrant_saved_object_identity": "what comes back is another object",
    "test_saved_variable_version_counter": "what comes back has a version of its own",
}

PLUGIN = """
import contextlib
import os

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from nvme_ops.offload import save_on_nvme


def _same(tensor):
    return tensor


class Mode(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_call(item):
    policy = os.environ["POLICY"]
    if policy in ("", "hooks", "mode"):
        with contextlib.ExitStack() as entered:
            if policy:
                entered.enter_context(torch.autograd.graph.saved_tensors_hooks(_same, _same))
            if policy == "mode":
                entered.enter_context(Mode())
            yield
        return
    saving = save_on_nvme(os.environ["FOLDER"], min_bytes=1, memory_budget=0, policy=policy)
    with saving:
        yield
    saving.close()
"""


def run(tests: Path, plugins: Path, policy: str, argv: Sequence[str]) -> dict[str, str]:
    """The outcome of each test; a test in which the process died has none, and those after it are run by another."""
    (plugins / "within_save_on_nvme.py").write_text(PLUGIN)
    results: dict[str, str] = {}
    for file in FILES:
        died: list[str] = []
        while True:
            command = [
                "pytest",
                "-v",
                "-p",
                "within_save_on_nvme",
                "-p",
                "no:cacheprovider",
                "--tb=line",
                "--noconftest",
                "-W",
                "ignore",
                "--timeout=60",
            ]
            command += [
                *argv,
                *(word for test in died for word in ("--deselect", test)),
                "--rootdir",
                str(tests),
                str(tests / file),
            ]
            done = subprocess.run(
                [sys.executable, "-m", *command],
                env={
                    **os.environ,
                    "PYTHONPATH": os.pathsep.join([str(plugins), str(ROOT)]),
                    "POLICY": policy,
                    "FOLDER": str(plugins),
                },
                cwd=tests,
                capture_output=True,
                text=True,
            )
            lines = re.findall(
                rf"^{file}::(\S+)(?: (PASSED|FAILED|SKIPPED|XFAIL|XPASS|ERROR))?", done.stdout, re.MULTILINE
            )
            results.update(lines)
            if not lines and not argv:
                sys.exit(done.stdout + done.stderr)
            unfinished = [test for test, outcome in lines if not outcome]
            if not unfinished:
                break
            results[unfinished[-1]] = f"ended the process with {done.returncode}"
            died.append(f"{file}::{unfinished[-1]}")
    return results


def main(argv: Sequence[str] | None = None) -> int:
    """Status 0 when exactly what is expected differs, else 1."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tests", type=Path, help="torch's folder of tests")
    parser.add_argument("-k", default="", help="of pytest: which tests")
    given = parser.parse_args(argv)
    unexpected = 0
    chosen = ["-k", given.k] if given.k else []
    with tempfile.TemporaryDirectory(dir="/var/tmp") as name:
        plain = run(given.tests.resolve(), Path(name), "", chosen)
        print(f"without: {len(plain)} tests, {sum(status == 'PASSED' for status in plain.values())} pass")
        for policy, nothing in IDLE.items():
            idle = run(given.tests.resolve(), Path(name), nothing, chosen)
            within = run(given.tests.resolve(), Path(name), policy, chosen)
            differing = {test: within.get(test, "not run") for test in plain if within.get(test) != plain[test]}
            for test, outcome in sorted(differing.items()):
                reason = next((why for pattern, why in DIFFERENT.items() if re.search(pattern, test)), None)
                if within.get(test) == idle.get(test):
                    reason = f"as with a {nothing} that does nothing"
                unexpected += reason is None
                print(f"{policy}: {test}: {outcome}, not {plain[test]}: {reason or 'NOT EXPECTED'}")
            print(f"{policy}: {len(plain) - len(differing)} of {len(plain)} as without")
    return int(unexpected > 0)


if __name__ == "__main__":
    sys.exit(main())
