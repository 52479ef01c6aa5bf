"""Arguments of ``from_pretrained``: each of transformers' own does what it does there, or is refused by its name."""

from __future__ import annotations

import inspect
import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import nvme_ops
from nvme_ops.offload import from_pretrained

transformers: Any = pytest.importorskip("transformers")

pytestmark = pytest.mark.usefixtures("one_thread", "quiet_transformers")

IDS = torch.tensor([[5, 6, 7, 8], [9, 10, 11, 12]])
SIZES: dict[str, Any] = {
    "vocab_size": 256, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_hidden_layers": 2,
    "pad_token_id": 0,
}  # fmt: skip
REFUSED = object()
#: By argument: a value at which it should change something, if it can; and REFUSED if it has to be.
ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "config": ("other",),
    "cache_dir": ("cache",),
    "token": ("secret",),
    "use_safetensors": (False, REFUSED),
    "fusion_config": ({},),
    "state_dict": ({}, REFUSED),
    "proxies": ({},),
    "tqdm_class": (object,),
    "_from_pipeline": ("text-generation",),
    "dtype": ("float16",),
    "torch_dtype": (torch.bfloat16,),
    "device_map": ("auto", REFUSED),
    "max_memory": ({0: "1GB"}, REFUSED),
    "offload_folder": ("offload", REFUSED),
    "offload_buffers": (True, REFUSED),
    "quantization_config": ({"quant_method": "bitsandbytes", "load_in_8bit": True}, REFUSED),
    "subfolder": ("part",),
    "_commit_hash": ("0" * 40,),
    "variant": ("fp16",),
    "adapter_kwargs": ({"revision": "main"}, REFUSED),
    "adapter_name": ("mine", REFUSED),
    "generation_config": (transformers.GenerationConfig(max_length=77),),
    "gguf_file": (None,),  # test_gguf.py has such files
    "key_mapping": ({r"^other\.": "model."},),
    **dict.fromkeys(("revision", "code_revision"), ("main",)),
    **dict.fromkeys(("attn_implementation", "experts_implementation"), ("eager",)),
    **dict.fromkeys(("ignore_mismatched_sizes", "force_download", "local_files_only", "disable_mmap"), (True,)),
    **dict.fromkeys(("output_loading_info", "_from_auto", "trust_remote_code", "allow_all_kernels"), (True,)),
    **dict.fromkeys(("mirror", "_fast_init", "low_cpu_mem_usage", "offload_state_dict"), (True,)),
    **dict.fromkeys(("weights_only", "use_kernels", "from_tf", "from_flax"), (False,)),
    **dict.fromkeys(("distributed_config", "device_mesh", "tp_plan", "tp_size"), (None,)),  # test_ranks.py divides one
    "kernel_config": (None,),
    # fields of the configuration
    "output_attentions": (True,),
    "use_cache": (False,),
    "rms_norm_eps": (0.1,),
}

RECENT = ("fusion_config", "disable_mmap", "tqdm_class", "allow_all_kernels")


def saved(folder: Path, kind: str = "LlamaForCausalLM", seed: int = 1, **changes: Any) -> Path:
    torch.manual_seed(seed)
    of = "Bert" if kind.startswith("Bert") else "Llama"
    getattr(transformers, kind)(getattr(transformers, f"{of}Config")(**SIZES, **changes)).save_pretrained(folder)
    return folder


def arguments_of_transformers() -> set[str]:
    """The names that transformers' own ``from_pretrained`` takes, from its signature and its code."""
    names = {"code_revision"}
    function = inspect.unwrap(transformers.PreTrainedModel.from_pretrained.__func__)
    parameters = inspect.signature(function).parameters.values()
    names |= {parameter.name for parameter in parameters}
    source = inspect.getsource(function)
    names |= set(re.findall(r'kwargs\.pop\(\s*"(\w+)"', source))
    for listed in re.findall(r"for name in \[([^]]*)\]:\s+_ = kwargs\.pop", source):
        names |= set(re.findall(r'"(\w+)"', listed))
    return names - {"cls", "pretrained_model_name_or_path", "model_args", "kwargs"}


