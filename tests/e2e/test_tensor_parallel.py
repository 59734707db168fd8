# SPDX-License-Identifier: Apache-2.0
"""A consumer on two ranks: each of them loads what one producer saved.

Two ranks round otherwise than one, so the answers are compared with those of the
same engine when it encodes for itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ec_connector.demo.chat import Answer, Body, ask, chat_body
from ec_connector.demo.measure import FETCHED_ITEMS
from ec_connector.demo.questions import Album
from ec_connector.demo.readings import encoded_pictures, growth, metrics, settled_metrics
from ec_connector.demo.servers import Server
from ec_connector.proxy.rewrite import metadata_only
from tests.e2e.watch import post

PHOTO, SMALL = (640, 480), (224, 224)


def test_two_ranks_load_what_one_producer_saved(
    fleet: Any,
    album: Album,
    encode: Callable[[Server, Body], Body],
    decode: Callable[[Server, Body, Body], Answer],
) -> None:
    """Every kind of request is answered as when the consumer encodes for itself."""
    producer, consumer = fleet.need("producer", "consumer-tp2")
    encoded_pictures(consumer.url)
    a, b, c, d, e, f = (album.photo(*size) for size in (PHOTO, SMALL) * 3)
    asked = [
        chat_body([], "Name a river."),
        chat_body([a], "What is to be seen?"),
        chat_body([b], "What is to be seen?", max_tokens=1),
        chat_body([c, d], "Compare them.", max_tokens=48),
        {**chat_body([e, e], "Compare them."), "stream": False},
    ]
    bare = chat_body([f], "What is to be seen?")
    before = metrics(consumer.url)

    # All of them first: with both cores spinning in the consumer, the producer's agent may be late.
    announcements = [encode(producer, body) for body in asked]
    announced = encode(producer, bare)
    loaded = [decode(consumer, body, own) for body, own in zip(asked, announcements, strict=True)]
    sent, replaced = metadata_only(bare, announced)
    assert replaced == 1
    loaded.append(decode(consumer, sent, announced))

    assert encoded_pictures(consumer.url) == 0
    after = settled_metrics(consumer.url, wanted=FETCHED_ITEMS, above=5)
    assert growth(before, after, FETCHED_ITEMS) == 6

    for cache in ("encoder", "mm", "prefix"):
        post(f"{consumer.url}/reset_{cache}_cache")
    alone = [ask(consumer.url, body) for body in [*asked, bare]]
    assert encoded_pictures(consumer.url) == 6
    assert [one.status for one in (*loaded, *alone)] == [200] * 2 * len(alone)
    assert [one.token_ids for one in loaded] == [one.token_ids for one in alone]
