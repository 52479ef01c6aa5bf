"""A device is known by its hardware, file system and kernel, whatever the path; on real folders and a made-up sysfs."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from nvme_ops.op_builder.machine import Host
from nvme_ops.storage import device
from nvme_ops.storage.device import Identity, identify, nearest
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
        link.symlink_to(device)
        return Host(self.root)


@pytest.fixture
def made_up(tmp_path: Path) -> MadeUpHost:
    (tmp_path / "folder").mkdir()
    return MadeUpHost(tmp_path / "host", tmp_path / "folder")


def test_two_folders_of_one_file_system_are_one_device(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    (tmp_path / "other").mkdir()
    assert known(tmp_path / "one") == known(tmp_path / "other") == known(tmp_path)
    assert known(tmp_path / "one").key == known(tmp_path / "other").key


def test_a_file_and_what_does_not_exist_yet_are_known_by_where_they_lie(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert known(tmp_path / "file") == known(tmp_path) == known(tmp_path / "not there yet")


def test_a_folder_that_is_missing_is_named(tmp_path: Path) -> None:
    """Its disk may not be mounted: what was found for another one would be used."""
    with pytest.raises(FileNotFoundError, match="mounted") as raised:
        known(tmp_path / "not" / "there" / "yet")
    assert raised.value.filename == str(tmp_path / "not")


def test_a_link_is_followed(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("/dev/shm")
    assert known(tmp_path / "link") == known("/dev/shm")


def test_the_nearest_parent_that_exists_is_found(tmp_path: Path) -> None:
    assert nearest(tmp_path / "a" / "b") == str(tmp_path)
    assert nearest("/no/such/folder") == "/"


def test_another_file_system_is_another_device(tmp_path: Path) -> None:
    if os.stat(tmp_path).st_dev == os.stat("/dev/shm").st_dev:
        pytest.skip("the folder of this test lies in /dev/shm")
    assert known(tmp_path).key != known("/dev/shm").key


def test_memory_needs_no_disk_and_no_number() -> None:
    found = known("/dev/shm")
    if found.file_system != "tmpfs":
        pytest.skip("/dev/shm is no tmpfs here")
    assert (found.disks, found.file_system_id) == ((), "")
    assert found.words() == "tmpfs on memory"


def test_way_backend_kernel_and_processors_tell_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = known(tmp_path)
    others = [known(tmp_path, way="gpu"), known(tmp_path, way="gds"), known(tmp_path, backend="threads")]
    monkeypatch.setattr(os, "uname", lambda: SimpleNamespace(release="99.0"))
    others.append(known(tmp_path))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(99)))
    others.append(known(tmp_path))
    assert len({each.key for each in [here, *others]}) == 6


def test_the_gpu_counts_only_for_its_own_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "_gpu", lambda: "made-up GPU")
    assert known(tmp_path).gpu == ""
    assert known(tmp_path, way="gpu").gpu == "made-up GPU"


def test_a_disk_is_known_by_its_world_wide_identifier(made_up: MadeUpHost) -> None:
    host = made_up.disk(
        "nvme0n1", wwid="eui.0025385b01428fa9", size="1953525168", device__model="Samsung SSD", device__serial="S1"
    )
    assert known(made_up.folder, host=host).disks == ("nvme Samsung SSD eui.0025385b01428fa9 931.5 GiB",)


def test_a_serial_number_does_where_there_is_no_identifier(made_up: MadeUpHost) -> None:
    host = made_up.disk("vda", serial="disk-7", size="2048")
    assert known(made_up.folder, host=host).disks[0].endswith("disk-7 1 MiB")


def test_the_name_of_the_disk_does_not_matter(made_up: MadeUpHost, tmp_path: Path) -> None:
    other = MadeUpHost(tmp_path / "another", made_up.folder)
    first = made_up.disk("nvme0n1", wwid="eui.1", size="2048")
    second = other.disk("nvme3n1", wwid="eui.1", size="2048")
    assert known(made_up.folder, host=first) == known(made_up.folder, host=second)


def test_without_any_number_the_name_is_what_there_is(made_up: MadeUpHost) -> None:
    assert known(made_up.folder, host=made_up.disk("sdb", size="2048")).disks == ("ssd sdb 1 MiB",)


def test_a_network_file_system_is_known_by_its_server(made_up: MadeUpHost) -> None:
    found = known(made_up.folder, host=made_up.mount("nfs4", "server:/export"))
    assert (found.disks, found.file_system, found.file_system_id) == ((), "nfs4", "server:/export")
    other = known(made_up.folder, host=made_up.mount("nfs4", "server:/another"))
    assert found.key != other.key


def test_an_overlay_is_followed_to_what_it_is_written_to(made_up: MadeUpHost) -> None:
    upper = "/dev/shm"
    made_up.disk("nvme0n1", os.stat(upper).st_dev, wwid="eui.2", size="2048")
    host = made_up.mount("overlay", "overlay", f"rw,lowerdir=/a,upperdir={upper},workdir=/b")
    found = known(made_up.folder, host=host)
    assert found.file_system == "overlay"
    assert found.disks[0].startswith("nvme eui.2")


def test_an_overlay_whose_layers_are_out_of_sight_is_known_all_the_same(made_up: MadeUpHost) -> None:
    host = made_up.mount("overlay", "overlay", "rw,upperdir=/no/such/folder")
    assert known(made_up.folder, host=host).disks == ()


def test_a_file_system_over_many_devices_is_found_by_its_source(
    made_up: MadeUpHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    """btrfs shows a device number that sysfs does not have."""
    made_up.disk("sda", os.stat("/dev/null").st_rdev, device__wwid="naa.5", size="2048")
    assert known(made_up.folder, host=made_up.mount("btrfs", "/dev/null")).disks[0].startswith("ssd naa.5")


def test_nothing_is_needed_of_proc_and_sys(tmp_path: Path) -> None:
    found = known(tmp_path, host=Host(tmp_path / "empty"))
    assert (found.disks, found.file_system) == ((), "unknown")


def test_a_file_system_keeps_its_identity_wherever_it_is_mounted(
    make_file_system: Callable[..., Path], tmp_path: Path
) -> None:
    mounted = make_file_system(16 << 20)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    before = known(mounted)
    subprocess.run(["mount", "--bind", str(mounted), str(elsewhere)], check=True)
    try:
        assert known(elsewhere) == before
    finally:
        subprocess.run(["umount", str(elsewhere)], check=True)
    assert before.file_system == "ext4"
    assert before.file_system_id
    assert before != known(tmp_path)


def test_two_file_systems_on_one_disk_are_two_devices(make_file_system: Callable[..., Path]) -> None:
    first, second = known(make_file_system(16 << 20)), known(make_file_system(16 << 20))
    assert first.disks == second.disks
    assert first.key != second.key


def test_a_block_device_is_known_without_a_file_system(make_device: Callable[..., LoopDevice]) -> None:
    found = known(make_device(1 << 20).path)
    assert (found.file_system, found.file_system_id) == ("none", "")
    assert found.disks


def test_the_key_fits_a_file_name_and_depends_on_everything(tmp_path: Path) -> None:
    here = known(tmp_path)
    assert here.key.isalnum()
    assert replace(here, kernel="other").key != here.key
    assert replace(here).key == here.key
