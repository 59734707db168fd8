# SPDX-License-Identifier: Apache-2.0
"""A run as a picture: time against size."""

from __future__ import annotations

from pathlib import Path

from ec_connector.bench.results import LABELS, LIMITS, OURS, THEIRS, Run, show_size


def plot(run: Run, path: Path) -> None:
    """Draw medians over sizes to a PNG or SVG, by the file's name.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: a kind of file that matplotlib does not know.
    """
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 6))
    for subject in (*OURS, *THEIRS, *LIMITS):
        cells = [cell for nbytes in run.sizes() if (cell := run.cell(subject, nbytes))]
        if not cells:
            continue
        sizes = [cell.nbytes for cell in cells]
        times = [1e3 * cell.times.median for cell in cells]
        style = "--" if subject in LIMITS else "-"
        (line,) = axes.plot(sizes, times, style, marker="o", markersize=4)
        axes.annotate(
            LABELS[subject],
            (sizes[-1], times[-1]),
            xytext=(6, 0),
            textcoords="offset points",
            color=line.get_color(),
            va="center",
            fontsize=8,
        )
    axes.set(xscale="log", yscale="log", xlabel="size", ylabel="median time (ms)")
    axes.set_xticks(run.sizes(), [show_size(nbytes) for nbytes in run.sizes()])
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.set_xlim(right=run.sizes()[-1] * 12)
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)
