# SPDX-License-Identifier: Apache-2.0
"""Whether pulling an encoding beats making it again: the arithmetic.

The time to first token of a request with a picture is the decoder's own part (``rest``: the
prompt, the prefill) and either the fetch of the encoding or the encoder run there. Both are
measured with ``rest`` in them, so it cancels. A fetch is what was measured here, and, on a slower
link, the time its bytes take there. So pulling pays while ``fetch + bytes / rate`` is less than
the encoder run, which is a question of the rate.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from ec_connector.bench.stats import median, quantile

SCHEMA = 1


class Trip(msgspec.Struct, frozen=True):
    """One picture, both ways, in seconds.

    ``encode``: the encoder's whole answer. ``pulled`` and ``local``: to the decoder's first
    token, with the encoding announced and without. ``fetch``: the part of ``pulled`` in which
    the decoder's agent got it.
    """

    encode: float
    pulled: float
    fetch: float
    local: float


class Move(msgspec.Struct, frozen=True):
    """The same encodings fetched by one way: seconds of each, and its bytes on average.

    ``link_nbytes`` passed the link, 0 where none is passed. ``refused``: why it cannot be had.
    """

    plane: str
    codec: str
    seconds: list[float] = []
    nbytes: float = 0
    link_nbytes: float = 0
    refused: str = ""

    @property
    def name(self) -> str:
        """For the reader."""
        return self.plane if self.codec == "none" else f"{self.plane}, {self.codec}"


class Comparison(msgspec.Struct, frozen=True):
    """All that was measured. ``notes``: what could not be, and why."""

    trips: list[Trip]
    moves: list[Move]
    command: str = ""
    notes: list[str] = []
    schema: int = SCHEMA


class Parts(msgspec.Struct, frozen=True):
    """Medians in seconds. ``own_encode``: what the decoder saves by pulling, the fetch aside.

    ``spread``: in how wide a range the middle half of ``rest`` or of ``local`` lies, whichever
    is wider. What is no larger than it is not known.
    """

    encode: float
    pulled: float
    fetch: float
    local: float
    rest: float
    own_encode: float
    spread: float

    @property
    def noisy(self) -> bool:
        """Whether the encoder run cannot be told from what else happened meanwhile."""
        return self.own_encode <= self.spread


class Balance(msgspec.Struct, frozen=True):
    """One way, weighed. Seconds, and bytes per second.

    ``first_token`` is with this fetch. ``pays_from``: the slowest link on which pulling still beats
    encoding again; 0: no link is passed; None: it does not even here. ``codec_pays_below``: the
    fastest link on which the codec still beats none; None: there is nothing to compare, or it
    saves no bytes; infinite: on any.
    """

    move: Move
    fetch: float
    first_token: float
    pays_from: float | None
    codec_pays_below: float | None


def parts(trips: Sequence[Trip]) -> Parts:
    """What the trips come down to. Raises ValueError without trips."""
    rests = [trip.pulled - trip.fetch for trip in trips]
    locals_ = [trip.local for trip in trips]
    rest, local = median(rests), median(locals_)
    return Parts(
        encode=median([trip.encode for trip in trips]),
        pulled=median([trip.pulled for trip in trips]),
        fetch=median([trip.fetch for trip in trips]),
        local=local,
        rest=rest,
        own_encode=local - rest,
        spread=max(_middle_half(rests), _middle_half(locals_)),
    )


def _middle_half(values: Sequence[float]) -> float:
    ordered = sorted(values)
    return quantile(ordered, 0.75) - quantile(ordered, 0.25)


def slowest_link(link_nbytes: float, fetch: float, own_encode: float) -> float | None:
    """Bytes per second at which fetching takes as long as encoding; see ``Balance.pays_from``."""
    left = own_encode - fetch
    if left <= 0:
        return None
    return link_nbytes / left


def codec_limit(plain: Move, packed: Move) -> float | None:
    """Bytes per second at which both take as long; see ``Balance.codec_pays_below``."""
    saved = plain.link_nbytes - packed.link_nbytes
    if saved <= 0:
        return None
    cost = median(packed.seconds) - median(plain.seconds)
    return saved / cost if cost > 0 else float("inf")


def on_link(balance: Balance, rest: float, rate: float) -> float:
    """Seconds to the first token on a link of ``rate`` bytes per second."""
    return rest + balance.fetch + balance.move.link_nbytes / rate


def weigh(comparison: Comparison) -> list[Balance]:
    """Every way that was measured. Raises ValueError without trips."""
    whole = parts(comparison.trips)
    measured = [move for move in comparison.moves if move.seconds]
    plain = {move.plane: move for move in measured if move.codec == "none"}
    balances = []
    for move in measured:
        fetch = median(move.seconds)
        limit = None
        if move.codec != "none" and move.plane in plain:
            limit = codec_limit(plain[move.plane], move)
        balances.append(
            Balance(
                move=move,
                fetch=fetch,
                first_token=whole.rest + fetch,
                pays_from=slowest_link(move.link_nbytes, fetch, whole.own_encode),
                codec_pays_below=limit,
            )
        )
    return balances
