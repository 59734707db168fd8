# SPDX-License-Identifier: Apache-2.0
"""The images, audio clips and videos in a request's body, and what tells them apart."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ec_connector.proxy.rewrite import MODALITY_OF, Body, media_parts, with_parts
from ec_connector.proxy.tenants import scoped

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"

OWN = "ec-router-"
"""How the identifiers begin that the router gives. A client's that begins so is dropped: it
could stand for somebody else's content."""

_SLICE = 1024 * 1024


@dataclass(frozen=True)
class Item:
    """One media part.

    ``place`` is its message's index and its own there. ``part`` is what an encoder gets: a part
    of a chat request.
    """

    place: tuple[int, int]
    modality: str
    part: Body

    @cached_property
    def key(self) -> str:
        """Two items of one request with the same one have the same content."""
        # Made when first asked for: a chat request's items are found once before they have
        # their identifiers, and would be digested then for nothing.
        return _key(self.part, self.modality)


def identified(body: Body, tenant: str = "") -> Body:
    """A chat request whose inline images and clips say what they are by a ``uuid``.

    It is made of the content as it was sent: nothing is decoded. Parts with a ``uuid`` of the
    client's keep it. Media behind a URL get none, because the content there can change; nor do
    videos, whose sound vLLM may take as one more item of the same ``uuid``. With a ``tenant`` the
    same content of another is something else.
    """
    return _with_uuids(body, give=True, tenant=tenant)


def anonymous(body: Body) -> Body:
    """A chat request without any ``uuid`` that only the router could have given."""
    return _with_uuids(body, give=False)


def items(path: str, body: Body) -> list[Item]:
    """What encoders are asked for: each media part whose media is there."""
    if path == CHAT:
        found = ((place, body["messages"][place[0]]["content"][place[1]], modality)
                 for *place, modality in media_parts(body))  # fmt: skip
        return [
            Item((place[0], place[1]), modality, part)
            for place, part, modality in found
            if _media(part)
        ]
    if path == RESPONSES:
        return [
            _image(place, part.get("image_url"))
            for place, part in _parts(body.get("input"))
            if part.get("type") == "input_image" and _is_text(part.get("image_url"))
        ]
    if path == MESSAGES:
        return [
            _image(place, url)
            for place, part in _parts(body.get("messages"))
            if part.get("type") == "image" and (url := _source_url(part.get("source")))
        ]
    return []


def size(found: list[Item]) -> int:
    """Characters of all media and URLs together."""
    return sum(len(_media(item.part)) for item in found)


def _with_uuids(body: Body, *, give: bool, tenant: str = "") -> Body:
    places = {(m, p): modality for m, p, modality in media_parts(body)}
    changed: dict[tuple[int, int], Body] = {}
    for (m, p), modality in places.items():
        part = body["messages"][m]["content"][p]
        uuid = part.get("uuid")
        claimed = isinstance(uuid, str) and uuid.startswith(OWN)
        if claimed:
            part = {name: value for name, value in part.items() if name != "uuid"}
        if give and modality != "video" and part.get("uuid") is None and _is_inline(part):
            digest = _digest(modality, part)
            part = {**part, "uuid": OWN + (scoped(tenant, digest) if tenant else digest)}
        elif not claimed:
            continue
        changed[m, p] = part
    return with_parts(body, changed)


def _parts(messages: Any) -> Iterator[tuple[tuple[int, int], Body]]:
    for m, message in enumerate(messages if isinstance(messages, list) else ()):
        content = message.get("content") if isinstance(message, dict) else None
        for p, part in enumerate(content if isinstance(content, list) else ()):
            if isinstance(part, dict):
                yield (m, p), part


def _image(place: tuple[int, int], url: Any) -> Item:
    part = {"type": "image_url", "image_url": {"url": url}}
    return Item(place, "image", part)


def _source_url(source: Any) -> str:
    """The URL that vLLM makes of an image of the messages route: its bytes are then the same."""
    if not isinstance(source, dict):
        return ""
    if source.get("type") == "url":
        return source["url"] if _is_text(source.get("url")) else ""
    if not _is_text(source.get("data")):
        return ""
    return f"data:{source.get('media_type', 'image/jpeg')};base64,{source['data']}"


def _key(part: Body, modality: str) -> str:
    uuid = part.get("uuid")
    return f"{modality} {uuid}" if uuid is not None else _digest(modality, part)


def _digest(modality: str, part: Body) -> str:
    found = hashlib.blake2b(modality.encode(), digest_size=32)
    text = _media(part)
    for start in range(0, len(text), _SLICE):
        found.update(text[start : start + _SLICE].encode("utf-8", "surrogatepass"))
    return found.hexdigest()


def _media(part: Body) -> str:
    """A media part's URL or data; empty where it has none."""
    for name in MODALITY_OF:
        value = part.get(name)
        if isinstance(value, dict):
            value = value.get("url") or value.get("data")
        if _is_text(value):
            return str(value)
    return ""


def _is_inline(part: Body) -> bool:
    return bool(_media(part)) and ("input_audio" in part or _media(part)[:5].lower() == "data:")


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value)
