"""Loading an op runs it: what other users can put in its place is neither loaded nor built in."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import re
import shutil
import stat
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from nvme_ops.op_builder import finished, jit, machine, trust
from tests.conftest import NOBODY, in_child, open_to_all, with_mounts
from tests.made_up import executable
from tests.op_builder.tiny_op import ANSWER, Sandbox, TinyBuilder, here, once, sandbox, workshop

CLONE_NEWUSER, PR_SET_DUMPABLE = 0x10000000, 4
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as two users")


class Scene(NamedTuple):
    """The tiny op in the cache, built by this user and good, and where to put more."""

    here: Sandbox
    made: finished.CacheEntry
    patch: pytest.MonkeyPatch
    folder: Path


@pytest.fixture
def scene(here: Sandbox, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Scene:
    once(here, lambda: jit.build(TinyBuilder().recipe()))
    entry = finished.find_cached(TinyBuilder().recipe())
    assert entry is not None
    return Scene(here, entry, monkeypatch, tmp_path)


def found_as() -> str:
    built = TinyBuilder().find_built()
    return built.how if built is not None else ""


# What others get at: each returns the path


def through_a_link(scene: Scene) -> Path:
    """The cache, named by a link that others could turn: it is followed once, before the folder is checked."""
    link = scene.folder / "open" / "link"
    link.parent.mkdir()
    link.parent.chmod(0o777)
    link.symlink_to(scene.here.cache)
    scene.patch.setenv("TORCH_EXTENSIONS_DIR", str(link))
    assert finished.find_cached(TinyBuilder().recipe()) == scene.made
    return scene.made.folder.parent


def home(scene: Scene) -> Path:
    """The home folder, in which ops are kept without TORCH_EXTENSIONS_DIR; temporary folders are private."""
    for name in ("TORCH_EXTENSIONS_DIR", "XDG_CACHE_HOME"):
        scene.patch.delenv(name, raising=False)
    open_to_all(scene.folder)
    scene.folder.chmod(0o755)
    for name in ("home", "tmp"):
        (scene.folder / name).mkdir()
    scene.patch.setenv("HOME", str(scene.folder / "home"))
    scene.patch.setattr("tempfile.tempdir", str(scene.folder / "tmp"))
    assert jit.build(TinyBuilder().recipe()).folder.is_relative_to(scene.folder / "home")
    return scene.folder / "home"


def library_behind_a_link(scene: Scene) -> Path:
    elsewhere = scene.folder / "elsewhere.so"
    shutil.move(scene.made.library, elsewhere)
    scene.made.library.symlink_to(elsewhere)
    assert finished.find_cached(TinyBuilder().recipe()) == scene.made
    return elsewhere


def prebuilt(scene: Scene) -> Path:
    jit.prebuild(TinyBuilder().recipe(), scene.folder / "ops" / "tiny.so")
    scene.patch.setattr(finished, "OPS", scene.folder / "ops")
    assert found_as() == "prebuilt"
    return scene.folder / "ops"


OWNER = -1  # in place of a mode: it belongs to somebody else
TRUSTED = ""
REFUSED = "set TORCH_EXTENSIONS_DIR to a folder that only you can write to"
ANEW = "the cached tiny op is built anew, because others could have changed it: "
ELSEWHERE = "compiled ops are kept in .*/tmp/torch_extensions_.*because: "
NOT_USED = r"the prebuilt tiny op is not used \("
#: What others can change, by which mode or as its owner, and the words of what becomes of it.
SPOILED: dict[str, tuple[Callable[[Scene], Path], int, str]] = {
    "the cache, sticky": (lambda scene: scene.made.folder.parent, 0o1777, REFUSED),
    "the cache, through a link": (through_a_link, 0o777, REFUSED),
    "the folder above": (lambda scene: scene.made.folder.parents[1], 0o757, REFUSED),
    "the folder above, sticky as /tmp": (lambda scene: scene.made.folder.parents[1], 0o1777, TRUSTED),
    "the owner of a folder far above": (lambda scene: scene.made.folder.parents[2], OWNER, REFUSED),
    "the home folder": (home, 0o777, ELSEWHERE),
    "the entry": (lambda scene: scene.made.folder, 0o777, ANEW),
    "the owner of its record": (lambda scene: scene.made.folder / finished.RECORD, OWNER, ANEW),
    "the owner of its library": (library_behind_a_link, OWNER, ANEW),
    "prebuilt ops": (prebuilt, 0o777, NOT_USED),
    "the owner of a prebuilt op": (lambda scene: prebuilt(scene) / "tiny.so", OWNER, NOT_USED),
}


@needs_root
@pytest.mark.parametrize(("place", "mode", "words"), SPOILED.values(), ids=SPOILED)
def test_what_others_can_change_is_not_loaded(
    place: Callable[[Scene], Path], mode: int, words: str, scene: Scene
) -> None:
    path, builder = place(scene), TinyBuilder()
    reason = f"{path} can be written by everybody (fix: chmod go-w '{path}')"
    if mode == OWNER:
        os.chown(path, NOBODY, 0)
        reason = f"{path} belongs to "
    else:
        path.chmod(mode)
    assert found_as() == ("cached" if words in (TRUSTED, NOT_USED) else "")
    if not found_as():
        with scene.patch.context() as changed:
            changed.setenv("CXX", "no-such-compiler")
            assert not builder.is_compatible()
            assert reason in str(builder.error_log)
    if words == REFUSED:
        for load in (builder.load, lambda: jit.build(builder.recipe())):
            with pytest.raises(RuntimeError, match=f"{re.escape(reason)}.*{words}"):
                load()
    elif words:
        with pytest.warns(UserWarning, match=words + re.escape(reason)):
            builder.load_prebuilt() if words == NOT_USED else jit.build(builder.recipe())
        assert found_as() == "cached"


@needs_root
def test_what_others_say_of_the_compiler_is_not_believed(scene: Scene) -> None:
    compiler = machine.find_compiler()
    assert compiler is not None
    machine.include_directories(compiler)
    note = next(trust.roots()[0].glob("compiler-*.json"))
    note.write_text('{"include_directories": ["/planted"]}')
    assert machine.include_directories(compiler) == ["/planted"]
    os.chown(note, NOBODY, 0)
    assert "/planted" not in machine.include_directories(compiler)


# Who is another


GROUPS = {  # the members of the group, who else has it as the primary one, its name, and what is not listed
    "lists its owner": ("tiny", "", "tiny", "", True),
    "has another member": ("tiny,other", "", "tiny", "", False),
    "is another's primary group": ("", "third:x:4323:4321::/:", "tiny", "", False),
    "of a directory that lists no users": ("", "", "tiny", "pwd.getpwall = list;", True),  # LDAP, in most places
    "of another name there": ("", "", "users", "pwd.getpwall = list;", False),
}


@needs_root
@pytest.mark.parametrize(("members", "user", "name", "first", "is_own"), GROUPS.values(), ids=GROUPS)
def test_the_users_own_group_counts_as_the_user(
    members: str, user: str, name: str, first: str, is_own: bool, tmp_path: Path
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
    mounts = " && ".join(f"mount --bind {tmp_path}/{file} /etc/{file}" for file in ("passwd", "group", "nsswitch.conf"))
    refusal = f"{own} can be written by the group {name} (fix: chmod go-w '{own}')"
    assert with_mounts(mounts, sys.executable, "-c", program, own).strip() == ("" if is_own else refusal)


@needs_root
def test_in_a_rootless_container_the_folders_above_are_of_nobody(scene: Scene) -> None:
    """Where root has no number, / seems to belong to the overflow user, as in Apptainer."""
    user, cache = 4321, scene.here.cache
    for path in [cache, *cache.rglob("*")]:
        os.chown(path, user, user, follow_symlinks=False)
    open_to_all(cache.parent)
    cache.parent.chmod(0o755)

    def body() -> None:
        os.setgid(user)
        os.setuid(user)
        libc = ctypes.CDLL(None)
        libc.prctl(PR_SET_DUMPABLE, 1)  # else /proc/self is root's
        if libc.unshare(CLONE_NEWUSER) or not os.access(__file__, os.R_OK):
            os._exit(0)  # not permitted here, or in a clone that nobody else can read
        Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
        assert (os.geteuid(), os.stat("/").st_uid) == (user, NOBODY)
        assert trust.roots() == [scene.made.folder.parent]
        assert found_as() == "cached"
        assert trust.why_not_trusted(Path("/")) == "/ belongs to the user nobody"  # trusted above others only

    in_child(body)


# What is looked for, and what is written


@needs_root
def test_nothing_is_taken_from_the_current_folder(scene: Scene) -> None:
    recipe, current, tmp = TinyBuilder().recipe(), scene.folder / "cwd", scene.folder / "tmp"
    root = home(scene) / ".cache" / "torch_extensions" / "nvme_ops"
    for place in ("relative", "~/.cache"):
        shutil.copytree(root, current / place / "torch_extensions/nvme_ops")
    shutil.rmtree(root)
    scene.patch.chdir(current)
    scene.patch.setenv("XDG_CACHE_HOME", "relative")
    assert finished.find_cached(recipe) is None
    assert trust.default_root() == root
    current.chmod(0o777)
    tmp.chmod(0o1777)

    def without_a_home() -> None:
        os.setgroups([])
        os.setgid(54321)
        os.setuid(54321)  # not in the password file
        del os.environ["HOME"], os.environ["XDG_CACHE_HOME"]
        assert finished.find_cached(recipe) is None
        assert trust.roots() == []
        with pytest.warns(UserWarning, match="because: ~/.* is not an absolute path"):
            assert jit.writable_root() == tmp / "torch_extensions_54321" / "nvme_ops"

    in_child(without_a_home)


def test_without_a_umask_others_may_read_what_is_built_and_no_more(here: Sandbox) -> None:
    old = os.umask(0)
    try:
        entry = jit.build(TinyBuilder().recipe())
    finally:
        os.umask(old)
    assert finished.find_cached(TinyBuilder().recipe()) == entry
    for path in (here.cache, here.cache / "nvme_ops", entry.folder, *entry.folder.iterdir()):
        assert stat.S_IMODE(path.stat().st_mode) & 0o022 == 0, path
    assert stat.S_IMODE(entry.folder.stat().st_mode) == 0o755


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


NO_TEMPORARY_FOLDER = """
import resource, tempfile
resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
tempfile.tempdir = None  # another package may have asked for it already
"""


def test_a_cached_op_needs_no_temporary_folder_and_probes_miss_it(sandbox: Sandbox, tmp_path: Path) -> None:
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


def test_ninja_is_not_taken_from_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for planted in (tmp_path / "~" / ".local" / "bin" / "ninja", tmp_path / "ninja"):
        executable(planted)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sysconfig.get_path", lambda *_: "~/.local/bin")  # without HOME and password entry
    monkeypatch.setattr(sys, "executable", "")
    monkeypatch.setenv("PATH", "/nothing")
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    assert machine.ninja_directory() is None
