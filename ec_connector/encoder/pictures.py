# SPDX-License-Identifier: Apache-2.0
"""The pictures of a chat request, decoded as vLLM decodes them: the same pixels."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from dataclasses import dataclass
from io import BytesIO
from typing import TYPE_CHECKING, Any

from ec_connector.encoder.errors import RequestError
from ec_connector.proxy.rewrite import media_parts

if TYPE_CHECKING:
    from PIL.Image import Image

MAX_PICTURES = 256
MAX_PIXELS = 178_956_970
# Those that decode here, without another program.
FORMATS = ("BMP", "GIF", "JPEG", "JPEG2000", "PNG", "PPM", "TIFF", "WEBP")
_IN_THE_HASH = ("media_io_kwargs", "mm_processor_kwargs")


@dataclass(frozen=True)
class Picture:
    """One image part: the bytes as sent, and the identifier that the client gave, if any."""

    data: bytes
    uuid: str = ""


def pictures_of(body: Mapping[str, Any]) -> list[Picture]:
    """The images of a request, in the prompt's order.

    Raises:
        RequestError: no chat request, other media, no picture bytes, or options that change
            what encoders compute.
    """
    if not isinstance(body.get("messages"), list):
        raise RequestError("messages is missing or no list: send a chat request")
    for name in _IN_THE_HASH:
        if body.get(name):
            raise RequestError(
                f"{name} of a request is not supported by this encoder; leave it out"
            )
    parts = media_parts(dict(body))
    if len(parts) > MAX_PICTURES:
        raise RequestError(f"{len(parts)} pictures exceed the limit of {MAX_PICTURES}")
    found = []
    for message, number, modality in parts:
        if modality != "image":
            raise RequestError(f"this encoder takes images, not {modality}")
        part = body["messages"][message]["content"][number]
        found.append(_picture(part))
    return found


def _picture(part: Mapping[str, Any]) -> Picture:
    source = part.get("image_url", part.get("input_image"))
    url = source.get("url") if isinstance(source, dict) else source
    uuid = part.get("uuid") or ""
    if not isinstance(url, str) or not isinstance(uuid, str):
        raise RequestError("an image part without an image_url, or a uuid that is no text")
    head, comma, text = url.partition(",")
    if not head.startswith("data:") or not comma or not head.endswith(";base64"):
        raise RequestError(
            f"{url[:60]!r} is not fetched by this encoder: send the picture as a base64 data: URL"
        )
    try:
        return Picture(base64.b64decode(text, validate=True), uuid)
    except (binascii.Error, ValueError) as error:
        raise RequestError(f"an image's data: URL is no base64: {error}") from error


def decode(picture: Picture) -> tuple[Image, bool]:
    """An RGB image, upright, on white where it was transparent; and whether its mode changed.

    Raises:
        RequestError: these bytes are no picture that is known here, or one too large.
    """
    from PIL import Image, ImageOps

    try:
        image = Image.open(BytesIO(picture.data), formats=FORMATS)
        if image.width * image.height > MAX_PIXELS:
            text = f"a picture of {image.width} x {image.height} exceeds {MAX_PIXELS} pixels"
            raise RequestError(text)
        upright: Image.Image = ImageOps.exif_transpose(image)
        upright.load()
        if upright.mode == "RGB":
            return upright, False
        if upright.mode in ("RGBA", "LA", "PA") or "transparency" in upright.info:
            upright = upright.convert("RGBA")
            white = Image.new("RGB", upright.size, (255, 255, 255))
            white.paste(upright, mask=upright.split()[3])
            return white, True
        return upright.convert("RGB"), True
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise RequestError(f"a picture cannot be decoded: {error}") from error
