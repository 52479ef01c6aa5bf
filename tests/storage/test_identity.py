"""A device is known by its hardware, file system and kernel, whatever the path; on real folders and a made-up sysfs."""

from __future__ import annotations

import fcntl
import os
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nvme_ops.filesystem import device
from nvme_ops.filesystem.device import Identity, identify, nearest
from nvme_ops.op_builder.machine import Host
from tests.conftest import LoopDevice


def known(path: str | Path, way: str = "cpu", backend: str = "io_uring", host: Host | None = None) -> Identity:
    return identify(path, way, backend, host)


class MadeUpHost:
    """A sysfs and a mountinfo under ``root`` in which ``folder`` lies on the devices that are added."""

    def __init__(self, root: Path, folder: Path) -> None:
        self.root, self.folder = root, folder
        self.mount("ext4", "/dev/anything")
        (root / "sys/block").mkdir(parents=True)

    def mount(self, kind: str, source: str, options: str = "rw") -> Host:
        (self.root / "proc/self").mkdir(parents=True, exist_ok=True)
        line = f"36 35 0:99 / {self.folder} rw - {kind} {source} {options}\n"
        (self.root / "proc/self/mountinfo").write_text(line)
        return Host(self.root)

    def disk(self, name: str, number: int | None = None, **files: str) -> Host:
        """A disk, under the folder's device number or another one; a double underscore in a name means a slash."""
        device = self.root / "sys/devices/pci0000:00" / name
        for file, text in files.items():
            path = device / file.replace("__", "/")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text + "\n")
        (self.root / "sys/block" / name).symlink_to(device)
        number = os.stat(self.folder).st_dev if number is None else number
        link = self.root / f"sys/dev/block/{os.major(number)}:{os.minor(number)}"
        link.parent.mkdir(parents=True, exist_ok=True)
        link.unlink(missing_ok=True)
        link.symlink_to(device)
        return Host(self.root)


@pytest.fixture
def made_up(tmp_path: Path) -> MadeUpHost:
    (tmp_path / "folder").mkdir()
    return MadeUpHost(tmp_path / "host", tmp_path / "folder")


def test_folders_and_files_of_one_file_system_are_one_device(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to("/dev/shm")
    here = known(tmp_path)
    for path in ("one", "file", "not there yet"):
        assert (known(tmp_path / path), known(tmp_path / path).key) == (here, here.key)
    assert known(tmp_path / "link") == known("/dev/shm")
    assert nearest(tmp_path / "a" / "b") == str(tmp_path)
    with pytest.raises(FileNotFoundError, match="mounted") as raised:  # what was found for another one would be used
        known(tmp_path / "not" / "there" / "yet")
    assert raised.value.filename == str(tmp_path / "not")


def test_memory_needs_no_disk_and_no_number() -> None:
    identity = known("/dev/shm")
    if identity.file_system != "tmpfs":
        pytest.skip("/dev/shm is no tmpfs here")
    assert (identity.disks, identity.file_system_id) == ((), "")
    assert identity.words() == "tmpfs on memory"


def test_way_backend_kernel_processors_and_gpu_tell_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    identities = [
        known(tmp_path),
        known(tmp_path, way="gpu"),
        known(tmp_path, way="gds"),
        known(tmp_path, backend="threads"),
    ]
    monkeypatch.setattr(device, "_gpu", lambda: "made-up GPU")
    assert known(tmp_path) == identities[0], "its own memory is not the GPU's"
    identities.append(known(tmp_path, way="gpu"))
    monkeypatch.setattr(os, "uname", lambda: SimpleNamespace(release="99.0"))
    identities.append(known(tmp_path))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(99)))
    identities.append(known(tmp_path))
    identities.append(replace(identities[0], file_system_id="other"))
    keys = {identity.key for identity in identities}
    assert len(keys) == len(identities)
    assert all(key.isalnum() for key in keys)


def test_a_disk_is_known_by_the_best_of_its_names(made_up: MadeUpHost) -> None:
    samsung = {"wwid": "eui.0025", "size": "1953525168", "device__model": "Samsung SSD", "device__serial": "S1"}
    rows: tuple[tuple[str, dict[str, Any], str], ...] = (
        ("nvme0n1", samsung, "nvme Samsung SSD eui.0025 931.5 GiB"),
        ("nvme3n1", {"wwid": "eui.1", "device__transport": "tcp"}, "network eui.1 0 B"),
        ("sda", {"device__serial": "disk-7", "size": "2048", "queue__rotational": "1"}, "rotational disk-7 1 MiB"),
        ("sdb", {"size": "2048"}, "ssd sdb 1 MiB"),
    )
    for name, files, words in rows:
        assert known(made_up.folder, host=made_up.disk(name, **files)).disks == (words,)


def test_other_file_systems_are_known_by_server_source_or_uuid(
    made_up: MadeUpHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    identity = known(made_up.folder, host=made_up.mount("nfs4", "server:/export"))
    assert (identity.disks, identity.file_system, identity.file_system_id) == ((), "nfs4", "server:/export")
    assert identity.key != known(made_up.folder, host=made_up.mount("nfs4", "server:/another")).key
    made_up.disk("sda", os.stat("/dev/null").st_rdev, device__wwid="naa.5", size="2048")
    btrfs = known(made_up.folder, host=made_up.mount("btrfs", "/dev/null"))  # a number that sysfs does not have
    assert btrfs.disks[0].startswith("ssd naa.5")

    def answer(_: int, request: int, into: bytearray) -> None:
        into[:] = bytes([16, *range(1, 17)])

    monkeypatch.setattr(fcntl, "ioctl", answer)
    assert known(made_up.folder, host=made_up.mount("xfs", "/dev/sda")).file_system_id == bytes(range(1, 17)).hex()
    nothing = known(made_up.folder, host=Host(made_up.root / "empty"))  # of proc and sys
    assert (nothing.disks, nothing.file_system) == ((), "unknown")


def test_an_overlay_is_followed_to_where_it_is_written_if_that_is_in_sight(made_up: MadeUpHost) -> None:
    host = made_up.mount("overlay", "overlay", "rw,upperdir=/no/such/folder")
    assert known(made_up.folder, host=host).disks == ()
    made_up.disk("nvme0n1", os.stat("/dev/shm").st_dev, wwid="eui.2", size="2048")
    host = made_up.mount("overlay", "overlay", "rw,lowerdir=/a,upperdir=/dev/shm,workdir=/b")
    assert known(made_up.folder, host=host).disks[0].startswith("nvme eui.2")


def test_a_file_system_keeps_its_identity_wherever_it_is_mounted(
    make_file_system: Callable[..., Path], tmp_path: Path
) -> None:
    first, second = make_file_system(16 << 20), make_file_system(16 << 20)
    before = known(first)
    assert before.disks == known(second).disks
    assert before.key != known(second).key
    (elsewhere := tmp_path / "elsewhere").mkdir()
    subprocess.run(["mount", "--bind", str(first), str(elsewhere)], check=True)
    try:
        assert known(elsewhere) == before
    finally:
        subprocess.run(["umount", str(elsewhere)], check=True)
    assert before.file_system == "ext4"
    assert before.file_system_id


def test_a_block_device_is_known_without_a_file_system(make_device: Callable[..., LoopDevice]) -> None:
    identity = known(make_device(1 << 20).path)
    assert (identity.file_system, identity.file_system_id) == ("none", "")
    assert identity.disks
