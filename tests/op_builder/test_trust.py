"""Loading an op runs it: what other users can put in its place is neither loaded nor built in."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from nvme_ops.op_builder import cache, jit, prebuilt, trust
from tests.conftest import NOBODY, give_up_root, in_child, open_to_all
from tests.op_builder.tiny_op import Sandbox, TinyBuilder, here, sandbox

CLONE_NEWUSER, PR_SET_DUMPABLE = 0x10000000, 4
ANSWER = "print(TinyBuilder().load().answer())"
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as two users")


def hand_over(path: Path, user: int = NOBODY) -> None:
    """Makes everything at ``path`` another user's."""
    for each in [path, *path.rglob("*")]:
        os.chown(each, user, user, follow_symlinks=False)


@pytest.fixture
def made(here: Sandbox) -> cache.CacheEntry:
    """The tiny op in the cache, built by this user and good."""
    entry = jit.build(TinyBuilder().recipe())
    assert cache.find(TinyBuilder().recipe()) == entry
    return entry


def refused(problem: str) -> None:
    """Fails unless the folder is refused, by each way to the op, with the reason and the fix."""
    builder = TinyBuilder()
    assert cache.roots() == []
    assert not builder.is_cached()
    assert not builder.is_compatible()
    assert problem in str(builder.error_log)
    for load in (builder.load, lambda: jit.build(builder.recipe())):
        with pytest.raises(RuntimeError) as caught:
            load()
        assert problem in str(caught.value)
        assert "set TORCH_EXTENSIONS_DIR to a folder that only you can write to" in str(caught.value)


# The folder


@needs_root
def test_an_op_planted_in_a_folder_open_to_all_is_not_loaded(here: Sandbox, tmp_path: Path) -> None:
    here.cache.mkdir()
    open_to_all(here.cache)
    planted = here.cache / "nvme_ops" / f"tiny-{TinyBuilder().recipe().key()}"
    (tmp_path / "workshop").mkdir()
    here.header.write_text("#define ANSWER 666\n")
    evil = jit.compile_into(tmp_path / "workshop", TinyBuilder().recipe())
    here.header.write_text("#define ANSWER 42\n")
    files = {path.name: path.read_bytes() for path in evil.parent.iterdir()}

    def plant() -> None:
        give_up_root()
        planted.mkdir(parents=True)
        for name, content in files.items():
            (planted / name).write_bytes(content)

    in_child(plant)
    done = here.end(ANSWER)
    output, errors = done.stdout, done.stderr
    assert (done.returncode, output) == (1, "")
    assert "RuntimeError: Unable to JIT load the tiny op due to it not being compatible due to hardware" in errors
    assert "ops are neither loaded from TORCH_EXTENSIONS_DIR nor built there, because others could change" in errors
    assert "nvme_ops belongs to the user nobody" in errors


@pytest.mark.parametrize("mode", [0o777, 0o757, 0o1777])
def test_a_folder_that_all_can_write_to_is_refused(here: Sandbox, made: cache.CacheEntry, mode: int) -> None:
    root = made.folder.parent
    root.chmod(mode)
    refused(f"{root} can be written by everybody (fix: chmod go-w '{root}')")
    subprocess.run(["chmod", "go-w", str(root)], check=True)
    assert TinyBuilder().is_cached()


@pytest.mark.parametrize("mode", [0o777, 0o757])
def test_a_folder_above_that_all_can_write_to_is_refused(here: Sandbox, made: cache.CacheEntry, mode: int) -> None:
    above = here.cache.parent
    above.chmod(mode)
    refused(f"{above} can be written by everybody (fix: chmod go-w '{above}')")
    above.chmod(0o1777)  # as /tmp: what others cannot rename is safe
    assert TinyBuilder().is_cached()


