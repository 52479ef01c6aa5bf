"""``python -O`` leaves out every ``assert``; what this package checks, it checks all the same."""

from __future__ import annotations

from pathlib import Path

from tests.conftest import run_python

PROGRAM = """
    import sys
    from pathlib import Path
    import torch
    import nvme_ops
    from nvme_ops.measure.rows import interleave
    from nvme_ops.measure.engines import Task, saved_row, tensor_row

    print("assertions:", __debug__, file=sys.stderr)
    folder = Path(sys.argv[1])
    file, data = folder / "file", torch.arange(100_000, dtype=torch.int32).view(torch.uint8)
    file.write_bytes(data.numpy().tobytes())
    handle = nvme_ops.aio_handle()

    def attempt(words, call):
        try:
            call()
        except Exception as error:
            print(words, type(error).__name__, error)
        else:
            print(words, "went through")

    attempt("past the end", lambda: handle.sync_pread(torch.empty(1_000_000, dtype=torch.uint8), file))
    attempt("offset", lambda: handle.sync_pread(data, file, -1))
    attempt("no tensor", lambda: handle.sync_pwrite("bytes", file))
    attempt("with holes", lambda: handle.sync_pread(data[::2], file))
    attempt("settings", lambda: nvme_ops.aio_handle(block_size=0))
    attempt("mode", lambda: nvme_ops.open(file, "x"))
    nvme_ops.save({"weight": data}, folder / "cut.safetensors")
    with open(folder / "cut.safetensors", "r+b") as cut:
        cut.truncate(1000)
    attempt("a file that is cut", lambda: nvme_ops.load(folder / "cut.safetensors"))

    reads = Task(str(file), data.numel(), write=False, pageable_memory=True)
    lies = [
        tensor_row(reads, "reads nothing", lambda: reads.pageable, lambda tensor: None),
        saved_row(reads, "loads others", str(file), lambda: None, lambda: data[:5]),
    ]
    interleave(lies, 1)
    for row in lies:
        print(row.name, row.wrong, row.note)
"""


def test_misuse_and_wrong_data_are_said_in_the_same_words(tmp_path: Path) -> None:
    said = []
    for level in ("", "1"):
        (tmp_path / f"level{level}").mkdir()
        # what is prepared has assertions
        done = run_python(PROGRAM, tmp_path / f"level{level}", fresh=bool(level), PYTHONOPTIMIZE=level)
        assert f"assertions: {not level}" in done.stderr
        said.append(done.stdout.replace(f"level{level}/", ""))
    assert said[1] == said[0]
    assert "went through" not in said[1]
    assert "reads nothing True WRONG DATA: tensor and file differ" in said[1]
    assert "loads others True WRONG DATA: tensor and file differ" in said[1]
