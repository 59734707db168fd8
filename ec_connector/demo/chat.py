# SPDX-License-Identifier: Apache-2.0
"""Chat requests as a client sends them, and what came back."""

from __future__ import annotations

import base64
import http.client
import json
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

Body = dict[str, Any]

MAX_TOKENS = 16
TIMEOUT_SECONDS = 120.0
MIME_TYPES = {".jpg": "image/jpeg", ".jpeg": "image/jpeg", ".png": "image/png"}


@dataclass
class Answer:
    """One answer. ``first_token`` and ``whole`` are seconds from sending the request.

    ``announced``: the ``ec_transfer_params`` of an answer that was not streamed.
    """

    status: int
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    first_token: float = 0.0
    whole: float = 0.0
    error: str = ""
    announced: Body = field(default_factory=dict)


def chat_body(pictures: Sequence[Path], text: str, *, max_tokens: int = MAX_TOKENS) -> Body:
    """A greedy, streamed chat request with these picture files and a text, in this order."""
    content: list[Body] = [
        {"type": "image_url", "image_url": {"url": data_url(path)}} for path in pictures
    ]
    content.append({"type": "text", "text": text})
    return {
        "messages": [{"role": "user", "content": content}],
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,  # so that every answer has max_tokens tokens to compare
        "return_token_ids": True,
        "stream": True,
    }


def picture_parts(body: Body) -> int:
    """How many pictures a request shows, repeated ones included."""
    return sum(
        part["type"] == "image_url" for message in body["messages"] for part in message["content"]
    )


def data_url(path: Path) -> str:
    """The file as a ``data:`` URL, byte for byte."""
    mime = MIME_TYPES.get(path.suffix.lower(), "application/octet-stream")
    return f"data:{mime};base64,{base64.b64encode(path.read_bytes()).decode()}"


def ask(url: str, body: Body) -> Answer:
    """Send one request and read its stream to the end. A refusal is an answer too, not an error.

    Raises:
        OSError, http.client.HTTPException: no answer came, or it broke off.
    """
    address = urlsplit(url)
    connection = http.client.HTTPConnection(
        address.hostname or "", address.port, timeout=TIMEOUT_SECONDS
    )
    payload = json.dumps(body).encode()
    started = time.perf_counter()
    try:
        headers = {"Content-Type": "application/json"}
        connection.request("POST", "/v1/chat/completions", payload, headers)
        response = connection.getresponse()
        answer = Answer(response.status)
        if response.status != http.client.OK:
            answer.error = response.read().decode(errors="replace")[:500]
        elif body.get("stream"):
            _read_stream(response, answer, started)
        else:
            _read_whole(json.load(response), answer)
        answer.whole = time.perf_counter() - started
    finally:
        connection.close()
    return answer


def ask_all(url: str, bodies: Sequence[Body]) -> list[Answer]:
    """Send all requests at once; answers in the order of the requests. Raises as :func:`ask`."""
    with ThreadPoolExecutor(max(1, len(bodies))) as pool:
        return list(pool.map(lambda body: ask(url, body), bodies))


def _read_stream(response: http.client.HTTPResponse, answer: Answer, started: float) -> None:
    for line in response:
        event = line.strip().removeprefix(b"data: ")
        if not event or event == b"[DONE]":
            continue
        message = json.loads(event)
        if "error" in message:
            answer.status, answer.error = 500, json.dumps(message["error"])[:500]
            return
        for choice in message.get("choices", ()):
            if choice.get("token_ids"):
                if not answer.token_ids:
                    answer.first_token = time.perf_counter() - started
                answer.token_ids += choice["token_ids"]
            answer.text += choice.get("delta", {}).get("content") or ""


def _read_whole(message: Body, answer: Answer) -> None:
    choice = message["choices"][0]
    answer.token_ids = choice.get("token_ids") or []
    answer.text = choice["message"].get("content") or ""
    answer.announced = message.get("ec_transfer_params") or {}