@needs_root
@pytest.mark.parametrize("depth", [0, 1, 2])
def test_a_folder_of_another_user_is_refused(here: Sandbox, made: cache.CacheEntry, depth: int) -> None:
    place = [made.folder.parent, *made.folder.parent.parents][depth]
    os.chown(place, NOBODY, 0)
    refused(f"{place} belongs to the user nobody")
    place.chmod(0o1755)  # its owner renames what it likes there all the same
    refused(f"{place} belongs to the user nobody")


@needs_root
def test_a_folder_of_root_is_trusted(here: Sandbox, made: cache.CacheEntry) -> None:
    open_to_all(here.cache.parent)
    here.cache.parent.chmod(0o755)

    def body() -> None:
        give_up_root()
        assert TinyBuilder().is_cached()

    in_child(body)


def test_a_link_is_followed_before_the_folder_is_checked(
    here: Sandbox, made: cache.CacheEntry, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    link = tmp_path / "link"
    link.symlink_to(here.cache)
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(link))
    assert cache.find(TinyBuilder().recipe()) == made
    made.folder.parent.chmod(0o777)
    refused(f"{made.folder.parent} can be written by everybody")


@needs_root
def test_a_link_that_another_user_could_turn_is_not_used_again(
    here: Sandbox, made: cache.CacheEntry, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    link = tmp_path / "open" / "link"
    link.symlink_to(here.cache)
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(link))
    found = cache.find(TinyBuilder().recipe())
    assert found is not None
    assert link.parent not in found.library.parents


GROUPS = {  # the members of the group, then who else has it as the primary one
    "private": ("", "", True),
    "lists its owner": ("tiny", "", True),
    "has another member": ("tiny,other", "", False),
    "is another's primary group": ("", "third:x:4323:4321::/:", False),
}


