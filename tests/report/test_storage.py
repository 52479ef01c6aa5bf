"""What ``--folder`` shows, on real file systems where they can be made and on a made-up sysfs for devices."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nvme_ops.op_builder.machine import Host
from nvme_ops.report import kernel, storage
from nvme_ops.report.result import Result, Status
from nvme_ops.storage import device
from nvme_ops.storage.device import devices, logical_block

ROOT = Path(__file__).parents[2]
# Mounts of a process of its own; one who is not root becomes it in a user namespace, where the kernel allows that.
UNSHARE = ["unshare", "-m" if os.geteuid() == 0 else "-rm"]
SCRIPT = """
import json, sys
from nvme_ops.report import storage
from nvme_ops.op_builder.machine import Host
results = storage.inspect(Host(), sys.argv[1])
print(json.dumps({r.name: [r.status.value, r.detail, r.fix, r.data] for r in results}))
"""


def inspect(folder: str | Path) -> dict[str, Result]:
    results = {result.name: result for result in storage.inspect(Host(), str(folder))}
    for result in results.values():
        assert result.fix or not result.status.needs_fix, result
        assert result.status is not Status.FAIL, result
    return results


def inspect_mounted(folder: Path, mount: str) -> dict[str, list[Any]]:
    """The results for ``folder`` after ``mount`` ran, in a mount namespace that ends with the process."""
    if shutil.which("unshare") is None:
        pytest.skip("unshare is not installed")
    folder.mkdir(exist_ok=True)
    command = [*UNSHARE, "sh", "-ec", mount, "sh", str(folder)]
    able = subprocess.run(command, capture_output=True, text=True)
    if able.returncode:
        pytest.skip(f"cannot be mounted here: {able.stderr.strip()}")
    command[4] = f'{mount}\nexec "$PYTHON" -c "$SCRIPT" "$1"'
    environment = {**os.environ, "PYTHON": sys.executable, "SCRIPT": SCRIPT}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    results: dict[str, list[Any]] = json.loads(done.stdout)
    for name, (status, _, fix, _) in results.items():
        assert fix or status in ("OKAY", "INFO"), name
        assert status != "FAIL", name
    return results


def test_a_folder_is_inspected_and_left_as_it_was(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    results = inspect(tmp_path)
    assert list(results) == [
        "directory", "file system", "O_DIRECT", "alignment", "device", "GPUDirect Storage", "free space"
    ]  # fmt: skip
    assert results["directory"].status is Status.OKAY
    assert os.listdir(tmp_path) == ["file"]


def test_no_descriptor_is_left(tmp_path: Path) -> None:
    before = os.listdir("/proc/self/fd")
    inspect(tmp_path)
    assert os.listdir("/proc/self/fd") == before


def test_the_answer_about_direct_io_is_the_kernels(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    try:
        os.close(os.open(tmp_path / "file", os.O_RDWR | os.O_DIRECT))
    except OSError:
        assert inspect(tmp_path)["O_DIRECT"].status is Status.WARNING
    else:
        assert inspect(tmp_path)["O_DIRECT"].status is Status.OKAY


def test_shared_memory_has_no_device_and_needs_no_alignment() -> None:
    if not os.path.ismount("/dev/shm"):
        pytest.skip("/dev/shm is no file system of its own here")
    results = inspect("/dev/shm")
    assert results["file system"].data["type"] == "tmpfs"
    assert results["device"].data["kind"] == "memory"
    assert results["alignment"].detail == "none needed"


def test_a_file_system_without_direct_io_is_a_warning(tmp_path: Path) -> None:
    results = inspect_mounted(tmp_path / "ram", 'mount -t ramfs none "$1"')
    status, detail, _, data = results["O_DIRECT"]
    assert (status, data["errno"]) == ("WARNING", "EINVAL")
    assert "page cache" in detail
    assert results["alignment"][1] == "none needed"


def test_a_read_only_file_system_names_the_mount_to_change(tmp_path: Path) -> None:
    folder = tmp_path / "read only"
    results = inspect_mounted(folder, 'mount -t tmpfs -o ro none "$1"')
    status, detail, fix, _ = results["directory"]
    assert status == "NO"
    assert "Read-only file system" in detail
    assert fix == f"mount -o remount,rw '{folder}'"
    assert results["O_DIRECT"][0] == "WARNING"
    assert "ro" in results["file system"][3]["options"]


def test_a_full_file_system_says_so(tmp_path: Path) -> None:
    fill = 'mount -t tmpfs -o size=64k none "$1"; head -c 65536 /dev/zero > "$1/fill"'
    results = inspect_mounted(tmp_path / "full", fill)
    assert results["free space"][0] == "WARNING"
    assert results["free space"][3]["free"] == 0
    assert results["O_DIRECT"][0] == "WARNING"
    assert "ENOSPC" in results["O_DIRECT"][1]
    assert "make room" in results["O_DIRECT"][2]


def test_a_file_system_without_inodes_says_so(tmp_path: Path) -> None:
    results = inspect_mounted(tmp_path / "crowded", 'mount -t tmpfs -o nr_inodes=2,size=4g none "$1"; touch "$1/file"')
    assert results["directory"][0] == "NO"
    assert results["directory"][2].startswith("df -h")
    assert "no inode is left" in results["free space"][1]


def test_a_loop_device_is_followed_to_the_disk_under_its_file(tmp_path: Path) -> None:
    make = f'truncate -s 16M {tmp_path}/image; mkfs.ext4 -q -F {tmp_path}/image; mount -o loop {tmp_path}/image "$1"'
    results = inspect_mounted(tmp_path / "loop", make)
    below = devices(Host(), os.stat(tmp_path).st_dev)
    found = results["device"][3]["devices"][0]
    assert found["stack"][0].startswith("loop")
    assert found["kind"] == (below[0].kind if below else "loop")
    assert results["file system"][3]["type"] == "ext4"
    assert results["O_DIRECT"][0] == "OKAY"
    assert results["alignment"][3]["offset"] >= 512


def test_a_real_mount_shows_the_journals_mode_it_was_given(tmp_path: Path) -> None:
    image = tmp_path / "image"
    make = f'truncate -s 16M {image}; mkfs.ext4 -q -F {image}; mount -o loop,data=ordered {image} "$1"'
    results = inspect_mounted(tmp_path / "loop", make)
    assert "data=ordered" in results["file system"][3]["options"]
    assert "it lies on loop" in results["GPUDirect Storage"][1]


def test_a_missing_folder_is_told_to_be_made(tmp_path: Path) -> None:
    results = inspect(tmp_path / "not here")
    assert list(results) == ["directory"]
    assert results["directory"].fix == f"mkdir -p '{tmp_path}/not here'"


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    results = inspect(tmp_path / "file")
    assert "is not a directory" in results["directory"].detail
    assert str(tmp_path) in results["directory"].fix
    assert inspect(tmp_path / "file" / "below")["directory"].status is Status.NO


@pytest.fixture
def strangers_folder(tmp_path: Path) -> Iterator[Path]:
    """A folder that this process may look into but not write to; root steps down for the while.

    ``tmp_path`` is asked for so that pytest makes it before root steps down.
    """
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o555)
        root = os.geteuid() == 0
        if root:
            os.seteuid(65534)
        yield Path(folder)
        if root:
            os.seteuid(0)
        os.chmod(folder, 0o755)


def test_a_folder_without_permission_to_write_says_so(strangers_folder: Path) -> None:
    results = inspect(strangers_folder)
    assert results["directory"].status is Status.NO
    assert "Permission denied" in results["directory"].detail
    assert "chown" in results["directory"].fix
    assert results["O_DIRECT"].data["supported"] is None
    assert results["free space"].detail


def test_a_folder_that_cannot_be_reached_says_so(strangers_folder: Path, tmp_path: Path) -> None:
    if os.access(tmp_path.parent, os.X_OK, effective_ids=True):
        pytest.skip("not root: pytest's own folders can be reached")
    result = inspect(tmp_path)["directory"]
    assert "Permission denied" in result.detail
    assert result.fix == f"namei -l {tmp_path}"
    assert strangers_folder.is_dir()


def test_alignment_falls_back_to_the_logical_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if inspect(tmp_path)["O_DIRECT"].status is not Status.OKAY:
        pytest.skip("no direct I/O in the temporary folder")
    monkeypatch.setattr(kernel, "direct_io_alignment", lambda descriptor: None)
    block = logical_block(Host(), os.stat(tmp_path).st_dev)
    result = inspect(tmp_path)["alignment"]
    assert result.data["offset"] == block
    assert result.data["source"] == ("logical block" if block else None)


def test_alignment_says_when_the_file_system_has_no_direct_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel, "direct_io_alignment", lambda descriptor: kernel.Alignment(0, 0))
    result = inspect(tmp_path)["alignment"]
    assert "past the page cache" in result.detail or result.detail == "none needed"


def test_an_error_of_statx_other_than_its_absence_is_raised() -> None:
    with pytest.raises(OSError, match="statx") as caught:
        kernel.direct_io_alignment(-1)
    assert caught.value.errno == errno.EBADF


# A made-up sysfs: what this machine has no hardware for.


def disk(root: Path, place: str, number: str, **files: str) -> Path:
    folder = root / "sys/devices" / place
    for name, text in {"queue__logical_block_size": "512", "queue__rotational": "0", **files}.items():
        file = folder / name.replace("__", "/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text + "\n")
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
        ("pci0/ata1/host0/target0/block/sdb", {}, "ssd"),
        ("pci0/virtio1/block/vda", {"queue__rotational": "1"}, "virtio"),
        ("platform/host4/session1/target4/block/sdc", {}, "network"),
        ("virtual/block/zram0", {}, "memory"),
        ("virtual/block/nbd0", {}, "network"),
        ("virtual/block/loop7", {"loop__backing_file": "/no/such/image (deleted)"}, "loop"),
    ],
)
def test_the_kind_of_a_device_is_told(place: str, files: dict[str, str], kind: str, tmp_path: Path) -> None:
    disk(tmp_path, place, "8:0", **files)
    (found,) = devices(Host(tmp_path), os.makedev(8, 0))
    assert (found.name, found.kind) == (place.rpartition("/")[2], kind)


def test_a_partition_is_followed_to_its_disk_and_its_model(tmp_path: Path) -> None:
    whole = disk(
        tmp_path, "pci0/nvme/nvme0/nvme0n1", "259:0", device__model="Samsung  SSD 990", queue__logical_block_size="4096"
    )
    part = whole / "nvme0n1p2"
    part.mkdir()
    (part / "partition").write_text("2\n")
    register(tmp_path, part, "259:2")
    (found,) = devices(Host(tmp_path), os.makedev(259, 2))
    assert (found.name, found.model, found.logical_block) == ("nvme0n1", "Samsung SSD 990", 4096)
    assert found.stack == ("nvme0n1p2", "nvme0n1")
    assert logical_block(Host(tmp_path), os.makedev(259, 2)) == 4096


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
    assert [(one.name, one.stack) for one in found] == [
        ("nvme0n1", ("dm-0", "md0", "nvme0n1")),
        ("sda", ("dm-0", "md0", "sda")),
    ]
    monkeypatch.setattr(storage, "devices_under", lambda *_: found)
    result = inspect(tmp_path)["device"]
    assert result.status is Status.WARNING
    assert "sda, rotational (through dm-0, md0)" in result.detail
    assert result.fix.startswith("lsblk")


def test_a_stack_that_contains_itself_ends(tmp_path: Path) -> None:
    folder = disk(tmp_path, "virtual/block/dm-0", "254:0")
    (folder / "slaves").mkdir()
    (folder / "slaves" / "dm-0").symlink_to(folder)
    assert devices(Host(tmp_path), os.makedev(254, 0))


def test_no_sysfs_is_no_device(tmp_path: Path) -> None:
    assert devices(Host(tmp_path), os.makedev(8, 0)) == []
    assert logical_block(Host(tmp_path), os.makedev(8, 0)) is None


def test_the_mount_is_the_longest_and_the_last(tmp_path: Path) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/mountinfo").write_text(
        "1 0 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw,errors=continue\n"
        "2 1 0:40 / /mnt rw - nfs4 server:/export rw,vers=4.2\n"
        "3 1 0:41 / /mnt ro,noatime - tmpfs none ro\n"
        "4 1 0:42 / /mnt\\040two rw - xfs /dev/sdb rw\n"
        "not a line of mountinfo\n"
    )
    host = Host(tmp_path)
    stacked = device.mount_of(host, "/mnt/folder")
    assert stacked is not None
    assert (stacked.kind, stacked.options) == ("tmpfs", ("ro", "noatime"))
    blank = device.mount_of(host, "/mnt two/x")
    assert blank is not None
    assert blank.kind == "xfs"
    other = device.mount_of(host, "/mntx")
    assert other is not None
    assert (other.kind, other.source) == ("ext4", "/dev/sda1")