def test_all_that_transformers_takes_is_in_the_table() -> None:
    names = arguments_of_transformers()
    assert {"config", "variant", "torch_dtype", "device_map"} <= names
    assert names <= ARGUMENTS.keys()


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model, another one in a subfolder, a variant, and names to be mapped."""
    path = saved(tmp_path_factory.mktemp("files"))
    saved(path / "part", seed=2)
    saved(path / "other", seed=3, rms_norm_eps=0.5)
    saved(path / "variant", seed=4)
    shutil.copy(path / "variant" / "model.safetensors", path / "model.fp16.safetensors")
    state = nvme_ops.load(path / "model.safetensors")
    renamed = {name.replace("model.", "other."): value for name, value in state.items()}
    saved(path / "renamed")
    nvme_ops.save(renamed, path / "renamed" / "model.safetensors", metadata={"format": "pt"})
    return path


@pytest.mark.parametrize("name", ARGUMENTS)
def test_an_argument_does_what_it_does_in_transformers_or_is_refused(name: str, files: Path, tmp_path: Path) -> None:
    value, *refused = ARGUMENTS[name]
    path = files / "renamed" if name == "key_mapping" else files
    if name == "config":
        value = files / value
    given = {name: value}
    if refused:
        with pytest.raises(ValueError, match=f"^{name}="):
            from_pretrained(path, memory_budget="4M", **given)
        return
    if name in RECENT and name not in arguments_of_transformers():
        pytest.skip("newer versions of transformers have it")
    kind = transformers.AutoModelForCausalLM if name == "code_revision" else transformers.LlamaForCausalLM
    plain = kind.from_pretrained(path, **given)
    model = from_pretrained(path, memory_budget="4M", **given)
    if name == "output_loading_info":
        (plain, wanted), (model, info) = plain, model
        assert info.keys() == wanted.keys()
    assert model.dtype == plain.dtype
    assert model.generation_config.to_dict() == plain.generation_config.to_dict()
    with model, torch.no_grad():
        assert torch.equal(model(IDS).logits, plain(IDS).logits)
    wanted, config = plain.config.to_dict(), model.config.to_dict()
    assert Path(config.pop("_name_or_path")) in (path, path / "part")
    assert config == {name: value for name, value in wanted.items() if name != "_name_or_path"}
    assert model.config._attn_implementation == plain.config._attn_implementation


def test_values_that_change_nothing_are_accepted_and_others_named(files: Path) -> None:
    neutral: dict[str, Any] = {
        "use_safetensors": True, "state_dict": None, "device_map": None, "offload_buffers": False, "adapter_kwargs": {},
        "gguf_file": None, "adapter_name": "default", "dtype": "auto",
    }  # fmt: skip
    with from_pretrained(files, memory_budget="4M", **neutral) as model:
        assert model.dtype == torch.float32
    wrong: list[tuple[dict[str, Any], Any, str]] = [
        ({"output_attentions": True, "attn_implementation": "sdpa"}, Exception, "output_attentions"),  # transformers'
        ({"dtype": "float17"}, ValueError, "dtype must be .* not 'float17'"),
        ({"dtype": 16}, ValueError, "dtype must be .* not 16"),
        ({"bytes": "4M"}, TypeError, "unexpected keyword argument 'bytes'"),
    ]
    for given, error, words in wrong:
        with pytest.raises(error, match=words):
            from_pretrained(files, memory_budget="4M", **given)


# Heads that the files do not have


@pytest.mark.parametrize("auto", [False, True])
@pytest.mark.parametrize(
    ("kind", "head", "new"),
    [
        ("LlamaForCausalLM", "LlamaForSequenceClassification", {"score.weight"}),
        ("LlamaForCausalLM", "LlamaForTokenClassification", {"score.weight", "score.bias"}),
        ("BertForMaskedLM", "BertForSequenceClassification",
         {"bert.pooler.dense.weight", "bert.pooler.dense.bias", "classifier.weight", "classifier.bias"}),
        ("LlamaForSequenceClassification", "LlamaForCausalLM", {"lm_head.weight"}),
    ],
)  # fmt: skip
def test_a_head_that_the_files_lack_is_initialized_and_can_be_trained(
    kind: str, head: str, new: set[str], auto: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, labels = saved(tmp_path, kind), dict[str, Any]({} if head == "LlamaForCausalLM" else {"num_labels": 5})
    model_class = getattr(transformers, f"AutoModelFor{head.partition('For')[2]}" if auto else head)
    torch.manual_seed(7)
    plain = model_class.from_pretrained(path, **labels)
    torch.manual_seed(7)
    transformers.logging.set_verbosity_warning()
    logger = transformers.logging.get_logger("transformers")
    logger.propagate = True
    with caplog.at_level("WARNING", "transformers"):
        model = from_pretrained(path, memory_budget="2M", model_class=model_class, **labels)
    logger.propagate = False
    assert all(name.rpartition(".")[0] in caplog.text for name in new), "it is said"
    assert {name for name, param in model.named_parameters() if param.requires_grad} == new
    assert type(model).__name__ == type(plain).__name__ == head
    with model:
        for module in (model, plain):
            module(IDS)[0].sum().backward()
        assert torch.equal(model(IDS)[0], plain(IDS)[0])
        for name in new:
            gradient: Any = model.get_parameter(name).grad
            assert torch.equal(gradient, plain.get_parameter(name).grad)
        model.save_pretrained(tmp_path / "again")
        assert torch.equal(type(plain).from_pretrained(tmp_path / "again")(IDS)[0], plain(IDS)[0])


def test_weights_of_another_shape_are_initialized_if_asked_for(tmp_path: Path) -> None:
    path = saved(tmp_path, "LlamaForSequenceClassification", num_labels=2)
    with pytest.raises(ValueError, match=r"another shape .*ignore_mismatched_sizes.*: score\.weight"):
        from_pretrained(path, memory_budget="2M", num_labels=5)
    given: dict[str, Any] = {"num_labels": 5, "ignore_mismatched_sizes": True}
    torch.manual_seed(7)
    plain = transformers.LlamaForSequenceClassification.from_pretrained(path, **given)
    torch.manual_seed(7)
    with from_pretrained(path, memory_budget="2M", **given) as model, torch.no_grad():
        assert torch.equal(model(IDS).logits, plain(IDS).logits)
        assert [name for name, param in model.named_parameters() if param.requires_grad] == ["score.weight"]


def test_the_part_of_a_model_that_has_no_head(tmp_path: Path) -> None:
    path = saved(tmp_path)
    for kind in (transformers.LlamaModel, transformers.AutoModel):
        plain = kind.from_pretrained(path)
        with from_pretrained(path, memory_budget="2M", model_class=kind) as model, torch.no_grad():
            assert torch.equal(model(IDS)[0], plain(IDS)[0])


def test_what_is_missing_of_the_layers_below_a_head_is_no_head(tmp_path: Path) -> None:
    path = saved(tmp_path)
    state = nvme_ops.load(path / "model.safetensors")
    for gone in ("model.layers.1.mlp.up_proj.weight", "lm_head.weight"):
        left = {name: value for name, value in state.items() if name != gone}
        nvme_ops.save(left, path / "model.safetensors", metadata={"format": "pt"})
        kinds = [None, transformers.LlamaForCausalLM, transformers.AutoModelForCausalLM]
        for kind in [*kinds, transformers.LlamaForSequenceClassification] if "layers" in gone else kinds:
            with pytest.raises(ValueError, match=f"weights are missing: {re.escape(gone)}"):
                from_pretrained(path, memory_budget="2M", model_class=kind)


# Custom code beside the files

CODE = """
from transformers import LlamaConfig, LlamaForCausalLM

