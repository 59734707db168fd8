# SPDX-License-Identifier: Apache-2.0
"""Counts what a vLLM worker's vision encoder does, where the worker calls it.

vLLM mixes this class into its worker (``--worker-extension-cls``) and calls its
methods over ``/collective_rpc``. The count knows nothing of any connector, so it
can vouch for one. Nothing here imports torch or vLLM.
"""

from __future__ import annotations

from typing import Any

EXTENSION = "ec_connector.demo.probe.EncoderProbe"


class EncoderProbe:
    """Mixed into vLLM's worker, whose ``model_runner`` holds the model."""

    model_runner: Any

    def encoded_pictures(self) -> dict[str, int]:
        """Calls of the encoder, and pictures encoded in them, since this was first called."""
        model = self.model_runner.model
        counts: dict[str, int] | None = getattr(model, "ec_demo_counts", None)
        if counts is None:
            counts = model.ec_demo_counts = {"runs": 0, "pictures": 0}
            model.embed_multimodal = _counting(model.embed_multimodal, counts)
        return counts


def _counting(encode: Any, counts: dict[str, int]) -> Any:
    def counted(*args: Any, **kwargs: Any) -> Any:
        outputs = encode(*args, **kwargs)
        counts["runs"] += 1
        counts["pictures"] += len(outputs)
        return outputs

    return counted
