"""``nvme-bench explain``: what is refused, what is seen of a file, and small real runs."""

from __future__ import annotations

import contextlib
import hashlib
import io
import itertools
import os
import resource
import shutil
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nvme_ops.measure import bench, explain, files
from nvme_ops.measure.judge import EMPTY, FIO, KEPT, LOCKED, NEW
from nvme_ops.op_builder.machine import Host
from nvme_ops.storage import device
from nvme_ops.text import GIB, MIB
from tests.conftest import give_up_root, in_child, open_to_all

# The place


@pytest.fixture
def file(folder: Path) -> Path:
    path = folder / "a file"
    files.make_file(str(path), 2 * MIB + 5)
    return path


def test_the_page_cache_is_known(file: Path) -> None:
    files.make_cold(str(file))
    assert files.cached_bytes(str(file)) in (0, None)
    files.make_warm(str(file))
    assert files.cached_bytes(str(file)) in (2 * MIB + 5, None)


def _without_cachestat() -> Any:
    """The op on a kernel older than 6.5."""
    return types.SimpleNamespace(cached_pages=lambda *_: None)


def test_mincore_tells_where_cachestat_does_not(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "native", _without_cachestat)
    files.make_cold(str(file))
    assert files.cached_bytes(str(file)) == 0
    files.make_warm(str(file))
    assert files.cached_bytes(str(file)) == 2 * MIB + 5


