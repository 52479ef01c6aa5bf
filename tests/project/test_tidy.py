"""Style as a test: directions of includes and imports, dead files, sizes, and what must not be left in the code.

Every failure names the file and the line. Formatting is ruff's and clang-format's business, not this file's.
"""

from __future__ import annotations

import ast
import graphlib
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = "nvme_ops"
LIBRARY = ("nvme_ops", "op_builder", "report")  # folders of Python that is installed
MAX_LINES = 800  # of a file; beyond 500 only now and then
LONG_LINES, LONG_SHARE = 500, 0.1

# Which layers the files of each layer of csrc may include.
LAYERS = {
    "base": {"base"},
    "packed": {"packed"},
    "backends": {"backends", "base"},
    "engine": {"engine", "backends", "base"},
    "binding": {"packed", "binding", "engine", "backends", "base"},
}
BINDING_ONLY = re.compile(r"<(torch/|ATen/|c10/|pybind11/|Python\.h)")

# The floors of the package, the lowest first: what is on one imports what is below it, and nothing beside it.
FLOORS = (
    {"op_builder"},
    {"base", "ops"},
    {"filesystem", "lazy"},
    {"io"},
    {"memory", "report"},
    {"formats", "storage"},
    {"data", "offload"},
    {"checkpoint"},
    {"dcp", "integrations", "measure"},
    {"bench"},
)
FLOOR = {part: number for number, floor in enumerate(FLOORS) for part in floor}
#: The same inside ``offload``.
INSIDE_OFFLOAD = (
    {"residency"},
    {"memory"},
    {"budgets"},
    {"activations", "experts"},
    {"cache", "weights"},
    {"parameters"},
    {"optimizer"},
    {"plan"},
    {"cli"},
)
STOREY = {part: number for number, floor in enumerate(INSIDE_OFFLOAD) for part in floor}

PYPROJECT = (ROOT / "pyproject.toml").read_text()
NEEDS_TRANSFORMERS = ("nvme_cache.py",)  # imported on the first use of a cache that is a class of theirs
ENTRY_POINTS = {"__init__", "__main__"}
NO_COMMENT_BEFORE = r"^(?:(?!//).)*?"
PRINTS_OR_ENDS = r"(?<![\w:.])(?:std::)?(printf|fprintf|puts|exit|_exit|assert)\s*\(|std::(cout|cerr)\b"
TEXT = {".py", ".pyi", ".h", ".cpp", ".md", ".toml", ".in", ".yml", ".yaml", ".sh", ".cfg", ".txt", ".json"}


def listed() -> list[Path]:
    """The files that git knows or would add."""
    command = ["git", "-C", str(ROOT), "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    try:
        names = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split("\0")
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"git lists no files here: {error}", allow_module_level=True)
    return sorted(path for path in map(ROOT.joinpath, names) if path.is_file() and not path.is_symlink())


FILES = listed()
PYTHON = [path for path in FILES if path.suffix == ".py"]
NATIVE = [path for path in FILES if path.suffix in (".h", ".cpp")]


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def inside(path: Path, *folders: str) -> bool:
    return path.relative_to(ROOT).parts[0] in folders


def lines_of(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines()


def clean(problems: list[str]) -> None:
    assert not problems, "\n" + "\n".join(problems)


def found(pattern: str, paths: list[Path]) -> Iterator[tuple[str, re.Match[str]]]:
    """Every line in which the pattern is, as FILE:LINE, and the match."""
    for path in paths:
        for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), 1):
            if match := re.search(pattern, line):
                yield f"{name_of(path)}:{number}", match


INCLUDE = r'^\s*#\s*include\s*(<[^>]+>|"[^"]+")'


