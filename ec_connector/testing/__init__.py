# SPDX-License-Identifier: Apache-2.0
"""For the tests of whoever uses this package: a producer without vLLM, and faults on demand.

pytest finds the fixture by itself once the package is installed::

    def test_my_consumer(fake_producer):
        rows = numpy.ones((4, 8), numpy.float32)
        announcement = fake_producer.put("an image", rows)
        ...  # let your consumer fetch it
        fake_producer.kill()
        ...  # and see what it does without its producer

:class:`FakeProducer` is a real agent process behind real sockets. For the state
machines alone there are :class:`Pair`, a producer and a consumer face to face,
and :class:`Transport` between them, which holds, drops, duplicates, reorders
and delays what it is told to, by a clock that only the test moves.

Importing this module loads nothing else of the package: pytest does so at each start.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from ec_connector.testing.clock import ManualClock
    from ec_connector.testing.fake import FakeProducer
    from ec_connector.testing.pair import Pair
    from ec_connector.testing.transport import Channel, Transport

__all__ = ["Channel", "FakeProducer", "ManualClock", "Pair", "Transport", "fake_producer"]

# No __dir__ beside it: pytest looks at every name that a plugin lists.
_HOME_OF = {
    "Channel": "ec_connector.testing.transport",
    "FakeProducer": "ec_connector.testing.fake",
    "ManualClock": "ec_connector.testing.clock",
    "Pair": "ec_connector.testing.pair",
    "Transport": "ec_connector.testing.transport",
}


def __getattr__(name: str) -> Any:
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


@pytest.fixture
def fake_producer() -> Iterator[FakeProducer]:
    """A :class:`FakeProducer` with a pool of 64 MiB on this machine, for one test.

    With other settings: ``with FakeProducer(port=14579, ...) as producer:``.
    """
    from ec_connector.testing.fake import FakeProducer

    with FakeProducer(pool_size="64MiB") as producer:
        yield producer
