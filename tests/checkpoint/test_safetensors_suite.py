"""safetensors' own tests, on our functions: only what is listed with its reason differs."""

from __future__ import annotations

import socket
import subprocess
import sys

import pytest

from tests.conftest import REPOSITORY


def reachable() -> bool:
    try:
        socket.create_connection(("pypi.org", 443), timeout=10).close()
    except OSError:
        return False
    return True


@pytest.mark.slow
def test_only_what_is_listed_differs() -> None:
    if not reachable():
        pytest.skip("pypi.org cannot be reached, which has the tests")
    done = subprocess.run(
        [sys.executable, "tools/safetensors_suite.py"], cwd=REPOSITORY, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "NOT EXPECTED" not in done.stdout
