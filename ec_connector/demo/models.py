# SPDX-License-Identifier: Apache-2.0
"""Tiny LLaVA and Qwen2-VL checkpoints, made here: nothing is downloaded.

Each is a folder that vLLM and transformers load like any other checkpoint:
configuration, tokenizer, image processor and real weights (about 10 MB). The
same seed gives the same bytes.

=============  =================  ===============  =============================
model          vision             language model   rows of one image
=============  =================  ===============  =============================
tiny LLaVA     CLIP, 4 x 128      Llama, 2 x 256   256 of width 256, any picture
tiny Qwen2-VL  ViT, 2 x 128       Qwen2, 2 x 256   1 per 28 x 28 pixels, width 256
=============  =================  ===============  =============================
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ec_connector.demo.tokenizer import tokenizer_json, vocabulary, word_ids
from ec_connector.demo.weights import Draw, draw_decoder, write_safetensors

WIDTH = 256
VISION_WIDTH = 128
PATCH = 14
MAX_POSITIONS = 8192

_LLAVA_SPECIALS = ("<unk>", "<s>", "</s>", "<pad>", "<image>")
_QWEN_SPECIALS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
_CLIP_MEAN = [0.48145466, 0.4578275, 0.40821073]
_CLIP_STD = [0.26862954, 0.26130258, 0.27577711]

_LLAVA_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ message['role'] | upper }}:"
    "{% if message['content'] is string %} {{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}"
    "{% if part['type'] == 'text' %} {{ part['text'] }}{% else %} <image>{% endif %}"
    "{% endfor %}{% endif %}\n{% endfor %}{% if add_generation_prompt %}ASSISTANT:{% endif %}"
)
_QWEN_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}{% if part['type'] == 'text' %} {{ part['text'] }}"
    "{% elif part['type'] == 'video' %}<|vision_start|><|video_pad|><|vision_end|>"
    "{% else %}<|vision_start|><|image_pad|><|vision_end|>{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_llava(folder: Path, *, seed: int = 0, image_size: int = 224) -> Path:
    """Write a tiny LLaVA into ``folder`` (made if absent) and return it."""
    vocab = vocabulary(_LLAVA_SPECIALS)
    text = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        **_decoder_sizes(len(vocab), kv_heads=4),
        "bos_token_id": vocab["<s>"],
        "eos_token_id": vocab["</s>"],
        "pad_token_id": vocab["<pad>"],
    }
    vision = {
        "model_type": "clip_vision_model",
        "hidden_size": VISION_WIDTH,
        "intermediate_size": 2 * VISION_WIDTH,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "image_size": image_size,
        "patch_size": PATCH,
        "projection_dim": VISION_WIDTH,
        "hidden_act": "quick_gelu",
        "layer_norm_eps": 1e-5,
    }
    config = {
        "model_type": "llava",
        "architectures": ["LlavaForConditionalGeneration"],
        "text_config": text,
        "vision_config": vision,
        "image_token_index": vocab["<image>"],
        "image_seq_length": (image_size // PATCH) ** 2,
        "projector_hidden_act": "gelu",
        "vision_feature_layer": -2,
        "vision_feature_select_strategy": "default",
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
        "bos_token_id": vocab["<s>"],
        "eos_token_id": vocab["</s>"],
        "pad_token_id": vocab["<pad>"],
    }
    draw = Draw(seed)
    _draw_clip(draw, vision)
    draw.linear("multi_modal_projector.linear_1", WIDTH, VISION_WIDTH, gain=1.5, bias=True)
    draw.linear("multi_modal_projector.linear_2", WIDTH, WIDTH, gain=1.5, bias=True)
    draw_decoder(
        draw,
        text,
        prefix="language_model.model",
        head="language_model.lm_head.weight",
        spoken=word_ids(vocab),
        qkv_bias=False,
    )
    processor: dict[str, Any] = {
        "processor_class": "LlavaProcessor",
        "patch_size": PATCH,
        "vision_feature_select_strategy": "default",
        "image_token": "<image>",
        "num_additional_image_tokens": 1,
    }
    image_processor: dict[str, Any] = {
        "image_processor_type": "CLIPImageProcessor",
        "processor_class": "LlavaProcessor",
        "do_resize": True,
        "size": {"shortest_edge": image_size},
        "resample": 3,
        "do_center_crop": True,
        "crop_size": {"height": image_size, "width": image_size},
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": _CLIP_MEAN,
        "image_std": _CLIP_STD,
        "do_convert_rgb": True,
    }
    tokenizer = {
        "processor_class": "LlavaProcessor",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
        "pad_token": "<pad>",
        "image_token": "<image>",
        "extra_special_tokens": {"image_token": "<image>"},
    }
    files: dict[str, dict[str, Any]] = {
        "config.json": config,
        "processor_config.json": processor,
        "preprocessor_config.json": image_processor,
    }
    return _write(folder, files, tokenizer, _LLAVA_SPECIALS, _LLAVA_TEMPLATE, draw)


def make_qwen2_vl(
    folder: Path,
    *,
    seed: int = 0,
    max_image_pixels: int = 1024 * 28 * 28,
    vision_layers: int = 2,
) -> Path:
    """Write a tiny Qwen2-VL into ``folder`` (made if absent) and return it.

    Its encoder outputs can be announced as metadata alone, so a consumer can be
    asked without the picture. ``max_image_pixels``: larger pictures are reduced.
    ``vision_layers``: more make the encoder cost more, as a larger model's does.
    """
    vocab = vocabulary(_QWEN_SPECIALS)
    text = {
        "architectures": ["Qwen2VLForConditionalGeneration"],
        **_decoder_sizes(len(vocab), kv_heads=2),
        "bos_token_id": vocab["<|endoftext|>"],
        "eos_token_id": vocab["<|im_end|>"],
        "pad_token_id": vocab["<|endoftext|>"],
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "mrope_section": [8, 12, 12],
        },
    }
    vision = {
        "depth": vision_layers,
        "embed_dim": VISION_WIDTH,
        "hidden_size": WIDTH,
        "hidden_act": "quick_gelu",
        "mlp_ratio": 2,
        "num_heads": 4,
        "in_channels": 3,
        "patch_size": PATCH,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
    }
    config = {
        "model_type": "qwen2_vl",
        "architectures": ["Qwen2VLForConditionalGeneration"],
        "text_config": {"model_type": "qwen2_vl_text", **text},
        "vision_config": {"model_type": "qwen2_vl_vision", **vision},
        "image_token_id": vocab["<|image_pad|>"],
        "video_token_id": vocab["<|video_pad|>"],
        "vision_start_token_id": vocab["<|vision_start|>"],
        "vision_end_token_id": vocab["<|vision_end|>"],
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
        "eos_token_id": vocab["<|im_end|>"],
    }
    draw = Draw(seed)
    _draw_qwen_vision(draw, vision)
    draw_decoder(
        draw,
        text,
        prefix="model",
        head="lm_head.weight",
        spoken=word_ids(vocab),
        qkv_bias=True,
    )
    pixels = {
        "processor_class": "Qwen2VLProcessor",
        "patch_size": PATCH,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "size": {"shortest_edge": 4 * 28 * 28, "longest_edge": max_image_pixels},
        "image_mean": _CLIP_MEAN,
        "image_std": _CLIP_STD,
    }
    tokenizer = {
        "processor_class": "Qwen2VLProcessor",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "image_token": "<|image_pad|>",
        "video_token": "<|video_pad|>",
        "extra_special_tokens": {"image_token": "<|image_pad|>", "video_token": "<|video_pad|>"},
    }
    files: dict[str, dict[str, Any]] = {
        "config.json": config,
        "processor_config.json": {"processor_class": "Qwen2VLProcessor"},
        "preprocessor_config.json": {"image_processor_type": "Qwen2VLImageProcessor", **pixels},
        "video_preprocessor_config.json": {
            "video_processor_type": "Qwen2VLVideoProcessor",
            **pixels,
        },
    }
    return _write(folder, files, tokenizer, _QWEN_SPECIALS, _QWEN_TEMPLATE, draw)


def _decoder_sizes(vocab_size: int, *, kv_heads: int) -> dict[str, Any]:
    return {
        "vocab_size": vocab_size,
        "hidden_size": WIDTH,
        "intermediate_size": 2 * WIDTH,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": kv_heads,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": MAX_POSITIONS,
        "tie_word_embeddings": False,
    }


def _draw_clip(draw: Draw, config: dict[str, Any]) -> None:
    width, inner = config["hidden_size"], config["intermediate_size"]
    name = "vision_tower.vision_model"
    positions = (config["image_size"] // PATCH) ** 2 + 1
    draw.normal(f"{name}.embeddings.class_embedding", (width,), 1.0)
    pixels = 3 * PATCH * PATCH
    draw.normal(
        f"{name}.embeddings.patch_embedding.weight", (width, 3, PATCH, PATCH), 2 / pixels**0.5
    )
    draw.normal(f"{name}.embeddings.position_embedding.weight", (positions, width), 0.3)
    draw.norm(f"{name}.pre_layrnorm", width, bias=True)
    for number in range(config["num_hidden_layers"]):
        layer = f"{name}.encoder.layers.{number}"
        draw.norm(f"{layer}.layer_norm1", width, bias=True)
        for part in ("q_proj", "k_proj", "v_proj", "out_proj"):
            draw.linear(f"{layer}.self_attn.{part}", width, width, bias=True)
        draw.norm(f"{layer}.layer_norm2", width, bias=True)
        draw.linear(f"{layer}.mlp.fc1", inner, width, bias=True)
        draw.linear(f"{layer}.mlp.fc2", width, inner, bias=True)
    draw.norm(f"{name}.post_layernorm", width, bias=True)


def _draw_qwen_vision(draw: Draw, config: dict[str, Any]) -> None:
    width = config["embed_dim"]
    inner = config["mlp_ratio"] * width
    pixels = 3 * 2 * PATCH * PATCH
    draw.normal("visual.patch_embed.proj.weight", (width, 3, 2, PATCH, PATCH), 2 / pixels**0.5)
    for number in range(config["depth"]):
        block = f"visual.blocks.{number}"
        draw.norm(f"{block}.norm1", width, bias=True)
        draw.linear(f"{block}.attn.qkv", 3 * width, width, bias=True)
        draw.linear(f"{block}.attn.proj", width, width, bias=True)
        draw.norm(f"{block}.norm2", width, bias=True)
        draw.linear(f"{block}.mlp.fc1", inner, width, bias=True)
        draw.linear(f"{block}.mlp.fc2", width, inner, bias=True)
    merged = 4 * width
    draw.norm("visual.merger.ln_q", width, bias=True)
    draw.linear("visual.merger.mlp.0", merged, merged, gain=1.5, bias=True)
    draw.linear("visual.merger.mlp.2", config["hidden_size"], merged, gain=1.5, bias=True)


def _write(
    folder: Path,
    files: dict[str, dict[str, Any]],
    tokenizer: dict[str, Any],
    specials: tuple[str, ...],
    template: str,
    draw: Draw,
) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    files = {
        **files,
        "tokenizer.json": tokenizer_json(specials),
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": MAX_POSITIONS,
            "clean_up_tokenization_spaces": False,
            **tokenizer,
        },
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content, indent=2, ensure_ascii=False))
    (folder / "chat_template.jinja").write_text(template)
    write_safetensors(folder / "model.safetensors", draw.tensors)
    return folder
