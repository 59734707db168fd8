# SPDX-License-Identifier: Apache-2.0
"""Photo-like pictures drawn from a number, as real JPEG and PNG files.

A sky with a sun or a moon, hills of seeded outline, water or ground, and grain:
enough structure that no two numbers look alike to a vision encoder.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
from PIL import Image


def draw_picture(number: int, width: int, height: int) -> Image.Image:
    """The picture of that number, RGB, ``width`` x ``height`` pixels."""
    random = np.random.Generator(np.random.PCG64(number))
    across = np.linspace(0.0, 1.0, width)[None, :]
    down = np.linspace(0.0, 1.0, height)[:, None]
    top, bottom = random.uniform(0, 255, (2, 3))
    canvas = top + (bottom - top) * down[..., None] + np.zeros((height, width, 3))
    x, y, size = random.uniform(0.15, 0.85), random.uniform(0.1, 0.4), random.uniform(0.05, 0.14)
    disc = (across - x) ** 2 * (width / height) ** 2 + (down - y) ** 2 < size**2
    canvas[disc] = random.uniform(150, 255, 3)
    for horizon in np.sort(random.uniform(0.35, 0.8, 3)):
        canvas[down > _outline(random, across, float(horizon))] = random.uniform(0, 200, 3)
    canvas += random.normal(0, random.uniform(4, 16), (height, width, 1))
    return Image.fromarray(np.clip(canvas, 0, 255).astype(np.uint8), "RGB")


def _outline(
    random: np.random.Generator, across: npt.NDArray[np.float64], horizon: float
) -> npt.NDArray[np.float64]:
    line = np.full_like(across, horizon)
    for octave in range(1, 6):
        phase, height = random.uniform(0, 2 * np.pi), random.uniform(0.01, 0.12) / octave
        line += height * np.sin(2 * np.pi * octave * across * random.uniform(0.6, 1.6) + phase)
    return line


def write_picture(folder: Path, number: int, width: int, height: int, kind: str) -> Path:
    """Draw and save a picture; ``kind`` is ``"jpeg"`` or ``"png"``. Returns the file."""
    path = folder / f"picture-{number}.{'jpg' if kind == 'jpeg' else kind}"
    draw_picture(number, width, height).save(path, kind.upper())
    return path
