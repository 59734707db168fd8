# SPDX-License-Identifier: Apache-2.0
"""What the router changes in a chat request: pure functions over its JSON body.

None of them changes the body it is given; what is not rewritten is shared with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Body = dict[str, Any]

MODALITY_OF = {
    "image_url": "image",
    "input_image": "image",
    "image_pil": "image",
    "audio_url": "audio",
    "input_audio": "audio",
    "video_url": "video",
}
"""Content part type (and the key its media is under) to modality."""

PARAMS = "ec_transfer_params"

# They shape the answer, which an encoding has none of. Several make vLLM refuse a
# request with one token and no stream, start a grammar, or encode more than once.
_ANSWER_OPTIONS = frozenset(
    {
        "best_of",
        "echo",
        "kv_transfer_params",
        "logprob_token_ids",
        "logprobs",
        "max_completion_tokens",
        "min_tokens",
        "n",
        "parallel_tool_calls",
        "prompt_logprobs",
        "response_format",
        "stream_interval",
        "stream_options",
        "structured_outputs",
        "thinking_token_budget",
        "tool_choice",
        "tools",
        "top_logprobs",
        "use_beam_search",
        PARAMS,
    }
)


def media_parts(body: Body) -> list[tuple[int, int, str]]:
    """``(message, part, modality)`` of every media part, in the order of the prompt."""
    found = []
    messages = body.get("messages")
    for m, message in enumerate(messages if isinstance(messages, list) else ()):
        content = message.get("content") if isinstance(message, dict) else None
        for p, part in enumerate(content if isinstance(content, list) else ()):
            modality = _modality(part)
            if modality:
                found.append((m, p, modality))
    return found


def _modality(part: object) -> str:
    if not isinstance(part, dict):
        return ""
    kind = part.get("type")
    if isinstance(kind, str) and kind in MODALITY_OF:
        return MODALITY_OF[kind]
    # vLLM also takes parts without a type, known by the key of their media.
    return next((modality for key, modality in MODALITY_OF.items() if key in part), "")


def encode_body(body: Body) -> Body:
    """The request for an encoder: the whole prompt and its options, one token, no stream."""
    kept = {name: value for name, value in body.items() if name not in _ANSWER_OPTIONS}
    return {**kept, "stream": False, "max_tokens": 1}


def decode_body(body: Body, params: Mapping[str, Any] | None) -> Body:
    """The request for a decoder, with what the encoder announced.

    The client's own ``ec_transfer_params`` never pass: they hold addresses that the
    decoder would connect to.
    """
    kept = {name: value for name, value in body.items() if name != PARAMS}
    return {**kept, PARAMS: dict(params)} if params else kept


def reply_params(reply: object) -> dict[str, Any]:
    """``ec_transfer_params`` of an encoder's reply; empty when it announces nothing.

    Raises:
        ValueError: the reply is not a chat completion, or they are not an object.
    """
    if not isinstance(reply, dict) or not isinstance(reply.get("choices"), list):
        raise ValueError("the reply is not a chat completion")
    params = reply.get(PARAMS)
    if params is None:
        return {}
    if not isinstance(params, dict):
        raise ValueError(f"{PARAMS} is not an object")
    return params


def count_announced(params: Mapping[str, Any]) -> int:
    """How many items can be fetched: those whose entry has an address."""
    return sum(
        len(_indices(entry) or ())
        for entry in params.values()
        if isinstance(entry, dict) and _has_address(entry)
    )


def metadata_only(body: Body, params: Mapping[str, Any]) -> tuple[Body, int]:
    """The body with media replaced by placeholder metadata, and how many parts were.

    vLLM does not mix the two forms within a modality, so the parts of a modality are
    replaced together or not at all: each needs metadata and an address. Nothing is
    replaced when a request's options take part in the items' hashes (the decoder
    would then hash the identifier again and not find the item), or when the entries
    do not match the parts one to one.
    """
    if body.get("mm_processor_kwargs") or body.get("media_io_kwargs"):
        return body, 0
    parts = media_parts(body)
    items = _items_by_modality(params, {modality for _, _, modality in parts})
    if items is None:
        return body, 0
    replaced: dict[tuple[int, int], Body] = {}
    for modality, entries in items.items():
        places = [(m, p) for m, p, kind in parts if kind == modality]
        if len(places) != len(entries):
            return body, 0
        if all(_replaceable(entry) for _, entry in entries):
            for place, (key, entry) in zip(places, entries, strict=True):
                kind = f"{modality}_embeds"
                replaced[place] = {"type": kind, kind: entry["metadata"], "uuid": key}
    if not replaced:
        return body, 0
    messages = [
        {**message, "content": [replaced.get((m, p), part) for p, part in enumerate(content)]}
        if isinstance(message, dict) and isinstance(content := message.get("content"), list)
        else message
        for m, message in enumerate(body["messages"])
    ]
    return {**body, "messages": messages}, len(replaced)


def _items_by_modality(
    params: Mapping[str, Any], modalities: set[str]
) -> dict[str, list[tuple[str, Body]]] | None:
    """``(key, entry)`` of each item, per modality, in the encoder's order.

    ``item_indices`` count over all items of the request. Between modalities that
    order is the prompt's, which a chat template may change; within one it is the
    order of the parts. None: the entries are not what they should be.
    """
    placed: dict[int, tuple[str, str, Body]] = {}
    for key, entry in params.items():
        indices = _indices(entry)
        modality = entry.get("modality") if isinstance(entry, dict) else None
        if modality is None and len(modalities) == 1:  # older vLLM does not say
            modality = next(iter(modalities))
        if not indices or not isinstance(modality, str) or modality not in modalities:
            return None
        for index in indices:
            if index in placed:
                return None
            placed[index] = (modality, key, entry)
    if sorted(placed) != list(range(len(placed))):
        return None
    items: dict[str, list[tuple[str, Body]]] = {modality: [] for modality in modalities}
    for index in sorted(placed):
        modality, key, entry = placed[index]
        items[modality].append((key, entry))
    return items


def _indices(entry: object) -> list[int] | None:
    indices = entry.get("item_indices") if isinstance(entry, dict) else None
    if isinstance(indices, list) and all(type(index) is int for index in indices):
        return indices
    return None


def _has_address(entry: Body) -> bool:
    return bool(entry.get("peer_host")) and bool(entry.get("peer_port"))


def _replaceable(entry: Body) -> bool:
    metadata = entry.get("metadata")
    return (
        _has_address(entry)
        and isinstance(metadata, dict)
        and bool(metadata)
        # The one form of a value that vLLM takes in an embedding part.
        and all(
            isinstance(value, list) and all(type(number) in (int, float) for number in value)
            for value in metadata.values()
        )
    )
