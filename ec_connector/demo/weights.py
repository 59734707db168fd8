# SPDX-License-Identifier: Apache-2.0
"""Random weights for tiny vision-language models, written as a safetensors file.

Plain normal weights make a model whose text hardly changes with the picture:
averaging over hundreds of image tokens leaves little of any of them. The gains
here make attention choose among tokens and outweigh the residual stream, so
different pictures give different words, with logits far enough apart that
rounding does not decide.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Tensors = dict[str, npt.NDArray[np.float32]]

ATTENTION_GAIN = 1.8  # of queries and keys: how sharply attention chooses
VALUE_GAIN = 1.5  # of values and attention outputs: how much of the choice is kept


class Draw:
    """Collects named tensors drawn from one seeded generator."""

    def __init__(self, seed: int) -> None:
        self.tensors: Tensors = {}
        self._random = np.random.Generator(np.random.PCG64(seed))

    def normal(self, name: str, shape: Sequence[int], std: float) -> None:
        """A tensor of independent normal numbers."""
        self.tensors[name] = (std * self._random.standard_normal(shape)).astype(np.float32)

    def linear(
        self, name: str, rows: int, columns: int, *, gain: float = 1.0, bias: bool = False
    ) -> None:
        """A [rows, columns] weight that keeps the variance of its input times ``gain`` squared."""
        self.normal(f"{name}.weight", (rows, columns), gain / columns**0.5)
        if bias:
            self.normal(f"{name}.bias", (rows,), 0.05)

    def norm(self, name: str, width: int, *, bias: bool = False) -> None:
        """A normalisation that only normalises."""
        self.tensors[f"{name}.weight"] = np.ones(width, dtype=np.float32)
        if bias:
            self.tensors[f"{name}.bias"] = np.zeros(width, dtype=np.float32)


def draw_decoder(
    draw: Draw,
    config: Mapping[str, Any],
    *,
    prefix: str,
    head: str,
    spoken: Sequence[int],
    qkv_bias: bool,
) -> None:
    """A Llama or Qwen2 decoder under ``prefix`` whose head can only say the ``spoken`` ids."""
    width, inner = config["hidden_size"], config["intermediate_size"]
    head_width = width // config["num_attention_heads"]
    kv_width = head_width * config["num_key_value_heads"]
    draw.normal(f"{prefix}.embed_tokens.weight", (config["vocab_size"], width), 1.0)
    for layer in range(config["num_hidden_layers"]):
        name = f"{prefix}.layers.{layer}"
        attention = f"{name}.self_attn"
        draw.norm(f"{name}.input_layernorm", width)
        draw.linear(f"{attention}.q_proj", width, width, gain=ATTENTION_GAIN, bias=qkv_bias)
        draw.linear(f"{attention}.k_proj", kv_width, width, gain=ATTENTION_GAIN, bias=qkv_bias)
        draw.linear(f"{attention}.v_proj", kv_width, width, gain=VALUE_GAIN, bias=qkv_bias)
        draw.linear(f"{attention}.o_proj", width, width, gain=VALUE_GAIN)
        draw.norm(f"{name}.post_attention_layernorm", width)
        draw.linear(f"{name}.mlp.gate_proj", inner, width)
        draw.linear(f"{name}.mlp.up_proj", inner, width)
        draw.linear(f"{name}.mlp.down_proj", width, inner)
    draw.norm(f"{prefix}.norm", width)
    draw.normal(head, (config["vocab_size"], width), 3.0 / width**0.5)
    # A row of zeros gives logit 0, which the best of the spoken words always exceeds.
    silent = np.setdiff1d(np.arange(config["vocab_size"]), np.asarray(spoken))
    draw.tensors[head][silent] = 0.0


def write_safetensors(path: Path, tensors: Tensors) -> None:
    """Write the tensors, rounded to bfloat16, in the safetensors format (names sorted)."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in sorted(tensors):
        begin, end = end, end + 2 * tensors[name].size
        header[name] = {
            "dtype": "BF16",
            "shape": list(tensors[name].shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for name in sorted(tensors):
            file.write(_bfloat16(tensors[name]).tobytes())


def _bfloat16(array: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """The upper halves of finite float32 numbers, rounded to nearest, ties to even."""
    bits = np.ascontiguousarray(array).view(np.uint32)
    rounded = bits + 0x7FFF + ((bits >> 16) & 1)
    return (rounded >> 16).astype("<u2")
