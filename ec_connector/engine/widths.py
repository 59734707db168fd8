# SPDX-License-Identifier: Apache-2.0
"""How many columns an encoder output has, as far as this engine can know."""

from __future__ import annotations

from collections.abc import Mapping


class Widths:
    """Checks row widths. A wrong one would end the engine in the middle of a step.

    Args:
        measured: columns by modality, where this engine's encoder was tried.
        possible: columns that the model's configuration allows; empty: unknown.
    """

    def __init__(self, measured: Mapping[str, int], possible: frozenset[int]) -> None:
        self._measured = dict(measured)
        self._possible = possible

    def fault(self, modality: str, width: int) -> str:
        """What is wrong with this width, "" if nothing is.

        Where nothing was measured, the first width that the model allows is
        from then on the only one for its modality.
        """
        known = self._measured.get(modality)
        if known is not None and width != known:
            return f"its rows have {width} columns, but this model's {modality} rows {known}"
        if known is None and self._possible and width not in self._possible:
            allowed = " or ".join(map(str, sorted(self._possible)))
            return f"its rows have {width} columns, but this model takes {allowed}"
        self._measured.setdefault(modality, width)
        return ""
