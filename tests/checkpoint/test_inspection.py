"""``nvme-checkpoint``: what it shows of every format, and ``convert``: equal values in another one, in bounded memory.

It writes as ``save`` does, whose tests kill it, fill the disk and have others at the same file.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import itertools
import json
import os
import pickle
import re
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata

import nvme_ops
from nvme_ops.base.errors import FormatError
from nvme_ops.base.settings import LARGE
from nvme_ops.checkpoint.cli import main
from nvme_ops.checkpoint.contents import contents
from nvme_ops.checkpoint.convert import convert
from nvme_ops.checkpoint.dcp.tensors import _Chunk, _joined
from nvme_ops.checkpoint.framed import SMALL
from nvme_ops.dcp import NvmeStorageWriter
from nvme_ops.io.engine import Priority
from nvme_ops.io.file import shared_handle
from nvme_ops.io.future import IoFuture
from nvme_ops.io.handle import aio_handle
from nvme_ops.memory import ring
from nvme_ops.offload.weights.window import read_now
from nvme_ops.storage.source import FileExtent, Source, WeightFile
from tests.checkpoint.torch_files import OBJECTS, Evil
from tests.conftest import watched
from tests.contract.faulty import flip
from tests.crashing_save import at_second
from tests.dcp.states import equal


def state() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    embedding = torch.randn(40, 16)
    return {
        "large": torch.randn(1 << 19),
        "embedding": embedding,
        "head": embedding,
        "part": embedding[3:5],
        "transposed": torch.randn(6, 4).t(),
        "steps": torch.arange(20)[::3],
        "expanded": torch.ones(1).expand(5),
        "scalar": torch.tensor(3.0),
        "nothing": torch.empty(0, 3),
        "narrow": torch.randn(7).bfloat16(),
        "truth": torch.tensor([True, False, True]),
        "parameter": torch.nn.Parameter(torch.randn(5)),
        "conjugate": torch.randn(4, dtype=torch.complex64).conj(),
    }


def as_module(kept: dict[str, torch.Tensor], path: Path) -> None:
    made: Any = OrderedDict(kept)
    made._metadata = {"": {"version": 1}}
    torch.save(made, path)


SOURCES: dict[str, tuple[Callable[[dict[str, torch.Tensor], Path], object], list[str]]] = {
    "torch's": (torch.save, []),
    "a module's": (as_module, []),
    "before zip": (lambda kept, path: torch.save(kept, path, _use_new_zipfile_serialization=False), []),
    "nested": (lambda kept, path: torch.save({"n": 3, "a.b": {"model": kept}}, path), ["--key", "a.b.model"]),
    "ours": (nvme_ops.save, []),
}


@pytest.mark.parametrize("kind", SOURCES)
def test_to_every_format(kind: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make, words = SOURCES[kind]
    make(state(), folder / "source.pt")
    untied = {name: tensor.detach() for name, tensor in state().items() if name != "head"}
    target = folder / "target.safetensors"
    assert main(["convert", str(folder / "source.pt"), str(target), *words]) == 0
    tied, okay = capsys.readouterr().out.splitlines()
    assert tied.startswith("head: the same tensor as embedding")
    assert okay.startswith(f"[OKAY] {target}: 12 tensors, 2.0")
    assert equal(safetensors.torch.load_file(target), untied)
    with safetensors.safe_open(target, "pt") as file:
        assert (file.metadata()["format"], file.metadata()["head"]) == ("pt", "embedding")
    assert main(["verify", str(target)]) == 0
    assert main(["convert", str(folder / "source.pt"), str(target), "--no-checksums", *words]) == 0
    assert main(["verify", str(target)]) == 1  # there is nothing to compare with
    assert main(["convert", str(folder / "source.pt"), str(folder / "target.bin"), *words]) == 0
    loaded = torch.load(folder / "target.bin")
    assert equal(loaded, state())
    assert list(loaded) == list(state())
    assert loaded["head"].data_ptr() == loaded["embedding"].data_ptr()
    assert main(["convert", str(folder / "source.pt"), str(folder / "model"), "--max-shard-size", "1MB", *words]) == 0
    assert len(list((folder / "model").glob("*.safetensors"))) > 1
    for source in (folder / "model", target):
        assert main(["convert", str(source), str(folder / "back.pt")]) == 0
        back = torch.load(folder / "back.pt")
        assert equal(back, {**untied, "head": untied["embedding"]})
        assert back["head"].data_ptr() == back["embedding"].data_ptr()


def test_several_files_of_torch(folder: Path) -> None:
    """Such as ``save_pretrained`` of earlier versions wrote them, in the folder that they are in."""
    torch.save({"a": torch.ones(3), "unnamed": torch.ones(1)}, folder / "pytorch_model-00001-of-00002.bin")
    torch.save({"b": torch.zeros(4)}, folder / "pytorch_model-00002-of-00002.bin")
    places = {"a": "pytorch_model-00001-of-00002.bin", "b": "pytorch_model-00002-of-00002.bin"}
    index = folder / "pytorch_model.bin.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": places}))
    assert {"a", "b", "unnamed"} <= {item.name for item in contents(index).items}
    assert main(["convert", str(folder), str(folder)]) == 0
    assert equal(nvme_ops.load(folder / "model.safetensors.index.json"), {"a": torch.ones(3), "b": torch.zeros(4)})
    index.write_text(json.dumps({"metadata": {}, "weight_map": {**places, "c": places["b"]}}))
    with pytest.raises(FormatError, match="weight_map says that 'c' is in"):
        convert(str(index), str(folder / "other"))


def test_names_that_are_not_text(folder: Path) -> None:
    source, target = folder / "source.pt", folder / "target.safetensors"
    torch.save({1: torch.ones(2), 20: torch.zeros(3)}, source)
    convert(str(source), str(folder / "copy.pt"))
    assert equal(torch.load(folder / "copy.pt"), {1: torch.ones(2), 20: torch.zeros(3)})
    convert(str(source), str(target))
    assert equal(nvme_ops.load(target), {"1": torch.ones(2), "20": torch.zeros(3)})
    others: list[dict[Any, torch.Tensor]] = [
        {1: torch.ones(2), "1": torch.zeros(3)},
        {torch.Size([1]): torch.ones(2), (2, 3): torch.ones(1), None: torch.ones(1), 1.5: torch.ones(3)},
        {True: torch.ones(2), torch.float32: torch.ones(1)},
    ]
    for saved, words in zip(others, ["1 and '1' are one name", "is a Size", "True is a bool"], strict=True):
        torch.save(saved, source)
        convert(str(source), str(folder / "copy.pt"))
        assert equal(torch.load(folder / "copy.pt"), saved)
        with pytest.raises(ValueError, match=words):
            convert(str(source), str(target))
    with pytest.raises(ValueError, match=r"two tensors are called 'a\.1'"):
        nvme_ops.load(folder / "copy.pt", into={"a": others[0]})


def test_metadata_of_a_file_of_torch(folder: Path) -> None:
    model = torch.nn.ModuleDict({"a": torch.nn.Linear(3, 3), "b": torch.nn.Linear(3, 3)})
    model["b"].weight = model["a"].weight
    nvme_ops.save(model, folder / "source.pt", metadata={"step": "3"})
    convert(str(folder / "source.pt"), str(folder / "target.safetensors"))
    assert contents(folder / "target.safetensors").metadata == {"step": "3", "b.weight": "a.weight", "format": "pt"}
    convert(str(folder / "source.pt"), str(folder / "target.pt"))
    assert contents(folder / "target.pt").metadata == {"step": "3"}
    assert torch.load(folder / "target.pt").keys() == model.state_dict().keys()


def test_a_source_that_is_written_to_meanwhile_is_not_converted(folder: Path) -> None:
    source, target = folder / "source.safetensors", folder / "target.pt"
    nvme_ops.save({name: torch.ones(1000) for name in "ab"}, source)

    @contextlib.contextmanager
    def meanwhile(_: int) -> Iterator[Callable[[int], None]]:
        def write(_: int) -> None:
            with source.open("r+b") as file:
                file.seek(-4, os.SEEK_END)
                file.write(bytes(4))

        yield write

    with pytest.raises(FormatError, match=r"source\.safetensors was changed while"):
        convert(str(source), str(target), verify=False, on_progress=meanwhile)
    assert not target.exists()


def test_an_expanded_tensor_is_not_written_one_by_one_without_end(folder: Path) -> None:
    torch.save({"a": torch.ones(3), "mask": torch.ones(1).expand(1 << 22, 1 << 22)}, folder / "source.pt")
    with pytest.raises(ValueError, match=r"would become 64 TiB: 'mask' is expanded"):
        convert(str(folder / "source.pt"), str(folder / "target.safetensors"))
    convert(str(folder / "source.pt"), str(folder / "target.pt"))
    mask = torch.load(folder / "target.pt")["mask"]
    assert (mask.shape, mask.stride()) == ((1 << 22, 1 << 22), (0, 0))


FORMATS = pytest.mark.parametrize("name", ["target.pt", "target.safetensors", "target"])


@FORMATS
def test_many_small_tensors_are_read_together(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.save({f"{number}": torch.ones(4) for number in range(1000)}, folder / "source.pt")
    reads = watched(monkeypatch, aio_handle, "submit_preadv", lambda *_, **__: None)
    convert(str(folder / "source.pt"), str(folder / name), verify=False)
    assert 0 < len(reads) < 20


@FORMATS
@pytest.mark.parametrize("source", ["source.pt", "source.safetensors", "source", "dcp"])
@pytest.mark.filterwarnings("ignore")
def test_sizes_between_which_formats_tell(
    source: str, name: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The order in which tensors are written depends on their sizes, and they are read in this order."""
    monkeypatch.setattr(ring, "PIECE", 1 << 20)  # bytes, so that some have several pieces
    sizes = [5, LARGE, 3 << 20, LARGE - 1, SMALL - 4, SMALL, 1, 1 << 20, (1 << 20) + 8, 2 * LARGE]
    kept = {f"{number:02}": torch.randint(0, 99, (size,), dtype=torch.int8) for number, size in enumerate(sizes)}
    kept |= {f"wide{number}": torch.randn(300, 10 + 500 * number) for number in range(4)}
    kept |= {f"turned{number}": torch.randn(300, 10 + 700 * number).t() for number in range(4)}
    if source == "dcp":
        dcp.save(kept, storage_writer=NvmeStorageWriter(folder / source))
    else:
        nvme_ops.save(kept, folder / source)
    convert(str(folder / source), str(folder / name))
    assert equal(nvme_ops.load(folder / name, verify=True), kept)


