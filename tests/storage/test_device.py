"""What lies under a path, and the identity made of it: on real folders, and in a sysfs of hardware that is not here."""

from __future__ import annotations

import fcntl
import os
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from nvme_ops.filesystem import device
from nvme_ops.filesystem.device import Identity, devices, identify, logical_block, mount_of, nearest
from nvme_ops.op_builder.machine import Host
from tests.conftest import LoopDevice
from tests.made_up import put


def known(path: str | Path, way: str = "cpu", backend: str = "io_uring", host: Host | None = None) -> Identity:
    return identify(path, way, backend, host)


class MadeUp:
    """A sysfs and a mountinfo under ``root`` in which ``folder`` lies on the devices that are added."""

    def __init__(self, root: Path) -> None:
        self.root, self.folder, self.host = root, root / "folder", Host(root)
        self.folder.mkdir()
        (root / "sys/block").mkdir(parents=True)
        self.mount("ext4", "/dev/anything")

    def mount(self, kind: str, source: str, options: str = "rw") -> None:
        put(self.root, {"proc/self/mountinfo": f"36 35 0:99 / {self.folder} rw - {kind} {source} {options}\n"})

    def disk(self, place: str, number: int | None = None, /, **files: str) -> Path:
        """A disk, the folder's own or of another number; two underscores in the name of a file mean a slash."""
        folder = self.root / "sys/devices" / place
        folder.mkdir(parents=True)
        put(folder, {name.replace("__", "/"): f"{text}\n" for name, text in files.items()})
        (self.root / "sys/block" / folder.name).symlink_to(folder)
        self.register(folder, number)
        return folder

    def register(self, folder: Path, number: int | None) -> None:
        number = os.stat(self.folder).st_dev if number is None else number
        link = self.root / f"sys/dev/block/{os.major(number)}:{os.minor(number)}"
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(folder)

    def known(self) -> Identity:
        return known(self.folder, host=self.host)


@pytest.fixture
def made_up(tmp_path: Path) -> MadeUp:
    return MadeUp(tmp_path)


# Disks, stacks of them, and mounts


@pytest.mark.parametrize(
    ("place", "files", "words"),
    [
        ("pci0/nvme/nvme0/nvme0n1", {"wwid": "eui.25", "size": "1953525168", "device__model": "Samsung  SSD",
            "device__serial": "S1", "device__transport": "pcie"}, "nvme Samsung SSD eui.25 931.5 GiB"),
        ("virtual/nvme-fabrics/ctl/nvme1/nvme1n1", {"wwid": "eui.1", "device__transport": "tcp"}, "network eui.1 0 B"),
        ("pci0/ata1/host0/target0/block/sda", {"device__serial": "disk-7", "size": "2048", "queue__rotational": "1"},
            "rotational disk-7 1 MiB"),
        ("pci0/ata2/host1/target1/block/sdb", {"size": "2048"}, "ssd sdb 1 MiB"),
        ("pci0/virtio1/block/vda", {"queue__rotational": "1"}, "virtio vda 0 B"),
        ("platform/host4/session1/target4/block/sdc", {}, "network sdc 0 B"),
        ("virtual/block/nbd0", {}, "network nbd0 0 B"),
        ("virtual/block/loop7", {"loop__backing_file": "/no/image"}, "loop /no/image /no/image 0 B"),
    ],
)  # fmt: skip
def test_a_disk_is_known_by_its_kind_and_the_best_of_its_names(
    made_up: MadeUp, place: str, files: dict[str, str], words: str
) -> None:
    made_up.disk(place, **files)
    assert made_up.known().disks == (words,)


def test_a_partition_is_followed_to_its_disk(made_up: MadeUp) -> None:
    facts = {"device__model": "Samsung", "queue__logical_block_size": "4096"}
    disk = made_up.disk("pci0/nvme/nvme0/nvme0n1", os.makedev(259, 0), nvme0n1p2__partition="2", **facts)
    made_up.register(disk / "nvme0n1p2", os.makedev(259, 2))
    (drive,) = devices(made_up.host, os.makedev(259, 2))
    assert (drive.name, drive.model, drive.logical_block) == ("nvme0n1", "Samsung", 4096)
    assert drive.stack == ("nvme0n1p2", "nvme0n1")
    missing = os.makedev(8, 250)
    assert (devices(made_up.host, missing), logical_block(made_up.host, missing)) == ([], None)


def test_a_volume_is_followed_to_all_its_disks(made_up: MadeUp) -> None:
    places = ("pci0/nvme/nvme0/nvme0n1", "pci0/ata1/host0/block/sda", "virtual/block/md0", "virtual/block/dm-0")
    *disks, array, volume = (made_up.disk(place, os.makedev(9, number)) for number, place in enumerate(places))
    for folder, below in ((array, disks), (volume, [array])):
        (folder / "slaves").mkdir()
        for lower in below:
            (folder / "slaves" / lower.name).symlink_to(lower)
    drives = devices(made_up.host, os.makedev(9, 3))
    assert [one.stack for one in drives] == [("dm-0", "md0", "nvme0n1"), ("dm-0", "md0", "sda")]
    (volume / "slaves" / "dm-0").symlink_to(volume)
    assert devices(made_up.host, os.makedev(9, 3)), "a stack that contains itself ends"


