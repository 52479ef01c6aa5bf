"""A tiny model, of random weights, of any class that transformers has for text, and inputs for it."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from typing import Any

import torch

_BINS = ("num_mel_bins", "feature_size", "input_feat_per_channel", "feature_projection_input_dim")  # of speech
HEADS = ("ForCausalLM", "ForConditionalGeneration", "ForMaskedLM", "ForSequenceClassification")
MOST = 8_000_000  # parameters of a tiny model
TOKENS = 60  # of which inputs are made; special tokens for images and the like come after them

#: What a number of a configuration becomes at most, by its name: the first that matches. None leaves it as it is.
_SIZES: tuple[tuple[str, int | None], ...] = (
    (r"(conv|kernel|patch|stride|image|spatial|temporal|window|chunk|block|group)\w*_size$|kernel|feat_extract", None),
    (r"attention_window", 8),
    (r"vocab(_size)?|codebook_size|num_embeddings", 256),
    (r"num_filters", 8),
    (r"base_channels", 32),
    (r"(experts?_per_tok(en)?|top_?k|moe_k|top_k_experts)$", 2),
    (r"num_shared_experts|n_shared_experts", 1),
    (r"experts$|^n_routed_experts|zero_expert_num", 4),
    (r"^(n_group|num_expert_group|topk_group)$", 1),
    (r"(layers?|depth|_blocks)$", 2),
    (r"(key_value|kv)_heads|kv_n_heads|^n_groups$|mamba_n_groups", 2),
    (r"qk_head_dim|mamba_d_head|mamba_head_?dim|n_mamba_heads", 32),
    (r"head_dim$|d_kv|d_head|head_size$|dim_head|kv_channels|rotary_dim", 16),
    (r"lora_rank|state_size|d_state|time_step_rank", 16),
    (r"heads?$", 4),
    (r"(intermediate|ffn|d_ff|dff|dim_ff|mlp_dim|feed_forward)", 96),
    (r"(max_\w*position|n_positions|max_seq_len|context_length|n_ctx|max_length|source_positions)", 128),
    (r"d_ssm", 128),
    (r"(hidden|d_model|n_embd|embed|_dim$|^dim$|width|d_inner|latent_dim|conv_dim|bottleneck|upsample_groups)", 64),
)
_COUNTS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers", "encoder_layers", "depth", "decoder_layers")
_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads")
#: What fields without a value become.
_UNSET = {
    "head_dim": 16, "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "num_key_value_heads": 4,
    "vocab_size": 256,
}  # fmt: skip

_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_MROPE = {"rope_parameters": {**_ROPE, "mrope_section": [3, 3, 2]}}
_ZAMBA = {
    "attention_hidden_size": 128, "attention_head_dim": 32, "num_hidden_layers": 4,
    "layers_block_type": ["linear_attention", "hybrid"] * 2,
}  # fmt: skip
#: Fields that depend on each other, by the type of the configuration.
_SPECIAL: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1]},
    "chameleon": {"vocabulary_map": {"<image>": 59}},
    "cohere_compass_text": {"rope_parameters": {"full_attention": _ROPE, "sliding_attention": _ROPE}},
    "dbrx": {"attn_config": {"kv_n_heads": 2, "clip_qkv": 8, "rope_theta": 10000.0}},
    "deepseek_ocr2_text": {"mlp_layer_types": ["dense", "sparse"]},
    "dory": {
        "n_input_layers": 1, "n_recurrent_layers": 1, "n_output_layers": 1, "num_hidden_layers": 3,
        "layer_types": ["full_attention", "sliding_attention", "full_attention"],
    },
    "emu3": {"vocabulary_map": {"<image>": 59, "<|extra_200|>": 58}},
    "ernie4_5_vl_moe_text": _MROPE,
    "falcon_h1": {"mamba_d_head": 32},
    "gemma3n_text": {
        "num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2, "num_kv_shared_layers": 2,
        "intermediate_size": [96] * 4, "activation_sparsity_pattern": [0.95, 0.95, 0.0, 0.0],
    },
    "glm4v_moe_text": {"rope_parameters": {**_ROPE, "mrope_section": [1, 1, 2], "partial_rotary_factor": 0.5}},
    "glm4v_text": _MROPE,
    "glm5_next_text": {"index_topk": 4, "index_kpool": 2},
    "glm_image_text": _MROPE,
    "glm_ocr_text": _MROPE,
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"]},
    "hunyuan_vl_text": _MROPE,
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1},
    "layoutlmv3": {"coordinate_size": 12, "shape_size": 8},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "lilt": {"hidden_size": 96},
    "mamba2": {"head_dim": 32},
    "markuplm": {
        "max_xpath_tag_unit_embeddings": 256, "max_xpath_subs_unit_embeddings": 1024, "tag_pad_id": 216,
        "subs_pad_id": 1001,
    },
    "mistral4": {"head_dim": 32},
    "molmo2_adapter": {"vision_feature_layer": [1, 0]},
    "moonshine": {"encoder_num_key_value_heads": 4, "decoder_num_key_value_heads": 4},
    "moonshine_streaming": {"num_key_value_heads": 4},
    "paddleocr_vl_text": _MROPE,
    "perceiver": {"num_latents": 8, "num_self_attends_per_block": 2, "d_latents": 64, "image_size": 8},
    "qwen2_5_omni_text": _MROPE,
    "qwen2_5_vl_text": _MROPE,
    "qwen2_vl_text": _MROPE,
    "qwen4_exp_text": {
        "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 16, "indexer_budget": 4,
        "indexer_compress_ratio": 2,
    },
    "recurrent_gemma": {"num_hidden_layers": 3},
    "reformer": {"axial_pos_embds_dim": [16, 48], "axial_pos_shape": [8, 16]},
    "step3p5": {"sliding_window": 8},
    "t5": {"decoder_start_token_id": 0},
    "xmod": {"default_language": "en_XX"},
    "zamba": {**_ZAMBA, "n_mamba_heads": 2},
    "zamba2": {**_ZAMBA, "n_mamba_heads": 4, "mamba_headdim": 32, "hybrid_layer_ids": [1, 3], "num_mem_blocks": 1},
}  # fmt: skip


def classes() -> dict[str, Any]:
    """Returns all classes of transformers with one of ``HEADS``, by name."""
    import transformers

    names = sorted(name for name in dir(transformers) if name.endswith(HEADS))
    members = {name: getattr(transformers, name) for name in names}
    return {name: cls for name, cls in members.items() if getattr(cls, "config_class", None) is not None}


def shrunk(values: dict[Any, Any]) -> dict[Any, Any]:
    """Returns the fields of a configuration with small sizes, and one layer of each kind."""
    count = next((values[name] for name in _COUNTS if isinstance(values.get(name), int)), 0)
    per_layer = {
        name: value for name, value in values.items() if isinstance(value, list | tuple) and len(value) == count > 2
    }
    layers = _layers(per_layer, count)
    heads = [values.get(name) for name in _HEADS]
    fields: dict[Any, Any] = {}
    for name, value in values.items():
        if name == "per_layer_config" and value:
            fields[name] = {
                at: shrunk(value[key]) for at, layer in enumerate(layers) for key in value if int(key) == layer
            }
        elif isinstance(value, dict):
            fields[name] = shrunk(value)
        elif name in per_layer:
            fields[name] = [_small(name, value[number]) for number in layers]
        elif name in _COUNTS and value == count:
            fields[name] = min(count, len(layers))
        elif re.search("(key_value|kv)_heads", str(name)) and isinstance(value, int) and value in heads:
            fields[name] = min(value, 4)  # one for each head, which some classes require
        else:
            fields[name] = _small(str(name), value)
    if isinstance(fields.get("image_size"), int) and isinstance(fields.get("patch_size"), int):
        fields["image_size"] = min(fields["image_size"], 4 * fields["patch_size"])
    return {**fields, **_SPECIAL.get(str(values.get("model_type")), {})}


def _layers(per_layer: dict[Any, Any], count: int) -> list[int]:
    """Returns the numbers of layers, the first of each kind and at least two, by fields that have a value for each."""
    kinds = [value for value in per_layer.values() if isinstance(value[0], str)]
    firsts: dict[Any, int] = {}
    for number, kind in enumerate(zip(*kinds, strict=True)):
        firsts.setdefault(kind, number)
    others = [number for number in range(count) if number not in firsts.values()]
    return sorted([*firsts.values(), *others[: max(0, 2 - len(firsts))]])


def _small(name: str, value: Any) -> Any:
    if name == "mrope_section":  # shares of half a head
        return [3, 3, 2] if len(value) == 3 else value
    if isinstance(value, list | tuple):
        return [_small(name, item) for item in value]
    if value is None:
        return _UNSET.get(name)
    if isinstance(value, bool) or not isinstance(value, int):
        return value
    if re.search(r"(_id|_ids|_index|_idx)$", name):
        return value if value <= TOKENS else TOKENS + value % 100
    for pattern, size in _SIZES:
        if re.search(pattern, name):
            return value if size is None else min(value, size)
    return value


def tiny_config(cls: Any) -> Any:
    """Returns a configuration of a tiny model of a class."""
    values = shrunk(cls.config_class().to_dict())
    for name in ("transformers_version", "architectures"):
        values.pop(name, None)
    config = cls.config_class.from_dict(values)
    for part in (config, config.get_text_config(decoder=True)):
        if getattr(part, "pad_token_id", None) is None:
            part.pad_token_id = 0  # sequences are classified by their last token that is none
    return config


def tiny_model(cls: Any) -> Any:
    """Returns a model of random weights, in eval mode."""
    torch.manual_seed(0)
    config = tiny_config(cls)
    with torch.device("meta"):
        size = sum(param.numel() for param in cls(config).parameters())
    if size > MOST:
        raise ValueError(f"{size} parameters")
    model = cls(config).eval()
    with torch.no_grad():
        for param in model.parameters():  # else norms are ones and biases zeros
            param.add_(torch.randn(param.shape).to(param.dtype) * 0.02)
    return model


def inputs_of(model: Any) -> dict[str, Any]:
    """Returns inputs that a model takes: text, or images or speech too. Raises what the model raises for the last."""
    trouble: Exception | None = None
    for inputs in _inputs(model):
        try:
            with torch.no_grad():
                model(**inputs)
        except Exception as error:
            trouble = error
        else:
            return inputs
    assert trouble is not None
    raise trouble


def _inputs(model: Any) -> Iterator[dict[str, Any]]:
    config, names = model.config, inspect.signature(model.forward).parameters
    random = torch.Generator().manual_seed(1)
    tokens = torch.randint(5, TOKENS, (2, 11), generator=random)
    decoded = {"decoder_input_ids": tokens[:, :5]} if "decoder_input_ids" in names else {}
    if type(model).__name__.endswith("ForSequenceClassification"):
        decoded = {}
        if isinstance(end := getattr(config, "eos_token_id", None), int):
            tokens[:, -1] = end  # by which some classes classify
    zeros = torch.zeros_like(tokens)
    every = {
        "input_ids": tokens, "bbox": torch.stack([zeros] * 4, -1), "moe_mm_token_type_ids": zeros,
        "mm_token_type_ids": zeros,
    }  # fmt: skip
    text = {name: value for name, value in every.items() if name in names}
    yield {**text, **decoded}
    yield text
    yield {**text, "use_cache": False}
    if codebooks := getattr(config, "num_codebooks", None):
        yield {"input_ids": tokens.repeat(codebooks, 1)}
    vision = getattr(config, "vision_config", config)
    size = getattr(vision, "image_size", 32)
    size = size if isinstance(size, int) else size[0]
    speech = getattr(config, "audio_config", None) or getattr(config, "encoder_config", None) or config
    bins = [getattr(speech, name, None) for name in _BINS]
    mels, frames = next(filter(None, bins), 80), 2 * getattr(speech, "max_source_positions", 64)
    shapes = [
        ("pixel_values", (2, getattr(vision, "num_channels", 3), size, size)),
        ("input_values", (2, 1600)),
        ("input_values", (2, 1, 1600)),
        ("input_features", (2, mels, frames)),
        ("input_features", (2, frames, mels)),
        ("input_features", (2, 64, mels)),
    ]
    for name, shape in shapes:
        if name in names:
            values = {name: torch.randn(shape, generator=random)}
            yield {**text, **values, **decoded}
            yield {**values, **decoded}
            yield values
