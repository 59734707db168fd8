# SPDX-License-Identifier: Apache-2.0
"""The books of an agent: the latest transfers one by one, and all of them summed."""

from __future__ import annotations

import ipaddress
from collections import OrderedDict, defaultdict, deque
from typing import Final

from ec_connector.protocol.account import DELIVERED, LOOPBACK, Account
from ec_connector.protocol.local import PeerSums, Transfer

KEPT: Final = 1024
"""Transfers kept one by one."""
MAX_PEERS: Final = 256
"""Peers whose sums are kept; the one not heard of for longest makes way."""
_GOOD: Final = (DELIVERED, "done", "sent_whole")

Links = dict[str, dict[str, float]]
"""Sums by name, and in each by ``"link role label"``: ``transfers`` by outcome, ``bytes`` by part,
``seconds`` by stage."""


class Ledger:
    """Takes accounts that are over, and adds them up.

    Args:
        link: what the links of this agent are called, except those within the host.
        own_hosts: by which peers of this host may be known, besides the loopback addresses.
    """

    def __init__(self, link: str, own_hosts: frozenset[str] = frozenset()) -> None:
        self._link = link
        self._own_hosts = own_hosts
        self._recent: deque[Transfer] = deque(maxlen=KEPT)
        self._peers: OrderedDict[tuple[str, str], PeerSums] = OrderedDict()
        self._sums = {
            name: defaultdict[str, float](float) for name in ("transfers", "bytes", "seconds")
        }
        self._booked = 0

    def book(self, account: Account, now: float) -> None:
        """A transfer is over."""
        account.end(now)
        self._booked += 1
        link = LOOPBACK if self._is_here(account) else self._link
        outcome = account.outcome.replace(" ", "_")
        of = f"{link} {account.role} "
        self._sums["transfers"][of + outcome] += 1
        parts = {
            "header_out": account.header_out,
            "header_in": account.header_in,
            "payload_out": account.payload_out,
            "payload_in": account.payload_in,
        }
        for part, nbytes in parts.items():
            self._sums["bytes"][of + part] += nbytes
        for stage, seconds in account.seconds.items():
            self._sums["seconds"][of + stage] += seconds
        transfer = Transfer(
            number=self._booked,
            item=account.item,
            peer=account.peer,
            role=account.role,
            link=link,
            plane=account.plane,
            codec=account.codec,
            outcome=outcome,
            nbytes=account.nbytes,
            seconds=dict(account.seconds),
            total=account.total,
            **parts,
        )
        self._recent.append(transfer)
        self._add_to_peer(transfer)

    def recent(self, after: int = 0) -> list[Transfer]:
        """The latest transfers, oldest first, of those with a number above ``after``."""
        return [transfer for transfer in self._recent if transfer.number > after]

    def peers(self) -> list[PeerSums]:
        """Sums by peer and role, the one heard of last at the end."""
        return list(self._peers.values())

    def links(self) -> Links:
        """Everything summed."""
        return {name: dict(sums) for name, sums in self._sums.items()}

    def _is_here(self, account: Account) -> bool:
        host = account.host
        return account.plane == "memory" or _is_loopback(host) or host in self._own_hosts

    def _add_to_peer(self, transfer: Transfer) -> None:
        name = (transfer.peer, transfer.role)
        sums = self._peers.pop(name, None) or PeerSums(
            transfer.peer, transfer.role, transfer.link, transfer.plane
        )
        self._peers[name] = sums
        sums.link, sums.plane = transfer.link, transfer.plane or sums.plane
        sums.transfers += 1
        sums.failed += transfer.outcome not in _GOOD
        sums.bytes_in += transfer.header_in + transfer.payload_in
        sums.bytes_out += transfer.header_out + transfer.payload_out
        sums.seconds += transfer.total
        if len(self._peers) > MAX_PEERS:
            self._peers.popitem(last=False)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
