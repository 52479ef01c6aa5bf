"""``tools/mutants.py``: which mutants there are, and that the sample of them is fixed."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import mutant_list

ROOT = Path(__file__).parents[2]

SOURCE = '''
"""A docstring with 1 < 2."""
if TYPE_CHECKING:
    from a import b

def half(size: Literal[4], é: str = "é") -> Literal[5]:
    """Of 2."""
    if not size and "é" is not é:
        raise ValueError(f"{size + 1} is not", 3)
    print(size - 1)
    flush(size)
    total = size // 2 if size else é + "text"
    while total <= 65: total += size
    return total
'''


def test_what_is_mutated() -> None:
    found = mutant_list.mutants_of("memory", "a.py", SOURCE.encode())
    assert [(each.line, each.operator, each.after) for each in found] == [
        (8, "condition", "True"),
        (8, "condition", "False"),
        (8, "logic", "(not size or 'é' is not é)"),
        (8, "not", "(size)"),
        (8, "compare", "('é' is é)"),
        (11, "statement", "pass"),
        (12, "condition", "True"),
        (12, "condition", "False"),
        (12, "arithmetic", "(size * 2)"),
        (12, "constant", "(3)"),
        (13, "condition", "False"),
        (13, "compare", "(total < 65)"),
        (13, "arithmetic", "total -= size"),
        (14, "return", "return None"),
    ]
    assert {each.function for each in found} == {6}


def test_the_sample_is_fixed_and_each_mutant_is_another_program() -> None:
    """The same in another process, and where code above has grown."""
    command = [sys.executable, str(ROOT / "tools/mutants.py"), "--list", "--only", "formats"]
    listed = subprocess.check_output(command, text=True).splitlines()
    found = mutant_list.sample("formats")
    assert [f"{each.path}:{each.line}" for each in found] == [line.partition(" ")[0] for line in listed]
    assert len({each.name for each in found}) == mutant_list.SAMPLE
    assert set(mutant_list.sample("formats", 10)) < set(found)
    for each in found:
        source = (ROOT / each.path).read_bytes()
        assert ast.dump(ast.parse(each.applied(source))) != ast.dump(ast.parse(source)), each.name
    names = [{each.name for each in mutant_list.mutants_of("memory", "a.py", text.encode())}
             for text in (SOURCE, f"def more() -> None:\n    flush(5)\n\n{SOURCE}")]  # fmt: skip
    assert names[0] < names[1]
