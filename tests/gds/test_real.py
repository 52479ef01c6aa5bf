"""The real libcufile with a simulated accelerator in host memory: that our declarations of it are right.

Without a GPU it opens in compatibility mode only and takes host pointers, so this is no evidence about a GPU. Each test
runs in a process of its own with a time limit, for opening cuFile may hang.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from nvme_ops.op_builder import machine
from tests.conftest import run_python

PROGRAM = """
    import sys, torch
    from pathlib import Path
    from tests.doubles import private_device
    from nvme_ops.io.gds import gds_handle
    from nvme_ops.op_builder import GDSBuilder

    GDSBuilder().load()  # the handle compiles nothing where there is no GPU
    device, path = private_device(), Path(sys.argv[1], "file")
    try:
        handle = gds_handle(intra_op_parallelism=2)
    except RuntimeError as error:
        print("refused:", error)
        sys.exit()
    size = (20 << 20) + 12345
    data = torch.randint(0, 256, (size,), dtype=torch.uint8)
    sent, back = device.tensor(data), device.empty(size)
    for _ in range(3):  # bounced, through cuFile, through the faster
        handle.sync_pwrite(sent, path)
        assert path.read_bytes() == data.numpy().tobytes()
        handle.sync_pread(back, path)
        assert torch.equal(device.peek(back), data)
    uses = handle.path_statistics()["uses"]
    print("used:", sorted(uses), handle.path_statistics()["why"])
    assert "compat" in uses or "gds" in uses, handle.path_statistics()
    handle.pin_device_tensor(back)
    assert handle.is_pinned(back) and handle.unpin_device_tensor(back)
"""


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU: tests/device meets the real libcufile")
@pytest.mark.skipif(not machine.cufile_libraries(), reason="no libcufile.so.0 here: pip install nvidia-cufile")
@pytest.mark.skipif(not Path("/proc/modules").exists(), reason="without /proc/modules cuFile would never open")
def test_the_real_library(folder: Path) -> None:
    done = run_python(PROGRAM, folder, CUFILE_EXPERIMENTAL_FS="1")
    assert "used:" in done.stdout or "refused:" in done.stdout
    if done.stdout.startswith("refused:"):
        pytest.skip(done.stdout.strip())  # before 1.20 it needs CUDA's driver
