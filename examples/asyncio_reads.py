"""Reads in asyncio, while the event loop goes on. python examples/asyncio_reads.py [FOLDER]."""

import asyncio
import os
import sys
import tempfile

import torch

import nvme_ops


async def main(folder: str) -> None:
    handle = nvme_ops.aio_handle()
    shards = [torch.full((1 << 20,), float(number)) for number in range(4)]
    paths = [os.path.join(folder, f"shard{number}") for number in range(4)]

    writes = [handle.submit_pwrite(shard, path) for shard, path in zip(shards, paths, strict=True)]
    print(f"wrote {len(shards)} shards at once, {sum(await asyncio.gather(*writes))} bytes")

    loaded = [torch.empty_like(shard) for shard in shards]
    reads = asyncio.gather(*(handle.submit_pread(tensor, path) for tensor, path in zip(loaded, paths, strict=True)))
    turns = 0
    while not reads.done():
        await asyncio.sleep(0)  # other tasks get their turn
        turns += 1
    equal = all(torch.equal(*pair) for pair in zip(shards, loaded, strict=True))
    print(f"read them back: {'equal' if equal else 'DIFFERENT'}; the loop went on {'meanwhile' if turns else 'not'}")

    try:
        await handle.submit_pread(torch.empty(2 << 20), paths[0])
    except EOFError as error:
        print(f"a tensor that is too large for its shard: {error}")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(dir=sys.argv[1] if len(sys.argv) > 1 else None) as folder:
        asyncio.run(main(folder))
