"""``nvme-checkpoint convert``: between the formats, equal values, in bounded memory."""

from __future__ import annotations

import json
import os
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

import nvme_ops
from nvme_ops.errors import FormatError
from nvme_ops.inspection.cli import main
from nvme_ops.inspection.convert import convert
from tests.conftest import run_python


def state() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    embedding = torch.randn(40, 16)
    return {
        "large": torch.randn(3 << 20),
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
    }


def equal(some: Any, others: Any) -> bool:
    return list(some) == list(others) and all(torch.equal(some[name], others[name]) for name in some)


@pytest.fixture(params=["now", "module", "old", "nested", "numpy's way"])
def source(request: pytest.FixtureRequest, folder: Path) -> tuple[Path, list[str]]:
    """A file of ``torch.save``, and the words that convert it."""
    kept: Any = state()
    path = folder / "source.pt"
    if request.param == "old":
        torch.save(kept, path, _use_new_zipfile_serialization=False)
    elif request.param == "nested":
        torch.save({"epoch": 3, "a.b": {"model": kept}}, path)
        return path, ["--key", "a.b.model"]
    elif request.param == "module":
        kept = OrderedDict(kept)
        kept._metadata = {"": {"version": 1}}
        torch.save(kept, path)
    elif request.param == "now":
        torch.save(kept, path)
    else:
        nvme_ops.save(kept, path)
    return path, []


def test_to_safetensors(source: tuple[Path, list[str]], folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, words = source
    target = folder / "target.safetensors"
    assert main(["convert", str(path), str(target), *words]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "head: the same tensor as embedding, which is stored",
        f"[OKAY] {target}: 11 tensors, 12 MiB",
    ]
    expected = {name: each.detach() for name, each in state().items() if name != "head"}
    found = safetensors.torch.load_file(target)
    assert equal({name: found[name] for name in expected}, expected)
    with safetensors.safe_open(target, "pt") as file:
        assert file.metadata()["format"] == "pt"
        assert file.metadata()["head"] == "embedding"
    assert main(["verify", str(target)]) == 0


def test_to_another_file_of_torch(source: tuple[Path, list[str]], folder: Path) -> None:
    path, words = source
    assert main(["convert", str(path), str(folder / "target.bin"), *words]) == 0
    found = torch.load(folder / "target.bin")
    assert equal(found, state())
    assert found["head"].data_ptr() == found["embedding"].data_ptr()


def test_to_several_files_and_back(source: tuple[Path, list[str]], folder: Path) -> None:
    path, words = source
    assert main(["convert", str(path), str(folder / "model"), "--max-shard-size", "1MB", *words]) == 0
    assert len(list((folder / "model").glob("*.safetensors"))) > 1
    assert main(["convert", str(folder / "model"), str(folder / "back.pt")]) == 0
    expected = {name: each for name, each in state().items() if name != "head"}
    assert equal(dict(sorted(torch.load(folder / "back.pt").items())), dict(sorted(expected.items())))


def test_several_files_of_torch(folder: Path) -> None:
    """Such as ``save_pretrained`` of earlier versions wrote them, in the folder that they are in."""
    torch.save({"a": torch.ones(3), "unnamed": torch.ones(1)}, folder / "pytorch_model-00001-of-00002.bin")
    torch.save({"b": torch.zeros(4)}, folder / "pytorch_model-00002-of-00002.bin")
    places = {"a": "pytorch_model-00001-of-00002.bin", "b": "pytorch_model-00002-of-00002.bin"}
    index = {"metadata": {"total_size": 28}, "weight_map": places}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    assert main(["convert", str(folder), str(folder)]) == 0
    assert equal(nvme_ops.load(folder / "model.safetensors.index.json"), {"a": torch.ones(3), "b": torch.zeros(4)})
    places["c"] = places["b"]
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    with pytest.raises(FormatError, match="weight_map says that 'c' is in"):
        convert(str(folder / "pytorch_model.bin.index.json"), str(folder / "other"))


def test_a_model_of_transformers_loads_what_was_converted(folder: Path) -> None:
    transformers: Any = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=99, hidden_size=32, intermediate_size=64, num_attention_heads=2, num_hidden_layers=2,
        tie_word_embeddings=True,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).eval()
    config.save_pretrained(folder)
    torch.save(model.state_dict(), folder / "pytorch_model.bin")  # with both names of the tied weight
    convert(str(folder), str(folder / "model.safetensors"))
    (folder / "pytorch_model.bin").unlink()
    ids = torch.tensor([[1, 2, 3]])
    with torch.no_grad():
        wanted = model(ids).logits
        assert torch.equal(transformers.LlamaForCausalLM.from_pretrained(folder).eval()(ids).logits, wanted)
        with nvme_ops.offload.from_pretrained(folder, memory_budget="1M") as streamed:
            assert torch.equal(streamed(ids).logits, wanted)


