"""``nvme-checkpoint convert`` when something comes between: kills, Ctrl-C, a full disk, others at the same files."""

from __future__ import annotations

import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest
import torch

import nvme_ops
from nvme_ops.checkpoint.leftovers import leftovers
from nvme_ops.formats.sharded_index import read_index
from nvme_ops.inspection.cli import main
from nvme_ops.inspection.convert import convert
from tests.conftest import MIB, forked, give_up_root, in_child, in_threads, open_to_all, run_python
from tests.moments import Interrupt, numbers

TARGETS = ["target.safetensors", "target.pt", "target"]  # the last one is a folder of shards


def made(value: float, count: int = 6) -> dict[str, torch.Tensor]:
    """Some tensors of 256 KiB, some transposed."""
    found = {f"weight{number}": torch.full((256, 256), value + number) for number in range(count)}
    return {name: each.t() if name.endswith("1") else each for name, each in found.items()}


OLD, NEW, OTHER = made(-100.0, 4), made(0.0), made(1000.0)


@pytest.fixture(params=TARGETS)
def target(request: pytest.FixtureRequest, folder: Path) -> Path:
    """What is converted to; it has OLD. Beside it is ``source.pt``, which has NEW."""
    torch.save(NEW, folder / "source.pt")
    path = folder / str(request.param)
    nvme_ops.save(OLD, path)
    return path


def content(path: Path) -> str | None:
    """Which tensors the target has, of one of these and whole; None if it is not there."""
    if not (path if path.suffix else path / "model.safetensors.index.json").exists():
        return None
    found = nvme_ops.load(path, verify=True)
    for name, tensors in (("old", OLD), ("new", NEW), ("other", OTHER)):
        if found.keys() == tensors.keys() and all(torch.equal(found[each], tensors[each]) for each in tensors):
            return name
    raise AssertionError(f"a mixture: { {name: each[0, 0].item() for name, each in found.items()} }")


def words(target: Path) -> list[str]:
    """Of the command."""
    more = [] if target.suffix else ["--max-shard-size", "600KB"]
    return ["convert", str(target.parent / "source.pt"), str(target), *more]


def assert_alone(target: Path) -> None:
    """There is nothing but the source and what the target has."""
    index = target / "model.safetensors.index.json"
    own = {target} if target.suffix else {index, *(target / name for name in read_index(str(index)).places.values())}
    assert {each for each in target.parent.rglob("*") if each.is_file()} == {target.parent / "source.pt", *own}


def assert_works(target: Path) -> None:
    """The next run of it succeeds, and leaves nothing but the target."""
    assert main(words(target)) == 0
    assert content(target) == "new"
    assert_alone(target)


def in_new_process(body: Callable[[], object]) -> int:
    """Begins it in a forked child, which says nothing; returns the child."""
    child = os.fork()
    if child == 0:
        torch.set_num_threads(1)  # OpenMP's threads are the parent's
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        body()
        os._exit(0)
    return child


# Killed


@pytest.mark.parametrize("kills", [6, pytest.param(40, marks=pytest.mark.slow)])
@pytest.mark.parametrize("there", [True, False])
def test_killed_at_any_moment(target: Path, kills: int, there: bool) -> None:
    """Every other time by the clock, in what the engine does; else where Python is, always at the same places."""
    with Interrupt() as all_of_it:
        main(words(target))
    begin = time.monotonic()
    main(words(target))
    duration = time.monotonic() - begin
    chance, ended = random.Random(kills), list[int]()
    for turn, number in enumerate(numbers(f"{target.name} {kills}", all_of_it.count, kills)):
        shutil.rmtree(target) if target.is_dir() else target.unlink()
        if there:
            nvme_ops.save(OLD, target)
        moment = Interrupt(number if turn % 2 else -1, lambda: os.kill(os.getpid(), signal.SIGKILL))

        def convert_it(moment: Interrupt = moment) -> None:
            with moment:
                main(words(target))

        child = in_new_process(convert_it)
        if turn % 2 == 0:
            time.sleep(chance.uniform(0, duration))
            os.kill(child, signal.SIGKILL)
        ended.append(os.waitpid(child, 0)[1])
        assert content(target) in ("old" if there else None, "new")
        assert_works(target)
    assert ended.count(signal.SIGKILL) >= kills // 3


# Ctrl-C


