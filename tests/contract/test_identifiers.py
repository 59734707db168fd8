# SPDX-License-Identifier: Apache-2.0
"""An encoder that is not vLLM names and decodes pictures as the installed vLLM does."""

from __future__ import annotations

from io import BytesIO

import numpy as np
import pytest

from ec_connector.encoder.identifiers import find_hasher, identifier
from ec_connector.encoder.pictures import Picture, decode

pytestmark = pytest.mark.contract

hashing = pytest.importorskip("vllm.multimodal.hasher", reason="needs a vLLM")
media = pytest.importorskip("vllm.multimodal.media.image", reason="needs a vLLM")
Image = pytest.importorskip("PIL.Image", reason="vLLM brings Pillow")

KINDS = [
    ("RGB", "PNG"), ("RGB", "JPEG"), ("RGB", "BMP"), ("RGB", "WEBP"), ("RGBA", "PNG"),
    ("L", "PNG"), ("L", "JPEG"), ("LA", "PNG"), ("P", "PNG"), ("P", "GIF"), ("1", "PNG"),
    ("CMYK", "JPEG"), ("I;16", "PNG"),
]  # fmt: skip


def drawn(mode: str, kind: str, **options: object) -> bytes:
    """A picture file with something in it, transparent in places where its mode has that."""
    noise = np.random.default_rng(7).integers(0, 256, (13, 17, 4), np.uint8)
    file = BytesIO()
    source = Image.fromarray(noise, "RGBA")
    picture = Image.new(mode, (17, 13), 700) if mode == "I;16" else source.convert(mode)
    picture.save(file, kind, **options)
    return file.getvalue()


def check(data: bytes, algorithm: str) -> None:
    """Same identifier and same pixels as vLLM's."""
    theirs = media.ImageMediaIO().load_bytes(data)
    want = hashing.MultiModalHasher.hash_kwargs(algorithm, model_id="acme/tiny-vl", image=theirs)
    image, converted = decode(Picture(data))
    hasher = find_hasher(algorithm)
    assert identifier(hasher, "acme/tiny-vl", data, converted=converted) == want
    assert np.array_equal(np.asarray(image), np.asarray(theirs.media))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(("mode", "kind"), KINDS)
@pytest.mark.parametrize("algorithm", ["blake3", "sha256", "sha512"])
def test_as_vllm(mode: str, kind: str, algorithm: str) -> None:
    """Each kind of file and pixel, by each hash."""
    check(drawn(mode, kind), algorithm)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("turned", range(1, 9))
def test_turned_pictures(turned: int) -> None:
    """As a camera held otherwise writes them."""
    exif = Image.Exif()
    exif[0x0112] = turned
    check(drawn("RGB", "JPEG", exif=exif), "blake3")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("mode", ["P", "L", "RGB"])
def test_one_transparent_colour(mode: str) -> None:
    """Transparency that stands beside the pixels."""
    check(drawn(mode, "PNG", transparency=(1, 2, 3) if mode == "RGB" else 3), "blake3")
