# SPDX-License-Identifier: Apache-2.0
"""A graph's output as the rows that a consumer expects: two axes, the model's dtype, finite."""

from __future__ import annotations

from typing import Any

import numpy as np

from ec_connector.stage.errors import StageError

DTYPES = ("bfloat16", "float16", "float32")


def as_rows(output: np.ndarray[Any, Any], dtype: str) -> np.ndarray[Any, Any]:
    """``[1, rows, width]`` or ``[rows, width]`` as ``[rows, width]`` of ``dtype``.

    bfloat16 comes as ``uint16``, rounded to the nearest, ties to even.

    Raises:
        StageError: ``bad_output``, another shape or type, or numbers that are not finite,
            also once they are of ``dtype``.
    """
    if output.ndim == 3 and output.shape[0] == 1:
        output = output[0]
    if output.ndim != 2 or output.dtype.kind != "f" or 0 in output.shape:
        raise StageError(
            "bad_output",
            f"the graph gave {output.dtype.str} {list(output.shape)} for one image; "
            "rows of floating-point numbers are expected, [rows, width] or [1, rows, width]",
        )
    with np.errstate(over="ignore"):
        rows = output.astype(np.float16 if dtype == "float16" else np.float32)
        if dtype == "bfloat16":
            bits = rows.view(np.uint32)
            bits += 0x7FFF + ((bits >> 16) & 1)
            bits &= np.uint32(0xFFFF0000)
    # One NaN in a cache spoils each answer that uses it, and nobody sees why.
    if not np.isfinite(rows).all() or not np.isfinite(output).all():
        raise StageError("bad_output", f"the graph gave numbers that are not finite in {dtype}")
    if dtype == "bfloat16":
        return (rows.view(np.uint32) >> 16).astype(np.uint16)
    return rows
