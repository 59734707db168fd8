# SPDX-License-Identifier: Apache-2.0
"""Turns one item of a request into a wish: what is needed, and where it may be had."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ec_connector.engine.announced import BadAnnouncement, read_source
from ec_connector.engine.claims import Want
from ec_connector.engine.keys import why_not_shared


def wish(
    feature: Any, params: Any, dtype: str, *, has_media: bool, in_pool: Callable[[str], bool]
) -> Want:
    """The wish for one of vLLM's ``mm_features``.

    Args:
        feature: the item.
        params: the request's ``ec_transfer_params``, as the client sent them.
        dtype: the model's, without ``torch.``.
        has_media: this engine could encode the item itself.
        in_pool: whether an item may be in this engine's own pool.
    """
    key, rows = feature.identifier, feature.mm_position.get_num_embeds()
    want = Want(key, rows, feature.modality, has_media, ask=False)
    try:
        source = read_source(params, key, rows, dtype)
    except BadAnnouncement as error:
        return Want(key, rows, feature.modality, has_media, None, "mismatch", str(error))
    private = why_not_shared(key)
    if private:
        if source is None and has_media:
            return want
        text = "its identifier means nothing outside one engine"
        return Want(key, rows, feature.modality, has_media, source, private, text)
    ask = source is not None or not has_media or in_pool(key)
    return Want(key, rows, feature.modality, has_media, source, ask=ask)
