# SPDX-License-Identifier: Apache-2.0
"""What fuzzing found worth keeping, and random bytes besides: without the fuzzer."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from tests.fuzz.__main__ import CORPUS, GOLDEN
from tests.fuzz.targets import TARGETS


@pytest.mark.parametrize("name", TARGETS)
def test_the_corpus(name: str) -> None:
    """Every input, and every frame of ``tests/golden``, is dealt with by its target."""
    for path in [*(CORPUS / name).glob("*"), *GOLDEN.glob("*.bin")]:
        TARGETS[name](path.read_bytes())


@pytest.mark.property
@pytest.mark.parametrize("name", TARGETS)
def test_random_bytes(name: str) -> None:
    """The fuzzer's little sister, in each run of the tests."""

    @settings(max_examples=min(300, settings().max_examples))
    @given(st.binary(max_size=400))
    def run(data: bytes) -> None:
        TARGETS[name](data)

    run()
