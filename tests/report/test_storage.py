"""What ``--folder`` shows, on real file systems where they can be made and on a made-up sysfs for devices."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from nvme_ops.filesystem import device
from nvme_ops.filesystem.device import devices, logical_block
from nvme_ops.op_builder.machine import Host
from nvme_ops.report import kernel, storage
from nvme_ops.report.result import Result, Status
from tests.conftest import with_mounts
from tests.made_up import put

SCRIPT = """
import json, sys
from nvme_ops.report import storage
from nvme_ops.op_builder.machine import Host
results = storage.inspect(Host(), sys.argv[1])
print(json.dumps({r.name: [r.status.value, r.detail, r.fix, r.data] for r in results}))
"""


def inspect(folder: str | Path) -> dict[str, Result]:
    results = {result.name: result for result in storage.inspect(Host(), str(folder))}
    assert Status.FAIL not in [result.status for result in results.values()]
    return results


def inspect_mounted(folder: Path, mount: str) -> dict[str, list[Any]]:
    """The results for ``folder`` after ``mount`` ran, in a mount namespace that ends with the process."""
    folder.mkdir(exist_ok=True)
    script = mount.replace("HERE", f"'{folder}'")
    results: dict[str, list[Any]] = json.loads(with_mounts(script, sys.executable, "-c", SCRIPT, folder))
    assert "FAIL" not in [status for status, *_ in results.values()]
    return results


def test_a_folder_is_inspected_and_left_as_it_was(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    results = inspect(tmp_path)
    assert list(results) == [
        "directory", "file system", "O_DIRECT", "alignment", "device", "GPUDirect Storage", "free space"
    ]  # fmt: skip
    assert results["directory"].status is Status.OKAY
    assert os.listdir(tmp_path) == ["file"]


def test_a_file_system_in_memory_has_no_device_and_may_have_no_direct_io(tmp_path: Path) -> None:
    results = inspect_mounted(tmp_path / "ram", "mount -t ramfs none HERE")
    assert results["file system"][3]["type"] == "ramfs"
    assert results["device"][3]["kind"] == "memory"
    status, detail, _, data = results["O_DIRECT"]
    assert (status, data["errno"]) == ("WARNING", "EINVAL")
    assert "page cache" in detail
    assert results["alignment"][1] == "none needed"


def test_a_read_only_file_system_names_the_mount_to_change(tmp_path: Path) -> None:
    folder = tmp_path / "read only"
    status, detail, fix, _ = inspect_mounted(folder, "mount -t tmpfs -o ro none HERE")["directory"]
    assert (status, fix) == ("NO", f"mount -o remount,rw '{folder}'")
    assert "Read-only file system" in detail


def test_a_full_file_system_says_so(tmp_path: Path) -> None:
    full = inspect_mounted(tmp_path / "full", "mount -t tmpfs -o size=64k none HERE; head -c 65536 /dev/zero >HERE/x")
    assert (full["free space"][0], full["free space"][3]["free"], full["O_DIRECT"][0]) == ("WARNING", 0, "NO")
    assert "ENOSPC" in full["O_DIRECT"][1]
    crowded = inspect_mounted(tmp_path / "crowded", "mount -t tmpfs -o nr_inodes=2,size=4g none HERE && touch HERE/x")
    assert crowded["directory"][0] == "NO"
    assert crowded["directory"][2].startswith("df -h")
    assert "no inode is left" in crowded["free space"][1]


def test_a_loop_device_is_followed_to_the_disk_under_its_file(tmp_path: Path) -> None:
    image = tmp_path / "image"
    make = f"truncate -s 16M {image} && mkfs.ext4 -q -F {image} && mount -o loop,data=ordered {image} HERE"
    results = inspect_mounted(tmp_path / "loop", make)
    below = devices(Host(), os.stat(tmp_path).st_dev)
    found = results["device"][3]["devices"][0]
    assert found["stack"][0].startswith("loop")
    assert found["kind"] == (below[0].kind if below else "loop")
    assert (results["file system"][3]["type"], results["O_DIRECT"][0]) == ("ext4", "OKAY")
    assert "data=ordered" in results["file system"][3]["options"]
    assert results["alignment"][3]["offset"] >= 512
    assert "it lies on loop" in results["GPUDirect Storage"][1]


def test_what_is_no_folder_is_told_to_be_made(tmp_path: Path) -> None:
    results = inspect(tmp_path / "not here")
    assert list(results) == ["directory"]
    assert results["directory"].fix == f"mkdir -p '{tmp_path}/not here'"
    (tmp_path / "file").touch()
    assert "is not a directory" in inspect(tmp_path / "file")["directory"].detail
    assert inspect(tmp_path / "file" / "below")["directory"].status is Status.NO


def test_alignment_falls_back_to_the_logical_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if inspect(tmp_path)["O_DIRECT"].status is not Status.OKAY:
        pytest.skip("no direct I/O in the temporary folder")
    monkeypatch.setattr("platform.machine", lambda: "pdp11")  # the number of statx is not known
    block = logical_block(Host(), os.stat(tmp_path).st_dev)
    result = inspect(tmp_path)["alignment"]
    assert (result.data["offset"], result.data["source"]) == (block, "logical block" if block else None)
    monkeypatch.setattr(kernel, "direct_io_alignment", lambda descriptor: kernel.Alignment(0, 0))
    assert "past the page cache" in inspect(tmp_path)["alignment"].detail


# A made-up sysfs: what this machine has no hardware for


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
    (found,) = devices(Host(tmp_path), os.makedev(8, 0))
    assert (found.name, found.kind) == (place.rpartition("/")[2], kind)


def test_a_partition_is_followed_to_its_disk_and_its_model(tmp_path: Path) -> None:
    facts = {"device__model": "Samsung  SSD 990", "queue__logical_block_size": "4096"}
    part = disk(tmp_path, "pci0/nvme/nvme0/nvme0n1", "259:0", nvme0n1p2__partition="2", **facts) / "nvme0n1p2"
    register(tmp_path, part, "259:2")
    (found,) = devices(Host(tmp_path), os.makedev(259, 2))
    assert (found.name, found.model, found.logical_block) == ("nvme0n1", "Samsung SSD 990", 4096)
    assert found.stack == ("nvme0n1p2", "nvme0n1")
    missing = os.makedev(8, 250)
    assert (devices(Host(), missing), logical_block(Host(), missing)) == ([], None)


def test_a_volume_on_two_disks_names_both_and_warns_of_the_rotating_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disks = [
        disk(tmp_path, "pci0/nvme/nvme0/nvme0n1", "259:0"),
        disk(tmp_path, "pci0/ata1/host0/block/sda", "8:0", queue__rotational="1"),
    ]
    array = disk(tmp_path, "virtual/block/md0", "9:0")
    volume = disk(tmp_path, "virtual/block/dm-0", "254:7")
    for folder, below in ((array, disks), (volume, [array])):
        (folder / "slaves").mkdir()
        for lower in below:
            (folder / "slaves" / lower.name).symlink_to(lower)
    found = devices(Host(tmp_path), os.makedev(254, 7))
    assert [one.stack for one in found] == [("dm-0", "md0", "nvme0n1"), ("dm-0", "md0", "sda")]
    monkeypatch.setattr(storage, "devices_under", lambda *_: found)
    result = inspect(tmp_path)["device"]
    assert result.status is Status.WARNING
    assert "sda, rotational (through dm-0, md0)" in result.detail
    assert result.fix.startswith("lsblk")
    (volume / "slaves" / "dm-0").symlink_to(volume)
    assert devices(Host(tmp_path), os.makedev(254, 7)), "a stack that contains itself ends"


def test_the_mount_is_the_longest_and_the_last(tmp_path: Path) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/mountinfo").write_text(
        "1 0 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw,errors=continue\n"
        "2 1 0:40 / /mnt rw - nfs4 server:/export rw,vers=4.2\n"
        "3 1 0:41 / /mnt ro,noatime - tmpfs none ro\n"
        "4 1 0:42 / /mnt\\040two rw - xfs /dev/sdb rw\n"
        "5 1 0:43 / /unnamed rw - tmpfs  rw\n"
        "not a line of mountinfo\n"
    )
    found = [device.mount_of(Host(tmp_path), path) for path in ("/mnt/folder", "/mnt two/x", "/mntx")]
    kinds = [("tmpfs", "none"), ("xfs", "/dev/sdb"), ("ext4", "/dev/sda1")]
    assert [(each.kind, each.source) for each in found if each] == kinds
    assert found[0] is not None
    assert found[0].options == ("ro", "noatime")
