"""What a Dockerfile and a .dockerignore say, as far as tools/chroot.py needs it."""

from __future__ import annotations

import os
import posixpath
import re
import shlex
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

#: Debian's releases by their Python: what stands in for python:X.Y-slim.
SUITES = {"3.11": "bookworm", "3.13": "trixie"}
STEPS = ("ARG", "ENV", "WORKDIR", "COPY", "RUN", "CMD")
_VARIABLE = re.compile(r"\\\$|\$(?:(\w+)|\{(\w+)(?::-([^}]*))?\})")
_NOT_UNDERSTOOD = re.compile(r"--(?!from=)|.*<<-?['\"]?[A-Z]")  # other flags, and here-documents


@dataclass(frozen=True)
class Step:
    """An instruction."""

    line: int
    word: str
    rest: str


@dataclass(frozen=True)
class Stage:
    """What begins with a FROM."""

    name: str
    base: str  # an image, or the name of a stage before it
    steps: list[Step]
    arguments: dict[str, str]  # those before the first FROM


def instructions(text: str) -> list[Step]:
    """The instructions of a Dockerfile, their continued lines joined."""
    steps, held, begun = [], "", 0
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        begun = begun if held else number
        held += line.rstrip().removesuffix("\\")
        if not line.rstrip().endswith("\\"):
            word, *rest = held.split(None, 1)
            steps.append(Step(begun, word.upper(), "".join(rest).strip()))
            held = ""
    return steps


def expand(text: str, values: Mapping[str, str]) -> str:
    """Puts the values of variables in: of ``$A``, ``${A}`` and ``${A:-default}``, not of one after a backslash."""

    def value(found: re.Match[str]) -> str:
        return "$" if found[0] == r"\$" else values.get(found[1] or found[2], "") or found[3] or ""

    return _VARIABLE.sub(value, text)


def declared(rest: str, given: Mapping[str, str], before: Mapping[str, str], here: Mapping[str, str]) -> dict[str, str]:
    """What an ARG sets: the value given, its default in terms of ``here``, or the one before the first FROM."""
    made = {}
    for word in shlex.split(rest):
        name, equals, default = word.partition("=")
        made[name] = given.get(name, expand(default, here) if equals else before.get(name, ""))
    return made


def assigned(rest: str, here: Mapping[str, str]) -> dict[str, str]:
    """What an ENV sets. ValueError where it is not of the form NAME=VALUE."""
    pairs = [word.partition("=") for word in shlex.split(rest)]
    if not all(equals for _, equals, _ in pairs):
        raise ValueError("only NAME=VALUE is understood")
    return {name: expand(value, here) for name, _, value in pairs}


def stages(text: str, given: Mapping[str, str]) -> list[Stage]:
    """The stages of a Dockerfile.

    Args:
        text: Of the Dockerfile.
        given: Values for its ARGs.

    Raises:
        ValueError: It says something that is not understood, or begins with an image that nothing stands in for.
    """
    found: list[Stage] = []
    arguments: dict[str, str] = {}
    steps = instructions(text)
    for step in steps:
        if step.word == "FROM":
            image, *name = expand(step.rest, arguments).split()
            if image not in [stage.name for stage in found]:
                suite_of(image, f"line {step.line}: ")
            found.append(Stage(name[1] if len(name) == 2 else "", image, [], arguments))
        elif found and step.word in STEPS and not _NOT_UNDERSTOOD.match(step.rest):
            found[-1].steps.append(step)
        elif not found and step.word == "ARG":
            arguments |= declared(step.rest, given, {}, arguments)
        else:
            raise ValueError(f"line {step.line}: not understood: {step.word} {step.rest}")
    known = {word.partition("=")[0] for step in steps if step.word == "ARG" for word in shlex.split(step.rest)}
    if unknown := given.keys() - known:
        raise ValueError(f"there is no ARG {', '.join(sorted(unknown))}")
    if not found:
        raise ValueError("there is no FROM")
    return found


def suite_of(image: str, place: str = "") -> str:
    """The release of Debian that stands in for an image. ValueError where none does."""
    found = re.fullmatch(r"python:(\d+\.\d+)-slim(?:-(\w+))?", image)
    if found and found[1] in SUITES and found[2] in (None, SUITES[found[1]]):
        return SUITES[found[1]]
    known = " and ".join(f"python:{python}-slim (Debian {suite})" for python, suite in SUITES.items())
    raise ValueError(f"{place}nothing stands in for {image}, only for {known}")


def kept(lines: Iterable[str]) -> Callable[[str], bool]:
    """Whether a path, relative to the context, is copied: by the lines of a .dockerignore, of which the last wins."""
    rules = []
    for line in lines:
        pattern = line.strip()
        if pattern and not pattern.startswith("#"):
            path = posixpath.normpath(pattern.removeprefix("!").strip()).lstrip("/")
            parts = re.split(r"(\*\*/|\*\*|\*|\?|\[[^]]+\])", path)
            meant = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
            text = "".join(meant.get(part, part if part.startswith("[") else re.escape(part)) for part in parts)
            rules.append((pattern.startswith("!"), re.compile(text + "(?:/.*)?", re.DOTALL)))

    def judge(path: str) -> bool:
        verdicts = [wanted for wanted, rule in rules if rule.fullmatch(path)]
        return verdicts[-1] if verdicts else True

    return judge


def path_in(root: Path, path: str) -> Path:
    """A path of an image, which lies below ``root``. ValueError where a link leads out."""
    place = root / posixpath.normpath("/" + path).lstrip("/")
    if not Path(os.path.realpath(place)).is_relative_to(os.path.realpath(root)):
        raise ValueError(f"{path} leads out of {root}")
    return place


def copy(words: Sequence[str], root: Path, folder: str, stages: Mapping[str, Path], context: Path) -> None:
    """Does what COPY says; links remain links.

    Args:
        words: The operands: sources, the last one the target, before them perhaps ``--from=STAGE``.
        root: Of the image to copy to.
        folder: Of this image, where relative targets begin.
        stages: The roots of the stages to copy from.
        context: The folder to copy from otherwise, except what its .dockerignore names.

    Raises:
        ValueError: There is nothing to copy, or a path leads out of its root.
    """
    origin, ignored = context, context / ".dockerignore"
    wanted = kept(ignored.read_text().splitlines() if ignored.exists() else [])
    if words[0].startswith("--from="):
        name, words = words[0].partition("=")[2], words[1:]
        if name not in stages:
            raise ValueError(f"there is no stage {name}")
        origin, wanted = stages[name], kept([])
    *sources, target = words

    def left_out(folder: str, names: list[str]) -> list[str]:
        return [name for name in names if not wanted(os.path.relpath(os.path.join(folder, name), origin))]

    place = path_in(root, posixpath.join(folder, target))
    for source in sources:
        pattern = posixpath.normpath("/" + source).lstrip("/")
        names = [path.relative_to(origin).as_posix() for path in sorted(origin.glob(pattern))] if pattern else ["."]
        found = [path_in(origin, name) for name in names if wanted(name)]
        if not found:
            raise ValueError(f"there is no {source} to copy")
        for path in found:
            if path.is_dir():
                shutil.copytree(path, place, symlinks=True, ignore=left_out, dirs_exist_ok=True)
            else:
                into = target.endswith("/") or len(sources) > 1 or len(found) > 1 or place.is_dir()
                whole = place / path.name if into else place
                whole.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(path, whole)
