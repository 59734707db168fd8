# SPDX-License-Identifier: Apache-2.0
"""The table that ``ec-connector ping`` prints."""

from __future__ import annotations

from rich.filesize import decimal
from rich.table import Table

from ec_connector.cli.ping import Fit, Reply
from ec_connector.cli.tables import duration, share
from ec_connector.protocol.texts import harmless


def table(reply: Reply, fits: list[Fit]) -> Table:
    """What is known of the peer, a row each; every factor of its fingerprint by name."""
    pong = reply.pong
    rows = Table("peer", harmless(reply.address))
    rows.add_row("connected after", duration(reply.connected))
    fastest, slowest = min(reply.round_trips), max(reply.round_trips)
    rows.add_row(
        "round trip",
        f"{duration(reply.round_trip)} (median of {len(reply.round_trips)}; "
        f"{duration(fastest)} to {duration(slowest)})",
    )
    if pong.withheld:
        rows.add_row("what it is", "withheld")
        return rows
    rows.add_row("wire version", str(pong.connector_version))
    rows.add_row("compatibility hash", harmless(pong.compatibility_hash) or "none")
    for factor, value in sorted(pong.fingerprint.items()):
        rows.add_row(f"factor {harmless(factor)}", harmless(value))
    rows.add_row("planes", ", ".join(map(harmless, pong.planes)))
    rows.add_row("codecs", ", ".join(map(harmless, pong.codecs)))
    used = pong.blocks - pong.blocks_free
    rows.add_row(
        "pool",
        f"{share(used, pong.blocks)} of {decimal(pong.blocks * pong.block_bytes)}, "
        f"{pong.items} items, {pong.blocks_pinned} blocks pinned",
    )
    rows.add_row("at work", f"{pong.grants} granted, {pong.parked} waiting for saves")
    for fit in fits:
        text = f"{fit.factor} differs" if fit.factor else "yes"
        rows.add_row(f"fits agent {fit.agent_pid}", text)
    if not fits:
        rows.add_row("fits", "not compared: no other agent here knows what it is")
    return rows
