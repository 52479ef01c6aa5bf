"""Block devices, stacks of them and mounts, in a made-up sysfs: what this machine has no hardware for."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from nvme_ops.filesystem.device import devices, logical_block, mount_of
from nvme_ops.op_builder.machine import Host
from tests.made_up import put


def disk(root: Path, place: str, number: str, **files: str) -> Path:
    folder = root / "sys/devices" / place
    facts = {"queue__logical_block_size": "512", "queue__rotational": "0", **files}
    put(folder, {name.replace("__", "/"): f"{text}\n" for name, text in facts.items()})
    register(root, folder, number)
    return folder


def register(root: Path, folder: Path, number: str) -> None:
    link = root / "sys/dev/block" / number
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(folder)


@pytest.mark.parametrize(
    ("place", "files", "kind"),
    [
        ("pci0/nvme/nvme0/nvme0n1", {"device__transport": "pcie"}, "nvme"),
        ("virtual/nvme-fabrics/ctl/nvme1/nvme1n1", {"device__transport": "tcp"}, "network"),
        ("pci0/ata1/host0/target0/block/sda", {"queue__rotational": "1"}, "rotational"),
        ("pci0/virtio1/block/vda", {"queue__rotational": "1"}, "virtio"),
        ("platform/host4/session1/target4/block/sdc", {}, "network"),
        ("virtual/block/nbd0", {}, "network"),
        ("virtual/block/loop7", {"loop__backing_file": "/no/such/image (deleted)"}, "loop"),
    ],
)
def test_the_kind_of_a_device_is_told(place: str, files: dict[str, str], kind: str, tmp_path: Path) -> None:
    disk(tmp_path, place, "8:0", **files)
    (drive,) = devices(Host(tmp_path), os.makedev(8, 0))
    assert (drive.name, drive.kind) == (place.rpartition("/")[2], kind)


def test_a_partition_is_followed_to_its_disk_and_its_model(tmp_path: Path) -> None:
    facts = {"device__model": "Samsung  SSD 990", "queue__logical_block_size": "4096"}
    part = disk(tmp_path, "pci0/nvme/nvme0/nvme0n1", "259:0", nvme0n1p2__partition="2", **facts) / "nvme0n1p2"
    register(tmp_path, part, "259:2")
    (drive,) = devices(Host(tmp_path), os.makedev(259, 2))
    assert (drive.name, drive.model, drive.logical_block) == ("nvme0n1", "Samsung SSD 990", 4096)
    assert drive.stack == ("nvme0n1p2", "nvme0n1")
    missing = os.makedev(8, 250)
    assert (devices(Host(), missing), logical_block(Host(), missing)) == ([], None)


def test_a_volume_is_followed_to_all_its_disks(tmp_path: Path) -> None:
    disks = [disk(tmp_path, "pci0/nvme/nvme0/nvme0n1", "259:0"), disk(tmp_path, "pci0/ata1/host0/block/sda", "8:0")]
    array, volume = disk(tmp_path, "virtual/block/md0", "9:0"), disk(tmp_path, "virtual/block/dm-0", "254:7")
    for folder, below in ((array, disks), (volume, [array])):
        (folder / "slaves").mkdir()
        for lower in below:
            (folder / "slaves" / lower.name).symlink_to(lower)
    drives = devices(Host(tmp_path), os.makedev(254, 7))
    assert [one.stack for one in drives] == [("dm-0", "md0", "nvme0n1"), ("dm-0", "md0", "sda")]
    (volume / "slaves" / "dm-0").symlink_to(volume)
    assert devices(Host(tmp_path), os.makedev(254, 7)), "a stack that contains itself ends"


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
