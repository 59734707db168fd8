# SPDX-License-Identifier: Apache-2.0
"""The demo's options. What it needs to run is not needed to read them."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from ec_connector.demo.chat import MIME_TYPES


def parse_options(argv: Sequence[str] | None) -> argparse.Namespace:
    """The options. Wrong ones end the process with status 2, ``--help`` with 0."""
    parser = argparse.ArgumentParser(
        prog="ec-connector demo",
        description="Run a real producer/consumer pair on tiny models, beside an ordinary vLLM.",
    )
    parser.add_argument("--image", metavar="FILE", type=_picture, action="append", default=[],
        help="ask about this JPEG or PNG too (may be repeated)")  # fmt: skip
    parser.add_argument("--json", action="store_true",
        help="print the result as JSON; everything else goes to standard error")  # fmt: skip
    parser.add_argument("--keep", metavar="DIR", type=_new_folder,
        help="work in this new folder and leave logs and models there")  # fmt: skip
    return parser.parse_args(argv)


def _picture(text: str) -> Path:
    path = Path(text)
    if path.suffix.lower() not in MIME_TYPES:
        raise argparse.ArgumentTypeError(f"{text!r} is not named like a JPEG or PNG file")
    try:
        from PIL import Image, UnidentifiedImageError
    except ModuleNotFoundError:
        return path  # the demo will say that it lacks this
    try:
        with Image.open(path) as picture:
            picture.verify()
    except (OSError, UnidentifiedImageError, SyntaxError) as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not a picture: {error}") from error
    return path


def _new_folder(text: str) -> Path:
    path = Path(text).absolute()
    try:
        path.mkdir(parents=True)
    except OSError as error:
        raise argparse.ArgumentTypeError(f"cannot make the folder {text!r}: {error}") from error
    return path
