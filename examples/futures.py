"""Futures: one for each transfer, or one for many. python examples/futures.py [FOLDER]."""

import os
import sys
import tempfile
import threading

import torch

import nvme_ops


def main(folder: str) -> None:
    path = os.path.join(folder, "table")
    handle = nvme_ops.aio_handle()
    table = torch.arange(10_000 * 128).view(10_000, 128)

    future = handle.submit_pwrite(table, path)
    print(f"{future!r}, then {future.result(timeout=60)} bytes written")

    called = threading.Event()
    loaded = torch.empty_like(table)
    handle.submit_pread(loaded, path).add_done_callback(lambda _: called.set())  # on a thread kept for callbacks
    called.wait(60)
    print(f"read, as a callback said: {'equal' if torch.equal(loaded, table) else 'DIFFERENT'}")

    # many small requests in one call: the rows of a tensor, each from its own place in the file
    wanted = torch.randint(len(table), (1000,))
    rows = torch.empty(1000, 128, dtype=table.dtype)
    moved = handle.submit_preadv(rows, path, wanted * table[0].nbytes).result()
    print(f"1000 rows, {moved} bytes: {'equal' if torch.equal(rows, table[wanted]) else 'DIFFERENT'}")

    try:
        handle.submit_pread(torch.empty(1), path, table.nbytes).result()
    except EOFError as error:
        print(f"past the end of the file: {error}")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(dir=sys.argv[1] if len(sys.argv) > 1 else None) as folder:
        main(folder)