class MineConfig(LlamaConfig):
    model_type = "mine"

class MineForCausalLM(LlamaForCausalLM):
    config_class = MineConfig

    def forward(self, *args, **kwargs):
        found = super().forward(*args, **kwargs)
        found.logits = 2 * found.logits
        return found
"""


@pytest.mark.parametrize("configured", [True, False])
def test_trusted_custom_code_is_used(configured: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr("sys.path", [*sys.path])  # transformers adds that folder
    path = saved(tmp_path / f"mine{configured}")
    (path / "modeling_mine.py").write_text(CODE)
    document = json.loads((path / "config.json").read_text())
    document["auto_map"] = {"AutoModelForCausalLM": "modeling_mine.MineForCausalLM"}
    if configured:
        document |= {"model_type": "mine", "architectures": ["MineForCausalLM"]}
        document["auto_map"]["AutoConfig"] = "modeling_mine.MineConfig"
    (path / "config.json").write_text(json.dumps(document))
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("asks"))
    plain = transformers.AutoModelForCausalLM.from_pretrained(path, trust_remote_code=True)
    for auto in (None, transformers.AutoModelForCausalLM):
        given: dict[str, Any] = {"memory_budget": "2M", "model_class": auto}
        with from_pretrained(path, trust_remote_code=True, **given) as model, torch.no_grad():
            assert type(model).__name__ == "MineForCausalLM"
            assert torch.equal(model(IDS).logits, plain(IDS).logits)
        if configured:
            with pytest.raises(ValueError, match="trust_remote_code=True"):
                from_pretrained(path, trust_remote_code=False, **given)
        else:
            with from_pretrained(path, **given) as model:
                assert type(model).__name__ == "LlamaForCausalLM"


# Which files are read


def test_a_file_beside_an_index_is_read_as_transformers_and_load_read_it(files: Path, tmp_path: Path) -> None:
    path = tmp_path / "both"
    shutil.copytree(files / "part", path)
    shutil.copy(files / "other" / "model.safetensors", path / "model-00001-of-00001.safetensors")
    state = nvme_ops.load(path / "model.safetensors")
    places = dict.fromkeys(state, "model-00001-of-00001.safetensors")
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    document = json.loads((path / "config.json").read_text())
    for name in (None, "model-00001-of-00001.safetensors", "model.safetensors.index.json"):
        (path / "config.json").write_text(json.dumps({**document, "transformers_weights": name} if name else document))
        plain = transformers.AutoModelForCausalLM.from_pretrained(path)
        assert name or torch.equal(nvme_ops.load(path)["lm_head.weight"], plain.lm_head.weight)
        with from_pretrained(path, memory_budget="4M") as model, torch.no_grad():
            assert torch.equal(model(IDS).logits, plain(IDS).logits)
    (path / "config.json").write_text(json.dumps({**document, "transformers_weights": "../model.safetensors"}))
    with pytest.raises(ValueError, match=r"transformers_weights, '\.\./model\.safetensors', is not in the folder"):
        from_pretrained(path, memory_budget="4M")


def test_what_is_no_model_is_named(files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(files)
    path = saved(tmp_path)
    (path / "adapter_config.json").write_text("{}")
    wrong: list[tuple[Any, dict[str, Any], Any, str]] = [
        (files, {"model_class": "Llama"}, TypeError, "model_class must be a class of .* not 'Llama'"),
        (files, {"model_class": torch.nn.Linear}, TypeError, "model_class must be a class of .* not Linear"),
        (["model.safetensors", ""], {}, FileNotFoundError, "the path is empty"),
        (files, {"variant": "fp8"}, FileNotFoundError,
         r"no model\.fp8\.safetensors or model\.safetensors\.index\.fp8\.json"),
        (path, {}, ValueError, r"has an adapter \(adapter_config\.json\): .* peft\.PeftModel"),
    ]  # fmt: skip
    for given, options, error, words in wrong:
        with pytest.raises(error, match=words):
            from_pretrained(given, memory_budget="4M", **options)
    with from_pretrained([path / "model.safetensors"], memory_budget="4M") as model:
        assert model.dtype == torch.float32
