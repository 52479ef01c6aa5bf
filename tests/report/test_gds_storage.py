"""Which file systems on which devices GPUDirect Storage takes part in, by NVIDIA's list; nothing is tried."""

from __future__ import annotations

import pytest

from nvme_ops.report import storage
from nvme_ops.report.result import Status
from nvme_ops.storage.device import Device, Mount


def mount(kind: str, *options: str) -> Mount:
    return Mount("/mnt/a place", kind, "/dev/nvme0n1", ("rw", *options))


def device(*stack: str, kind: str = "nvme") -> Device:
    return Device(stack[-1], kind, "", 512, False, stack)


NVME = device("nvme0n1p1", "nvme0n1")
RAID = [device("md0", name) for name in ("nvme0n1", "nvme1n1")]
SUPPORTED = {
    "ext4": (mount("ext4", "data=ordered"), [NVME]),
    "xfs": (mount("xfs"), [NVME]),
    "xfs over fabrics": (mount("xfs"), [device("nvme1n1", kind="network")]),
    "xfs on a RAID": (mount("xfs"), RAID),
    "nfs over rdma": (mount("nfs4", "proto=rdma"), []),
    **{kind: (mount(kind), []) for kind in ("lustre", "wekafs", "gpfs", "beegfs", "scatefs")},
}


@pytest.mark.parametrize(("mounted", "found"), SUPPORTED.values(), ids=SUPPORTED.keys())
def test_what_nvidia_lists_is_supported(mounted: Mount, found: list[Device]) -> None:
    result = storage.gpudirect(mounted, found, has_gpu=True)
    assert result.status is Status.OKAY, result
    assert result.data["supported"] is True


REFUSED = {
    "no mount": (None, [NVME], "not known"),
    "ext4 by default": (mount("ext4"), [NVME], "do not show data=ordered"),
    "ext4 with its data in the journal": (mount("ext4", "data=journal"), [NVME], "data=journal"),
    "btrfs": (mount("btrfs"), [NVME], "btrfs is not among"),
    "tmpfs": (mount("tmpfs"), [], "tmpfs is not among"),
    "nfs over tcp": (mount("nfs4", "proto=tcp"), [], "without proto=rdma"),
    "overlay": (mount("overlay"), [], "container"),
    "xfs on sata": (mount("xfs"), [device("sda1", "sda", kind="ssd")], "sda is not an NVMe device (ssd)"),
    "xfs on LVM": (mount("xfs"), [device("dm-0", "nvme0n1")], "it lies on dm-0"),
    "xfs on a file": (mount("xfs"), [device("loop3", "nvme0n1")], "it lies on loop3"),
    "xfs on both": (mount("xfs"), [NVME, device("sda", kind="ssd")], "sda is not an NVMe device"),
    "xfs on nothing known": (mount("xfs"), [], "device under the file system is not known"),
}


@pytest.mark.parametrize(("mounted", "found", "words"), REFUSED.values(), ids=REFUSED.keys())
def test_what_nvidia_does_not_list_is_refused_with_the_reason_and_a_fix(
    mounted: Mount | None, found: list[Device], words: str
) -> None:
    result = storage.gpudirect(mounted, found, has_gpu=True)
    assert result.status is Status.WARNING
    assert words in result.detail
    assert result.fix
    assert result.data["supported"] is False


def test_without_a_gpu_it_is_a_fact_and_no_complaint() -> None:
    assert storage.gpudirect(mount("btrfs"), [NVME], has_gpu=False).status is Status.INFO
    assert storage.gpudirect(mount("xfs"), [NVME], has_gpu=False).status is Status.INFO


def test_the_mount_to_change_is_named() -> None:
    fix = storage.gpudirect(mount("ext4"), [NVME], has_gpu=True).fix
    assert fix == "umount '/mnt/a place' && mount -o data=ordered /dev/nvme0n1 '/mnt/a place'"
