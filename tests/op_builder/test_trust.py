"""Loading an op runs it: what other users can put in its place is neither loaded nor built in."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import shutil
import stat
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from nvme_ops.op_builder import finished, jit, machine, trust
from tests.conftest import NOBODY, give_up_root, in_child, open_to_all, with_mounts
from tests.made_up import executable
from tests.op_builder.tiny_op import ANSWER, Sandbox, TinyBuilder, here, once, sandbox, workshop

CLONE_NEWUSER, PR_SET_DUMPABLE = 0x10000000, 4
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as two users")


@pytest.fixture
def made(here: Sandbox) -> finished.CacheEntry:
    """The tiny op in the cache, built by this user and good."""
    once(here, lambda: jit.build(TinyBuilder().recipe()))
    found = finished.find_cached(TinyBuilder().recipe())
    assert found is not None
    return found


def refused(problem: str) -> None:
    """Fails unless the folder is refused, by each way to the op, with the reason and the fix."""
    builder = TinyBuilder()
    assert trust.roots() == []
    assert not builder.is_cached()
    assert not builder.is_compatible()
    assert problem in str(builder.error_log)
    for load in (builder.load, lambda: jit.build(builder.recipe())):
        with pytest.raises(RuntimeError) as caught:
            load()
        assert problem in str(caught.value)
        assert "set TORCH_EXTENSIONS_DIR to a folder that only you can write to" in str(caught.value)


def spoil(path: Path, way: str, mode: int = 0o777) -> str:
    """Lets others change what is at ``path``; returns what is to be said of it."""
    if way == "owner":
        os.chown(path, NOBODY, 0)
        return f"{path} belongs to "
    path.chmod(mode)
    return f"{path} can be written by everybody (fix: chmod go-w '{path}')"


# The folder


@needs_root
@pytest.mark.parametrize(
    ("depth", "way", "mode"),
    [(0, "mode", 0o1777), (1, "mode", 0o757), (2, "owner", 0)],
)
def test_a_folder_that_others_own_or_can_write_to_is_refused(
    here: Sandbox, made: finished.CacheEntry, depth: int, way: str, mode: int
) -> None:
    place = [made.folder.parent, *made.folder.parent.parents][depth]
    refused(spoil(place, way, mode))
    place.chmod(0o1777)  # as /tmp: what others cannot rename is safe, but its owner renames what he likes
    assert TinyBuilder().is_cached() == (depth > 0 and way == "mode")


@needs_root
def test_a_folder_of_root_is_trusted_by_others(here: Sandbox, made: finished.CacheEntry) -> None:
    open_to_all(here.cache.parent)
    here.cache.parent.chmod(0o755)

    def body() -> None:
        give_up_root()
        assert TinyBuilder().is_cached()

    in_child(body)


def test_a_link_is_followed_before_the_folder_is_checked_and_not_used_again(
    here: Sandbox, made: finished.CacheEntry, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    link = tmp_path / "open" / "link"
    link.parent.mkdir()
    link.parent.chmod(0o777)  # another user could turn it
    link.symlink_to(here.cache)
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(link))
    assert finished.find_cached(TinyBuilder().recipe()) == made
    refused(spoil(made.folder.parent, "mode"))


GROUPS = {  # the members of the group, who else has it as the primary one, its name, and what is not listed
    "lists its owner": ("tiny", "", "tiny", "", True),
    "has another member": ("tiny,other", "", "tiny", "", False),
    "is another's primary group": ("", "third:x:4323:4321::/:", "tiny", "", False),
    "of a directory that lists no users": ("", "", "tiny", "pwd.getpwall = list;", True),  # LDAP, in most places
    "of another name there": ("", "", "users", "pwd.getpwall = list;", False),
}


@needs_root
@pytest.mark.parametrize(("members", "user", "name", "first", "trusted"), GROUPS.values(), ids=GROUPS)
def test_the_users_own_group_counts_as_the_user(
    members: str, user: str, name: str, first: str, trusted: bool, tmp_path: Path
) -> None:
    """With real user and group files, which a mount namespace of its own gives to one program."""
    (tmp_path / "passwd").write_text(f"root:x:0:0::/:\ntiny:x:4321:4321::/:\nother:x:4322:4322::/:\n{user}\n")
    (tmp_path / "group").write_text(f"root:x:0:\n{name}:x:4321:{members}\nother:x:4322:\n")
    (tmp_path / "nsswitch.conf").write_text("passwd: files\ngroup: files\n")
    own = tmp_path / "own"
    own.mkdir()
    os.chown(own, 4321, 4321)
    own.chmod(0o775)
    open_to_all(tmp_path)
    tmp_path.chmod(0o755)
    program = (
        "import os, pwd, sys; from pathlib import Path; from nvme_ops.op_builder import trust; os.setuid(4321);"
        f"{first}print(trust.why_not_trusted(Path(sys.argv[1])))"
    )
    names = ("passwd", "group", "nsswitch.conf")
    mounts = " && ".join(f"mount --bind {tmp_path}/{name} /etc/{name}" for name in names)
    refusal = f"{own} can be written by the group {name} (fix: chmod go-w '{own}')"
    assert with_mounts(mounts, sys.executable, "-c", program, own).strip() == ("" if trusted else refusal)


@needs_root
def test_in_a_rootless_container_the_folders_above_are_of_nobody(here: Sandbox, made: finished.CacheEntry) -> None:
    """Where root has no number, / seems to belong to the overflow user, as in Apptainer."""
    user = 4321
    for each in [here.cache, *here.cache.rglob("*")]:
        os.chown(each, user, user, follow_symlinks=False)
    open_to_all(here.cache.parent)
    here.cache.parent.chmod(0o755)

    def body() -> None:
        os.setgid(user)
        os.setuid(user)
        libc = ctypes.CDLL(None)
        libc.prctl(PR_SET_DUMPABLE, 1)  # else /proc/self is root's
        if libc.unshare(CLONE_NEWUSER):
            os._exit(0)  # not permitted here
        Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
        assert (os.geteuid(), os.stat("/").st_uid) == (user, NOBODY)
        assert trust.roots() == [made.folder.parent]
        assert TinyBuilder().is_cached()
        assert trust.why_not_trusted(Path("/")) == "/ belongs to the user nobody"  # trusted above others only

    in_child(body)


# Without TORCH_EXTENSIONS_DIR


@pytest.fixture
def by_default(here: Sandbox, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The home folder, empty, in which ops are kept; temporary folders are private."""
    monkeypatch.delenv("TORCH_EXTENSIONS_DIR")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    open_to_all(tmp_path)
    tmp_path.chmod(0o755)
    (tmp_path / "home").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    return tmp_path / "home"


