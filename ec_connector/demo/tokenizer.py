# SPDX-License-Identifier: Apache-2.0
"""A byte-level BPE tokenizer made from a list of words, without training.

Its vocabulary is the special tokens, the 256 bytes, every beginning of every
word (with its leading space) and so every word. Merges only ever lengthen such
a beginning by one character, so their order cannot matter, any UTF-8 text
round-trips, and a listed word is one token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

WORDS = tuple(
    """
    amber anchor apple arch autumn barn basket bay beach bell birch bird boat branch bridge brook
    candle canyon castle cedar cherry cliff cloud clover coast copper coral crane creek crow dawn
    deer delta dune dusk eagle ember falcon fern field fjord flame forest fox garden glacier grove
    gull harbour hawk heron hill honey island ivory ivy jade lake lantern leaf lemon lily maple
    marsh meadow mist moon moss mountain oak ocean olive orchard otter owl pebble pine plum pond
    poppy quartz rain raven reed ridge river rose sail sand shadow shore silver snow spring star
    """.split()  # noqa: SIM905  # a page of words reads better than a page of quotes
)

SPACE = "\u0120"  # how the byte-level alphabet writes a space


def byte_alphabet() -> list[str]:
    """The 256 printable stand-ins for bytes that byte-level BPE uses, in order of the byte."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in printable]
    stands_for = {byte: chr(byte) for byte in printable}
    stands_for |= {byte: chr(256 + place) for place, byte in enumerate(hidden)}
    return [stands_for[byte] for byte in range(256)]


def vocabulary(specials: Sequence[str], words: Sequence[str] = WORDS) -> dict[str, int]:
    """Token to id: the specials first, then bytes, then beginnings of words."""
    tokens = [*specials, *byte_alphabet()]
    beginnings = {SPACE + word[:size] for word in words for size in range(1, len(word) + 1)}
    tokens += sorted(beginnings, key=lambda text: (len(text), text))
    return {token: number for number, token in enumerate(tokens)}


def word_ids(vocab: dict[str, int], words: Sequence[str] = WORDS) -> list[int]:
    """Ids of the whole words, in the order of the list."""
    return [vocab[SPACE + word] for word in words]


def tokenizer_json(specials: Sequence[str], words: Sequence[str] = WORDS) -> dict[str, Any]:
    """The content of ``tokenizer.json`` as the tokenizers library reads it."""
    vocab = vocabulary(specials, words)
    merges = [[token[:-1], token[-1]] for token in vocab if token[0] == SPACE and len(token) > 1]
    byte_level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": True,
    }
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": vocab[token],
                "content": token,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
            for token in specials
        ],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": vocab,
            "merges": merges,
        },
    }
