# SPDX-License-Identifier: Apache-2.0
"""Answers that the router sends whole: a server's, or an error of its own."""

from __future__ import annotations

import json
from dataclasses import dataclass

from starlette.types import Send

Headers = list[tuple[bytes, bytes]]


@dataclass(frozen=True)
class Answer:
    """A whole answer. ``headers`` without the length, which is that of ``body``."""

    status: int
    headers: Headers
    body: bytes


async def send_answer(send: Send, answer: Answer) -> int:
    """Send it; returns its status."""
    headers = [*answer.headers, (b"content-length", str(len(answer.body)).encode())]
    await send({"type": "http.response.start", "status": answer.status, "headers": headers})
    await send({"type": "http.response.body", "body": answer.body, "more_body": False})
    return answer.status


def error_answer(status: int, message: str, headers: Headers | None = None) -> Answer:
    """An error in the form that OpenAI clients read."""
    kind = "BadRequestError" if status < 500 else "InternalServerError"
    error = {"message": message, "type": kind, "param": None, "code": status}
    return Answer(
        status,
        [(b"content-type", b"application/json"), *(headers or [])],
        json.dumps({"error": error}).encode(),
    )
