# SPDX-License-Identifier: Apache-2.0
"""The window of a connection: it follows rate x round trip, up to a limit."""

from __future__ import annotations

from ec_connector.protocol.flow import Flow

MIB = 1024 * 1024


def settle(flow: Flow, rate: float, round_trip: float, rounds: int = 20) -> int:
    """Bytes of the window after so many windows over a link of ``rate`` bytes a second."""
    window = flow.window
    flow.answered(round_trip)
    for _ in range(rounds):
        # A window takes as long as the link needs for it, and no less than a round trip.
        window = flow.passed(window, max(window / rate, round_trip))
    return window


def test_far_and_fast_needs_more() -> None:
    """10 Gbit/s with 40 ms there and back hold 50 MB."""
    product = 1.25e9 * 0.04
    assert product <= settle(Flow(8 * MIB, 256 * MIB), 1.25e9, 0.04) <= 4 * product


def test_near_stays() -> None:
    """Where a window takes longer than two round trips anyway, more would only queue."""
    assert settle(Flow(8 * MIB, 256 * MIB), 2e9, 0.0003) == 8 * MIB


def test_never_beyond_the_limit() -> None:
    """However far and fast, and however large it was to begin with."""
    assert settle(Flow(8 * MIB, 20 * MIB), 1e12, 1.0) == 20 * MIB
    assert Flow(30 * MIB, 20 * MIB).window == 20 * MIB


def test_nothing_is_known_without_an_answer() -> None:
    """Bytes from a peer that was never timed change nothing."""
    flow = Flow(8 * MIB, 256 * MIB)
    assert flow.passed(8 * MIB, 0.0) == 8 * MIB


def test_an_answer_that_waited_is_no_round_trip() -> None:
    """A parked question takes as long as the encoder; the quickest answer counts."""
    flow = Flow(8 * MIB, 256 * MIB)
    flow.answered(0.001)
    flow.answered(5.0)
    assert flow.passed(8 * MIB, 0.01) == 8 * MIB


def test_an_older_transfer_does_not_shrink_it() -> None:
    """Transfers that began with a smaller window learn the larger one."""
    flow = Flow(MIB, 256 * MIB)
    flow.answered(1.0)
    assert flow.passed(4 * MIB, 0.5) == 8 * MIB
    assert flow.passed(MIB, 0.5) == 8 * MIB
    assert flow.passed(MIB, 9.0) == 8 * MIB