@pytest.mark.usefixtures("no_collection")
@pytest.mark.parametrize("points", [12, pytest.param(60, marks=pytest.mark.slow)])
def test_ctrl_c_at_any_moment(
    target: Path, points: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    swallowed: list[object] = []  # what Python cannot raise: in a generator, or an object, that is freed
    monkeypatch.setattr(sys, "unraisablehook", lambda _: swallowed.append(1))
    with Interrupt() as all_of_it:
        main(words(target))
    for number in numbers(f"{target.name} {points}", all_of_it.count, points):
        if number == 1:
            continue  # our code has not begun
        nvme_ops.save(OLD, target)
        capsys.readouterr()
        with Interrupt(number) as moment:
            status = main(words(target))
        if not moment.where or swallowed:
            assert (status, content(target)) == (0, "new")
            swallowed.clear()
            continue
        assert (status, capsys.readouterr().err) == (130, "nvme-checkpoint: interrupted\n"), moment.where
        assert content(target) in ("old", "new"), moment.where
        for path in leftovers(str(target)) if content(target) == "new" and not target.suffix else ():
            os.unlink(path)  # shards of before, as its index was being made durable: `nvme-checkpoint clean`
        assert_alone(target)
        assert_works(target)


@pytest.mark.parametrize("runs", [6, pytest.param(40, marks=pytest.mark.slow)])
def test_ctrl_c_by_the_clock(target: Path, runs: int) -> None:
    """From a new process, whose first part is to import."""
    program = """
        import os, signal, sys, threading, time
        from nvme_ops.inspection import cli
        def interrupt():
            begun.wait()
            time.sleep(float(sys.argv[1]))
            os.kill(os.getpid(), signal.SIGINT)
        def its_parser():
            begun.set()
            return parser()
        begun, parser, cli.parser = threading.Event(), cli.parser, its_parser
        threading.Thread(target=interrupt, daemon=True).start()
        begin = time.monotonic()
        status = cli.main(sys.argv[2:])
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        print(time.monotonic() - begin)
        sys.exit(status)
    """
    duration = float(run_python(program, 1000, *words(target)).stdout.split()[-1])
    assert content(target) == "new"
    statuses = []
    for run in range(runs):
        nvme_ops.save(OLD, target)
        ended = run_python(program, duration * run / runs, *words(target), check=False)
        statuses.append(ended.returncode)
        assert (ended.returncode, ended.stderr) in ((0, ""), (130, "nvme-checkpoint: interrupted\n"))
        assert content(target) in (("new",) if ended.returncode == 0 else ("old", "new"))
        assert leftovers(str(target if target.is_dir() else target.parent)) == [] or content(target) == "new"
    assert 130 in statuses
    assert_works(target)


# What the system refuses


def test_a_full_disk(make_file_system: Callable[..., Path], folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mounted = make_file_system(8 * MIB)
    torch.save({str(number): torch.ones(1 * MIB // 4) for number in range(8)}, folder / "source.pt")
    for name in TARGETS:
        nvme_ops.save(OLD, mounted / name)
        before = sorted(mounted.rglob("*"))
        assert main(["convert", str(folder / "source.pt"), str(mounted / name), *words(mounted / name)[3:]]) == 2
        errors = capsys.readouterr().err
        assert errors.count("\n") == 1
        assert "No space left on device" in errors
        assert str(mounted / name) in errors
        assert content(mounted / name) == "old"
        assert sorted(mounted.rglob("*")) == before


def test_files_of_another_user(target: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Of whom one may not read a source, or not write to a folder."""
    open_to_all(target.parent)
    source, place = target.parent / "source.pt", target if target.is_dir() else target.parent
    if os.geteuid() != 0:
        pytest.skip("needs root, to have another user's files")

    def body() -> None:
        give_up_root()
        assert main(words(target)) == 2

    for named, modes in ((source, (0, 0o777)), (target, (0o644, 0o755))):
        source.chmod(modes[0])
        place.chmod(modes[1])
        in_child(body)
        errors = capfd.readouterr().err
        assert errors.count("\n") == 1
        assert f"Permission denied: '{named}" in errors
        assert content(target) == "old"
        assert_alone(target)


# Others at the same files


def convert_one_of_two(target: Path, number: int) -> None:
    source = target.parent / ("source.pt" if number % 2 else "other.pt")
    for _ in range(3):
        convert(str(source), str(target), max_shard_size=None if target.suffix else "600KB")


@pytest.mark.parametrize("apart", [False, True], ids=["threads", "processes"])
def test_several_with_one_target(target: Path, apart: bool) -> None:
    torch.save(OTHER, target.parent / "other.pt")
    if apart:
        with forked(3, lambda number: convert_one_of_two(target, number)) as running:
            while running():
                assert content(target) in ("old", "new", "other")
    else:
        in_threads(lambda number: convert_one_of_two(target, number), 4)
    assert content(target) in ("new", "other")
    (target.parent / "other.pt").unlink()
    assert_alone(target)
    assert_works(target)


def once(act: Callable[[], object]) -> Callable[[int], AbstractContextManager[Callable[[int], None]]]:
    """As ``on_progress``: does something when the second tensor is about to be read."""

    @contextmanager
    def on_progress(total: int) -> Iterator[Callable[[int], None]]:
        calls = list[int]()

        def advance(count: int) -> None:
            calls.append(count)
            if len(calls) == 2:
                act()

        yield advance

    return on_progress


def test_a_child_forked_meanwhile_converts_too(target: Path) -> None:
    other = target.parent / "by the child.safetensors"

    def fork() -> None:
        in_child(lambda: convert(str(target.parent / "source.pt"), str(other)))

    convert(str(target.parent / "source.pt"), str(target), on_progress=once(fork))
    assert content(target) == "new"
    assert content(other) == "new"


def test_a_child_that_goes_on_with_it_harms_nothing(target: Path) -> None:
    source, parent, children = str(target.parent / "source.pt"), os.getpid(), list[int]()

    def fork() -> None:
        if child := os.fork():
            children.append(child)
            os.waitpid(child, 0)

    try:
        convert(source, str(target), on_progress=once(fork))
    except RuntimeError:
        assert os.getpid() != parent
    finally:
        if os.getpid() != parent:
            os._exit(0)
    assert children
    assert content(target) == "new"
    assert_works(target)
