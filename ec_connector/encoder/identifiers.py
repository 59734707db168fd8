# SPDX-License-Identifier: Apache-2.0
"""The identifier that vLLM gives an image, without vLLM: both sides must come to the same.

It is a digest over the model's name and the picture's bytes as they were sent, each value with
its length and each container with its kind before it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from typing import Any

from ec_connector.errors import ConfigError

_SEQUENCE, _MAPPING, _LEAF = b"\x01", b"\x02", b"\x03"
_WHITE = (255, 255, 255)


def find_hasher(name: str) -> Callable[[], Any]:
    """The hash of that name, as ``--mm-hasher-algorithm`` of vLLM has it.

    Raises:
        ConfigError: another name, or blake3 is not installed.
    """
    if name in ("sha256", "sha512"):
        return lambda: hashlib.new(name)
    if name != "blake3":
        raise ConfigError(f"--mm-hasher-algorithm {name!r}: give blake3, sha256 or sha512")
    try:
        from blake3 import blake3
    except ImportError as error:
        raise ConfigError(
            f"blake3 cannot be imported ({error}): pip install 'ec-connector[encode-server]'"
        ) from error
    hasher: Callable[[], Any] = blake3
    return hasher


def identifier(hasher: Callable[[], Any], model: str, data: bytes, *, converted: bool) -> str:
    """Hex digest for an image sent as ``data`` to a model of that name.

    ``converted``: the picture was not RGB; what it was turned into is then part of it.
    """
    image: Any = {"io_config": _RGB_ON_WHITE, "data": data} if converted else data
    digest = hasher()
    # The image's own name stands before its value, and that of its kind once more within.
    for chunk in (*_framed(b"image"), _LEAF, *_item("image", image), *_item("model_id", model)):
        digest.update(chunk)
    return str(digest.hexdigest())


_RGB_ON_WHITE = {"image_mode": "RGB", "rgba_background_color": _WHITE}


def _framed(chunk: bytes) -> Iterator[bytes]:
    yield len(chunk).to_bytes(8, "little")
    yield chunk


def _item(name: str, value: Any) -> Iterator[bytes]:
    yield from _framed(name.encode())
    yield from _value(value)


def _value(value: Any) -> Iterator[bytes]:
    if isinstance(value, dict):
        yield _MAPPING
        yield len(value).to_bytes(8, "little")
        for name, inner in value.items():
            yield from _item(name, inner)
    elif isinstance(value, tuple):
        yield _SEQUENCE
        yield len(value).to_bytes(8, "little")
        for inner in value:
            yield from _value(inner)
    elif isinstance(value, int):
        yield _LEAF
        yield from _framed(value.to_bytes(8, "little", signed=True))
    else:
        yield _LEAF
        yield from _framed(value.encode() if isinstance(value, str) else value)
