# SPDX-License-Identifier: Apache-2.0
"""Each test's report says what it attempted; ``tests/conftest.py`` adds them up."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.security.hostile import TRIED


@pytest.fixture(autouse=True)
def attempts_are_reported(request: pytest.FixtureRequest) -> Iterator[None]:
    """Whatever process the test ran in."""
    TRIED.clear()
    yield
    request.node.user_properties += [("attempt", list(one)) for one in TRIED]