@needs_root
@pytest.mark.parametrize(("members", "user", "trusted"), GROUPS.values(), ids=GROUPS)
def test_the_users_own_group_counts_as_the_user(members: str, user: str, trusted: bool, tmp_path: Path) -> None:
    """With real user and group files, which a mount namespace of its own gives to one program."""
    (tmp_path / "passwd").write_text(f"root:x:0:0::/:\ntiny:x:4321:4321::/:\nother:x:4322:4322::/:\n{user}\n")
    (tmp_path / "group").write_text(f"root:x:0:\ntiny:x:4321:{members}\nother:x:4322:\n")
    (tmp_path / "nsswitch.conf").write_text("passwd: files\ngroup: files\n")
    own = tmp_path / "own"
    own.mkdir()
    os.chown(own, 4321, 4321)
    own.chmod(0o775)
    open_to_all(tmp_path)
    tmp_path.chmod(0o755)
    program = (
        "import os, sys; from pathlib import Path; from nvme_ops.op_builder import trust; os.setuid(4321);"
        "print(trust.why_not(Path(sys.argv[1])))"
    )
    mounts = "".join(f"mount --bind {tmp_path}/{name} /etc/{name} && " for name in ("passwd", "group", "nsswitch.conf"))
    words = f'{mounts} exec "$@"'
    command = ["unshare", "-m", "sh", "-c", words, "sh", sys.executable, "-c", program, str(own)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if "unshare:" in result.stderr or "mount:" in result.stderr:
        pytest.skip(f"no mount namespace: {result.stderr.strip()}")
    assert result.returncode == 0, result.stderr
    refusal = f"{own} can be written by the group tiny (fix: chmod go-w '{own}')"
    assert result.stdout.strip() == ("" if trusted else refusal)


@needs_root
def test_a_directory_that_lists_no_users_has_private_groups_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As LDAP is set up in most places: a user is found, but not among all users."""
    monkeypatch.setattr("pwd.getpwall", list)
    tmp_path.chmod(0o775)
    assert trust.why_not(tmp_path) == ""
    os.chown(tmp_path, 0, NOBODY)
    assert "can be written by the group" in trust.why_not(tmp_path)


def test_a_group_with_others_is_not_trusted(here: Sandbox, made: cache.CacheEntry) -> None:
    root = made.folder.parent
    os.chown(root, -1, os.getegid() if os.geteuid() else NOBODY)
    root.chmod(0o775)
    if trust.why_not(root):
        refused(f"{root} can be written by the group ")
    else:
        assert os.geteuid() != 0, "nobody's group is not root's own"


@needs_root
def test_in_a_rootless_container_the_folders_above_are_of_nobody(here: Sandbox, made: cache.CacheEntry) -> None:
    """Where root has no number, / seems to belong to the overflow user, as in Apptainer."""
    user = 4321
    hand_over(here.cache, user)
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
        assert cache.roots() == [made.folder.parent]
        assert TinyBuilder().is_cached()
        assert trust.why_not(Path("/")) == "/ belongs to the user nobody"  # trusted above others only

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


@needs_root
@pytest.mark.parametrize("way", ["owner", "mode"])
def test_a_home_that_others_can_write_to_is_left_alone(by_default: Path, way: str) -> None:
    recipe = TinyBuilder().recipe()
    planted = jit.build(recipe)
    assert planted.folder.is_relative_to(by_default)
    os.chown(by_default, NOBODY if way == "owner" else 0, 0)
    by_default.chmod(0o755 if way == "owner" else 0o777)
    reason = "belongs to the user nobody" if way == "owner" else "can be written by everybody"
    assert cache.find(recipe) is None
    with pytest.warns(UserWarning, match=rf"compiled ops are kept in .*/torch_extensions_0/.*because: .*home {reason}"):
        entry = jit.build(recipe)
    assert entry.folder.is_relative_to(by_default.parent / "tmp")
    assert cache.find(recipe) == entry


def test_a_relative_cache_home_is_ignored(by_default: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    recipe = TinyBuilder().recipe()
    planted = tmp_path / "cwd" / "relative" / "torch_extensions"
    planted.parent.mkdir(parents=True)
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(planted))
    jit.build(recipe)
    monkeypatch.delenv("TORCH_EXTENSIONS_DIR")
    monkeypatch.chdir(tmp_path / "cwd")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert cache.find(recipe) is None
    assert cache.default_root() == by_default / ".cache" / "torch_extensions" / "nvme_ops"


@needs_root
def test_without_a_home_nothing_is_taken_from_the_current_folder(by_default: Path, tmp_path: Path) -> None:
    recipe = TinyBuilder().recipe()
    planted = tmp_path / "cwd" / "~"
    shutil.copytree(jit.build(recipe).folder, planted / ".cache/torch_extensions/nvme_ops" / f"tiny-{recipe.key()}")
    (tmp_path / "cwd").chmod(0o777)
    (tmp_path / "tmp").chmod(0o1777)

    def body() -> None:
        os.setgroups([])
        os.setgid(54321)
        os.setuid(54321)  # not in the password file
        del os.environ["HOME"]
        os.chdir(tmp_path / "cwd")
        assert cache.find(recipe) is None
        assert cache.roots() == []
        with pytest.warns(UserWarning, match="because: ~/.* is not an absolute path"):
            assert cache.writable_root() == tmp_path / "tmp" / "torch_extensions_54321" / "nvme_ops"

    in_child(body)


# The entry


@needs_root
@pytest.mark.parametrize("ninja", [True, False])
def test_a_filled_cache_that_is_not_loaded_is_told_of(
    here: Sandbox, made: cache.CacheEntry, monkeypatch: pytest.MonkeyPatch, ninja: bool
) -> None:
    """Where nothing can be built, as in an image with a cache that another user filled."""
    os.chown(made.library, NOBODY, 0)
    if ninja:
        monkeypatch.setenv("CXX", "no-such-compiler")
    else:
        monkeypatch.setattr("nvme_ops.op_builder.machine.ninja_directory", lambda: None)
    words = "no C.. compiler was found" if ninja else "due to ninja not being installed"
    reason = f"What {here.cache}/nvme_ops may hold of it is not loaded, because others could have changed it: .*nobody"
    with pytest.raises(RuntimeError, match=f"{words}.*{reason}"):
        TinyBuilder().load()


@needs_root
@pytest.mark.parametrize("part", ["", "tiny.so", cache.RECORD])
@pytest.mark.parametrize("way", ["owner", "mode"])
def test_an_entry_that_others_made_is_built_anew(here: Sandbox, made: cache.CacheEntry, part: str, way: str) -> None:
    path = made.folder / part
    os.chown(path, NOBODY if way == "owner" else 0, 0)
    path.chmod(0o755 if way == "owner" else 0o666)
    assert cache.find(TinyBuilder().recipe()) is None
    with pytest.warns(UserWarning, match=r"the cached tiny op is built anew, because others could have changed it: "):
        entry = jit.build(TinyBuilder().recipe())
    assert entry == cache.find(TinyBuilder().recipe())
    assert here.compilations() == 2
    assert (entry.library.stat().st_uid, stat.S_IMODE(entry.library.stat().st_mode) & 0o022) == (0, 0)


@needs_root
def test_a_linked_library_is_checked_where_it_lies(here: Sandbox, made: cache.CacheEntry, tmp_path: Path) -> None:
    there = tmp_path / "elsewhere.so"
    shutil.move(made.library, there)
    made.library.symlink_to(there)
    assert cache.find(TinyBuilder().recipe()) == made
    os.chown(there, NOBODY, 0)
    assert cache.find(TinyBuilder().recipe()) is None


def test_without_a_umask_what_is_built_is_nobody_elses(here: Sandbox) -> None:
    old = os.umask(0)
    try:
        entry = jit.build(TinyBuilder().recipe())
    finally:
        os.umask(old)
    assert cache.find(TinyBuilder().recipe()) == entry
    for path in (here.cache, here.cache / "nvme_ops", entry.folder, *entry.folder.iterdir()):
        assert stat.S_IMODE(path.stat().st_mode) & 0o022 == 0, path


# Lock and log


@needs_root
@pytest.mark.parametrize("kind", ["file", "link", "folder", "fifo"])
def test_a_lock_of_another_user_is_replaced(here: Sandbox, kind: str) -> None:
    entry = cache.CacheEntry(cache.writable_root() / f"tiny-{TinyBuilder().recipe().key()}", "tiny")
    lock, victim = entry.folder.with_suffix(".lock"), here.cache / "victim"
    victim.write_text("precious")
    if kind == "link":
        lock.symlink_to(victim)
    elif kind == "folder":
        (lock / "full").mkdir(parents=True)
    elif kind == "fifo":
        os.mkfifo(lock)
    else:
        lock.touch()
    os.chown(lock, NOBODY, NOBODY, follow_symlinks=False)
    with contextlib.ExitStack() as stack:
        if kind == "file":
            holder = stack.enter_context(lock.open())
            fcntl.flock(holder, fcntl.LOCK_EX)  # for ever
        assert jit.build(TinyBuilder().recipe()).record() is not None
    facts = lock.lstat()
    assert (stat.S_ISREG(facts.st_mode), facts.st_uid, stat.S_IMODE(facts.st_mode)) == (True, 0, 0o600)
    assert victim.read_text() == "precious"


def test_nobody_else_can_take_the_lock(here: Sandbox, made: cache.CacheEntry) -> None:
    assert stat.S_IMODE(made.folder.with_suffix(".lock").stat().st_mode) == 0o600


def test_the_log_does_not_go_through_a_link(here: Sandbox) -> None:
    here.source.write_text("nonsense")
    recipe, victim = TinyBuilder().recipe(), here.cache / "victim"
    log = cache.CacheEntry(cache.writable_root() / f"tiny-{recipe.key()}", "tiny").log
    victim.write_text("precious")
    log.symlink_to(victim)
    with pytest.raises(RuntimeError, match=f"nonsense(.|\n)*All output: {log}"):
        jit.build(recipe)
    assert victim.read_text() == "precious"
    assert "nonsense" in log.read_text()
    assert not log.is_symlink()


def test_the_log_of_an_install_has_a_name_that_nobody_can_guess(
    here: Sandbox, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    here.source.write_text("nonsense")
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (tmp_path / "nvme_ops_tiny_build.log").symlink_to(victim)
    with pytest.raises(RuntimeError, match="nonsense") as caught:
        prebuilt.build(TinyBuilder().recipe(), tmp_path / "tiny.so")
    assert victim.read_text() == "precious"
    assert "nonsense" in Path(str(caught.value).rpartition("All output: ")[2]).read_text()


# Nowhere to write


NO_TEMPORARY_FOLDER = """
import resource, tempfile
resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
tempfile.tempdir = None  # another package may have asked for it already
try: tempfile.gettempdir()
except FileNotFoundError: pass
else: raise SystemExit("there is one")
"""


def test_a_cached_op_needs_no_temporary_folder(sandbox: Sandbox, tmp_path: Path) -> None:
    places = {"TORCH_EXTENSIONS_DIR": "", "XDG_CACHE_HOME": str(tmp_path)}
    assert sandbox.run(ANSWER, places) == "42"
    assert sandbox.run(f"{NO_TEMPORARY_FOLDER}{ANSWER}", places) == "42"


def test_without_a_temporary_folder_the_probes_say_so(sandbox: Sandbox, tmp_path: Path) -> None:
    program = """
builder = TinyBuilder()
print(builder.is_compatible(), "No usable temporary directory" in builder.error_log, builder.has_function("f", ["c"]))
try: builder.load()
except RuntimeError as error: print("No usable temporary directory" in str(error))
"""
    places = {"TORCH_EXTENSIONS_DIR": "", "XDG_CACHE_HOME": str(tmp_path)}
    assert sandbox.run(f"{NO_TEMPORARY_FOLDER}{program}", places) == "False True False\nTrue"


# What lies elsewhere


@needs_root
@pytest.mark.parametrize("part", ["", "tiny.so", "tiny.build.json"])
@pytest.mark.parametrize("way", ["owner", "mode"])
def test_a_prebuilt_op_that_others_can_change_is_not_used(
    here: Sandbox, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, part: str, way: str
) -> None:
    ops = tmp_path / "ops"
    prebuilt.build(TinyBuilder().recipe(), ops / "tiny.so")
    monkeypatch.setattr(prebuilt, "OPS", ops)
    assert TinyBuilder().is_installed()
    os.chown(ops / part, NOBODY if way == "owner" else 0, 0)
    (ops / part).chmod(0o755 if way == "owner" else 0o777)
    assert not TinyBuilder().is_installed()
    reason = f"{ops / part} belongs to another user" if way == "owner" else f"{ops / part} can be written by everybody"
    with pytest.warns(UserWarning, match=rf"the prebuilt tiny op is not used \({reason}"):
        assert TinyBuilder().load_prebuilt() is None


@needs_root
def test_what_the_compiler_said_is_not_believed_of_others(here: Sandbox) -> None:
    from nvme_ops.op_builder import machine

    found = machine.find_compiler()
    assert found is not None
    cache.writable_root()
    directories = machine.include_directories(found, cache.roots())
    note = next(cache.roots()[0].glob("compiler-*.json"))
    note.write_text('{"include_directories": ["/planted"]}')
    assert machine.include_directories(found, cache.roots()) == ["/planted"]
    os.chown(note, NOBODY, 0)
    assert machine.include_directories(found, cache.roots()) == directories


def test_ninja_is_not_taken_from_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from nvme_ops.op_builder import machine

    ninja = tmp_path / "~" / ".local" / "bin" / "ninja"
    ninja.parent.mkdir(parents=True)
    for planted in (ninja, tmp_path / "ninja"):
        planted.write_text("#!/bin/sh\n")
        planted.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sysconfig.get_path", lambda *_: "~/.local/bin")  # without HOME and password entry
    monkeypatch.setattr(sys, "executable", "")
    monkeypatch.setenv("PATH", "/nothing")
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    assert machine.ninja_directory() is None