def test_the_mount_is_the_longest_and_the_last(tmp_path: Path) -> None:
    lines = (
        "1 0 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw,errors=continue\n"
        "2 1 0:40 / /mnt rw - nfs4 server:/export rw,vers=4.2\n"
        "3 1 0:41 / /mnt ro,noatime - tmpfs none ro\n"
        "4 1 0:42 / /mnt\\040two rw - xfs /dev/sdb rw\n"
        "5 1 0:43 / /unnamed rw - tmpfs  rw\n"
        "not a line of mountinfo\n"
    )
    put(tmp_path, {"proc/self/mountinfo": lines})
    mounts = [mount_of(Host(tmp_path), path) for path in ("/mnt/folder", "/mnt two/x", "/mntx")]
    kinds = [("tmpfs", "none"), ("xfs", "/dev/sdb"), ("ext4", "/dev/sda1")]
    assert [(mount.kind, mount.source) for mount in mounts if mount] == kinds
    assert mounts[0] is not None
    assert mounts[0].options == ("ro", "noatime")


# Identities


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


def test_way_backend_kernel_processors_and_gpu_tell_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    identities = [known(tmp_path), known(tmp_path, "gpu"), known(tmp_path, "gds"), known(tmp_path, "cpu", "threads")]
    monkeypatch.setattr(device, "_gpu", lambda: "made-up GPU")
    assert known(tmp_path) == identities[0], "its own memory is not the GPU's"
    identities.append(known(tmp_path, "gpu"))
    monkeypatch.setattr(os, "uname", lambda: SimpleNamespace(release="99.0"))
    identities.append(known(tmp_path))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(99)))
    identities += [known(tmp_path), replace(identities[0], file_system_id="other")]
    keys = {identity.key for identity in identities}
    assert len(keys) == len(identities)
    assert all(key.isalnum() for key in keys)


def test_other_file_systems_are_known_by_server_source_or_uuid(
    made_up: MadeUp, monkeypatch: pytest.MonkeyPatch
) -> None:
    made_up.mount("tmpfs", "none")
    assert (made_up.known().file_system_id, made_up.known().words()) == ("", "tmpfs on memory")
    made_up.mount("nfs4", "server:/export")
    nfs = made_up.known()
    assert (nfs.disks, nfs.file_system, nfs.file_system_id) == ((), "nfs4", "server:/export")
    made_up.disk("pci0/sda", os.stat("/dev/null").st_rdev, device__wwid="naa.5", size="2048")
    made_up.mount("btrfs", "/dev/null")
    assert made_up.known().disks[0].startswith("ssd naa.5"), "sysfs does not have the number of its folders"

    def answer(_: int, request: int, into: bytearray) -> None:
        into[:] = bytes([16, *range(1, 17)])

    monkeypatch.setattr(fcntl, "ioctl", answer)
    made_up.mount("xfs", "/dev/sda")
    assert made_up.known().file_system_id == bytes(range(1, 17)).hex()
    nothing = known(made_up.folder, host=Host(made_up.root / "empty"))  # of proc and sys
    assert (nothing.disks, nothing.file_system) == ((), "unknown")


def test_an_overlay_is_followed_to_where_it_is_written_if_that_is_in_sight(made_up: MadeUp) -> None:
    made_up.mount("overlay", "overlay", "rw,upperdir=/no/such/folder")
    assert made_up.known().disks == ()
    made_up.disk("pci0/nvme0n1", os.stat("/dev/shm").st_dev, wwid="eui.2", size="2048")
    made_up.mount("overlay", "overlay", "rw,lowerdir=/a,upperdir=/dev/shm,workdir=/b")
    assert made_up.known().disks[0].startswith("nvme eui.2")


def test_a_file_system_keeps_its_identity_wherever_it_is_mounted(
    make_file_system: Callable[..., Path], tmp_path: Path
) -> None:
    first, second = make_file_system(16 << 20), make_file_system(16 << 20)
    before = known(first)
    assert (before.file_system, before.disks) == ("ext4", known(second).disks)
    assert before.file_system_id
    assert before.key != known(second).key
    (elsewhere := tmp_path / "elsewhere").mkdir()
    subprocess.run(["mount", "--bind", str(first), str(elsewhere)], check=True)
    try:
        assert known(elsewhere) == before
    finally:
        subprocess.run(["umount", str(elsewhere)], check=True)


def test_a_block_device_is_known_without_a_file_system(make_device: Callable[..., LoopDevice]) -> None:
    identity = known(make_device(1 << 20).path)
    assert (identity.file_system, identity.file_system_id) == ("none", "")
    assert identity.disks