def test_a_home_that_others_can_write_to_is_left_alone(by_default: Path) -> None:
    recipe = TinyBuilder().recipe()
    assert jit.build(recipe).folder.is_relative_to(by_default)
    reason = spoil(by_default, "mode").partition(" (")[0]
    assert finished.find_cached(recipe) is None
    with pytest.warns(UserWarning, match=rf"compiled ops are kept in .*/torch_extensions_\d+/.*because: {reason}"):
        entry = jit.build(recipe)
    assert entry.folder.is_relative_to(by_default.parent / "tmp")
    assert finished.find_cached(recipe) == entry


@needs_root
def test_nothing_is_taken_from_the_current_folder(
    by_default: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    recipe, current = TinyBuilder().recipe(), tmp_path / "cwd"
    entry = jit.build(recipe)
    for place in ("relative", "~/.cache"):
        shutil.copytree(entry.folder, current / place / "torch_extensions/nvme_ops" / entry.folder.name)
    shutil.rmtree(entry.folder)
    monkeypatch.chdir(current)
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert finished.find_cached(recipe) is None
    assert trust.default_root() == by_default / ".cache" / "torch_extensions" / "nvme_ops"
    current.chmod(0o777)
    (tmp_path / "tmp").chmod(0o1777)

    def without_a_home() -> None:
        os.setgroups([])
        os.setgid(54321)
        os.setuid(54321)  # not in the password file
        del os.environ["HOME"], os.environ["XDG_CACHE_HOME"]
        assert finished.find_cached(recipe) is None
        assert trust.roots() == []
        with pytest.warns(UserWarning, match="because: ~/.* is not an absolute path"):
            assert jit.writable_root() == tmp_path / "tmp" / "torch_extensions_54321" / "nvme_ops"

    in_child(without_a_home)


# The entry


@needs_root
def test_a_filled_cache_that_is_not_loaded_is_told_of(
    here: Sandbox, made: finished.CacheEntry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where nothing can be built, as in an image with a cache that another user filled."""
    os.chown(made.library, NOBODY, 0)
    monkeypatch.setenv("CXX", "no-such-compiler")
    reason = f"is not loaded from {here.cache}/nvme_ops, because others could have changed it: .*nobody"
    with pytest.raises(RuntimeError, match=f"no C.. compiler was found.*{reason}"):
        TinyBuilder().load()


@needs_root
@pytest.mark.parametrize(("part", "way"), [("", "mode"), ("tiny.so", "link"), (finished.RECORD, "owner")])
def test_an_entry_that_others_made_is_built_anew(
    here: Sandbox, made: finished.CacheEntry, part: str, way: str, tmp_path: Path
) -> None:
    path = made.folder / part
    if way == "link":
        path = tmp_path / "elsewhere.so"
        shutil.move(made.library, path)
        made.library.symlink_to(path)
        assert finished.find_cached(TinyBuilder().recipe()) == made
    spoil(path, "mode" if way == "mode" else "owner")
    assert finished.find_cached(TinyBuilder().recipe()) is None
    with pytest.warns(UserWarning, match=r"the cached tiny op is built anew, because others could have changed it: "):
        entry = jit.build(TinyBuilder().recipe())
    assert entry == finished.find_cached(TinyBuilder().recipe())
    assert here.compilations() == 2


def test_without_a_umask_what_is_built_is_nobody_elses(here: Sandbox) -> None:
    old = os.umask(0)
    try:
        entry = jit.build(TinyBuilder().recipe())
    finally:
        os.umask(old)
    assert finished.find_cached(TinyBuilder().recipe()) == entry
    for path in (here.cache, here.cache / "nvme_ops", entry.folder, *entry.folder.iterdir()):
        assert stat.S_IMODE(path.stat().st_mode) & 0o022 == 0, path


# Lock and log


LOCKS: dict[str, Callable[[Path, Path], object]] = {
    "file": lambda lock, _: lock.touch(),
    "link": lambda lock, victim: lock.symlink_to(victim),
    "folder": lambda lock, _: (lock / "full").mkdir(parents=True),
    "fifo": lambda lock, _: os.mkfifo(lock),
}


@needs_root
@pytest.mark.parametrize("kind", LOCKS)
def test_a_lock_of_another_user_is_replaced(here: Sandbox, kind: str) -> None:
    entry = finished.CacheEntry(jit.writable_root() / f"tiny-{TinyBuilder().recipe().key()}", "tiny")
    lock, victim = entry.folder.with_suffix(".lock"), here.cache / "victim"
    victim.write_text("precious")
    LOCKS[kind](lock, victim)
    os.chown(lock, NOBODY, NOBODY, follow_symlinks=False)
    with contextlib.ExitStack() as stack:
        if kind == "file":
            fcntl.flock(stack.enter_context(lock.open()), fcntl.LOCK_EX)  # for ever
        assert jit.build(TinyBuilder().recipe()).record() is not None
    facts = lock.lstat()
    assert (stat.S_ISREG(facts.st_mode), facts.st_uid, stat.S_IMODE(facts.st_mode)) == (True, 0, 0o600)
    assert victim.read_text() == "precious"


def test_the_log_does_not_go_through_a_link(here: Sandbox, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    here.source.write_text("nonsense")
    recipe, victim = TinyBuilder().recipe(), tmp_path / "victim"
    victim.write_text("precious")
    log = finished.CacheEntry(jit.writable_root() / f"tiny-{recipe.key()}", "tiny").log
    log.symlink_to(victim)
    ways = {True: lambda: jit.build(recipe), False: lambda: jit.prebuild(recipe, tmp_path / "tiny.so")}
    for in_the_cache, build in ways.items():
        with pytest.raises(RuntimeError, match=r"nonsense(.|\n)*All output: ") as caught:
            build()
        written = Path(str(caught.value).rpartition("All output: ")[2])
        assert (written == log) == in_the_cache
        assert "nonsense" in written.read_text()
    assert victim.read_text() == "precious"


# Nowhere to write


NO_TEMPORARY_FOLDER = """
import resource, tempfile
resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
tempfile.tempdir = None  # another package may have asked for it already
"""


def test_a_cached_op_needs_no_temporary_folder_and_probes_say_that_there_is_none(
    sandbox: Sandbox, tmp_path: Path
) -> None:
    program = """
builder = TinyBuilder()
print(builder.is_compatible(), "No usable temporary directory" in builder.error_log, builder.has_function("f", ["c"]))
try: builder.load()
except RuntimeError as error: print("No usable temporary directory" in str(error))
"""
    places = {"TORCH_EXTENSIONS_DIR": "", "XDG_CACHE_HOME": str(tmp_path)}
    assert sandbox.run(f"{NO_TEMPORARY_FOLDER}{program}", places) == "False True False\nTrue"
    assert sandbox.run(ANSWER, places) == "42"
    assert sandbox.run(f"{NO_TEMPORARY_FOLDER}{ANSWER}", places) == "42"


# What lies elsewhere


@needs_root
def test_a_prebuilt_op_that_others_can_change_is_not_used(
    here: Sandbox, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ops = tmp_path / "ops"
    jit.prebuild(TinyBuilder().recipe(), ops / "tiny.so")
    monkeypatch.setattr(finished, "OPS", ops)
    for part, way in (("", "mode"), ("tiny.so", "owner")):
        assert TinyBuilder().is_installed()
        reason = spoil(ops / part, way).partition(" (")[0]
        assert not TinyBuilder().is_installed()
        with pytest.warns(UserWarning, match=rf"the prebuilt tiny op is not used \({reason}"):
            assert TinyBuilder().load_prebuilt() is None
        ops.chmod(0o755)


@needs_root
def test_what_the_compiler_said_is_not_believed_of_others(here: Sandbox) -> None:
    found = machine.find_compiler()
    assert found is not None
    jit.writable_root()
    directories = machine.include_directories(found)
    note = next(trust.roots()[0].glob("compiler-*.json"))
    note.write_text('{"include_directories": ["/planted"]}')
    assert machine.include_directories(found) == ["/planted"]
    os.chown(note, NOBODY, 0)
    assert machine.include_directories(found) == directories


def test_ninja_is_not_taken_from_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for planted in (tmp_path / "~" / ".local" / "bin" / "ninja", tmp_path / "ninja"):
        executable(planted)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sysconfig.get_path", lambda *_: "~/.local/bin")  # without HOME and password entry
    monkeypatch.setattr(sys, "executable", "")
    monkeypatch.setenv("PATH", "/nothing")
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    assert machine.ninja_directory() is None
