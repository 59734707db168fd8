# SPDX-License-Identifier: Apache-2.0
"""What the router changes in a chat request: pure functions over its JSON body.

None of them changes the body it is given; what is not rewritten is shared with it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
_KV_PARAMS = "kv_transfer_params"

# How much a request asks for, and how; a prefill server computes no more than its prompt.
_LENGTH_OPTIONS = frozenset(
    {
        "best_of",
        "max_completion_tokens",
        "max_output_tokens",
        "max_tokens",
        "min_tokens",
        "n",
        "stream",
        "stream_options",
        "use_beam_search",
    }
)

# What the items of a request may depend on, whatever its route, and which model that is.
_ITEM_OPTIONS = ("model", "mm_processor_kwargs", "media_io_kwargs", "cache_salt", "priority")

# They shape the prompt or the answer, and an encoding has neither. Several make vLLM refuse a
# request with one token and no stream, start a grammar, or encode more than once.
_ANSWER_OPTIONS = frozenset(
    {
        "add_generation_prompt",
        "best_of",
        "continue_final_message",
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
        "truncate_prompt_tokens",
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


def encode_body(body: Body, parts: Sequence[Body] | None = None) -> Body:
    """The request for an encoder: these media parts (None: all of a chat request's) and no text.

    With the options that the items depend on, and of a chat request also those that are not
    known here; one token, no stream.
    """
    if parts is None:
        parts = [body["messages"][m]["content"][p] for m, p, _ in media_parts(body)]
    return {
        **{name: value for name, value in body.items() if name not in _ANSWER_OPTIONS},
        "messages": [{"role": "user", "content": list(parts)}],
        "stream": False,
        "max_tokens": 1,
    }


def encode_options(body: Body) -> Body:
    """Of a request that is no chat request, what one for its media's encoder is made of."""
    return {name: body[name] for name in _ITEM_OPTIONS if name in body}


def decode_body(body: Body, params: Mapping[str, Any] | None) -> Body:
    """The request for a decoder, with what the encoder announced.

    The client's own ``ec_transfer_params`` never pass: they hold addresses that the
    decoder would connect to.
    """
    kept = {name: value for name, value in body.items() if name != PARAMS}
    return {**kept, PARAMS: dict(params)} if params else kept


def prefill_body(path: str, body: Body) -> Body:
    """The request for a prefill server: one token, no stream, keep the KV blocks for another."""
    limit = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
    return {
        **{name: value for name, value in body.items() if name not in _LENGTH_OPTIONS},
        "stream": False,
        limit: 1,
        _KV_PARAMS: {
            "do_remote_decode": True,
            "do_remote_prefill": False,
            "remote_block_ids": None,
            "remote_engine_id": None,
            "remote_host": None,
            "remote_port": None,
        },
    }


def kv_decode_body(body: Body, reply: object) -> Body:
    """The request for a decoder that takes its KV blocks from where ``reply`` says."""
    kept = {name: value for name, value in body.items() if name not in (PARAMS, _KV_PARAMS)}
    params = reply.get(_KV_PARAMS) if isinstance(reply, dict) else None
    return {**kept, _KV_PARAMS: params} if params else kept


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

    ``params`` is an announcement for all of the request's media. As :func:`replaced`.
    """
    parts = media_parts(body)
    placed = placed_entries(params, [modality for _, _, modality in parts]) or {}
    found = replaced(body, placed)
    return with_parts(body, found), len(found)


def placed_entries(
    params: Mapping[str, Any], modalities: Sequence[str]
) -> dict[int, tuple[str, Body]] | None:
    """Each item's identifier and entry in an announcement, by the item's place.

    ``modalities`` are those of the items that the encoder was sent, in order.
    ``item_indices`` count over all items of its request. Between modalities that order is the
    prompt's, which a chat template may change; within one it is the order of the parts. None:
    the entries are not what they should be.
    """
    found: dict[int, tuple[str, str, Body]] = {}
    only = modalities[0] if len(set(modalities)) == 1 else None
    for key, entry in params.items():
        indices = _indices(entry)
        modality = entry.get("modality") if isinstance(entry, dict) else None
        if modality is None:  # older vLLM does not say
            modality = only
        if not indices or not isinstance(modality, str) or modality not in modalities:
            return None
        for index in indices:
            if index in found or not 0 <= index < len(modalities):
                return None
            found[index] = (modality, key, entry)
    if only is not None:
        return {index: (key, entry) for index, (_, key, entry) in found.items()}
    placed: dict[int, tuple[str, Body]] = {}
    for modality in set(modalities):
        places = [place for place, one in enumerate(modalities) if one == modality]
        entries = [found[index][1:] for index in sorted(found) if found[index][0] == modality]
        if len(places) != len(entries):
            return None
        placed.update(zip(places, entries, strict=True))
    return placed


def replaced(body: Body, placed: Mapping[int, tuple[str, Body]]) -> dict[tuple[int, int], Body]:
    """The parts that stand in for media, by message and part.

    ``placed``: of the request's media parts, in order, those that were encoded. vLLM does not
    mix the two forms within a modality, so the parts of a modality are replaced together or not
    at all: each needs metadata and an address. Where a request's options take part in the
    items' hashes, vLLM hashes an identifier once more: then each also needs a ``uuid`` of its
    own, from which both sides come to the same.
    """
    parts = media_parts(body)
    hashed_again = bool(body.get("mm_processor_kwargs") or body.get("media_io_kwargs"))
    found: dict[tuple[int, int], Body] = {}
    for modality in {modality for _, _, modality in parts}:
        stand_ins: dict[tuple[int, int], Body] = {}
        for place, (m, p, kind) in enumerate(parts):
            if kind != modality:
                continue
            key, entry = placed.get(place, ("", {}))
            uuid = body["messages"][m]["content"][p].get("uuid")
            if not _replaceable(entry) or (hashed_again and uuid is None):
                break
            name = f"{modality}_embeds"
            identifier = key if uuid is None else uuid
            stand_ins[m, p] = {"type": name, name: entry["metadata"], "uuid": identifier}
        else:
            found.update(stand_ins)
    return found


def with_parts(body: Body, parts: Mapping[tuple[int, int], Body]) -> Body:
    """A chat request with other parts in some places."""
    if not parts:
        return body
    messages = [
        {**message, "content": [parts.get((m, p), part) for p, part in enumerate(content)]}
        if isinstance(message, dict) and isinstance(content := message.get("content"), list)
        else message
        for m, message in enumerate(body["messages"])
    ]
    return {**body, "messages": messages}


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