def test_memory_is_bounded(folder: Path) -> None:
    """By the window, the buffers of writing, and the modules that are imported; not by the size of the file."""
    torch.save({str(number): torch.full((80 << 18,), float(number)) for number in range(5)}, folder / "a.pt")
    program = """
        import resource, sys
        from nvme_ops.inspection.convert import convert
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        for target in sys.argv[2:]:
            convert(sys.argv[1], target)
        print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
    """
    grown = int(run_python(program, folder / "a.pt", folder / "a.safetensors", folder / "b.pt").stdout) >> 10
    assert grown < 200, f"{grown} MiB, to convert 400"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "has more than tensors by name: 'epoch', 'model'; --key takes the tensors of one entry: 'model'"),
        (["--key", "nothing"], "has no entry 'nothing'; it has 'epoch', 'model'"),
        (["--key", "model.a"], "'model.a' is no dictionary of tensors by name"),
        (["--key", "model.a.b"], "'model.a.b' is no dictionary of tensors by name"),
        (["--key", "epoch"], "'epoch' is no dictionary of tensors by name"),
    ],
)
@pytest.mark.parametrize("modern", [True, False])
def test_what_is_no_tensor(
    folder: Path, modern: bool, words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.save({"epoch": 3, "model": {"a": torch.ones(3)}}, folder / "a.pt", _use_new_zipfile_serialization=modern)
    assert main(["convert", str(folder / "a.pt"), str(folder / "a.safetensors"), *words]) == 2
    assert capsys.readouterr().err == f"nvme-checkpoint: {folder / 'a.pt'}{' ' if said[0] == 'h' else ': '}{said}\n"
    assert os.listdir(folder) == ["a.pt"]


@pytest.mark.parametrize(
    ("tensor", "said"),
    [(torch.ones(3).to_sparse(), "no dense memory"), (torch.ones(2, dtype=torch.complex128), "no dtype for")],
)
def test_what_the_target_cannot_hold(folder: Path, tensor: torch.Tensor, said: str) -> None:
    torch.save({"a": tensor}, folder / "a.pt")
    with pytest.raises(ValueError, match=f"'a'.*{said}"):
        convert(str(folder / "a.pt"), str(folder / "a.safetensors"))
    convert(str(folder / "a.pt"), str(folder / "b.pt"))
    assert torch.equal(torch.load(folder / "b.pt")["a"].to_dense(), tensor.to_dense())


def test_conjugated_ones(folder: Path) -> None:
    kept = {"a": torch.randn(4, dtype=torch.complex64).conj()}
    torch.save(kept, folder / "a.pt")
    convert(str(folder / "a.pt"), str(folder / "a.safetensors"))
    assert torch.equal(safetensors.torch.load_file(folder / "a.safetensors")["a"], kept["a"])


def test_itself_is_no_target(folder: Path) -> None:
    torch.save({"a": torch.ones(3)}, folder / "a.pt")
    (folder / "link.pt").symlink_to("a.pt")
    with pytest.raises(ValueError, match="is what is converted"):
        convert(str(folder / "a.pt"), str(folder / "link.pt"))
    nvme_ops.save({"a": torch.ones(3)}, folder / "model.safetensors")
    with pytest.raises(ValueError, match=r"model\.safetensors is what is converted"):  # which its shards would replace
        convert(str(folder / "model.safetensors"), str(folder))
    assert sorted(os.listdir(folder)) == ["a.pt", "link.pt", "model.safetensors"]


def test_a_shard_is_not_converted_to_the_folder_that_it_is_in(folder: Path) -> None:
    """Its place in the new index is not its own: it would be removed with the other shards of the old one."""
    nvme_ops.save({"a": torch.ones(3), "b": torch.ones(3)}, folder, max_shard_size=12)
    before = sorted(os.listdir(folder))
    shard = folder / "model-00001-of-00002.safetensors"
    with pytest.raises(ValueError, match=rf"{shard.name} is what is converted"):
        convert(str(shard), str(folder))
    assert sorted(os.listdir(folder)) == before


@pytest.mark.parametrize("name", ["a.pt", "a.safetensors"])
def test_a_source_that_is_cut_leaves_the_target_as_it_was(folder: Path, name: str) -> None:
    nvme_ops.save({"a": torch.ones(1 << 20), "b": torch.ones(1 << 20)}, folder / name)
    os.truncate(folder / name, 5 << 20)
    (folder / "b.safetensors").write_bytes(b"before")
    with pytest.raises(FormatError, match="a\\."):
        convert(str(folder / name), str(folder / "b.safetensors"))
    assert (folder / "b.safetensors").read_bytes() == b"before"
    assert sorted(os.listdir(folder)) == sorted([name, "b.safetensors"])


def test_files_that_cannot_be_opened(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["convert", str(folder / "missing.pt"), str(folder / "a.safetensors")]) == 2
    assert main(["convert", str(folder), str(folder / "a.safetensors")]) == 2
    torch.save({"a": torch.ones(3)}, folder / "a.pt")
    assert main(["convert", str(folder / "a.pt"), str(folder / "missing" / "a.safetensors")]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 3
    assert all(str(folder) in line for line in lines)


def test_as_json(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tensor = torch.ones(3)
    torch.save({"a": tensor, "b": tensor}, folder / "a.pt")
    assert main(["convert", str(folder / "a.pt"), str(folder / "a.safetensors"), "--json", "--no-checksums"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said == {"path": str(folder / "a.safetensors"), "tensors": 1, "bytes": 12, "tied": {"b": "a"}}
    assert main(["verify", str(folder / "a.safetensors")]) == 1  # there is nothing to compare with