@FORMATS
def test_the_next_piece_is_read_before_one_is_written(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also the first one of the next tensor; and it is not demanded, which would hold the write back."""
    monkeypatch.setattr(ring, "PIECE", SMALL)
    nvme_ops.save({f"{number}": torch.ones(3, SMALL >> 2) for number in range(5)}, folder / "source.safetensors")
    reads = watched(monkeypatch, aio_handle, "submit_preadv", lambda *_, priority, **__: priority)
    writes = watched(monkeypatch, aio_handle, "submit_pwrite", lambda _, data, *__, **___: (data.nbytes, len(reads)))
    convert(str(folder / "source.safetensors"), str(folder / name), verify=False)
    assert reads == [Priority.PREFETCH] * 15
    before = [count for nbytes, count in writes if nbytes >= SMALL]
    assert len(before) == 15
    assert all(count >= min(15, number + 2) for number, count in enumerate(before))


def test_a_write_that_fails_while_the_next_piece_is_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ring, "PIECE", SMALL)
    nvme_ops.save({f"{number}": torch.ones(3, SMALL >> 2) for number in range(5)}, folder / "source.safetensors")
    nvme_ops.save({"a": torch.ones(3)}, folder / "target.safetensors")
    files, opened = {path: path.read_bytes() for path in folder.iterdir()}, os.listdir("/proc/self/fd")
    writes = list[None]()

    def full(*_: Any, **__: Any) -> None:
        writes.append(None)
        if len(writes) == 4:
            raise OSError(errno.ENOSPC, "No space left on device")

    watched(monkeypatch, aio_handle, "submit_pwrite", full)
    cancelled = watched(monkeypatch, IoFuture, "request_cancel", lambda *_: None)
    with pytest.raises(OSError, match="No space left") as failure:
        convert(str(folder / "source.safetensors"), str(folder / "target.safetensors"))
    assert {path: path.read_bytes() for path in folder.iterdir()} == files
    assert len(os.listdir("/proc/self/fd")) == len(opened)
    assert cancelled, failure  # what was read ahead, even while the error is kept


# What it refuses


@pytest.mark.parametrize("modern", [True, False])
def test_what_is_no_tensor(folder: Path, modern: bool, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save({"epoch": 3, "model": {"a": torch.ones(3)}}, folder / "a.pt", _use_new_zipfile_serialization=modern)
    for words, said in (
        ([], "has more than tensors by name: 'epoch', 'model'; --key takes the tensors of one entry: 'model'"),
        (["--key", "nothing"], "has no entry 'nothing'; it has 'epoch', 'model'"),
        (["--key", "model.a"], "'model.a' is not a dictionary of tensors by name"),
        (["--key", "model.a.b"], "'model.a.b' is not a dictionary of tensors by name"),
    ):
        assert main(["convert", str(folder / "a.pt"), str(folder / "a.safetensors"), *words]) == 2
        assert said in capsys.readouterr().err
    assert os.listdir(folder) == ["a.pt"]


NESTED = torch.nested.nested_tensor([torch.ones(2, 3), torch.zeros(1, 3)])


@pytest.mark.parametrize("tensor", [torch.ones(3).to_sparse(), torch.ones(2, dtype=torch.complex128), NESTED])
def test_what_the_target_cannot_hold(folder: Path, tensor: torch.Tensor) -> None:
    torch.save({"a": tensor}, folder / "a.pt")
    with pytest.raises(ValueError, match="'a'"):
        convert(str(folder / "a.pt"), str(folder / "a.safetensors"))
    convert(str(folder / "a.pt"), str(folder / "b.pt"))
    loaded = torch.load(folder / "b.pt")["a"]
    if tensor.is_nested:
        loaded, tensor = loaded.to_padded_tensor(5.0), tensor.to_padded_tensor(5.0)
    assert torch.equal(loaded.to_dense(), tensor.to_dense())


def test_what_the_target_would_replace_is_no_source(folder: Path) -> None:
    torch.save({"a": torch.ones(3)}, folder / "a.pt")
    (folder / "link.pt").symlink_to("a.pt")
    nvme_ops.save({"a": torch.ones(3)}, folder / "model.safetensors")  # which its shards would replace
    nvme_ops.save({"a": torch.ones(3), "b": torch.ones(3)}, folder / "many", max_shard_size=12)
    shard = folder / "many" / "model-00001-of-00002.safetensors"  # its place in a new index is not its own
    before = sorted(folder.rglob("*"))
    for source, target in (("a.pt", "link.pt"), ("model.safetensors", ""), (str(shard.relative_to(folder)), "many")):
        with pytest.raises(ValueError, match="is part of the source"):
            convert(str(folder / source), str(folder / target))
    assert sorted(folder.rglob("*")) == before


# Damage


@pytest.mark.parametrize("name", ["a.safetensors", "a.pt", "folder"])
def test_damaged_bytes_get_no_new_checksums(tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    source, target = tmp_path / name, tmp_path / "target.safetensors"
    size = 100 if name == "folder" else None
    nvme_ops.save({"a": torch.zeros(5000), "b": torch.ones(7)}, source, max_shard_size=size)
    file = next(source.glob("*1-of-*.safetensors")) if source.is_dir() else source
    flip(file, file.stat().st_size // 2)
    assert main(["convert", str(source), str(target)]) == 2
    assert "'a'" in capsys.readouterr().err
    assert not target.exists()
    assert main(["convert", "--no-verify", str(source), str(target)]) == 0
    os.truncate(file, file.stat().st_size // 2)
    target.write_bytes(b"before")
    with pytest.raises(FormatError, match=re.escape(str(file))):
        convert(str(source), str(target))
    assert target.read_bytes() == b"before"


# Something comes between


NEW = {f"weight{number}": torch.full((256, 256), float(number)) for number in range(6)}


# A source that does not stay as it is: an error, or what it was when it was opened


@pytest.fixture(params=["source.pt", "source.safetensors", "source"])
def source(request: pytest.FixtureRequest, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Has NEW, and is read with memory for two tensors."""
    monkeypatch.setattr(ring, "PIECE", NEW["weight0"].nbytes)
    path = folder / str(request.param)
    nvme_ops.save(NEW, path, max_shard_size=None if path.suffix else "600KB")
    (folder / "target.safetensors").write_bytes(b"old")
    return path


def cut(file: Path) -> None:
    os.truncate(file, 4096)


def written_over(file: Path) -> None:
    flip(file, file.stat().st_size - (64 << 10))


@pytest.mark.parametrize("act", [cut, written_over])
def test_a_source_that_is_changed(source: Path, act: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    target, before = source.parent / "target.safetensors", sorted(source.parent.rglob("*"))
    for _ in range(2):
        last = source if source.suffix else max(source.glob("*.safetensors"))  # is read last
        with pytest.raises(FormatError, match=re.escape(f"{last} was changed")):
            convert(str(source), str(target), on_progress=at_second(functools.partial(act, last)))
        monkeypatch.undo()  # the second time all of it is on its way when it is changed
        nvme_ops.save(NEW, source, max_shard_size=None if source.suffix else "600KB")
    assert target.read_bytes() == b"old"
    assert len(list(source.parent.rglob("*"))) == len(before)


def test_a_source_that_is_replaced_or_recycled_is_what_was_opened(source: Path) -> None:
    other, recycle = {name: tensor + 1 for name, tensor in NEW.items()}, bool(source.suffix)
    for tensors in (other, NEW):
        nvme_ops.save(tensors, source, recycle=recycle, max_shard_size=None if source.suffix else "600KB")

    def replace() -> None:
        for _ in range(2):
            nvme_ops.save(other, source, recycle=recycle)

    convert(str(source), str(source.parent / "target.safetensors"), on_progress=at_second(replace))
    assert equal(nvme_ops.load(source.parent / "target.safetensors"), NEW)


# Info, verify and diff: across formats, and on DCP's folders


pytestmark = pytest.mark.filterwarnings("ignore:.*(torch.distributed is disabled|Detected an existing checkpoint)")

STATE = {"a": torch.arange(12.0).view(3, 4), "b": torch.ones(5).bfloat16(), "c": torch.arange(3)}
ANOTHER = {**STATE, "a": STATE["a"] + 1, "b": STATE["b"].half(), "d": torch.ones(1)}


@pytest.mark.parametrize("first", ["model.safetensors", "model.pt", "folder"])
def test_across_formats(tmp_path: Path, first: str, capsys: pytest.CaptureFixture[str]) -> None:
    nvme_ops.save(STATE, tmp_path / first)
    assert main(["info", str(tmp_path / first)]) == 0
    assert " 3 tensors, " in capsys.readouterr().out.splitlines()[0]  # a pickle is none
    for second in ("model.safetensors", "model.pt", "folder"):
        same, other = tmp_path / f"same-{second}", tmp_path / f"other-{second}"
        nvme_ops.save(STATE, same)
        nvme_ops.save(ANOTHER, other)
        assert main(["diff", str(tmp_path / first), str(same)]) == 0
        assert capsys.readouterr().out == "the same 3 tensors\n"
        assert main(["diff", str(tmp_path / first), str(other)]) == 1
        said = capsys.readouterr().out
        for words in ("values differ: a", "only in the second: d", "dtype or shape differs: b"):
            assert words in said
        assert main(["verify", str(same), str(other)]) == 0
        assert [line.split(", ")[0] for line in capsys.readouterr().out.splitlines()] == [
            f"{same}: [OKAY] 3 tensors",
            f"{other}: [OKAY] 4 tensors",
        ]
        assert main(["verify", str(same), "--json"]) == 0
        assert json.loads(capsys.readouterr().out) == {"checked": 3, "without_checksum": 0, "damaged": []}
        item = contents(other).items[-1]
        flip(Path(item.path), item.end - 1)
        assert [main(["verify", str(one), str(two)]) for one, two in ((same, other), (other, same))] == [1, 1]
        capsys.readouterr()


def test_refusals_speak_of_flags_and_say_what_a_file_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, target, other = str(tmp_path / "a.pt"), str(tmp_path / "a.xyz"), tmp_path / "model.gguf"
    nvme_ops.save({"a": torch.ones(3)}, source)
    other.write_bytes(b"GGUF" + bytes(60))
    for words, said in (
        (["convert", source, target], "; give --format\n"),
        (["convert", source, source + ".pt", "--max-shard-size", "1G"], ": --max-shard-size is for checkpoints in "),
        (["info", str(other)], "model.gguf: is a GGUF file, as llama.cpp reads: nvme_ops.offload.from_pretrained "),
    ):
        assert main(words) == 2
        assert said in capsys.readouterr().err
    assert main(["convert", source, target, "--format", "safetensors"]) == 0
    assert torch.equal(nvme_ops.load(target, format="safetensors")["a"], torch.ones(3))


@pytest.mark.parametrize("name", OBJECTS)
@pytest.mark.filterwarnings("ignore")
def test_files_from_before_torch_1_6(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old, new = tmp_path / "old.pt", tmp_path / "new.pt"
    torch.save(OBJECTS[name](), old, _use_new_zipfile_serialization=False)
    torch.manual_seed(0)
    obj = torch.load(old) if name != "nested" else OBJECTS[name]()  # torch itself cannot load that one
    torch.save(obj, new)
    listing = contents(old)
    about = [(item.name, item.dtype, item.shape, item.bytes) for item in listing.tensors]
    assert about == [(item.name, item.dtype, item.shape, item.bytes) for item in contents(new).tensors]
    assert main(["verify", str(old)]) == (1 if listing.items else 0)
    assert ("[NO CHECKSUMS]" if listing.items else "[OKAY]") in capsys.readouterr().out
    assert main(["diff", str(old), str(new)]) == 0 or name == "nested"
    size = old.stat().st_size
    for length in range(0, size, max(1, size // 40)):
        os.truncate(old, size - length - 1)
        with pytest.raises(FormatError):
            contents(old)


def test_a_file_from_before_torch_1_6_that_differs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tensors = {"a": torch.arange(300_000), "b": torch.ones(3)}
    torch.save(tensors, tmp_path / "a.pt", _use_new_zipfile_serialization=False)
    torch.save(tensors | {"b": torch.zeros(3)}, tmp_path / "b.pt", _use_new_zipfile_serialization=False)
    assert main(["diff", str(tmp_path / "a.pt"), str(tmp_path / "b.pt")]) == 1
    assert capsys.readouterr().out == "values differ: b\n"
    for hostile in (["no list of keys"], [[1], {}], ["0", "0"]):
        head = b"".join(pickle.dumps(value, 2) for value in (0x1950A86A20F9469CFC6C, 1001, {"little_endian": True}, {}))
        (tmp_path / "c.pt").write_bytes(head + pickle.dumps(hostile, 2))
        with pytest.raises(FormatError, match="lists other storages"):
            contents(tmp_path / "c.pt")


def test_a_dcp_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, other, bare = (tmp_path / name for name in ("one", "other", "bare"))
    for path in (one, other, bare):
        dcp.save({**STATE, "step": 7}, storage_writer=NvmeStorageWriter(path, checksums=path != bare))
    assert main(["info", str(one)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("dcp: 3 tensors, ")
    assert any(line.split()[:2] == ["b", "bfloat16"] for line in lines)
    assert [main(["verify", str(path)]) for path in (one, bare)] == [0, 1]
    assert main(["diff", str(one), str(other)]) == 0
    item = next(item for item in contents(one).items if item.name == "a")
    flip(Path(item.path), item.end - 1)
    assert main(["verify", str(one)]) == 1
    assert "DAMAGED a" in capsys.readouterr().out
    assert main(["diff", str(one), str(other)]) == 1
    nvme_ops.save(STATE, tmp_path / "model.pt")
    assert main(["diff", str(other), str(tmp_path / "model.pt")]) == 2
    assert "dcp_to_torch_save" in capsys.readouterr().err


@pytest.mark.parametrize("writer", [NvmeStorageWriter, dcp.FileSystemWriter])
@pytest.mark.filterwarnings("ignore")
def test_a_dcp_folder_becomes_a_file(writer: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kept = {name: tensor.detach() for name, tensor in state().items()}
    saved = {"model": kept, "optimizer": {"state": {0: torch.ones(3)}, "lr": 0.1}, "step": 3}
    dcp.save(saved, storage_writer=writer(tmp_path / "dcp"))
    convert(str(tmp_path / "dcp"), str(tmp_path / "a.safetensors"), key="model")
    loaded = nvme_ops.load(tmp_path / "a.safetensors", verify=True)
    assert equal(loaded, kept)
    convert(str(tmp_path / "dcp"), str(tmp_path / "a.pt"), key="optimizer.state")
    assert equal(torch.load(tmp_path / "a.pt"), {"0": torch.ones(3)})
    for words, said in (
        ([], "more than tensors by name: 'optimizer.lr', 'step'; --key takes the tensors of one entry: 'model', 'op"),
        (["--key", "optimizer"], "has more than tensors by name: 'optimizer.lr'"),
        (["--key", "x"], "has no entry 'x'; it has 'model', 'optimizer', 'step'"),
    ):
        assert main(["convert", str(tmp_path / "dcp"), str(tmp_path / "b.pt"), *words]) == 2
        assert said in capsys.readouterr().err
    item = next(item for item in contents(tmp_path / "dcp").items if item.name == "model.large")
    flip(Path(item.path), (item.start + item.end) // 2)
    assert main(["convert", str(tmp_path / "dcp"), str(tmp_path / "b.pt"), "--key", "model"]) == (
        2 if writer is NvmeStorageWriter else 0  # torch's has no checksums
    )


def test_chunks_of_two_dimensions(tmp_path: Path) -> None:
    whole = torch.arange(35 * 9).view(35, 9)
    rows, columns = [0, 10, 11, 35], [0, 4, 9]
    blocks = [(a, b, c, d) for a, b in itertools.pairwise(rows) for c, d in itertools.pairwise(columns)]
    (tmp_path / "data").write_bytes(b"".join(whole[a:b, c:d].contiguous().numpy().tobytes() for a, b, c, d in blocks))
    with closing(WeightFile(os.open(tmp_path / "data", os.O_RDONLY), "data", shared_handle())) as file:
        chunks, place = [], 0
        for a, b, c, d in blocks:
            shape = (b - a, d - c)
            extent = FileExtent(file, place, shape[0] * shape[1] * 8)
            chunks.append(_Chunk((a, c), Source([extent], torch.int64, shape)))
            place += extent.nbytes
        for order in (chunks, chunks[::-1]):
            (made,) = _joined(_joined(order, 1), 0)
            assert torch.equal(read_now([made.source])[0], whole)
        for missing in range(len(chunks)):
            assert len(_joined(_joined(chunks[:missing] + chunks[missing + 1 :], 1), 0)) > 1 or missing in (0, 1, 4, 5)


class Gets:
    """Takes something from what may be named."""

    def __reduce__(self) -> tuple[object, tuple[type, str]]:
        return getattr, (Metadata, "__init__")


@pytest.mark.parametrize("harm", [Evil(Path("harm")), Gets(), torch.nn.Linear, {"a": 1}])
def test_nothing_in_a_hostile_folder_is_run(
    tmp_path: Path, harm: object, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".metadata").write_bytes(pickle.dumps(harm))
    assert main(["info", str(tmp_path)]) == 2
    assert ".metadata" in capsys.readouterr().err
    assert not (tmp_path / "harm").exists()
