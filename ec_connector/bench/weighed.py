# SPDX-License-Identifier: Apache-2.0
"""A comparison of pulling and encoding again, as tables and as a picture."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from ec_connector.bench.results import show_size
from ec_connector.bench.weigh import Balance, Comparison, Parts, on_link, parts, weigh

_PLOTTED_RATES = [10 ** (exponent / 20) for exponent in range(5 * 20, 10 * 20 + 1)]
"""1 Mbit/s to 100 Gbit/s, in bytes per second times 8."""


def show(console: Console, comparison: Comparison) -> None:
    """Parts, ways and notes. Raises ValueError without trips."""
    whole = parts(comparison.trips)
    _parts(console, whole, len(comparison.trips))
    balances = weigh(comparison)
    _ways(console, whole, balances)
    if whole.noisy:
        console.print(
            f"no answer: the encoder run, {_ms(whole.own_encode)} by the medians, is lost in times "
            f"that differ by {_ms(whole.spread)} from one to the next (middle half); try a quieter "
            f"machine, more --rounds, larger pictures"
        )
    else:
        for balance in balances:
            console.print(sentence(balance, whole))
    for note in comparison.notes:
        console.print(f"note: {note}")


def sentence(balance: Balance, whole: Parts) -> str:
    """What a way comes to, in words."""
    name = balance.move.name
    if balance.pays_from is None:
        return (
            f"{name}: does not pay, not even here: the fetch takes {_ms(balance.fetch)}, "
            f"encoding again {_ms(whole.own_encode)}"
        )
    if not balance.pays_from:
        return f"{name}: pays; no link is passed"
    return f"{name}: stops paying below {show_rate(balance.pays_from)}"


def show_rate(rate: float) -> str:
    """Bytes per second as bits per second."""
    bits = 8 * rate
    for unit, size in (("Gbit/s", 1e9), ("Mbit/s", 1e6)):
        if bits >= size:
            return f"{bits / size:.3g} {unit}"
    return f"{bits / 1e3:.3g} kbit/s"


def _parts(console: Console, whole: Parts, count: int) -> None:
    table = Table(title=f"time to first token (ms), medians of {count}", title_justify="left")
    for heading in ("", "in all", "prompt and prefill", "encoding", "fetch"):
        table.add_column(heading, justify="right" if heading else "left")
    pulled = [whole.pulled, whole.rest, None, whole.fetch]
    local = [whole.local, whole.rest, whole.own_encode, None]
    for name, row in (("pulled", pulled), ("encoded again by the decoder", local)):
        table.add_row(name, *("" if seconds is None else _number(seconds) for seconds in row))
    console.print(table)
    console.print(
        f"before a pull: the encoder's answer, {_ms(whole.encode)} with its prompt and its HTTP"
    )


def _ways(console: Console, whole: Parts, balances: Sequence[Balance]) -> None:
    table = Table(title="each way, fetched here", title_justify="left")
    for heading in (
        "", "item", "on the link", "fetch", "first token", "to encoding again", "pays from",
        "codec pays below",
    ):  # fmt: skip
        table.add_column(heading, justify="right" if heading else "left")
    for balance in balances:
        move, limit = balance.move, balance.codec_pays_below
        below = "" if move.codec == "none" else "never" if limit is None else "any link"
        if limit is not None and math.isfinite(limit):
            below = show_rate(limit)
        pays = (
            "?"
            if whole.noisy
            else "never"
            if balance.pays_from is None
            else show_rate(balance.pays_from)
        )
        table.add_row(
            move.name,
            show_size(round(move.nbytes)),
            show_size(round(move.link_nbytes)) if move.link_nbytes else "",
            _number(balance.fetch),
            _number(balance.first_token),
            f"{balance.first_token / whole.local:.2f}",
            "any link" if balance.pays_from == 0 and not whole.noisy else pays,
            below,
        )
    console.print(table)


def plot(comparison: Comparison, path: Path) -> None:
    """Time to first token over the rate of the link, to a PNG or SVG, by the file's name.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: no trips, or a kind of file that matplotlib does not know.
    """
    whole, balances = parts(comparison.trips), weigh(comparison)
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 5.5))
    bits = [8 * rate for rate in _PLOTTED_RATES]
    axes.axhline(1e3 * whole.local, color="black", linestyle="--", label="encoded again")
    for balance in balances:
        times = [1e3 * on_link(balance, whole.rest, rate) for rate in _PLOTTED_RATES]
        axes.plot(bits, times, label=f"pulled, {balance.move.name}")
    axes.set(xscale="log", yscale="log", xlabel="link (bit/s)", ylabel="time to first token (ms)")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)


def _number(seconds: float) -> str:
    return f"{1e3 * seconds:.3g}" if seconds < 0.1 else f"{1e3 * seconds:.0f}"


def _ms(seconds: float) -> str:
    return f"{_number(seconds)} ms"
