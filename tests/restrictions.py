"""What a process gives up, for itself and its children: system calls, mounts, rights, limits. Imports nothing slow."""

from __future__ import annotations

import ctypes
import os
import resource
import shutil
import struct
import subprocess
import sys
from pathlib import Path

NOBODY = 65534
IO_SETUP, IO_SUBMIT, IO_URING_SETUP, IO_URING_ENTER = 206, 209, 425, 426  # x86_64's numbers
NOT_HERE = 77  # the exit status of a process that cannot do this to itself
PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS, SECCOMP_MODE_FILTER = 22, 38, 2
_CLONE_NEWNS, _MS_REC, _MS_PRIVATE = 0x00020000, 1 << 14, 1 << 18


def forbid(system_call: int, error: int) -> bool:
    """Installs a seccomp filter: this system call fails with this error from now on. False where that is forbidden."""
    load_number, if_equal, finish = 0x20, 0x15, 0x06
    give_error, allow = 0x00050000 | error, 0x7FFF0000
    rules = [(load_number, 0, 0, 0), (if_equal, 0, 1, system_call), (finish, 0, 0, give_error), (finish, 0, 0, allow)]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *rule) for rule in rules))
    program = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(rules), ctypes.addressof(code)))
    library = ctypes.CDLL(None)
    if library.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0:
        return False
    return bool(library.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, program, 0, 0) == 0)


def refuse(system_call: int, error: int) -> None:
    """Does what ``forbid`` does with a number of x86_64, and ends the process where it cannot."""
    if os.uname().machine != "x86_64" or not forbid(system_call, error):
        sys.exit(NOT_HERE)


def mount(*words: str) -> None:
    """Mounts, in a namespace that ends with the process; ends the process where that is forbidden."""
    library = ctypes.CDLL(None)
    if library.unshare(_CLONE_NEWNS) or library.mount(b"none", b"/", None, _MS_REC | _MS_PRIVATE, None):
        sys.exit(NOT_HERE)
    program = shutil.which("mount", path="/usr/bin:/bin:/usr/sbin:/sbin")
    if program is None or subprocess.run([program, *words], stderr=subprocess.DEVNULL).returncode:
        sys.exit(NOT_HERE)


def memory(path: str, options: str = "mode=755") -> Path:
    """Mounts a file system in memory at ``path``."""
    mount("-t", "tmpfs", "-o", options, "none", path)
    return Path(path)


def read_only(path: str) -> None:
    """Makes what is at ``path`` read-only."""
    mount("--bind", path, path)
    mount("-o", "remount,bind,ro", path)


def noexec(path: str) -> None:
    """Mounts what is at ``path`` noexec."""
    mount("--bind", path, path)
    mount("-o", "remount,bind,noexec", path)


def become_nobody() -> None:
    """Gives up root, and with it every capability. Ends the process where it is not root, or the package is private."""
    if os.geteuid() != 0:
        sys.exit(NOT_HERE)
    os.setgroups([])
    os.setgid(NOBODY)
    os.setuid(NOBODY)
    if not os.access(__file__, os.R_OK):  # as in a clone below a folder of mktemp
        sys.exit(NOT_HERE)


def descriptors(count: int) -> None:
    """Leaves so many descriptors for files."""
    highest = max(map(int, os.listdir("/proc/self/fd")))
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + count, highest + count))


def address_space(count: int) -> None:
    """Leaves so many bytes of addresses, and nothing of what the process had and freed, which would serve as well."""

    def limit(beyond: int) -> None:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + beyond, resource.RLIM_INFINITY))

    limit(0)
    malloc = ctypes.CDLL(None).malloc
    malloc.restype = ctypes.c_void_p
    while malloc(ctypes.c_size_t(1 << 20)):
        pass
    limit(count)
