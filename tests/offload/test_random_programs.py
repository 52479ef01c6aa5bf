"""Random programs compute the same with tensors on storage as with tensors in memory, or are refused in a sentence."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import run_python
from tests.offload.random_programs import CAPABILITIES

PROGRAM = """
    import sys
    from tests.offload.random_programs import run_many
    capability, count, folder, without = sys.argv[1:]
    failures, equal = run_many(capability, range(int(count)), folder, without=without.split(","))
    print(*failures[:3], sep="\\n")
    assert equal > 10 * int(count), f"the programs are trivial: {equal}"
    sys.exit(bool(failures))
"""

#: Kinds of statements, and parameters, that are known to differ.
WITHOUT = {"stream_weights": "folded"}  # last bits: see StoredTensor.__torch_function__


@pytest.mark.parametrize("count", [20, pytest.param(200, marks=pytest.mark.slow)])
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_equal_or_refused(folder: Path, capability: str, count: int) -> None:
    found = run_python(PROGRAM, capability, count, folder, WITHOUT.get(capability, ""), check=False, fresh=True)
    assert found.returncode == 0, found.stdout + found.stderr
