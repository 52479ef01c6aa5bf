"""Every program on docs/storage.md runs as it stands there."""

from __future__ import annotations

import re
from pathlib import Path

from tests.conftest import REPOSITORY, run_python

PAGE = REPOSITORY / "docs" / "storage.md"


def test_the_programs_of_the_page_run_one_after_the_other(folder: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert len(blocks) >= 6
    program = "".join(blocks).replace("/mnt/nvme", str(folder))
    said = run_python(program).stdout.splitlines()
    assert "True" in said  # what was read is what was written
    assert said[1] == "False"  # there was nothing to take over
    assert said[-1] == f"{8 << 20} {8 << 20}"