def test_includes_point_from_binding_to_base_and_every_header_is_included() -> None:
    problems, used = [], {operand[1][1:-1] for _, operand in found(INCLUDE, NATIVE)}
    for path in NATIVE:
        top, *inner = path.relative_to(ROOT).parts
        if top != "csrc":
            continue
        layer = inner[0]
        if layer not in LAYERS:
            problems.append(f"{name_of(path)}:1: lies in no layer of csrc ({', '.join(LAYERS)})")
            continue
        if path.suffix == ".h" and "/".join(inner) not in used:
            problems.append(f"{name_of(path)}:1: nothing includes it")
        for place, match in found(INCLUDE, [path]):
            operand, target = match[1], match[1][1:-1]
            if operand[0] == '"' and not (ROOT / "csrc" / target).is_file():
                problems.append(f"{place}: {operand} is not a path below csrc")
            elif operand[0] == '"' and target.split("/")[0] not in LAYERS[layer]:
                problems.append(f"{place}: {layer} must not include {target}")
            elif layer != "binding" and BINDING_ONLY.match(operand):
                problems.append(f"{place}: only binding includes {operand}")
    clean(problems)


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """Line and absolute name of every module that ``path`` imports, and of every name taken from one."""
    parts = list(path.relative_to(ROOT).with_suffix("").parts)
    package = (parts if parts[0] == PACKAGE else [PACKAGE, *parts])[:-1]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*above, *filter(None, [node.module])])
            if module != PACKAGE:  # from nvme_ops import x imports x, no more
                yield node.lineno, module
            yield from ((node.lineno, f"{module}.{alias.name}") for alias in node.names)


def test_imports_point_downwards() -> None:
    """Imports within functions and for type checkers, too. ``nvme_ops`` itself, its names, stands on everything."""
    problems = set()
    for path in [path for path in PYTHON if inside(path, *LIBRARY)]:
        inner = [part for part in path.relative_to(ROOT).with_suffix("").parts if part != PACKAGE]
        if inner[0] in ENTRY_POINTS:
            continue
        if inner[0] not in FLOOR:
            problems.add(f"{name_of(path)}:1: lies on no floor of the package")
            continue
        for number, module in imports(path):
            first, _, rest = module.partition(".")
            wanted = rest.partition(".")[0]
            if first in LIBRARY and first != PACKAGE:
                problems.add(f"{name_of(path)}:{number}: import {PACKAGE}.{module}, not the folder {first}")
            elif first == PACKAGE and wanted in FLOOR and wanted != inner[0] and FLOOR[wanted] >= FLOOR[inner[0]]:
                problems.add(f"{name_of(path)}:{number}: {inner[0]} must not import {module}")
            elif first == PACKAGE and inner[0] == wanted == "offload" and inner[1] not in ENTRY_POINTS:
                part = rest.split(".")[1] if "." in rest else ""
                if part in STOREY and part != inner[1] and STOREY[part] >= STOREY[inner[1]]:
                    problems.add(f"{name_of(path)}:{number}: {inner[1]} must not import {module}")
    clean(sorted(problems))


def module_of(path: Path) -> str:
    parts = [part for part in path.relative_to(ROOT).with_suffix("").parts if part not in (PACKAGE, "__init__")]
    return ".".join([PACKAGE, *parts])


def test_imports_form_no_circle() -> None:
    """Those within functions and for type checkers count. Stubs (.pyi) do not: they say what is loaded at run time."""
    modules = {module_of(path): path for path in PYTHON if inside(path, *LIBRARY)}
    edges: set[tuple[str, str]] = set()
    for name, path in modules.items():
        lines: dict[int, set[str]] = {}
        for number, module in imports(path):
            lines.setdefault(number, set()).add(module if module in modules else module.rpartition(".")[0])
        for wanted in lines.values():  # `from package import module` imports the module
            used = {item for item in wanted & set(modules) if not any(other.startswith(f"{item}.") for other in wanted)}
            edges |= {(name, target) for target in used - {name}}
    graph: dict[str, set[str]] = {name: set() for name in modules}
    for name, wanted_one in edges:
        graph[name].add(wanted_one)
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        pytest.fail(" imports ".join(reversed(error.args[1])))