def test_a_page_cache_that_the_kernel_hides_is_unknown(file: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("without root there is no file of another user")
    open_to_all(file.parent)
    file.chmod(0o444)

    def body() -> None:
        give_up_root()
        files.native = _without_cachestat  # type: ignore[attr-defined]
        assert files.cached_bytes(str(file)) is None

    in_child(body)


def test_holes_and_extents_are_seen(file: Path) -> None:
    with file.open("r+b") as open_file:
        open_file.truncate(64 * MIB)
    place = explain.inspect(str(file))
    assert place.size == 64 * MIB
    assert place.stored < 16 * MIB
    assert place.extents is None or place.extents >= 1
    assert place.file_system


def explained(*words: str) -> tuple[int, str]:
    """The status, and what is printed."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        status = bench.main(["explain", *words])
    return status, said.getvalue().rstrip("\n")


def refused(*words: str) -> str:
    """What is said when the place cannot be used."""
    status, text = explained(*words)
    assert status == 2
    assert text.startswith("nvme-bench: ")
    return text


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[str], None]], None]:
    """Has a function called before each pass."""

    def install(step: Callable[[str], None]) -> None:
        monkeypatch.setattr(explain, "progress_bar", lambda _: contextlib.nullcontext(step))

    return install


def test_a_path_that_is_missing_is_refused(tmp_path: Path) -> None:
    assert refused(str(tmp_path / "none")).endswith("none: No such file or directory")


def test_an_empty_file_is_refused(folder: Path) -> None:
    (folder / "empty").touch()
    assert "is empty" in refused(str(folder / "empty"))


def test_a_file_smaller_than_a_block_is_refused(folder: Path) -> None:
    (folder / "small").write_bytes(b"x" * 5000)
    assert "4.883 KiB, less than a block of 1 MiB" in refused(str(folder / "small"))


def test_devices_pipes_and_sockets_are_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert "is a device node" in refused("/dev/null")
    assert "is a pipe" in refused(str(tmp_path / "pipe"))


def test_an_unreadable_file_is_refused(file: Path) -> None:
    open_to_all(file.parent)
    file.chmod(0)

    def body() -> None:
        give_up_root()
        assert refused(str(file)).endswith("Permission denied")

    in_child(body)


def test_a_folder_that_cannot_be_written_is_refused(folder: Path) -> None:
    open_to_all(folder)
    folder.chmod(0o555)

    def body() -> None:
        give_up_root()
        assert refused(str(folder)).endswith("Permission denied")

    in_child(body)
    folder.chmod(0o755)


def test_a_file_in_memory_is_refused() -> None:
    mount = device.mount_of(Host(), "/dev/shm")
    if mount is None or mount.kind not in device.MEMORY or not os.access("/dev/shm", os.W_OK):
        pytest.skip("/dev/shm is no tmpfs that can be written")
    path = Path(f"/dev/shm/nvme_ops-explain-{os.getpid()}")
    path.write_bytes(b"x" * MIB)
    try:
        assert "lives in memory" in refused(str(path))
        assert "lives in memory" in refused("/dev/shm")
    finally:
        path.unlink()


def test_a_file_system_without_direct_io_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    path = "/sys/kernel/mm/transparent_hugepage/enabled"  # sysfs refuses O_DIRECT
    if not os.path.isfile(path):
        pytest.skip(f"{path} does not exist")
    monkeypatch.setattr(explain, "_LEAST", 1)
    assert "refuses O_DIRECT" in refused(path)


def test_too_little_space_is_said_before_anything_is_written(folder: Path) -> None:
    assert "of free space are needed" in refused(str(folder), "--io_size", "1000T")
    assert list(folder.iterdir()) == []


def test_too_little_memory_is_said(file: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(explain, "free_memory", lambda: 4 * MIB)
    assert "takes 8 MiB of memory and 4 MiB are free" in refused(str(file), "--io_size", "2M")
    assert "takes 8 MiB of memory" in refused(str(folder), "--io_size", "2M")
    assert list(folder.iterdir()) == [file]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "required: FILE|DIR"),
        ([".", "--rounds", "1"], "--rounds 1: at least 2"),
        ([".", "--rounds", "two"], "invalid int value"),
        ([".", "--io_size", "0"], "--io_size: '0' is not a size"),
        ([".", "--device", "cuda:77"], "--device cuda:77: torch sees"),
        ([".", "--device", "tpu"], "--device tpu: neither cpu nor cuda:N"),
        ([__file__, "--write"], "a file that exists is only read"),
        ([".", "--nonsense"], "unrecognized arguments"),
    ],
)
def test_wrong_arguments_end_with_status_2(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        explain.main(words)
    assert end.value.code == 2
    assert message in capsys.readouterr().err


# Small real runs


@pytest.fixture
def _no_fio(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))


def load_everything(file: Path) -> None:
    """Once as ourselves: another user may not even see our Python."""
    assert explained(str(file), "--rounds", "2", "--io_size", "1M")[0] == 0


def state(path: Path) -> tuple[str, int, int, int]:
    about = path.stat()
    return hashlib.sha256(path.read_bytes()).hexdigest(), about.st_mtime_ns, about.st_ctime_ns, about.st_mode


def test_a_file_is_explained_and_left_as_it_was(file: Path, steps: Callable[..., None]) -> None:
    before = state(file)
    told: list[str] = []
    steps(told.append)
    status, text = explained(str(file), "--rounds", "2")
    lines = text.splitlines()
    assert status == 0
    assert lines[0].startswith("read: ")
    assert "reached" in lines[0]
    for name in (LOCKED, EMPTY, KEPT, NEW, f"{LOCKED}, block_size 4 MiB", f"{NEW}, 2 lanes"):
        assert any(line.startswith(f"{name}  ") for line in lines), name
    assert f"file: {file}, 2 MiB" in text
    assert "in the page cache" in " ".join(text.split())
    assert len(lines) <= 40
    rows = [line for line in lines if line.startswith((LOCKED, EMPTY, "torch.empty", FIO))]
    missing = sum("not installed" in line for line in rows)  # of these only the attempt is told
    assert len(told) == (1 + 2) * (len(rows) - missing) + missing
    assert state(file) == before
    assert list(file.parent.iterdir()) == [file]


@pytest.mark.usefixtures("_no_fio")
def test_a_file_that_may_only_be_read_is_explained(file: Path) -> None:
    open_to_all(file.parent)
    file.chmod(0o444)
    file.parent.chmod(0o555)
    load_everything(file)

    def body() -> None:
        give_up_root()
        status, text = explained(str(file), "--rounds", "2")
        assert status == 0, text

    in_child(body)
    file.parent.chmod(0o755)


@pytest.mark.usefixtures("_no_fio")
def test_without_fio_the_page_says_what_the_ceiling_is(file: Path) -> None:
    status, text = explained(str(file), "--rounds", "2")
    assert status == 0
    assert "page-locked memory: fio is not installed: apt-get install fio." in " ".join(text.split())


def test_a_folder_is_explained_in_both_directions_and_left_empty(folder: Path) -> None:
    status, text = explained(str(folder), "--rounds", "2", "--io_size", "8M", "--write")
    assert status == 0
    assert [line.split(":")[0] for line in text.splitlines()[:2]] == ["read", "write"]
    assert text.count("what was reached") == 2
    assert text.count(LOCKED) >= 2
    assert list(folder.iterdir()) == []


@pytest.mark.usefixtures("_no_fio")
def test_what_lies_in_the_page_cache_is_measured_as_found(file: Path) -> None:
    files.make_warm(str(file))
    if files.cached_bytes(str(file)) is None:
        pytest.skip("the kernel does not say what lies in the page cache")
    _, text = explained(str(file), "--rounds", "2")
    assert "100% of it in the page cache, as found " in " ".join(text.split())
    assert files.cached_bytes(str(file)) == 0
    _, text = explained(str(file), "--rounds", "2")
    assert "nothing of it in the page cache" in " ".join(text.split())


@pytest.mark.usefixtures("_no_fio")
def test_a_file_that_shrinks_meanwhile_is_an_error(file: Path, steps: Callable[..., None]) -> None:
    def shrink(words: str) -> None:
        os.truncate(file, MIB)

    steps(shrink)
    status, text = explained(str(file), "--rounds", "2", "--io_size", "2M")
    assert status == 1
    assert "EOFError" in text
    assert str(file) in text


@pytest.mark.usefixtures("_no_fio")
def test_a_file_that_vanishes_meanwhile_is_an_error(file: Path, steps: Callable[..., None]) -> None:
    def remove(words: str) -> None:
        file.unlink(missing_ok=True)

    steps(remove)
    status, text = explained(str(file), "--rounds", "2")
    assert status == 1
    assert "No such file" in text


@pytest.mark.usefixtures("_no_fio")
def test_ctrl_c_leaves_nothing_behind(folder: Path, steps: Callable[..., None]) -> None:
    passes = itertools.count()

    def interrupt(words: str) -> None:
        if next(passes) == 3:
            raise KeyboardInterrupt

    steps(interrupt)
    assert explained(str(folder), "--rounds", "2", "--io_size", "4M")[0] == 130
    assert list(folder.iterdir()) == []


def test_a_full_device_is_said(make_file_system: Callable[..., Path]) -> None:
    folder = make_file_system(96 * MIB)
    assert "of free space are needed" in refused(str(folder), "--io_size", "64M")
    filler = folder / "filler"
    filler.write_bytes(b"x" * (shutil.disk_usage(folder).free - 70 * MIB))
    refused(str(folder), "--io_size", "8M")


@pytest.mark.usefixtures("_no_fio")
def test_refusals_of_the_system_are_told(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NVME_OPS_BACKEND", "threads")
    open_to_all(file.parent)
    load_everything(file)

    def body() -> None:
        give_up_root()
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (0, 0))
        _, text = explained(str(file), "--rounds", "2", "--io_size", "1M")
        assert "refused: NVME_OPS_BACKEND=threads; fix: unset NVME_OPS_BACKEND" in text
        assert "refused: memory cannot be locked (RLIMIT_MEMLOCK); fix: " in text

    in_child(body)


def test_passes_over_small_files_are_repeated() -> None:
    assert [explain.calls(size) for size in (1, MIB, 48 * MIB, GIB)] == [1024, 64, 1, 1]
