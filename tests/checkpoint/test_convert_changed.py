"""``nvme-checkpoint convert`` of a source that does not stay as it is: an error, or what it was when it was opened."""

from __future__ import annotations

import os
import re
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import nvme_ops
from nvme_ops.errors import AnotherSaveError, FormatError
from nvme_ops.inspection import convert as converter
from nvme_ops.inspection.cli import main
from nvme_ops.inspection.convert import convert
from tests.checkpoint.test_convert_beside import NEW, OLD, OTHER, content, once


@pytest.fixture(params=["source.pt", "source.safetensors", "source"])
def source(request: pytest.FixtureRequest, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Has NEW, and is read with memory for two tensors."""
    monkeypatch.setattr(converter, "BUDGET", 2 * NEW["weight0"].nbytes)
    path = folder / str(request.param)
    nvme_ops.save(NEW, path, max_shard_size=None if path.suffix else "600KB")
    nvme_ops.save(OLD, folder / "target.safetensors")
    return path


def cut(source: Path) -> None:
    os.truncate(last_of(source), 4096)


def written_over(source: Path) -> None:
    with open(last_of(source), "r+b") as file:
        file.seek(-(64 << 10), os.SEEK_END)
        file.write(bytes(4096))


def last_of(source: Path) -> Path:
    """Its file that is read last."""
    return source if source.suffix else max(source.glob("*.safetensors"))


def replaced(source: Path) -> None:
    nvme_ops.save(OTHER, source)


@pytest.mark.parametrize("act", [cut, written_over])
def test_a_source_that_is_changed_is_an_error(source: Path, act: Callable[[Path], None]) -> None:
    target = source.parent / "target.safetensors"
    before = sorted(source.parent.rglob("*"))
    with pytest.raises(FormatError, match=re.escape(f"{last_of(source)} was changed")):
        convert(str(source), str(target), on_progress=once(lambda: act(source)))
    assert content(target) == "old"
    assert sorted(source.parent.rglob("*")) == before


def test_a_source_that_is_changed_while_its_last_bytes_are_read(folder: Path) -> None:
    """All of it is on its way when that happens."""
    target, source = folder / "target.safetensors", folder / "source.safetensors"
    nvme_ops.save(NEW, source)
    with pytest.raises(FormatError, match=r"source\.safetensors was changed"):
        convert(str(source), str(target), on_progress=once(lambda: written_over(source)))
    assert os.listdir(folder) == ["source.safetensors"]


def test_a_source_that_is_replaced(source: Path) -> None:
    """What was opened is converted."""
    target = source.parent / "target.safetensors"
    convert(str(source), str(target), on_progress=once(lambda: replaced(source)))
    assert content(target) == "new"


def test_a_source_that_is_recycled(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file that is being read is not written over."""
    monkeypatch.setattr(converter, "BUDGET", 2 * NEW["weight0"].nbytes)
    target, source = folder / "target.safetensors", folder / "source.safetensors"
    for value in (OTHER, NEW):
        nvme_ops.save(value, source, recycle=True)

    def save_twice() -> None:
        for _ in range(2):
            nvme_ops.save(OTHER, source, recycle=True)

    convert(str(source), str(target), on_progress=once(save_twice))
    assert content(target) == "new"


def test_an_index_with_a_shard_of_another_save(folder: Path) -> None:
    for name, tensors in (("model", NEW), ("other", OTHER)):
        nvme_ops.save(tensors, folder / name, max_shard_size="600KB")
    shard = last_of(folder / "model")
    shard.write_bytes((folder / "other" / shard.name).read_bytes())
    with pytest.raises(AnotherSaveError, match=re.escape(str(shard))):
        convert(str(folder / "model"), str(folder / "target.safetensors"))
    assert not (folder / "target.safetensors").exists()


def test_checksums_that_cannot_be_read_are_no_reason_not_to_look(tmp_path: Path) -> None:
    """The first shard's are damaged, and the second one's data."""
    nvme_ops.save({"a": torch.zeros(500), "b": torch.ones(700)}, tmp_path / "source", max_shard_size=2000)
    first, second = sorted((tmp_path / "source").glob("*.safetensors"))
    content = first.read_bytes()
    place = content.index(b"crc32c") + 9
    first.write_bytes(content[:place] + b"z" + content[place + 1 :])
    data = bytearray(second.read_bytes())
    data[-5] ^= 1
    second.write_bytes(data)
    with pytest.raises((OSError, FormatError)):
        convert(str(tmp_path / "source"), str(tmp_path / "target.safetensors"))
    assert not (tmp_path / "target.safetensors").exists()


def test_a_compressed_file_is_verified(tmp_path: Path) -> None:
    torch.save({"a": torch.rand(5000)}, tmp_path / "plain.pt")
    source = tmp_path / "source.pt"
    with zipfile.ZipFile(tmp_path / "plain.pt") as plain, zipfile.ZipFile(source, "w", zipfile.ZIP_DEFLATED) as packed:
        for name in plain.namelist():
            packed.writestr(name, plain.read(name))
        next(each for each in packed.infolist() if each.filename.endswith("/data/0")).CRC ^= 1
    with pytest.raises((OSError, FormatError)):
        convert(str(tmp_path / "source.pt"), str(tmp_path / "target.safetensors"))
    converted = convert(str(tmp_path / "source.pt"), str(tmp_path / "target.safetensors"), verify=False)
    assert converted.tensors == 1


@pytest.mark.parametrize("name", ["a.safetensors", "a.pt", "folder"])
def test_damaged_bytes_get_no_new_checksums(tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    source, target = tmp_path / name, tmp_path / "target.safetensors"
    nvme_ops.save(
        {"a": torch.zeros(5000), "b": torch.ones(7)}, source, max_shard_size=100 if name == "folder" else None
    )
    file = next(source.glob("*1-of-*.safetensors")) if source.is_dir() else source
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    assert main(["convert", str(source), str(target)]) == 2
    assert "'a'" in capsys.readouterr().err
    assert not target.exists()
    assert main(["convert", "--no-verify", str(source), str(target)]) == 0