def test_the_core_needs_what_pyproject_lists_and_no_more() -> None:
    """Ninja is a program, setuptools what torch's builder runs on; cpuinfo is imported where a processor is named."""
    line = next(line for line in PYPROJECT.splitlines() if line.startswith("dependencies = "))
    listed = re.findall(r'"([\w-]+)', line)
    assert listed == ["torch", "ninja", "setuptools", "packaging", "py-cpuinfo"]
    needed = set()
    for path in PYTHON:
        if path.relative_to(ROOT).parts[0] in LIBRARY and path.name not in NEEDS_TRANSFORMERS:
            for node in ast.parse(path.read_text(encoding="utf-8")).body:  # what is imported when the module is
                if isinstance(node, ast.Import):
                    needed |= {alias.name.partition(".")[0] for alias in node.names}
                elif isinstance(node, ast.ImportFrom) and not node.level:
                    needed.add(str(node.module).partition(".")[0])
    assert needed - set(sys.stdlib_module_names) - {PACKAGE} <= set(listed)
    least = re.search(r'^LEAST_TORCH = "(.*)"$', (ROOT / "op_builder" / "recipe.py").read_text(), re.MULTILINE)
    assert least is not None
    assert f'"torch>={least[1]}"' in PYPROJECT


def test_every_python_module_is_used() -> None:
    library = [path for path in PYTHON if inside(path, *LIBRARY)]
    used = {module for path in library for _, module in imports(path)}
    words = set(re.findall(r'"([\w.]+):\w+"', PYPROJECT))  # of commands, and a package's lazy names
    for path in library:
        if path.name == "__init__.py":
            nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
            words |= {str(node.value) for node in nodes if isinstance(node, ast.Constant)}
    problems = []
    for path in library:
        parts = path.relative_to(ROOT).with_suffix("").parts
        module = ".".join(parts if parts[0] == PACKAGE else (PACKAGE, *parts))
        by_users = path.stem in ENTRY_POINTS or "integrations" in parts
        if not by_users and module not in used and not {module, f".{path.stem}", path.stem} & words:
            problems.append(f"{name_of(path)}:1: nothing imports {module}")
    clean(problems)


def test_files_are_small() -> None:
    sizes = {path: len(lines_of(path)) for path in [*PYTHON, *NATIVE]}
    clean([f"{name_of(path)}:{MAX_LINES}: {size} lines" for path, size in sizes.items() if size > MAX_LINES])
    long = [f"{name_of(path)}:{LONG_LINES}: {size} lines" for path, size in sizes.items() if size > LONG_LINES]
    clean(long if len(long) > max(1, LONG_SHARE * len(sizes)) else [])


ENGINE = {f"nvme_ops/io/{name}.py" for name in ("handle", "gds", "engine")}  # know where a handle keeps its engine


@pytest.mark.parametrize(
    ("pattern", "files"),
    [
        (r"\b(TODO|FIXME|XXX)\b", [path for path in [*PYTHON, *NATIVE] if inside(path, "csrc", *LIBRARY)]),
        (f"{NO_COMMENT_BEFORE}(?:{PRINTS_OR_ENDS})", [path for path in NATIVE if inside(path, "csrc")]),
        (r"/(?:home|Users)/\w+/|/root\b/", [path for path in FILES if path.suffix in TEXT or path.suffix == ""]),
        # nvme_ops.io.engine.engine_of(handle) gives it
        (r"(?<!self)\._engine\b", [path for path in PYTHON if inside(path, *LIBRARY) and name_of(path) not in ENGINE]),
        (r"^\s*def test_\w{66,}", [path for path in PYTHON if inside(path, "tests")]),  # several things in one test
    ],
    ids=["unfinished", "prints, exits or asserts", "someone's home", "where a handle keeps its engine", "long names"],
)
def test_what_must_not_be_there_is_not(pattern: str, files: list[Path]) -> None:
    clean([f"{place}: {match[0]}" for place, match in found(pattern, files)])
