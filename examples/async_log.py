"""A log that never waits for storage. python examples/async_log.py [FOLDER]."""

import json
import os
import sys
import tempfile
import time

from nvme_ops.data import AsyncLog

COUNT = 50_000


def main(folder: str) -> None:
    path = os.path.join(folder, "requests")
    with AsyncLog(path, window=0.5, rotate_bytes="2M") as log:  # durable half a second later at most
        begin = time.perf_counter()
        for number in range(COUNT):
            log.append(f'{{"request": {number}, "tokens": {number % 100}}}')
        seconds = time.perf_counter() - begin
        print(f"{COUNT} records appended, {1e6 * seconds / COUNT:.1f} microseconds each")
        log.flush()  # for once: now everything is on the device
    files = sorted(name for name in os.listdir(folder) if name.startswith("requests."))
    numbers = [json.loads(record)["request"] for record in AsyncLog.read(path)]
    print(f"read back from {', '.join(files)}: {'equal' if numbers == list(range(COUNT)) else 'DIFFERENT'}")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(dir=sys.argv[1] if len(sys.argv) > 1 else None) as folder:
        main(folder)
