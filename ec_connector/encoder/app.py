# SPDX-License-Identifier: Apache-2.0
"""The encoder as an ASGI application: what a router needs of an encoding vLLM.

========================  ======================================================
``/v1/chat/completions``  encodes the images; the answer has ``ec_transfer_params``
``/v1/models``            the model's name
``/health``               200 while there is a worker and an agent, else 503
``/stats``                what was done, by the encoder, its worker and its agent
========================  ======================================================
"""

from __future__ import annotations

import json
import logging
import threading
import time
import uuid
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from ec_connector.announcement import key_fault
from ec_connector.encoder.errors import RequestError
from ec_connector.encoder.identifiers import identifier
from ec_connector.encoder.pictures import decode, pictures_of
from ec_connector.encoder.vision import Vision
from ec_connector.engine.keys import why_not_shared
from ec_connector.errors import AgentLostError, PoolError
from ec_connector.library import Producer
from ec_connector.stage.errors import StageDeadlineError, StageError

logger = logging.getLogger("vllm.ec_connector.encoder")

MAX_WAITING = 256
_REMEMBERED = 65536


class Encoder:
    """Images to announcements.

    Args:
        vision: makes rows.
        producer: keeps and serves them.
        model: as consumers name it.
        dtype: of the rows, without ``torch.``.
        hasher: of identifiers.
    """

    def __init__(
        self,
        vision: Vision,
        producer: Producer,
        model: str,
        dtype: str,
        hasher: Callable[[], Any],
    ) -> None:
        self.vision = vision
        self.producer = producer
        self.model = model
        self._dtype = dtype
        self._hasher = hasher
        self._lock = threading.Lock()
        self._shapes: OrderedDict[str, tuple[int, ...]] = OrderedDict()
        self.counts = {"requests": 0, "encoded": 0, "held": 0, "no_room": 0, "failed": 0}

    def announce(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """``ec_transfer_params`` for a chat request, in the order of its images.

        Raises:
            RequestError: the request cannot be served.
            StageError, AgentLostError: an image cannot be encoded, or not be kept.
        """
        params: dict[str, Any] = {}
        for index, picture in enumerate(pictures_of(body)):
            image, converted = decode(picture)
            key = picture.uuid or identifier(
                self._hasher, self.model, picture.data, converted=converted
            )
            if fault := key_fault(key):
                raise RequestError(fault)
            if reason := why_not_shared(key):
                raise RequestError(f"the uuid {key[:80]!r} cannot be shared: {reason}")
            if key not in params:
                params[key] = {**self._item(key, image), "item_indices": []}
            params[key]["item_indices"].append(index)
        return params

    def _item(self, key: str, image: Any) -> dict[str, Any]:
        with self._lock:  # the same image at once is encoded once
            shape = self._shapes.get(key)
            found = self.producer.held(key, shape, self._dtype) if shape is not None else None
            if found is not None:
                self.counts["held"] += 1
                return found
            rows = self.vision.encode(image)
            self.counts["encoded"] += 1
            try:
                entry = self.producer.put(key, rows, self._dtype)
            except PoolError as error:
                self.counts["no_room"] += 1
                logger.warning("item %s is encoded but not announced: %s", key, error)
                return {"metadata": {}, "modality": "image"}
            self._shapes[key] = rows.shape
            self._shapes.move_to_end(key)
            if len(self._shapes) > _REMEMBERED:
                self._shapes.popitem(last=False)
            return entry


def build_app(encoder: Encoder, max_body: int) -> Starlette:
    """The application; ``max_body`` in bytes."""
    endpoints = _Endpoints(encoder, max_body)
    return Starlette(
        routes=[
            Route("/v1/chat/completions", endpoints.chat, methods=["POST"]),
            Route("/v1/models", endpoints.models),
            Route("/health", endpoints.health),
            Route("/stats", endpoints.stats),
        ]
    )


class _Endpoints:
    def __init__(self, encoder: Encoder, max_body: int) -> None:
        self._encoder = encoder
        self._max_body = max_body
        self._waiting = 0

    async def chat(self, request: Request) -> Response:
        try:
            body = await _read(request, self._max_body)
        except RequestError as error:
            return _error(error.status, str(error))
        except ClientDisconnect:
            return Response(status_code=400)
        if self._waiting >= MAX_WAITING:
            return _error(503, f"{MAX_WAITING} requests are waiting already")
        self._waiting += 1
        try:
            return await self._encode(body)
        finally:
            self._waiting -= 1

    async def _encode(self, body: dict[str, Any]) -> Response:
        self._encoder.counts["requests"] += 1
        try:
            params = await run_in_threadpool(self._encoder.announce, body)
        except RequestError as error:
            return _error(error.status, str(error))
        except StageError as error:
            self._encoder.counts["failed"] += 1
            logger.error("an image cannot be encoded: %s", error)
            status = 504 if isinstance(error, StageDeadlineError) else 500
            # The worker's traceback is for the operator, who has it in the log.
            return _error(status, f"{error.message} (code {error.code})")
        except AgentLostError as error:
            self._encoder.counts["failed"] += 1
            logger.error("the rows cannot be kept: %s", error)
            return _error(503, f"this encoder's agent is down: {error}")
        except Exception:
            self._encoder.counts["failed"] += 1
            logger.exception("an image cannot be encoded")
            return _error(500, "the image cannot be encoded; this encoder's log says why")
        return JSONResponse(_completion(self._encoder.model, params))

    async def models(self, _request: Request) -> Response:
        model = {"id": self._encoder.model, "object": "model", "owned_by": "ec_connector"}
        return JSONResponse({"object": "list", "data": [model]})

    async def health(self, _request: Request) -> Response:
        alive = self._encoder.vision.ready and bool(self._encoder.producer.agent_pid)
        return Response(status_code=200 if alive else 503)

    async def stats(self, _request: Request) -> Response:
        try:
            agent = await run_in_threadpool(self._encoder.producer.stats)
        except AgentLostError:
            agent = {}
        return JSONResponse({"encoder": self._encoder.counts, "agent": agent})


async def _read(request: Request, limit: int) -> dict[str, Any]:
    raw = bytearray()
    async for chunk in request.stream():
        raw += chunk
        if len(raw) > limit:
            raise RequestError(f"the request exceeds {limit} bytes (--max-body)", 413)
    try:
        body = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"the body is no JSON: {error}") from error
    if not isinstance(body, dict):
        raise RequestError("the body is no JSON object")
    return body


def _completion(model: str, params: dict[str, Any]) -> dict[str, Any]:
    message = {"role": "assistant", "content": ""}
    return {
        "id": f"chatcmpl-{uuid.uuid4().hex}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": model,
        "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0},
        "ec_transfer_params": params or None,
    }


def _error(status: int, message: str) -> Response:
    kind = "BadRequestError" if status < 500 else "InternalServerError"
    error = {"message": message, "type": kind, "param": None, "code": status}
    return JSONResponse({"error": error}, status_code=status)
